"""Applications that take derivatives by themselves do so whatever torch's modes are where they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import draw
from policy_worlds import Walk
from torch import Tensor, nn

import natgrad as ng

Numbers = Callable[[], list[Tensor]]


def build_single(module: Callable[[], nn.Module]) -> Any:
    """A module from a fixed seed, in single precision, which autocast rounds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return module()


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def learn_policy() -> Numbers:
    agent = ng.TRPO(build_single(lambda: nn.Linear(2, 1)), Walk(), batch=32, seed=0)

    def learn() -> list[Tensor]:
        agent.learn(32)
        agent.fisher()
        return values(agent.policy)

    return learn


def teach_machine() -> Numbers:
    machine = build_single(lambda: ng.HelmholtzMachine([4, 3, 2]))
    trainer, bits = ng.NaturalWakeSleep(machine, samples=5, seed=0), torch.eye(4)
    return lambda: [torch.tensor(trainer.step(bits)), *values(machine)]


def solve_equation() -> Numbers:
    net = build_single(lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))
    opt, points = ng.residuals(net, {"inside": lambda u, x: ng.laplacian(u, x) + 1}), draw(9, 2).float()
    return lambda: [opt.step(inside=points), opt.evaluate(inside=points)["inside"], *values(net)]


def lower_energy() -> Numbers:
    h = ng.vmc.TransverseIsing(4, field=1.0)
    psi = build_single(lambda: ng.LogAmplitude(ng.vmc.RBM(4)))
    search = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), ng.stochastic_reconfiguration(psi, lr=0.05))
    return lambda: [torch.tensor(search.step().mean), *values(psi)]


def estimate() -> Numbers:
    x, y, start = draw(30, 2).float(), draw(30, seed=1).float(), torch.zeros(2)

    def fit() -> list[Tensor]:
        found = ng.maximize_likelihood(lambda b, x: torch.distributions.Normal(x @ b, 1.0), start, (x, y))
        return [torch.as_tensor(found.params), found.standard_errors().covariance]

    return fit


def fit_field() -> Numbers:
    field = ng.Ising(3)
    x = field.sample(torch.zeros(6), 200, generator=torch.Generator().manual_seed(0))
    return lambda: [field.fit(x)]


def approximate_posterior() -> Numbers:
    rows = draw(9, 3)
    q = ng.variational(lambda z: -0.5 * (z @ rows.mT - 1).square().sum(-1), 3)
    return lambda: [torch.tensor(q.step()), q.mean.clone()]


def follow_flow() -> Numbers:
    family = ng.Normal()
    start = family.from_mean_std(draw(), draw().exp())
    return lambda: [ng.flows.flow(lambda theta: family.expectation(theta)[..., 1], family, start, 0.5).points[-1]]


APPLICATIONS = [
    learn_policy,
    teach_machine,
    solve_equation,
    lower_energy,
    estimate,
    fit_field,
    approximate_posterior,
    follow_flow,
]
expect = functools.cache(lambda build: build()())  # what an application finds in no mode
MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", APPLICATIONS)
def test_the_callers_modes_change_nothing(build: Callable[[], Numbers], mode: str) -> None:
    expected, run = expect(build), build()
    with MODES[mode]():
        numbers = run()
        assert torch.is_grad_enabled() == (mode == "autocast")
    for number, reference in zip(numbers, expected, strict=True):
        assert torch.equal(number, reference)


@pytest.mark.parametrize("build", APPLICATIONS)
def test_what_is_built_without_gradients_takes_its_own(build: Callable[[], Numbers]) -> None:
    expected = expect(build)
    with torch.no_grad():
        run = build()
    for number, reference in zip(run(), expected, strict=True):
        assert torch.equal(number, reference)


@pytest.mark.parametrize("build", [learn_policy, teach_machine, solve_equation, lower_energy, estimate, follow_flow])
def test_what_is_made_in_inference_mode_is_refused_by_the_mode(build: Callable[[], Numbers]) -> None:
    """The networks and starts in it are tensors that torch never takes derivatives of."""
    with pytest.raises(ValueError, match=r"made under torch.inference_mode\(\)"), torch.inference_mode():
        build()()


def test_a_network_from_outside_is_taken_in_inference_mode() -> None:
    net = build_single(lambda: nn.Linear(2, 1))
    with torch.inference_mode():
        agent = ng.TRPO(net, Walk(), batch=32, seed=0)
    agent.learn(32)
    assert agent.failures == 0


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x: ng.fisher(model, ng.Categorical()).at(ng.trainable(model), x),
        lambda model, x: ng.hessian(model, nn.CrossEntropyLoss()).at(ng.trainable(model), (x, x[:, 0].long())),
    ],
)
def test_a_metric_in_inference_mode_is_refused_by_its_name(measure: Callable[[nn.Module, Tensor], object]) -> None:
    model, x = nn.Linear(3, 2), torch.zeros(5, 3)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch.inference_mode\(\) records no derivatives"):
        measure(model, x)
