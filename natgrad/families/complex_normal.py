"""The circular complex normal: a real normal of twice as many variables, with fewer natural parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families.event_checks import centre, check_rest, check_spreads, floating_dtype, widen
from natgrad.families.normal import MultivariateNormal
from natgrad.families.product_families import Embedded
from natgrad.ground.linalg import is_concrete
from natgrad.ground.typed_torch import Map


class ComplexNormal(Embedded):
    """CN(mu, Gamma): circularly symmetric complex vectors z (d,), E[(z - mu)(z - mu)^T] = 0.

    T = (Re z_i; Im z_i; |z_i|^2; 2 Re z_i z_j*; 2 Im z_i z_j* for i < j), theta = (2 Re b; 2 Im b; -P_ii; -Re P_ij; -Im
    P_ij) with P = Gamma^-1 and b = P mu, all real: n = 2 d + d^2. Gamma = E[(z - mu)(z - mu)^H]. Conversions both ways
    are closed. With `SubModel(ComplexNormal(d), range(2 * d, family.size), base)` the mean is zero.

    Args:
        d: Number of complex variables.

    Example:
        >>> family = ng.families.ComplexNormal(1)
        >>> theta = family.from_mean_covariance(torch.tensor([1.0 + 1.0j]), torch.tensor([[2.0 + 0.0j]]))
        >>> family.expectation(theta)
        tensor([1., 1., 4.])
    """

    shown = ("d",)

    domain = "the precision must be Hermitian and positive definite: theta_ii and theta_ij are those of -P"

    def __init__(self, d: int) -> None:
        self.inner = self.real = MultivariateNormal(2 * d)  # of (Re z, Im z)
        self.d, self.size = d, 2 * d + d * d
        self._pairs = MultivariateNormal(d).pairs
        signs = torch.ones(d, d).triu(1)
        self._signs = signs - signs.mT

    def _source(self, y: Tensor) -> Tensor:
        if not isinstance(y, Tensor) or not y.is_complex() or y.shape[-1:] != (self.d,):
            came = f"is {y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"is {type(y).__name__}"
            raise ValueError(f"x {came}, expected a complex tensor (..., {self.d})")
        if is_concrete(y.real) and not bool(torch.isfinite(y.detach()).all()):
            raise ValueError("x has entries that are not finite")
        return torch.cat([y.real, y.imag], dim=-1)

    def as_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x

    def natural(self, eta: Tensor) -> Tensor:
        first, second, outer = self._split(widen(self.check_finite(eta, "eta")), 2.0)
        mean = torch.complex(first, second)
        covariance = torch.complex(*outer) - mean.unsqueeze(-1) * mean.conj().unsqueeze(-2)
        variance, total = (part.real.diagonal(dim1=-2, dim2=-1) for part in (covariance, outer[0]))
        words = "covariance is not positive definite: eta has variances <= 0"
        check_rest(variance, total, eta.dtype, words, "E[|z_i|^2] > |E[z_i]|^2")
        return self.from_mean_covariance(mean, covariance).to(eta.dtype)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        mean, centred = centre(widen(x))
        rows = centred.movedim(0, -2)
        covariance, size = rows.mT @ rows.conj() / len(x), x.detach().abs().amax(0)
        check_spreads(
            embed_hermitian(covariance.real / 2, covariance.imag / 2),
            torch.cat([size, size], dim=-1),
            floating_dtype(x),
        )
        return self.from_mean_covariance(mean, covariance)

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None]:
        """The first in O(d^3)."""
        forward, _ = self.real.find_products(self._embed(theta))
        return lambda v: self._pull(forward(self._embed(v))), None

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.complex(*self.real.draw(self._embed(theta), count, generator).split(self.d, dim=-1))

    def _embed(self, theta: Tensor) -> Tensor:
        """Those of (Re z, Im z), a linear map: the precision there is 2 (Re P, -Im P; Im P, Re P)."""
        first, second, minus_half = self._split(theta, 1.0)
        return torch.cat([first, second, self.real.pack(embed_hermitian(*minus_half))], dim=-1)

    def _pull(self, covector: Tensor) -> Tensor:
        """The transpose of `_embed`: expectation parameters of (Re z, Im z) to those of z."""
        d, second = self.d, self.real.unpack(covector[..., 2 * self.d :], 2.0)
        real = second[..., :d, :d] + second[..., d:, d:]
        imag = second[..., d:, :d] - second[..., :d, d:]
        return torch.cat([covector[..., : 2 * d], self._pack(real, imag, 2.0)], dim=-1)

    def from_mean_covariance(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """theta of a mean and a covariance, shape (..., n).

        Args:
            mean: mu, complex, shape (..., d).
            covariance: Gamma, Hermitian and positive definite, shape (..., d, d).
        """
        for each, what in ((mean, "mean"), (covariance, "covariance")):
            if not isinstance(each, Tensor) or not each.is_complex():
                came = each.dtype if isinstance(each, Tensor) else type(each).__name__
                raise TypeError(f"{what} is {came}, expected a complex tensor; convert it with .to(torch.complex64)")
        spread = embed_hermitian(covariance.real / 2, covariance.imag / 2)  # of (Re z, Im z)
        theta = self.real.from_mean_covariance(torch.cat([mean.real, mean.imag], dim=-1), spread)
        half, d = self.real.unpack(theta[..., 2 * self.d :]), self.d
        return torch.cat([theta[..., : 2 * d], self._pack(half[..., :d, :d], half[..., d:, :d], 1.0)], dim=-1)

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and Gamma (..., d, d), complex.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        mean, covariance = self.real.mean_covariance(self._embed(self.check(theta)))
        d = self.d
        return torch.complex(*mean.split(d, -1)), 2 * torch.complex(covariance[..., :d, :d], covariance[..., d:, :d])

    def _split(self, value: Tensor, factor: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The parts of a vector (..., n): two (..., d), real and imaginary part of a Hermitian matrix (..., d, d)."""
        d, pairs = self.d, self._pairs.size - self.d
        first, second, own, real, imag = value.split([d, d, d, pairs, pairs], dim=-1)
        symmetric = self._pairs.unpack(torch.cat([own, real], dim=-1), factor)
        skew = self._pairs.unpack(torch.cat([torch.zeros_like(own), imag], dim=-1), factor) * self._signs.to(value)
        return first, second, (symmetric, skew)

    def _pack(self, real: Tensor, imag: Tensor, factor: float) -> Tensor:
        """(..., d^2) of a Hermitian matrix: diagonal, then `factor` times the real and the imaginary pairs."""
        return torch.cat([self._pairs.pack(real, factor), self._pairs.pack(imag, factor)[..., self.d :]], dim=-1)


def embed_hermitian(real: Tensor, imag: Tensor) -> Tensor:
    """[[Re A, -Im A], [Im A, Re A]], (..., d, d) -> (..., 2 d, 2 d)."""
    return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)
