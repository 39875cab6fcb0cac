"""Natural wake-sleep: every unit's gradient is multiplied by the damped inverse of its own Fisher block."""

from __future__ import annotations

import math
from typing import Any, TypedDict, Unpack

from torch import Tensor
from torch.optim import SGD

from natgrad.ground.checks import Group, read_groups
from natgrad.helmholtz.blocks import (
    FEW,
    RADIUS,
    MachineBlocks,
    UnitFisher,
    count_refresh,
    is_wide,
    most_rows,
    shorten_directions,
)
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.phases import Algorithm
from natgrad.helmholtz.units import each_layer
from natgrad.helmholtz.wake_sleep import JoinedLesson, MakeOptimizer, WakeSleep
from natgrad.optim import Attributes, OnTrouble
from natgrad.rules import Damping, as_damping


class NaturalWakeSleepSettings(TypedDict, total=False):
    """Keywords of `NaturalWakeSleep`: the blocks' group or one of its settings, and what `WakeSleep` takes."""

    fisher: UnitFisher
    damping: float | Damping
    refresh: int | None
    decay: float
    exact: bool | None
    radius: float | None
    samples: int
    algorithm: Algorithm | None
    momentum: float
    optimizer: MakeOptimizer | None
    seed: int
    on_trouble: OnTrouble
    group: Any


PLAIN = ("samples", "algorithm", "momentum", "optimizer", "seed", "on_trouble", "group")
GROUPS = {"fisher": Group(UnitFisher())}


class NaturalWakeSleep(WakeSleep):
    """Natural (reweighted) wake-sleep, Varady, Volpi, Malago & Ay 2022: one Fisher block per unit, in both networks.

    Each unit's gradient is multiplied by (1 + damping) (F_j + damping I)^-1, F_j = E[s'(W_j a) a a^T] over the samples
    that the gradient is taken over, with their importance weights.

    A refresh takes at most 256 rows, or as many as a unit has inputs, drawn by their weights. Exact inverses are
    batched over the units of a layer: by Woodbury where the rows are at most half as many as a unit's inputs (of the
    past as many are kept as this allows), by Cholesky otherwise. One that fails is made with more damping; where that
    fails too it is counted in `failures`, and the last good one is kept.

    Args:
        machine: What is trained.
        lr: Learning rate of SGD.
        settings: The keywords that follow, each a setting or a group of them.
        fisher: A `UnitFisher` group: how blocks are held, damped and bounded.
        damping: lambda, in nats per squared unit of a weight, or an ng damping.
        refresh: Steps between new estimates and inverses; None so that they cost a quarter of a plain step.
        decay: Weight of the past in a block's running average.
        exact: True inverts every unit's own block; False shares a basis per layer; None
            chooses by the layer's width.
        radius: Nats by which a step may move a unit; None: .03 in machines with wide layers.
        samples: Draws of h per example.
        algorithm: `Reweighted()`, `Classic()` or `Bidirectional()`.
        momentum: Of SGD, in [0, 1).
        optimizer: What takes the steps instead, a function params -> torch optimizer.
        seed: Of the draws.
        on_trouble: "skip" leaves out a step that would not be finite and counts it; "raise" is a ValueError.
        group: The processes of `torch.distributed` that train one machine, each with examples and draws of its own.

    Raises:
        ValueError: For a number out of range, and for exact=False where units see different inputs (an autoregressive
            machine).
        TypeError: For an argument of another kind, or an unknown one.

    Example:
        ```python
        machine = ng.HelmholtzMachine([4, 3, 2])
        trainer = ng.NaturalWakeSleep(machine, lr=0.1, damping=0.1)
        x = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]])
        bound = trainer.step(x)
        bounds = trainer.fit(x, epochs=20)
        ```
    """

    def __init__(
        self, machine: HelmholtzMachine, lr: float = 0.1, **settings: Unpack[NaturalWakeSleepSettings]
    ) -> None:
        given: dict[str, Any] = dict(settings)
        plain = {name: given.pop(name) for name in PLAIN if name in given}
        self.fisher: UnitFisher = read_groups(type(self).__name__, GROUPS, given, ("machine", "lr", *PLAIN))["fisher"]
        super().__init__(machine, lr, **plain)
        if self.fisher.exact is not None and not self.fisher.exact and machine.autoregressive:
            raise ValueError("exact is False, but the machine's units see different inputs: leave exact=None")
        self.damping = as_damping(self.fisher.damping)
        wide = any(is_wide(layer) for part in (machine.generation, machine.recognition) for layer in each_layer(part))
        usual = RADIUS if wide else math.inf
        self.radius = usual if self.fisher.radius is None else float(self.fisher.radius)
        self.blocks = MachineBlocks(machine, self.fisher)
        self._refreshed = -1

    def _parts(self) -> dict[str, Any]:
        return {"blocks": self.blocks, **super()._parts(), "refreshed": Attributes(self, "_refreshed")}

    def _directions(self, lesson: JoinedLesson) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        fresh = True
        if self._is_due(lesson):
            # as many rows of all processes as a Fisher block is estimated from
            taught = [(name, weight, lesson.gather(rows, most_rows(rows))) for name, weight, rows in lesson.taught]
            fresh = self.blocks.refresh(taught, self.damping)
            self._refreshed = self.steps
        rates, directions = self._read_rates(), list[tuple[Tensor, Tensor]]()
        for (name, weight, rows), ascent in zip(lesson.taught, lesson.ascents(), strict=True):
            inverse = self.blocks.keep(name).inverse
            # (1 + damping) (F_j + damping I)^-1 g_j, unit by unit
            direction = ascent if inverse is None else inverse.mv(ascent.flatten()).view_as(ascent)
            if not math.isinf(self.radius):
                seen = lesson.gather(rows, FEW)
                direction = shorten_directions(self.radius, direction, seen, rates.get(weight, 0.0))
            directions.append((weight, direction))
        return directions, fresh

    def _read_rates(self) -> dict[Tensor, float]:
        """What a direction that stays the same is multiplied by at every step; only SGD's is known."""
        if not isinstance(self.optimizer, SGD):
            return {}
        groups = self.optimizer.param_groups
        return {p: float(group["lr"]) / (1 - group["momentum"]) for group in groups for p in group["params"]}

    def _is_due(self, lesson: JoinedLesson) -> bool:
        if self._refreshed < 0 or any(name not in self.blocks.layers for name, _, _ in lesson.taught):
            return True
        if self.fisher.refresh is not None:
            return self.steps - self._refreshed >= self.fisher.refresh
        # a machine changes most at first
        return self.steps - self._refreshed >= min(self._spread_refreshes(lesson), 10 + 2 * self._refreshed)

    def _spread_refreshes(self, lesson: JoinedLesson) -> int:
        """Steps between refreshes at which these cost a quarter of what plain steps do, in multiplications."""
        layers = [(name, weight, count) for (name, weight, _), count in zip(lesson.taught, lesson.counts, strict=True)]
        plain = sum(3 * count * weight.numel() for _, weight, count in layers)
        costs = [count_refresh(self.blocks.keep(name), weight, count) for name, weight, count in layers]
        return max(10, math.ceil(4 * sum(costs) / max(1, plain)))
