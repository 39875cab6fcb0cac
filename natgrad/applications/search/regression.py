"""What the search of bits takes from the regression form of the natural gradient, and how it reuses draws."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families.slope import Slope as Slope
from natgrad.families.slope import natural_slope as natural_slope


def reuse(log_ratios: list[Tensor]) -> Tensor:
    """Weights (N,) of draws from earlier distributions, from log p(x) - log q_g(x) by generation, up to constants.

    Within a generation they are normalised, so that no partition function is needed; a generation counts for its
    effective number of draws.
    """
    parts = []
    for ratio in log_ratios:
        share = torch.softmax(ratio, 0)
        parts.append(share / share.square().sum())
    return torch.cat(parts) / sum(float(part.sum()) for part in parts)
