"""A preconditioner for the Boltzmann machine's metrics: two factors, and a Lyapunov equation because J is symmetric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.energies.boltzmann import Boltzmann
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import eigh, require_inverse
from natgrad.ground.pure import RandomState, unwrap_examples
from natgrad.ground.spaces import Params, Space
from natgrad.metrics import Metric, RatioMetric
from natgrad.operators import Operator
from natgrad.structures import Memory, Preconditioner


@dataclass(frozen=True)
class PairPreconditioner(Preconditioner):
    """P ~ (G + damping I)^-1 for `ng.ratio_metric` of a `Boltzmann` machine, from K-FAC's assumption.

    Row i of the couplings has the metric E[w_i v v^T], w_i = 2 [s_i (1 - s_i)]^2 jump^2. With w_i independent of v it
    is mean(w_i) C, C the covariance of v once the biases are centred; the symmetry of J makes one equation of the rows,
    W D C + C D W = S, which the eigenvectors of W^-1/2 C W^-1/2 solve. The damping is split over W and C as in K-FAC.
    Applying P costs four (N, N) products. Memory: 2 N^2 numbers.

    Args:
        machine: Whose metric it is.
        every: Steps between eigendecompositions, O(N^3) each.
        by_rows: True solves every row as if it were free, W D C = S / 2, and takes the symmetric part: one (N, N)
            product and an inverse in place of four and an eigendecomposition.

    Raises:
        TypeError: If the machine is no `Boltzmann`.
        ValueError: If `every` is no integer >= 1.
    """

    machine: Boltzmann
    every: int = 10
    by_rows: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.machine, Boltzmann):
            raise TypeError(f"machine is {type(self.machine).__name__}, expected an ng.Boltzmann")
        check_integer("every", self.every)

    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        damping: float,
        operator: Operator | None,
        random: RandomState | None = None,
    ) -> tuple[Operator, Memory]:
        """The preconditioner of a step, and what is kept for the next one.

        Args:
            memory: From the last step; None at first.
            metric: `ng.ratio_metric` of the machine.
            params: h and J.
            inputs: Bits, shape (b, N).
            damping: Of the metric, at least 0.
            operator: The metric at these inputs; not used.
            random: The state of random generators; not used.

        Raises:
            TypeError: If the metric is another, or of another machine.
        """
        if not isinstance(metric, RatioMetric) or metric.density is not self.machine:
            raise TypeError("PairPreconditioner(machine) goes with ng.ratio_metric(machine), of the same machine")
        age = memory["age"] if memory else 0
        if not memory or age % self.every == 0:
            memory = self._factors(metric, params, unwrap_examples(inputs), damping)
        weights = memory["weights"]
        if self.by_rows:
            solve = partial(solve_rows, weights, memory["inverse"])
        else:
            solve = partial(solve_pairs, weights, memory["values"], memory["vectors"])
        return CentredInverse(self.machine, params, weights, memory["mean"], solve), {**memory, "age": age + 1}

    def _factors(self, metric: RatioMetric, params: Params, inputs: Any, damping: float) -> Memory:
        with torch.no_grad():
            x = inputs.to(params["h"].dtype)
            entries = metric.entries(x, self.machine.ratios(params, x))  # (b, N)
            weights = entries.mean(0) * (4 if self.machine.spins else 1)
            v = self.machine.values(x)
            mean = v.mean(0)
            covariance = (v - mean).mT @ (v - mean) / len(v)
            weights, covariance = add_split_damping(weights, covariance, damping)
            if self.by_rows:
                inverse = require_inverse(covariance, "the units' covariance has no inverse: give a larger damping")
                return {"weights": weights, "mean": mean, "inverse": inverse}
            scale = weights.rsqrt()
            values, vectors = eigh(scale.unsqueeze(1) * covariance * scale)
        return {"weights": weights, "mean": mean, "values": values.clamp(min=0), "vectors": vectors}


def add_split_damping(weights: Tensor, covariance: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """W + delta I and C + epsilon I with 2 delta epsilon = damping, split by their mean eigenvalues (K-FAC's pi).

    weights: The diagonal of W, (N,). covariance: C, (N, N).
    """
    pi = (weights.mean() / covariance.diagonal().mean().clamp(min=1e-30)).clamp(1e-6, 1e6).sqrt()
    root = (max(damping, 1e-12) / 2) ** 0.5
    shifted = covariance.clone()
    shifted.diagonal().add_(root / pi)
    return weights + root * pi, shifted


class CentredInverse(Operator):
    """g -> d: biases by 1 / W, couplings by `solve`, S -> D off the diagonal, (N, N) both; all centred by mean E[v]."""

    def __init__(
        self, machine: Boltzmann, params: Params, weights: Tensor, mean: Tensor, solve: Callable[[Tensor], Tensor]
    ) -> None:
        self.machine, self.space, self.solve = machine, Space(params), solve
        self.weights, self.mean = weights, mean  # (N,) both
        self.size, self.dtype, self.device = self.space.size, weights.dtype, weights.device

    def mv(self, vector: Tensor) -> Tensor:
        parts = self.space.unflatten(vector)
        h, couplings = parts["h"], self.machine.matrix(parts)
        centred = couplings - torch.outer(h, self.mean) - torch.outer(self.mean, h)
        solved = self.solve(centred.fill_diagonal_(0.0)).fill_diagonal_(0.0)
        solution = {"h": h / self.weights - solved @ self.mean, "J": self.machine.pairs(solved)}
        return self.space.flatten({name: solution[name] for name in parts})


def solve_pairs(weights: Tensor, values: Tensor, vectors: Tensor, right: Tensor) -> Tensor:
    """D of W D C + C D W = S, from the eigenvalues and eigenvectors of W^-1/2 C W^-1/2, weights the diagonal of W."""
    scale = weights.rsqrt()
    rotated = vectors.mT @ (scale.unsqueeze(1) * right * scale) @ vectors
    solved = vectors @ (rotated / (values.unsqueeze(1) + values)) @ vectors.mT
    return scale.unsqueeze(1) * solved * scale


def solve_rows(weights: Tensor, inverse: Tensor, right: Tensor) -> Tensor:
    """The symmetric part of W^-1 S C^-1 / 2: every row solved as if the couplings were not symmetric."""
    solved = (right / weights.unsqueeze(1)) @ inverse
    return 0.25 * (solved + solved.mT)
