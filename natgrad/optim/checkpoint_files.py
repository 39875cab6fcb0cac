"""A run's checkpoint in one file: model, optimizer, scheduler and what else has a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from natgrad.optim.parts_checkpoint import read_parts, write_parts
from natgrad.state_files import read_state_file, write_state_file


def save_checkpoint(path: str | Path, **parts: Any) -> None:
    """Write the state of every part to one file: whole, or not at all.

    A crash, a full disk or a killed process leaves the file that was there before. `torch.load(weights_only=True)`
    reads it. With several processes the first one's file serves all: save there alone, and load everywhere.

    Args:
        path: Of the file.
        **parts: What has `state_dict` and `load_state_dict` (a model, optimizers, a scheduler, a search), or is a
            `torch.Generator`.

    Raises:
        OSError: If it could not be written.

    Example:
        >>> import tempfile, os
        >>> model = nn.Linear(2, 1)
        >>> opt = ng.kfac(model, nn.MSELoss())
        >>> path = os.path.join(tempfile.mkdtemp(), "run.pt")
        >>> ng.save_checkpoint(path, model=model, optimizer=opt)
        >>> ng.load_checkpoint(path, model=model, optimizer=opt)
    """
    write_state_file(write_parts(parts), path)


def load_checkpoint(path: str | Path, **parts: Any) -> None:
    """Go on from what `save_checkpoint` wrote. Every part fits, or none is changed.

    Args:
        path: Of the file.
        **parts: As they were saved, by the same names, newly built or in use.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file was cut off or damaged, is of a newer format, or lacks a part that fits.

    Example:
        >>> import tempfile, os
        >>> path, generator = os.path.join(tempfile.mkdtemp(), "run.pt"), torch.Generator()
        >>> ng.save_checkpoint(path, generator=generator)
        >>> ng.load_checkpoint(path, generator=generator)
    """
    read_parts(parts, read_state_file(path), "ng.save_checkpoint")
