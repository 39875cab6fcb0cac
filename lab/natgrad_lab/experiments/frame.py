"""The frame under every experiment: named pieces of work that give plain numbers, and a page told from these.

A piece is finished or not begun: its numbers lie in one file, written whole. What is stopped goes on with the first
unfinished piece when the same command is given again; a long piece may keep a checkpoint of its own on the way.
"""

from __future__ import annotations

import multiprocessing
import os
import reprlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import torch

from natgrad_lab.experiments.base import LabError, slug
from natgrad_lab.experiments.records import FinishedPiece, Folder, Numbers, read, versions, write
from natgrad_lab.experiments.sections import Story


class Interrupted(Exception):
    """The experiment was asked to stop; what is finished is kept, and the same command goes on from here."""


class Advance(Protocol):
    """advance(fraction, note): how far a piece is, 0 to 1, and a few words; raises Interrupted when asked to stop."""

    def __call__(self, fraction: float, note: str = "") -> None:
        """Tell it."""


@dataclass(frozen=True)
class PieceRun:
    """What a piece of work is given.

    Args:
        settings: The experiment's.
        seed: 0 for a piece that is not repeated.
        earlier: The numbers of the pieces before it, by name; of repeated ones those from the same seed, or from the
            first seed where this piece is not repeated.
        advance: To be called between steps with the part that is done, 0 to 1, and perhaps a few words; it raises
            Interrupted when the experiment was asked to stop.
        checkpoint: A file in which the piece may keep its state when it is stopped; it is deleted once the piece is
            finished. None where nothing is kept.
    """

    settings: Any
    seed: int = 0
    earlier: Mapping[str, Numbers] = field(default_factory=dict)
    advance: Advance = field(default_factory=lambda: lambda fraction, note="": None)
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Piece:
    """A named piece of work.

    Args:
        name: Of its file of numbers.
        title: Of its line in the terminal.
        work: From a `PieceRun` to plain numbers; those that are not finite become null on disk.
        repeated: Whether it is done once from every seed, or once in all.
        independent: Whether it needs no other piece's numbers and no clock, and so may be done beside others where the
            settings have `processes` > 1.
    """

    name: str
    title: str
    work: Callable[[PieceRun], Numbers]
    repeated: bool = True
    independent: bool = False

    def file(self, seed: int) -> str:
        """The name of its record.

        Args:
            seed: From which it was done.
        """
        return f"{slug(self.name)}.seed-{seed}.json" if self.repeated else f"{slug(self.name)}.json"


@dataclass(frozen=True)
class Experiment:
    """What can be run by its name, and told from its records.

    Args:
        name: As `natgrad run` knows it.
        summary: One sentence for `natgrad list`.
        settings: A frozen dataclass with the fields threads and device, and what else the pieces read.
        pieces: From the settings to the pieces, in order.
        tell: From what is finished, which may be a part, to the story of the page.
        seeds: How many, where the command does not say.
        minutes: About what it takes with its defaults on one core of a server of 2025; None where it was not measured.
        quick: Settings of `--size quick`, about a minute of one core; "seeds" is their number.
        paper: Settings of `--size paper`, the paper's own size where a CPU stands it.
        tasks: Of a race, the settings -> what is raced on.
    """

    name: str
    summary: str
    settings: type
    pieces: Callable[[Any], tuple[Piece, ...]]
    tell: Callable[[Findings], Story]
    seeds: int = 3
    minutes: float | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Any] = field(default_factory=dict)
    tasks: Callable[[Any], Any] | None = None

    def size(self, name: str | None) -> Mapping[str, Any]:
        """The settings of a size, "seeds" among them; none for the defaults.

        Args:
            name: "quick", "paper" or None.

        Raises:
            LabError: For another word.
        """
        sizes: dict[str | None, Mapping[str, Any]] = {None: {}, "quick": self.quick, "paper": self.paper}
        if name not in sizes:
            raise LabError(f"--size is {name!r}, expected quick or paper")
        return sizes[name]


@dataclass(frozen=True)
class Findings:
    """The finished pieces of an experiment.

    Args:
        settings: The experiment's.
        finished: The pieces, as read back.
    """

    settings: Any
    finished: tuple[FinishedPiece, ...]

    def of(self, piece: str) -> list[Numbers]:
        """The numbers of a piece, in the order of the seeds; empty while it is not finished from any.

        Args:
            piece: Its name.
        """
        mine = [done for done in self.finished if done.header["piece"] == piece]
        return [done.numbers for done in sorted(mine, key=lambda done: done.header["seed"])]

    def collect(self, names: Iterable[str], form: str = "{}") -> dict[str, list[Numbers]]:
        """Name -> the numbers of its piece from all seeds, of those that are finished from any.

        Args:
            names: In order.
            form: Makes the piece's name of it, such as "race-{}".
        """
        return {name: numbers for name in names if (numbers := self.of(form.format(name)))}

    def by_seed(self, *pieces: str) -> list[tuple[Numbers, ...]]:
        """For every seed from which all of the pieces are finished, their numbers.

        Args:
            *pieces: Their names.
        """
        of = {(done.header["piece"], done.header["seed"]): done.numbers for done in self.finished}
        seeds = sorted({seed for _, seed in of})
        return [tuple(of[p, s] for p in pieces) for s in seeds if all((p, s) in of for p in pieces)]


