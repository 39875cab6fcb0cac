"""No agent ever writes a number that is not finite, whatever a solver, a metric, a critic or an environment gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")
from policy_worlds import Walk
from torch import Tensor, nn

import natgrad as ng
from natgrad import policy as pg
from natgrad.operators import Operator
from natgrad.solvers import Solution, Solver, Status

HUGE = torch.finfo(torch.float32).max
KINDS: dict[str, Callable[..., Any]] = {
    "TRPO": ng.TRPO,
    "natural policy gradient": ng.NaturalPolicyGradient,
    "a rate": lambda *args, **choices: ng.NaturalPolicyGradient(*args, lr=1.0, **choices),
    "ACKTR": pg.acktr,
}
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda g: torch.full_like(g, math.nan),
    "infinite": lambda g: torch.full_like(g, math.inf),
    "one NaN": lambda g: torch.where(torch.arange(len(g)) == 3, math.nan, g),
    "one infinite": lambda g: torch.where(torch.arange(len(g)) == 3, -math.inf, g),
    "huge": lambda g: HUGE * g.sign(),
    "far": lambda g: 1e30 * g,
    "zero": torch.zeros_like,
    "uphill": torch.neg,
}


@dataclass(frozen=True)
class Lying(Solver):
    """Says that this is the solution."""

    name: str
    image: str
    status: Status = Status.CONVERGED

    def solve(
        self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None, **other: Any
    ) -> Solution:
        value = WRONG[self.name](rhs)
        image = value if self.image == "the same" else rhs
        return Solution(value, rhs.norm(), 1, self.status, image)


def is_finite(agent: Any) -> bool:
    """True if all that an agent keeps is."""
    state = agent.state_dict()
    critic = [t for numbers in state["critic"]["optimizer"]["state"].values() for t in numbers.values()]
    tensors = [*agent.actor.parameters(), *agent.critic.params, *critic]
    memory = state["memory"] or {}
    tensors += [t for t in memory.values() if isinstance(t, Tensor)]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def small(kind: str, **choices: Any) -> Any:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    return KINDS[kind](policy, Walk(), **{"batch": 32, "critic_epochs": 1, "seed": 0} | choices)


IMAGES = "the same", "the gradient"
LIES = [("TRPO", name, image) for name in WRONG for image in IMAGES]
LIES += [
    (kind, name, IMAGES[k // 2 % 2])
    for i, kind in enumerate([*KINDS][1:])
    for k, name in enumerate(WRONG)
    if (i + k) % 2
]


@pytest.mark.parametrize(("kind", "name", "image"), LIES)
def test_no_solver_makes_a_policy_that_is_not_finite(kind: str, name: str, image: str):
    agent = small(kind, solver=Lying(name, image))
    before = [p.detach().clone() for p in agent.policy.parameters()]
    agent.learn(64, progress=False)
    assert is_finite(agent)
    assert len(agent.history) == 2
    stays = all(torch.equal(a, b) for a, b in zip(before, agent.policy.parameters(), strict=True))
    assert stays == (not any(agent.history["accepted"]))
    if "NaN" in name or "infinite" in name:
        assert stays
        assert agent.failures == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_that_is_not_finite_is_as_before(kind: str):
    class Spiky(nn.Module):
        """A value whose derivative is infinite."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).abs().sqrt()

    agent = small(kind, critic=Spiky())
    agent.learn(64, progress=False)
    assert is_finite(agent)
    assert agent.failures == 2
    assert not agent.critic.module.weight.any()
    wild = small(kind, critic_lr=1e38)
    wild.learn(64, progress=False)
    assert is_finite(wild)


@pytest.mark.parametrize("kind", KINDS)
def test_trouble_may_be_an_error(kind: str):
    agent = small(kind, solver=Lying("NaN", "the same"), on_trouble="raise")
    before = [p.detach().clone() for p in (*agent.policy.parameters(), *agent.critic.params)]
    with pytest.raises(ValueError, match="the solver's step is not finite; nothing was changed"):
        agent.learn(32, progress=False)
    assert len(agent.history) == 0
    for old, new in zip(before, (*agent.policy.parameters(), *agent.critic.params), strict=True):
        assert torch.equal(old, new)
    with pytest.raises(ValueError, match="on_trouble is 'no', expected 'skip' or 'raise'"):
        small(kind, on_trouble="no")


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_networks_without_a_shape_are_refused_by_name(name: str) -> None:
    networks: dict[str, Any] = {"policy": None, name: nn.LazyLinear(2)}
    with pytest.raises(ValueError, match=f"{name} is lazy: run one forward pass"):
        ng.TRPO(env=Walk(), **networks)
