"""Processes that end, fall silent or bring a bad batch while others train with them.

The long version, with moments drawn from seeds: `python tests/shared/fault_runs.py --times 100 --patience 10`.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fault_runs import Accident
from optim_models import CE, X, Y, net
from process_ranks import call_apart, needs_gloo
from torch import distributed, multiprocessing

import natgrad as ng
from natgrad.ground import whole_tensors as lost_processes

pytestmark = needs_gloo


def disturb(rank: int, folder: str, how: str) -> None:
    """One of three processes that train; the second one is killed, or sleeps for longer than the others wait."""
    lost_processes.PAUSE, lost_processes.PATIENCE = 0.05, 1.0
    distributed.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=2), world_size=3, rank=rank)
    model = net()
    opt = ng.natgrad_cg(model, CE, group=distributed.group.WORLD)
    try:
        for step in range(3):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            if (rank, step) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else time.sleep(5)
            opt.step()
    except RuntimeError as error:
        Path(f"{folder}/{rank}").write_text(str(error))
    os._exit(0)


def hear_the_others(folder: str, how: str) -> list[str]:
    """The errors of the first and the third process."""
    context: Any = multiprocessing.get_context("fork")
    ranks = [context.Process(target=disturb, args=(rank, folder, how)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [Path(f"{folder}/{rank}").read_text() for rank in (0, 2)]


@pytest.mark.parametrize(("how", "words"), [("killed", "rank 1 ended"), ("late", "all of them are there")])
def test_a_failed_exchange_names_who_is_gone(tmp_path: Path, how: str, words: str):
    for text in call_apart(__name__, "hear_the_others", str(tmp_path), how):
        assert words in text
        assert "between 3 processes" in text
        assert "from the last checkpoint" in text


@pytest.mark.parametrize(
    ("kind", "recipe", "expected"),
    [
        ("kill", "kfac", "ended and resumed"),
        ("disk", "kfac", "ended and resumed"),
        ("nan", "hessian_free", "went on"),
        ("empty", "kfac", "went on"),
    ],
)
def test_a_run_goes_on_in_step_or_ends_everywhere_and_resumes(kind: str, recipe: str, expected: str):
    accident = Accident(kind, size=2, rank=0 if kind == "disk" else 1, step=4, moment=0.0, recipe=recipe)
    assert call_apart("fault_runs", "meet_accident", accident) == expected