@dataclass(frozen=True)
class ExperimentState:
    """How far an experiment is."""

    piece: Piece  # the one under way
    seed: int
    fraction: float  # of the piece, 1.0 once when it ends
    done: int  # pieces
    total: int
    seconds: float | None = None  # how long the piece took, where it ended just now; None where a record held it
    note: str = ""


def execute(
    experiment: Experiment,
    settings: Any,
    seeds: Sequence[int],
    path: Path,
    watcher: Callable[[ExperimentState], None] = lambda state: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Folder:
    """Do what is not yet finished of an experiment.

    Args:
        experiment: As `find` gives it.
        settings: Its settings.
        seeds: Of the pieces that are repeated.
        path: The folder of the records.
        watcher: What is told of the progress.
        stopped: Whether to stop; what is finished is kept.

    Returns:
        The folder.

    Raises:
        Interrupted: Once `stopped()` is true.
        LabError: For seeds, settings or a folder that will not do.
    """
    tuning = getattr(settings, "tuning_seed", None)
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or tuning in seeds:
        raise LabError(
            f"seeds are {reprlib.repr(list(seeds))}, expected different numbers, none below 0"
            + ("" if tuning is None else f", none of them the tuning seed {tuning}: --set tuning_seed is another")
        )
    if settings.threads is not None and settings.threads < 1:
        raise LabError(f"threads is {settings.threads}, expected a number of at least 1, or none for torch's own")
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise LabError(
            f"device is {settings.device!r}, which torch cannot use here: expected cpu, or cuda on a machine with one"
        ) from error
    pieces = experiment.pieces(settings)
    folder = Folder(path)
    folder.settle(plan(experiment, pieces, settings))
    # every piece with its seeds; of repeated ones that follow one another, all from one seed before the next
    todo: list[tuple[Piece, int]] = []
    for repeated, group in groupby(pieces, lambda piece: piece.repeated):
        row = list(group)
        todo += [(piece, seed) for seed in (seeds if repeated else (0,)) for piece in row]
    worker = Worker(experiment, settings, folder, pieces, seeds[0], watcher, stopped, len(todo))
    with threads(settings.threads):
        worker.carry_out_beside(todo, getattr(settings, "processes", 1))
        for piece, seed in todo:
            worker.carry_out(piece, seed)
    return folder


def plan(experiment: Experiment, pieces: Iterable[Piece], settings: Any) -> Numbers:
    """What is going to be done, as plain values: kept beside the records and compared on resuming."""
    return {
        "kind": "study",
        "experiment": experiment.name,
        "settings": dict(vars(settings)),
        "pieces": [{"name": p.name, "title": p.title, "repeated": p.repeated} for p in pieces],
    }


@dataclass(frozen=True)
class Earlier(Mapping[str, Numbers]):
    """The numbers of finished pieces, read from their files when they are asked for."""

    places: Mapping[str, Path]

    def __getitem__(self, name: str) -> Numbers:
        return read(self.places[name]).numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@dataclass
class Worker:
    """Carries out the pieces of one experiment in one folder."""

    experiment: Experiment
    settings: Any
    folder: Folder
    pieces: tuple[Piece, ...]
    first: int  # seed, whose numbers pieces that are not repeated see
    watch: Callable[[ExperimentState], None]
    stopped: Callable[[], bool]
    total: int
    done: int = 0

    def carry_out(self, piece: Piece, seed: int) -> Numbers:
        """The numbers of a piece: read where its file is there, else worked out."""
        place, seconds, note = self.folder.records / piece.file(seed), None, ""
        if not place.exists():
            seconds, note = self._work(piece, seed, place)
        self.done += 1
        self.watch(ExperimentState(piece, seed, 1.0, self.done, self.total, seconds, note))
        return read(place).numbers

    def carry_out_beside(self, todo: Sequence[tuple[Piece, int]], processes: int) -> None:
        """Do the independent pieces that are not there yet, several at a time; what fails is left for later."""
        pieces = [(p, s) for p, s in todo if p.independent and not (self.folder.records / p.file(s)).exists()]
        if processes < 2 or len(pieces) < 2:
            return
        tasks = {p.file(s): (p, s) for p, s in pieces}

        def watch(name: str, fraction: float) -> None:
            piece, seed = tasks[name]
            self.watch(ExperimentState(piece, seed, min(fraction, 0.999), self.done, self.total))

        sent = replace(self, watch=lambda state: None, stopped=lambda: False)  # what is told and asked stays here
        work = {name: partial(sent._alone, *task) for name, task in tasks.items()}
        beside(work, processes, watch, self.stopped)
        if self.stopped():
            raise Interrupted

    def _alone(self, piece: Piece, seed: int, tell: Callable[[float], None]) -> None:
        start = time.perf_counter()
        with threads(self.settings.threads):  # a fresh process has torch's own number
            numbers = piece.work(PieceRun(self.settings, seed, {}, lambda fraction, note="": tell(fraction)))
            header = self._header(piece, seed, time.perf_counter() - start)
        write(self.folder.records / piece.file(seed), header, numbers)

    def _work(self, piece: Piece, seed: int, place: Path) -> tuple[float, str]:
        latest = ""

        def advance(fraction: float, note: str = "") -> None:
            nonlocal latest
            latest = note
            if self.stopped():
                raise Interrupted
            self.watch(ExperimentState(piece, seed, min(fraction, 0.999), self.done, self.total, note=note))

        advance(0.0)
        before = takewhile(lambda other: other.name != piece.name, self.pieces)
        shared = seed if piece.repeated else self.first
        places = {p.name: self.folder.records / p.file(shared if p.repeated else 0) for p in before}
        earlier = Earlier({name: place for name, place in places.items() if place.exists()})
        start, checkpoint = time.perf_counter(), place.with_suffix(".checkpoint")
        numbers = piece.work(PieceRun(self.settings, seed, earlier, advance, checkpoint))
        seconds = time.perf_counter() - start
        write(place, self._header(piece, seed, seconds), numbers)
        checkpoint.unlink(missing_ok=True)
        return seconds, latest

    def _header(self, piece: Piece, seed: int, seconds: float) -> Numbers:
        return {
            "experiment": self.experiment.name,
            "piece": piece.name,
            "seed": seed,
            "repeated": piece.repeated,
            "seconds": seconds,
            "settings": dict(vars(self.settings)),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "device": self.settings.device,
        }


def findings(experiment: Experiment, folder: Folder) -> Findings:
    """All that is finished in a folder. LabError when its settings are not of this version, or nothing is finished."""
    plan = folder.plan()
    if plan.get("kind", "race") != "study":
        raise LabError(f"{folder.path} is of another version of natgrad: run {experiment.name} anew")
    try:
        settings = experiment.settings(**plan["settings"])
    except TypeError as error:
        raise LabError(f"{folder.path} is of another version of {experiment.name} ({error}): run it anew") from error
    finished = tuple(folder.read_all())
    if not finished:
        raise LabError(f"{folder.path} has no finished piece: run the same command again")
    return Findings(settings, finished)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Let torch use so many threads meanwhile; None leaves its own choice."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that turns true on Ctrl-C or a termination signal; a second Ctrl-C stops at once.

    A step under way is finished first, so that its state can be saved whole.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Pieces done beside one another, each in a process of its own

POLL = 0.2  # seconds between two looks at the processes


WorkerTask = Callable[[Callable[[float], None]], None]  # does a piece; is given what says how far it is


def beside(
    tasks: Mapping[str, WorkerTask], processes: int, watch: Callable[[str, float], None], stopped: Callable[[], bool]
) -> None:
    """Do all tasks, `processes` at a time, until `stopped()` is true; as many as fail are left undone."""
    # no fork, which would also copy the program's threads' locks and its devices, which no child can use
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([__name__])
    fractions = context.Array("d", len(tasks))
    before = set(multiprocessing.active_children())
    begin = (fractions, str(Path.cwd()), dict(os.environ))
    pool = ProcessPoolExecutor(min(processes, len(tasks)), context, begin_worker, begin)
    finished = False
    try:
        # pieces are closures: cloudpickle sends them, pickle would not
        left: set[Future[None]] = {
            pool.submit(carry_out, place, cloudpickle.dumps(work)) for place, work in enumerate(tasks.values())
        }
        while left and not stopped():
            _, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            for name, fraction in zip(tasks, fractions[:], strict=True):
                if 0 < fraction < 1:
                    watch(name, fraction)
        finished = not left
    finally:
        if not finished:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


PROGRESS: list[Any] = []  # in a worker: the fractions of all tasks


def begin_worker(fractions: Any, folder: str, environment: dict[str, str]) -> None:
    """What a process does first. The server has the folder and the environment of the moment when it was started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    PROGRESS[:] = [fractions]


def carry_out(place: int, work: bytes) -> None:
    """Do one task, in a worker."""

    def tell(value: float) -> None:
        PROGRESS[0][place] = value

    cloudpickle.loads(work)(tell)
    tell(1.0)
