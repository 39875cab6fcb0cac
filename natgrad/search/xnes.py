"""Exponential natural evolution strategy: nothing but the natural gradient of information-geometric optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite, eigh, pseudo_inverse, solve_or_nan
from natgrad.search.cma import check_rate
from natgrad.search.model import GaussianModel, State, build_identity
from natgrad.search.ranking import Ranking


@dataclass(frozen=True)
class XNES(GaussianModel):
    """xNES: the natural gradient in exponential coordinates around the present distribution.

    At N(m, A A^T) with A = sigma B the coordinates are m + A delta and A exp(M / 2), where the Fisher matrix is the
    identity up to a factor: the natural gradient is sum_i u_i z_i for delta and sum_i u_i (z_i z_i^T - I) for M. There
    are no paths and no step-size control. exp is positive, so that the covariance is positive too, at any rate.

    Args:
        rate_mean: Rate of delta.
        rate: Rate of M; None for .6 (3 + ln d) / (d sqrt(d)).

    Raises:
        ValueError: If a rate is not positive.

    Reference:
        Glasmachers et al. 2010; Wierstra et al. 2014 for the default rate.
    """

    rate_mean: float = 1.0
    rate: float | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_mean)
        check_rate(1.0 if self.rate is None else self.rate)

    def start(self, mean: Tensor, sigma: float, popsize: int) -> State:
        return {"mean": mean, "sigma": sigma, "shape": build_identity(mean)}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        return normals @ state["shape"].mT

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        shape = state["shape"]
        normals = solve_or_nan(shape, steps.mT).mT
        if all_finite(normals):
            return normals
        return steps @ pseudo_inverse(shape @ shape.mT) @ shape  # no way along a direction without spread

    def variances(self, state: State) -> Tensor:
        return state["shape"].square().sum(1)

    def advance(self, state: State, normals: Tensor, steps: Tensor, ranking: Ranking) -> State:
        popsize, d = normals.shape
        weights = ranking.share(weigh_places(popsize).to(normals.device))
        # the gradient for M, sum_i u_i (z_i z_i^T - I): its trace moves sigma, the rest the shape
        moment = (normals.mT * weights) @ normals - weights.sum() * build_identity(state["mean"])
        rate = 0.6 * (3 + math.log(d)) / (d * math.sqrt(d)) if self.rate is None else self.rate
        trace = moment.trace() / d
        # exp(M / 2), a factor of e^10 at most in any direction, scaled to determinant 1
        values, vectors = eigh(rate * (moment - trace * build_identity(state["mean"])))
        logs = (values / 2).clamp(-10, 10)
        growth = (vectors * (logs - logs.mean()).exp()) @ vectors.mT
        return {
            "mean": torch.add(state["mean"], weights @ steps, alpha=state["sigma"] * self.rate_mean),
            "sigma": state["sigma"] * math.exp(max(-10.0, min(10.0, rate / 2 * float(trace)))),
            "shape": state["shape"] @ growth,
        }


def weigh_places(popsize: int) -> Tensor:
    """u_i = max(0, ln(popsize / 2 + 1) - ln i), normalised to 1, minus 1 / popsize. Glasmachers et al. 2010."""
    raw = (math.log(popsize / 2 + 1) - torch.arange(1, popsize + 1, dtype=torch.float64).log()).clamp(min=0)
    return raw / raw.sum() - 1 / popsize
