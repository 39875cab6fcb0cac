"""The metrics of densities: how far d log p / dx moves with the parameters, or its change where a bit is flipped."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.densities import (
    Density,
    LogP,
    as_density,
    check_binary,
    check_continuous,
    check_density,
    check_mask,
    check_weights,
    guard_derivatives,
)
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Call, RandomState, copy_tensors, run_detached, unwrap_examples
from natgrad.ground.spaces import Params
from natgrad.ground.typed_torch import split_tensor
from natgrad.metrics.base import Diagonals, Metric, Scores, check_chunks, explain_at, pull_back, scale_term
from natgrad.operators import Chunked, Form, LowRankOperator, Operator, Pullback

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


class DensityMetric(Metric):
    """A metric of a density at examples: by the density's own Jacobian where it has one, else through one graph."""

    density: Density
    mask: Tensor | None
    chunk_size: int | None

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        examples, size = self._read(params, inputs), self.chunk_size
        with guard_derivatives(self.density, params, examples):
            if size is None or size >= len(examples):
                return self._build_term(params, random, examples, self.mask, self._draw_seed())
            check_mask(self.mask, examples)
            by_example = self.mask is not None and self.mask.dim() > 1 and len(self.mask) == len(examples)

            parts = split_tensor(examples, size)
            masks = split_tensor(self.mask, size) if self.mask is not None and by_example else [self.mask] * len(parts)
            point = copy_tensors(params)  # the parameters move on between products
            drawn = random or RandomState.capture(examples.device)  # every product is built with the same draws
            terms = [
                partial(self._build_term, point, drawn, *chunk, self._draw_seed())
                for chunk in zip(parts, masks, strict=True)
            ]
            return Chunked([partial(scale_term, t, len(p) / len(examples)) for t, p in zip(terms, parts, strict=True)])

    def _build_term(
        self, params: Params, random: RandomState | None, examples: Tensor, mask: Tensor | None, seed: int
    ) -> Operator:
        own: DensityMetric = replace(cast("Any", self), mask=mask)
        if sum(p.numel() for p in params.values()) * examples.numel() <= LARGEST_ROOT:
            with torch.no_grad():
                rows = own._find_rows(params, examples)
            if rows is not None:
                return LowRankOperator(rows.flatten(0, 1).mT)
        return own._pull_back(params, random, examples, seed)

    def _draw_seed(self) -> int:
        """A seed for a form that draws."""
        return 0

    @abstractmethod
    def _read(self, params: Params, inputs: Any) -> Tensor:
        """The examples (b, N), checked."""

    @abstractmethod
    def _find_rows(self, params: Params, examples: Tensor) -> Tensor | None:
        """U^T in closed form, (b, N, K), with G = U U^T; None where there is none."""

    @abstractmethod
    def _pull_back(self, params: Params, random: RandomState | None, examples: Tensor, seed: int) -> Operator:
        """G through one graph."""


@dataclass(frozen=True, repr=False)
class ScoreMetric(DensityMetric):
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
        examples = self._read(params, inputs)
        with guard_derivatives(self.density, params, examples):
            return self._pull_back(params, random, examples, self._draw_seed())

    def _read(self, params: Params, inputs: Any) -> Tensor:
        examples = copy_tensors(check_density(self.density, params, unwrap_examples(inputs)))
        check_continuous(examples)
        if self.langevin is None:
            return examples
        with guard_derivatives(self.density, params, examples):
            return self.langevin.draw(self.density, params, examples, self.generator)

    def _draw_seed(self) -> int:
        if not self.slices:
            return 0
        return int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))

    def _pull_back(self, params: Params, random: RandomState | None, examples: Tensor, seed: int) -> Pullback:
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

    def _find_rows(self, params: Params, examples: Tensor) -> Tensor | None:
        jacobian = None if self.slices is not None else self.density.score_jacobian(params, examples)  # (b, N, K)
        if jacobian is None:
            return None
        weights = check_mask(self.mask, examples)
        return (jacobian if weights is None else jacobian * weights.unsqueeze(2)) / len(examples) ** 0.5


