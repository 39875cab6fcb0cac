"""Markov random fields over variables of finitely many values: products, or functions of one's own, as statistics."""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from natgrad.families.discrete import classes_kl
from natgrad.families.discrete_tables import LARGEST, Tables
from natgrad.families.event_checks import floating_dtype
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.gibbs import Gibbs, build_energy, build_sweep, pair_energies
from natgrad.ground.checks import check_integer, check_number, check_positive
from natgrad.ground.linalg import require_inverse, symmetrise
from natgrad.ground.pure import compute_exactly, set_modes_aside
from natgrad.ground.typed_torch import Map
from natgrad.operators import Closed, DenseOperator, Operator

ENTRIES = 2**22
"""States times statistics up to which both are written out; beyond, variables are eliminated one by one."""
LISTED = 2**20
"""States up to which they are listed."""
MATRIX = 512
"""Statistics up to which the Fisher operator holds its matrix."""


@compute_exactly
class MarkovField(ExponentialFamily):
    """p(x) proportional to exp(sum_c theta_c f_c(x_c)): functions f_c of cliques x_c of a few variables each.

    Every term has one parameter. None may be constant, or a sum of the others, if `natural` is to be unique.

    Sums over all states are exact where they can be: written out for few states, else by elimination of one variable
    after the other, for chains, trees and narrow grids of any length (tables of at most 4 million entries); gradients
    flow through both. Draws are then independent. Elsewhere `sample` is Gibbs sampling, `estimate` gives means with
    their errors, and what needs the sum is refused.

    Args:
        values: For every variable the numbers it can be, such as [(0, 1), (0, 1, 2)].
        terms: (clique, function) each. The clique is positions of variables. The function maps x (..., k), its k values
            in ascending order of the variables, to (...).
        gibbs: Settings of Gibbs sampling. Where they are given, it is used everywhere.

    Example:
        >>> field = ng.MarkovField([(0, 1), (0, 1, 2)], [((0, 1), lambda x: x.prod(-1))])
        >>> field.log_partition(torch.zeros(1)).exp()  # 6 states
        tensor(6.0000)
    """

    def __init__(
        self,
        values: Sequence[Sequence[float]],
        terms: Iterable[tuple[Iterable[int], Callable[[Tensor], Tensor]]],
        gibbs: Gibbs | None = None,
    ) -> None:
        listed = [(tuple(clique), function) for clique, function in terms]
        for place, each in enumerate(values):
            if len(each) < 2 or len(set(each)) < len(each):
                came = f"values of variable {place} are {tuple(each)}"
                raise ValueError(f"{came}, expected at least two different numbers")
        if not values or not listed:
            raise ValueError("a field needs at least one variable and one clique")
        for clique, _ in listed:
            if not clique or len(set(clique)) < len(clique) or not all(0 <= i < len(values) for i in clique):
                raise ValueError(f"cliques hold {clique}, expected different variables from 0 to {len(values) - 1}")
        self.n, self.cliques, self.size = len(values), tuple(tuple(sorted(c)) for c, _ in listed), len(listed)
        self.tables, self.gibbs = Tables(values, self.cliques, [function for _, function in listed]), gibbs
        few = self.tables.states * self.size <= ENTRIES
        # built here: a tensor that is first made within a transform of torch.func does not outlive it
        self._table = self.tables.statistics(self.tables.every_state()) if few else None

    @property
    def exact(self) -> bool:
        """Whether sums over all states can be had."""
        return self._table is not None or self.tables.largest <= LARGEST

    def statistics(self, x: Tensor) -> Tensor:
        return self.tables.statistics(self.tables.places(x)).to(floating_dtype(x))

    def log_partition(self, theta: Tensor) -> Tensor:
        self.check_shape(theta, "theta")
        if self._table is not None:
            return (theta @ self._table.to(theta).mT).logsumexp(-1)
        self._need_sums("log_partition")
        return self.tables.log_partition(theta)

    def expectation(self, theta: Tensor) -> Tensor:
        if self._table is not None:
            return self.probabilities(theta) @ self._table.to(theta)
        self._need_sums("expectation")
        return super().expectation(theta)

    def covariance(self, theta: Tensor) -> Tensor:
        if self._table is None:
            self._need_sums("covariance")
            return super().covariance(theta)
        p, table = self.probabilities(theta), self._table.to(theta)
        centred = table - (p @ table).unsqueeze(-2)  # (..., S, size)
        return centred.mT @ (p.unsqueeze(-1) * centred)

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        if self._table is None:
            self._need_sums("kl")
            return super().kl(theta, other)
        theta, other = self.check(theta), self.check(other)
        table = self._table.mT
        return classes_kl(theta @ table.to(theta), other @ table.to(other))

    def _operator(self, theta: Tensor) -> Operator:
        """A matrix up to 512 statistics, beyond by products of derivatives alone."""
        if self.size <= MATRIX:
            return super()._operator(theta)
        self._need_sums("fisher")
        pull = torch.func.vjp(self.expectation, theta)[1]

        def product(v: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: pull(row)[0])(v.reshape(-1, self.size)).view(v.shape)

        return Closed(theta, product, origin=(self._operator, (theta,)))

    def mle(self, x: Tensor) -> Tensor:
        """Maximum likelihood from x (b, n). ValueError where it needs sums that are too large."""
        if not self.exact:
            raise ValueError(
                f"mle of {self!r} takes sums with a table of at least {self.tables.largest} entries, more than "
                f"{LARGEST}; fit(x) takes none: the pseudo-likelihood, ng.families.RatioMatching() or "
                "StochasticLikelihood(). ng.ratio_matching_loss with ng.ang or ng.ratio_metric trains other energies. "
                "Or give fewer cliques: chains, trees and narrow grids are exact"
            )
        return super().mle(x)

    @set_modes_aside
    def fit(
        self,
        x: Tensor,
        method: FieldFit | None = None,
        *,
        start: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """theta (m,) from examples without a sum over states: for dense fields of any number of variables.

        Args:
            x: Examples, shape (b, n).
            method: `PseudoLikelihood()`, the default, `RatioMatching()` or `StochasticLikelihood()`: maximum
                likelihood, by chains. All three take fields of singles and pairs.
            start: Where it starts, shape (m,). None: zero.
            generator: Source of the chains' draws. None: the global one.

        Raises:
            ValueError: Where a variable takes one value in all examples and the method has no `ridge`: its theta is
                infinite. Where the others tell a variable in all examples it is too, and a warning says so.

        Example:
            >>> field = ng.Ising(30)
            >>> x = field.sample(torch.zeros(465), 500, generator=torch.Generator().manual_seed(0))
            >>> field.fit(x).abs().mean() < 0.1
            tensor(True)
        """
        method = PseudoLikelihood() if method is None else method
        if not isinstance(method, FieldFit):
            raise TypeError(f"method is {method!r}, expected one such as ng.families.PseudoLikelihood()")
        places = self.tables.places(x).reshape(-1, self.n)
        if len(places) == 0:
            raise ValueError("x is empty, expected at least one example")
        fixed = (places == places[0]).all(0).nonzero().flatten().tolist()
        if fixed and not getattr(method, "ridge", 1.0):
            raise ValueError(
                f"x has one value of variable {fixed[0]} in all examples, whose theta would be infinite: give a ridge, "
                f"as in {type(method).__name__}(ridge=0.01), or more examples"
            )
        zero = torch.zeros(self.size, dtype=torch.float64, device=x.device)
        begin = zero if start is None else self.single(start, "start").to(zero)
        return method._find(self.tables, places, begin, generator).to(floating_dtype(x))

    def estimate_log_partition(
        self, theta: Tensor, *, steps: int = 500, chains: int = 500, generator: torch.Generator | None = None
    ) -> LogPartitionEstimate:
        """log Z by annealed importance sampling (Neal 2001), with its error: for fields whose sums are too large.

        Args:
            theta: Natural parameters, shape (m,).
            steps: Temperatures between the independent variables and the field, one Gibbs sweep each.
            chains: Independent runs.
            generator: Source of the draws. None: the global one.

        Example:
            >>> field = ng.Ising(40)
            >>> found = field.estimate_log_partition(torch.zeros(820), steps=2, chains=4)
            >>> found.value  # 40 log 2
            tensor(27.7259)
        """
        steps = check_integer("steps", steps)
        chains = check_integer("chains", chains, 2)
        theta = self.check(self.single(theta, "theta")).detach()
        with torch.no_grad():  # annealed importance sampling from independent uniform variables, beta = 0, to beta = 1
            sweep = build_sweep(self.tables, torch.zeros_like(theta).unsqueeze(0), chains)
            energy = build_energy(self.tables, theta)
            sweep.start(generator)
            log_weights = theta.new_full((chains,), sum(math.log(count) for count in self.tables.counts))
            for k in range(1, steps + 1):
                log_weights = log_weights + energy(sweep.states()) / steps
                if k < steps:
                    sweep.replace_weights((k / steps * theta).unsqueeze(0))
                    sweep.run(generator)
        value = log_weights.logsumexp(0) - math.log(chains)
        weights = (log_weights - value).exp()
        effective = weights.sum().square() / weights.square().sum()
        return LogPartitionEstimate(value, weights.std() / chains**0.5, effective)

    def probabilities(self, theta: Tensor) -> Tensor:
        """p of all states, in the order of `states`, shape (..., S).

        Args:
            theta: Natural parameters, shape (..., m).
        """
        if self._table is not None:
            return (self.check(theta) @ self._table.to(theta).mT).softmax(-1)
        self._need_list()
        return self.tables.joint(self.check(theta)).softmax(-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        if self.gibbs is not None or not self.exact:
            places = (self.gibbs or Gibbs()).draw(self.tables, theta, count, generator)
        elif self._table is not None:
            p = self.probabilities(theta)
            chosen = torch.multinomial(p.reshape(-1, p.shape[-1]), count, replacement=True, generator=generator)
            places = self.tables.every_state().to(theta.device)[chosen.mT].view(count, *theta.shape[:-1], self.n)
        else:
            places = self.tables.draw(theta, count, generator)
        return self.tables.points(places, theta)

    def outcomes(self, theta: Tensor) -> Tensor:
        return self.states.to(theta)

    @property
    def states(self) -> Tensor:
        """All states (S, n) in float64, the last variable changing fastest."""
        self._need_list()
        places = self.tables.every_state()
        return self.tables.points(places, torch.empty(0, dtype=torch.float64))

    def estimate(self, theta: Tensor, n: int, *, generator: torch.Generator | None = None) -> MomentEstimate:
        """Means and covariance of T from draws, with the means' standard errors.

        Where the draws are Gibbs sampling's, those of one chain depend on one another: the errors then come from the
        means of chains. They know nothing of modes that no chain has visited.

        Args:
            theta: Natural parameters, shape (m,).
            n: How many draws.
            generator: Source of the draws. None: the global one.
        """
        if n < 4:
            raise ValueError(f"n is {n}, expected at least 4 draws: an error comes from their differences")
        statistics = self.statistics(self.sample(self.single(theta, "theta"), n, generator=generator))
        iid = self.gibbs is None and self.exact
        chains = n if iid else min((self.gibbs or Gibbs()).chains, n)
        groups = statistics[: n // chains * chains].view(-1, chains, self.size).mean(0)
        centred = statistics - statistics.mean(0)
        return MomentEstimate(
            statistics.mean(0), groups.std(0) / chains**0.5, symmetrise(centred.mT @ centred / (n - 1))
        )

    def _need_sums(self, what: str) -> None:
        if not self.exact:
            raise ValueError(
                f"{what} of {self!r} takes a sum with a table of at least {self.tables.largest} entries, more than "
                f"{LARGEST}; estimate(theta, n) gives means and covariances from draws, with errors"
            )

    def _need_list(self) -> None:
        if self.tables.states > LISTED:
            raise ValueError(f"{self!r} has {self.tables.states:.3g} states, of which at most {LISTED} are listed")

    def __repr__(self) -> str:
        return f"MarkovField({self.n} variables, {self.size} terms)"


class Ising(MarkovField):
    """p(x) proportional to exp(sum_c theta_c prod_{i in c} x_i), x_i one of two values.

    log_partition, expectation and Fisher are exact, and draws independent, for about 20 variables with any cliques and
    for any number in chains, trees and narrow grids; see `MarkovField` for what happens beyond. Cliques of one variable
    alone give the independence model.

    Args:
        n: Number of variables.
        cliques: Tuples of variables, each with one parameter. Default: all singles, then all pairs row by row.
        values: The two values, the lower first: (-1, 1), (0, 1) or others.
        gibbs: Settings of Gibbs sampling.

    Example:
        >>> field = ng.Ising(3, cliques=[(0, 1), (1, 2)])
        >>> field.expectation(torch.tensor([0.5, -0.5]))  # tanh(0.5), tanh(-0.5)
        tensor([ 0.4621, -0.4621])
    """

    def __init__(
        self,
        n: int,
        cliques: Iterable[Iterable[int]] | None = None,
        values: tuple[float, float] = (-1, 1),
        gibbs: Gibbs | None = None,
    ) -> None:
        check_integer("n", n, of="the number of variables")
        if len(values) != 2 or not values[0] < values[1]:
            raise ValueError(f"values are {values}, expected two numbers, the lower first, such as (-1, 1) or (0, 1)")
        every = (*((i,) for i in range(n)), *itertools.combinations(range(n), 2))
        chosen = every if cliques is None else tuple(tuple(sorted(clique)) for clique in cliques)
        if len(set(chosen)) < len(chosen):
            raise ValueError("cliques must be given only once each: a double has no parameter of its own")
        self.values = (float(values[0]), float(values[1]))
        super().__init__([self.values] * n, [(clique, partial(torch.prod, dim=-1)) for clique in chosen], gibbs)

    def __repr__(self) -> str:
        return f"Ising({self.n}, {self.size} cliques, values={self.values})"


@dataclass(frozen=True)
class MomentEstimate:
    """Means of the statistics from draws, their standard errors, and Cov(T).

    Args:
        mean: Shape (m,).
        error: Standard errors of the means, shape (m,).
        covariance: Cov(T), shape (m, m).
    """

    mean: Tensor
    error: Tensor
    covariance: Tensor

    def fisher(self) -> Operator:
        """The estimated Fisher matrix; singular where there were fewer draws than statistics."""
        return DenseOperator(self.covariance)


@dataclass(frozen=True)
class LogPartitionEstimate:
    """log Z from draws.

    Args:
        value: In nats.
        error: Its standard error, by the spread of the weights.
        effective: How many equally weighted draws are worth as much. With few, do not trust the error: anneal more
            slowly.
    """

    value: Tensor
    error: Tensor
    effective: Tensor


# Fits of fields whose sums are too large: pseudo-likelihood, ratio matching, stochastic maximum likelihood

SMALL_GRADIENT = 1e-4
"""A fit whose largest entry of the gradient stays above this warns."""


class FieldFit(ABC):
    """A way from examples to theta that takes no sum over states: `PseudoLikelihood` and its like."""

    @abstractmethod
    def _find(self, tables: Tables, places: Tensor, start: Tensor, generator: torch.Generator | None) -> Tensor:
        """theta (m,) of examples (b, n) as positions of values, from a start (m,) in float64."""


@dataclass(frozen=True)
class PenalisedFit(FieldFit):
    """The minimum of a mean loss per example, by L-BFGS."""

    ridge: float = 0.0  # adds ridge / 2 |theta|^2 to the mean loss per example, for few examples
    steps: int = 300  # steps of L-BFGS, at most

    def __post_init__(self) -> None:
        check_number("ridge", self.ridge)
        check_integer("steps", self.steps)

    def _find(self, tables: Tables, places: Tensor, start: Tensor, generator: torch.Generator | None) -> Tensor:
        """The minimum of the loss + ridge / 2 |theta|^2; a warning where L-BFGS does not arrive, or at infinity."""
        conditionals = Conditionals(tables, places)
        theta, largest = self._minimise(conditionals, start, self.ridge)
        if largest <= SMALL_GRADIENT and self.ridge == 0:
            # on the way to infinity a gradient like exp(-t) stops at the least ridge; a minimum hardly moves
            moved = conditionals.logits(theta) - conditionals.logits(self._minimise(conditionals, theta, 1e-6)[0])
            if float(moved.nan_to_num().abs().max()) > 1:
                warnings.warn(
                    "these examples have no finite fit: the others tell a variable in all of them, and theta is where "
                    f"the steps ended on the way to infinity; give a ridge, as in {type(self).__name__}(ridge=0.01), "
                    "or more examples",
                    stacklevel=4,
                )
        if not largest <= SMALL_GRADIENT:
            warnings.warn(
                f"the fit stopped after {self.steps} steps with a gradient of {largest:.2g}: give more, or a ridge",
                stacklevel=4,
            )
        return theta

    def _minimise(self, conditionals: Conditionals, start: Tensor, ridge: float) -> tuple[Tensor, float]:
        """Where L-BFGS ends, and the largest entry of the gradient there."""
        theta = start.detach().clone().requires_grad_()
        solver = torch.optim.LBFGS(
            [theta], max_iter=self.steps, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def evaluate() -> Tensor:
            solver.zero_grad()
            with torch.enable_grad():
                value = self._loss(conditionals, theta) + 0.5 * ridge * theta.square().sum()
                value.backward()
            return value

        solver.step(evaluate)
        evaluate()
        assert theta.grad is not None
        return theta.detach(), float(theta.grad.abs().max())

    @abstractmethod
    def _loss(self, conditionals: Conditionals, theta: Tensor) -> Tensor:
        """The mean over the examples, a scalar tensor."""


class PseudoLikelihood(PenalisedFit):
    """Maximum of sum_i log p(x_i | the others): convex, right in the limit of many examples (Besag 1975).

    Args:
        ridge: Adds ridge / 2 |theta|^2 to the mean loss per example, for few examples.
        steps: Steps of L-BFGS, at most.
    """

    def _loss(self, conditionals: Conditionals, theta: Tensor) -> Tensor:
        return -conditionals.logits(theta).log_softmax(-1).gather(-1, conditionals.chosen).sum((1, 2)).mean()


class RatioMatching(PenalisedFit):
    """Minimum of sum_i sum_v sigmoid(log p(x with x_i = v) / p(x))^2 over other values v (Hyvarinen 2007).

    Not convex; less led by examples that are rare under the field than the pseudo-likelihood.

    Args:
        ridge: Adds ridge / 2 |theta|^2 to the mean loss per example, for few examples.
        steps: Steps of L-BFGS, at most.
    """

    def _loss(self, conditionals: Conditionals, theta: Tensor) -> Tensor:
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

    def _find(self, tables: Tables, places: Tensor, start: Tensor, generator: torch.Generator | None) -> Tensor:
        theta = PseudoLikelihood(self.ridge)._find(tables, places, start, generator)
        seen = tables.statistics(places).to(theta)
        means, solve = seen.mean(0), invert_examples(seen, self.damping)
        sweep = build_sweep(tables, theta.unsqueeze(0), self.chains)
        sweep.start(generator)
        for _ in range(50):
            sweep.run(generator)
        total, count = torch.zeros_like(theta), 0
        for k in range(self.steps):
            drawn = tables.statistics(sweep.states()).to(theta).mean(0)
            theta = theta + self.rate / (1 + k / self.steady) * solve(means - drawn)
            if k >= self.steps // 2:
                total, count = total + theta, count + 1
            sweep.replace_weights(theta.unsqueeze(0))
            for _ in range(self.sweeps):
                sweep.run(generator)
        return total / count


def invert_examples(statistics: Tensor, damping: float) -> Map:
    """g -> (C + damping v I)^-1 g, C the covariance of statistics (b, m) and v its mean variance, in O(min(b, m) m)."""
    root = (statistics - statistics.mean(0)) / max(1, len(statistics) - 1) ** 0.5
    ridge = damping * root.square().sum(0).mean().clamp(min=torch.finfo(root.dtype).eps)
    wide = root.shape[1] > len(root)
    inner = root @ root.mT if wide else root.mT @ root
    shift = ridge * torch.eye(len(inner), dtype=root.dtype, device=root.device)
    inverse = require_inverse(inner + shift, "the examples' covariance has no inverse")
    if wide:
        return lambda gradient: (gradient - root.mT @ (inverse @ (root @ gradient))) / ridge
    return lambda gradient: inverse @ gradient


class Conditionals:
    """log p(x_i = v | the other variables) of examples (b, n), up to a constant, for fields of singles and pairs."""

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
