"""Positive definite matrices: normals of a known mean, by their covariance or precision."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.stable_functions import matrix_log, matrix_sqrt, safe_sqrt
from natgrad.ground.checks import check_positive
from natgrad.ground.linalg import eigh, factor_or_nan, is_positive_definite, require_factor, symmetrise
from natgrad.ground.pure import compute_exactly


@compute_exactly
class PositiveDefinite(Manifold):
    """Matrices S (..., d, d); metric scale * tr(S^-1 U S^-1 V), which A S A^T leaves as it is for every A.

    With scale 1/2 it is the Fisher metric of centred normals, or of a known mean: the same for S their covariance or
    their precision. Complete: `exp` is defined for tangents of any length. `gradient` in `natural` is the symmetric
    matrix with dF = tr(gradient dS), as autograd gives it. `retract` is S + V + V S^-1 V / 2, right to second order.

    Args:
        scale: Of the metric.
    """

    event = 2
    domain = "symmetric positive definite matrices (..., d, d)"

    def __init__(self, scale: float = 0.5) -> None:
        check_positive("scale", scale, hint="; 1/2 for the Fisher metric")
        self.scale = scale

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        factor = self._factor(point)
        products = torch.cholesky_solve(first, factor) * torch.cholesky_solve(second, factor).mT
        return self.scale * products.sum((-2, -1))

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return point @ symmetrise(gradient) @ point / self.scale

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        factor = self._factor(point)
        half = factor @ torch.linalg.matrix_exp(whiten(factor, tangent) / 2)
        return half @ half.mT

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        factor = self._factor(point)
        return factor @ matrix_log(whiten(factor, other)) @ factor.mT

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        values = eigh(whiten(self._factor(point), other))[0]
        return self.scale**0.5 * safe_sqrt(values.log().square().sum(-1))

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        """E V E^T with E = (other S^-1)^1/2."""
        factor = self._factor(point)
        root = matrix_sqrt(whiten(factor, other))
        return factor @ root @ whiten(factor, vector) @ root @ factor.mT

    def inside(self, point: Tensor) -> Tensor:
        gap, size = (each.abs().amax((-2, -1)) for each in (point - point.mT, point))
        same = gap <= 1e3 * torch.finfo(point.dtype).eps * size
        return same & is_positive_definite(point)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        """S + V + V S^-1 V / 2 = (S + (S + V) S^-1 (S + V)) / 2: positive definite for every V."""
        factor = factor_or_nan(point)
        half = torch.linalg.solve_triangular(factor, point + tangent, upper=False)
        return symmetrise(point + half.mT @ half) / 2

    def project(self, point: Tensor, vector: Tensor) -> Tensor:
        return symmetrise(vector)

    def _factor(self, point: Tensor) -> Tensor:
        return require_factor(point, self._refusal(point))

    def __repr__(self) -> str:
        return f"PositiveDefinite(scale={self.scale:g})"


def whiten(factor: Tensor, matrix: Tensor) -> Tensor:
    """L^-1 A L^-T, symmetric."""
    left = torch.linalg.solve_triangular(factor, matrix, upper=False)
    return symmetrise(torch.linalg.solve_triangular(factor, left.mT, upper=False))
