"""One structured step, computed aside, and the one place where all of it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.damping import Damping
from natgrad.operators import Operator
from natgrad.optim.batch_form import BatchForm
from natgrad.optim.block_averages import BlockAverages, Whole
from natgrad.optim.distributed import Ranks
from natgrad.optim.error_size import ErrorSize
from natgrad.optim.inverses import Block, Inverted, give_back, least_damping
from natgrad.optim.outside_losses import Outside
from natgrad.optim.readings import Reading
from natgrad.optim.running_averages import (
    Penalised,
    add_penalty,
    all_stay_finite,
    average_gradient,
    mean_positions,
    signal_sums,
    sum_scalars,
)
from natgrad.optim.schedule import Clock, compare_kl, follow_fall, follow_signal, keep_form, recent_form, trust_form
from natgrad.optim.step_length import Stride, measure_form
from natgrad.rules import BlockPoint, BlockStep, ErrorScale, Lazy, Memory, Parts, Quadratic, Rule, Step, Vector
from natgrad.typed_torch import as_tensor_like, list_numbers, measure_norm
from natgrad.whole_tensors import WholeTensors, write_whole

Directions = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]
RULE = "rule"
"""Where the rule's vectors lie in a parameter's state."""


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
        rule: Shapes the directions.
        batch: Measures steps on their own batch.
        norms: Of the gradients, by name.
        errors: Tells the unit of a regression's targets.
    """

    blocks: BlockAverages
    named: Mapping[str, Tensor]
    state: MutableMapping[Tensor, dict[str, Any]]
    param_groups: list[dict[str, Any]]
    clock: Clock
    stride: Stride
    ranks: Ranks
    nats: Any
    told: dict[str, Any]
    outside: Outside
    rule: Rule
    batch: BatchForm
    norms: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    errors: ErrorSize | None = None
    inverses: dict[str, Inverted] = field(default_factory=dict[str, Inverted])
    means: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    memories: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    vectors: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    parameters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    inverted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.clock, self.stride = dict(self.clock), copy(self.stride)
        self.sample, self.values = self.stride.sample, WholeTensors(self.named)
        # a rule that turns takes the plain damped inverses until then
        self.turned = self.rule.turns_at is not None and self.clock["turned"] >= 0
        self.shapes = self.rule.shapes and (self.rule.turns_at is None or self.turned)
        self.inverts = self.rule.needs_inverse and not self.turned
        self.fall = self.rule.rate_at(self.clock["step"], self.clock["turned"])
        self.copies = [dict(group) for group in self.param_groups]
        by_id = {id(p): group for group in self.copies for p in group["params"]}
        self.groups = {name: by_id[id(p)] for name, p in self.named.items() if id(p) in by_id}

    # new inverses

    def invert(self, damping: Damping, whole: bool) -> None:
        """Damped inverses of today's averages: of all blocks, or of those alone that never had one."""
        keys = frozenset(self.blocks.all if whole else self.blocks.fresh)
        if not keys:
            return
        metric = Whole(self.blocks, self.nats)
        self.clock["error"] = max(self.clock["error"], float(self.told.get("loss", 0.0)) if self.errors else 0.0)
        if self.blocks.owners.apart:
            metric.mean_eigenvalue()  # all processes together, before each looks at its own blocks
        prepare, level = self.rule.prepare_for if self.shapes else None, partial(self._level, damping, metric)
        self.inverses, failures = self.blocks.invert(level, self.inverts, prepare, keys)
        self.inverted = keys
        self.clock["failures"] += failures
        self.clock["inverted"] = self.clock["step"] if whole else self.clock["inverted"]

    def _level(self, damping: Damping, whole: Whole, block: Block, operator: Operator) -> float:
        """The damping of a block: the strategy's, a penalty's, and for a part of the loss that the metric lacks."""
        name = block.layout.names[0]
        number, l2 = float(self.groups[name]["damping"]), float(self.groups[name]["l2"])
        level = damping.amount(number, operator if damping.per_block else whole) + l2
        if damping.of_whole:
            # curvatures of the layers before a regression's last ones grow with the square of its unit
            unit = self.errors.scale(self.clock["error"]) if self.errors else ErrorScale()
            level += damping.of_whole * number * float(whole.mean_eigenvalue()) / unit.of(name) ** 2
        if name in self.outside.levels:
            level += self.outside.damping(name, damping.amount(number, whole))
        return max(level, least_damping([self.norms[name] for name in block.layout.names if name in self.norms]))

    # the step's proposal

    def quadratic(self, gradients: Mapping[str, Tensor], bounded: bool, counts: Mapping[str, int]) -> Quadratic | None:
        """The quadratic model with the blocks' directions as its proposal; None where no block can be solved yet.

        Args:
            gradients: By name, of the mean loss.
            bounded: True if the loss is at least 0.
            counts: Examples of this step, and seen so far.
        """
        self.values.gather()
        directions, slopes, levels = self._directions(gradients)
        if not directions:
            return None
        self.count_signal(gradients)
        errors = self.errors.scale(self.told.get("loss", 0.0)) if self.errors else ErrorScale()
        fixed = errors if self.shapes else ErrorScale()  # lengths that do not follow the gradient's
        vector = Parts(directions, {name: -self._lr(name) * fixed.of(name) for name in directions})
        even, rated = len({self._lr(name) for name in directions}) == 1, dict[str, Tensor]()
        if self.shapes:
            full, promise = None, Lazy(partial(self._promise_lately, vector, levels))
            if self.sample is not None:
                self._measure(vector.tensors(), self.blocks.forms(vector, levels))
        else:
            full, rated = sum_scalars(slopes), {name: self._lr(name) ** 2 * slope for name, slope in slopes.items()}
            promise = Lazy(value=sum_scalars(rated))
            if self.sample is not None:  # a common rate cancels: no copies
                self._measure(directions if even else vector.tensors(), slopes if even else rated)
        ratio = self.stride.ratio
        true = self._form_of_blocks(vector) if ratio is None else promise.scale_by(ratio.to(self._device))
        return Quadratic(
            gradient=Parts(self._add_penalty(gradients)),
            operator=None,
            damping=float(self.copies[0]["damping"]),
            proposal=BlockStep(vector, true, promise, ratio, self._damping(levels), rated),
            nats=self.nats,
            loss=self.told.get("loss", math.nan),
            steps=self.clock["step"],
            bounded=bounded,
            full=full,
            options={key: min(float(group[key]) for group in self.copies) for key in self.rule.options},
            counts=counts,
            measure=partial(self._step_along, levels),
            turned=self.turned,
            layers=[block.layout.names for block in self.blocks],
            params=self.values,
            exact=self._step_on_batch,
            doubt=self.clock["doubt"],
            fallen=self.clock["fallen"],
            errors=errors,
        )

    def _directions(self, gradients: Mapping[str, Tensor]) -> Directions:
        """d by name, (G + damping I)^-1 m unless the rule shapes it, the slopes d^T m, and the damping by name."""
        steps, slopes, levels = dict[str, Tensor](), dict[str, Tensor](), dict[str, float]()
        rates = {name: self._lr(name) for name in self.groups}
        for key, block in self.blocks.all.items():
            if not self.blocks.owners.holds(key):
                continue
            means = {name: self._mean(name, gradients[name]) for name in block.layout.names if name in gradients}
            last = self.inverses.get(key) or self.blocks.last_inverted(block)
            if last is None or not means or (self.inverts and last.operator is None):
                continue
            if self.shapes:
                steps |= self._shape(key, block, last, means, gradients)
            else:
                assert last.operator is not None
                found, promised = self.blocks.direction(block, last.operator, means, rates)
                steps |= found
                slopes |= promised
            levels |= dict.fromkeys(block.layout.names, last.level)
        if not self.blocks.owners.apart:
            return steps, slopes, levels
        keys = {name: key for key, block in self.blocks.all.items() for name in block.layout.names}
        return self.blocks.owners.share_directions(gradients, steps, slopes, levels, keys)

    def _shape(
        self, key: str, block: Block, last: Inverted, means: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A block's direction as the rule shapes it."""
        penalised = self._add_penalty(gradients)
        point = BlockPoint(
            names=block.layout.names,
            kind=self.blocks.kind(block),
            mean=self.blocks.matrix(block, means),
            gradient=lambda: self.blocks.matrix(block, {name: penalised[name] for name in means}),
            inverse=last.operator,
            metric=lambda: self.blocks.operator(block),
            level=last.level,
            prepared=last.prepared,
            memory=self.blocks.of(block).get("shape", {}),
            steps=self.clock["step"],
            positions=mean_positions(self.blocks.of(block)),
            shape=block.layout.shape if block.layer is None else (),
        )
        direction, self.memories[key] = self.rule.shape(point)
        return give_back(block.layout, direction, means)

    def _mean(self, name: str, gradient: Tensor) -> Tensor:
        p, group = self.named[name], self.groups[name]
        whole = add_penalty(gradient, self.values[name], group["l2"])
        mean, self.means[name] = average_gradient(self.state.get(p, {}), whole, group["momentum"])
        return mean

    def _add_penalty(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        strengths = self.strengths()
        return Penalised(gradients, self.values, strengths) if any(strengths.values()) else gradients

    def count_signal(self, gradients: Mapping[str, Tensor]) -> None:
        """Follow how much of the gradients is signal; turn to the rule's own directions where that is little, or back.

        Turning asks for fresh statistics, roots and measurements at the next step.
        """
        if not self.rule.turns_at:
            return
        kept = {name: mean for name, mean in self.means.items() if mean}
        if not kept and not self.blocks.owners.apart:  # no momentum: nothing is known
            return
        decays = {name: float(self.groups[name]["momentum"]) for name in kept}
        whole, strengths = self._add_penalty(gradients), self.strengths()
        norms = {name: measure_norm(whole[name]) if strengths[name] else self.norms[name] for name in kept}
        sums = signal_sums(norms, kept, decays) if kept else torch.zeros(3)
        if self.blocks.owners.apart:
            sums = self.blocks.owners.near.sum(sums.double().to(self._device))
            if not bool(sums[1] > 0):
                return
        if follow_signal(self.clock, list_numbers(sums), self.rule.turns_at):
            self.clock |= {"updated": -1, "inverted": -1, "measured": -1}

    # the metric along a step

    def _measure(self, moves: Mapping[str, Tensor], promised: Mapping[str, Tensor]) -> None:
        self.stride.measure(moves, promised, self.values, self.ranks, self._penalty(moves))
        # a ratio far from what was measured falls on: ask again at the next update
        self.clock["measured"] = -1 if self.stride.falls else self.clock["step"]
        if self.shapes or self.stride.ratio is None:
            return
        measured = whole = float(self.stride.ratio * sum_scalars(promised).to(self.stride.ratio))
        # what today's inverses promise is damped, and no less than the averages alone: they need not be asked
        if not (self.clock["inverted"] == self.clock["step"] and self.stride.ratio >= 1):
            whole = float(self._promise(Parts(moves), self.strengths()))
        follow_fall(self.clock, measured, whole)

    def _promise(self, vector: Parts, levels: Mapping[str, float]) -> Tensor:
        """d^T (G + damping I) d of the blocks."""
        return sum_scalars(self.blocks.forms(vector, levels))

    def _promise_lately(self, vector: Parts, levels: Mapping[str, float]) -> Tensor:
        """The same; now and then, where a direction's length does not depend on the gradient's: it changes slowly."""
        rate = max(abs(vector.rate(name)) for name in vector)
        if self.rule.steady and (known := recent_form(self.clock, rate)) is not None:
            return torch.tensor(known, device=self._device)
        keep_form(self.clock, float(found := self._promise(vector, levels)), rate)
        return found

    def _step_along(self, levels: Mapping[str, float], vector: Vector) -> BlockStep:
        """The step with this vector: on the pass of a measurement what is measured, else in proportion to the last."""
        assert isinstance(vector, Parts)
        promise, ratio = Lazy(partial(self._promise, vector, levels)), self.stride.ratio
        if self.sample is not None:
            true = Lazy(partial(self._form_on_sample, self.sample, vector))
        else:
            true = self._form_of_blocks(vector) if ratio is None else promise.scale_by(ratio.to(self._device))
        return BlockStep(vector, true, promise, ratio, self._damping(levels))

    def _step_on_batch(self, step: Step) -> BlockStep | None:
        """The step with d^T G d as it is on its own batch; None where that cannot be known."""
        assert isinstance(step, BlockStep)
        expected = float(0.5 * self.nats * step.form())
        found = self.batch.measure(step.vector, expected)
        compare_kl(self.clock, 0.5 * float(self.nats) * found, expected, self.shapes and self.rule.steady)
        if math.isnan(found):
            return None
        return replace(step, true=Lazy(value=torch.full_like(step.form(), found)))

    def _form_of_blocks(self, vector: Parts) -> Lazy:
        """The form of the blocks, and a penalty's."""
        return Lazy(partial(self._promise, vector, self.strengths()))

    def _damping(self, levels: Mapping[str, float]) -> dict[str, float]:
        """The damping by name without a penalty, which the measured form has."""
        strengths = self.strengths()
        return {name: level - strengths[name] for name, level in levels.items()}

    def _form_on_sample(self, sample: Reading, vector: Parts) -> Tensor:
        moves = vector.tensors()
        return measure_form(sample, moves, self.values, self.ranks, self._penalty(moves))

    def _penalty(self, moves: Mapping[str, Tensor]) -> Tensor | float:
        """moves^T (l2 I) moves."""
        strengths = self.strengths()
        return sum(strengths[name] * move.square().sum() for name, move in moves.items() if strengths[name])

    def strengths(self) -> dict[str, float]:
        """The penalty l2 by name."""
        return {name: float(group["l2"]) for name, group in self.groups.items()}

    # the step

    def memory(self) -> Memory:
        """The rule's vectors."""
        held = {name: self.state.get(p, {}).get(RULE, {}) for name, p in self.named.items()}
        keys = {key for kept in held.values() for key in kept}
        return {key: Parts({name: kept[key] for name, kept in held.items() if key in kept}) for key in keys}

    def remember(self, memory: Memory, forget: bool) -> None:
        """Keep the rule's vectors for the next step. forget: zeros in their place, a fresh start."""
        for key, vector in memory.items():
            assert isinstance(vector, Parts)
            for name, part in vector.tensors().items():
                self.vectors.setdefault(name, {})[key] = torch.zeros_like(part) if forget else part

    def move(self, model: Quadratic, step: BlockStep) -> None:
        """New parameters."""
        form, vector, proposal = step.known_form(), step.vector, model.proposal.vector
        assert isinstance(proposal, Parts)
        alike = vector.parts is proposal.parts and vector.shares is proposal.shares  # only scaled
        if isinstance(model.proposal, BlockStep) and model.proposal.ratio is not None:
            self.told["excess"] = model.proposal.ratio
        self.told["rate"] = vector.length if alike else vector.norm() / proposal.norm()
        if form is not None:
            self.told["kl"] = 0.5 * self.nats * form
            if self.shapes:
                trust_form(self.clock, float(self.told["kl"]), float(self.rule.kl_bound(model)))
        self.parameters = {name: self._move_parameter(name, vector) for name in vector}

    def _move_parameter(self, name: str, vector: Parts) -> Tensor:
        """The parameter after the step."""
        p, decay = self.values[name], self.groups[name]["weight_decay"]
        start = p * (1 - self._lr(name) * decay) if decay else p
        part = vector.parts[name].to(p.dtype)
        return torch.addcmul(start, part, as_tensor_like(vector.factor(name, part), p))

    def finite(self) -> bool:
        """Whether the step and its KL are finite; entries of parameters that are not already, and stay, do no harm."""
        return all_stay_finite(self.values, self.parameters, self.told.get("kl"))

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
            write_whole(self.named[name], new)
        for name, mean in self.means.items():
            self.state[self.named[name]].update(mean)
        for name, vectors in self.vectors.items():
            self.state[self.named[name]][RULE] = vectors
        self.blocks.keep(self.inverses)
        self.blocks.keep_shapes(self.memories)
        self.blocks.fresh -= self.inverted
        self.blocks.settle()
        for group, adapted in zip(self.param_groups, self.copies, strict=True):
            group["damping"] = adapted["damping"]
        owner.update(values)
        forget_batch()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.named.values())).device

    def _lr(self, name: str) -> float:
        return float(self.groups[name]["lr"]) * self.fall
