"""A run on disk: JSON lines, first what was run, then one row per step, last how it ended.

    {"run": "autoencoder.adam.seed-0", "choice": {...}, "seed": 0, "settings": {...}, "versions": {...}, ...}
    {"step": 0, "seconds": 0.0, "train_loss": 2.31, ...}
    {"step": 1, "seconds": 0.0009, "loss": 2.30}
    {"end": "seconds", "steps": 1734, "seconds": 2.0}

While a run is under way its file ends in `.part`; put down half way, it leaves a `.checkpoint` beside it. A number
that is not finite is written as null, which is what JSON has for it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from natgrad_lab.experiments.base import LabError

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A finished run as read back: header, rows of steps, end."""

    header: Row
    rows: tuple[Row, ...]
    end: Row


class Folder:
    """Where an experiment keeps its plan (`experiment.json`), its runs (`records/`) and its report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records"

    @property
    def plan_path(self) -> Path:
        """The file of the plan."""
        return self.path / "experiment.json"

    def plan(self) -> Row:
        """The plan these records were made under. LabError when there is none or it cannot be read."""
        try:
            return json.loads(self.plan_path.read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LabError(f"{self.path} holds no experiment.json: give the folder that `natgrad run` wrote") from error
        except json.JSONDecodeError as error:
            raise LabError(f"{self.plan_path} is damaged ({error}): run the experiment into another folder") from error

    def settle(self, plan: Row) -> None:
        """Write the plan, or check that the folder holds the same: runs made under two plans are not compared."""
        plan = json.loads(dump(plan))
        if not self.plan_path.exists():
            self.records.mkdir(parents=True, exist_ok=True)
            replace(self.plan_path, json.dumps(plan, indent=2) + "\n")
            return
        kept = self.plan()
        if kept != plan:
            raise LabError(
                f"{self.path} holds runs made under {difference(kept, plan)}: choose another folder with --out, "
                "or delete this one"
            )

    def paths(self, name: str) -> tuple[Path, Path, Path]:
        """(finished, under way, checkpoint) of a run."""
        return tuple(self.records / f"{name}.{ending}" for ending in ("jsonl", "part", "checkpoint"))  # type: ignore[return-value]

    def has_finished(self, name: str) -> bool:
        """True if the run of that name is on disk whole."""
        return self.paths(name)[0].exists()

    def read(self, name: str) -> Record:
        """The finished run of that name."""
        return read(self.paths(name)[0])

    def read_all(self) -> list[Record]:
        """Every finished run, in the order of their names."""
        return [read(path) for path in sorted(self.records.glob("*.jsonl"))]


class Writer:
    """Appends rows to a run's `.part` file; `finish` gives the file its final name."""

    def __init__(self, folder: Folder, name: str, header: Row, resume_at: int | None) -> None:
        self.final, self.part, self.checkpoint = folder.paths(name)
        self.file = self.part.open("ab" if resume_at is not None else "wb")
        if resume_at is not None:
            self.file.truncate(resume_at)
        else:
            self.rows([header])

    def rows(self, rows: Iterable[Row]) -> None:
        """Append rows to the file of the run."""
        for row in rows:
            self.file.write(dump(row).encode() + b"\n")

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint of the run, with the length of the file that belongs to it."""
        self.file.flush()
        scratch = self.checkpoint.with_suffix(".checkpoint-new")
        torch.save({"training": state, "length": self.file.tell()}, scratch)
        scratch.replace(self.checkpoint)

    def finish(self, end: Row) -> None:
        """Append the last row and give the file its final name; the checkpoint is no longer needed."""
        self.rows([end])
        self.close()
        self.part.replace(self.final)
        self.checkpoint.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, as it is."""
        self.file.close()


def restore(folder: Folder, name: str) -> dict[str, Any] | None:
    """The checkpoint of a run that was put down: {"training": state, "length": bytes}. None where there is none."""
    _, part, checkpoint = folder.paths(name)
    if not (checkpoint.exists() and part.exists()):
        return None
    state = torch.load(checkpoint, weights_only=True)
    return state if part.stat().st_size >= state["length"] else None


def read(path: Path) -> Record:
    """A finished run from its file. LabError when the file is damaged."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        header, *rows, end = lines
        if "run" not in header or "end" not in end:
            raise ValueError("no header or no end")
    except ValueError as error:
        raise LabError(f"{path} is damaged ({error}): delete it and run the experiment again") from error
    return Record(header, tuple(rows), end)


def versions() -> dict[str, str]:
    """What the numbers depend on besides the settings: nothing here names a machine or a person."""
    try:
        ours = metadata.version("natgrad")
    except metadata.PackageNotFoundError:
        ours = "not installed"
    return {"natgrad": ours, "torch": torch.__version__, "python": platform.python_version()}


def dump(row: Row) -> str:
    """One line of JSON; numbers that are not finite become null."""
    return json.dumps(_finite(row), separators=(", ", ": "), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def difference(kept: Row, asked: Row) -> str:
    """In words, the first thing in which two plans differ."""
    old, new = kept.get("settings", {}), asked.get("settings", {})
    for key in old | new:
        if old.get(key) != new.get(key):
            return f"{key}={old.get(key)}, not {key}={new.get(key)}"
    return "another plan (tasks, contestants or grids differ)"


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + "-new")
    scratch.write_text(text)
    scratch.replace(path)
