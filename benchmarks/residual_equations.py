"""Differential equations with known solutions, for physics-informed networks: what each is, and where it is tested.

An equation is one formula in the unknowns' values, first derivatives and sums of second ones at a point. Terms of
`ng.residuals` and the batched loss of the other contestants are both made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.chains import Constraint
from natgrad.ground.jets import Derivatives
from natgrad.residuals import HardConstraint, Periodic, draw_where_large
from natgrad_lab.equations.pinn import VISCOSITY, solve_allen_cahn, solve_burgers, widen

F64 = torch.float64
Points = dict[str, Tensor]
CANDIDATES = 6  # how many draws are the pool of which points are taken where residuals are large


@dataclass(frozen=True)
class TermJets:
    """An unknown at points, with any leading shape: value (m,), first derivatives (m, d), second ones (m, groups)."""

    u: Tensor
    first: Tensor
    second: Tensor


Formula = Callable[..., Tensor]  # points and the jets of every unknown -> residuals, all with the same leading shape


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
    """A boundary value problem, its solution known at some points."""

    name: str
    # the layers of each unknown's network; an entry before the first layer may be a module, one behind the last a
    # function that wraps the network
    nets: tuple[tuple[Any, ...], ...]
    pieces: Mapping[str, FormulaTerm]  # the terms
    draw: Callable[[torch.Generator], Points]  # points of every term
    exact: Callable[[Tensor], Tensor]  # (b, d) -> (b, m'), which the last unknown's first outputs are compared with
    test: Tensor  # points where that is done
    weights: Mapping[str, float] = field(default_factory=dict)  # of the terms
    anew: bool = False  # whether points are drawn at every step; else once
    adaptive: str = ""  # the term whose points are drawn anew from time to time where its residual is large

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
            u = nets[-1](self.test)[:, : exact.shape[1]]
            return float((u - exact).norm() / exact.norm())


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
        jets = Constraint(net.distance, net.values).push(x, layout, stacked)
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
    line, space = dims == 1, tuple(range(dims))

    def exact(x: Tensor) -> Tensor:
        t, y = x[..., -1:], x[..., :-1]
        if line:
            return torch.exp(-(math.pi**2) * t / 4) * torch.sin(math.pi * y)
        return torch.exp(-t) * torch.sin(2 * y).sum(-1, keepdim=True)

    def draw(g: torch.Generator) -> Points:
        counts = (400, 120) if line else (800, 300)
        faces = (*range(2 * dims), 2 * dims)  # no values at the end of time
        return {"inside": uniform(counts[0], dims + 1, g), "boundary": on_faces(counts[1], dims + 1, g, faces)}

    return BoundaryProblem(
        f"heat, {dims} + 1 dimensions",
        ((2, 32, 1) if line else (dims + 1, 40, 40, 1),),
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


# Burgers' equation with a shock, Allen and Cahn's, and a driven cavity, with solutions by other methods

REYNOLDS = 100.0


def burgers() -> BoundaryProblem:
    """u_t + u u_x = .01 / pi u_xx from -sin(pi x), 0 at both ends by construction: a shock at x = 0 from t = .32 on."""

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.first[..., 1] + jets.u * jets.first[..., 0] - VISCOSITY * jets.second[..., 0]

    def start(x: Tensor) -> Tensor:
        return -torch.sin(math.pi * x[..., :1])  # 0 at both ends, too

    def constrain(net: nn.Module) -> nn.Module:
        return HardConstraint(net, lambda x: x[:, 1:] * (1 - x[:, :1] ** 2), start)

    test = widen(uniform(1000, 2, torch.Generator().manual_seed(3)))
    values = solve_burgers(test, 4001).unsqueeze(1)
    net = (2, 20, 20, 20, 1, constrain)
    pieces = {"inside": FormulaTerm(inside, ((0,),))}
    draw = lambda g: {"inside": widen(uniform(1200, 2, g))}  # noqa: E731
    return BoundaryProblem("Burgers with a shock", (net,), pieces, draw, lambda x: values, test, adaptive="inside")


def allen_cahn() -> BoundaryProblem:
    """u_t = .0001 u_xx + 5 u - 5 u^3 from x^2 cos(pi x), periodic in x by the first layer, u = start + t net."""

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.first[..., 1] - 1e-4 * jets.second[..., 0] - 5 * (jets.u - jets.u**3)

    def start(x: Tensor) -> Tensor:
        return x[..., :1] ** 2 * torch.cos(math.pi * x[..., :1])

    def constrain(net: nn.Module) -> nn.Module:
        return HardConstraint(net, lambda x: x[:, 1:], start)

    x = torch.linspace(-1, 1, 65, dtype=F64)[:-1]
    test = torch.stack(torch.meshgrid(x, torch.arange(1, 21, dtype=F64) / 20, indexing="xy"), -1).view(-1, 2)
    values = solve_allen_cahn(test).unsqueeze(1)
    net = (Periodic({0: 2.0}), 3, 24, 24, 24, 1, constrain)
    pieces = {"inside": FormulaTerm(inside, ((0,),))}
    draw = lambda g: {"inside": widen(uniform(1200, 2, g))}  # noqa: E731
    return BoundaryProblem("Allen-Cahn", (net,), pieces, draw, lambda x: values, test, adaptive="inside")


def lid(x: Tensor) -> Tensor:
    """The velocity on the walls: 256 x^4 (1 - x)^4 on the upper one, 0 on the others, (..., 2)."""
    along = 256 * x[..., 0] ** 4 * (1 - x[..., 0]) ** 4 * (x[..., 1] > 1 - 1e-9)
    return torch.stack([along, torch.zeros_like(along)], -1)


@lru_cache
def solve_cavity(size: int = 26) -> tuple[Tensor, Tensor]:
    """Points and velocities of a polynomial stream function that fulfils all conditions, by Newton and Galerkin."""
    clamp = Chebyshev.fit(np.linspace(0, 1, 9), (lambda s: s**2 * (1 - s) ** 2)(np.linspace(0, 1, 9)), 4, [0, 1])
    basis = [clamp * Chebyshev.basis(i, [0, 1]) for i in range(size)]
    nodes, weights = np.polynomial.legendre.leggauss(size + 10)
    nodes = (nodes + 1) / 2

    def table(s: np.ndarray, order: int) -> np.ndarray:
        return np.stack([f.deriv(order)(s) if order else f(s) for f in basis], 1)

    across = 256 * clamp**2
    upward = Chebyshev.fit(np.linspace(0, 1, 9), (lambda s: s**3 - s**2)(np.linspace(0, 1, 9)), 3, [0, 1])
    tables = [table(nodes, k) for k in range(5)]

    def derive(i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
        """d^(i + j) psi / dx^i dy^j at the nodes: the matrix in the coefficients, and the part of the lid."""
        fixed = np.outer((across.deriv(i) if i else across)(nodes), (upward.deriv(j) if j else upward)(nodes))
        return np.kron(tables[i], tables[j]), fixed.reshape(-1)

    needed = {(i, j): derive(i, j) for i, j in [(1, 0), (0, 1), (3, 0), (1, 2), (2, 1), (0, 3), (4, 0), (2, 2), (0, 4)]}
    tests = np.kron(tables[0] * weights[:, None], tables[0] * weights[:, None]).T
    c = np.zeros(size * size)
    for _ in range(8):
        at = {key: matrix @ c + fixed for key, (matrix, fixed) in needed.items()}
        matrix = {key: rows for key, (rows, _) in needed.items()}
        spin_x, spin_y = at[3, 0] + at[1, 2], at[2, 1] + at[0, 3]  # of Laplace psi
        residual = at[0, 1] * spin_x - at[1, 0] * spin_y - (at[4, 0] + 2 * at[2, 2] + at[0, 4]) / REYNOLDS
        slope = spin_x[:, None] * matrix[0, 1] + at[0, 1][:, None] * (matrix[3, 0] + matrix[1, 2])
        slope = slope - spin_y[:, None] * matrix[1, 0] - at[1, 0][:, None] * (matrix[2, 1] + matrix[0, 3])
        slope = slope - (matrix[4, 0] + 2 * matrix[2, 2] + matrix[0, 4]) / REYNOLDS
        c = c - np.linalg.solve(tests @ slope, tests @ residual)
    s = np.linspace(0.02, 0.98, 40)
    rows, shape = [table(s, k) for k in range(2)], c.reshape(size, size)
    along = rows[0] @ shape @ rows[1].T + np.outer(across(s), upward.deriv(1)(s))
    down = rows[1] @ shape @ rows[0].T + np.outer(across.deriv(1)(s), upward(s))
    points = np.stack(np.meshgrid(s, s, indexing="ij"), -1).reshape(-1, 2)
    return torch.from_numpy(points), torch.from_numpy(np.stack([along, -down], -1).reshape(-1, 2))


def cavity() -> BoundaryProblem:
    """Navier and Stokes's equations in the unit square at Reynolds number 100, driven by the upper wall."""

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        velocity, slopes = jets.u[..., :2], jets.first[..., :2, :]
        carried = (slopes * velocity.unsqueeze(-2)).sum(-1)
        forces = carried + jets.first[..., 2, :] - jets.second[..., :2, 0] / REYNOLDS
        return torch.cat([forces, slopes.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)], -1)

    def draw(g: torch.Generator) -> Points:
        return {"inside": uniform(500, 2, g), "walls": on_faces(240, 2, g)}

    test, values = solve_cavity()
    walls = FormulaTerm(lambda x, jets: jets.u[..., :2] - lid(x), derivatives=False)
    pieces = {"inside": FormulaTerm(inside, ((0, 1),)), "walls": walls}
    return BoundaryProblem("lid-driven cavity", ((2, 24, 24, 3),), pieces, draw, lambda x: values, test)
