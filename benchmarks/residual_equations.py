"""Differential equations with known solutions, for physics-informed networks: what each is, and where it is tested.

An equation is one formula in the unknowns' values, first derivatives and sums of second ones at a point. Terms of
`ng.residuals` and the batched loss of the other contestants are both made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.jets import Constraint, Derivatives
from natgrad.residuals import HardConstraint, Periodic, draw_where_large

F64 = torch.float64
Points = dict[str, Tensor]
CANDIDATES = 6
"""How many draws are the pool of which points are taken where residuals are large."""


@dataclass(frozen=True)
class TermJets:
    """An unknown at points, with any leading shape: value (m,), first derivatives (m, d), second ones (m, groups)."""

    u: Tensor
    first: Tensor
    second: Tensor


Formula = Callable[..., Tensor]
"""Points and the jets of every unknown -> residuals, all with the same leading shape."""


@dataclass(frozen=True)
class FormulaTerm:
    """A term: a formula, and the sets of coordinates over which it sums second derivatives."""

    formula: Formula
    groups: tuple[tuple[int, ...], ...] = ()
    derivatives: bool = True

    def term(self, count: int) -> Callable[..., Tensor]:
        """For `ng.residuals`: unknowns and a point -> residual."""

        def read(u: Any, x: Tensor) -> TermJets:
            value = u(x)
            if not self.derivatives:
                return TermJets(value, value, value)
            second = [ng.laplacian(u, x, dims=group) for group in self.groups]
            return TermJets(value, ng.jacobian(u, x), torch.stack(second, -1) if second else value[:, None])

        if count == 1:
            return lambda u, x: self.formula(x, read(u, x))
        return lambda u, k, x: self.formula(x, read(u, x), read(k, x))


@dataclass(frozen=True)
class BoundaryProblem:
    """A boundary value problem.

    Args:
        name: Its name.
        nets: The layers of each unknown's network; an entry before the first layer may be a module, one behind the last
            a function that wraps the network.
        pieces: The terms.
        draw: A generator -> points of every term.
        exact: Points (b, d) -> values (b, m') that the last unknown's first outputs are compared with.
        test: Points where that is done.
        weights: Of the terms.
        anew: Whether points are drawn at every step; else once.
        adaptive: The term whose points are drawn anew from time to time where its residual is large; "": none.
    """

    name: str
    nets: tuple[tuple[Any, ...], ...]
    pieces: Mapping[str, FormulaTerm]
    draw: Callable[[torch.Generator], Points]
    exact: Callable[[Tensor], Tensor]
    test: Tensor
    weights: Mapping[str, float] = field(default_factory=dict)
    anew: bool = False
    adaptive: str = ""

    def networks(self, seed: int) -> nn.ModuleList:
        """One perceptron with tanh per unknown."""
        torch.manual_seed(seed)
        return nn.ModuleList(build_net(sizes) for sizes in self.nets)

    def terms(self) -> dict[str, Callable[..., Tensor]]:
        """For `ng.residuals`."""
        return {name: piece.term(len(self.nets)) for name, piece in self.pieces.items()}

    def loss(self, nets: nn.ModuleList, points: Points) -> Tensor:
        """The weighted sum of the terms' mean squares, as the others take it."""
        parts = []
        for name, piece in self.pieces.items():
            x = points[name]
            residual = piece.formula(x, *(differentiate(net, x, piece) for net in nets))
            parts.append(self.weights.get(name, 1.0) * residual.reshape(len(x), -1).square().sum(1).mean())
        return torch.stack(parts).sum()

    def adapt(self, nets: nn.ModuleList, points: Points, g: torch.Generator) -> Points:
        """The points with those of the adaptive term drawn anew, where its residual is large."""
        name, piece = self.adaptive, self.pieces[self.adaptive]
        pool = torch.cat([self.draw(g)[name] for _ in range(CANDIDATES)])
        with torch.no_grad():
            residual = piece.formula(pool, *(differentiate(net, pool, piece) for net in nets)).reshape(len(pool), -1)
        return points | {name: draw_where_large(pool, residual, len(points[name]), generator=g)}

    def error(self, nets: nn.ModuleList) -> float:
        """Relative, in L2."""
        with torch.no_grad():
            exact = self.exact(self.test)
            found = nets[-1](self.test)[:, : exact.shape[1]]
            return float((found - exact).norm() / exact.norm())


def build_net(sizes: tuple[Any, ...]) -> nn.Module:
    """A perceptron with tanh, behind a module where the first entry is one, wrapped where the last is a function."""
    start = [sizes[0]] if isinstance(sizes[0], nn.Module) else []
    widths = [size for size in sizes if isinstance(size, int)]
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b, dtype=F64), nn.Tanh())]
    net = nn.Sequential(*start, *parts[:-1])
    return net if isinstance(sizes[-1], int) else sizes[-1](net)


