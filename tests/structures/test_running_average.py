"""Running averages: a total over its weight is sum_s decay^(t - s) x_s / sum_s decay^(t - s)."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from natgrad.structures import accumulate_total, accumulate_weight

DECAY = 0.7


def test_a_total_over_its_weight_is_the_weighted_mean():
    batches, counts = torch.randn(5, 3, dtype=torch.float64), [4, 1, 2, 8, 3]
    total, weight = None, None
    for batch, count in zip(batches, counts, strict=True):
        total, weight = accumulate_total(total, count * batch, DECAY), accumulate_weight(weight, DECAY, count)
    assert total is not None
    assert weight is not None
    ages = DECAY ** torch.arange(4, -1, -1, dtype=torch.float64) * torch.tensor(counts)
    assert_close(total / weight, (ages[:, None] * batches).sum(0) / ages.sum())
