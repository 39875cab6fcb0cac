"""Downloaded data sets in a folder of one's own, each with the SHA-256 of its file."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

VARIABLE = "NATGRAD_CACHE"


def cache_folder() -> Path:
    """The folder: what NATGRAD_CACHE names, else `natgrad` in the platform's folder for caches."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # a user without a name, as in some containers
        home = Path(tempfile.gettempdir())
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "natgrad"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "natgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "natgrad"


def read_cached(name: str, download: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of a data set: from the cache if its file is whole, else downloaded, and kept where that can be.

    A file whose checksum is not the one noted beside it is downloaded again.
    """
    file = cache_folder() / f"{name}.npz"
    note = file.with_suffix(".npz.sha256")
    if file.is_file() and note.is_file() and note.read_text().split()[:1] == [hash_file(file)]:
        with np.load(file, allow_pickle=False) as table:
            return {key: table[key] for key in table.files}
    arrays = dict(download())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{name}.{os.getpid()}.npz")
        np.savez_compressed(part, **arrays)  # type: ignore[arg-type]
        part.replace(file)
        note.write_text(f"{hash_file(file)}  {file.name}\n")
    except OSError:  # a folder that cannot be written costs another download, no more
        pass
    return arrays


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
