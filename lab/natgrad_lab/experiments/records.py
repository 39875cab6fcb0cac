"""What an experiment leaves in its folder: its plan, and a record of every finished piece, plain numbers as JSON.

    experiment.json                          the plan: name, settings, pieces
    records/walk.seed-0.json                 {"header": {"piece": ..., "seed": ..., "versions": ...}, "numbers": {...}}

A number that is not finite is written as null, which is what JSON has for it.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from natgrad_lab.experiments.base import LabError

Numbers = dict[str, Any]  # what JSON has: numbers, texts, lists and dicts of them


@dataclass(frozen=True)
class FinishedPiece:
    """A finished piece as read back: where its numbers come from, and the numbers."""

    header: Numbers
    numbers: Numbers


class Folder:
    """Where an experiment keeps its plan (`experiment.json`), its records (`records/`) and its report."""

    def __init__(self, path: Path) -> None:
        self.path, self.records, self.plan_path = path, path / "records", path / "experiment.json"

    def plan(self) -> Numbers:
        """The plan these records were made under. LabError when there is none or it cannot be read."""
        try:
            plan = json.loads(self.plan_path.read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LabError(f"{self.path} holds no experiment.json: give the folder that `natgrad run` wrote") from error
        except ValueError as error:  # no JSON, or no text
            raise LabError(f"{self.plan_path} is damaged ({error}): run the experiment into another folder") from error
        if not isinstance(plan, dict) or not isinstance(plan.get("experiment"), str):
            raise LabError(f"{self.plan_path} names no experiment: run the experiment into another folder")
        return plan

    def settle(self, plan: Numbers) -> None:
        """Write the plan, or check that the folder holds the same: pieces done under two plans are not compared."""
        plan = json.loads(dump(plan))
        self.records.mkdir(parents=True, exist_ok=True)
        if not self.plan_path.exists() or not any(self.records.iterdir()):  # a plan under which nothing was done
            replace(self.plan_path, json.dumps(plan, indent=2) + "\n")
        elif (before := self.plan()) != plan:
            raise LabError(
                f"{self.path} holds runs made under {describe_difference(before, plan)}: choose another folder with "
                "--out, or delete this one"
            )

    def read_all(self) -> list[FinishedPiece]:
        """Every finished piece, in the order of the files' names."""
        return [read(place) for place in sorted(self.records.glob("*.json"))]


def read(place: Path) -> FinishedPiece:
    """A finished piece from its file. LabError when the file is damaged."""
    try:
        content = json.loads(place.read_text())
        return FinishedPiece(content["header"], content["numbers"])
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{place} is damaged ({error!r}): delete it and run the experiment again") from error


def write(place: Path, header: Numbers, numbers: Numbers) -> None:
    """The record of a finished piece. LabError for more than plain numbers."""
    try:
        replace(place, f'{{"header": {dump(header)},\n"numbers": {dump(numbers)}}}\n')
    except TypeError as error:
        raise LabError(f"{header['piece']} returned more than plain numbers ({error}): use .tolist()") from error


def versions() -> dict[str, str]:
    """What the numbers depend on besides the settings: nothing here names a machine or a person."""
    try:
        ours = metadata.version("natgrad")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {"natgrad": ours, "torch": torch.__version__, "python": platform.python_version()}


def dump(row: Numbers) -> str:
    """One line of JSON; numbers that are not finite become null."""
    return json.dumps(_finite(row), separators=(", ", ": "), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def describe_difference(before: Numbers, asked: Numbers) -> str:
    """In words, the first thing in which two plans differ."""
    old, new = before.get("settings", {}), asked.get("settings", {})
    for key in old | new:
        if old.get(key) != new.get(key):
            return f"{key}={old.get(key)}, not {key}={new.get(key)}"
    return "another plan (pieces, tasks, contestants or grids differ)"


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + "-new")
    scratch.write_text(text)
    scratch.replace(path)
