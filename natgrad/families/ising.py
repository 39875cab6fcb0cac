"""Markov random fields over variables of two values, exact by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from natgrad.families.exponential import ExponentialFamily

LARGEST = 20
"""Variables up to which the states are enumerated."""


class Ising(ExponentialFamily):
    """p(x) proportional to exp(sum_c theta_c prod_{i in c} x_i), x_i one of two values.

    n: variables, up to 20.   cliques: tuples of variables, each with one parameter; default all singles, then all pairs
    row by row.   values: the lower first; (-1, 1) or (0, 1), or others.

    log_partition, expectation and Fisher are exact sums over the 2^n states, draws are independent. Cliques of one
    variable alone give the independence model.
    """

    def __init__(
        self, n: int, cliques: Iterable[Iterable[int]] | None = None, values: tuple[float, float] = (-1, 1)
    ) -> None:
        if not isinstance(n, int) or not 1 <= n <= LARGEST:
            raise ValueError(f"n is {n!r}, expected an integer from 1 to {LARGEST}: all 2^n states are enumerated")
        if len(values) != 2 or not values[0] < values[1]:
            raise ValueError(f"values are {values}, expected two numbers, the lower first, such as (-1, 1) or (0, 1)")
        every = (*((i,) for i in range(n)), *itertools.combinations(range(n), 2))
        self.n, self.values = n, (float(values[0]), float(values[1]))
        self.cliques = every if cliques is None else tuple(tuple(sorted(clique)) for clique in cliques)
        self._check_cliques()
        self.size = len(self.cliques)

    def statistics(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.n,):
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., {self.n}) of the values {self.values}")
        if not bool(((x == self.values[0]) | (x == self.values[1])).all()):
            raise ValueError(f"x has entries that are neither {self.values[0]:g} nor {self.values[1]:g}")
        return self._products(x if x.is_floating_point() else x.to(torch.get_default_dtype()))

    def log_partition(self, theta: Tensor) -> Tensor:
        return (theta @ self._table.to(theta).mT).logsumexp(-1)

    def probabilities(self, theta: Tensor) -> Tensor:
        """p of all states, (..., 2^n), in the order of `states`."""
        return (self.check(theta) @ self._table.to(theta).mT).softmax(-1)

    def expectation(self, theta: Tensor) -> Tensor:
        return self.probabilities(theta) @ self._table.to(theta)

    def covariance(self, theta: Tensor) -> Tensor:
        p, table = self.probabilities(theta), self._table.to(theta)
        centred = table - (p @ table).unsqueeze(-2)  # (..., 2^n, size)
        return centred.mT @ (p.unsqueeze(-1) * centred)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        p = self.probabilities(theta)
        places = torch.multinomial(p.reshape(-1, p.shape[-1]), count, replacement=True, generator=generator)
        return self.states.to(theta)[places.mT].view(count, *theta.shape[:-1], self.n)

    def outcomes(self, theta: Tensor) -> Tensor:
        return self.states.to(theta)

    @cached_property
    def states(self) -> Tensor:
        """All states (2^n, n) in float64, the last variable changing fastest."""
        axes = [torch.tensor(self.values, dtype=torch.float64)] * self.n
        return torch.cartesian_prod(*axes).view(-1, self.n)

    @cached_property
    def _table(self) -> Tensor:
        return self._products(self.states)

    def _products(self, x: Tensor) -> Tensor:
        return torch.stack([x[..., list(clique)].prod(-1) for clique in self.cliques], dim=-1)

    def _check_cliques(self) -> None:
        for clique in self.cliques:
            if not clique or len(set(clique)) < len(clique) or not 0 <= clique[0] <= clique[-1] < self.n:
                raise ValueError(f"cliques hold {clique}, expected different variables from 0 to {self.n - 1}")
        if not self.cliques or len(set(self.cliques)) < len(self.cliques):
            raise ValueError("cliques must be at least one, and each only once: a double has no parameter of its own")

    def __repr__(self) -> str:
        return f"Ising({self.n}, {self.size} cliques, values={self.values})"
