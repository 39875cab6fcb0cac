"""How many files a reader has open to follow one step: those that a profiler sees entered.

The numbers are what there is: lower one when you can, never raise it for a file that could be part of another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from optim_models import FOLDER, is_of_natgrad
from torch import nn

import natgrad as ng

STRUCTURED = 58  # statistics, inverses and the step's length due
APART = 20  # of the same mathematics by `NaturalGradient`, entered by that alone


def entered_files(run: Callable[[], Any]) -> set[str]:
    """The files of natgrad of which a function is called."""
    found = set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and is_of_natgrad(frame):
            found.add(frame.f_code.co_filename.removeprefix(FOLDER))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def second_step(make: Callable[[nn.Module], Any]) -> set[str]:
    """The files of loss, backward and step, on a small network that has taken one step."""
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 4), torch.randint(3, (8,))
    optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        optimizer.loss(model(x), y).backward()
        optimizer.step()

    step()
    return entered_files(step)


def test_a_step_enters_few_files():
    blocks = second_step(lambda model: ng.kfac(model, nn.CrossEntropyLoss(), update_every=1, invert_every=1))
    flat = second_step(
        lambda model: ng.NaturalGradient(
            model, ng.fisher(model, nn.CrossEntropyLoss()), lr=0.1, structure=ng.Kronecker()
        )
    )
    assert len(blocks) <= STRUCTURED, sorted(blocks)
    assert len(flat - blocks) <= APART, sorted(flat - blocks)
