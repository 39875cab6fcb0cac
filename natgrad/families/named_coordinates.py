"""The usual coordinates of normals, of Gamma, Exponential, Beta and Dirichlet."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families.closed_forms import Closed
from natgrad.families.coordinates import Coordinates, Mapped
from natgrad.families.diagonal_normal import DiagonalNormal
from natgrad.families.event_checks import check_moments
from natgrad.families.normal import MultivariateNormal
from natgrad.families.positive_families import Beta, Dirichlet, Exponential, Gamma
from natgrad.families.precision_factors import factor_covariance, inverse_from
from natgrad.lapack import is_concrete
from natgrad.operators import Operator


class MeanCovariance(Coordinates):
    """(mu_i; Sigma_ii; Sigma_ij for i < j, row by row) of a `MultivariateNormal`.

    The Fisher matrix has the blocks Sigma^-1 and 1/2 tr(P dSigma P dSigma'): products in O(d^3), closed inverse.

    Args:
        family: The normal distributions.
    """

    def __init__(self, family: MultivariateNormal) -> None:
        self.family: MultivariateNormal = full_normal(family)

    def split(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and Sigma (..., d, d).

        Args:
            xi: These coordinates, shape (..., n).
        """
        d = self.family.d
        return self.family.check_shape(xi, "xi")[..., :d], self.family.unpack(xi[..., d:])

    def join(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """xi of a mean and a covariance.

        Args:
            mean: mu, shape (..., d).
            covariance: Sigma, shape (..., d, d).

        Returns:
            Shape (..., n).
        """
        check_moments(mean, covariance, self.family.d)
        return torch.cat([mean, self.family.pack(covariance)], dim=-1)

    def natural(self, xi: Tensor) -> Tensor:
        return self.family.from_mean_covariance(*self.split(xi))

    def of(self, theta: Tensor) -> Tensor:
        return self.join(*self.family.mean_covariance(theta))

    def fisher(self, xi: Tensor) -> Operator:
        d, pack, unpack = self.family.d, self.family.pack, self.family.unpack
        sigma = self.split(self.single(xi))[1].detach()
        precision = inverse_from(factor_covariance(sigma))

        def product(v: Tensor) -> Tensor:
            return torch.cat([v[..., :d] @ precision, pack(precision @ unpack(v[..., d:]) @ precision / 2, 2.0)], -1)

        def inverse(v: Tensor) -> Tensor:
            return torch.cat([v[..., :d] @ sigma, pack(2 * sigma @ unpack(v[..., d:], 2.0) @ sigma)], -1)

        return Closed(xi, product, inverse)


class MeanCholesky(Coordinates):
    """(mu_i; L_ii; L_ji for i < j, row by row) of a `MultivariateNormal`, Sigma = L L^T with L lower triangular.

    Products of the Fisher matrix cost O(d^3).

    Args:
        family: The normal distributions.
        log_diagonal: log L_ii in place of L_ii, so that every xi is a distribution.
    """

    def __init__(self, family: MultivariateNormal, log_diagonal: bool = False) -> None:
        self.family: MultivariateNormal = full_normal(family)
        self.log_diagonal = log_diagonal

    def split(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and L (..., d, d).

        Args:
            xi: These coordinates, shape (..., n).
        """
        d = self.family.d
        matrix = self.family.unpack(self.family.check_shape(xi, "xi")[..., d:])
        diagonal = xi[..., d : 2 * d]
        if not self.log_diagonal and is_concrete(xi) and not bool((diagonal > 0).all()):
            raise ValueError("xi has L_ii <= 0, expected a positive diagonal of the Cholesky factor")
        return xi[..., :d], matrix.tril(-1) + torch.diag_embed(diagonal.exp() if self.log_diagonal else diagonal)

    def natural(self, xi: Tensor) -> Tensor:
        mean, factor = self.split(xi)
        return self.family.join(mean, inverse_from(factor))

    def of(self, theta: Tensor) -> Tensor:
        mean, covariance = self.family.mean_covariance(theta)
        factor = factor_covariance(covariance)
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        entries = self.family.pack(factor.mT)[..., self.family.d :]
        return torch.cat([mean, diagonal.log() if self.log_diagonal else diagonal, entries], dim=-1)

    def __repr__(self) -> str:
        return f"MeanCholesky({self.family!r}{', log_diagonal=True' if self.log_diagonal else ''})"


class MeanStd(Coordinates):
    """(mu_i; s_i) of a `Normal`, a `DiagonalNormal` or MultivariateNormal(1); Fisher matrix diag(1 / s_i^2; 2 / s_i^2).

    Args:
        family: The normal distributions.
        log_std: log s_i in place of s_i, so that every xi is a distribution; the Fisher matrix is then diag(1 / s_i^2;
            2).
    """

    def __init__(self, family: DiagonalNormal | MultivariateNormal, log_std: bool = False) -> None:
        if not isinstance(family, DiagonalNormal) and not (isinstance(family, MultivariateNormal) and family.d == 1):
            raise ValueError(
                f"family is {family!r}, expected Normal(), DiagonalNormal(d) or MultivariateNormal(1); "
                "MeanCholesky takes the others"
            )
        self.family, self.d, self.log_std = family, family.d, log_std

    def split(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """mu and s, (..., d) each.

        Args:
            xi: These coordinates, shape (..., 2 d).
        """
        mean, spread = self.family.check_shape(xi, "xi").split(self.d, dim=-1)
        if not self.log_std and is_concrete(xi) and not bool((spread > 0).all()):
            raise ValueError("xi has standard deviations <= 0")
        return mean, spread.exp() if self.log_std else spread

    def natural(self, xi: Tensor) -> Tensor:
        mean, std = self.split(xi)
        return torch.cat([mean / std.square(), -0.5 / std.square()], dim=-1)

    def of(self, theta: Tensor) -> Tensor:
        linear, half = self.family.check(theta).split(self.d, dim=-1)
        std = (-2 * half).rsqrt()
        return torch.cat([-linear / (2 * half), std.log() if self.log_std else std], dim=-1)

    def fisher(self, xi: Tensor) -> Operator:
        _, std = self.split(self.single(xi).detach())
        spread = torch.full_like(std, 2.0) if self.log_std else 2 / std.square()
        values = torch.cat([1 / std.square(), spread])
        return Closed(xi, lambda v: values * v, lambda v: v / values)

    def __repr__(self) -> str:
        return f"MeanStd({self.family!r}{', log_std=True' if self.log_std else ''})"


class ShapeRate(Mapped):
    """(shape, rate) of `Gamma`: theta = (shape - 1, -rate).

    Args:
        family: The gamma distributions.
    """

    def __init__(self, family: Gamma) -> None:
        super().__init__(family, shape_rate, lambda theta: shape_rate_of(family.check(theta)))


class ShapeScale(Mapped):
    """(shape, scale) of `Gamma`, scale = 1 / rate.

    Args:
        family: The gamma distributions.
    """

    def __init__(self, family: Gamma) -> None:
        def swap_rate(xi: Tensor) -> Tensor:
            return torch.stack([xi[..., 0], 1 / xi[..., 1]], dim=-1)

        super().__init__(
            family,
            lambda xi: shape_rate(swap_rate(xi)),
            lambda theta: swap_rate(shape_rate_of(family.check(theta))),
        )


class ExponentialRate(Mapped):
    """The rate of `Exponential`: theta = -rate. (`Expectation` has its mean.)

    Args:
        family: The exponential distributions.
    """

    def __init__(self, family: Exponential) -> None:
        super().__init__(family, lambda xi: family.check(-xi), lambda theta: -family.check(theta))


class Concentration(Mapped):
    """The concentrations alpha of `Beta` and `Dirichlet`: theta = alpha - 1.

    Args:
        family: The beta or Dirichlet distributions.
    """

    def __init__(self, family: Beta | Dirichlet) -> None:
        super().__init__(family, lambda xi: family.check(xi - 1), lambda theta: family.check(theta) + 1)


def shape_rate(xi: Tensor) -> Tensor:
    """theta = (shape - 1, -rate)."""
    return torch.stack([xi[..., 0] - 1, -xi[..., 1]], dim=-1)


def shape_rate_of(theta: Tensor) -> Tensor:
    """(shape, rate)."""
    return torch.stack([theta[..., 0] + 1, -theta[..., 1]], dim=-1)


def full_normal(family: MultivariateNormal) -> MultivariateNormal:
    """The family as it is. ValueError for another one."""
    if not isinstance(family, MultivariateNormal):
        raise ValueError(f"family is {family!r}, expected MultivariateNormal(d); MeanStd takes diagonal ones")
    return family
