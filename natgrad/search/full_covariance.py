"""CMA-ES: the whole covariance matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh, solve_psd, symmetrise
from natgrad.search.cma import FASTER, Adaptation, adaptation_constants, check_rate
from natgrad.search.model import State, eye_like

CONDITION = 1e14


@dataclass(frozen=True)
class Full(Adaptation):
    """Covariance matrix adaptation with d (d + 1) / 2 entries: the default, up to some hundreds of variables.

    Invariant under rotations of the space.

    Args:
        rate: Multiplies the learning rates of the covariance, which stays positive definite for any.
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def statistics(self, d: int) -> int:
        return d * (d + 1) // 2

    def begin(self, mean: Tensor) -> State:
        eye = eye_like(mean)
        return {"covariance": eye, "root": eye, "condition": 1.0, "rooted": 0}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        return normals @ state["root"]

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        return solve_psd(state["root"], steps.mT).mT  # no way along a direction without spread

    def variances(self, state: State) -> Tensor:
        return state["covariance"].diagonal()

    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        covariance = torch.addmm(state["covariance"], rows.mT * weights, rows, beta=keep)
        d, age = rows.shape[1], state["age"] + 1
        c = adaptation_constants(d, len(rows) - 1, self.statistics(d), self.rate)
        # the root is made anew once the covariance has moved by about a tenth of 1 / d: Hansen 2016, B.2
        if age - state["rooted"] <= FASTER / (10 * d * (c.c_1 + c.c_mu)):  # as seldom as with the tutorial's rates
            return {"covariance": covariance}
        return {**take_root(symmetrise(covariance)), "rooted": age}

    def trouble(self, state: State) -> str | None:
        if state["condition"] > CONDITION:
            return f"condition: the covariance's condition number is above {CONDITION:g}"
        return None


def take_root(covariance: Tensor) -> State:
    """C and its symmetric root C^1/2, with eigenvalues of at least lambda_max / 1e15.

    covariance: C, (d, d).
    """
    values, vectors = eigh(covariance)
    largest = float(values[-1])
    floor = largest / (10 * CONDITION)
    smallest = float(values[0])
    if smallest < floor:  # round-off
        values = values.clamp(min=floor)
        covariance = symmetrise((vectors * values) @ vectors.mT)
    root = symmetrise((vectors * values.sqrt()) @ vectors.mT)
    return {"covariance": covariance, "root": root, "condition": largest / max(smallest, floor)}