def differentiate(net: nn.Module, x: Tensor, piece: FormulaTerm) -> TermJets:
    """The jets of a batch, carried forward through the layers: cheaper for everyone than backward passes twice."""
    if not piece.derivatives:
        value = net(x)
        return TermJets(value, value, value)
    if isinstance(net, HardConstraint):
        inner = differentiate(net.net, x, piece)
        stacked = torch.cat([inner.u[None], inner.first.movedim(-1, 0), inner.second.movedim(-1, 0)])
        layout, count = Derivatives(tuple(range(x.shape[1])), piece.groups), 1 + x.shape[1]
        jets, _ = Constraint(net.distance, net.values).push(x, layout, stacked)
        return TermJets(jets[0], jets[1:count].movedim(0, -1), jets[count:].movedim(0, -1))
    assert isinstance(net, nn.Sequential)
    value, count = x, x.shape[1]
    first = torch.eye(count, dtype=x.dtype).unsqueeze(1).expand(count, *x.shape)
    second = x.new_zeros(len(piece.groups), *x.shape)
    for layer in net:
        if isinstance(layer, Periodic):
            value, first, second = embed(layer, x, piece.groups)
        elif isinstance(layer, nn.Linear):
            value, first, second = layer(value), first @ layer.weight.mT, second @ layer.weight.mT
        else:
            value = torch.tanh(value)
            slope = 1 - value.square()
            squares = [first[list(group)].square().sum(0) for group in piece.groups]
            if squares:
                second = slope * second - 2 * value * slope * torch.stack(squares)
            first = slope * first
    return TermJets(value, first.movedim(0, -1), second.movedim(0, -1))


