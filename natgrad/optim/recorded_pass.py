"""One forward pass and one loss, as they are kept until the step: inputs, random state, targets. No graph."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.held_states import count_writes, list_modules
from natgrad.optim.loss_inputs import Route, check_same
from natgrad.pure import Call, Passes, RandomState, Select, leaves, pure_model, run_detached

NOT_REPEATED = (
    "the model gave other outputs when its last pass was done again at the same parameters and inputs: a metric or a "
    "trial loss would be that of another function. Put back were the global generators of torch, random and NumPy, "
    "buffers, and generators and states in attributes of its modules: let it draw from one of these and keep its "
    "state there, or use an optimizer that does no pass again, such as ng.kfac(model, loss). Parameters that were "
    "changed since by way of .data have the same effect"
)


class RepeatError(ValueError):
    """A pass that was done again gave something else."""


@dataclass(frozen=True)
class Data:
    """Inputs and targets for a metric or for trial points, and the random state to replay on them."""

    inputs: Any
    targets: Any
    random: RandomState | None


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """One training-mode forward pass: its inputs, and the random state that it started from.

    rounded: the precision of autocast, 0 without. returned: what it gave, with the tensors' versions; empty until then.
    """

    call: Call
    random: RandomState
    versions: tuple[int, ...]
    modes: tuple[bool, ...] | None
    rounded: float = 0.0
    returned: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])

    def keep_outputs(self, outputs: Any) -> None:
        """Note what it gave, to compare with the same pass done again."""
        self.returned[:] = [(t.detach(), 0 if t.is_inference() else t._version) for t in leaves(outputs)]

    def check_repeated(self, outputs: Any) -> None:
        """RepeatError unless the pass, done again at the same parameters, gave the same but for round-off.

        outputs: of the other pass. What the user has written over since is not compared, and nothing where another
        optimizer has moved the parameters.
        """
        if self.random.held is None or self.is_behind():
            return
        found = list(leaves(outputs))
        for (given, version), again in zip(self.returned, found, strict=False):
            if version == (0 if given.is_inference() else given._version) and not is_same(given, again, self.rounded):
                raise RepeatError(NOT_REPEATED)
        if self.returned and len(self.returned) != len(found):
            raise RepeatError(NOT_REPEATED)

    def is_behind(self) -> bool:
        """Whether the parameters were written to since."""
        held = self.random.held
        return held is not None and held.writes != count_writes(list_modules(held.model))

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
        repeated: True once its passes were done again, and gave what they had given.
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
    repeated: bool = False

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
        """What turns the model's outputs into what the loss was computed on, once the passes were done again.

        They must give what they gave: RepeatError where the model is not a function of what can be put back.

        chosen: the optimizer's own `outputs`, for a loss that was not followed through its graph. ValueError where that
        is another thing.
        """
        route = self.route if self.followed else replace(self.route, unsure=self.outputs)
        if self.repeated or not route.passes:
            return route.select
        data = self.data()
        with route.passes[0].modes_of(model):
            found = run_detached(lambda: pure_model(model, data.inputs, data.random)(dict(params)))
        for one, outputs in zip(route.passes, (found,) if len(route.passes) == 1 else found, strict=True):
            one.check_repeated(outputs)
        if route.stale:
            route.renew(found)
            route = replace(route, stale=False)
        elif route.unsure is not None:
            check_same(route, found, chosen)
            route = Route(route.passes, chosen)
        self.route, self.followed, self.repeated = route, True, True
        return route.select


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


def rounding(inputs: Sequence[Tensor]) -> float:
    """The precision of the autocast that holds now, 0 without.

    inputs: of the pass.
    """
    device = inputs[0].device.type if inputs else "cpu"
    return torch.finfo(torch.get_autocast_dtype(device)).eps if torch.is_autocast_enabled(device) else 0.0


def is_same(given: Tensor, found: Tensor, rounded: float) -> bool:
    """Whether two tensors are one but for round-off, relative to the largest entry.

    rounded: the precision of autocast in the first.
    """
    if given.shape != found.shape or not given.is_floating_point():
        return given.shape == found.shape
    eps = max(rounded, *(torch.finfo(t.dtype).eps for t in (given, found)))
    error, size = (given - found).abs().nan_to_num(), found.abs().nan_to_num()
    return not given.numel() or bool(error.max() <= eps**0.5 * size.max())


def versions_of(call: Call) -> tuple[int, ...]:
    """In-place version counters of the inputs; 0 for inference tensors, which have none."""
    return tuple(0 if t.is_inference() else t._version for t in call.tensors())
