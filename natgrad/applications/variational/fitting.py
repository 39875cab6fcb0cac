"""Steps until nothing is left to gain, for a q that knows how to take one."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import stdev
from typing import Any, Self

from natgrad.applications.variational.convergence import (
    UNKNOWN,
    WINDOW,
    Bounds,
    has_ended,
    has_settled,
    measure_error,
    runs_away,
)
from natgrad.ground.progress import Progress, check_callback
from natgrad.ground.pure import keep_gradient_mode
from natgrad.optim import RankExchange

SMALLEST = 2.0**-20
"""Share of its rate at which `fit` ends."""
NO_MAXIMUM = (
    "log p has no maximum: the bound rose from {:.3g} to {:.3g}, and q went on outwards. The target is the logarithm "
    "of a density; a loss is minus that, and needs its sign changed"
)


class Fitted(ABC):
    """A q that moves by natural gradient steps; its attribute `lr` is their rate."""

    lr: float

    @property
    @abstractmethod
    def steady(self) -> bool:
        """True if expectations under the same q are the same at every step, so that two bounds can be compared."""

    @property
    @abstractmethod
    def processes(self) -> RankExchange:
        """The processes that fit q together; one alone exchanges nothing."""

    @abstractmethod
    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        """A step: the bound before it, and half of the natural gradient's squared length there, both in nats.

        Args:
            batch: Inputs and targets for a network, nothing otherwise.
        """

    @abstractmethod
    def elbo(self, *batch: Any) -> float:
        """The evidence lower bound in nats, with the points of the next step.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.
        """

    def elbos_elsewhere(self) -> list[float]:
        """The same by other points, which tell its error; empty where nothing does."""
        return []

    @abstractmethod
    def snapshot(self) -> Any:
        """What q is now, for `restore`."""

    @abstractmethod
    def restore(self, place: Any) -> None:
        """Make q what it was.

        Args:
            place: From `snapshot`.
        """

    @keep_gradient_mode
    def fit(
        self,
        steps: int = 100,
        *,
        tolerance: float = 1e-6,
        callback: Callable[[Self], Any] | None = None,
        progress: bool | None = None,
    ) -> Bounds:
        """At most `steps` steps, until the natural gradient is shorter than `tolerance` says.

        Ctrl-C ends it with q after the last whole step.

        Where expectations are the same at every step, the bound never falls: a step that lowers it is taken back and
        the rate halved; two steps that do not double it again, up to `lr`.

        Args:
            steps: At most.
            tolerance: In nats. `gap`, half of the natural gradient's squared length, is what a full step would gain.
                With the same points at every step q has converged once it is below, or below .01 where ten steps gained
                less than the tolerance each. With points drawn anew a step's bound is noise: q has converged once the
                last ten steps gained less than this on average, with two standard errors added. 1e-6 is out of reach
                then; take .1, or more points.
            callback: Called with q after each step that is kept; fitting stops if it returns True.
            progress: True for a line that shows how far it is, False for none; None for one where the standard error is
                a terminal.

        Returns:
            The bound before each step. The list's `converged` says whether q arrived, its `gap` how far from the
            optimum it was, its `error` how exactly the bound is known.

        Warns:
            RuntimeWarning: If the steps have come to rest, but other points show that the bound is not known to the
                tolerance, and not to .1 nats: `converged` is False then.
        """
        check_callback(callback, "q")
        found, rate, past, risen = Bounds(), self.lr, self.snapshot(), 0
        here = past
        try:
            with Progress("steps", steps, progress) as shown:
                while len(found) < steps and not found.converged and self.lr > rate * SMALLEST:
                    here = self.snapshot()
                    bound, gap = self._advance_from(found)
                    if self._has_fallen(found, bound, tolerance):
                        self._go_back(past)
                        found.pop()  # the bound at `past`, which the next step measures again
                        risen, steps = 0, steps - 1
                        continue
                    found.append(bound)
                    found.gap, past, here, risen = gap, here, self.snapshot(), risen + 1
                    found.converged = (has_ended if self.steady else has_settled)(found, tolerance)
                    if risen % 2 == 0:
                        self.lr = min(rate, 2 * self.lr)
                    shown.update(len(found), {"bound": bound, "gap": gap})
                    if self._ends(callback):
                        break
                if self.steady and self._has_fallen(found, self.elbo(), tolerance):
                    self._go_back(past)
                if runs_away(found):
                    warnings.warn(NO_MAXIMUM.format(*found[:: len(found) - 1]), RuntimeWarning, stacklevel=2)
                self._measure_error(found, tolerance)
        except KeyboardInterrupt:
            self.restore(here)
        finally:
            self.lr = rate
        return found

    def _advance_from(self, found: Bounds) -> tuple[float, float]:
        """A step; where it fails since log p has no maximum, that is said."""
        try:
            return self.advance(())
        except ValueError as error:
            if runs_away(found):
                raise ValueError(NO_MAXIMUM.format(*found[:: len(found) - 1]) + "; q is as it was") from error
            raise

    def _measure_error(self, found: Bounds, tolerance: float) -> None:
        """The error of the bound. A fit whose bound is hardly known has not converged."""
        if not self.steady:
            found.error = stdev(found[-WINDOW:]) if len(found) > 1 else math.nan
            found.known = found.error <= tolerance
            return
        others = self.elbos_elsewhere() if found else []
        if not others:
            return
        bound = self.elbo()
        found.error = measure_error(bound, others)
        found.known = found.error <= tolerance
        if found.converged and found.error > max(tolerance, UNKNOWN):
            found.converged = False
            warnings.warn(
                f"the steps have come to rest, but the bound {bound:.4g} is known to {found.error:.1g} nats only: q is "
                "fitted to its points. Give more of them, such as points=Sobol(1024), or say that this is enough, "
                f"tolerance={found.error:.1g}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _ends(self, callback: Callable[[Self], Any] | None) -> bool:
        """Whether the callback of some process asked to end."""
        asked = callback is not None and callback(self) is True
        return any(one for (one,) in self.processes.share_numbers([asked], self.processes.ranks.device))

    def _has_fallen(self, found: list[float], bound: float, tolerance: float) -> bool:
        return bool(found) and self.steady and bound < found[-1] - tolerance

    def _go_back(self, place: Any) -> None:
        """To q as it was, with half of the rate."""
        self.restore(place)
        self.lr /= 2
