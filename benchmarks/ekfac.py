"""What EKFAC's parts cost in gradients: factors, eigenbases, the diagonal in them, and an update in a kept basis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import natgrad as ng
from benchmarks.timing import ratios
from benchmarks.training import TrainingCase, classifier
from natgrad.ground.linalg import eigh
from natgrad.operators import Arranged
from natgrad.structures import Layerwise

HEADS = ("time / gradient",)
STALE = 0.9999  # eigenvectors are kept, whatever has become of the factors


def works(work: TrainingCase) -> dict[str, Callable[[], object]]:
    """Each from the parameters: a forward pass of its own, drawn labels and their backward pass included."""
    model = work.build()
    params, metric = dict(ng.trainable(model)), ng.fisher(model, work.criterion)

    def update(structure: Layerwise, memory: Any = None) -> tuple[ng.Operator, Any]:
        return structure.update(memory, metric, params, work.inputs)

    kept = ng.EigenKronecker(decay=0.95, stale=STALE)
    memory = update(kept)[1]  # layers that are known to explain their parameters are not compared again
    operator = update(ng.Kronecker(factored=True))[0]
    assert isinstance(operator, Arranged)
    factors = [side for _, part in operator.parts for side in (part.left, part.right)]  # type: ignore[attr-defined]
    return {
        "K-FAC: pass and factors": lambda: update(ng.Kronecker(), memory),
        "K-FAC: inverses of all factors": lambda: operator.inverse(1e-3),
        "eigendecompositions of all factors": lambda: [eigh(factor) for factor in factors],
        "EKFAC: built anew": lambda: update(ng.EigenKronecker(), memory),
        "EKFAC: updated, eigenvectors kept": lambda: update(kept, memory),
    }


def gradient_of(work: TrainingCase) -> Callable[[], object]:
    """One forward and backward pass."""
    model = work.build()
    params = list(model.parameters())
    return lambda: torch.autograd.grad(work.criterion(model(work.inputs), work.targets), params)


def report(repeats: int) -> list[tuple[str, str]]:
    """Rows (which part, its time in gradients), on the classifier."""
    work = classifier()
    return [(name, str(found)) for name, found in ratios(gradient_of(work), works(work), repeats).items()]
