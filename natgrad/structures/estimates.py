"""How the expectation over labels is taken: by draws, exactly, or over the data's own labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.families import Likelihood
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import as_columns
from natgrad.ground.messages import Explained
from natgrad.layers import Examples
from natgrad.metrics import Diagonals
from natgrad.operators import Form, Pullback


@dataclass(frozen=True)
class Outputs:
    """A pass's outputs as an estimate sees them.

    Args:
        tree: As the model returned them.
        rows: Laid out as (R, m).
        form: M on each row.
        weights: Of the rows in the mean loss, shape (R,); or (R, 1), or (R, m) of their entries.
        examples: Which entries of the rows belong to which example.
        scores: Gives those of the targets times the root of what they weigh in the mean loss, shape (R, m). None where
            the targets are not known.
    """

    tree: Any
    rows: Tensor
    form: Form
    weights: Tensor
    examples: Examples
    scores: Callable[[], Tensor] | None = None

    @staticmethod
    def of(pullback: Pullback, examples: Examples) -> Outputs:
        """The outputs behind a metric at a point.

        Args:
            pullback: The metric at the point.
            examples: Which entries of the rows belong to which example.
        """
        known = pullback.linearization.origin
        tree = pullback.outputs if known is None else known.first
        return Outputs(tree, pullback.outputs, pullback.form, pullback.weights, examples)


class Estimate(Explained):
    """Cotangents c on the outputs with E[c c^T] = M, one backward pass each."""

    @abstractmethod
    def cotangents(self, outputs: Outputs, generator: torch.Generator) -> Iterator[Tensor]:
        """Cotangents whose outer products, one per example, add up to the metric's in expectation.

        Args:
            outputs: The pass's outputs.
            generator: Of the draws.

        Returns:
            Tensors (R, m). The rows' weights in the loss are included.

        Raises:
            ValueError: If the metric's form has no root to draw from.
        """


@dataclass(frozen=True)
class Sampled(Estimate):
    """Draws of the labels from the model's own distribution: unbiased, one backward pass per draw.

    For a form that is no likelihood's Fisher: its root times random signs, which has the same second moment. Different
    rows of one example are drawn independently, so their cross terms vanish on average.

    Args:
        samples: The number of draws.

    Raises:
        ValueError: For samples < 1.
    """

    samples: int = 1

    def __post_init__(self) -> None:
        check_integer("samples", self.samples)

    def cotangents(self, outputs: Outputs, generator: torch.Generator) -> Iterator[Tensor]:
        weights = as_columns((outputs.weights / self.samples).sqrt())
        for _ in range(self.samples):
            yield weights * draw_score(outputs, generator)


@dataclass(frozen=True)
class ExactLabels(Estimate):
    """Every column of the form's root: exact. One backward pass per column and row of an example."""

    def cotangents(self, outputs: Outputs, generator: torch.Generator) -> Iterator[Tensor]:
        weights = as_columns(outputs.weights.sqrt())
        yield from outputs.examples.cotangents(weights.unsqueeze(2) * root_of(outputs))


@dataclass(frozen=True)
class Empirical(Estimate):
    """The data's own labels: the empirical Fisher, not the Fisher. One backward pass; it needs the targets.

    The rows of one example count together, as one gradient. Where a layer does not tell examples apart, an optimiser
    gives them random signs: the square of their sum is then, on average, the sum of their squares. At the first step it
    raises a ValueError where the targets are not known.
    """

    def cotangents(self, outputs: Outputs, generator: torch.Generator) -> Iterator[Tensor]:
        if outputs.scores is None:
            raise ValueError(
                "Empirical() needs the data's targets, which this metric does not pass on; use it in an optimizer with "
                "optimizer.loss(outputs, targets), or the metric ng.empirical_fisher with estimate=ng.ExactLabels()"
            )
        yield outputs.scores()


NO_ROOT = (
    "the metric's form has no root to take statistics from (a plain loss function's Gauss-Newton matrix): use a "
    "torch.nn criterion or an ng likelihood, or the structure ng.Exact()"
)


def draw_score(outputs: Outputs, generator: torch.Generator) -> Tensor:
    """One draw s (R, m) with E[s s^T] = M in every row."""
    form = outputs.form
    if isinstance(form, Likelihood):
        return form.score(outputs.tree, form.sample(outputs.tree, generator))
    if isinstance(form, Diagonals):  # its root need not be written out
        return form.entries.sqrt() * random_signs(form.entries, generator)
    root = root_of(outputs)
    return torch.einsum("imq,iq->im", root, random_signs(root[:, 0], generator))


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """1 or -1 in every entry."""
    return torch.randint(0, 2, like.shape, generator=generator, device=like.device).to(like.dtype) * 2 - 1


def root_of(outputs: Outputs) -> Tensor:
    """F (R, m, q) with M = F F^T, unweighted."""
    root = outputs.form.root(outputs.rows)
    if root is None:
        raise ValueError(NO_ROOT)
    return root
