"""A model whose dtype changes within a run, or between a run and the one that goes on from its checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import pair
from optim_models import CE, flat, is_finite, train
from saved_runs import load, save
from spectral_points import draw_layers
from torch import Tensor, nn

import natgrad as ng
from natgrad.structures import OnlineLowRank

EXACT = ng.ExactLabels()


def join(**choices: Any) -> Callable[[nn.Module], Any]:
    return lambda model: ng.NaturalGradient(
        model, ng.gauss_newton(model, CE), **{"damping": ng.Relative(0.1), "rule": ng.Rate(), "lr": 0.1} | choices
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    **{
        recipe.__name__: lambda model, recipe=recipe: recipe(model, CE, estimate=EXACT)
        for recipe in (ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise, ng.online_ng)
    },
    "hessian_free": lambda model: ng.hessian_free(model, CE),
    "Dense": join(structure=ng.Dense(0.9)),
    "AdaptiveInverse": join(structure=ng.AdaptiveInverse(), damping=0.0),
    "Woodbury": join(structure=ng.AdaptiveInverse(ng.Woodbury()), damping=0.0),
    "Kronecker": join(structure=ng.Kronecker(0.9, estimate=EXACT)),
    "EigenKronecker": join(structure=ng.EigenKronecker(0.9, estimate=EXACT)),
    "OnlineLowRank": join(structure=OnlineLowRank(0.9, estimate=EXACT)),
    "Blocks": join(structure=ng.Blocks(0.9)),
    "preconditioner": join(solver=ng.CG(max_steps=10), preconditioner=ng.Kronecker(0.9, estimate=EXACT)),
    "momentum": join(rule=ng.Momentum(0.9)),
}


def build() -> nn.Module:
    return draw_layers(4, 6, 3, dtype=torch.float32)


def train_here(model: nn.Module, optimizer: Any, steps: int) -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    y = (x @ torch.tensor([[1.0, 0, -1], [0, 1, 0], [1, 0, 1], [0, -1, 1]])).argmax(1)
    train(optimizer, model, steps, x.to(next(model.parameters()).dtype), y)


MOVES = (torch.float32, torch.float64), (torch.float64, torch.float32)


@pytest.mark.parametrize(
    ("name", "move"), [*pair(OPTIMIZERS, MOVES), *pair(["kfac", "hessian_free", "Dense"], MOVES[::-1])]
)
def test_another_dtype_goes_on_with_what_is_remembered(name: str, move: tuple[torch.dtype, torch.dtype]) -> None:
    before, after = move
    model = build().to(before)
    optimizer = OPTIMIZERS[name](model)
    train_here(model, optimizer, 3)
    saved, start = save(model, optimizer), flat(model).double()

    def resume(built: torch.dtype, moved: torch.dtype) -> Tensor:
        """Where the run goes on to, in a model of one dtype that is moved to another."""
        twin = build().to(built)
        other = OPTIMIZERS[name](twin)
        load(twin, other, copy.deepcopy(saved))
        twin.to(moved)
        train_here(twin, other, 2)
        assert {p.dtype for p in twin.parameters()} == {moved}
        return flat(twin).double()

    unmoved, ends = resume(before, before), [resume(after, after), resume(before, after)]
    train_here(model.to(after), optimizer, 2)
    for end in (*ends, flat(model).double()):
        distance = (end - unmoved).norm() / (unmoved - start).norm()
        assert distance < 1e-2, f"{name}: {float(distance):.1e} of the way beside the run in {before}"  # float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_in_half_precision_learns_or_is_refused_by_its_dtype(name: str) -> None:
    model = build().to(torch.bfloat16)
    before = flat(model)
    try:
        train_here(model, OPTIMIZERS[name](model), 3)
    except ValueError as error:
        assert "torch.bfloat16" in str(error)  # noqa: PT017
    else:
        assert not torch.equal(flat(model), before)
        assert is_finite(model)
