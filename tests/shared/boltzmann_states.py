"""The Boltzmann machine of the reference values."""

from __future__ import annotations

from typing import Any

import torch
from energies import VECTORS
from models import F64, tensor
from torch import Tensor

RATIOS = VECTORS["ratio_matching"]


def boltzmann(params: Any, x: Tensor) -> Tensor:
    """The reference's machine over {-1, 1}, as a function of bits."""
    h, couplings = params["xi"][:3], params["xi"][3:]
    s = 2 * x - 1
    return h @ s + couplings @ torch.stack([s[0] * s[1], s[0] * s[2], s[1] * s[2]])


def weighted_states() -> Tensor:
    """The reference's states as bits, each as often as q has it in twentieths."""
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * 3)
    return states.repeat_interleave((20 * tensor(RATIOS["inputs"]["q"])).round().long(), dim=0)
