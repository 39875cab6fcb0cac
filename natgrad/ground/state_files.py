"""Files of checkpoints: written whole or not at all, and read only where they are whole and of a known format."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

try:
    import fcntl
except ImportError:  # Windows, where no file can be removed that is open somewhere
    fcntl = None

FORMAT = 3
"""Of all that natgrad saves. It grows when older versions could no longer read what newer ones write."""


def write_state_file(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state: beside its place first, to the disk, and then into it, so that a crash leaves the file before.

    Of several writers, threads or processes, the last one's file stays. What a killed one left is removed.
    """
    path = Path(path)
    remove_parts(path)
    partial, file = open_part(path)
    try:
        with file:
            try:
                torch.save(dict(state), file)
                file.flush()
            except RuntimeError as error:  # torch's own writer meets a full disk so
                raise OSError(f"{path} could not be written: {error}") from error
            os.fsync(file.fileno())
            if fcntl is not None:  # while it is locked; Windows moves no open file
                partial.replace(path)
        if fcntl is None:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def open_part(path: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside another, locked for as long as it is open: a name for each writer, threads included."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    while True:
        partial = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex}.part")
        file = partial.open("xb")
        if take_lock(file) is not False and partial.exists():  # nobody took it for a killed writer's in between
            return partial, file
        file.close()
        partial.unlink(missing_ok=True)


def remove_parts(path: Path) -> None:
    """Remove what killed writers left beside a file: the parts that nobody holds a lock on."""
    pattern = re.compile(re.escape(path.name) + r"\.\d+(-[0-9a-f]{32})?\.part")
    try:
        parts = [part for part in path.parent.iterdir() if pattern.fullmatch(part.name)]
    except OSError:  # no such folder, or one that cannot be listed
        return
    for part in parts:
        with suppress(OSError):  # another user's, or gone by now
            if fcntl is None:
                part.unlink()
                continue
            with part.open("rb") as file:
                if take_lock(file):
                    part.unlink(missing_ok=True)


def take_lock(file: IO[bytes]) -> bool | None:
    """Lock an open file until it is closed or its process ends; False if somebody has it locked, None without locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without
        return None
    return True


def read_state_file(path: str | Path, device: Any = None) -> dict[str, Any]:
    """A state from a file of plain values and tensors."""
    try:
        state: Any = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is no whole checkpoint: it was cut off or damaged on its way, or something else wrote it "
            f"({type(error).__name__}). Nothing was changed; load an older one"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, expected a checkpoint. Nothing was changed")
    checkpoint = cast("dict[str, Any]", state)
    check_format(checkpoint)
    return checkpoint


def check_format(state: Mapping[str, Any]) -> None:
    """ValueError for a state that a newer version wrote in a format of its own. Those without a number are older."""
    came = state.get("format", 0)
    if not isinstance(came, int) or came > FORMAT:
        raise ValueError(
            f"the state is of format {came}, this version of natgrad reads up to {FORMAT}: install the version that "
            "wrote it, or a newer one. Nothing was changed"
        )
