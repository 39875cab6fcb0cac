"""What every test shares: one thread, one random state to start from, plots without a screen."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny, and sums in one order give the same digits everywhere


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Each test starts from the same random state, whichever tests ran before it."""
    torch.manual_seed(0)
