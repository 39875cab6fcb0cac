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
        bound = 1e-9 if step == "1" else 1e-6 if int(step) <= 10 else 1e-4
        torch.testing.assert_close(
            torch.tensor(params, dtype=torch.float64),
            torch.tensor(RECORDED[name][step], dtype=torch.float64),
            rtol=bound,
            atol=bound,
            msg=lambda text, step=step: f"{name}, step {step}: {text}",
        )
