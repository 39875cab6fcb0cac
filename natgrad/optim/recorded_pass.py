"""One forward pass and one loss, as they are kept until the step: inputs, random state, targets. No graph."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.optim.loss_inputs import Route, check_same
from natgrad.pure import Call, Passes, RandomState, Select, pure_model, run_detached


@dataclass(frozen=True)
class Data:
    """Inputs and targets for a metric or for trial points, and the random state to replay on them."""

    inputs: Any
    targets: Any
    random: RandomState | None


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """One training-mode forward pass: its inputs, and the random state that it started from."""

    call: Call
    random: RandomState
    versions: tuple[int, ...]
    modes: tuple[bool, ...] | None

    @contextmanager
    def modes_of(self, model: nn.Module) -> Generator[None]:
        """Inside, every submodule is in the mode (train or eval) that it had during the pass, where that is known."""
        if self.modes is None:
            yield
            return
        now = modes_of(model)
        try:
            set_modes(model, self.modes)
            yield
        finally:
            set_modes(model, now)

    def check(self) -> None:
        """ValueError if the inputs were changed in place since: the metric would belong to other data."""
        if self.versions != versions_of(self.call):
            raise ValueError(
                "the inputs of the model's last forward were changed in place before step(); copy them, or call "
                "optimizer.observe(inputs) with the data that the metric should use"
            )


@dataclass(eq=False)
class RecordedLoss:
    """One loss of a training pass.

    Attributes:
        route: How what it was computed on came from the passes' outputs.
        outputs: What it was computed on, detached.
        targets: Its targets.
        target_versions: Of these tensors, at that time.
        value: Its value as a mean.
        scale: What that was divided by.
        dtype: Of the outputs.
        rows: What it weighs.
        count: What it is a mean over; NaN where nobody asked.
        followed: True if the graph was asked for the route; else the route is a guess.
        weight: The derivative of what went backward in it; None until it did.
    """

    route: Route
    outputs: Any
    targets: Any
    target_versions: tuple[int, ...]
    value: Tensor = field(default_factory=lambda: torch.tensor(torch.nan))
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    rows: int = 0
    count: float = math.nan
    followed: bool = True
    weight: Tensor | None = None

    def check(self) -> None:
        """ValueError if inputs or targets were changed in place since."""
        for one in self.route.passes:
            one.check()
        if self.target_versions != versions_of(Call((self.targets,))):
            raise ValueError("the targets of the last loss were changed in place before step(); copy them")

    def data(self) -> Data:
        """Its inputs and targets. ValueError if they changed."""
        self.check()
        passes = self.route.passes
        if len(passes) == 1:
            return Data(passes[0].call, self.targets, passes[0].random)
        several = Passes(tuple(one.call for one in passes), tuple(one.random for one in passes))
        return Data(several, self.targets, passes[0].random)

    def settle(self, model: nn.Module, params: Mapping[str, Tensor], chosen: Select | None) -> Select | None:
        """What turns the model's outputs into what the loss was computed on.

        chosen: the optimizer's own `outputs`, for a loss that could not be followed through its graph: then the pass is
        done again and compared. ValueError where that is another thing.
        """
        route = self.route
        if (route.unsure is None and not route.stale) or not route.passes:
            return route.select
        data = self.data()
        with route.passes[0].modes_of(model):
            found = run_detached(lambda: pure_model(model, data.inputs, data.random)(dict(params)))
        if route.stale:
            route.renew(found)
            self.route = replace(route, stale=False)
        else:
            check_same(route, found, chosen)
            self.route = Route(route.passes, chosen)
        return self.route.select


def part(data: Data, size: int, seed: int, last: bool = False) -> Data:
    """`size` of the examples, inputs and targets together: the first of a drawn order, or its last."""
    inputs, targets = Call((data.inputs, data.targets)).sample(size, seed, last).args
    return Data(inputs, targets, data.random)


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """The mode of every submodule, in the order of `modules()`."""
    return tuple(module.training for module in model.modules())


def set_modes(model: nn.Module, modes: tuple[bool, ...]) -> None:
    """Set the mode of every submodule, in the order of `modules()`."""
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training


def versions_of(call: Call) -> tuple[int, ...]:
    """In-place version counters of the inputs; 0 for inference tensors, which have none."""
    return tuple(0 if t.is_inference() else t._version for t in call.tensors())
