"""Policies: the metric, the promise of a step, what is learned, and what goes wrong."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from models import F64, assert_close, draw, pair
from policy_worlds import Bandit, Corridor, Walk, small
from torch import Tensor, nn

import natgrad as ng
from natgrad import policy as pg
from natgrad.policy.actor import Actor
from natgrad.policy.heads import choose_head


def net(inputs: int, outputs: int, seed: int = 0, dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


class WithStd(nn.Module):
    """Means and log stds that depend on the state, as a pair."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.inner, self.d = net(2, 2 * d), d

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.inner(x)
        return found[:, : self.d], 0.3 * found[:, self.d :]


class Shared(nn.Module):
    """A trunk with two heads."""

    def __init__(self, outputs: int, column: bool = True) -> None:
        super().__init__()
        self.trunk, self.act, self.value = net(2, 3), nn.Linear(3, outputs).double(), nn.Linear(3, 1).double()
        self.column = column

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(x).tanh()
        value = self.value(features)
        return self.act(features), value if self.column else value.squeeze(1)


BOX = spaces.Box(-1, 1, (2,), np.float64)
CASES: dict[str, tuple[Any, nn.Module, Any]] = {
    "discrete": (spaces.Discrete(3, start=4), net(2, 3), None),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), net(2, 5), None),
    "multi-binary": (spaces.MultiBinary(3), net(2, 3), None),
    "Gaussian": (BOX, net(2, 2), None),
    "Gaussian, std by state": (BOX, net(2, 4), None),
    "Gaussian, a pair": (BOX, WithStd(2), None),
    "squashed": (BOX, net(2, 2), pg.SquashedGaussianHead(log_std=-0.5)),
    "squashed, std by state": (BOX, WithStd(2), pg.SquashedGaussianHead()),
    "shared critic": (spaces.Discrete(3), Shared(3), None),
}


def enumerate_draws(head: pg.Head, rows: Tensor) -> tuple[list[Tensor], Tensor]:
    """All draws, or Gauss-Hermite nodes for Gaussians (exact for scores of second order), with their probabilities."""
    if isinstance(head, pg.GaussianHead):
        nodes, weights = np.polynomial.hermite_e.hermegauss(4)
        d = head.dimensions
        mean, log_std = rows[:, :d], rows[:, d:]
        points = [torch.tensor(z, dtype=F64) for z in itertools.product(nodes, repeat=d)]
        shares = [np.prod(w) for w in itertools.product(weights / weights.sum(), repeat=d)]
        return [mean + log_std.exp() * z for z in points], torch.tensor(shares).unsqueeze(1).expand(-1, len(rows))
    if isinstance(head, pg.DiscreteHead):
        draws = [torch.full((len(rows),), i) for i in range(head.width)]
    else:
        sizes = head.sizes if isinstance(head, pg.MultiDiscreteHead) else [2] * head.width
        draws = [torch.tensor(c).expand(len(rows), -1) for c in itertools.product(*(range(s) for s in sizes))]
        draws = draws if isinstance(head, pg.MultiDiscreteHead) else [one.to(F64) for one in draws]
    return draws, torch.stack([head.log_prob(rows, one).exp() for one in draws])


@pytest.mark.parametrize("name", CASES)
def test_fisher_product_is_that_of_enumerated_scores(name: str):
    space, policy, head = CASES[name]
    actor = Actor(policy, choose_head(space, head), torch.zeros(2, dtype=F64))
    params, states = ng.trainable(actor), draw(3, 2)
    operator = ng.fisher(actor, actor.head.family).at(params, states)
    draws, shares = enumerate_draws(actor.head, actor(states).detach())
    assert_close(shares.sum(0), torch.ones(3, dtype=F64))
    expected = torch.zeros(operator.shape, dtype=F64)
    for one, share in zip(draws, shares, strict=True):
        for i in range(len(states)):
            log_prob = actor.head.log_prob(actor(states[i : i + 1]), one[i : i + 1])
            found = torch.autograd.grad(
                log_prob.sum(), list(params.values()), materialize_grads=True, allow_unused=True
            )
            score = torch.cat([g.flatten() for g in found])
            expected += share[i].detach() * torch.outer(score, score) / len(states)
    v = draw(operator.size, seed=3)
    assert (operator @ v - expected @ v).abs().max() < 1e-8
    assert_close(operator.dense(), expected)


