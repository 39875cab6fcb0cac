"""Fits of fields whose sums are too large: pseudo-likelihood, ratio matching, stochastic maximum likelihood."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from natgrad.checks import check_integer, check_number, check_positive
from natgrad.families.discrete_tables import Tables
from natgrad.families.gibbs import build_sweep
from natgrad.families.gibbs_sweeps import pair_energies
from natgrad.lapack import require_inverse

SMALL_GRADIENT = 1e-4
"""A fit whose largest entry of the gradient stays above this warns."""


class FieldFit(ABC):
    """A way from examples to theta that takes no sum over states: `PseudoLikelihood` and its like."""

    @abstractmethod
    def find(self, tables: Tables, places: Tensor, start: Tensor, generator: torch.Generator | None) -> Tensor:
        """theta.

        Args:
            tables: The field's functions.
            places: Examples as positions of values, shape (b, n).
            start: Where it starts, shape (m,), float64.
            generator: Source of draws.

        Returns:
            Shape (m,).
        """


@dataclass(frozen=True)
class PenalisedFit(FieldFit):
    """The minimum of a mean loss per example, by L-BFGS.

    Args:
        ridge: Adds ridge / 2 |theta|^2 to the mean loss per example, for few examples.
        steps: Steps of L-BFGS, at most.
    """

    ridge: float = 0.0
    steps: int = 300

    def __post_init__(self) -> None:
        check_number("ridge", self.ridge)
        check_integer("steps", self.steps)

    def find(self, tables: Tables, places: Tensor, start: Tensor, generator: torch.Generator | None) -> Tensor:
        conditionals = Conditionals(tables, places)
        return minimise(partial(self.loss, conditionals), start, self.ridge, self.steps)

    @abstractmethod
    def loss(self, conditionals: Conditionals, theta: Tensor) -> Tensor:
        """The mean over the examples, a scalar tensor.

        Args:
            conditionals: log p(x_i = v | the others) of the examples, up to constants.
            theta: Shape (m,).
        """


class PseudoLikelihood(PenalisedFit):
    """Maximum of sum_i log p(x_i | the others): convex, right in the limit of many examples (Besag 1975).

    Args:
        ridge: Adds ridge / 2 |theta|^2 to the mean loss per example, for few examples.
        steps: Steps of L-BFGS, at most.
    """

    def loss(self, conditionals: Conditionals, theta: Tensor) -> Tensor:
        return -conditionals.logits(theta).log_softmax(-1).gather(-1, conditionals.chosen).sum((1, 2)).mean()


class RatioMatching(PenalisedFit):
    """Minimum of sum_i sum_v sigmoid(log p(x with x_i = v) / p(x))^2 over other values v (Hyvarinen 2007).

    Not convex; less led by examples that are rare under the field than the pseudo-likelihood.

    Args:
        ridge: Adds ridge / 2 |theta|^2 to the mean loss per example, for few examples.
        steps: Steps of L-BFGS, at most.
    """

    def loss(self, conditionals: Conditionals, theta: Tensor) -> Tensor:
        logits = conditionals.logits(theta)
        others = torch.ones_like(logits, dtype=torch.bool).scatter(-1, conditionals.chosen, False)
        ratios = (logits - logits.gather(-1, conditionals.chosen)).sigmoid()
        return torch.where(others, ratios, 0.0).square().sum((1, 2)).mean()


@dataclass(frozen=True)
class StochasticLikelihood(FieldFit):
    """Maximum likelihood by persistent chains: theta moves along (Cov(T) + damping I)^-1 (E_data[T] - E_chains[T]).

    The covariance is that of the examples. It starts from the pseudo-likelihood; the chains are drawn on for `sweeps`
    between steps, the rate falls as 1 / (1 + k / `steady`), and the second half of the steps is averaged (Younes 1989).

    Args:
        steps: How many.
        chains: How many.
        sweeps: Of Gibbs sampling over all variables, between steps.
        rate: Of the first step.
        steady: Steps after which the rate has fallen to half.
        damping: In units of the mean variance of a statistic.
        ridge: Of the pseudo-likelihood at the start.
    """

    steps: int = 200
    chains: int = 1000
    sweeps: int = 2
    rate: float = 0.05
    steady: int = 50
    damping: float = 0.3
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("steps", "sweeps", "steady"):
            check_integer(name, getattr(self, name))
        check_integer("chains", self.chains, 2)
        check_positive("rate", self.rate)
        check_positive("damping", self.damping)
        check_number("ridge", self.ridge)

    def find(self, tables: Tables, places: Tensor, start: Tensor, generator: torch.Generator | None) -> Tensor:
        theta = PseudoLikelihood(self.ridge).find(tables, places, start, generator)
        seen = read_statistics(tables, places, theta)
        means, metric = seen.mean(0), ExamplesMetric(seen, self.damping)
        sweep = build_sweep(tables, theta.unsqueeze(0), self.chains)
        sweep.start(generator)
        for _ in range(50):
            sweep.run(generator)
        total, count = torch.zeros_like(theta), 0
        for k in range(self.steps):
            found = read_statistics(tables, sweep.states(), theta).mean(0)
            theta = theta + self.rate / (1 + k / self.steady) * metric.solve(means - found)
            if k >= self.steps // 2:
                total, count = total + theta, count + 1
            sweep.replace_weights(theta.unsqueeze(0))
            for _ in range(self.sweeps):
                sweep.run(generator)
        return total / count


class ExamplesMetric:
    """g -> (C + damping v I)^-1 g, C the covariance of statistics (b, m) and v its mean diagonal entry.

    Args:
        statistics: T of examples, shape (b, m).
        damping: In units of v.
    """

    def __init__(self, statistics: Tensor, damping: float) -> None:
        root = (statistics - statistics.mean(0)) / max(1, len(statistics) - 1) ** 0.5
        self.ridge = damping * root.square().sum(0).mean().clamp(min=torch.finfo(root.dtype).eps)
        self.wide = root.shape[1] > len(root)
        inner = root @ root.mT if self.wide else root.mT @ root
        shift = self.ridge * torch.eye(len(inner), dtype=root.dtype, device=root.device)
        self.root, self.inverse = root, require_inverse(inner + shift, "the examples' covariance has no inverse")

    def solve(self, gradient: Tensor) -> Tensor:
        """In O(min(b, m) m)."""
        if not self.wide:
            return self.inverse @ gradient
        return (gradient - self.root.mT @ (self.inverse @ (self.root @ gradient))) / self.ridge


class Conditionals:
    """log p(x_i = v | the other variables) of examples, up to a constant, for fields of singles and pairs.

    Args:
        tables: The field's functions.
        places: Examples as positions of values, shape (b, n).

    Attributes:
        chosen: The positions, shape (b, n, 1).
        missing: Values that a variable lacks, shape (n, values).
    """

    def __init__(self, tables: Tables, places: Tensor) -> None:
        if max(map(len, tables.cliques)) > 2:
            raise ValueError(
                "the field has cliques of three variables or more, expected singles and pairs for this fit"
            )
        self.tables, self.width = tables, max(tables.counts) - 1
        counts = torch.tensor(tables.counts, device=places.device).unsqueeze(1)
        values = torch.arange(self.width + 1, device=places.device)
        self.missing, self.chosen = values >= counts, places.unsqueeze(-1)
        self.columns = (self.chosen == values[1:]).flatten(1).double()  # (b, n * width)
        self.order = torch.arange(len(tables.counts), device=places.device)

    def logits(self, theta: Tensor) -> Tensor:
        """Shape (b, n, values): zero for a variable's first value, -inf for those that it lacks."""
        constant, matrix = pair_energies(self.tables, self.order, theta.unsqueeze(0), self.width)
        energy = (self.columns @ matrix[0] + constant[0, :, 0]).unflatten(1, (-1, self.width))
        return torch.nn.functional.pad(energy, (1, 0)).masked_fill(self.missing, -torch.inf)


def read_statistics(tables: Tables, places: Tensor, like: Tensor) -> Tensor:
    """T (b, m) at states (b, n), in the dtype of `like`."""
    return tables.statistics(places).to(like)


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor, ridge: float, steps: int) -> Tensor:
    """The minimum of loss(theta) + ridge / 2 |theta|^2 by L-BFGS; a warning where it does not arrive."""
    theta = start.detach().clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [theta], max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        solver.zero_grad()
        with torch.enable_grad():
            value = loss(theta) + 0.5 * ridge * theta.square().sum()
            value.backward()
        return value

    solver.step(evaluate)
    evaluate()
    assert theta.grad is not None
    largest = float(theta.grad.abs().max())
    if not largest <= SMALL_GRADIENT:
        warnings.warn(
            f"the fit stopped after {steps} steps with a gradient of {largest:.2g}: give more steps, or a ridge",
            stacklevel=4,
        )
    return theta.detach()
