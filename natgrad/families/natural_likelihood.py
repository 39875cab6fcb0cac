"""Both faces at once: a likelihood of a model's outputs whose rows are an exponential family's natural parameters."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.families.base import Likelihood, SeparableLikelihood
from natgrad.families.exponential import ExponentialFamily
from natgrad.operators import DiagonalOperator, Operator

ENUMERATED = 20
"""Bits up to which all outcomes are listed."""


class NaturalLikelihood(Likelihood, ExponentialFamily):
    """A likelihood of outputs (R, m) and an exponential family of theta (..., m).

    Two methods of the two faces share a name, and the arguments tell them apart: `fisher(theta)` of one distribution,
    theta (m,), is an operator, and of rows (R, m) the matrices (R, m, m); `sample(theta, n, generator=)` gives n draws,
    `sample(outputs, generator)` one target per row. Rows are not checked, since they come out of a model; theta is.
    """

    @property
    def fixed_size(self) -> int | None:
        """n where the family has been told, else None: any."""
        return None

    @property
    def size(self) -> int:  # type: ignore[override]
        """n. AttributeError where the family takes any number of parameters."""
        if self.fixed_size is None:
            raise AttributeError(f"{self!r} takes any number of parameters; say how many, as in {self._sized}")
        return self.fixed_size

    _sized = "Bernoulli(3)"
    least = 1
    """The smallest n."""

    def check_shape(self, value: Tensor, name: str) -> Tensor:
        if self.fixed_size is not None:
            return super().check_shape(value, name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            came = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} is {came}, expected a floating-point tensor (..., n)")
        if value.dim() == 0 or value.shape[-1] < self.least:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected (..., n) with n >= {self.least}")
        return value

    def fisher(self, rows: Tensor) -> Any:
        """Of theta (n,): the Fisher operator. Of rows (R, n): matrices (R, n, n).

        Args:
            rows: Natural parameters, shape (n,) or (R, n).
        """
        rows = self.check_shape(rows, "theta")
        return self.operator(self.check(rows)) if rows.dim() == 1 else self.forms(rows)

    @abstractmethod
    def forms(self, rows: Tensor) -> Tensor:
        """Cov(T) of every row, unchecked.

        Args:
            rows: Natural parameters, shape (..., n).

        Returns:
            Shape (..., n, n).
        """

    @abstractmethod
    def operator(self, theta: Tensor) -> Operator:
        """The Fisher matrix in the natural parameters of one distribution.

        Args:
            theta: Natural parameters, shape (n,).
        """

    def covariance(self, theta: Tensor) -> Tensor:
        return self.forms(self.check(theta))

    def sample(self, outputs: Any, n: Any = None, generator: torch.Generator | None = None) -> Any:
        """n draws for every theta (..., size), (n, ..., event); without n one target for every row of outputs.

        Args:
            outputs: Natural parameters, or what a model returns.
            n: How many draws. None: one target per row.
            generator: Source of the draws. None: the global one.
        """
        if n is None or isinstance(n, torch.Generator):
            return self.targets(outputs, generator if n is None else n)
        return ExponentialFamily.sample(self, outputs, n, generator=generator)

    def targets(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """One draw for every row of a model's outputs, in their layout.

        Args:
            outputs: What the model returns.
            generator: Source of the draws. None: the global one.
        """
        return self.draw(outputs.detach(), 1, generator)[0]


class Entries(NaturalLikelihood, SeparableLikelihood):
    """Independent entries with one natural parameter each: diagonal Fisher."""

    def forms(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(self.curvature(rows))

    def operator(self, theta: Tensor) -> Operator:
        return DiagonalOperator(self.curvature(theta).detach())

    def fisher_expectation(self, eta: Tensor) -> Operator:
        theta = self.natural(self.single(eta, "eta"))
        return DiagonalOperator(1 / self.curvature(theta).detach())
