"""Evaluating a black box: in batches or one by one, here or elsewhere; what fails is a worst value, said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import as_values

Function = Callable[[Tensor], Any]


class Objective:
    """F (popsize,) for X (popsize, d): f on the batch, or with vectorized=False on one point (d,) at a time.

    executor: of `concurrent.futures`; points are then submitted one by one. A value that is NaN, or an exception in f,
    counts as infinitely bad and is warned of once; what is no number at all, or of the wrong shape, is an error.
    """

    def __init__(self, f: Function, vectorized: bool, executor: Executor | None) -> None:
        if not callable(f):
            raise TypeError(f"f is {type(f).__name__}, expected a function of points")
        if executor is not None and vectorized:
            raise ValueError("an executor evaluates single points: pass vectorized=False, and an f of one point (d,)")
        self.f, self.vectorized, self.executor = f, vectorized, executor
        self.nfev = 0
        self._warned = False

    def __call__(self, points: Tensor) -> Tensor:
        self.nfev += len(points)
        values = self._batch(points) if self.vectorized else self._each(points)
        bad = values.isnan()
        if bool(bad.any()):
            self._warn(
                f"f is NaN at {int(bad.sum())} of {len(points)} points, {points[bad][0].tolist()[:10]} the first"
            )
        return torch.where(bad, torch.inf, values)

    def _batch(self, points: Tensor) -> Tensor:
        try:
            found = self.f(points.clone())
        except Exception as error:  # noqa: BLE001 a black box may raise anything
            self._warn(f"f raised {type(error).__name__}: {error}")
            return self._rows(points)
        values = as_values(found, "f(X)").to(points.device)
        if values.shape != (len(points),):
            raise ValueError(
                f"f(X) has shape {tuple(values.shape)} for X of shape {tuple(points.shape)}, "
                f"expected ({len(points)},): a value per row; pass vectorized=False if f takes one point"
            )
        return values

    def _rows(self, points: Tensor) -> Tensor:
        """A batch that raised, row by row: the other points still have values."""
        rows = [self._guarded(lambda row=row: self.f(row.clone().unsqueeze(0))) for row in points]
        return torch.tensor(rows, dtype=torch.float64, device=points.device)

    def _each(self, points: Tensor) -> Tensor:
        rows = [row.clone() for row in points]
        if self.executor is None:
            values = [self._guarded(lambda row=row: self.f(row)) for row in rows]
        else:
            futures = [self.executor.submit(self.f, row) for row in rows]
            values = [self._guarded(future.result) for future in futures]
        return torch.tensor(values, dtype=torch.float64, device=points.device)

    def _guarded(self, call: Callable[[], Any]) -> float:
        try:
            found = call()
        except Exception as error:  # noqa: BLE001 a black box may raise anything
            self._warn(f"f raised {type(error).__name__}: {error}")
            return torch.inf
        value = as_values(found, "f(x)")
        if value.numel() != 1:
            raise ValueError(f"f(x) has shape {tuple(value.shape)} for one point, expected a number")
        return float(value)

    def _warn(self, what: str) -> None:
        if not self._warned:
            warnings.warn(
                f"{what}; such points count as infinitely bad, this is said once", RuntimeWarning, stacklevel=2
            )
        self._warned = True
