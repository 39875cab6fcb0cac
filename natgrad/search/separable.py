"""Variables of different scales that do not depend on one another: the diagonal of the covariance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.search.cma import Adaptation, check_rate
from natgrad.search.model import State


@dataclass(frozen=True)
class Separable(Adaptation):
    """Covariance matrix adaptation of d variances: time and memory linear in d.

    It learns (d + 2) / 3 times as fast as `Full`, and does not see that variables depend on one another.

    Args:
        rate: Multiplies the learning rates; variances stay positive for any.

    Reference:
        Ros & Hansen 2008.
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def statistics(self, d: int) -> int:
        return d

    def begin(self, mean: Tensor) -> State:
        return {"variances": torch.ones_like(mean)}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        return normals * state["variances"].sqrt()

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        return steps / state["variances"].sqrt()

    def variances(self, state: State) -> Tensor:
        return state["variances"]

    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        moved = keep * state["variances"] + weights @ rows.square()
        return {"variances": moved.clamp(min=1e-30 * float(moved.max()))}  # round-off
