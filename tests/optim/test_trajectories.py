"""Every optimiser stands where it stood when its trajectory was recorded: see tests/shared/trajectories.py."""

from __future__ import annotations

import json

import pytest
import torch
from trajectories import PROBLEMS, VECTORS, record

RECORDED = json.loads(VECTORS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_trajectory_is_the_recorded_one(name: str):
    problem, steps = PROBLEMS[name]
    found = record(problem, steps)
    assert list(found) == list(RECORDED[name])
    for step, params in found.items():
        # round-off grows with the steps, and is another on another processor
        torch.testing.assert_close(
            torch.tensor(params), torch.tensor(RECORDED[name][step]), rtol=1e-6, atol=1e-8, msg=f"{name}, step {step}"
        )
