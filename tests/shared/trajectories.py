"""Recorded trajectories: where each optimiser stands after some steps on a small problem with fixed seeds, in float64.

A change of the house must not move them. `python tests/shared/trajectories.py` writes the vectors anew, for a change
that is meant to change a step; the changelog then says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import torch
from models import Assembled
from torch import Tensor, nn

import natgrad as ng

VECTORS = Path(__file__).parents[1] / "vectors" / "trajectories.json"
STEPS = (1, 10)
FEWER = (1, 10, 28)
"""From about the 25th step on, where gradients are mostly noise, `ng.kfac` multiplies round-off by ten in a step."""

Problem = Callable[[], Iterator[list[Tensor]]]


def flatten(params: Iterable[Tensor]) -> list[float]:
    """All entries, one after the other."""
    return torch.cat([p.detach().reshape(-1) for p in params]).tolist()


def record(problem: Problem, steps: Iterable[int]) -> dict[str, list[float]]:
    """step -> the parameters after it, entry by entry."""
    torch.manual_seed(0)
    wanted, found = set(steps), {}
    torch.set_default_dtype(torch.float64)  # from the start on: drawn in float32, starts differ between processors
    try:
        for step, params in enumerate(problem(), start=1):
            if step in wanted:
                found[str(step)] = flatten(params)
            if step == max(wanted):
                break
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def convolutional() -> nn.Module:
    """A convolution, a norm, a linear layer: what `kfac` has blocks for, and a shift that it has none for."""
    return Assembled(
        lambda m, x: m.out(torch.tanh(m.norm(m.conv(x).flatten(1)) + m.shift)),
        conv=nn.Conv2d(1, 2, 3),
        norm=nn.LayerNorm(8),
        out=nn.Linear(8, 3),
        shift=nn.Parameter(torch.zeros(8)),
    )


def take_steps(optimizer: Any, params: Iterable[Tensor], evaluate: Callable[[], Tensor], closed: bool = False) -> Any:
    """The parameters after each step on the loss that is evaluated; closed: by a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = evaluate()
        loss.backward()
        return loss

    while True:
        if closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        yield list(params)


def train_structured(recipe: Callable[..., Any], **options: Any) -> Problem:
    """A drop-in on images of 4 by 4, with sampled labels."""

    def run() -> Iterator[list[Tensor]]:
        model = convolutional()
        x, y = torch.randn(300, 1, 4, 4), torch.randint(3, (300,))
        optimizer = recipe(model, nn.CrossEntropyLoss(), **options)
        return take_steps(optimizer, list(model.parameters()), lambda: optimizer.loss(model(x), y))

    return run


def train_regression(build: Callable[..., Any], closed: bool = True, **options: Any) -> Problem:
    """A matrix-free optimiser on a regression."""

    def run() -> Iterator[list[Tensor]]:
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        x, y = torch.randn(100, 3), torch.randn(100, 2)
        optimizer = build(model, nn.MSELoss(), **options)
        return take_steps(optimizer, list(model.parameters()), lambda: optimizer.loss(model(x), y), closed)

    return run


def train_metric(metric: Callable[..., Any], **options: Any) -> Problem:
    """`ng.NaturalGradient` with a metric, without a closure."""
    return train_regression(lambda m, loss, **o: ng.NaturalGradient(m, metric(m, loss), **o), closed=False, **options)


def train_boltzmann() -> Iterator[list[Tensor]]:
    """A Boltzmann machine by ratio matching with the adaptive natural gradient."""
    machine = ng.Boltzmann(4)
    params = machine.parameters(0.1, generator=torch.Generator().manual_seed(0))
    data = (torch.rand(60, 4) < 0.4).double()
    optimizer = ng.NaturalGradient(params, ng.ratio_metric(machine), damping=0.1)
    return take_steps(optimizer, list(params.values()), lambda: ng.ratio_matching_loss(machine, params, data))


def train_ang() -> Iterator[list[Tensor]]:
    """Score matching of light-tailed independent variables: locations and scales."""
    data = torch.randn(600, 3) * torch.tensor([0.5, 1.0, 2.0]) + 0.3
    params = {"location": torch.zeros(3, requires_grad=True), "scale": torch.zeros(3, requires_grad=True)}

    def log_p(params: dict[str, Tensor], x: Tensor) -> Tensor:
        z = x - params["location"]
        return -(params["scale"].exp() * z.square() + 0.05 * z**4).sum()

    optimizer = ng.ang(params, ng.score_metric(log_p))
    while True:
        for batch in data.split(200):
            optimizer.zero_grad()
            ng.score_matching_loss(log_p, params, batch).backward()
            optimizer.step()
            yield list(params.values())


def train_policy() -> Iterator[list[Tensor]]:
    """TRPO on CartPole, an update a step."""
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    learner = ng.TRPO(policy, gymnasium.make("CartPole-v1"), batch=128, seed=0)
    while True:
        learner.learn(128, progress=False)
        yield list(policy.parameters())


def train_machine() -> Iterator[list[Tensor]]:
    """A Helmholtz machine by natural wake-sleep."""
    machine = ng.HelmholtzMachine([6, 4, 2])
    data = (torch.rand(40, 6) < 0.3).double()
    optimizer = ng.NaturalWakeSleep(machine, lr=0.1, samples=4)
    while True:
        for batch in data.split(20):
            optimizer.step(batch)
            yield list(machine.parameters())


