"""Other names for the same distributions: coordinates, their Fisher matrices, and how vectors change with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor

from natgrad.families.event_checks import check_moments
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.normal import DiagonalNormal, MultivariateNormal
from natgrad.families.positive_families import Beta, Dirichlet, Exponential
from natgrad.families.symmetric_matrices import factor_covariance, inverse_from
from natgrad.ground.derivatives import jacobians
from natgrad.ground.linalg import is_concrete, require_solution
from natgrad.ground.pure import compute_exactly, leave_autocast
from natgrad.ground.typed_torch import Map
from natgrad.operators import Closed, Operator


@compute_exactly
class Coordinates(ABC):
    """Coordinates xi of a family's distributions, one to one with its natural parameters theta.

    A subclass writes `natural` (xi -> theta) and `of` (theta -> xi), both differentiable; it overrides what it knows in
    closed form. Vectors are velocities (d xi / dt: steps, natural gradients), covectors are derivatives (dF / d xi).

    Args:
        family: The exponential family.
    """

    def __init__(self, family: ExponentialFamily) -> None:
        self.family = family

    @abstractmethod
    def natural(self, xi: Tensor) -> Tensor:
        """theta of xi, shape (..., n).

        Args:
            xi: These coordinates, shape (..., n).
        """

    @abstractmethod
    def of(self, theta: Tensor) -> Tensor:
        """xi of theta, shape (..., n).

        Args:
            theta: Natural parameters, shape (..., n).
        """

    def fisher(self, xi: Tensor) -> Operator:
        """The Fisher matrix J^T I_theta J with J = d theta / d xi, by products alone.

        Its inverse is J^-1 I_theta^-1 J^-T where the family's has a closed form.

        Args:
            xi: One point, shape (n,).
        """
        return fisher_in(self.family, self.natural, self.single(xi), self.of)

    def covariance(self, xi: Tensor) -> Tensor:
        """The Fisher matrix in xi as matrices, with gradients, shape (..., n, n).

        Args:
            xi: These coordinates, shape (..., n).
        """
        jacobian = jacobians(self.natural, xi)
        return jacobian.mT @ self.family.covariance(self.natural(xi)) @ jacobian

    def vector_to_natural(self, xi: Tensor, vector: Tensor) -> Tensor:
        """d theta = J d xi, shape (..., n).

        Args:
            xi: Where, shape (..., n).
            vector: d xi, shape (..., n).
        """
        return differentiate(self.natural, xi)[0](vector)

    def vector_from_natural(self, xi: Tensor, vector: Tensor) -> Tensor:
        """d xi = J^-1 d theta, shape (..., n).

        Args:
            xi: Where, shape (..., n).
            vector: d theta, shape (..., n).
        """
        return differentiate(self.of, self.natural(xi))[0](vector)

    def covector_from_natural(self, xi: Tensor, covector: Tensor) -> Tensor:
        """dF / d xi = J^T dF / d theta, shape (..., n).

        Args:
            xi: Where, shape (..., n).
            covector: dF / d theta, shape (..., n).
        """
        return differentiate(self.natural, xi)[1](covector)

    def covector_to_natural(self, xi: Tensor, covector: Tensor) -> Tensor:
        """dF / d theta = J^-T dF / d xi, shape (..., n).

        Args:
            xi: Where, shape (..., n).
            covector: dF / d xi, shape (..., n).
        """
        return differentiate(self.of, self.natural(xi))[1](covector)

    def natural_gradient(self, xi: Tensor, gradient: Tensor) -> Tensor:
        """I_xi^-1 dF / d xi, shape (n,): the same direction in every system of coordinates.

        Args:
            xi: Where, shape (n,).
            gradient: dF / d xi, shape (n,).
        """
        fisher = self.fisher(xi)
        inverse = fisher.inverse(0.0)
        if inverse is not None:
            return inverse @ gradient
        return require_solution(fisher.dense(), gradient, self.family.explain_singular())

    def single(self, xi: Tensor) -> Tensor:
        """xi as it is. TypeError or ValueError unless it is one point (n,).

        Args:
            xi: These coordinates.
        """
        return self.family.single(xi, "xi")

    def __repr__(self) -> str:
        flags = "".join(f", {name}=True" for name, value in vars(self).items() if value is True)
        return f"{type(self).__name__}({self.family!r}{flags})"


def differentiate(change: Map, point: Tensor) -> tuple[Map, Map]:
    """v -> J v and u -> J^T u of a map of coordinates at a point (..., n), row by row; more dimensions are batches."""
    value, pull, *_ = torch.func.vjp(change, point)

    def push_one(v: Tensor) -> Tensor:
        # J v is linear in v: the derivative of J^T u in u, which spares forward rules that some operations lack
        return torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(value))[1](v)[0]

    return map_batches(push_one, point, value), map_batches(lambda u: pull(u)[0], value, point)


def map_batches(linear: Map, source: Tensor, target: Tensor) -> Map:
    """A linear map from tensors like `source` to tensors like `target`, for those with more dimensions in front too."""

    def apply(v: Tensor) -> Tensor:
        batch = v.shape[: v.dim() - source.dim()]
        if not batch:
            return linear(v)
        if not batch.numel():
            return target.new_empty(*batch, *target.shape)  # no rows, which vmap cannot take
        return torch.func.vmap(linear)(v.flatten(0, len(batch) - 1)).unflatten(0, batch)

    return apply


class Natural(Coordinates):
    """The natural parameters theta themselves."""

    def natural(self, xi: Tensor) -> Tensor:
        return self.family.check(xi)

    def of(self, theta: Tensor) -> Tensor:
        return self.family.check(theta)

    def fisher(self, xi: Tensor) -> Operator:
        return self.family.fisher(self.single(xi))


@compute_exactly
class Expectation(Coordinates):
    """eta = E[T]: probabilities of bits and classes, rates of counts, means of x and its products.

    Example:
        >>> coordinates = ng.families.Expectation(ng.Bernoulli(2))
        >>> coordinates.of(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    def natural(self, xi: Tensor) -> Tensor:
        return self.family.natural(xi)

    def of(self, theta: Tensor) -> Tensor:
        return self.family.expectation(theta)

    def fisher(self, xi: Tensor) -> Operator:
        return self.family.fisher_expectation(self.single(xi))


class Mapped(Coordinates):
    """Coordinates by two functions of your own.

    Args:
        family: The exponential family.
        natural: xi -> theta, (..., n) -> (..., n), differentiable.
        of: Its inverse, theta -> xi.
    """

    def __init__(self, family: ExponentialFamily, natural: Map, of: Map) -> None:
        self.family, self._natural, self._of = family, natural, of

    def natural(self, xi: Tensor) -> Tensor:
        return self.family.check(self._natural(self.family.check_shape(xi, "xi")))

    def of(self, theta: Tensor) -> Tensor:
        return self._of(self.family.check(theta))


def convert(xi: Tensor, source: Coordinates, target: Coordinates) -> Tensor:
    """The same distributions in other coordinates.

    Args:
        xi: Points in the source's coordinates, shape (..., n).
        source: Coordinates of a family.
        target: Other coordinates of the same family.

    Returns:
        Shape (..., n).

    Raises:
        ValueError: For coordinates of two families.

    Example:
        >>> normal = ng.Normal()
        >>> theta = normal.from_mean_std(torch.tensor(1.0), torch.tensor(2.0))
        >>> ng.families.convert(theta, ng.families.Natural(normal), ng.families.MeanStd(normal))
        tensor([1., 2.])
    """
    if repr(source.family) != repr(target.family):
        raise ValueError(
            f"source has coordinates of {source.family!r} and target of {target.family!r}, expected the same family: "
            "the numbers of one mean nothing in the other"
        )
    return target.of(source.natural(xi))


@leave_autocast
def convert_vector(xi: Tensor, vector: Tensor, source: Coordinates, target: Coordinates) -> Tensor:
    """The same velocity in other coordinates: d xi' = (d xi' / d xi) d xi.

    Args:
        xi: Where, in the source's coordinates, shape (..., n).
        vector: d xi, shape (..., n).
        source: Coordinates of a family.
        target: Other coordinates of the same family.

    Returns:
        d xi', shape (..., n).
    """
    return differentiate(lambda at: convert(at, source, target), xi)[0](vector)


@leave_autocast
def convert_covector(xi: Tensor, covector: Tensor, source: Coordinates, target: Coordinates) -> Tensor:
    """The same derivative in other coordinates: dF / d xi' = (d xi / d xi')^T dF / d xi.

    Args:
        xi: Where, in the source's coordinates, shape (..., n).
        covector: dF / d xi, shape (..., n).
        source: Coordinates of a family.
        target: Other coordinates of the same family.

    Returns:
        dF / d xi', shape (..., n).
    """
    return differentiate(lambda at: convert(at, target, source), convert(xi, source, target))[1](covector)


@leave_autocast
def fisher_in(family: ExponentialFamily, natural: Map, xi: Tensor, of: Map | None = None) -> Operator:
    """J^T I_theta J of any differentiable map from xi to theta; with m <= n it is that of a curved sub-family.

    Args:
        family: The exponential family.
        natural: xi -> theta, (m,) -> (n,), m <= n.
        xi: Where, shape (m,).
        of: The inverse map, if it has one: then the operator's inverse is closed where the family's is.

    Returns:
        An operator of size m.

    Example:
        >>> normal = ng.Normal()
        >>> path = lambda xi: normal.from_mean_std(xi[0], xi[0].exp())
        >>> ng.families.fisher_in(normal, path, torch.tensor([0.0])).dense()  # 1 / std^2 + 2
        tensor([[3.]])
    """
    theta = natural(xi.detach()).detach()
    inner = family.fisher(theta)
    back = None if of is None else inner.inverse(0.0)
    push, pull = differentiate(natural, xi.detach())

    def product(v: Tensor) -> Tensor:
        return pull(multiply_rows(inner, push(v)))

    origin = fisher_in, (family, natural, xi.detach().clone(), of)
    if of is None or back is None:
        return Closed(xi, product, origin=origin)
    push_back, pull_back = differentiate(of, theta)
    return Closed(xi, product, lambda v: push_back(multiply_rows(back, pull_back(v))), origin)


def multiply_rows(operator: Operator, vectors: Tensor) -> Tensor:
    """G v for every row of v (..., n)."""
    flat = vectors.reshape(-1, vectors.shape[-1])
    return operator.mm(flat.mT).mT.reshape(vectors.shape)


# The usual coordinates of normals, of Gamma, Exponential, Beta and Dirichlet


@compute_exactly
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
        """xi of a mean and a covariance, shape (..., n).

        Args:
            mean: mu, shape (..., d).
            covariance: Sigma, shape (..., d, d).
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

        return Closed(xi, product, inverse, origin=(self.fisher, (xi.detach().clone(),)))


@compute_exactly
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
        return Closed(xi, lambda v: values * v, lambda v: v / values, origin=(self.fisher, (xi.detach().clone(),)))


class ShapeRate(Coordinates):
    """(shape, rate) of `Gamma`: theta = (shape - 1, -rate).

    Args:
        family: The gamma distributions.
    """

    def natural(self, xi: Tensor) -> Tensor:
        shape, rate = self.family.check_shape(xi, "xi").unbind(-1)
        return self.family.check(torch.stack([shape - 1, -rate], dim=-1))

    def of(self, theta: Tensor) -> Tensor:
        first, second = self.family.check(theta).unbind(-1)
        return torch.stack([first + 1, -second], dim=-1)


class ShapeScale(Coordinates):
    """(shape, scale) of `Gamma`, scale = 1 / rate.

    Args:
        family: The gamma distributions.
    """

    def natural(self, xi: Tensor) -> Tensor:
        shape, scale = self.family.check_shape(xi, "xi").unbind(-1)
        return self.family.check(torch.stack([shape - 1, -1 / scale], dim=-1))

    def of(self, theta: Tensor) -> Tensor:
        first, second = self.family.check(theta).unbind(-1)
        return torch.stack([first + 1, -1 / second], dim=-1)


class ExponentialRate(Mapped):
    """The rate of `Exponential`: theta = -rate. (`Expectation` has its mean.)

    Args:
        family: The exponential distributions.
    """

    def __init__(self, family: Exponential) -> None:
        super().__init__(family, torch.neg, torch.neg)


class Concentration(Mapped):
    """The concentrations alpha of `Beta` and `Dirichlet`: theta = alpha - 1.

    Args:
        family: The beta or Dirichlet distributions.
    """

    def __init__(self, family: Beta | Dirichlet) -> None:
        super().__init__(family, partial(torch.add, other=-1), partial(torch.add, other=1))


def full_normal(family: MultivariateNormal) -> MultivariateNormal:
    """The family as it is. ValueError for another one."""
    if not isinstance(family, MultivariateNormal):
        raise ValueError(f"family is {family!r}, expected MultivariateNormal(d); MeanStd takes diagonal ones")
    return family
