"""How often the same examples come again: a set of few rows, or a stream that never repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WATCHED = 256  # rows whose return is counted: the first ones seen
ENOUGH = 40.0  # numbers in the data per parameter, beyond which passes over it count less


def join_returns(known: Mapping[str, Any] | None, examples: Tensor) -> dict[str, Any]:
    """Count how many of these rows are among the first that were seen."""
    hashes = hash_rows(examples)
    if known is None:
        return {"rows": hashes[:WATCHED].clone(), "returns": 0}
    rows = known["rows"]
    again = torch.isin(hashes, rows)
    fresh = hashes[~again][: WATCHED - len(rows)] if len(rows) < WATCHED else hashes[:0]
    return {"rows": torch.cat([rows, fresh]), "returns": known["returns"] + int(again.sum())}


def hash_rows(examples: Tensor) -> Tensor:
    """A number for each row (b, N), the same for equal rows whatever else is in the batch; int64, shape (b,)."""
    bits = examples.double().contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(bits.shape[1])
    factors = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator, device=generator.device) | 1
    mixed = (bits ^ (bits >> 29)) * factors.to(bits.device)  # wraps; a float's low bits are often zero
    return (mixed ^ (mixed >> 32)).sum(1)


def count_passes(returned: Mapping[str, Any], seen: int, variables: int, parameters: int) -> float:
    """Passes over the same rows, as far as they have few numbers for the parameters; 1 for a stream, and at least.

    r returns of a watched row among the examples seen tell m = seen / r different rows, drawn at random, and
    r / (1 - exp(-r)) passes over those seen. They have m N numbers: up to `ENOUGH` of them per parameter a pass counts
    whole, with more it counts less in proportion, since what the fit follows of the noise falls with them.
    """
    returns = returned["returns"] / max(len(returned["rows"]), 1)
    if returns == 0:
        return 1.0
    numbers = seen / returns * variables / max(parameters, 1)
    return max(1.0, returns / -math.expm1(-returns) * min(1.0, ENOUGH / numbers))
