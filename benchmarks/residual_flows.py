"""Burgers' equation with a shock, Allen and Cahn's, and a driven cavity, with solutions by other methods."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from torch import Tensor, nn

from benchmarks.residual_equations import BoundaryProblem, FormulaTerm, Points, TermJets, on_faces, uniform
from natgrad.residuals import HardConstraint, Periodic

VISCOSITY = 0.01 / math.pi
REYNOLDS = 100.0


def widen(x: Tensor) -> Tensor:
    """From the unit square to (-1, 1) x (0, 1)."""
    return torch.stack([2 * x[:, 0] - 1, x[:, 1]], 1)


def solve_burgers(x: Tensor, nodes: int = 4001) -> Tensor:
    """u(x, t) from -sin(pi x) by Cole and Hopf's formula, by quadrature, (b, 1)."""
    s = torch.linspace(-12, 12, nodes, dtype=x.dtype)
    y = x[:, :1] - s * (4 * VISCOSITY * x[:, 1:]).sqrt()
    weights = torch.softmax(-torch.cos(math.pi * y) / (2 * math.pi * VISCOSITY) - s.square(), 1)
    return -(weights * torch.sin(math.pi * y)).sum(1, keepdim=True)


def burgers() -> BoundaryProblem:
    """u_t + u u_x = .01 / pi u_xx from -sin(pi x), 0 at both ends by construction: a shock at x = 0 from t = .32 on."""

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.first[..., 1] + jets.u * jets.first[..., 0] - VISCOSITY * jets.second[..., 0]

    def start(x: Tensor) -> Tensor:
        return -torch.sin(math.pi * x[..., :1])  # 0 at both ends, too

    def constrain(net: nn.Module) -> nn.Module:
        return HardConstraint(net, lambda x: x[:, 1:] * (1 - x[:, :1] ** 2), start)

    test = widen(uniform(1000, 2, torch.Generator().manual_seed(3)))
    found = solve_burgers(test)
    net = (2, 20, 20, 20, 1, constrain)
    pieces = {"inside": FormulaTerm(inside, ((0,),))}
    draw = lambda g: {"inside": widen(uniform(1200, 2, g))}  # noqa: E731
    return BoundaryProblem("Burgers with a shock", (net,), pieces, draw, lambda x: found, test, adaptive="inside")


@lru_cache
def solve_allen_cahn(modes: int = 512, steps: int = 4000, keep: int = 20) -> tuple[Tensor, Tensor]:
    """Points and values by Strang's splitting: both parts of a step are exact, so that its error is O(step^2)."""
    x = -1 + 2 * np.arange(modes) / modes
    dt, waves = 1 / steps, math.pi * np.fft.rfftfreq(modes, 1 / modes)
    diffuse, u = np.exp(-1e-4 * waves**2 * dt / 2), x**2 * np.cos(math.pi * x)
    points, values = [], []
    for step in range(1, steps + 1):
        u = np.fft.irfft(diffuse * np.fft.rfft(u), modes)
        u = u / np.sqrt(u**2 + (1 - u**2) * math.exp(-10 * dt))  # u' = 5 u - 5 u^3
        u = np.fft.irfft(diffuse * np.fft.rfft(u), modes)
        if step % (steps // keep) == 0:
            points.append(np.stack([x[::8], np.full(modes // 8, step * dt)], 1))
            values.append(u[::8])
    return torch.from_numpy(np.concatenate(points)), torch.from_numpy(np.concatenate(values)).unsqueeze(1)


def allen_cahn() -> BoundaryProblem:
    """u_t = .0001 u_xx + 5 u - 5 u^3 from x^2 cos(pi x), periodic in x by the first layer, u = start + t net."""

    def inside(x: Tensor, jets: TermJets) -> Tensor:
        return jets.first[..., 1] - 1e-4 * jets.second[..., 0] - 5 * (jets.u - jets.u**3)

    def start(x: Tensor) -> Tensor:
        return x[..., :1] ** 2 * torch.cos(math.pi * x[..., :1])

    def constrain(net: nn.Module) -> nn.Module:
        return HardConstraint(net, lambda x: x[:, 1:], start)

    test, found = solve_allen_cahn()
    net = (Periodic({0: 2.0}), 3, 24, 24, 24, 1, constrain)
    pieces = {"inside": FormulaTerm(inside, ((0,),))}
    draw = lambda g: {"inside": widen(uniform(1200, 2, g))}  # noqa: E731
    return BoundaryProblem("Allen-Cahn", (net,), pieces, draw, lambda x: found, test, adaptive="inside")


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
        return np.stack([one.deriv(order)(s) if order else one(s) for one in basis], 1)

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
        matrix = {key: one for key, (one, _) in needed.items()}
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

    test, found = solve_cavity()
    walls = FormulaTerm(lambda x, jets: jets.u[..., :2] - lid(x), derivatives=False)
    pieces = {"inside": FormulaTerm(inside, ((0, 1),)), "walls": walls}
    return BoundaryProblem("lid-driven cavity", ((2, 24, 24, 3),), pieces, draw, lambda x: found, test)