def embed(layer: Periodic, x: Tensor, groups: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The jets of the features of a periodic first coordinate; the others pass."""
    speed = 2 * math.pi / layer.periods[0]
    value, rest = layer(x), x.shape[1] - 1
    first = x.new_zeros(x.shape[1], *value.shape)
    first[0, :, 0], first[0, :, 1] = -speed * value[:, 1], speed * value[:, 0]
    first[1:, :, 2:] = torch.eye(rest, dtype=x.dtype).unsqueeze(1)
    second = x.new_zeros(len(groups), *value.shape)
    for i, group in enumerate(groups):
        if 0 in group:
            second[i, :, :2] = -(speed**2) * value[:, :2]
    return value, first, second


# points


def uniform(count: int, dims: int, g: torch.Generator) -> Tensor:
    """Points of the unit cube."""
    return torch.rand(count, dims, generator=g, dtype=F64)


def on_faces(count: int, dims: int, g: torch.Generator, faces: tuple[int, ...] | None = None) -> Tensor:
    """Points of the unit cube's boundary, as many on each face: face 2 i is x_i = 0, face 2 i + 1 is x_i = 1."""
    x = uniform(count, dims, g)
    chosen = torch.tensor(faces if faces is not None else tuple(range(2 * dims)))
    face = chosen[torch.arange(count) % len(chosen)]
    x[torch.arange(count), face // 2] = (face % 2).to(F64)
    return x


def test_points(count: int, dims: int) -> Tensor:
    """Points of the unit cube that nobody trains on."""
    return uniform(count, dims, torch.Generator().manual_seed(3))


def fit(exact: Callable[[Tensor], Tensor]) -> FormulaTerm:
    """u = exact."""
    return FormulaTerm(lambda x, jets, *_: jets.u - exact(x), derivatives=False)


# equations


def poisson(dims: int, sizes: tuple[int, ...]) -> BoundaryProblem:
    """-Laplace u = f in the unit cube, u = sum of cosines (product of sines in two dimensions), values on the faces."""
    two, every = dims == 2, tuple(range(dims))

    def exact(x: Tensor) -> Tensor:
        return (torch.sin(math.pi * x).prod(-1) if two else torch.cos(math.pi * x).sum(-1)).unsqueeze(-1)

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.second[..., 0] + (2 if two else 1) * math.pi**2 * exact(x)

    counts = (400, 120) if two else (800, 300)
    return BoundaryProblem(
        f"Poisson, {dims} dimensions",
        (sizes,),
        {"inside": FormulaTerm(inside, (every,)), "boundary": fit(exact)},
        lambda g: {"inside": uniform(counts[0], dims, g), "boundary": on_faces(counts[1], dims, g)},
        exact,
        test_points(4000, dims),
    )


def squares(dims: int = 100) -> BoundaryProblem:
    """Laplace u = 2 d in the unit cube, u = |x|^2, points anew (arXiv 2505.12149, a smaller net)."""

    def exact(x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True)

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.second[..., 0] - 2 * dims

    return BoundaryProblem(
        f"Poisson, {dims} dimensions",
        ((dims, 64, 64, 1),),
        {
            "inside": FormulaTerm(lambda x, jets: jets.second[..., 0] - 2 * dims, (tuple(range(dims)),)),
            "boundary": fit(exact),
        },
        lambda g: {"inside": uniform(100, dims, g), "boundary": on_faces(50, dims, g)},
        exact,
        test_points(4000, dims),
        {"boundary": 40.0},
        anew=True,
    )


def heat(dims: int) -> BoundaryProblem:
    """u_t = Laplace u / 4 on the unit cube and (0, 1), from one sine, or, in four dimensions, a sum of sin(2 x_i)."""
    one, space = dims == 1, tuple(range(dims))

    def exact(x: Tensor) -> Tensor:
        t, y = x[..., -1:], x[..., :-1]
        if one:
            return torch.exp(-(math.pi**2) * t / 4) * torch.sin(math.pi * y)
        return torch.exp(-t) * torch.sin(2 * y).sum(-1, keepdim=True)

    def draw(g: torch.Generator) -> Points:
        counts = (400, 120) if one else (800, 300)
        faces = (*range(2 * dims), 2 * dims)  # no values at the end of time
        return {"inside": uniform(counts[0], dims + 1, g), "boundary": on_faces(counts[1], dims + 1, g, faces)}

    return BoundaryProblem(
        f"heat, {dims} + 1 dimensions",
        ((2, 32, 1) if one else (dims + 1, 40, 40, 1),),
        {
            "inside": FormulaTerm(lambda x, jets: jets.first[..., -1] - jets.second[..., 0] / 4, (space,)),
            "boundary": fit(exact),
        },
        draw,
        exact,
        test_points(4000, dims + 1),
    )


def helmholtz(k: float = 10.0) -> BoundaryProblem:
    """Laplace u + k^2 u = f in the unit square, u = sin(pi x) sin(2 pi y), values on the edges."""

    def exact(x: Tensor) -> Tensor:
        return (torch.sin(math.pi * x[..., 0]) * torch.sin(2 * math.pi * x[..., 1])).unsqueeze(-1)

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.second[..., 0] + k**2 * jets.u - (k**2 - 5 * math.pi**2) * exact(x)

    return BoundaryProblem(
        f"Helmholtz, k = {k:g}",
        ((2, 40, 1),),
        {"inside": FormulaTerm(inside, ((0, 1),)), "boundary": fit(exact)},
        lambda g: {"inside": uniform(500, 2, g), "boundary": on_faces(120, 2, g)},
        exact,
        test_points(4000, 2),
    )


def diffusion() -> BoundaryProblem:
    """div(k grad u) = f in the unit square: the field k from 300 values of u and the values of k on the edges."""

    def field_u(x: Tensor) -> Tensor:
        return (x.sum(-1) + torch.sin(math.pi * x).prod(-1)).unsqueeze(-1)

    def field_k(x: Tensor) -> Tensor:
        return (1 + 0.5 * torch.sin(math.pi * x[..., 0]) * torch.sin(math.pi * x[..., 1])).unsqueeze(-1)

    def source(x: Tensor) -> Tensor:
        sines, cosines = torch.sin(math.pi * x), torch.cos(math.pi * x)
        waves = torch.stack([cosines[..., 0] * sines[..., 1], sines[..., 0] * cosines[..., 1]], -1) * math.pi
        curved = -2 * math.pi**2 * sines.prod(-1)
        return (field_k(x)[..., 0] * curved + (0.5 * waves * (1 + waves)).sum(-1)).unsqueeze(-1)

    def inside(x: Tensor, u: TermJets, k: TermJets) -> Tensor:
        return k.u * u.second[..., 0] + (k.first * u.first).sum(-1) - source(x)

    return BoundaryProblem(
        "inverse diffusion",
        ((2, 24, 1), (2, 24, 1)),
        {
            "inside": FormulaTerm(inside, ((0, 1),)),
            "data": FormulaTerm(lambda x, u, k: u.u - field_u(x), derivatives=False),
            "edge": FormulaTerm(lambda x, u, k: k.u - field_k(x), derivatives=False),
        },
        lambda g: {"inside": uniform(400, 2, g), "data": uniform(300, 2, g), "edge": on_faces(80, 2, g)},
        field_k,
        test_points(4000, 2),
        {"data": 100.0},
    )
