"""Optimizers whose next step depends on their past: what tests of checkpoints save and load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from optim_models import BLOCK_RECIPES, CE, net, train_numbered
from torch import nn

import natgrad as ng


def split_parameters(model: Any) -> list[dict[str, Any]]:
    """The last layer first, with a rate and a decay of its own, as NumPy computes it."""
    own = {"lr": np.float64(0.2), "weight_decay": 0.1}
    return [{"params": model[2].parameters(), **own}, {"params": model[0].parameters()}]


def flat_optimizer(metric: Callable[..., Any] = ng.fisher, **options: Any) -> Callable[[nn.Module], Any]:
    """`ng.NaturalGradient` with a small rate and a fixed damping."""
    return lambda m: ng.NaturalGradient(m, metric(m, CE), **({"lr": 0.1, "damping": 0.1} | options))


BUILDS: dict[str, Callable[[nn.Module], Any]] = {
    **{recipe.__name__: lambda m, recipe=recipe: recipe(m, CE, lr=0.3) for recipe in BLOCK_RECIPES},
    "kfac, seldom": lambda m: ng.kfac(m, CE, lr=0.3, update_every=3, invert_every=3),
    "kfac, judged": lambda m: ng.kfac(m, CE, damping=ng.LevenbergMarquardt(0.1, per="block")),
    "kfac, rate auto": lambda m: ng.kfac(m, CE, rate="auto"),
    "no momentum": lambda m: ng.kfac(m, CE, lr=0.3, momentum=0.0, estimate=ng.ExactLabels()),
    "two groups": lambda m: ng.kfac(m, CE, lr=0.3, params=split_parameters(m)),
    "hessian_free": lambda m: ng.hessian_free(m, CE),
    "natgrad_cg": lambda m: ng.natgrad_cg(m, CE, lr=0.3),
    "krylov_subspace": lambda m: ng.krylov_subspace(m, CE, dimension=3),
    "preconditioned": lambda m: ng.hessian_free(m, CE, preconditioner=ng.DiagonalPreconditioner()),
    "momentum": flat_optimizer(rule=ng.Momentum()),
    "averaged": flat_optimizer(structure=ng.Dense(0.9)),
    "sampled": flat_optimizer(ng.sampled_fisher, rule=ng.TrustRegion(0.01)),
}


def run_build(build: str, steps: int = 5) -> tuple[nn.Module, Any]:
    """A model and its optimizer after some steps."""
    model = net()
    opt = BUILDS[build](model)
    train_numbered(model, opt, range(steps))
    return model, opt


def save(model: nn.Module, opt: Any) -> dict[str, Any]:
    """All that a checkpoint has."""
    return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})


def load(model: nn.Module, opt: Any, saved: dict[str, Any]) -> None:
    """Go back to what was saved."""
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
