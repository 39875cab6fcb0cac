"""The laboratory: one file per experiment, found here by name.

`RACES` maps a name to the module that holds it, as `RACE`; modules are imported when they are asked for.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from natgrad.experiments.frame import Budget, Choice, Contestant, Examples, Job, LabError, Race, Task
from natgrad.experiments.race import Interrupted, Silence, Watcher, execute, interruptible
from natgrad.experiments.settings import override
from natgrad.experiments.training import Training

__all__ = [
    "RACES",
    "Budget",
    "Choice",
    "Contestant",
    "Examples",
    "Interrupted",
    "Job",
    "LabError",
    "Race",
    "Silence",
    "Task",
    "Training",
    "Watcher",
    "execute",
    "find",
    "interruptible",
    "override",
    "run",
]

RACES = {
    "digits": "natgrad.experiments.digits",
    "fashion": "natgrad.experiments.fashion",
    "pascanu_2013_faces": "natgrad.experiments.pascanu_2013_faces",
    "pascanu_2013_mnist": "natgrad.experiments.pascanu_2013_mnist",
    "pascanu_2013_restricted_mnist": "natgrad.experiments.pascanu_2013_restricted_mnist",
}


def find(name: str) -> Race:
    """The experiment of that name. LabError for an unknown one, with the nearest known name."""
    if name not in RACES:
        near = get_close_matches(name, RACES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "see `natgrad list`"
        raise LabError(f"there is no experiment {name!r}: {hint}")
    return import_module(RACES[name]).RACE


def run(race: Race, settings: Any, seed: int, task: str, contestant: str, index: int = 0) -> list[dict[str, Any]]:
    """One run in memory: its rows, plain numbers per step. index: which choice of the contestant's grid."""
    job = _job(race.tasks(settings), seed, task, contestant, index)
    examples = job.task.data().to(settings.device)
    return list(Training(job, race.budget(settings, job.task), examples, settings.device))


def _job(tasks: tuple[Task, ...], seed: int, task: str, contestant: str, index: int) -> Job:
    for one in tasks:
        for other in one.contestants:
            if one.name == task and other.name == contestant:
                return Job(one, other, index, seed, "race")
    known = ", ".join(f"{t.name}: {', '.join(c.name for c in t.contestants)}" for t in tasks)
    raise LabError(f"no {contestant!r} on {task!r}, expected one of {known}")
