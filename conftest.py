"""What every test shares: one thread, one random state to start from, plots without a screen, how far fuzzers go."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch_settings import read_torch_settings, write_torch_settings

# The models are tiny, and sums in one order give the same digits; with another number they must hold as well.
torch.set_num_threads(int(os.environ.get("NATGRAD_THREADS", "1")))
SEED = int(os.environ.get("NATGRAD_SEED", "0"))

if not hasattr(os, "fork"):  # Windows: nothing there forks processes or limits how large a file grows
    POSIX = ("from process_ranks import", "import resource")
    files = Path(__file__).parent.glob("tests/**/test_*.py")
    collect_ignore = [str(file) for file in files if any(line in file.read_text("utf-8") for line in POSIX)]

if "NATGRAD_MARGINS" in os.environ:  # a file: how near each comparison is to its bound, see tests/shared/margins.py
    pytest_plugins = ["margins"]

# A fuzzer's cases are the same on every run of the suite; `--hypothesis-profile=long` draws fresh ones, and more.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "suite", max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=SLOW
)
settings.register_profile("long", max_examples=2000, deadline=None, database=None, suppress_health_check=SLOW)
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests are imported without the garbage collector, which takes a quarter longer with it.

    What is imported by then stays: a collection, of which there are thousands, need not walk through all of it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Each test starts from the same random state and settings of torch, whichever tests ran before it.

    A test that changes the settings fails, and they are put back: it fails alone.
    """
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed does so too, and asks every kind of device: 2 ms
    before = read_torch_settings()
    yield
    after = read_torch_settings()
    write_torch_settings(before)
    assert after == before, "this test has left torch as other tests do not expect it"
