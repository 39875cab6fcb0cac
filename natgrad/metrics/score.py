"""The metric of score matching: how far d log p / dx moves with the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer
from natgrad.ground.densities import (
    Density,
    LogP,
    as_density,
    check_continuous,
    check_density,
    check_mask,
    guard_derivatives,
)
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.pure import Call, PureModel, RandomState, copy_tensors, unwrap_examples
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Metric, Scores, explain_at
from natgrad.metrics.langevin import Langevin
from natgrad.operators import Chunked, Form, Linearization, LowRankOperator, Operator, OutputMap, Pullback, Scaled

LARGEST_ROOT = 2**24
"""Numbers in a closed-form root up to which it is formed: beyond, products go through the graph."""


@explain_calls
def score_metric(
    log_p: LogP | nn.Module | Density,
    *,
    slices: int | None = None,
    langevin: Langevin | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> ScoreMetric:
    """G = sum_i E_x[grad d_i log p(x) grad d_i log p(x)^T] over the data.

    G is the Hessian of the mean of l (`ng.score_matching_loss`) where the data come from the model, and its
    Gauss-Newton part everywhere. It comes as an operator: products through the graph of the score, a root (K, b N), the
    diagonal, and `dense()` on demand.

    Args:
        log_p: A function log_p(params, x) of one example, a module of energies (log p = -energy), or a `Density`;
            up to a constant.
        slices: Take that many random directions v per example instead of all N variables: an unbiased estimate, with a
            root of K x (b slices). None: all variables.
        langevin: Draw x from the model, starting at X (`ng.Langevin()`), instead of taking X itself: the expectation
            under p of eq. 1. None: over the data.
        mask: True for the variables i that the sum runs over, shape (N,) or (b, N), as for the loss: the density of
            these given the others is meant. None: all.
        chunk_size: Examples per graph, to bound memory. None: all at once.

    Returns:
        A metric; `.at(params, X)`, X (b, N) continuous, gives the operator, a mean over the examples of X.

    Reference:
        Karakida, Okada & Amari 2016, eq. 1.

    Example:
        >>> energy = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))
        >>> G = ng.score_metric(energy).at(ng.trainable(energy), torch.randn(10, 3))
        >>> G.root().shape
        torch.Size([41, 30])
    """
    if slices is not None:
        slices = check_integer("slices", slices, hint=" or None for all variables")
    if langevin is not None and not isinstance(langevin, Langevin):
        raise TypeError(f"langevin is {langevin!r}, expected ng.Langevin(...) or None")
    check_chunks(chunk_size)
    return ScoreMetric(as_density(log_p), log_p, slices, langevin, mask, chunk_size)


@dataclass(frozen=True, repr=False)
class ScoreMetric(Metric):
    """What `score_metric` gives: G = sum_i E_x[grad d_i log p(x) grad d_i log p(x)^T].

    Args:
        density: log p, as a density.
        log_p: What the user passed, by which an optimiser knows its losses.
        slices: Random directions per example; None: all variables.
        langevin: Draws x from the model; None: over the data.
        mask: True for the variables i that the sum runs over, shape (N,) or (b, N). None: all.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        generator: Private source of directions and draws, default a new one, seeded 0.
    """

    density: Density
    log_p: Any
    slices: int | None = None
    langevin: Langevin | None = None
    mask: Tensor | None = field(default=None, compare=False)
    chunk_size: int | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), compare=False)

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        examples = self._examples(params, inputs)
        with guard_derivatives(self.density, params, examples):
            return average_chunks(examples, self.mask, self.chunk_size, partial(self._build_term, params, random))

    def read_examples(self, inputs: Any) -> Tensor | None:
        """The data, flat; what is masked counts as the mean of what was observed of its variable."""
        examples = unwrap_examples(inputs)
        if not isinstance(examples, Tensor):
            return None
        rows, weights = examples.detach().flatten(1), check_mask(self.mask, examples)
        if weights is None:
            return rows
        seen = weights.expand_as(rows) != 0
        known = torch.where(seen, rows, 0)
        return torch.where(seen, rows, known.sum(0) / seen.sum(0).clamp(min=1))

    def graph(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Pullback:
        """The same matrix through one graph of the score: without the closed forms of a density, and without chunks.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, N).
            random: The random state at which dropout is replayed, default the state now.
        """
        examples = self._examples(params, inputs)
        with guard_derivatives(self.density, params, examples):
            return self._pull_back(params, random, examples)

    def _examples(self, params: Params, inputs: Any) -> Tensor:
        examples = copy_tensors(check_density(self.density, params, unwrap_examples(inputs)))
        check_continuous(examples)
        if self.langevin is None:
            return examples
        with guard_derivatives(self.density, params, examples):
            return self.langevin.draw(self.density, params, examples, self.generator)

    def _build_term(
        self, params: Params, random: RandomState | None, examples: Tensor, mask: Tensor | None
    ) -> Operator:
        own = replace(self, mask=mask)
        closed = own._find_closed_form(params, examples)
        return own._pull_back(params, random, examples) if closed is None else closed

    def _pull_back(self, params: Params, random: RandomState | None, examples: Tensor) -> Pullback:
        seed = int(torch.randint(2**62, (), generator=self.generator)) if self.slices else 0
        form = partial(self._form, examples, seed)
        return pull_back(self.density.scores, params, Call((examples,)), random, form)

    def _form(self, examples: Tensor, seed: int, scores: Tensor) -> Form:
        """Row i of the factor is what the score's variable i counts with: the identity, or random directions."""
        weights = check_mask(self.mask, examples)
        if self.slices is None:
            return Diagonals(torch.ones_like(scores) if weights is None else weights.expand_as(scores))
        generator = torch.Generator(scores.device).manual_seed(seed)
        size = (*scores.shape, self.slices)
        signs = 2 * torch.randint(0, 2, size, generator=generator, device=scores.device).to(scores.dtype) - 1
        signs = signs if weights is None else signs * weights.unsqueeze(2)
        return Scores(signs / self.slices**0.5)

    def _find_closed_form(self, params: Params, examples: Tensor) -> LowRankOperator | None:
        """The root from the density's own Jacobian of the score, where it has one and it is small enough."""
        size = sum(p.numel() for p in params.values()) * examples.numel()
        if self.slices is not None or size > LARGEST_ROOT:
            return None
        with torch.no_grad():
            jacobian = self.density.score_jacobian(params, examples)  # (b, N, K)
        if jacobian is None:
            return None
        weights = check_mask(self.mask, examples)
        jacobian = jacobian if weights is None else jacobian * weights.unsqueeze(2)
        return LowRankOperator(jacobian.flatten(0, 1).mT / len(examples) ** 0.5)


