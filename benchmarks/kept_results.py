"""Results of long tables, kept as they come: an interrupted run goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def keep_result(file: Path, key: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, or what it gave in an earlier run. file: JSON, one entry per key; delete it to begin anew."""
    known = read_results(file)
    if key in known:
        return known[key]
    result = make()
    known = read_results(file) | {key: result}  # another process may have written meanwhile
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(known))
    part.replace(file)
    return result


def read_results(file: Path) -> dict[str, Any]:
    """All that is kept; nothing where there is no file."""
    return json.loads(file.read_text()) if file.exists() else {}
