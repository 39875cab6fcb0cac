"""Normal distributions with a sparse precision, and with a known mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families.cancellation import in_double
from natgrad.families.event_checks import (
    check_moments,
    check_rest,
    check_spreads,
    check_varies,
    check_width,
    floating_dtype,
    root_mean_square,
    widen,
)
from natgrad.families.exponential import ExponentialFamily, Map
from natgrad.families.newton import find_natural, maximise_by_newton
from natgrad.families.normal import (
    LOG_2PI,
    POSITIVE,
    GraphNormal,
    explain_outside,
)
from natgrad.families.precision_factors import factor_covariance, half_log_det, inverse_from, precision_gap, safe_factor
from natgrad.families.symmetric_matrices import Pairs
from natgrad.ground.linalg import factor_or_nan, is_concrete, is_positive_definite


class SparseNormal(GraphNormal):
    """N(mu, P^-1) in d dimensions with P_ij = 0 unless i = j or (i, j) is an edge: a sparse precision is a graph.

    T = (x_i; x_i^2; 2 x_i x_j of the edges, in their order), theta = (P mu; -P_ii / 2; -P_ij / 2 of the edges). That of
    the complete graph, row by row, is MultivariateNormal(d). From eta to theta by Newton's method on correlations: the
    covariance is known on the graph, the precision vanishes beside it.

    Args:
        d: Number of variables.
        edges: Pairs of different variables.

    Reference:
        Dempster 1972.

    Example:
        >>> chain = ng.families.SparseNormal(3, [(0, 1), (1, 2)])
        >>> chain.size
        8
    """

    def __init__(self, d: int, edges: Iterable[Iterable[int]]) -> None:
        super().__init__(Pairs(d, edges))

    def from_mean_precision(self, mean: Tensor, precision: Tensor) -> Tensor:
        """theta of a mean and a precision.

        Args:
            mean: mu, shape (..., d).
            precision: P, shape (..., d, d).

        Returns:
            Shape (..., n).

        Raises:
            ValueError: Unless P is positive definite and zero beside the graph.
        """
        check_moments(mean, precision, self.d, "precision")
        factor_covariance(precision, "precision is not positive definite, which a distribution with a density needs")
        if is_concrete(precision) and not bool((precision[..., self._missing(precision)] == 0).all()):
            raise ValueError("precision has entries that are not zero beside the edges")
        return self.join(mean, precision)

    def from_spread(self, mean: Tensor, covariance: Tensor) -> Tensor:
        return self.join(mean, sparse_precision(self.pairs, self.pairs.pack(covariance, 2.0)))

    def _missing(self, precision: Tensor) -> Tensor:
        kept = torch.ones(self.pairs.size, dtype=precision.dtype, device=precision.device)
        return self.pairs.unpack(kept) == 0

    def natural(self, eta: Tensor) -> Tensor:
        mean, second = widen(self.check_finite(eta, "eta")).tensor_split([self.d], dim=-1)
        spread, d = second - self.pairs.products(mean), self.d
        check_rest(spread[..., :d], second[..., :d], eta.dtype, "eta has variances <= 0", "E[x_i^2] > E[x_i]^2")
        return self.join(mean, sparse_precision(self.pairs, spread)).to(eta.dtype)

    def __repr__(self) -> str:
        return f"SparseNormal({self.d}, {len(self.pairs.edges)} edges)"


class FixedMeanNormal(ExponentialFamily):
    """N(m, Sigma) with a known mean m, such as zero: n = d (d + 1) / 2 parameters.

    With z = x - m: T = (z_i^2; 2 z_i z_j), theta = (-P_ii / 2; -P_ij / 2), eta = (Sigma_ii; 2 Sigma_ij).

    Args:
        mean: m, shape (d,).
        edges: Those of a sparse precision, as in `SparseNormal`. None: all.
    """

    domain = POSITIVE

    def __init__(self, mean: Tensor, edges: Iterable[Iterable[int]] | None = None) -> None:
        if not isinstance(mean, Tensor) or mean.dim() != 1 or not mean.is_floating_point():
            raise ValueError(
                f"mean is {mean!r}, expected a floating-point tensor (d,): torch.zeros(d) for a centred one"
            )
        self.mean, self.pairs = mean, Pairs(len(mean), edges)
        self.d, self.size = len(mean), self.pairs.size

    def statistics(self, x: Tensor) -> Tensor:
        x = self.as_numbers(x, torch.get_default_dtype())
        return self.pairs.products(check_width(x, self.d) - self.mean.to(x))

    def log_partition(self, theta: Tensor) -> Tensor:
        centred = CentredNormals(self.pairs).log_partition(self.check_shape(theta, "theta"))
        return 0.5 * self.d * LOG_2PI + centred

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        factor = self.factor(theta)
        away = check_width(self.as_numbers(x, theta.dtype), self.d) - self.mean.to(theta)
        half = (away.unsqueeze(-2) @ factor).squeeze(-2)
        return half_log_det(factor) - 0.5 * (half.square().sum(-1) + self.d * LOG_2PI)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        return 0.5 * self.d * (1 + LOG_2PI) - half_log_det(self.factor(theta))

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return precision_gap(self.factor(theta), self.factor(other))

    def factor(self, theta: Tensor) -> Tensor:
        """L with L L^T = P.

        Args:
            theta: Natural parameters, shape (..., n).

        Returns:
            Shape (..., d, d).

        Raises:
            ValueError: Where P is not positive definite.
        """
        return factor_covariance(self.precision(self.check_shape(theta, "theta")), explain_outside(self))

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        factor = factor_covariance(self.precision(theta))
        z = torch.randn(
            count, *theta.shape[:-1], self.d, 1, generator=generator, dtype=theta.dtype, device=theta.device
        )
        return self.mean.to(theta) + torch.linalg.solve_triangular(factor.mT, z, upper=True).squeeze(-1)

    def inside(self, theta: Tensor) -> Tensor:
        return torch.isfinite(theta).all(-1) & is_positive_definite(self.precision(theta))

    def precision(self, theta: Tensor) -> Tensor:
        """P.

        Args:
            theta: Natural parameters, shape (..., n).

        Returns:
            Shape (..., d, d).
        """
        return -2 * self.pairs.unpack(theta)

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """m (..., d) and Sigma (..., d, d).

        Args:
            theta: Natural parameters, shape (..., n).
        """
        factor = self.factor(theta)
        return self.mean.to(theta).expand(*theta.shape[:-1], self.d), inverse_from(factor)

    def from_covariance(self, covariance: Tensor) -> Tensor:
        """theta of a covariance.

        Args:
            covariance: Sigma, shape (..., d, d), of which only the entries on the graph count.

        Returns:
            Shape (..., n).
        """
        check_moments(self.mean, covariance, self.d)
        return self.natural(self.pairs.pack(covariance, 2.0))

    def expectation(self, theta: Tensor) -> Tensor:
        return self.pairs.pack(self.mean_covariance(theta)[1], 2.0)

    def natural(self, eta: Tensor) -> Tensor:
        spread = self.check_finite(eta, "eta")
        if not self.pairs.complete:
            return self.pairs.pack(sparse_precision(self.pairs, spread) / -2)
        return self.pairs.pack(inverse_from(factor_covariance(self.pairs.unpack(spread, 2.0))) / -2)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        away, size = widen(x) - widen(self.mean).to(x.device), x.detach().abs().amax(0)
        rows = away.movedim(0, -2)
        second = rows.mT @ rows / len(x)
        if self.pairs.complete:
            check_spreads(second, size, floating_dtype(x))
        else:
            check_varies(root_mean_square(away), size, floating_dtype(x))
        return self.natural(self.pairs.pack(second, 2.0))

    def covariance(self, theta: Tensor) -> Tensor:
        return CentredNormals(self.pairs).covariance(self.check(theta))

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None]:
        """Both in O(d^3); the second one where all pairs are edges."""
        sigma, precision = self.mean_covariance(theta)[1], self.precision(theta)
        pack, unpack = self.pairs.pack, self.pairs.unpack
        back = (lambda v: pack(precision @ unpack(v, 2.0) @ precision / 2)) if self.pairs.complete else None
        return lambda v: pack(sigma @ (2 * unpack(v)) @ sigma, 2.0), back

    def __repr__(self) -> str:
        return f"FixedMeanNormal({self.d}{'' if self.pairs.complete else f', {len(self.pairs.edges)} edges'})"


@dataclass(frozen=True)
class CentredNormals:
    """What Newton's method asks of the centred normals on a graph."""

    pairs: Pairs

    def invert(self, eta: Tensor) -> Tensor:
        """Newton's method from independent variables of variance one."""
        return maximise_by_newton(
            self, eta, torch.where(self.pairs.weights(eta) == 1, -0.5, 0.0).to(eta).expand_as(eta).clone()
        )

    def sigma(self, theta: Tensor) -> Tensor:
        """Sigma (..., d, d) of theta = (-P_ii / 2; -P_ij / 2)."""
        return inverse_from(factor_or_nan(-2 * self.pairs.unpack(theta)))

    def log_partition(self, theta: Tensor) -> Tensor:
        """-1/2 log det P, infinite outside."""
        factor, fine = safe_factor(-2 * self.pairs.unpack(theta))
        return torch.where(fine, -half_log_det(factor), torch.inf)

    def expectation(self, theta: Tensor) -> Tensor:
        """Sigma_ii; 2 Sigma_ij."""
        return self.pairs.pack(self.sigma(theta), 2.0)

    def covariance(self, theta: Tensor) -> Tensor:
        """Cov(T)."""
        sigma = self.sigma(theta)
        return self.pairs.moments(torch.zeros_like(sigma[..., 0]), sigma)[1]

    def inside(self, theta: Tensor) -> Tensor:
        """Whether P is positive definite."""
        return is_positive_definite(-2 * self.pairs.unpack(theta))

    def __repr__(self) -> str:
        return f"a normal on {len(self.pairs.edges)} edges"


def sparse_precision(pairs: Pairs, spread: Tensor) -> Tensor:
    """P on the graph whose inverse has given entries there.

    spread: Sigma_ii, 2 Sigma_ij on the graph, (..., size).
    """
    variances = spread[..., : pairs.d]
    if is_concrete(spread) and not bool((variances > 0).all()):
        raise ValueError("eta has variances <= 0, expected E[x_i^2] > E[x_i]^2")
    scale = variances.sqrt()
    both = scale[..., pairs.first] * scale[..., pairs.second]
    found = find_natural(CentredNormals(pairs), (spread / both).reshape(-1, pairs.size)).view(spread.shape)
    return -2 * pairs.unpack(found / both)
