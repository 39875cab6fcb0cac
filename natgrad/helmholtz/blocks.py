"""The Fisher blocks of a machine's units: averages, damped inverses, one damping for all, how far a step may go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_share, is_real
from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import map_tensors
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.units import Conditional, LogisticRows
from natgrad.operators import BlockOperator, Operator, Scaled, SharedRows, Units
from natgrad.optim import robust_inverse
from natgrad.rules import Constant, Damping, as_damping
from natgrad.structures import accumulate_total, accumulate_weight

Taught = list[tuple[str, Tensor, LogisticRows]]
"""Name, weight and rows of every layer that is trained."""
ROWS = 256
"""Rows that a refresh takes at most where the unit's inputs are fewer."""
EXACT = 128
"""Inputs up to which every unit's own block is inverted, unless told otherwise."""
RANK = 64
"""Directions of a shared basis."""
KEPT = 10
"""Full refreshes of which a shared basis keeps the rows at most."""
FEW = 128
"""Rows that the length of a step is measured on."""
SCREEN = 32
"""Of these, the rows that say of which units it is to be measured: those at a quarter of the radius or beyond."""
RADIUS = 0.03
"""Nats that a step may move a unit by, unless told otherwise, in machines with wide layers."""


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
        damping = as_damping(self.damping)
        if damping.needs_ratio:
            raise ValueError(
                f"damping is {self.damping!r}, which compares with the loss at trial points, and wake-sleep has none: "
                "expected a number > 0 or ng.Relative(0.1)"
            )
        if isinstance(damping, Constant) and not damping.value > 0:
            raise ValueError(f"damping is {self.damping!r}, expected a number > 0: a unit's block may be singular")
        if self.refresh is not None:
            object.__setattr__(self, "refresh", check_integer("refresh", self.refresh, hint=", or None"))
        check_share("decay", self.decay)
        if self.radius is not None and not (is_real(self.radius) and self.radius > 0):
            raise ValueError(f"radius is {self.radius!r}, expected nats > 0, math.inf for no bound, or None")
        if self.exact is not None and not isinstance(self.exact, (bool, np.bool_)):
            raise ValueError(f"exact is {self.exact!r}, expected True, False or None")


