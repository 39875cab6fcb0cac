"""The second kind of experiment: named pieces of work that give plain numbers, and a story told from these.

A piece is finished or not begun: its numbers lie in one file, written whole. A study that is stopped goes on with the
first unfinished piece when the same command is given again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from natgrad_lab.experiments.base import LabError, slug
from natgrad_lab.experiments.race import Interrupted, check_device, threads
from natgrad_lab.experiments.records import Folder, dump, replace, versions
from natgrad_lab.experiments.sections import Story
from natgrad_lab.experiments.workers import WorkerTask, beside

Numbers = dict[str, Any]  # what JSON has: numbers, texts, lists and dicts of them


def ignore_progress(fraction: float) -> None:
    """Progress that nobody watches."""


def ignore_state(state: StudyState) -> None:
    """A study that nobody watches."""


def never_stop() -> bool:
    """A study that nobody stops."""
    return False


@dataclass(frozen=True)
class StudyRun:
    """What a piece of work is given.

    Args:
        settings: The study's.
        seed: 0 for a piece that is not repeated.
        earlier: The numbers of the pieces before it, by name; of repeated ones those from the same seed, or from the
            first seed where this piece is not repeated.
        advance: To be called between steps with the part that is done, 0 to 1; it raises Interrupted when the study was
            asked to stop.
    """

    settings: Any
    seed: int = 0
    earlier: Mapping[str, Numbers] = field(default_factory=dict)
    advance: Callable[[float], None] = ignore_progress


@dataclass(frozen=True)
class Piece:
    """A named piece of work.

    Args:
        name: Of its file of numbers.
        title: Of its line in the terminal.
        work: From a `StudyRun` to plain numbers; those that are not finite become null on disk.
        repeated: Whether it is done once from every seed, or once in all.
        independent: Whether it needs no other piece's numbers and no clock, and so may be done beside others where the
            settings have `processes` > 1.
    """

    name: str
    title: str
    work: Callable[[StudyRun], Numbers]
    repeated: bool = True
    independent: bool = False


@dataclass(frozen=True)
class Study:
    """An experiment made of pieces, done one after the other.

    Args:
        name: As `natgrad run` knows it.
        summary: One sentence for `natgrad list`.
        settings: A frozen dataclass with the fields threads and device, and what else the pieces read.
        pieces: From the settings to the pieces, in order.
        tell: From what is finished, which may be a part, to the story of the page.
        seeds: How many, where the command does not say.
    """

    name: str
    summary: str
    settings: type
    pieces: Callable[[Any], tuple[Piece, ...]]
    tell: Callable[[Findings], Story]
    seeds: int = 3


@dataclass(frozen=True)
class FinishedPiece:
    """A finished piece as read back: where its numbers come from, and the numbers."""

    header: Numbers
    numbers: Numbers


@dataclass(frozen=True)
class Findings:
    """The finished pieces of a study.

    Args:
        settings: The study's.
        found: The pieces, as read back.
    """

    settings: Any
    found: tuple[FinishedPiece, ...]

    def of(self, piece: str) -> list[Numbers]:
        """The numbers of a piece, in the order of the seeds; empty while it is not finished from any.

        Args:
            piece: Its name.
        """
        mine = [one for one in self.found if one.header["piece"] == piece]
        return [one.numbers for one in sorted(mine, key=lambda one: one.header["seed"])]

    def by_seed(self, *pieces: str) -> list[tuple[Numbers, ...]]:
        """For every seed from which all of the pieces are finished, their numbers.

        Args:
            *pieces: Their names.
        """
        of = {(one.header["piece"], one.header["seed"]): one.numbers for one in self.found}
        seeds = sorted({seed for _, seed in of})
        return [tuple(of[p, s] for p in pieces) for s in seeds if all((p, s) in of for p in pieces)]


@dataclass(frozen=True)
class StudyState:
    """How far a study is."""

    piece: Piece  # the one under way
    seed: int  # its seed
    fraction: float  # the part of it that is done, 1.0 once when it ends
    done: int  # pieces that are done
    total: int  # pieces in all
    # how long the piece took, where it ended just now; None for one that a record already held
    seconds: float | None = None


Watch = Callable[[StudyState], None]


def execute(
    study: Study,
    settings: Any,
    seeds: Sequence[int],
    path: Path,
    watcher: Watch | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Folder:
    """Do what is not yet finished in the folder. Interrupted when `stopped()` turns true within or between pieces."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise LabError(f"seeds are {list(seeds)}, expected different numbers, none below 0")
    check_device(settings.device)
    pieces = study.pieces(settings)
    folder = Folder(path)
    folder.settle(plan(study, pieces, settings))
    todo = [(piece, seed) for piece in pieces for seed in (seeds if piece.repeated else (0,))]
    worker = Worker(study, settings, folder, pieces, seeds[0], watcher or (lambda state: None), stopped, len(todo))
    with threads(settings.threads):
        worker.carry_out_beside(todo, getattr(settings, "processes", 1))
        for piece, seed in todo:
            worker.carry_out(piece, seed)
    return folder


