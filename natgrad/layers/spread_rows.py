"""Some rows of many, spread so that no period in their order is met at one phase alone."""

from __future__ import annotations

import torch
from torch import Tensor

PRIME = 7919


def spread_rows(count: int, some: float, device: torch.device) -> Tensor:
    """About `some` of `count` rows, one from each stretch of equal length, at another place in every stretch.

    No period in the order of rows (pairs, classes in turn, places in a sentence) is met at one phase alone.
    """
    stretch = max(1, round(count / some))
    starts = torch.arange(count // stretch, device=device)
    return starts * stretch + starts * PRIME % stretch


def pick_rows(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Rows of (b, t, ...) as examples of one position, (r, 1, ...), by their numbers (r,) in b t."""
    t = tensor.shape[1]
    if t == 1:
        return tensor[numbers]
    return tensor[numbers // t, numbers % t].unsqueeze(1)
