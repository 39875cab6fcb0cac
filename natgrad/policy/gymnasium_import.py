"""gymnasium, which only policies need."""

from __future__ import annotations

from typing import Any


def import_gymnasium() -> Any:
    """The package. ImportError with what to install where it is missing."""
    try:
        import gymnasium as found  # an extra: only where an environment is asked for
        import gymnasium.vector
    except ImportError as error:
        raise ImportError("policies need gymnasium: pip install gymnasium") from error
    return found
