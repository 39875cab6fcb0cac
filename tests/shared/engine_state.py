"""What a structured optimizer remembers, for tests that look at its blocks, its averages and what it knows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from models import F64, assert_close
from torch import Tensor, nn

from natgrad.layers import Seen
from natgrad.operators import Operator
from natgrad.optim.reading import Reading
from natgrad.optim.state import Block, State


def state_of(opt: Any) -> State:
    """All that the next step depends on, with what the passes since the last step made of the averages."""
    opt._settle_reading()
    update = opt._flow.pending.update
    return opt._live.state if update is None else replace(opt._live.state, blocks=update.blocks, hearing=update.hearing)


def blocks_of(opt: Any) -> list[Block]:
    """The blocks, in order."""
    return list(state_of(opt).blocks.values())


def metric_of(opt: Any, block: Block) -> Operator:
    """A block of the metric."""
    return opt._flow.averages.operator(block)


def kept_of(opt: Any, p: Tensor) -> dict[str, Any]:
    """What is remembered under a parameter, as a checkpoint has it."""
    name = next(name for name, own in opt._live.named.items() if own is p)
    return state_of(opt).by_parameter().get(name, {})


def change_state(opt: Any, part: str = "", **values: Any) -> None:
    """Write into the state, as if a run had come there: into one of its parts, such as "pace"."""
    changed = {part: replace(getattr(opt._live.state, part), **values)} if part else values
    opt._live.state = replace(opt._live.state, **changed)


def read_pass(opt: Any, outputs: Any, targets: Any) -> Reading:
    """The statistics of a pass whose loss was computed with `opt.loss` already."""
    reading, _ = opt._flow.reader.read(opt._live.state.hearing, opt.criterion, outputs, targets, opt._live.record)
    assert reading is not None
    return reading


def record_readings(opt: Any, found: list[Reading]) -> None:
    """Append every reading from here on, before it is taken and emptied."""
    start = opt._flow.averages.start

    def keep(update: Any, reading: Reading) -> Any:
        found.append(Reading(list(reading.layers), reading.squares, reading.rows))
        return start(update, reading)

    averages = opt._flow.averages
    object.__setattr__(averages, "start", keep)


def readings(opt: Any, model: nn.Module, inputs: Any, targets: Any) -> Reading:
    """What the optimizer read in one pass."""
    found: list[Reading] = []
    record_readings(opt, found)
    opt.loss(model(inputs), targets)
    return found[0]


def assert_same_reading(reading: Reading, layers: Sequence[Seen], rtol: float = 1e-12) -> None:
    """The same layers, with the same activations and derivatives."""
    found = {seen.key: seen for seen in reading.layers}
    assert found.keys() == {seen.key for seen in layers}
    for seen in layers:
        assert_close(found[seen.key].activations.to(F64), seen.activations.to(F64), rtol / 10)
        for delta, other in zip(found[seen.key].deltas, seen.deltas, strict=True):
            assert_close(delta.to(F64), other, rtol, scale=seen.deltas[0].abs().max())
