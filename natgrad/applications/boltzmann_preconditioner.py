"""A preconditioner for the Boltzmann machine's metrics: two factors, and a Lyapunov equation because J is symmetric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.boltzmann import Boltzmann
from natgrad.checks import check_integer
from natgrad.lapack import eigh
from natgrad.metrics import Metric, RatioMetric
from natgrad.operators import Operator
from natgrad.pure import RandomState, unwrap_examples
from natgrad.spaces import Params, Space
from natgrad.structures import Preconditioner
from natgrad.structures.base import Memory


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

    Raises:
        TypeError: If the machine is no `Boltzmann`.
        ValueError: If `every` is no integer >= 1.
    """

    machine: Boltzmann
    every: int = 10

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
        operator: Operator,
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
        memory = {**memory, "age": age + 1}
        kept = (memory[name] for name in ("weights", "mean", "values", "vectors"))
        return PairInverse(self.machine, params, *kept), memory

    def _factors(self, metric: RatioMetric, params: Params, inputs: Any, damping: float) -> Memory:
        with torch.no_grad():
            x = inputs.to(params["h"].dtype)
            entries = metric.entries(x, self.machine.ratios(params, x))  # (b, N)
            weights = entries.mean(0) * (4 if self.machine.spins else 1)
            v = self.machine.values(x)
            mean = v.mean(0)
            covariance = (v - mean).mT @ (v - mean) / len(v)
            weights, covariance = add_split_damping(weights, covariance, damping)
            scale = weights.rsqrt()
            values, vectors = eigh(scale.unsqueeze(1) * covariance * scale)
        return {"weights": weights, "mean": mean, "values": values.clamp(min=0), "vectors": vectors}


def add_split_damping(weights: Tensor, covariance: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """W + delta I and C + epsilon I with 2 delta epsilon = damping, split by their mean eigenvalues (K-FAC's pi).

    Args:
        weights: The diagonal of W, shape (N,).
        covariance: C, shape (N, N).
        damping: Of the metric, at least 0.
    """
    pi = (weights.mean() / covariance.diagonal().mean().clamp(min=1e-30)).clamp(1e-6, 1e6).sqrt()
    root = (max(damping, 1e-12) / 2) ** 0.5
    shifted = covariance.clone()
    shifted.diagonal().add_(root / pi)
    return weights + root * pi, shifted


class PairInverse(Operator):
    """g -> d: biases by 1 / W, couplings by the solution of W D C + C D W = S off the diagonal, both centred.

    Args:
        machine: Whose parameters are meant.
        params: h and J.
        weights: The diagonal of W, shape (N,).
        mean: Of v, shape (N,).
        values: Eigenvalues of W^-1/2 C W^-1/2, shape (N,).
        vectors: Its eigenvectors, shape (N, N).
    """

    def __init__(
        self, machine: Boltzmann, params: Params, weights: Tensor, mean: Tensor, values: Tensor, vectors: Tensor
    ) -> None:
        self.machine, self.space = machine, Space(params)
        self.weights, self.mean, self.values, self.vectors = weights, mean, values, vectors
        self.size, self.dtype, self.device = self.space.size, weights.dtype, weights.device

    def mv(self, vector: Tensor) -> Tensor:
        parts = self.space.unflatten(vector)
        h, couplings = parts["h"], self.machine.matrix(parts)
        centred = couplings - torch.outer(h, self.mean) - torch.outer(self.mean, h)
        solved = self._lyapunov(centred.fill_diagonal_(0.0)).fill_diagonal_(0.0)
        found = {"h": h / self.weights - solved @ self.mean, "J": self.machine.pairs(solved)}
        return self.space.flatten({name: found[name] for name in parts})

    def _lyapunov(self, right: Tensor) -> Tensor:
        scale, vectors = self.weights.rsqrt(), self.vectors
        rotated = vectors.mT @ (scale.unsqueeze(1) * right * scale) @ vectors
        solved = vectors @ (rotated / (self.values.unsqueeze(1) + self.values)) @ vectors.mT
        return scale.unsqueeze(1) * solved * scale