def train_residuals(**options: Any) -> Problem:
    """Poisson's equation on an interval."""

    def run() -> Iterator[list[Tensor]]:
        net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
        points, edge = torch.rand(30, 1), torch.tensor([[0.0], [1.0]])
        terms = {"inside": lambda u, x: ng.laplacian(u, x) + torch.sin(3 * x).sum(), "boundary": lambda u, x: u(x)}
        optimizer = ng.residuals(net, terms, weights={"boundary": 10.0}, **options)
        while True:
            optimizer.step(inside=points, boundary=edge)
            yield list(net.parameters())

    return run


def train_amplitude(**options: Any) -> Problem:
    """A wave function on samples and local energies that are given."""

    def run() -> Iterator[list[Tensor]]:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = ng.stochastic_reconfiguration(ng.LogAmplitude(net), **options)
        while True:
            states = torch.randn(60, 4)
            optimizer.step(states, states.square().sum(1) + states[:, 0])
            yield list(net.parameters())

    return run


def train_posterior() -> Iterator[list[Tensor]]:
    """The Gaussian nearest to a posterior of two numbers."""
    posterior = ng.variational(lambda z: -0.5 * (z[0] ** 2 + (z[1] - z[0] ** 2) ** 2), 2)
    while True:
        posterior.step()
        yield [posterior.mean, posterior.covariance]


RULES = {
    "rate": {"rule": ng.Rate(), "lr": 0.1},
    "measured length": {"rule": ng.MeasuredLength()},
    "trust region": {"rule": ng.TrustRegion(0.05)},
    "trust region that looks": {"rule": ng.TrustRegion(0.5, backtracks=3)},
    "line search": {"rule": ng.LineSearch()},
    "momentum": {"rule": ng.Momentum(0.8, radius=0.05)},
    "grid search": {"rule": ng.rules.GridSearch()},
    "spectral descent": {"rule": ng.rules.SpectralDescent()},
    "online radius": {"rule": ng.OnlineRadius()},
}
CHOICES: dict[str, dict[str, Any]] = {
    "constant damping": {"damping": ng.Constant(0.1)},
    "damping of the whole": {"damping": ng.Relative(0.1)},
    "penalty and decay": {"l2": 1e-2, "weight_decay": 1e-2},
    "exact labels": {"estimate": ng.ExactLabels(), "rule": ng.MeasuredLength()},
    "data's labels": {"estimate": ng.Empirical(), "rule": ng.MeasuredLength()},
    "not measured": {"measure": False},
}
FLAT: dict[str, Problem] = {
    "Fisher, dense": train_metric(ng.fisher, structure=ng.Dense(0.9), damping=0.1),
    "Fisher, blocks": train_metric(ng.fisher, structure=ng.Blocks(0.9), damping=ng.Relative(0.1), rule=ng.Rate()),
    "Fisher, Kronecker": train_metric(
        ng.fisher, structure=ng.Kronecker(0.9), damping=ng.Relative(0.1, per="block"), lr=0.5, rule=ng.Rate()
    ),
    # twice the covariance that the recorded engine took for the mean over two outputs
    "covariance": train_metric(ng.covariance, solver=ng.SampleSpace(), damping=0.2, lr=2.0),
    "Gauss-Newton, adapted": train_metric(
        ng.gauss_newton, solver=ng.MinresQLP(), damping=ng.LevenbergMarquardt(), rule=ng.LineSearch()
    ),
    "Hessian": train_metric(ng.hessian, damping=1.0, rule=ng.TrustRegion(0.1)),
    "some examples": train_metric(ng.fisher, metric_batch=40, damping=0.1, weight_decay=0.01),
}


ADAPTIVE = ng.LevenbergMarquardt(start=0.03, per="block")


PROBLEMS: dict[str, tuple[Problem, tuple[int, ...]]] = {
    "kfac": (train_structured(ng.kfac), FEWER),
    "kfac, Levenberg-Marquardt": (train_structured(ng.kfac, damping=ADAPTIVE), FEWER),
    "ekfac": (train_structured(ng.ekfac), FEWER),
    "unitwise": (train_structured(ng.unitwise), STEPS),
    "diagonal": (train_structured(ng.diagonal), STEPS),
    "online_ng": (train_structured(ng.online_ng), STEPS),
    "hessian_free": (train_regression(ng.hessian_free), (1, 5)),
    "natgrad_cg": (train_regression(ng.natgrad_cg, damping=0.2), (1, 10)),
    "ang": (train_ang, STEPS),
    "TRPO": (train_policy, (1, 4)),
    "wake-sleep": (train_machine, STEPS),
    "tonga": (train_structured(ng.tonga), STEPS),
    "krylov_subspace": (train_regression(ng.krylov_subspace, dimension=6), (1, 5)),
    **{f"kfac, {name}": (train_structured(ng.kfac, **options), (1, 10)) for name, options in (RULES | CHOICES).items()},
    **{name: (problem, (1, 10)) for name, problem in FLAT.items()},
    "residuals": (train_residuals(), (1, 10)),
    "residuals, plain": (train_residuals(acceleration=False, scaling=False, momentum=0.5), (1, 10)),
    "amplitude": (train_amplitude(), (1, 10)),
    "amplitude, SPRING": (train_amplitude(momentum=0.9), (1, 10)),
    "amplitude, Kronecker": (train_amplitude(structure=ng.Kronecker(0.9)), (1, 10)),
    "posterior": (train_posterior, (1, 10)),
    "Boltzmann machine": (train_boltzmann, (1, 10)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    VECTORS.write_text(json.dumps({name: record(*problem) for name, problem in PROBLEMS.items()}, indent=1) + "\n")
