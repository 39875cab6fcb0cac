"""Markov random fields over variables of finitely many values, with statistics of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import check_integer
from natgrad.families.class_logits import classes_kl
from natgrad.families.closed_forms import Closed
from natgrad.families.discrete_tables import LARGEST, Clique, Tables
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.field_fits import FieldFit, PseudoLikelihood
from natgrad.families.gibbs import Gibbs
from natgrad.families.tempering import LogPartitionEstimate, anneal
from natgrad.linalg import symmetrise
from natgrad.operators import DenseOperator, Operator

ENTRIES = 2**22
"""States times statistics up to which both are written out; beyond, variables are eliminated one by one."""
LISTED = 2**20
"""States up to which they are listed."""
MATRIX = 512
"""Statistics up to which the Fisher operator holds its matrix."""


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
        check_field(values, [clique for clique, _ in listed])
        ordered = [(tuple(sorted(clique)), function) for clique, function in listed]
        self._build(values, [c for c, _ in ordered], [f for _, f in ordered], gibbs)

    def _build(
        self,
        values: Sequence[Sequence[float]],
        cliques: Sequence[Clique],
        functions: Sequence[Callable[[Tensor], Tensor]],
        gibbs: Gibbs | None,
    ) -> None:
        self.n, self.cliques, self.size = len(values), tuple(cliques), len(cliques)
        self.tables, self.gibbs = Tables(values, cliques, functions), gibbs
        few = self.tables.states * self.size <= ENTRIES
        # built here: a tensor that is first made within a transform of torch.func does not outlive it
        self._table = self.tables.statistics(self.tables.every_state()) if few else None

    @property
    def exact(self) -> bool:
        """Whether sums over all states can be had."""
        return self._table is not None or self.tables.largest <= LARGEST

    def statistics(self, x: Tensor) -> Tensor:
        found = self.tables.statistics(self.tables.places(x))
        return found.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())

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
        table = self._table.to(theta).mT
        return classes_kl(theta @ table, other @ table)

    def fisher(self, theta: Tensor) -> Operator:
        """Cov(T) at theta (n,): a matrix up to 512 statistics, beyond by products of derivatives alone."""
        point = self.check(self.single(theta, "theta")).detach()
        if self.size <= MATRIX:
            return DenseOperator(symmetrise(self.covariance(point)))
        self._need_sums("fisher")
        pull = torch.func.vjp(self.expectation, point)[1]

        def product(v: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: pull(row)[0])(v.reshape(-1, self.size)).view(v.shape)

        return Closed(point, product)

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

    def fit(
        self,
        x: Tensor,
        method: FieldFit | None = None,
        *,
        start: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """theta from examples without a sum over states: for dense fields of any number of variables.

        Args:
            x: Examples, shape (b, n).
            method: `PseudoLikelihood()`, the default, `RatioMatching()` or `StochasticLikelihood()`: maximum
                likelihood, by chains. All three take fields of singles and pairs.
            start: Where it starts, shape (m,). None: zero.
            generator: Source of the chains' draws. None: the global one.

        Returns:
            Shape (m,).

        Raises:
            ValueError: Where a variable takes one value in all examples and the method has no `ridge`: its theta is
                infinite.

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
        found = method.find(self.tables, places, begin, generator)
        return found.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())

    def estimate_log_partition(
        self, theta: Tensor, *, steps: int = 500, chains: int = 500, generator: torch.Generator | None = None
    ) -> LogPartitionEstimate:
        """log Z by annealed importance sampling, with its standard error: for fields whose sums are too large.

        Args:
            theta: Natural parameters, shape (m,).
            steps: Temperatures between the independent variables and the field, one Gibbs sweep each.
            chains: Independent runs.
            generator: Source of the draws. None: the global one.

        Returns:
            `value`, `error` and `effective`, how many equally weighted runs tell as much.

        Example:
            >>> field = ng.Ising(40)
            >>> found = field.estimate_log_partition(torch.zeros(820), steps=2, chains=4)
            >>> found.value  # 40 log 2
            tensor(27.7259)
        """
        steps = check_integer("steps", steps)
        chains = check_integer("chains", chains, 2)
        with torch.no_grad():
            return anneal(self.tables, self.check(self.single(theta, "theta")).detach(), steps, chains, generator)

    def probabilities(self, theta: Tensor) -> Tensor:
        """p of all states, in the order of `states`.

        Args:
            theta: Natural parameters, shape (..., m).

        Returns:
            Shape (..., S).
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
        found = self.statistics(self.sample(self.single(theta, "theta"), n, generator=generator))
        iid = self.gibbs is None and self.exact
        chains = n if iid else min((self.gibbs or Gibbs()).chains, n)
        groups = found[: n // chains * chains].view(-1, chains, self.size).mean(0)
        centred = found - found.mean(0)
        return MomentEstimate(found.mean(0), groups.std(0) / chains**0.5, symmetrise(centred.mT @ centred / (n - 1)))

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


def check_field(values: Sequence[Sequence[float]], cliques: Sequence[Clique]) -> None:
    """ValueError for variables without a choice, and cliques of variables that do not exist."""
    for place, each in enumerate(values):
        if len(each) < 2 or len(set(each)) < len(each):
            raise ValueError(f"values of variable {place} are {tuple(each)}, expected at least two different numbers")
    if not values or not cliques:
        raise ValueError("a field needs at least one variable and one clique")
    for clique in cliques:
        if not clique or len(set(clique)) < len(clique) or not all(0 <= i < len(values) for i in clique):
            raise ValueError(f"cliques hold {clique}, expected different variables from 0 to {len(values) - 1}")
