"""Many variables: a covariance from a few remembered directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.search.model import GaussianModel, State
from natgrad.search.ranking import Ranking, weigh_better_half


@dataclass(frozen=True)
class LowRank(GaussianModel):
    """Limited-memory matrix adaptation, LM-MA-ES: time and memory d times `directions`.

    A = P_1 ... P_m with P_j = (1 - c_j) I + c_j v_j v_j^T, where the v_j are evolution paths of different length: no
    matrix is stored. Its rates are made for tens of variables at least.

    Args:
        directions: m; None for 4 + floor(3 ln d).

    Reference:
        Loshchilov et al. 2017.
    """

    directions: int | None = None

    def __post_init__(self) -> None:
        if self.directions is not None:
            check_integer("directions", self.directions, hint=", or None for 4 + floor(3 ln d)")

    def start(self, mean: Tensor, sigma: float, popsize: int) -> State:
        zeros = torch.zeros_like(mean)
        count = self.popsize(len(mean)) if self.directions is None else self.directions
        return {"mean": mean, "sigma": sigma, "sigma_path": zeros, "paths": zeros.new_zeros(count, len(mean)), "age": 0}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        steps = normals
        for share, path in self._factors(state):
            steps = torch.addr((1 - share) * steps, steps @ path, path, alpha=share)
        return steps

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        normals = steps
        for share, path in reversed(self._factors(state)):  # the inverse of each factor, Sherman and Morrison
            gain = share / (1 - share + share * float(path @ path))
            normals = torch.addr(normals, normals @ path, path, alpha=-gain) / (1 - share)
        return normals

    def _factors(self, state: State) -> list[tuple[float, Tensor]]:
        """The pairs (c_j, v_j); in the first generations only the first few are in use."""
        d = len(state["mean"])
        in_use = min(state["age"], len(state["paths"]))
        return [(min(0.5, 1 / (1.5**j * d)), state["paths"][j]) for j in range(in_use)]

    def advance(self, state: State, normals: Tensor, steps: Tensor, ranking: Ranking) -> State:
        popsize, d = normals.shape
        positive, mueff = weigh_better_half(popsize)
        weights = ranking.share(positive.to(normals.device))
        step = weights @ normals
        # paths of length 1 / c: p <- (1 - c) p + sqrt(c (2 - c) mueff) sum_i w_i z_i, one for sigma, one per direction
        c_sigma = min(0.5, 2 * popsize / d)
        sigma_path = (1 - c_sigma) * state["sigma_path"] + math.sqrt(mueff * c_sigma * (2 - c_sigma)) * step
        rates = popsize / d / 4.0 ** torch.arange(len(state["paths"]), dtype=step.dtype, device=step.device)
        rates = rates.clamp(max=0.5).unsqueeze(1)
        paths = (1 - rates) * state["paths"] + (mueff * rates * (2 - rates)).sqrt() * step
        return {
            "mean": torch.add(state["mean"], weights @ steps, alpha=state["sigma"]),
            "sigma": state["sigma"] * math.exp(min(1.0, c_sigma / 2 * (float(sigma_path.square().sum()) / d - 1))),
            "sigma_path": sigma_path,
            "paths": paths,
            "age": state["age"] + 1,
        }
