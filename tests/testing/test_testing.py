"""The public checks find what they promise to find; the classes that pass them are in the other files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import F64, X3, Case, affine, draw
from torch import nn

from natgrad.families import Gaussian
from natgrad.metrics import fisher
from natgrad.solvers import Direct, Solution, Solver
from natgrad.structures import Dense as Average
from natgrad.structures import Structure
from natgrad.testing import check_metric, check_solver, check_structure

PARAMS = {"w": draw(3, 2), "b": draw(2)}
METRIC = fisher(affine, Gaussian())


class Liar(Structure):
    """A running average that breaks one promise."""

    def __init__(self, lie: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
        self.lie, self.count = lie, 0

    def update(self, memory, metric, params, inputs, *, random=None):
        self.count += 1
        operator, following = Average(0.5).update(memory, metric, params, inputs, random=random)
        return self.lie(self, operator, following)


class Opaque:
    """A class that a checkpoint does not know."""


def in_place(self: Liar, operator: Any, memory: Any) -> tuple[Any, Any]:
    self.kept = getattr(self, "kept", memory)
    self.kept["total"].add_(1e-3)
    return operator, self.kept


LIES = {
    "no operator": (lambda self, operator, memory: (operator.dense(), memory), "no Operator"),
    "state outside the memory": (lambda self, operator, memory: (self.count * operator, memory), "a part is missing"),
    "a memory that cannot be loaded": (lambda self, operator, memory: (operator, {"x": Opaque()}), "weights_only"),
    "a memory changed in place": (in_place, "changed the memory|a part is missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_check_structure_finds_each_lie(lie):
    change, words = LIES[lie]
    with pytest.raises(AssertionError, match=words):
        check_structure(Liar(change), METRIC, PARAMS, X3)


def test_check_structure_finds_a_touched_model():
    def touching(self: Liar, operator: Any, memory: Any) -> tuple[Any, Any]:
        torch.rand(1)
        return operator, memory

    with pytest.raises(AssertionError, match="moved the global random state"):
        check_structure(Liar(touching), METRIC, PARAMS, X3)


def test_check_metric_finds_a_sum_in_place_of_a_mean():
    params = {"w": draw(3, 2), "b": draw(2)}
    with pytest.raises(AssertionError, match="batch taken twice"):
        check_metric(fisher(lambda p, x: affine(p, x) * len(x), Gaussian()), params, X3)
    with pytest.raises(AssertionError, match="against the reference"):
        check_metric(fisher(affine, Gaussian()), params, X3, reference=torch.eye(8, dtype=F64))


def test_check_metric_finds_a_touched_model():
    model, params = Case(lambda: nn.Linear(3, 2), X3).make()

    def touching(p, x):
        torch.rand(1)
        model.bias.data += 1
        return torch.func.functional_call(model, p, (x,))

    with pytest.raises(AssertionError, match=r"changed params\['bias'\]"):
        check_metric(fisher(touching, Gaussian()), params, X3, draws=True)


class Sloppy(Solver):
    """A solver that lies in one way."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    def solve(self, operator, rhs, *, damping=0.0, guess=None) -> Solution:
        if self.lie == "no checks":
            return Direct().solve(operator, rhs, damping=abs(damping))
        found = Direct().solve(operator, rhs, damping=damping)
        changed = {
            "value": Solution(found.value * 2, found.residual, found.steps, found.status, found.image),
            "residual": Solution(found.value, found.residual + rhs.norm(), found.steps, found.status, found.image),
            "image": Solution(found.value, found.residual, found.steps, found.status, found.image * 2),
            "status": Solution(found.value, found.residual, found.steps, "fine", found.image),  # type: ignore[arg-type]
        }
        return changed[self.lie]


SOLVER_LIES = {
    "value": "image",
    "residual": "residual",
    "image": "image",
    "status": "status",
    "no checks": "negative damping",
}


@pytest.mark.parametrize("lie", SOLVER_LIES)
def test_check_solver_finds_each_lie(lie):
    with pytest.raises(AssertionError, match=SOLVER_LIES[lie]):
        check_solver(Sloppy(lie))
