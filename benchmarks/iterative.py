"""Products and seconds that iterative solvers need until |b - A x| <= 1e-8 |b|, beside SciPy's minres and cg."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg, minres
from torch import Tensor

import natgrad as ng

N, RTOL, MOST = 1000, 1e-8, 10_000
HEADS = ("MinresQLP", "SciPy minres", "CG", "SciPy cg")


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
    """Any symmetric matrix: `operators.DenseOperator` is for metrics, which are not indefinite."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.size, self.dtype, self.device = matrix, len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector


Answer = tuple[str, float]  # products, or why they do not suffice; processor seconds


def ours(solver: ng.Solver, matrix: Tensor, rhs: Tensor, damping: float) -> Answer:
    """Products until the tolerance, or why it stopped."""
    operator = Symmetric((matrix + matrix.T) / 2)
    start = time.process_time()
    solution = solver.solve(operator, rhs, damping=damping)
    seconds = time.process_time() - start
    met = bool(solution.residual <= RTOL * rhs.norm())
    return (str(solution.steps) if met else f"{solution.status} after {solution.steps}"), seconds


def theirs(method: Callable[..., Any], matrix: Tensor, rhs: Tensor, damping: float) -> Answer:
    """SciPy's minres or cg. Timed to its own tolerance, which minres measures differently; products to ours."""
    dense, b = (matrix + damping * torch.eye(N, dtype=torch.float64)).numpy(), rhs.numpy()
    operator = LinearOperator(dense.shape, lambda v: dense @ v)
    met: list[int] = []
    count = 0

    def count_product(x: np.ndarray) -> None:
        nonlocal count
        count += 1
        if not met and np.linalg.norm(b - dense @ x) <= RTOL * np.linalg.norm(b):
            met.append(count)

    method(operator, b, rtol=1e-15, maxiter=MOST, callback=count_product)
    if not met:
        return f"not met after {count}", float("nan")
    start = time.process_time()
    method(operator, b, rtol=1e-30, maxiter=met[0])  # as many steps as the tolerance took, without looking
    return str(met[0]), time.process_time() - start


def report(repeats: int = 5) -> list[tuple[str, ...]]:
    """Rows (system, products and milliseconds of MinresQLP, SciPy's minres, CG, SciPy's cg)."""
    rows = []
    for name, (matrix, damping) in systems().items():
        rhs = torch.randn(N, dtype=torch.float64)
        contestants = [
            partial(ours, ng.MinresQLP(rtol=RTOL, max_steps=MOST)),
            partial(theirs, minres),
            partial(ours, ng.CG(rtol=RTOL, max_steps=MOST)),
            partial(theirs, cg),
        ]
        turns = [[contestant(matrix, rhs, damping) for contestant in contestants] for _ in range(repeats)]
        rows.append((name, *(write_answers([turn[i] for turn in turns]) for i in range(len(contestants)))))
    return rows


def write_answers(answers: list[Answer]) -> str:
    """Products, and the median of the milliseconds."""
    words, seconds = answers[0][0], median(answer[1] for answer in answers)
    return words if math.isnan(seconds) else f"{words} ({1000 * seconds:.0f} ms)"
