"""Normal distributions with a sparse precision, and with a known mean."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from natgrad.families.cancellation import in_double
from natgrad.families.event_checks import check_moments, check_rest, check_width, widen
from natgrad.families.newton import find_natural
from natgrad.families.normal import POSITIVE, GraphNormal, MultivariateNormal, explain_outside, measure_spread
from natgrad.families.product_families import Embedded
from natgrad.families.symmetric_matrices import Pairs, factor_covariance, inverse_from
from natgrad.ground.linalg import is_concrete
from natgrad.operators.base import Map


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
        return self._complete(mean, self.pairs.pack(covariance, 2.0))

    def _missing(self, precision: Tensor) -> Tensor:
        return self.pairs.unpack(torch.ones(self.pairs.size, dtype=precision.dtype, device=precision.device)) == 0

    def natural(self, eta: Tensor) -> Tensor:
        mean, second = widen(self.check_finite(eta, "eta")).tensor_split([self.d], dim=-1)
        spread, d = second - self.pairs.products(mean), self.d
        check_rest(spread[..., :d], second[..., :d], eta.dtype, "eta has variances <= 0", "E[x_i^2] > E[x_i]^2")
        return self._complete(mean, spread).to(eta.dtype)

    @cached_property
    def zero_mean(self) -> FixedMeanNormal:
        """The distributions of mean zero."""
        return FixedMeanNormal(torch.zeros(self.d), self.pairs.edges)

    def _complete(self, mean: Tensor, spread: Tensor) -> Tensor:
        """theta (..., n) of a mean and the covariance on the graph (Sigma_ii; 2 Sigma_ij)."""
        return self.join(mean, self.precision(torch.cat([mean, self.zero_mean.natural(spread)], dim=-1)))

    def __repr__(self) -> str:
        return f"SparseNormal({self.d}, {len(self.pairs.edges)} edges)"


class FixedMeanNormal(Embedded):
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
        self.mean, self.d = mean, len(mean)
        self.inner: GraphNormal = MultivariateNormal(self.d) if edges is None else SparseNormal(self.d, edges)
        self.pairs, self.size = self.inner.pairs, self.inner.pairs.size

    def source(self, y: Tensor) -> Tensor:
        y = check_width(self.as_numbers(y, torch.get_default_dtype()), self.d)
        return y - self.mean.to(y)

    def embed(self, theta: Tensor) -> Tensor:
        return torch.cat([theta.new_zeros(*theta.shape[:-1], self.d), theta], dim=-1)

    def pull(self, covector: Tensor) -> Tensor:
        return covector[..., self.d :]

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return super().log_prob(theta, x)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self.mean.to(theta) + super().draw(theta, count, generator)

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
        return self.mean.to(theta).expand(*theta.shape[:-1], self.d), inverse_from(self.factor(theta))

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
        """By inversion, or where the graph has gaps by Newton's method on correlations: every scale is then one."""
        self.check_finite(eta, "eta")
        if self.pairs.complete:
            return self.pairs.pack(inverse_from(factor_covariance(self.pairs.unpack(eta, 2.0))) / -2)
        variances = eta[..., : self.d]
        if is_concrete(eta) and not bool((variances > 0).all()):
            raise ValueError("eta has variances <= 0, expected E[x_i^2] > E[x_i]^2")
        scale = variances.sqrt()
        both = scale[..., self.pairs.first] * scale[..., self.pairs.second]
        return find_natural(self, (eta / both).reshape(-1, self.size)).view(eta.shape) / both

    def guess(self, eta: Tensor) -> Tensor:
        """Independent variables of variance one."""
        return torch.where(self.pairs.weights(eta) == 1, -0.5, 0.0).to(eta).expand_as(eta).clone()

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        second = measure_spread(self.pairs, widen(x) - widen(self.mean).to(x.device), x)
        return self.natural(self.pairs.pack(second, 2.0))

    def covariance(self, theta: Tensor) -> Tensor:
        mean, sigma = self.mean_covariance(theta)
        return self.pairs.moments(torch.zeros_like(mean), sigma)[1]

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None]:
        """Both in O(d^3); the second one where all pairs are edges."""
        sigma, precision = self.mean_covariance(theta)[1], self.precision(theta)
        pack, unpack = self.pairs.pack, self.pairs.unpack
        back = (lambda v: pack(precision @ unpack(v, 2.0) @ precision / 2)) if self.pairs.complete else None
        return lambda v: pack(sigma @ (2 * unpack(v)) @ sigma, 2.0), back

    def __repr__(self) -> str:
        return f"FixedMeanNormal({self.d}{'' if self.pairs.complete else f', {len(self.pairs.edges)} edges'})"