@dataclass(frozen=True)
class Langevin:
    """x <- x + step grad log p(x) + sqrt(2 step) z, z ~ N(0, I), `steps` times from where it starts.

    Args:
        steps: Number of moves.
        step: Step length, in squared units of x.
        adjusted: Accept or refuse each move (Metropolis; MALA), so that the draws are from p for every step length.
            False accepts every move, with a bias of order `step`.

    Raises:
        ValueError: For steps < 1 or step <= 0.
    """

    steps: int = 20
    step: float = 0.01
    adjusted: bool = True

    def __post_init__(self) -> None:
        check_integer("steps", self.steps)
        check_positive("step", self.step)

    @torch.no_grad()
    def draw(self, density: Density, params: Params, start: Tensor, generator: torch.Generator) -> Tensor:
        """One draw per example of `start`, shape (b, ...).

        Args:
            density: log p.
            params: Its parameters, name -> tensor.
            start: Where the chains start, shape (b, ...).
            generator: Source of the noise.
        """
        point = {name: p.detach() for name, p in params.items()}
        x, (here, slope) = start, self._at(density, point, start)
        for _ in range(self.steps):
            noise = torch.randn(x.shape, generator=generator, device=generator.device, dtype=x.dtype).to(x.device)
            moved = x + self.step * slope + math.sqrt(2 * self.step) * noise
            there, bent = self._at(density, point, moved)
            if self.adjusted:
                # Metropolis and Hastings: log u < log p(y) + log q(x | y) - log p(x) - log q(y | x); a NaN is a refusal
                gain = there - here + self._log_q(x, moved, bent) - self._log_q(moved, x, slope)
                drawn = torch.rand(len(x), generator=generator, device=generator.device, dtype=x.dtype).to(x.device)
                accepted = drawn.log() < gain
                wide = accepted.view(-1, *[1] * (x.dim() - 1))
                moved, bent = torch.where(wide, moved, x), torch.where(wide, bent, slope)
                there = torch.where(accepted, there, here)
            x, here, slope = moved, there, bent
        return x

    def _at(self, density: Density, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """log p (b,) and its gradient (b, ...)."""
        return run_detached(lambda: density.log_p(params, x)), density.scores(params, x).view(x.shape)

    def _log_q(self, to: Tensor, origin: Tensor, slope: Tensor) -> Tensor:
        """log density (b,) of a move from `origin`, where log p has this slope."""
        return -(to - origin - self.step * slope).flatten(1).square().sum(1) / (4 * self.step)


# Ratio matching: score matching for binary variables, where flips take the place of derivatives


@explain_calls
def ratio_metric(
    log_p: LogP | nn.Module | Density,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
) -> RatioMetric:
    """G = 2 E_x sum_i [s_i (1 - s_i)]^2 grad r_i grad r_i^T, s_i = sigmoid(r_i).

    r_i = log p(x) - log p(x with bit i flipped). G is the Hessian of the mean of J (`ng.ratio_matching_loss`) where the
    data come from the model.

    Args:
        log_p: As in `score_metric`.
        mask: As in `score_metric`.
        weights: How often each example of X came, shape (b,), as for the loss. With the model's own probabilities of
            all states, the expectation is the model's. Not together with `chunk_size`.
        chunk_size: As in `score_metric`.

    Returns:
        A metric; `.at(params, X)`, X (b, N) of 0 and 1, gives the operator, a mean over the examples of X.

    Reference:
        The loss: Hyvarinen 2007.

    Example:
        >>> ising = ng.Boltzmann(3)
        >>> states = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
        >>> ng.ratio_metric(ising).at(ising.parameters(), states).dense().shape
        torch.Size([6, 6])
    """
    check_chunks(chunk_size)
    if weights is not None and chunk_size is not None:
        raise ValueError("weights and chunk_size do not go together: leave one of them out")
    return RatioMetric(as_density(log_p), log_p, mask, weights, chunk_size)


@dataclass(frozen=True, repr=False)
class RatioMetric(DensityMetric):
    """What `ratio_metric` gives: G = 2 E_x sum_i [s_i (1 - s_i)]^2 grad r_i grad r_i^T.

    Args:
        density: log p, as a density.
        log_p: What the user passed, by which an optimiser knows its losses.
        mask: True for the variables i that the sum runs over, shape (N,) or (b, N). None: all.
        weights: How often each example came, shape (b,).
        chunk_size: Examples per graph, to bound memory. None: all at once.
    """

    density: Density
    log_p: Any
    mask: Tensor | None = field(default=None, compare=False)
    weights: Tensor | None = field(default=None, compare=False)
    chunk_size: int | None = None

    def _read(self, params: Params, inputs: Any) -> Tensor:
        checked = copy_tensors(check_density(self.density, params, unwrap_examples(inputs)))
        return check_binary(checked, next(iter(params.values())).dtype)

    def _find_rows(self, params: Params, examples: Tensor) -> Tensor | None:
        jacobian = self.density.ratio_jacobian(params, examples)  # (b, N, K)
        if jacobian is None:
            return None
        entries = self.entries(examples, self.density.ratios(params, examples)) / len(examples)
        return entries.sqrt().unsqueeze(2) * jacobian

    def _pull_back(self, params: Params, random: RandomState | None, examples: Tensor, seed: int) -> Operator:
        ratios = (self.density.ratios, params, Call((examples,)), random)
        return pull_back(*ratios, lambda ratios: Diagonals(self.entries(examples, ratios)))

    def entries(self, examples: Tensor, ratios: Tensor) -> Tensor:
        """What grad r_i grad r_i^T counts with, shape (b, N).

        Args:
            examples: X, shape (b, N).
            ratios: r, shape (b, N).
        """
        slopes = torch.sigmoid(ratios) * torch.sigmoid(-ratios)  # not s (1 - s), which rounds to 0
        entries = 2 * slopes.square()
        counted, shares = check_mask(self.mask, examples), check_weights(self.weights, examples)
        entries = entries if counted is None else entries * counted
        return entries if shares is None else entries * (len(examples) * shares).unsqueeze(1)
