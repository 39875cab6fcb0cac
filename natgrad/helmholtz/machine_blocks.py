"""What is remembered of all layers of a machine: their Fisher blocks, one damping for all of them, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from natgrad.ground.checks import check_integer, check_share, is_real
from natgrad.helmholtz.logistic_rows import LogisticRows
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.unit_blocks import EXACT, UnitBlocks, fits_layer
from natgrad.helmholtz.units import Conditional
from natgrad.operators import BlockOperator
from natgrad.rules import Constant, Damping, as_damping

Taught = list[tuple[str, Tensor, LogisticRows]]
"""Name, weight and rows of every layer that is trained."""


@dataclass(frozen=True)
class UnitFisher:
    """How the Fisher blocks of the units are held, damped and bounded.

    Args:
        damping: lambda in (1 + lambda) (F_j + lambda I)^-1: a number in nats per squared unit of a weight, or an ng
            damping that needs no loss at trial points, such as `ng.Relative(0.1)`, a share of the mean eigenvalue over
            all layers.
        refresh: Steps between new estimates and inverses. None spaces them so that they cost about a quarter of a plain
            step on average, counted in operations, with more of them at first, but never below 10 steps.
        decay: Weight of the past in a block's running average, in [0, 1).
        exact: True inverts every unit's own block. False takes all blocks of a layer as diagonal in one basis, the 64
            leading eigenvectors of their mean, where every unit has its own eigenvalues (as in EKFAC, George et al.
            2018), and their mean for what is left: products then cost as much as the layer itself. None: exact for
            units with at most 128 inputs, and in autoregressive machines.
        radius: Nats by which a step may move a unit's distribution, in the mean over its inputs: E[(lr d_j . a)^2] / 8,
            a bound on the KL divergence, estimated on 128 of the step's rows (on 32 of them where these show a quarter
            of the radius or less); a unit's direction is shortened to it. With momentum, lr / (1 - momentum) counts;
            under another optimizer than SGD nothing is shortened. math.inf: none; None: .03 in machines that have units
            with more than 128 inputs, none in others.

    Raises:
        ValueError: For a number out of range, and for a damping that needs the loss at trial points.
        TypeError: For a damping of another kind.
    """

    damping: float | Damping = 0.03
    refresh: int | None = None
    decay: float = 0.8
    exact: bool | None = None
    radius: float | None = None

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if self.refresh is not None:
            object.__setattr__(self, "refresh", check_integer("refresh", self.refresh, hint=", or None"))
        check_share("decay", self.decay)
        if self.radius is not None and not (is_real(self.radius) and self.radius > 0):
            raise ValueError(f"radius is {self.radius!r}, expected nats > 0, math.inf for no bound, or None")
        if self.exact is not None and not isinstance(self.exact, (bool, np.bool_)):
            raise ValueError(f"exact is {self.exact!r}, expected True, False or None")


class MachineBlocks:
    """What is remembered of every layer's Fisher.

    Args:
        machine: The layers.
        fisher: How they are held.
    """

    def __init__(self, machine: HelmholtzMachine, fisher: UnitFisher) -> None:
        self.machine, self.fisher = machine, fisher
        self.layers: dict[str, UnitBlocks] = {}
        self._loaded: dict[str, float] = {}

    def keep(self, name: str) -> UnitBlocks:
        """What is kept of a layer, empty at first."""
        layer = self._layer(name)
        if name not in self.layers:
            exact = self.fisher.exact
            exact = layer.autoregressive or not is_wide(layer) if exact is None else bool(exact)
            self.layers[name] = UnitBlocks(self.fisher.decay, {}, layer.seen_columns(), exact)
        self.layers[name].follow(layer.weight)
        return self.layers[name]

    def refresh(self, taught: Taught, damping: Damping) -> bool:
        """Take a batch into every layer's average and invert it. False where a layer keeps its last inverse."""
        kept = {name: self.keep(name) for name, _, _ in taught}
        states = {name: kept[name].average(rows) for name, _, rows in taught}
        operators = {name: kept[name].operator(state) for name, state in states.items()}
        if not operators:
            return True
        number, whole = damping.initial(), BlockOperator(list(operators.values()))
        levels = {n: damping.amount(number, part if damping.per_block else whole) for n, part in operators.items()}
        failed = sum(not kept[name].commit(states[name], operators[name], level) for name, level in levels.items())
        return failed == 0

    @property
    def levels(self) -> dict[str, float]:
        """The damping of every layer's inverse."""
        return {name: kept.level for name, kept in self.layers.items()}

    @levels.setter
    def levels(self, found: dict[str, float]) -> None:
        self._loaded = dict(found)

    def state_dict(self) -> dict[str, Any]:
        """Every layer's average."""
        return {name: dict(kept.state) for name, kept in self.layers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. ValueError for those of another machine."""
        own = {name for name, part in self.machine.named_modules() if isinstance(part, Conditional)}
        for name, part in state.items():
            if name not in own or not fits_layer(part, self._layer(name).weight):
                raise ValueError(f"state's blocks of {name} are of another machine than {self.machine.sizes}")
        usual = as_damping(self.fisher.damping).initial()
        self.layers, levels = {}, self._loaded
        for name, part in state.items():
            self.keep(name).load(part, levels.get(name, usual), self._layer(name).weight)

    def _layer(self, name: str) -> Conditional:
        found = self.machine.get_submodule(name)
        assert isinstance(found, Conditional)
        return found


def check_damping(damping: Any) -> None:
    """ValueError unless it needs no loss at trial points, and keeps a singular block invertible."""
    found = as_damping(damping)
    if found.needs_ratio:
        raise ValueError(
            f"damping is {damping!r}, which compares with the loss at trial points, and wake-sleep has none: expected "
            "a number > 0 or ng.Relative(0.1)"
        )
    if isinstance(found, Constant) and not found.value > 0:
        raise ValueError(f"damping is {damping!r}, expected a number > 0: a unit's block may be singular")


def is_wide(layer: Conditional) -> bool:
    """True if its units have more inputs, the bias left out, than exact blocks are made for."""
    return layer.weight.shape[1] - 1 > EXACT
