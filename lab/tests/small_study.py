"""A study of milliseconds for the laboratory's tests: one piece for all, two from every seed; and how others are done.

`finish` does any study in memory.
"""

import math
from dataclasses import dataclass

from natgrad_lab.experiments import Experiment, LabError, Picture, Piece, PieceRun, Section, Story, Table
from natgrad_lab.experiments.frame import FinishedPiece


@dataclass(frozen=True)
class Settings:
    steps: int = 4
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self):
        if self.steps < 1:
            raise LabError(f"steps is {self.steps}, expected a positive number")


def finish(study, settings):
    """All pieces of a study, from seed 0 and without a folder; numbers of curves are finite."""
    pieces = [FinishedPiece({"piece": p.name, "seed": 0}, p.work(PieceRun(settings))) for p in study.pieces(settings)]
    assert all(math.isfinite(x) for p in pieces for row in p.numbers.get("curve", ()) for x in row if x is not None)
    return tuple(pieces)


def target(run):
    run.advance(0.5)
    return {"value": 10.0 * run.settings.steps}


def walk(run):
    path = [float(run.seed)]
    for step in range(run.settings.steps):
        run.advance(step / run.settings.steps)
        path.append(path[-1] + 1)
    return {"path": path}


def distance(run):
    return {"value": run.earlier["target"]["value"] - run.earlier["walk"]["path"][-1], "limit": float("inf")}


def draw(paths):
    def fill(figure):
        axes = figure.add_subplot()
        for path in paths:
            axes.plot(path)
        axes.set(xlabel="steps", ylabel="place")

    return fill


def tell(findings):
    paths = [numbers["path"] for numbers in findings.of("walk")]
    rows = tuple((f"seed {n}", f"{path[-1]:g}") for n, path in enumerate(paths))
    verdict = f"{len(findings.by_seed('walk', 'distance'))} distances known"
    section = Section("Walks", verdict, (Table("Ends", ("", "end"), rows),), (Picture("walks", "A < B", draw(paths)),))
    return Story("A walk", f"{len(paths)} walks", "One step after the other.", (section,))


def pieces(settings):
    return (
        Piece("target", "Where to go", target, repeated=False),
        Piece("walk", "Walking", walk),
        Piece("distance", "How far it is still", distance),
    )


STUDY = Experiment("walks", "Walks along a line", Settings, pieces, tell, seeds=2)
