"""Products that iterative solvers need until |b - A x| <= 1e-8 |b|, beside SciPy's minres."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, minres
from torch import Tensor

import natgrad as ng

N, RTOL, MOST = 400, 1e-8, 5000


def systems() -> dict[str, tuple[Tensor, float]]:
    """Spectra in a random basis, float64, with a damping."""
    spectra = {
        "positive definite, cond 10": (np.linspace(0.1, 1, N), 0.0),
        "positive definite, cond 1e3": (np.geomspace(1e-3, 1, N), 0.0),
        "positive definite, cond 1e3, damping .01": (np.geomspace(1e-3, 1, N), 0.01),
        "positive definite, cond 1e5": (np.geomspace(1e-5, 1, N), 0.0),
        "positive definite, cond 1e5, damping .01": (np.geomspace(1e-5, 1, N), 0.01),
        "indefinite, cond 10": (np.concatenate([-np.linspace(0.1, 1, N // 2), np.linspace(0.1, 1, N // 2)]), 0.0),
        "five clusters": (np.repeat([0.01, 0.1, 0.5, 0.9, 1.0], N // 5) + np.linspace(0, 1e-3, N), 0.0),
    }
    basis = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64)).Q
    return {name: ((basis * torch.tensor(values)) @ basis.T, damping) for name, (values, damping) in spectra.items()}


class Symmetric(ng.Operator):
    """Any symmetric matrix: `operators.Dense` is for metrics, which are not indefinite."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.size, self.dtype, self.device = matrix, len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector


def ours(solver: ng.Solver, matrix: Tensor, rhs: Tensor, damping: float) -> str:
    """Products until the tolerance, or why it stopped."""
    solution = solver.solve(Symmetric((matrix + matrix.T) / 2), rhs, damping=damping)
    met = bool(solution.residual <= RTOL * rhs.norm())
    return str(solution.steps) if met else f"{solution.status} after {solution.steps}"


def theirs(matrix: Tensor, rhs: Tensor, damping: float) -> str:
    """SciPy's minres, run on until its true residual meets the tolerance."""
    dense, b = (matrix + damping * torch.eye(N, dtype=torch.float64)).numpy(), rhs.numpy()
    met: list[int] = []
    count = 0

    def seen(x: np.ndarray) -> None:
        nonlocal count
        count += 1
        if not met and np.linalg.norm(b - dense @ x) <= RTOL * np.linalg.norm(b):
            met.append(count)

    minres(LinearOperator(dense.shape, lambda v: dense @ v), b, rtol=1e-15, maxiter=MOST, callback=seen)
    return str(met[0]) if met else f"not met after {count}"


def report() -> list[tuple[str, str, str, str]]:
    """Rows (system, MinresQLP, SciPy minres, CG)."""
    rows = []
    for name, (matrix, damping) in systems().items():
        rhs = torch.randn(N, dtype=torch.float64)
        found = [
            ours(solver, matrix, rhs, damping)
            for solver in (ng.MinresQLP(rtol=RTOL, max_steps=MOST), ng.CG(rtol=RTOL, max_steps=MOST))
        ]
        rows.append((name, found[0], theirs(matrix, rhs, damping), found[1]))
    return rows
