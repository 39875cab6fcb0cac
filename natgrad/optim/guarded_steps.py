"""Steps of a torch optimizer that are taken back where they would leave a number that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.optim import Optimizer

from natgrad.linalg import all_finite, stays_finite
from natgrad.pure import leaves, map_tensors

Result = TypeVar("Result")


def guard_steps(optimizer: Optimizer, run: Callable[[], Result]) -> tuple[Result, bool]:
    """Let an optimizer take steps, and take them back unless all is finite afterwards, or where they are interrupted.

    Args:
        optimizer: What takes them.
        run: Calls its `step`, once or several times.

    Returns:
        What `run` returned, and whether the steps stand.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.detach().clone() for p in params]
    state = {p: map_tensors(dict(numbers), torch.clone) for p, numbers in optimizer.state.items()}
    stands = False
    try:
        result = run()
        fine = all(stays_finite(old, p.detach()) for old, p in zip(kept, params, strict=True))
        stands = fine and all(all_finite(t) for numbers in optimizer.state.values() for t in leaves(dict(numbers)))
    finally:
        if not stands:
            with torch.no_grad():
                for old, p in zip(kept, params, strict=True):
                    p.copy_(old)
            optimizer.state.clear()
            optimizer.state.update(state)
    return result, stands
