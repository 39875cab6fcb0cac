"""The Fisher-Rao geometry of an exponential family in its natural parameters: closed where known, else by equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

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
from natgrad.geometry.base import Manifold, require_family
from natgrad.geometry.boundary_mesh import NaturalParameters
from natgrad.geometry.flat_manifold import Location, Logits, LogRates, Scales
from natgrad.geometry.normal_manifold import Normals
from natgrad.geometry.positive_definite import PositiveDefinite
from natgrad.geometry.simplex import ClassLogits
from natgrad.geometry.stable_functions import arc_over_hyperbolic_sine, safe_sqrt, sinhc
from natgrad.ground.linalg import (
    invert_or_nan,
    is_concrete,
    require_inverse,
    symmetrise,
)
from natgrad.ground.pure import compute_exactly

Chart = Callable[[Tensor], Tensor]


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
    require_family(family)
    if isinstance(family, Product):
        return ProductManifold(*((fisher_rao(part), part.size) for part in family.families))
    if isinstance(family, SubModel):
        full = family.family
        if isinstance(full, Categorical | Multinomial) and family.size == full.size - 1:
            return Charted(family, fisher_rao(full), family.whole, partial(hold_logit, family))
    if isinstance(family, Bernoulli):
        return Logits()
    if isinstance(family, Ising) and all(len(clique) == 1 for clique in family.cliques):
        return Logits(family.values[1] - family.values[0])
    if isinstance(family, Poisson):
        return LogRates()
    if isinstance(family, Categorical | Multinomial):
        return ClassLogits(family.n_trials if isinstance(family, Multinomial) else 1)
    if isinstance(family, Exponential):
        return Charted(family, Scales(), torch.neg, torch.neg)
    if isinstance(family, MultivariateNormal):
        if family.d == 1:  # T = (x, x^2), as `Normal` has it
            return Charted(family, HalfPlane(), read_deviations, join_deviations)
        moments = Normals(family.d)
        return Charted(family, moments, partial(read_moments, family, moments), partial(join_moments, family, moments))
    if isinstance(family, DiagonalNormal):
        return Charted(family, ProductManifold(*[(HalfPlane(), 2)] * family.d), read_deviations, join_deviations)
    if isinstance(family, FixedCovarianceNormal):  # theta = Sigma^-1 mu, whose metric is Sigma everywhere
        return Location(require_inverse(family.known_covariance, f"{family!r} has a covariance without an inverse"))
    if isinstance(family, FixedMeanNormal) and family.pairs.complete:
        return Charted(family, PositiveDefinite(), family.precision, partial(halve_precision, family))
    return NaturalParameters(family)


@compute_exactly
class Charted(Manifold):
    """A known manifold seen in the natural parameters of a family: points and tangents go there and come back."""

    def __init__(self, family: ExponentialFamily, manifold: Manifold, to_chart: Chart, from_chart: Chart) -> None:
        self.family, self.manifold, self.domain = family, manifold, family.domain
        self.to_chart, self.from_chart = to_chart, from_chart  # theta -> the known manifold's point, and back

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        at, u = push(self.to_chart, point, first)
        return self.manifold.inner(at, u, push(self.to_chart, point, second)[1])

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        point, gradient = torch.broadcast_tensors(point, gradient)
        at = self.to_chart(point)
        pulled = torch.func.vjp(self.from_chart, at)[1](gradient)[0]
        return push(self.from_chart, at, self.manifold.natural(at, pulled))[1]

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self.from_chart(self.manifold.exp(*push(self.to_chart, point, tangent)))

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        at = self.to_chart(point)
        return push(self.from_chart, at, self.manifold.log(at, self.to_chart(other)))[1]

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        for theta in (point, other):
            if is_concrete(theta):  # what is not finite stays so
                self.family.check(theta[torch.isfinite(theta).all(-1)])
        return self.manifold.distance(self.to_chart(point), self.to_chart(other))

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        at, pushed = push(self.to_chart, point, vector)
        end = self.to_chart(other)
        return push(self.from_chart, end, self.manifold.transport(at, end, pushed))[1]

    def carry(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        at, pushed = push(self.to_chart, point, tangent)
        return push(self.from_chart, *self.manifold.carry(at, pushed, push(self.to_chart, point, vector)[1]))

    def inside(self, point: Tensor) -> Tensor:
        """On both sides of the chart: a nearly singular precision has an inverse that round-off leaves indefinite."""
        known = torch.isfinite(point).all(-1) & self.family.inside(point.nan_to_num())
        return known & self.manifold.inside(self.to_chart(point.nan_to_num()))

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        end = self.manifold.curve(*push(self.to_chart, point, tangent))
        inside = self.manifold.inside(end)
        safe = torch.where(self.manifold.widen(inside), end, self.to_chart(point))
        return torch.where(inside.unsqueeze(-1), self.from_chart(safe), torch.nan)

    def __repr__(self) -> str:
        return f"Charted({self.family!r})"


def push(chart: Chart, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """A point and a tangent in other coordinates."""
    point, tangent = (x.contiguous() for x in torch.broadcast_tensors(point, tangent))  # jvp writes into them
    at, moved, *_ = torch.func.jvp(chart, (point,), (tangent,))
    return at, moved


def hold_logit(family: SubModel, point: Tensor) -> Tensor:
    """theta of a `SubModel` of classes with one logit held at zero: the others less that one."""
    free = list(family.free)
    (held,) = set(range(point.shape[-1])) - set(free)
    return point[..., free] - point[..., held : held + 1]


def read_deviations(theta: Tensor) -> Tensor:
    """A (mean, standard deviation) for every variable of independent normals, side by side."""
    linear, half = theta.chunk(2, -1)
    variance = -0.5 / half
    return torch.stack([linear * variance, variance.clamp(min=0.0).sqrt()], -1).flatten(-2)


def join_deviations(point: Tensor) -> Tensor:
    """theta of what `read_deviations` gave."""
    mean, deviation = point.unflatten(-1, (-1, 2)).unbind(-1)
    precision = deviation.square().reciprocal()
    return torch.cat([mean * precision, -precision / 2], -1)


def read_moments(family: MultivariateNormal, manifold: Normals, theta: Tensor) -> Tensor:
    """The point of `Normals(d)`."""
    covariance = invert_or_nan(family.precision(theta))  # cholesky_inverse has wrong forward derivatives
    return manifold.join((covariance @ theta[..., : family.d].unsqueeze(-1)).squeeze(-1), covariance)


def join_moments(family: MultivariateNormal, manifold: Normals, point: Tensor) -> Tensor:
    """theta of what `read_moments` gave."""
    mean, covariance = manifold.split(point)
    return family.join(mean, symmetrise(invert_or_nan(covariance)))


def halve_precision(family: FixedMeanNormal, precision: Tensor) -> Tensor:
    """theta of a precision."""
    return family.pairs.pack(-precision / 2)


# The univariate normal: the hyperbolic plane

ROOT2 = math.sqrt(2)


class HalfPlane(Manifold):
    """Points (mean, standard deviation), (..., 2); metric (d mean^2 + 2 d std^2) / std^2, of curvature -1/2.

    With x = mean / sqrt 2 and y = std it is twice that of Poincare's upper half-plane; geodesics are half ellipses
    around points of the line std = 0, which is infinitely far away.
    """

    domain = "(mean, standard deviation) with a positive, finite deviation"

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (first[..., 0] * second[..., 0] + 2 * first[..., 1] * second[..., 1]) / point[..., 1].square()

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return point[..., 1:].square() * gradient * gradient.new_tensor([1.0, 0.5])

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        deviation = point[..., 1]
        a, b = tangent[..., 0] / ROOT2 / deviation, tangent[..., 1] / deviation
        square = a.square() + b.square()
        shrink = _denominator(a, b, square)
        sideways = a * sinhc(square) / shrink
        return torch.stack([point[..., 0] + ROOT2 * deviation * sideways, deviation / shrink], dim=-1)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        deviation = point[..., 1]
        u, w = (other[..., 0] - point[..., 0]) / (ROOT2 * deviation), other[..., 1] / deviation
        chord = (u.square() + (w - 1).square()) / (4 * w)  # sinh^2(r / 2)
        rise = (u.square() + (w - 1) * (w + 1)) / (2 * w)
        factor = deviation * arc_over_hyperbolic_sine(chord)
        return torch.stack([ROOT2 * factor * u / w, factor * rise], dim=-1)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        square = (other[..., 0] - point[..., 0]).square() / 2 + (other[..., 1] - point[..., 1]).square()
        return 2 * ROOT2 * (safe_sqrt(square) / (2 * (point[..., 1] * other[..., 1]).sqrt())).asinh()

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        """Scaled by the ratio of deviations, and turned by the angle of (z' - conj z) / (z - conj z')."""
        across, up = (other[..., 0] - point[..., 0]) / ROOT2, point[..., 1] + other[..., 1]
        total = across.square() + up.square()
        cos, sin = (up.square() - across.square()) / total, -2 * across * up / total
        x, y = vector[..., 0] / ROOT2, vector[..., 1]
        turned = torch.stack([ROOT2 * (cos * x - sin * y), sin * x + cos * y], dim=-1)
        return turned * (other[..., 1:] / point[..., 1:])

    def inside(self, point: Tensor) -> Tensor:
        return torch.isfinite(point).all(-1) & (point[..., 1] > 0)


def _denominator(a: Tensor, b: Tensor, square: Tensor) -> Tensor:
    """cosh r - b sinh(r) / r with r^2 = a^2 + b^2, positive, without the cancellation of large b > 0."""
    r = safe_sqrt(square)
    cosine = torch.where(r > 0, b / torch.where(r > 0, r, 1.0), 0.0)
    short = a.square() / torch.where(r > 0, r * (r + b.abs()), 1.0)  # 1 - |cosine|
    less = torch.where(b > 0, short, 1 - cosine)
    more = torch.where(b > 0, 1 + cosine, short)
    grown = (more * (-r).exp() + less * r.exp()) / 2
    return torch.where(r > 1, grown, r.cosh() - b * sinhc(square))


# Independent models side by side


class ProductManifold(Manifold):
    """Points of several manifolds joined along one dimension, (..., total); squared lengths add.

    Args:
        *parts: (manifold, size) with the entries of one of its points; matrices are laid out row by row.
    """

    domain = "the points of all parts joined, each inside its own"

    def __init__(self, *parts: tuple[Manifold, int]) -> None:
        if not parts or not all(isinstance(m, Manifold) and isinstance(s, int) and s > 0 for m, s in parts):
            raise ValueError("ProductManifold takes pairs (manifold, entries of one of its points), at least one")
        self.manifolds, self.sizes = tuple(m for m, _ in parts), [s for _, s in parts]

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([m.inner(*each) for m, *each in self._cut(point, first, second)]).sum(0)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return self._each(lambda m, p, g: m.natural(p, g), point, gradient)

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self._each(lambda m, p, v: m.exp(p, v), point, tangent)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        return self._each(lambda m, p, q: m.log(p, q), point, other)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return self._each(lambda m, p, q, v: m.transport(p, q, v), point, other, vector)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        return safe_sqrt(torch.stack([m.distance(*each).square() for m, *each in self._cut(point, other)]).sum(0))

    def inside(self, point: Tensor) -> Tensor:
        return torch.stack([m.inside(p) for m, p in self._cut(point)]).all(0)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self._each(lambda m, p, v: m.curve(p, v), point, tangent)

    def project(self, point: Tensor, vector: Tensor) -> Tensor:
        return self._each(lambda m, p, v: m.project(p, v), point, vector)

    def _cut(self, *tensors: Tensor) -> list[tuple]:
        pieces = [tensor.split(self.sizes, dim=-1) for tensor in torch.broadcast_tensors(*tensors)]
        return [
            (m, *map(lambda x, m=m: _shape_point(m, x), each)) for m, *each in zip(self.manifolds, *pieces, strict=True)
        ]

    def _each(self, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        pieces = [work(m, *each).flatten(-m.event) for m, *each in self._cut(*tensors)]
        return torch.cat(pieces, dim=-1)

    def __repr__(self) -> str:
        return f"ProductManifold{tuple(zip(self.manifolds, self.sizes, strict=True))!r}"


def _shape_point(manifold: Manifold, flat: Tensor) -> Tensor:
    if manifold.event == 1:
        return flat
    side = round(flat.shape[-1] ** 0.5)
    return flat.unflatten(-1, (side, side))