@pytest.mark.parametrize("name", CASES)
def test_entropy_and_kl_are_those_of_the_distribution(name: str):
    space, policy, head = CASES[name]
    actor = Actor(policy, choose_head(space, head), torch.zeros(2, dtype=F64))
    rows, other = actor(draw(4, 2)).detach(), actor(draw(4, 2, seed=5)).detach()
    draws, shares = enumerate_draws(actor.head, rows)
    log_p = torch.stack([actor.head.log_prob(rows, one) for one in draws])
    log_q = torch.stack([actor.head.log_prob(other, one) for one in draws])
    assert_close(actor.head.entropy(rows), -(shares * log_p).sum(0))
    assert_close(actor.head.kl(rows, other), (shares * (log_p - log_q)).sum(0))


@pytest.mark.parametrize("kind", [ng.TRPO, ng.NaturalPolicyGradient, pg.acktr])
def test_a_logit_of_minus_infinity_rules_an_action_out(kind: Any):
    policy = nn.Sequential(nn.Linear(2, 2), nn.ConstantPad1d((1, 0), -torch.inf))  # the first of three arms
    agent = small(Bandit(), policy, kind, entropy_weight=0.01)
    history = agent.learn(256)
    assert agent.failures == 0
    assert all(0 < number < 0.6931472 for number in history["entropy"])
    assert history["return"][-1] > history["return"][0]
    assert int(agent.rollout.draws.min()) == 1
    assert agent.predict([1.0, 0.0])[0] == 2


def kl_before_to_now(agent: Any) -> float:
    """KL of the last update, from torch.distributions and the batch alone."""
    old, new = agent.rollout.rows.double(), agent.actor(agent.rollout.states).detach().double()
    if isinstance(agent.head, pg.GaussianHead):
        d = agent.head.dimensions
        p, q = (torch.distributions.Normal(r[:, :d], r[:, d:].exp()) for r in (old, new))
    elif isinstance(agent.head, pg.MultiBinaryHead):
        p, q = torch.distributions.Bernoulli(logits=old), torch.distributions.Bernoulli(logits=new)
    else:
        sizes = getattr(agent.head, "sizes", [agent.head.width])
        pairs = zip(old.split(sizes, 1), new.split(sizes, 1), strict=True)
        kinds = torch.distributions.Categorical
        parts = [torch.distributions.kl_divergence(kinds(logits=a), kinds(logits=b)) for a, b in pairs]
        return float(torch.stack(parts).sum(0).mean())
    return float(torch.distributions.kl_divergence(p, q).sum(1).mean())


SPACES = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(2),
    "box": spaces.Box(-1, 1, (2,), np.float32),
}


@pytest.mark.parametrize(("space", "radius"), pair(SPACES, [1e-4, 0.01, 0.5, 0.01, 1e-4, 0.5]))
def test_every_update_stays_within_the_radius(space: str, radius: float):
    agent = small([Walk(action=SPACES[space]) for _ in range(8)], radius=radius, critic_epochs=1)
    moved = []

    def check(learner: Any) -> None:
        row = learner.history.last()
        assert row["kl"] <= radius
        assert kl_before_to_now(learner) <= radius
        assert abs(kl_before_to_now(learner) - row["kl"]) < 1e-3 * radius + 1e-9
        assert not row["accepted"] or row["gain"] > 0
        moved.append(row["accepted"])

    agent.learn(5 * 64, callback=check)
    assert sum(moved) >= 4


def test_a_step_that_is_refused_leaves_the_policy_as_it_was():
    agent = small(policy=net(2, 1))
    agent.learn(64)
    before = {name: p.clone() for name, p in agent.policy.state_dict().items()}
    head_kl = type(agent.head).kl
    try:
        type(agent.head).kl = lambda self, rows, other: torch.full_like(rows[:, 0], 1.0)  # never within the radius
        agent.learn(64)
    finally:
        type(agent.head).kl = head_kl
    assert not agent.history.last()["accepted"]
    assert agent.history.last()["kl"] == 0
    assert agent.history.last()["backtracks"] == agent.backtracks
    for name, p in agent.policy.state_dict().items():
        assert torch.equal(p, before[name])


