"""The Fisher-Rao geometry of an exponential family in its natural parameters: closed where known, else by equations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.families import (
    Bernoulli,
    Categorical,
    DiagonalNormal,
    Exponential,
    ExponentialFamily,
    FixedCovarianceNormal,
    FixedMeanNormal,
    Ising,
    Multinomial,
    MultivariateNormal,
    Poisson,
    Product,
    SubModel,
)
from natgrad.geometry.base import Manifold
from natgrad.geometry.boundary_mesh import connect_far
from natgrad.geometry.christoffel import contract_christoffel
from natgrad.geometry.collocation import connect
from natgrad.geometry.flat_manifold import Location, Scales
from natgrad.geometry.half_plane import HalfPlane
from natgrad.geometry.logits import ClassLogits, Logits, LogRates
from natgrad.geometry.normal_manifold import Normals
from natgrad.geometry.ode import integrate
from natgrad.geometry.positive_definite import PositiveDefinite
from natgrad.geometry.product_manifold import ProductManifold
from natgrad.geometry.shooting import Shooting
from natgrad.lapack import invert_or_nan, require_inverse, require_solution
from natgrad.linalg import symmetrise

NEAR_TOLERANCE = 1e-12
"""Misfit of the equation at which the first sweeps end."""


def fisher_rao(family: ExponentialFamily) -> Manifold:
    """The Fisher-Rao manifold of a family; its points are theta (..., n).

    Closed: `Bernoulli`, `Categorical`, `Multinomial` (and these two with one logit held at zero), `Poisson`,
    `Exponential`, `Normal`, `DiagonalNormal`, `MultivariateNormal(1)`, normals of a known mean or covariance, an
    `Ising` of single variables, products of these; `MultivariateNormal(d)` but for the way to a given point. Any other
    family by its geodesic equation.

    Args:
        family: The exponential family.

    Example:
        >>> manifold = ng.geometry.fisher_rao(ng.Bernoulli(1))
        >>> manifold.distance(torch.tensor([0.0]), torch.tensor([2.0]))  # 2 |arcsin sqrt a - arcsin sqrt b|
        tensor(0.8658)
    """
    if isinstance(family, Product):
        return ProductManifold(*((fisher_rao(part), part.size) for part in family.families))
    if isinstance(family, SubModel):
        return _find_sub_model(family)
    return _find_normal(family) or _find_discrete(family) or NaturalParameters(family)


def _find_discrete(family: ExponentialFamily) -> Manifold | None:
    if isinstance(family, Bernoulli):
        return Logits()
    if isinstance(family, Poisson):
        return LogRates()
    if isinstance(family, Categorical | Multinomial):
        return ClassLogits(family.n_trials if isinstance(family, Multinomial) else 1)
    if isinstance(family, Ising) and all(len(clique) == 1 for clique in family.cliques):
        return Logits(family.values[1] - family.values[0])
    return None


def _find_normal(family: ExponentialFamily) -> Manifold | None:
    if isinstance(family, Exponential):
        return ExponentialTheta(family, Scales())
    if isinstance(family, MultivariateNormal):
        return NormalTheta(family, HalfPlane() if family.d == 1 else Normals(family.d))
    if isinstance(family, DiagonalNormal):
        return DiagonalTheta(family, ProductManifold(*[(HalfPlane(), 2)] * family.d))
    if isinstance(family, FixedCovarianceNormal):  # theta = Sigma^-1 mu, whose metric is Sigma everywhere
        return Location(require_inverse(family.known_covariance, f"{family!r} has a covariance without an inverse"))
    if isinstance(family, FixedMeanNormal) and family.size == family.d * (family.d + 1) // 2:
        return PrecisionTheta(family, PositiveDefinite())
    return None


def _find_sub_model(family: SubModel) -> Manifold:
    whole = family.family
    if isinstance(whole, Categorical | Multinomial) and family.size == whole.size - 1:
        return HeldTheta(family, fisher_rao(whole))
    return NaturalParameters(family)


class NaturalParameters(Shooting):
    """Any exponential family, points theta, by the equations of its geodesics.

    theta'' = -1/2 I^-1 (D_theta' I) theta': the Christoffel symbols are half the third derivatives of psi, raised.
    Integrated adaptively, to 1e-11; NaN where a geodesic leaves the domain; `log` by collocation, for far points on a
    mesh, coarse to fine.

    Args:
        family: The exponential family.
    """

    def __init__(self, family: ExponentialFamily) -> None:
        self.family, self.size = family, family.size
        self.domain = family.domain

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (first * self._lower(point, second)).sum(-1)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        metric = self.family.covariance(point)
        return require_solution(metric, gradient.unsqueeze(-1), self.family.explain_singular()).squeeze(-1)

    def inside(self, point: Tensor) -> Tensor:
        return torch.isfinite(point).all(-1) & self.family.inside(point.nan_to_num())

    def arrive(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        end, speed, _ = self._travel(point, tangent, tangent[..., :0])
        return end, speed

    def carry(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        end, _, carried = self._travel(point, tangent, vector)
        return end, carried

    def aim(self, point: Tensor, other: Tensor) -> Tensor:
        found = connect(self._bend_along(point), point, other, NEAR_TOLERANCE, self._speed)
        far = torch.isnan(found).any(-1).nonzero().squeeze(1)
        if len(far):
            found[far] = connect_far(
                lambda rows: Geodesics(self, point[far[rows]], other[far[rows]]), point[far], other[far]
            )
        return found

    def _speed(self, at: Tensor, speed: Tensor) -> Tensor:
        """|theta'|^2, (..., n) -> (...), which no geodesic changes; NaN outside of the domain."""
        inside = self.inside(at)
        found = speed.new_full(inside.shape, torch.nan)
        found[inside] = self.inner(at[inside], speed[inside], speed[inside])
        return found

    def _bend_along(self, point: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """theta'' from theta and theta', (b, N, n); NaN outside of the domain."""

        def bend(at: Tensor, speed: Tensor) -> Tensor:
            inside = self.inside(at).unsqueeze(-1)
            flat = torch.where(inside, at, point.unsqueeze(1)).flatten(0, 1)
            moving = speed.flatten(0, 1)
            found = contract_christoffel(self.family, flat, moving, (moving,))[0]
            return torch.where(inside, found.view_as(at), torch.nan)

        return bend

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        """The straight line in theta, an e-geodesic: right to first order, shortened at the edge of the domain."""
        return point + tangent

    def _lower(self, point: Tensor, vector: Tensor) -> Tensor:
        return (self.family.covariance(point) @ vector.unsqueeze(-1)).squeeze(-1)

    def _travel(
        self, point: Tensor, tangent: Tensor, vector: Tensor, steps: int = 2000
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, width = self.size, vector.shape[-1]
        batch = torch.broadcast_shapes(point.shape[:-1], tangent.shape[:-1], vector.shape[:-1])
        start = torch.cat([x.expand(*batch, x.shape[-1]) for x in (point, tangent, vector)], dim=-1)
        anchor = start[..., :n].reshape(-1, n)

        def field(state: Tensor) -> Tensor:
            at, speed, carried = state.split([n, n, width], dim=-1)
            inside = self.inside(at).unsqueeze(-1)
            safe = torch.where(inside, at, anchor)
            both = (speed, carried) if width else (speed,)
            bends = contract_christoffel(self.family, safe, speed, both)
            return torch.where(inside, torch.cat([speed, *bends], dim=-1), torch.nan)

        end = integrate(field, start.reshape(-1, start.shape[-1]), steps=steps).view(start.shape)
        end = torch.where(self._has_kept_speed(start, end).unsqueeze(-1), end, torch.nan)
        return end[..., :n], end[..., n : 2 * n], end[..., 2 * n :]

    def _has_kept_speed(self, start: Tensor, end: Tensor) -> Tensor:
        """Whether |theta'| is what it was: a step over the edge, where theta' is infinite, comes out anywhere."""
        before, after = (self._speed(*x.detach().split(self.size, -1)[:2]) for x in (start, end))
        return (after - before).abs() <= 1e-6 * before

    def __repr__(self) -> str:
        return f"NaturalParameters({self.family!r})"


class Geodesics:
    """The equation of k geodesics for a mesh, see `Equation`: anchors (k, n) stand in for points outside."""

    def __init__(self, space: NaturalParameters, start: Tensor, end: Tensor) -> None:
        self.space, self.anchors, self.ends = space, start.unsqueeze(1), end.unsqueeze(1)

    def path(self, part: Tensor) -> Tensor:
        """The mean of the straight lines in theta and in the expectations, which bends as a geodesic does."""
        family, part = self.space.family, part.unsqueeze(-1)
        straight = self.anchors + part * (self.ends - self.anchors)
        first, last = family.expectation(self.anchors), family.expectation(self.ends)
        try:
            mixed = family.natural(first + part * (last - first))
        except ValueError:  # means so near the edge that Newton's method does not know them
            return straight
        return torch.where(part * (1 - part) > 0, (straight + mixed) / 2, straight)

    def bend(self, at: Tensor, speed: Tensor) -> Tensor:
        inside = self.space.inside(at).unsqueeze(-1)
        safe, n = torch.where(inside, at, self.anchors), at.shape[-1]
        flat = speed.reshape(-1, n)
        found = contract_christoffel(self.space.family, safe.reshape(-1, n), flat, (flat,))[0]
        return torch.where(inside, found.view(at.shape), torch.nan)

    def metric(self, at: Tensor) -> Tensor:
        inside = self.space.inside(at).unsqueeze(-1)
        found = self.space.family.covariance(torch.where(inside, at, self.anchors))
        return torch.where(inside.unsqueeze(-1), found, torch.nan)


class Charted(Manifold):
    """A known manifold seen in the natural parameters of a family: points and tangents go there and come back.

    Args:
        family: The exponential family.
        manifold: The known manifold.
    """

    def __init__(self, family: ExponentialFamily, manifold: Manifold) -> None:
        self.family, self.manifold, self.domain = family, manifold, family.domain

    @abstractmethod
    def to_chart(self, theta: Tensor) -> Tensor:
        """theta -> the known manifold's point.

        Args:
            theta: Natural parameters, shape (..., n).
        """

    @abstractmethod
    def from_chart(self, point: Tensor) -> Tensor:
        """The known manifold's point -> theta.

        Args:
            point: Of the known manifold.
        """

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        at, u = self._push(point, first)
        return self.manifold.inner(at, u, self._push(point, second)[1])

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        at = self.to_chart(point)
        pulled = torch.func.vjp(self.from_chart, at)[1](gradient.expand(point.shape))[0]
        return self._pull(at, self.manifold.natural(at, pulled))[1]

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self.from_chart(self.manifold.exp(*self._push(point, tangent)))

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        at = self.to_chart(point)
        return self._pull(at, self.manifold.log(at, self.to_chart(other)))[1]

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        return self.manifold.distance(self.to_chart(point), self.to_chart(other))

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        at, pushed = self._push(point, vector)
        end = self.to_chart(other)
        return self._pull(end, self.manifold.transport(at, end, pushed))[1]

    def carry(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        at, pushed = self._push(point, tangent)
        return self._pull(*self.manifold.carry(at, pushed, self._push(point, vector)[1]))

    def inside(self, point: Tensor) -> Tensor:
        """On both sides of the chart: a nearly singular precision has an inverse that round-off leaves indefinite."""
        whole = torch.isfinite(point).all(-1) & self.family.inside(point.nan_to_num())
        return whole & self.manifold.inside(self.to_chart(point.nan_to_num()))

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        end = self.manifold.curve(*self._push(point, tangent))
        inside = self.manifold.inside(end)
        safe = torch.where(self.manifold.widen(inside), end, self.to_chart(point))
        return torch.where(inside.unsqueeze(-1), self.from_chart(safe), torch.nan)

    def _push(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        point, tangent = (x.contiguous() for x in torch.broadcast_tensors(point, tangent))  # jvp writes into them
        found, moved, *_ = torch.func.jvp(self.to_chart, (point,), (tangent,))
        return found, moved

    def _pull(self, at: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        at, tangent = (x.contiguous() for x in torch.broadcast_tensors(at, tangent))
        found, moved, *_ = torch.func.jvp(self.from_chart, (at,), (tangent,))
        return found, moved

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.family!r})"


class ExponentialTheta(Charted):
    """`Exponential`: theta = -rate."""

    def to_chart(self, theta: Tensor) -> Tensor:
        return -theta

    def from_chart(self, point: Tensor) -> Tensor:
        return -point


class HeldTheta(Charted):
    """A `SubModel` of classes with one logit held at zero: the others less that one."""

    def to_chart(self, theta: Tensor) -> Tensor:
        assert isinstance(self.family, SubModel)
        return self.family.whole(theta)

    def from_chart(self, point: Tensor) -> Tensor:
        assert isinstance(self.family, SubModel)
        free = list(self.family.free)
        (held,) = set(range(point.shape[-1])) - set(free)
        return point[..., free] - point[..., held : held + 1]


class DiagonalTheta(Charted):
    """`Normal` and `DiagonalNormal`: theta from a (mean, standard deviation) for every variable, side by side."""

    def to_chart(self, theta: Tensor) -> Tensor:
        linear, half = theta.chunk(2, -1)
        variance = -0.5 / half
        return torch.stack([linear * variance, variance.clamp(min=0.0).sqrt()], -1).flatten(-2)

    def from_chart(self, point: Tensor) -> Tensor:
        mean, deviation = point.unflatten(-1, (-1, 2)).unbind(-1)
        precision = deviation.square().reciprocal()
        return torch.cat([mean * precision, -precision / 2], -1)


class PrecisionTheta(Charted):
    """`FixedMeanNormal`: theta from the precision."""

    def to_chart(self, theta: Tensor) -> Tensor:
        assert isinstance(self.family, FixedMeanNormal)
        return self.family.precision(theta)

    def from_chart(self, point: Tensor) -> Tensor:
        assert isinstance(self.family, FixedMeanNormal)
        return self.family.pairs.pack(-point / 2)


class NormalTheta(Charted):
    """`MultivariateNormal(d)`: theta from (mean, standard deviation) where d = 1, else from `Normals(d)`."""

    def to_chart(self, theta: Tensor) -> Tensor:
        assert isinstance(self.family, MultivariateNormal)
        covariance = invert_or_nan(self.family.precision(theta))  # cholesky_inverse has wrong forward derivatives
        mean = (covariance @ theta[..., : self.family.d].unsqueeze(-1)).squeeze(-1)
        if isinstance(self.manifold, Normals):
            return self.manifold.join(mean, covariance)
        return torch.cat([mean, covariance.squeeze(-1).sqrt()], dim=-1)

    def from_chart(self, point: Tensor) -> Tensor:
        if isinstance(self.manifold, Normals):
            mean, covariance = self.manifold.split(point)
            assert isinstance(self.family, MultivariateNormal)
            precision = symmetrise(invert_or_nan(covariance))
            return torch.cat([(precision @ mean.unsqueeze(-1)).squeeze(-1), self.family.pack(-precision / 2)], dim=-1)
        mean, deviation = point.unbind(-1)
        return torch.stack([mean / deviation.square(), -0.5 / deviation.square()], dim=-1)
