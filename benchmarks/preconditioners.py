"""Products that CG needs with each preconditioner, at three moments of training the digits autoencoder."""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad_lab.data import digits
from natgrad_lab.experiments.models import mirror_sizes, perceptron

RTOL, MOST, MOMENTS = 1e-2, 2000, (0, 20, 200)
HEADS = tuple(f"after {moment} steps" for moment in MOMENTS)
CHOICES: dict[str, ng.Preconditioner | ng.Structure | None] = {
    "none": None,
    "diagonal, power .75": ng.DiagonalPreconditioner(),
    "diagonal, power 1": ng.DiagonalPreconditioner(power=1.0),
    "Martens (empirical diagonal, .75)": ng.DiagonalPreconditioner(empirical=True),
    "empirical, 100 examples": ng.EmpiricalPreconditioner(100),
    "Kronecker": ng.Kronecker(),
    "eigenvalue-corrected Kronecker": ng.EigenKronecker(),
}


def report(seeds: tuple[int, ...] = (0, 1, 2)) -> list[tuple[str, ...]]:
    """Rows (preconditioner, products at each moment): medians over seeds."""
    data = digits().flat().train_x
    counts: dict[tuple[str, int], list[int]] = {}
    dampings: dict[int, list[float]] = {moment: [] for moment in MOMENTS}
    for seed in seeds:
        for moment, damping, counted in moments(seed, data):
            dampings[moment].append(damping)
            for name, steps in counted.items():
                counts.setdefault((name, moment), []).append(steps)
    rows = [("damping there", *(f"{median(dampings[moment]):.1e}" for moment in MOMENTS))]
    return rows + [(name, *(f"{median(counts[name, moment]):.0f}" for moment in MOMENTS)) for name in CHOICES]


def moments(seed: int, data: Tensor):
    """(steps so far, damping, products by preconditioner) at each moment of one run of `ng.hessian_free`."""
    torch.manual_seed(seed)
    model, criterion = perceptron(mirror_sizes([64, 100, 50, 10]), nn.Tanh), nn.MSELoss()
    opt = ng.hessian_free(model, criterion, metric_batch=256)
    for step in range(max(MOMENTS) + 1):
        if step in MOMENTS:
            damping = opt.state_dict()["natgrad"]["damping"] / data.shape[1]  # in the units of a mean over pixels
            yield step, damping, {name: products(model, criterion, data, damping, name) for name in CHOICES}
        opt.zero_grad()
        opt.loss(model(data), data).backward()
        opt.step()


def products(model: nn.Module, criterion: nn.Module, data: Tensor, damping: float, name: str) -> int:
    """Products of one solve to |r| <= .01 |g|, from zero, with the metric on 256 examples; the model stays as it is."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    opt = ng.NaturalGradient(
        model,
        ng.gauss_newton(model, criterion),
        solver=ng.CG(rtol=RTOL, max_steps=MOST),
        damping=damping,
        metric_batch=256,
        preconditioner=CHOICES[name],
    )
    opt.zero_grad()
    opt.loss(model(data), data).backward()
    opt.step()
    opt.detach()
    model.load_state_dict(before)
    return opt.state_report().solver_steps
