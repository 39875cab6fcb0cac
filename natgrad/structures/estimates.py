"""How the expectation over labels is taken: by draws, or exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families import Likelihood
from natgrad.operators import Pullback, Rows
from natgrad.operators.linearization import output_map


class Estimate(ABC):
    """Cotangents c on the outputs with E[c c^T] = M, one backward pass each."""

    @abstractmethod
    def cotangents(self, pullback: Pullback, generator: torch.Generator) -> Iterator[Tensor]:
        """Tensors (R, m) such that the sum over them of the examples' outer products is, in expectation, the metric's.

        The rows' weights in the loss are included. ValueError where the metric's form has no root to draw from.
        """


@dataclass(frozen=True)
class Sampled(Estimate):
    """`samples` draws of the labels from the model's own distribution: unbiased, one backward pass per draw.

    For a form that is no likelihood's Fisher: its root times random signs, which has the same second moment. Different
    rows of one example are drawn independently, so their cross terms vanish on average. ValueError for samples < 1.
    """

    samples: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples is {self.samples}, expected an integer >= 1")

    def cotangents(self, pullback: Pullback, generator: torch.Generator) -> Iterator[Tensor]:
        weights = (pullback.weights / self.samples).sqrt().unsqueeze(1)
        for _ in range(self.samples):
            yield weights * drawn_score(pullback, generator)


@dataclass(frozen=True)
class ExactLabels(Estimate):
    """Every column of the form's root: exact. One backward pass per column and row of an example."""

    def cotangents(self, pullback: Pullback, generator: torch.Generator) -> Iterator[Tensor]:
        root = pullback.output_root()
        if root is None:
            raise ValueError(NO_ROOT)
        yield from Rows(pullback.linearization, root).cotangents()


NO_ROOT = (
    "the metric's form has no root to take statistics from (a plain loss function's Gauss-Newton matrix): use a "
    "torch.nn criterion or an ng likelihood, or the structure ng.Exact()"
)


def drawn_score(pullback: Pullback, generator: torch.Generator) -> Tensor:
    """One draw s (R, m) with E[s s^T] = M in every row."""
    function, form = output_map(pullback.linearization.function), pullback.form
    if isinstance(form, Likelihood) and function is not None:
        outputs = function.first
        return form.score(outputs, form.sample(outputs, generator))
    root = form.root(pullback.outputs)
    if root is None:
        raise ValueError(NO_ROOT)
    signs = torch.randint(0, 2, root[:, 0].shape, generator=generator, device=root.device).to(root.dtype) * 2 - 1
    return torch.einsum("imq,iq->im", root, signs)
