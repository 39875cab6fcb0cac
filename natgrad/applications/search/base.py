"""Ask and tell: what every search of a black box has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.linalg import all_finite


@dataclass(frozen=True)
class Best:
    """The best point so far: x (d,), its value fun (inf before the first), and after how many evaluations it came."""

    x: Tensor
    fun: float
    nfev: int


class Search(ABC):
    """A distribution that is moved towards better points: `X = s.ask()`, evaluate, `s.tell(X, F)`, until `s.stop()`.

    Lower is better. NaN counts as infinitely bad. Searches with the same seed and the same values told are equal.
    """

    best: Best
    popsize: int
    nfev: int
    nit: int

    @abstractmethod
    def ask(self) -> Tensor:
        """Candidates X (popsize, d) drawn from the distribution."""

    def tell(self, X: Tensor, F: Tensor) -> None:
        """Move the distribution by the values F (popsize,) of the candidates X (popsize, d), the ones asked for."""
        points, values = self._checked(X, F)
        self.nfev += len(values)
        self.nit += 1
        self._remember(points, values)
        self._move(points, values)

    @abstractmethod
    def stop(self) -> str | None:
        """Why the search should end, as `word: sentence`, or None while it should go on."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, for `load_state_dict` of a search built with the same arguments."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the search that gave `state` was, bit for bit."""

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """Sizes of the distribution, for the history: a number per name."""

    @abstractmethod
    def _move(self, points: Tensor, values: Tensor) -> None:
        """Update the distribution; both are checked."""

    @abstractmethod
    def _dim(self) -> int:
        """d."""

    def _checked(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points = torch.as_tensor(X, dtype=self.best.x.dtype, device=self.best.x.device).detach()
        values = as_values(F, "F").to(points.device)
        if points.dim() != 2 or points.shape[1] != self._dim():
            raise ValueError(
                f"X has shape {tuple(points.shape)}, expected (popsize, {self._dim()}): the points asked for"
            )
        if len(points) != self.popsize:
            raise ValueError(f"X has {len(points)} rows, expected {self.popsize}: tell all points of one ask() at once")
        if values.shape != (len(points),):
            raise ValueError(f"F has shape {tuple(values.shape)}, expected ({len(points)},): a value per row of X")
        if not all_finite(points):
            raise ValueError("X has entries that are not finite, expected the points that ask() gave")
        return points, torch.where(values.isnan(), torch.inf, values)

    def _remember(self, points: Tensor, values: Tensor) -> None:
        i = int(values.argmin())
        if float(values[i]) < self.best.fun:
            self.best = Best(points[i].clone(), float(values[i]), self.nfev - len(values) + i + 1)


def as_values(values: Any, name: str) -> Tensor:
    """Objective values as a float64 tensor, from a tensor, an array or a list of numbers."""
    if isinstance(values, (list, tuple)):
        values = [float(v) for v in values]
    found = torch.as_tensor(values)
    if found.is_complex():
        raise ValueError(f"{name} is complex, expected real values: lower is better")
    return found.detach().to(torch.float64)


def as_popsize(popsize: int | None, default: int, least: int = 2) -> int:
    """A population size. ValueError if a generation could not be ranked."""
    if popsize is None:
        return default
    if isinstance(popsize, bool) or not isinstance(popsize, int) or popsize < least:
        raise ValueError(
            f"popsize is {popsize!r}, expected an integer >= {least}, or None for {default}: a generation is ranked"
        )
    return popsize


def new_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """A generator of its own: seeded by `seed`, or from the global generator where that is None."""
    generator = torch.Generator(device=device)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed is {seed!r}, expected an integer or None")
    generator.manual_seed(int(torch.randint(2**62, ()).item()) if seed is None else seed)
    return generator
