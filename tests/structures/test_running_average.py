"""Running averages: a total over its weight is sum_s decay^(t - s) x_s / sum_s decay^(t - s)."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from natgrad.structures import accumulate_total, accumulate_weight
from natgrad.structures.running_average import average_tensor

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


def test_the_past_is_not_written_to():
    before, fresh = torch.ones(2), torch.full((2,), 3.0)
    assert accumulate_total(before, fresh, DECAY, reuse=True) is fresh
    assert_close(before, torch.ones(2))
    assert_close(accumulate_total(before, torch.full((2,), 3.0), DECAY), fresh)


def test_other_parameters_start_the_average_anew():
    first, kept = average_tensor(None, torch.ones(2), DECAY, ["a"])
    assert_close(first, torch.ones(2))
    assert_close(average_tensor(kept, torch.zeros(2), DECAY, ["a"])[0], torch.full((2,), DECAY / (1 + DECAY)))
    assert_close(average_tensor(kept, torch.zeros(2), DECAY, ["b"])[0], torch.zeros(2))
    assert average_tensor(kept, torch.ones(2), 0.0, ["a"])[1] == {}
