"""What every q does: steps until nothing is left to gain, draws, predictions, states. Families of q lie beside it."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from statistics import stdev
from typing import Any, Self

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_number
from natgrad.ground.exchanges import any_asks, sum_numbers, sum_tensors
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.progress import Callbacks, Progress, join_callbacks
from natgrad.ground.pure import as_call, leaves, map_tensors, run_detached, set_modes_aside
from natgrad.optim import Processes
from natgrad.variational.network import Network, require_batch
from natgrad.variational.targets import Target

WINDOW, LEFT, UNKNOWN = 10, 1e-2, 0.1
"""Steps over which bounds are compared; nats that a converged q may lack, and to which its bound must be known: a tenth
of the odds of two models."""
FAR, OUT_OF_REACH = 1e3, 1e6
"""Times the first bound's size that a fit of a density does not gain ever faster, and not at all: a start that is far
off is far below."""
SMALLEST = 2.0**-20
"""Share of its rate at which `fit` ends."""
NO_MAXIMUM = (
    "log p has no maximum: the bound rose from {:.3g} to {:.3g}, and q went on outwards. The target is the logarithm "
    "of a density; a loss is minus that, and needs its sign changed"
)
ENDLESS = 1e2
"""Times its width at the start from which a q that did not converge has no end in sight."""
NO_END = (
    "q is {:.1g} times as wide as at its start, and did not converge: log p does not fall in some direction, where it "
    "is the density of nothing. Give every variable a prior; if log p has one, start with a larger covariance"
)
NO_RATE = (
    "only rates far below lr bring a gain, and q has not converged: log p has no maximum, or its gradient is not that "
    "of its values, as behind detach(), a rounding or a jump"
)

ENOUGH, HALVINGS = 0.4, 30
"""Share of the promised gain that a move must bring, and how often it is shortened for it."""


class Fitted(ABC):
    """A q that moves by natural gradient steps. A family of q says what a step is, what its bound is, and how to draw.

    Attributes:
        lr: Rate of the steps; it may be changed between them.
        steps: Number of steps taken.
    """

    STATE: tuple[str, ...]
    """Names of the tensors that make q what it is."""
    mean: Any

    def __init__(self, target: Target, lr: float, processes: Processes | None) -> None:
        self.target, self.lr, self.steps = target, lr, 0  # of several processes each one's part of the target
        self.processes = processes or Processes()
        self.choices: dict[str, Any] = {}  # what `repr` shows

    def __repr__(self) -> str:
        return write_choices(self, **self.choices, lr=self.lr, steps=self.steps)

    @abstractmethod
    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        """A step: the bound before it, and half of the natural gradient's squared length there, both in nats.

        Args:
            batch: Inputs and targets for a network, nothing otherwise.
        """

    @abstractmethod
    def measure_bound(self, target: Target, batch: tuple[Any, ...]) -> float:
        """The evidence lower bound in nats, of a target with the points of the next step.

        Args:
            target: Its own, or the same with other points.
            batch: Inputs and targets for a network, nothing otherwise.
        """

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws from q, shape (n, d).

        Args:
            n: How many.
            generator: Of the draws.
        """

    @set_modes_aside
    @torch.no_grad()
    def step(self, *batch: Any) -> float:
        """One natural gradient step.

        A precision stays positive definite at every rate: a direction in which it would not keeps half of what it had.
        A move is shortened until E_q[log p], or the bound where the covariance has low rank, gains at least .4 of what
        its slope promised over the step's own points. A quadratic does so up to 1.2 times the best length: a diagonal q
        cannot run away.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.

        Returns:
            The evidence lower bound before the step, in nats.

        Raises:
            ValueError: If log p or its derivatives are not finite; q is then as it was.
        """
        return self.advance(batch)[0]

    @torch.no_grad()
    def elbo(self, *batch: Any) -> float:
        """The evidence lower bound in nats, with the points of the next step: of a network a pair of draws, so rough.

        Args:
            *batch: Inputs and targets for a network, nothing otherwise.
        """
        return self.measure_bound(self.target, batch)

    @torch.no_grad()
    def elbos_elsewhere(self) -> list[float]:
        """The same by other points, which tell its error; empty where nothing does."""
        return [self.measure_bound(target, ()) for target in self.target.elsewhere(self.count_dimensions())]

    def count_dimensions(self) -> int:
        """Of the points over which expectations are taken."""
        return len(self.mean)

    @torch.no_grad()
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws from q, shape (n, d).

        Args:
            n: How many.
            generator: Of the draws; default torch's global one.

        Raises:
            ValueError: If n is no integer >= 1.
        """
        check_integer("n", n, of="the number of draws")
        return self.draw(int(n), generator)

    @torch.no_grad()
    def predict(self, inputs: Any, samples: int = 10, *, generator: torch.Generator | None = None) -> Any:
        """A network's outputs under draws of its weights, each tensor stacked: (samples, b, ...).

        Args:
            inputs: Of the network.
            samples: How many draws.
            generator: Of the draws; default torch's global one.

        Raises:
            TypeError: If the target is no network.
        """
        if not isinstance(self.target, Network):
            raise TypeError("predict is for networks; use sample(n) and your own function of z")
        draws = self.sample(samples, generator=generator)
        outputs = [run_detached(partial(self.target.predict, z, inputs)) for z in draws]
        stacks = iter([torch.stack(tensors) for tensors in zip(*map(leaves, outputs), strict=True)])
        return map_tensors(outputs[0], lambda _: next(stacks))

    def _add_parts(
        self, target: Target, batch: tuple[Any, ...], work: Callable[[Any], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """What `work` makes of the target; of several processes the sums of what each makes of its part."""
        if self.processes.size == 1:
            return work(target)
        device, total = self.mean.device, None
        if isinstance(target, Network):
            with self.processes.failing_together(device):
                rows = as_call(require_batch(batch)[0]).batch()
            total = int(sum_numbers(self.processes, [rows], device)[0])
            if not total:
                raise ValueError("inputs is an empty batch on every process; give at least one of them an example")
        with self.processes.failing_together(device):
            terms = work(target.take_part(self.processes.size, total))
        return sum_tensors(self.processes, terms)

    def snapshot(self) -> dict[str, Any]:
        """What q is now, for `restore`."""
        return {name: getattr(self, name) for name in (*self.STATE, "steps")}

    def restore(self, place: dict[str, Any]) -> None:
        """Make q what it was.

        Args:
            place: From `snapshot`.
        """
        for name in (*self.STATE, "steps"):
            setattr(self, name, place[name])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {**self.snapshot(), "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: If it is of another size.
        """
        here = self.state_dict()
        missing = set(here) - set(state)
        if missing or any(state[name].shape != here[name].shape for name in self.STATE):
            shapes = " and ".join(f"{name} of shape {tuple(here[name].shape)}" for name in self.STATE)
            raise ValueError(f"state lacks {sorted(missing)} or is of another size, expected {shapes}")
        for name in self.STATE:
            setattr(self, name, state[name].to(here[name]).clone())
        self.steps, self.lr = state["steps"], state["lr"]

    @set_modes_aside
    @explain_calls
    def fit(
        self,
        steps: int = 100,
        *,
        tolerance: float = 1e-6,
        callback: Callbacks[Self] | None = None,
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
            callback: Called with q after each step that is kept, or a list of such functions; fitting stops if one
                returns True.
            progress: True for a line that shows how far it is, False for none; None for one where the standard error is
                a terminal.

        Returns:
            The bound before each step. The list's `converged` says whether q arrived, its `gap` how far from the
            optimum it was, its `error` how exactly the bound is known.

        Raises:
            ValueError: If a number is out of range.

        Warns:
            RuntimeWarning: If log p has no maximum, or does not fall in some direction, as far as the steps show. If
                only rates far below `lr` bring a gain and q has not converged. If the steps have come to rest, but
                other points show that the bound is not known to the tolerance, and not to .1 nats: `converged` is False
                then.
        """
        steps, call, steady = check_integer("steps", steps, 0), join_callbacks(callback, "q"), self.target.steady
        check_number("tolerance", tolerance, hint=" of nats")
        bounds, rate, width, risen = Bounds(), self.lr, self._measure_width(), 0
        here = past = self.snapshot()
        try:
            with Progress("steps", steps, progress) as shown:
                while len(bounds) < steps and not bounds.converged and self.lr > rate * SMALLEST:
                    here = self.snapshot()
                    bound, gap = self._advance_from(bounds, width)
                    if steady and bounds and bound < bounds[-1] - tolerance:
                        self.restore(past)
                        self.lr /= 2
                        bounds.pop()  # the bound at `past`, which the next step measures again
                        risen, steps = 0, steps - 1
                        continue
                    bounds.append(bound)
                    bounds.gap, past, here, risen = gap, here, self.snapshot(), risen + 1
                    bounds.converged = (has_ended if steady else has_settled)(bounds, tolerance)
                    if risen % 2 == 0:
                        self.lr = min(rate, 2 * self.lr)
                    shown.update(len(bounds), {"bound": bound, "gap": gap})
                    if any_asks(self.processes, call(self), self.processes.device):
                        break
                if steady and bounds and self.elbo() < bounds[-1] - tolerance:
                    self.restore(past)
                    self.lr /= 2
                trouble = self._explain_end(bounds, width)
                if not trouble and not bounds.converged and self.lr < rate * SMALLEST**0.5:
                    trouble = NO_RATE
                if trouble:
                    warnings.warn(trouble, RuntimeWarning, stacklevel=6)  # beyond the wrappers
                self._measure_error(bounds, tolerance)
        except KeyboardInterrupt:
            self.restore(here)
        finally:
            self.lr = rate
        return bounds

    @torch.no_grad()
    def _advance_from(self, bounds: Bounds, width: float) -> tuple[float, float]:
        """A step; where it fails since log p has no maximum, that is said. width: Of q at the start of the fit."""
        try:
            return self.advance(())
        except ValueError as error:
            if trouble := self._explain_end(bounds, width):
                raise ValueError(f"{trouble}; q is as it was") from error
            raise

    def _explain_end(self, bounds: Bounds, width: float) -> str:
        """That log p has no maximum, or no end, in words; empty where nothing shows it."""
        if runs_away(bounds):
            return NO_MAXIMUM.format(*bounds[:: len(bounds) - 1])
        try:
            grown = 0.0 if bounds.converged or not bounds else self._measure_width() / width
        except ValueError:  # a precision that has become singular, of which the step says more
            return ""
        return NO_END.format(grown) if grown > ENDLESS else ""

    @torch.no_grad()
    def _measure_width(self) -> float:
        """The largest standard deviation of a variable over some draws."""
        draws = self.draw(64, torch.Generator(device=self.mean.device).manual_seed(0))
        return float(draws.std(0).max())

    def _measure_error(self, bounds: Bounds, tolerance: float) -> None:
        """The error of the bound. A fit whose bound is hardly known has not converged."""
        if not self.target.steady:
            bounds.error = stdev(bounds[-WINDOW:]) if len(bounds) > 1 else math.nan
            bounds.known = bounds.error <= tolerance
            return
        others = self.elbos_elsewhere() if bounds else []
        if not others:
            return
        bound = self.elbo()
        values = torch.tensor([bound, *others], dtype=torch.float64)
        gap = (values[0] - values[1:].mean()).abs() + 2 * values[1:].std() / len(others) ** 0.5
        bounds.error = float(gap) if bool(torch.isfinite(values).all()) else math.inf
        bounds.known = bounds.error <= tolerance
        if bounds.converged and bounds.error > max(tolerance, UNKNOWN):
            bounds.converged = False
            warnings.warn(
                f"the steps have come to rest, but the bound {bound:.4g} is known to {bounds.error:.1g} nats only: q "
                "is fitted to its points. Give more of them, such as points=Sobol(1024), or say that this is enough, "
                f"tolerance={bounds.error:.1g}",
                RuntimeWarning,
                stacklevel=7,
            )


def search_rate(measure_gain: Callable[[float], float], promise: float, rate: float, value: Tensor) -> float:
    """The first rate that gains `ENOUGH` of promise * rate, less round-off of the value before; 0 where none does."""
    slack = 8 * torch.finfo(value.dtype).eps * (1 + abs(float(value)))
    for _ in range(HALVINGS):
        gain = measure_gain(rate)
        if gain >= ENOUGH * rate * promise - slack:  # False for a NaN
            return rate
        # the best length of the parabola through both values; a NaN is an overflow
        best = rate * promise / (2 * (rate * promise - gain)) if math.isfinite(gain) else 0.0
        rate *= min(max(best, 0.1), 0.5)
    return 0.0


def refuse_infinite(mean: Tensor) -> ValueError:
    """The error of a log p that is not finite where q is."""
    return ValueError(
        f"log p or a derivative is not finite near z = {format_few(mean)}; q is as it was. Start nearer, with a "
        "smaller covariance, or write log p over unconstrained z"
    )


def format_few(values: Tensor) -> str:
    """The first three numbers as text."""
    shown = ", ".join(f"{float(v):.3g}" for v in values[:3])
    return f"({shown}{', ...' if len(values) > 3 else ''})"


# When a fit has converged: what is left to gain, and how bounds change from step to step


class Bounds(list[float]):
    """The bounds that `fit` found, in nats, one before each step.

    Attributes:
        converged: True if the fit ended since nothing was left to gain over its points; False if it ran out of steps,
            or of rate, or if `error` is above the tolerance and .1 nats: then the points do not determine q.
        known: True if `error` is at most the tolerance.
        error: How far `q.elbo()`, by the points of the fit, may be from that of the same q, in nats: the difference
            from the mean over other points, and two standard errors of that. Where points are drawn anew, the standard
            deviation of a bound. NaN where it is not known.
        gap: Half of the natural gradient's squared length before the last step, in nats: what a full step would gain of
            a bound that is quadratic. Noise keeps it from zero where points are drawn anew.
    """

    converged: bool = False
    known: bool = False
    error: float = math.nan
    gap: float = math.inf


def has_ended(bounds: Bounds, tolerance: float) -> bool:
    """True if the gap is below the tolerance, or below `LEFT` while `WINDOW` steps gained less than it each."""
    # the second is how fits over points end where log p has kinks: the gap jumps when a point crosses one
    still = len(bounds) > WINDOW and abs(bounds[-1] - bounds[-1 - WINDOW]) < WINDOW * tolerance
    gap = abs(bounds.gap)  # below zero where a system was not solved
    return gap < tolerance or (still and gap < LEFT)


def has_settled(bounds: Bounds, tolerance: float) -> bool:
    """True if the last `WINDOW` bounds gained less than the tolerance on those before, two standard errors included."""
    if len(bounds) < 2 * WINDOW:
        return False
    before, after = torch.tensor(bounds[-2 * WINDOW :], dtype=torch.float64).view(2, WINDOW)
    error = ((before.var() + after.var()) / WINDOW).sqrt()
    return float((after.mean() - before.mean()).abs() + 2 * error) < tolerance


def runs_away(bounds: Sequence[float]) -> bool:
    """True if the bound rose so far above the size of the first one that log p can have no maximum."""
    if len(bounds) < 2:
        return False
    first, half, last = bounds[0], bounds[len(bounds) // 2], bounds[-1]
    gained = (last - first) / (1 + abs(first))
    return gained > OUT_OF_REACH or (gained > FAR and last - half >= half - first)