class MachineBlocks:
    """What is remembered of every layer's Fisher."""

    def __init__(self, machine: HelmholtzMachine, fisher: UnitFisher) -> None:
        self.machine, self.fisher = machine, fisher
        self.layers: dict[str, UnitBlocks] = {}

    def keep(self, name: str) -> UnitBlocks:
        """What is kept of a layer, empty at first."""
        layer = self.machine.find_layer(name)
        if name not in self.layers:
            exact = self.fisher.exact
            exact = layer.autoregressive or not is_wide(layer) if exact is None else bool(exact)
            self.layers[name] = UnitBlocks(self.fisher.decay, {}, layer.seen_columns(), exact)
        self.layers[name].follow(layer.weight)
        return self.layers[name]

    def refresh(self, taught: Taught, damping: Damping) -> bool:
        """Take a batch into every layer's average and invert it. False where a layer keeps its last inverse."""
        states = {name: self.keep(name).average(rows) for name, _, rows in taught}
        operators = {name: self.layers[name].operator(state) for name, state in states.items()}
        if not operators:
            return True
        number, together = damping.initial(), BlockOperator(list(operators.values()))
        levels = {n: damping.amount(number, part if damping.per_block else together) for n, part in operators.items()}
        fresh = [self.layers[n].commit(states[n], operators[n], level) for n, level in levels.items()]
        return all(fresh)

    def state_dict(self) -> dict[str, Any]:
        """Every layer's average, and the damping of its inverse."""
        return {name: (dict(blocks.state), blocks.level) for name, blocks in self.layers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. ValueError for those of another machine."""
        own = {name for name, part in self.machine.named_modules() if isinstance(part, Conditional)}
        for name, (part, _) in state.items():
            if name not in own or not fits_layer(part, self.machine.find_layer(name).weight):
                raise ValueError(f"state's blocks of {name} are of another machine than {self.machine.sizes}")
        self.layers = {}
        for name, (part, level) in state.items():
            self.keep(name).load(part, level, self.machine.find_layer(name).weight)


def is_wide(layer: Conditional) -> bool:
    """True if its units have more inputs, the bias left out, than exact blocks are made for."""
    return layer.weight.shape[1] - 1 > EXACT


# What is remembered of one layer


@dataclass
class UnitBlocks:
    """What is remembered of one layer's Fisher: blocks with their weight, or the rows of the last refreshes."""

    decay: float  # weight of the past in the running average
    state: dict[str, Any]  # the blocks' or the rows' sums; {} before the first refresh
    mask: Tensor | None = None  # columns that each unit sees, (size, columns); None for all
    exact: bool = True  # if every unit's own block is inverted; else all are diagonal in one basis, made from the rows
    inverse: Operator | None = None  # (1 + level) (F_j + level I)^-1; None before the first refresh
    level: float = 0.0  # the damping that the inverse was made with

    def average(self, rows: LogisticRows) -> dict[str, Any]:
        """The running average with a batch more, as `state` has it; rows that became many become blocks."""
        fresh = thin_rows(rows, most_rows(rows)).fisher()
        few = 2 * len(fresh.rows) <= fresh.rows.shape[1]
        if not self.exact or (few and "blocks" not in self.state):
            return self._average_rows(fresh)
        return self._average_blocks(fresh)

    def operator(self, state: dict[str, Any]) -> Operator:
        """F of a running average, one block per unit."""
        if "blocks" in state:
            return Units(state["blocks"] / state["weight"])
        shared = SharedRows(state["rows"], state["weights"] / sum(state["shares"]), self.mask)
        return shared if self.exact else shared.spectral(RANK)

    def commit(self, state: dict[str, Any], operator: Operator, level: float) -> bool:
        """Take over a running average with its damped inverse. False, with everything as it was, if that fails."""
        inverse = robust_inverse(operator, level)
        if inverse is None:
            return False
        size = inverse.size  # of equal entries: the image is not finite if any part that matters is not
        if not all_finite(inverse.mv(torch.full((size,), size**-0.5, dtype=inverse.dtype, device=inverse.device))):
            return False
        self.state, self.inverse, self.level = state, Scaled(inverse, 1 + level), level
        return True

    def follow(self, like: Tensor) -> None:
        """Bring all to the dtype and the device of the layer, where it went elsewhere."""
        if self.inverse is not None and (self.inverse.dtype, self.inverse.device) != (like.dtype, like.device):
            self.load(self.state, self.level, like)

    def load(self, state: dict[str, Any], level: float, like: Tensor) -> None:
        """What was kept elsewhere, and its inverse."""
        self.state = map_tensors(state, lambda t: t.to(like, copy=True))
        self.inverse, self.level = None, level
        if self.state:
            self.commit(self.state, self.operator(self.state), level)

    def _average_blocks(self, fresh: SharedRows) -> dict[str, Any]:
        past = self.state
        if "rows" in past:
            held = SharedRows(past["rows"], past["weights"], self.mask)
            past = {"blocks": held.blocks(), "weight": sum(past["shares"])}
        blocks = accumulate_total(past.get("blocks"), fresh.blocks(), self.decay)
        return {"blocks": blocks, "weight": accumulate_weight(past.get("weight"), self.decay)}

    def _average_rows(self, fresh: SharedRows) -> dict[str, Any]:
        rows, weights = [fresh.rows], [fresh.weights]
        counts, shares = [len(fresh.rows)], [1.0]
        if "rows" in self.state:
            columns = fresh.rows.shape[1]
            # beyond half as many rows as columns Woodbury costs more than exact blocks do
            room = (columns // 2 if self.exact else KEPT * max(ROWS, columns)) // len(fresh.rows)
            older = max(1, min(room, round(1 / (1 - self.decay)))) - 1
            past = self.state["counts"][:older]
            rows.append(self.state["rows"][: sum(past)])
            weights.append(self.decay * self.state["weights"][:, : sum(past)])
            counts += past
            shares += [self.decay * share for share in self.state["shares"][:older]]
        return {"rows": torch.cat(rows), "weights": torch.cat(weights, dim=1), "counts": counts, "shares": shares}


def fits_layer(state: dict[str, Any], weight: Tensor) -> bool:
    """True if what was kept is of a layer like this one."""
    units, columns = weight.shape
    if not state:
        return True
    if "blocks" in state:
        return state["blocks"].shape == (units, columns, columns)
    return state["rows"].shape[1] == columns and state["weights"].shape == (units, len(state["rows"]))


def shorten_directions(radius: float, direction: Tensor, rows: LogisticRows, rate: float) -> Tensor:
    """Every unit's direction d_j, the rows (size, columns), shortened where `rate` times it is too far.

    A step moves a unit's distribution by KL <= E[(rate d_j . a)^2] / 8 nats in the mean over its inputs a, since the
    log-partition log(1 + e^z) has no second derivative above 1/4; this is held to `radius`, as FEW of the rows show it,
    or SCREEN of them where the unit's step is short.
    The Fisher matrix cannot bound it: that of a unit which is wrong and sure of it vanishes, and its step is then long.
    """
    if len(rows.inputs) <= FEW:
        shares = rows.weights / rows.weights.sum()
        return direction * find_shortening(radius, direction, rows.inputs, rate, shares)
    inputs = rows.inputs[draw_places(rows.weights, FEW)]
    if direction.device.type != "cpu":  # asking would halt an accelerator
        return direction * find_shortening(radius, direction, inputs, rate)
    unsure = find_shortening(radius / 4, direction, inputs[:: FEW // SCREEN], rate).squeeze(1) < 1
    if not unsure.any():
        return direction
    shortened = direction.clone()
    shortened[unsure] *= find_shortening(radius, direction[unsure], inputs, rate)
    return shortened


def find_shortening(
    radius: float, direction: Tensor, inputs: Tensor, rate: float, shares: Tensor | None = None
) -> Tensor:
    """min(1, sqrt(radius / KL)) of every unit for KL = E[(rate d_j . a)^2] / 8, shape (size, 1); all rows alike."""
    shares = inputs.new_full((len(inputs),), 1 / len(inputs)) if shares is None else shares
    kl = shares @ (inputs @ direction.mT).square_() * (rate**2 / 8)
    return (radius / kl).sqrt().clamp(max=1).unsqueeze(1)


def most_rows(rows: LogisticRows) -> int:
    """Rows that a layer's Fisher is estimated from at most."""
    return max(ROWS, rows.inputs.shape[1])


def thin_rows(rows: LogisticRows, most: int) -> LogisticRows:
    """At most as many rows, drawn in proportion to their weights, each of equal weight."""
    if len(rows.inputs) <= most:
        return rows
    chosen, weights = draw_places(rows.weights, most), (rows.weights.sum() / most).expand(most)
    return LogisticRows(rows.inputs[chosen], rows.residuals[chosen], rows.logits[chosen], weights, rows.mask)


def draw_places(weights: Tensor, most: int) -> Tensor:
    """Places of so many rows, drawn in proportion to their weights.

    Systematic draws: a row with the share w of all weight is taken floor(w m) or ceil(w m) times of m. The rows are
    shuffled first, always in the same way: examples may come in an order with a period.
    """
    many = len(weights)
    order = shuffle_places(many).to(weights.device)
    total = weights[order].cumsum(0)
    steps = torch.arange(most, device=total.device) + 0.5
    return order[torch.searchsorted(total, steps * (total[-1] / most)).clamp_(max=many - 1)]


@lru_cache(maxsize=64)
def shuffle_places(many: int) -> Tensor:
    """The same order of so many rows every time."""
    return torch.randperm(many, generator=torch.Generator().manual_seed(many), device="cpu")


def count_refresh(blocks: UnitBlocks, weight: Tensor, rows: int) -> int:
    """Multiplications of a refresh; those of a factorisation count as often as they take as long (measured)."""
    units, columns = weight.shape
    many = min(rows, max(ROWS, columns))
    if not blocks.exact:
        many = min(many * round(1 / (1 - blocks.decay)), KEPT * max(ROWS, columns))
        return columns * columns * (many + 5 * columns) + units * many * min(RANK, columns)
    if 2 * many <= columns:
        return units * many * (columns + 2 * many * many)
    return units * columns * columns * (many + 2 * columns)
