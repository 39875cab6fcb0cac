"""Evaluating a black box: in batches or one by one, here or elsewhere; what fails is a worst value, said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.applications.search.base import as_values

Function = Callable[[Tensor], Any]


class Pool(Protocol):
    """What evaluates points elsewhere: an `Executor`, or a client of Dask, Ray or MPI with the same `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Something with `result()`, which gives fn(*args) or raises what fn raised."""


class Objective:
    """F (popsize,) for X (popsize, d): f on the batch, or with vectorized=False on one point (d,) at a time.

    executor: points are submitted to it one by one, as batches of one if f takes batches. A value that is NaN, or an
    exception in f, counts as infinitely bad and is warned of once; what is no number at all, or of the wrong shape, is
    an error, and so is an executor that breaks.
    """

    def __init__(self, f: Function, vectorized: bool = True, executor: Pool | None = None) -> None:
        if not callable(f):
            raise TypeError(f"f is {type(f).__name__}, expected a function of points")
        if executor is not None and not callable(getattr(executor, "submit", None)):
            raise TypeError(
                f"executor is {type(executor).__name__}, expected one of concurrent.futures, or what has its submit()"
            )
        self.f, self.vectorized, self.executor = f, vectorized, executor
        self.nfev = 0
        self._warned = False

    def __call__(self, points: Tensor) -> Tensor:
        self.nfev += len(points)
        values = self._batch(points) if self.vectorized and self.executor is None else self._each(points)
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
            return self._each(points)  # the other points still have values
        values = as_values(found, "f(X)").to(points.device)
        if values.shape != (len(points),):
            raise ValueError(
                f"f(X) has shape {tuple(values.shape)} for X of shape {tuple(points.shape)}, "
                f"expected ({len(points)},): a value per row; pass vectorized=False if f takes one point"
            )
        return values

    def _each(self, points: Tensor) -> Tensor:
        rows = [row.clone().unsqueeze(0) if self.vectorized else row.clone() for row in points]
        if self.executor is None:
            values = [self._guarded(lambda row=row: self.f(row)) for row in rows]
        else:
            futures = [self.executor.submit(self.f, row) for row in rows]
            values = [self._guarded(future.result) for future in futures]
        return torch.tensor(values, dtype=torch.float64, device=points.device)

    def _guarded(self, call: Callable[[], Any]) -> float:
        try:
            found = call()
        except (BrokenExecutor, CancelledError):  # no fault of f: without an executor nothing has a value any more
            raise
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
