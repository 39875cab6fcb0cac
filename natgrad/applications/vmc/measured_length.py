"""The system of a step of stochastic reconfiguration in blocks: S at this step's samples measures what they propose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from natgrad.operators import Operator
from natgrad.optim import LinearSystem, Solved
from natgrad.solvers import Solution
from natgrad.typed_torch import measure_norm


@dataclass(frozen=True)
class MeasuredSystem:
    """The system of a structure by layers, whose solutions take their length from S itself.

    Blocks leave out what layers, and the positions of a convolution, have in common: along a translation S is as many
    times larger than its blocks as there are sites, and their own step would be as many times too long.

    Args:
        blocks: The structure's system.
        whole: S at the samples, centred.
        gradient: F, shape (n,).
    """

    blocks: LinearSystem
    whole: Operator
    gradient: Tensor

    @property
    def operator(self) -> Operator:
        """G, of the blocks."""
        return self.blocks.operator

    @property
    def memory(self) -> dict[str, Any]:
        """The structure's."""
        return self.blocks.memory

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """The solution with the damping's number at `level`, from a guess (n,)."""
        found = self.blocks.solve(level, guess)
        solution = measure_length(self.whole, self.gradient, found.solution, found.damping, guess)
        return replace(found, solution=solution)


def measure_length(
    operator: Operator, rhs: Tensor, found: Solution, damping: float | Tensor, guess: Tensor | None
) -> Solution:
    """a x with the a that minimises 1/2 a^2 x^T (S + damping I) x - a x^T (b + damping x_0): one product with S.

    Args:
        operator: S, of size n.
        rhs: b, shape (n,).
        found: x, of another matrix than S.
        damping: A number, or one per entry (n,).
        guess: x_0, to which damping pulls, shape (n,); None: to zero.
    """
    value = found.value
    image = operator.mv(value) + damping * value
    pulled = rhs if guess is None else rhs + damping * guess
    form = value @ image
    length = torch.where(form > 0, (value @ pulled) / form, 1.0).clamp(min=0)
    value, image = length * value, length * image
    residual = measure_norm(rhs - image)
    return replace(found, value=value, image=image, residual=residual, steps=found.steps + 1, basis=None, iterates=())