def plan(study: Study, pieces: Iterable[Piece], settings: Any) -> Numbers:
    """What is going to be done, as plain values: kept beside the records and compared on resuming."""
    return {
        "kind": "study",
        "experiment": study.name,
        "settings": dict(vars(settings)),
        "pieces": [{"name": p.name, "title": p.title, "repeated": p.repeated} for p in pieces],
    }


@dataclass
class Worker:
    """Carries out the pieces of one study in one folder."""

    study: Study
    settings: Any
    folder: Folder
    pieces: tuple[Piece, ...]
    first: int  # seed, whose numbers pieces that are not repeated see
    watch: Watch
    stopped: Callable[[], bool]
    total: int
    done: int = 0

    def carry_out(self, piece: Piece, seed: int) -> None:
        """Do a piece unless its file is there."""
        place = self.folder.records / file(piece, seed)
        seconds = None if place.exists() else self._work(piece, seed, place)
        self.done += 1
        self.watch(StudyState(piece, seed, 1.0, self.done, self.total, seconds))

    def carry_out_beside(self, todo: Sequence[tuple[Piece, int]], processes: int) -> None:
        """Do the independent pieces that are not there yet, several at a time; what fails is left for later."""
        pieces = [(p, s) for p, s in todo if p.independent and not (self.folder.records / file(p, s)).exists()]
        if processes < 2 or len(pieces) < 2:
            return
        tasks = {file(p, s): (p, s) for p, s in pieces}

        def watch(name: str, fraction: float) -> None:
            piece, seed = tasks[name]
            self.watch(StudyState(piece, seed, min(fraction, 0.999), self.done, self.total))

        sent = dataclasses.replace(self, watch=ignore_state, stopped=never_stop)  # what is told and asked stays here
        beside(
            [WorkerTask(name, partial(sent._alone, *one)) for name, one in tasks.items()],
            processes,
            watch,
            self.stopped,
        )
        if self.stopped():
            raise Interrupted

    def _alone(self, piece: Piece, seed: int, tell: Callable[[float], None]) -> None:
        start = time.perf_counter()
        with threads(self.settings.threads):  # a fresh process has torch's own number
            numbers = piece.work(StudyRun(self.settings, seed, {}, tell))
            header = self._header(piece, seed, time.perf_counter() - start)
        replace(self.folder.records / file(piece, seed), self._text(piece, header, numbers))

    def _work(self, piece: Piece, seed: int, place: Path) -> float:
        def advance(fraction: float) -> None:
            if self.stopped():
                raise Interrupted
            self.watch(StudyState(piece, seed, min(fraction, 0.999), self.done, self.total))

        advance(0.0)
        start = time.perf_counter()
        numbers = piece.work(StudyRun(self.settings, seed, self._earlier(piece, seed), advance))
        seconds = time.perf_counter() - start
        replace(place, self._text(piece, self._header(piece, seed, seconds), numbers))
        return seconds

    def _earlier(self, piece: Piece, seed: int) -> dict[str, Numbers]:
        before = self.pieces[: self.pieces.index(piece)]
        shared = seed if piece.repeated else self.first
        places = {p.name: self.folder.records / file(p, shared if p.repeated else 0) for p in before}
        return {name: read(place).numbers for name, place in places.items() if place.exists()}

    def _header(self, piece: Piece, seed: int, seconds: float) -> Numbers:
        return {
            "experiment": self.study.name,
            "piece": piece.name,
            "seed": seed,
            "repeated": piece.repeated,
            "seconds": seconds,
            "settings": dict(vars(self.settings)),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "device": self.settings.device,
        }

    def _text(self, piece: Piece, header: Numbers, numbers: Numbers) -> str:
        try:
            return f'{{"header": {dump(header)},\n"numbers": {dump(numbers)}}}\n'
        except TypeError as error:
            raise LabError(f"{piece.name} returned more than plain numbers ({error}): use .tolist()") from error


def file(piece: Piece, seed: int) -> str:
    """The name of a piece's record."""
    return f"{slug(piece.name)}.seed-{seed}.json" if piece.repeated else f"{slug(piece.name)}.json"


def read(place: Path) -> FinishedPiece:
    """A finished piece from its file. LabError when the file is damaged."""
    try:
        whole = json.loads(place.read_text())
        return FinishedPiece(whole["header"], whole["numbers"])
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{place} is damaged ({error!r}): delete it and run the experiment again") from error


def findings(study: Study, folder: Folder) -> Findings:
    """All that is finished in a folder. LabError when its settings are not of this version, or nothing is finished."""
    given = folder.plan()["settings"]
    try:
        settings = study.settings(**given)
    except TypeError as error:
        raise LabError(f"{folder.path} is of another version of {study.name} ({error}): run it anew") from error
    found = tuple(read(place) for place in sorted(folder.records.glob("*.json")))
    if not found:
        raise LabError(f"{folder.path} has no finished piece: run the same command again")
    return Findings(settings, found)
