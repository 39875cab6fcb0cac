"""Objects that list what makes their state go on from a file as if they had never stopped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from natgrad.ground.states import Stateful


@dataclass(frozen=True)
class Record:
    x: Tensor
    value: float


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Base(Stateful):
    STATE = ("count", "generator")

    def __init__(self) -> None:
        self.count, self.generator = 0, torch.Generator().manual_seed(3)


class Walk(Base):
    STATE = ("best", "pair", "recent", "mean", "scale", "inner", "reason")

    def __init__(self, inner: Base | None = None) -> None:
        super().__init__()
        self.best, self.pair = Record(torch.zeros(2), 0.0), Pair(torch.zeros(1), torch.zeros(1))
        self.recent: deque[float] = deque(maxlen=3)
        self.mean, self.scale = np.zeros(2), np.float64(1.0)
        self.inner, self.reason = inner, None

    def step(self) -> list[Any]:
        draw = torch.rand(2, generator=self.generator)
        self.count += 1
        self.best, self.pair = Record(draw, float(draw[0])), Pair(draw, 2 * draw)
        self.recent.append(float(draw[1]))
        self.mean, self.scale = self.mean + draw.numpy(), self.scale + 1
        if self.inner is not None:
            self.inner.count += 2
        inner = None if self.inner is None else self.inner.count
        return [self.count, *draw.tolist(), list(self.recent), self.mean.tolist(), float(self.scale), inner, self.pair]


def test_an_object_goes_on_from_a_file(tmp_path: Path):
    walk, again = Walk(Base()), Walk(Base())
    for _ in range(5):
        walk.step()
    with torch.device("meta"):  # as `torch.set_default_device` has it: numpy's numbers stay on the CPU
        torch.save(walk.state_dict(), tmp_path / "walk.pt")
    again.load_state_dict(torch.load(tmp_path / "walk.pt", weights_only=True))
    assert isinstance(again.best, Record)
    assert isinstance(again.pair, Pair)
    assert (again.best.value, again.recent.maxlen) == (walk.best.value, 3)
    assert str(walk.step()) == str(again.step())


def test_the_names_of_base_classes_count_first():
    assert list(Walk().state_dict())[:2] == ["count", "generator"]


@pytest.mark.parametrize("place", ["outer", "inner"])
def test_a_state_that_lacks_a_part_anywhere_changes_nothing(place: str):
    walk, other = Walk(Base()), Walk(Base())
    other.step()
    state = other.state_dict()
    short = dict(state if place == "outer" else state["inner"])
    short.pop("count")
    state = short if place == "outer" else state | {"inner": short}
    before = walk.generator.get_state()
    with pytest.raises(ValueError, match="count"):
        walk.load_state_dict(state)
    assert walk.count == 0
    assert torch.equal(walk.generator.get_state(), before)