class Diagonals:
    """The form diag(d) on every row of outputs.

    Args:
        entries: d >= 0, shape (R, m).
    """

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries

    def __repr__(self) -> str:
        return write_choices(self, shape=tuple(self.entries.shape))

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """d o t, entry by entry.

        Args:
            outputs: Shape (R, m).
            tangents: t, shape (R, m).

        Returns:
            Shape (R, m).
        """
        return self.entries * tangents

    def root(self, outputs: Tensor) -> Tensor:
        """diag(sqrt d).

        Args:
            outputs: Shape (R, m).

        Returns:
            Shape (R, m, m).
        """
        return torch.diag_embed(self.entries[: len(outputs)].sqrt())


def pull_back(
    function: Callable[..., Tensor],
    params: Params,
    inputs: Call,
    random: RandomState | None,
    form: Callable[[Tensor], Form] = lambda rows: Diagonals(torch.ones_like(rows)),
) -> Pullback:
    """A form on the rows (R, m) of function(params, *inputs), pulled back to the parameters, as a mean over rows."""
    linearization = Linearization(OutputMap(PureModel(function, inputs, random), lambda rows: rows), params)
    return Pullback(linearization, form(linearization.outputs))


def average_chunks(
    examples: Tensor, mask: Tensor | None, size: int | None, term: Callable[[Tensor, Tensor | None], Operator]
) -> Operator:
    """The mean over examples, in one graph or in chunks of them that are rebuilt for every product."""
    if size is None or size >= len(examples):
        return term(examples, mask)
    check_mask(mask, examples)
    by_example = mask is not None and mask.shape[0] == len(examples) and mask.dim() > 1

    def share(start: int) -> Operator:
        part = examples[start : start + size]
        rows = mask[start : start + size] if mask is not None and by_example else mask
        return Scaled(term(part, rows), len(part) / len(examples))

    return Chunked([partial(share, start) for start in range(0, len(examples), size)])


def check_chunks(chunk_size: int | None) -> None:
    """ValueError unless None or an integer >= 1."""
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, hint=" or None")
