"""Results of long tables, kept as they come: an interrupted run goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def keep_result(file: Path, key: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, or what it gave in an earlier run; delete the file to begin anew.

    file: JSON, one entry per key.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    if key not in known:
        known[key] = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known))
    return known[key]
