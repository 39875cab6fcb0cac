"""Files of checkpoints: written whole or not at all, and read only where they are whole and of a known format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

FORMAT = 2
"""Of all that natgrad saves. It grows when older versions could no longer read what newer ones write."""


def write_state_file(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state: beside its place first, to the disk, and then into it, so that a crash leaves the file before.

    Args:
        state: Plain values and tensors.
        path: Of the file.

    Raises:
        OSError: If it could not be written; the file at `path` is as before.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            try:
                torch.save(dict(state), file)
                file.flush()
            except RuntimeError as error:  # torch's own writer meets a full disk so
                raise OSError(f"{path} could not be written: {error}") from error
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_state_file(path: str | Path, device: Any = None) -> dict[str, Any]:
    """A state from a file of plain values and tensors.

    Args:
        path: Of the file.
        device: Where its tensors go; None: where they were.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it was cut off or damaged, holds something else, or is of a newer format.
    """
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
