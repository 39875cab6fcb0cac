"""Markov random fields over variables of two values, with products as statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.families.gibbs import Gibbs
from natgrad.families.markov_field import MarkovField, check_field
from natgrad.ground.checks import check_integer


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
        if n is None or len(values) != 2 or not values[0] < values[1]:
            raise ValueError(f"values are {values}, expected two numbers, the lower first, such as (-1, 1) or (0, 1)")
        every = (*((i,) for i in range(n)), *itertools.combinations(range(n), 2))
        chosen = every if cliques is None else tuple(tuple(sorted(clique)) for clique in cliques)
        check_field([values] * n, chosen)
        if len(set(chosen)) < len(chosen):
            raise ValueError("cliques must be given only once each: a double has no parameter of its own")
        self.values = (float(values[0]), float(values[1]))
        self._build([self.values] * n, chosen, [multiply_values] * len(chosen), gibbs)

    def statistics(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.n,):
            came = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {type(x).__name__}"
            raise ValueError(f"x {came}, expected (..., {self.n}) of the values {self.values}")
        if not bool(((x == self.values[0]) | (x == self.values[1])).all()):
            raise ValueError(f"x has entries that are neither {self.values[0]:g} nor {self.values[1]:g}")
        return super().statistics(x)

    def __repr__(self) -> str:
        return f"Ising({self.n}, {self.size} cliques, values={self.values})"


def multiply_values(x: Tensor) -> Tensor:
    """prod_i x_i, (..., k) -> (...)."""
    return torch.prod(x, dim=-1)
