"""Search of bits: what the independent model and Markov random fields have in common."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import as_popsize
from natgrad.applications.search.monomials import Monomials, draw_signs
from natgrad.applications.search.relaxation import Relaxation
from natgrad.checks import check_integer


class BitSearch(Relaxation):
    """A Markov random field p(s) ~ exp(theta T(s)) over bits x, with products of the signs s = 2 x - 1 as T.

    Args:
        n: Number of bits.
        monomials: The products of signs T.
        popsize: Candidates per generation.
        seed: Of the search's own generator.
        limit: Largest absolute value of any parameter.
    """

    def __init__(self, n: int, monomials: Monomials, popsize: int, seed: int | None, limit: float) -> None:
        self.limit = limit
        self.monomials = monomials
        self.sweeps = 20
        super().__init__(n, len(monomials), popsize, seed, n * math.log(2))

    def ask(self) -> Tensor:
        n = self._dim()
        start = 2.0 * torch.randint(0, 2, (self.popsize, n), generator=self._generator).to(torch.float64) - 1
        if self.theta.any():  # all zeros before the first step: the start is a draw already
            start = draw_signs(self.monomials, self.theta, start, self.sweeps, self._generator)
        return (start + 1) / 2

    def statistics(self, points: Tensor) -> Tensor:
        return self.monomials.values(2 * points - 1)

    def _limit_parameters(self, theta: Tensor) -> Tensor:
        return theta.clamp(-self.limit, self.limit)

    def _drop_limited(self, direction: Tensor) -> Tensor:
        at_limit = self.theta.abs() >= self.limit * (1 - 1e-9)
        return torch.where(at_limit & (self.theta * direction < 0), 0.0, direction)

    def _check_candidates(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points, values = super()._check_candidates(X, F)
        if not bool(((points == 0) | (points == 1)).all()):
            raise ValueError("X has entries other than 0 and 1, expected the bits that ask() gave")
        return points, values

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"sets": list(self.monomials.sets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.monomials = Monomials.of(self._dim(), [tuple(s) for s in state["sets"]])


def as_bits(n: int) -> int:
    """The number of bits.

    Args:
        n: What the caller gave.

    Raises:
        ValueError: If it is no integer >= 1.
    """
    return check_integer("n", n, 1, hint=": the number of bits")


def as_bit_popsize(popsize: int | None, n: int) -> int:
    """Candidates per generation; default a quarter of the bits, at least 20.

    Args:
        popsize: What the caller gave, or None.
        n: Number of bits.
    """
    return as_popsize(popsize, max(20, n // 4))
