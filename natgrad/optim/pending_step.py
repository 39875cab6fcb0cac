"""One structured step, computed aside, and the one place where all of it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.linalg import stays_finite
from natgrad.optim.block_averages import Blocks, Inverted, penalised, running_mean
from natgrad.optim.distributed import Ranks
from natgrad.optim.outside_losses import Outside
from natgrad.optim.schedule import Clock
from natgrad.optim.step_length import Stride

WARM = 5  # steps until the whole radius: at a fresh network the quadratic model does not reach as far


@dataclass
class Attempt:
    """A step on its way: new inverses, means, lengths and parameters beside the old ones.

    Nothing of the optimizer changes before `commit`, so that an error, Ctrl-C or a number that is not finite leaves
    all of it at the last step.

    Attributes:
        named: The parameters by name.
        state: The optimizer's, by parameter.
        param_groups: The optimizer's; the attempt works on copies, whose damping may be adapted.
        clock: A copy of it is moved.
        stride: A copy of it measures.
        nats: Nats per example in one unit of the mean loss.
        told: What is reported of the step.
        outside: What losses besides `opt.loss` do to the blocks.
    """

    blocks: Blocks
    named: Mapping[str, Tensor]
    state: MutableMapping[Tensor, dict[str, Any]]
    param_groups: list[dict[str, Any]]
    clock: Clock
    stride: Stride
    ranks: Ranks
    nats: Any
    told: dict[str, Any]
    outside: Outside
    inverses: dict[str, Inverted] = field(default_factory=dict)
    means: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock, self.stride = dict(self.clock), copy(self.stride)
        self.copies = [dict(group) for group in self.param_groups]
        by_id = {id(p): group for group in self.copies for p in group["params"]}
        self.groups = {name: by_id[id(p)] for name, p in self.named.items() if id(p) in by_id}

    def invert(self) -> None:
        """Damped inverses of today's averages."""
        mean = self.blocks.mean_eigenvalue() if self.outside.levels else 0.0
        levels = dict[str, tuple[float, float]]()
        for name, group in self.groups.items():
            damping = float(group["damping"])
            levels[name] = damping, float(group["l2"]) + self.outside.damping(name, damping * mean)
        self.inverses, failures = self.blocks.invert(levels)
        self.clock["failures"] += failures
        self.clock["inverted"] = self.clock["step"]

    def move(
        self,
        gradients: Mapping[str, Tensor],
        bounded: bool,
        refuses: Callable[[dict[str, Tensor], float], bool] | None,
    ) -> None:
        """New means and parameters.

        Args:
            gradients: By name, of the mean loss.
            bounded: True if the loss is at least 0, and a share of it bounds the step.
            refuses: (moves, half the form along them) -> whether the step is not taken; None for a step that is not
                judged.
        """
        steps, slopes = self._directions(gradients)
        if not steps:
            return
        rate, kl = self._length(steps, slopes, bounded)
        if refuses is not None:
            moves = {name: -self._lr(name) * rate.to(step) * step for name, step in steps.items()}
            if refuses(moves, float(kl / self.nats)):
                return
        self.told |= {"kl": kl, "rate": rate}
        self.parameters = {name: self._moved(name, steps.pop(name), rate) for name in list(steps)}

    def finite(self) -> bool:
        """Whether no parameter would become NaN or infinite; entries that are so already, and stay, do no harm."""
        if not self.parameters:
            return True
        sums = [p.sum(dtype=torch.promote_types(p.dtype, torch.float32)) for p in self.parameters.values()]
        if bool(torch.isfinite(torch.stack([total.double() for total in sums])).all()):
            return True
        return all(stays_finite(self.named[name], new) for name, new in self.parameters.items())

    def commit(
        self, owner: MutableMapping[str, Any], values: Mapping[str, Any], forget_batch: Callable[[], None]
    ) -> None:
        """Write all of it.

        Args:
            owner: The optimizer's own attributes.
            values: Their new values.
            forget_batch: What the optimizer knows of the batch goes with the step that it was for.
        """
        try:
            self._write(owner, values, forget_batch)
        except BaseException:
            # known values to known places: a second time finishes what Ctrl-C cut
            self._write(owner, values, forget_batch)
            raise

    def _write(
        self, owner: MutableMapping[str, Any], values: Mapping[str, Any], forget_batch: Callable[[], None]
    ) -> None:
        for name, new in self.parameters.items():
            self.named[name].copy_(new)
        for name, mean in self.means.items():
            self.state[self.named[name]].update(mean)
        self.blocks.keep(self.inverses)
        self.blocks.settle()
        for group, adapted in zip(self.param_groups, self.copies, strict=True):
            group["damping"] = adapted["damping"]
        owner.update(values)
        forget_batch()

    def _directions(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d = (G + damping I)^-1 m by name, and the slopes d^T m."""
        steps, slopes = dict[str, Tensor](), dict[str, Tensor]()
        rates = {name: self._lr(name) for name in self.groups}
        for key, block in self.blocks.all.items():
            means = {name: self._mean(name, gradients[name]) for name in block.layout.names if name in gradients}
            inverse = self.inverses[key].operator if key in self.inverses else block.inverse
            if inverse is not None and means:
                found, promised = self.blocks.direction(block, inverse, means, rates)
                steps |= found
                slopes |= promised
        return steps, slopes

    def _mean(self, name: str, gradient: Tensor) -> Tensor:
        p, group = self.named[name], self.groups[name]
        whole = penalised(gradient, p, group["l2"])
        mean, self.means[name] = running_mean(self.state.get(p, {}), whole, group["momentum"])
        return mean

    def _length(self, steps: dict[str, Tensor], slopes: dict[str, Tensor], bounded: bool) -> tuple[Tensor, Tensor]:
        """The a of theta <- theta - a lr d, common to all, and the KL that it moves, in nats per example."""
        scaled = {name: self._lr(name) ** 2 * slope for name, slope in slopes.items()}
        whole = torch.stack(list(scaled.values())).sum()
        bounding = torch.maximum(torch.stack(list(slopes.values())).sum(), whole)  # rates above 1 meet the bound too
        if self.stride.sample is not None:
            even = len({self._lr(name) for name in steps}) == 1  # a common rate cancels: no copies
            moves = steps if even else {name: self._lr(name) * step for name, step in steps.items()}
            self.stride.measure(moves, slopes if even else scaled, self.named, self.ranks, self._penalty(moves))
            self.clock["measured"] = self.clock["step"]
        rate = self.stride.rate(bounding, self._radius(whole, bounded), self.nats)
        return rate, self.stride.kl(whole, rate, self.nats)

    def _radius(self, like: Tensor, bounded: bool) -> Tensor:
        """The bound on this step's KL, in nats per example; it grows over the first steps."""
        most = min(float(group["max_kl"]) for group in self.copies)
        share = min(float(group["kl_share"]) for group in self.copies)
        bound = torch.full_like(like, self.nats * share)
        if bounded and "loss" in self.told and math.isfinite(share):  # an infinite share of nothing is no bound either
            bound = bound * self.told["loss"].to(like).clamp(min=0)
        return bound.clamp(max=most) * min(1.0, (self.clock["step"] + 1) / WARM)

    def _penalty(self, moves: dict[str, Tensor]) -> Tensor | float:
        """moves^T (l2 I) moves."""
        strengths = {name: float(group["l2"]) for name, group in self.groups.items()}
        return sum(strengths[name] * move.square().sum() for name, move in moves.items() if strengths[name])

    def _moved(self, name: str, step: Tensor, rate: Tensor) -> Tensor:
        """The parameter after the step."""
        p, decay = self.named[name], self.groups[name]["weight_decay"]
        start = p * (1 - self._lr(name) * decay) if decay else p
        return torch.addcmul(start, step.to(p.dtype), rate.to(p.dtype), value=-self._lr(name))

    def _lr(self, name: str) -> float:
        return float(self.groups[name]["lr"])