def test_the_direction_is_the_natural_gradient_of_the_surrogate():
    agent = small(
        Walk(action=SPACES["discrete"]),
        policy=net(2, 3),
        damping=0.1,
        solver=ng.Direct(),
        kind=ng.NaturalPolicyGradient,
        lr=0.5,
    )
    first = {name: p.detach().clone() for name, p in agent.actor.named_parameters()}
    agent.learn(64)
    step = torch.cat([(p.detach() - first[name]).flatten() for name, p in agent.actor.named_parameters()])
    agent.actor.load_state_dict(first)
    batch = agent.rollout
    advantages = (batch.advantages - batch.advantages.mean()) / batch.advantages.std(correction=0)
    surrogate = (
        torch.distributions.Categorical(logits=agent.policy(batch.states)).log_prob(batch.draws) * advantages
    ).mean()
    g = torch.cat([p.flatten() for p in torch.autograd.grad(surrogate, list(agent.policy.parameters()))])
    matrix = ng.fisher(agent.policy, ng.Categorical()).at(ng.trainable(agent.policy), batch.states).dense()
    assert_close(step, 0.5 * torch.linalg.solve(matrix + 0.1 * torch.eye(len(g), dtype=F64), g))


VARIANTS = {
    "npg": lambda **k: small(kind=ng.NaturalPolicyGradient, **k),
    "acktr": lambda **k: small(kind=pg.acktr, **k),
    "few states": lambda **k: small(metric_batch=16, **k),
    "relative damping": lambda **k: small(damping=ng.Relative(0.1), **k),
    "entropy": lambda **k: small(entropy_weight=0.01, **k),
    "sample space": lambda **k: small(solver=ng.SampleSpace(), metric_batch=20, **k),
    "unscaled": lambda **k: small(normalize_observations=False, normalize_rewards=False, **k),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_learns_the_best_arm(name: str):
    agent = VARIANTS[name](env=[Bandit() for _ in range(16)], radius=0.05)
    assert agent.learn(64 * 12)["return"][0] < 0.6
    assert agent.history["return"][-1] > 0.7
    assert agent.predict(np.array([1, 0], dtype=np.float32))[0] == 2
    assert agent.evaluate(Bandit(), 3) == [1.0] * 3


def test_learns_to_walk_to_the_goal():
    agent = small([Corridor(7) for _ in range(8)], radius=0.05)
    agent.learn(64 * 12)
    assert np.mean(agent.evaluate([Corridor(7) for _ in range(5)], 5)) == 1.0
    assert [agent.predict(place)[0] for place in (3, 4, 5)] == [1, 1, 1]


@pytest.mark.parametrize("column", [True, False])
def test_a_shared_critic_learns_without_moving_the_actions(column: bool):
    policy = Shared(3, column)
    agent = small(Walk(action=SPACES["discrete"]), policy=policy, critic_epochs=10, critic_lr=1e-2)
    value = policy.value.weight.detach().clone()
    agent.learn(64)
    assert agent.critic.module is None
    assert not torch.equal(policy.value.weight, value)
    assert agent.history.last()["kl"] == pytest.approx(kl_before_to_now(agent), rel=1e-6)  # after the critic's epochs
    agent.learn(64 * 4)
    assert agent.history["critic_loss"][-1] < agent.history["critic_loss"][0]


def test_global_generators_are_left_alone_and_seeds_decide():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002 - the ones that must not move
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    one, two, other = (small(seed=seed) for seed in (3, 3, 4))
    for agent in (one, two, other):
        agent.learn(128)
        agent.predict(np.zeros(2, dtype=np.float32), deterministic=False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert random.getstate() == states[2]
    same = zip(one.actor.parameters(), two.actor.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert one.history["return"] == two.history["return"] != other.history["return"]


def test_what_is_frozen_within_a_run_stays_and_what_is_unfrozen_is_refused() -> None:
    policy, critic = net(2, 3), net(2, 1)
    agent = small(Bandit(), policy, critic=critic)
    parts = [policy[0], critic[0], policy[2], critic[2]]
    for part in parts[:2]:
        part.requires_grad_(False)
    before = [part.weight.detach().clone() for part in parts]
    agent.learn(64)
    assert [torch.equal(part.weight, old) for part, old in zip(parts, before, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    critic.requires_grad_(False)
    agent.learn(64)
    later = small(Bandit(), policy)
    policy.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"\['policy.0.weight', 'policy.0.bias'\] were frozen when the agent was built"
    ):
        later.learn(64)
    policy.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the policy are frozen"):
        agent.learn(64)
