"""Ask and tell: what every search of a black box has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from textwrap import shorten
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, is_real
from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import Explained, write_choices
from natgrad.ground.states import Stateful
from natgrad.search.domain import as_tensor

START = ("x0", "sigma0", "seed")
"""Arguments that say where a search begins, which a state overrides."""


@dataclass(frozen=True)
class Best:
    """The best point so far.

    Attributes:
        x: The point, shape (d,).
        fun: Its value; infinity before the first evaluation.
        nfev: Number of evaluations after which it was found.
    """

    x: Tensor
    fun: float
    nfev: int


class Search(Stateful, Explained):
    """A distribution that is moved towards better points: `X = s.ask()`, evaluate, `s.tell(X, F)`, until `s.stop()`.

    Lower is better. NaN counts as infinitely bad. Two searches with the same seed that are told the same values are
    equal.

    Attributes:
        best: The best point so far.
        popsize: Candidates per generation.
        nfev: Evaluations told so far.
        nit: Generations told so far.
        arguments: What the search was built with, as words: by them a state knows whether it is of the same problem.
    """

    STATE = ("best", "popsize", "nfev", "nit")
    best: Best
    popsize: int
    nfev: int
    nit: int
    arguments: Mapping[str, str] = MappingProxyType({})

    def __repr__(self) -> str:
        model, best = getattr(self, "model", None), float(self.best.fun)
        return write_choices(self, d=len(self.best.x), popsize=self.popsize, model=model, nfev=self.nfev, best=best)

    @abstractmethod
    def ask(self) -> Tensor:
        """Candidates drawn from the distribution.

        Returns:
            A tensor of shape (popsize, d).
        """

    def tell(self, X: Tensor, F: Tensor) -> None:
        """Move the distribution by the values of the candidates that `ask` gave.

        Args:
            X: Candidates, shape (popsize, d).
            F: Their values, shape (popsize,); lower is better, NaN is infinitely bad.

        Raises:
            ValueError: If X or F has another shape, or X has a point that `ask` cannot give: entries that are not
                finite, out of bounds, or no integers or bits where these are wanted. Nothing is changed then.
        """
        points, values = order_as_asked(*self._check_candidates(X, F), self._list_asked())
        self.nfev += len(values)
        self.nit += 1
        self._remember(points, values)
        self._move(points, values)

    @abstractmethod
    def stop(self) -> str | None:
        """Why the search should end, as `word: sentence`, or None while it should go on."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, for a search built with the same arguments; x0, sigma0 and seed are the state's."""
        return super().state_dict() | {"arguments": dict(self.arguments)}

    def check_state(self, state: dict[str, Any]) -> None:
        """ValueError for a state that lacks a part, or is of a search with another argument."""
        super().check_state(state)
        saved, present = (
            {name: words for name, words in arguments.items() if name.split(" ")[0] not in START}
            for arguments in (state["arguments"], self.arguments)
        )
        check_arguments("the state", saved, present, "build the search with the same arguments")

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """Sizes of the distribution, for the history: a number per name."""

    def renew(self, popsize: int, run: int) -> Search:
        """A search built with the same arguments, but with another population and with its own draws.

        Args:
            popsize: Candidates per generation.
            run: Number of the restart, from 1; with the search's seed it gives the new seed.

        Raises:
            TypeError: If this kind of search does not know its arguments.
        """
        raise TypeError(f"restarts: {type(self).__name__} has no renew(popsize, run), which builds it anew")

    def centre(self) -> Tensor:
        """The point (d,) that the distribution stands for where values are noisy: by default the best one."""
        return self.best.x

    def settles_above(self, target: float) -> bool:
        """True if the run is known to end at a value above the target.

        Args:
            target: The value that is wanted.
        """
        return False

    def _list_asked(self) -> Tensor | None:
        """What `ask` gave last (popsize, d), for searches to which the order of candidates counts."""
        return None

    @abstractmethod
    def _move(self, points: Tensor, values: Tensor) -> None:
        """Update the distribution by points (popsize, d) and values (popsize,), which are already checked."""

    def _dim(self) -> int:
        """The number of variables d."""
        return len(self.best.x)

    def _check_candidates(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points = as_tensor(X, "X").to(self.best.x.device)
        values = as_values(F, "F").to(points.device)
        shape = self.popsize, self._dim()
        if points.shape != shape:
            raise ValueError(f"X has shape {tuple(points.shape)}, expected {shape}: all points of one ask() at once")
        if values.shape != shape[:1]:
            raise ValueError(f"F has shape {tuple(values.shape)}, expected {shape[:1]}: a value per row of X")
        if not all_finite(points):
            raise ValueError("X has entries that are not finite, expected the points that ask() gave")
        return points, torch.where(values.isnan(), torch.inf, values)

    def _remember(self, points: Tensor, values: Tensor) -> None:
        i = int(values.argmin())
        if float(values[i]) < self.best.fun:
            self.best = Best(points[i].clone(), float(values[i]), self.nfev - len(values) + i + 1)


def order_as_asked(points: Tensor, values: Tensor, asked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Candidates and values in the order in which they were asked for; as they are where some are others."""
    if asked is None:
        return points, values
    numbers = (torch.cat([asked, points]) + 0.0).unique(dim=0, return_inverse=True)[1]  # -0 + 0 is 0
    before, after = numbers[: len(asked)].sort(stable=True), numbers[len(asked) :].sort(stable=True)
    if not torch.equal(before.values, after.values):
        return points, values
    places = torch.empty_like(after.indices).scatter_(0, before.indices, after.indices)
    return points[places], values[places]


def spell_arguments(**arguments: Any) -> dict[str, str]:
    """Arguments as words, which are equal where the values are: of tensors by their numbers, of choices by theirs."""
    return {name: spell_value(value) for name, value in arguments.items()}


def spell_value(value: Any) -> str:
    """A value in words."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(spell_value, cast('list[Any]', value)))})"
    known = value is None or isinstance(value, (str, bool)) or is_real(value) or is_dataclass(value)
    return str(value) if known else type(value).__name__  # other objects print their address


def check_arguments(owner: str, saved: Mapping[str, str], present: Mapping[str, str], hint: str) -> None:
    """ValueError that names the arguments which differ from those of a state."""
    names = [name for name in {**present, **saved} if saved.get(name) != present.get(name)]
    if names:
        there, here = (shorten(words.get(names[0], "no argument"), 80) for words in (saved, present))
        raise ValueError(
            f"{owner} differs in {', '.join(f'{name}=' for name in names)}: {names[0]} is {there} there and {here} "
            f"here; {hint}"
        )


def as_values(values: Any, name: str) -> Tensor:
    """Objective values as a float64 tensor of its own memory, without a graph."""
    expected = "expected real numbers, lower is better, and NaN for an evaluation that failed"
    try:
        if isinstance(values, (list, tuple)):
            values = [v if isinstance(v, (str, bytes)) else float(v) for v in values]  # torch refuses strings
            values = torch.tensor(values, dtype=torch.float64)
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} is {type(values).__name__}, {expected}: {error}") from error
    if numbers.is_complex():
        raise ValueError(f"{name} is complex, {expected}")
    return numbers.detach().to(torch.float64, copy=True)


def as_popsize(popsize: int | None, default: int) -> int:
    """A population size."""
    if popsize is None:
        return default
    return check_integer("popsize", popsize, 2, hint=f": a generation is ranked; None stands for {default}")


def derive_seed(generator: torch.Generator, run: int) -> int:
    """The seed of a restart: the same for the same first seed, and far from those of other runs."""
    return (generator.initial_seed() + run * 0x9E3779B97F4A7C15) % 2**62


def build_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """A generator that belongs to one search."""
    hint = ": or None, for one that differs every time"
    start = int(torch.randint(2**62, ())) if seed is None else check_integer("seed", seed, -(2**63), hint=hint)
    return torch.Generator(device=device).manual_seed(start)
