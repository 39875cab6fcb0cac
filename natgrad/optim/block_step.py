"""The step of a metric in blocks: a pass's statistics, damped inverses, the direction of each block, its length.

When statistics and inverses are due is the pace's matter, how far the quadratic model is trusted the length's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.constants import (
    BEFORE,
    BLIND,
    EXAMPLES_PART,
    FALLS_TO,
    FEWEST_EXAMPLES,
    GOLDEN,
    KEEPS,
    LARGEST_RATIO,
    LONGEST,
    MARGIN,
    MARGIN_KEEPS,
    RAMP,
    TURNED,
    UNKNOWN,
    YOUNG,
)
from natgrad.ground.states import amend
from natgrad.ground.typed_torch import as_tensor_like, list_numbers, measure_norms, read_scalars, torch_plain
from natgrad.ground.whole_tensors import WholeTensors
from natgrad.layers import Seen
from natgrad.optim.blocks import (
    Averages,
    BatchUpdate,
    KnownScale,
    Penalised,
    sum_scalars,
)
from natgrad.optim.checks import check_statistics
from natgrad.optim.guard import least_damping, stay_finite, watch_late
from natgrad.optim.objective import BatchForm, PooledLoss
from natgrad.optim.passes import Loss
from natgrad.optim.processes import Processes, describe_groups
from natgrad.optim.reading import Reading
from natgrad.optim.stacks import StackGradient, arrange, remember, split_stack, stack_gradients
from natgrad.optim.state import Block, Length, Noise, OwnGradients, Pace, Stack, Stacks, State
from natgrad.optim.step import Batch, Choices, Evidence, Work
from natgrad.rules import (
    BlockPoint,
    BlockStack,
    BlockStep,
    ErrorScale,
    LayerFacts,
    Lazy,
    Memory,
    Objective,
    Parts,
    Products,
    Quadratic,
    RunFacts,
    Step,
    SystemFacts,
    Vector,
    inner_products,
)

Settings = Mapping[str, Mapping[str, Any]]
"""The parameter groups' numbers by parameter: lr, momentum, damping, weight_decay, l2 and the rule's own."""


@dataclass(frozen=True)
class BlockEvidence(Evidence):
    """What a pass of the user's told of a metric in blocks."""

    averages: Averages  # the structure of the blocks, the parameters, and who owns which block
    gradients: dict[str, Tensor]  # as backward passes left them, dense, by name
    losses: Sequence[Loss]  # those that they came from, in units of their means
    nats: Any  # nats per example in one unit of the mean loss
    scale: float  # what the gradients were multiplied by, under reduction='sum' or to maximise; 0 stands for 1
    update: BatchUpdate  # what the passes made of the averages
    values: WholeTensors  # the parameters, whole
    settings: Settings  # of the parameter groups
    late: bool  # True if statistics were due and none was read
    own: OwnGradients  # what `opt.loss` put into the gradients
    # opens the loss at other parameters, for whoever asks; raises ValueError where it cannot be had
    trial: Callable[[object], AbstractContextManager[Any]]
    batch: BatchForm  # measures steps on the batch itself
    examples: Callable[[], int]  # counts the batch's
    # ValueError where a gradient that the statistics lack comes from the outputs all the same
    check_followed: Callable[[], None]

    def pool(self, choices: Choices, state: State) -> Batch:
        """The batch of all processes; without a number for a loss where a layer's inputs were far too large."""
        losses, raw = self.losses, self.gradients
        if self.update.far or (self.update.bad and not self.update.blocks):  # a first pass that came to nothing
            losses = [amend(loss, value=loss.value * math.nan) for loss in losses]
        norms = dict(zip(raw, measure_norms(list(raw.values())), strict=True))
        described = partial(self.describe_settings, choices)
        loss, nats, scale, norm = choices.processes.pool_losses(losses, self.nats, self.scale, norms, described)
        if not (isinstance(scale, float) and scale == 1):
            raw = {name: gradient / scale for name, gradient in raw.items()}
            norms, norm = {n: size / abs(scale) for n, size in norms.items()}, norm / abs(scale)
        damping = next(iter(self.settings.values()))["damping"]
        return Batch(raw, norm, loss, self.update.guard, damping, cuts=True, norms=norms, nats=nats, scale=scale)

    def describe_settings(self, choices: Choices) -> str:
        """What must be alike on all processes."""
        groups = {id(group): group for group in self.settings.values()}.values()
        return describe_groups(groups, "lr", "momentum", "weight_decay", "l2", *choices.rule.options)

    def open(self, choices: Choices, state: State, batch: Batch) -> BlockWork:
        """Statistics -> blocks -> damped inverses, when they are due."""
        update = self.update
        check_statistics(not update.blocks)
        watch_late(state.guard.late + 1 if self.late else 0, update.bad)
        outside, pace = state.outside, state.pace
        if update.taken:
            outside = outside.measure(
                self.own,
                batch.gradients if batch.uncut is None else batch.uncut,
                self.values,
                [block.layout.names for block in update.blocks.values()],
                len([loss for loss in self.losses if loss.rows]),
                float(batch.scale),
                choices.processes,
                self.check_followed,
            )
            pace = amend(pace, updated=state.step)
        known = {"hearing": update.hearing, "outside": outside, "pace": pace, "guard": batch.guard}
        now = amend(state, blocks=update.blocks, **known)
        work, updated = BlockWork(choices, now, batch, self), pace.updated > pace.inverted
        work.invert(updated and is_due(pace.inverted, now.step, now.is_turned, choices.invert_every))
        return work

    def leave(self, choices: Choices, state: State) -> State:
        """What the passes told of the layers is kept."""
        update = self.update.fail()
        # skipped steps are counted by themselves
        guard = amend(update.guard, late=state.guard.late if self.late else 0)
        pace = amend(state.pace, updated=state.step) if update.taken else state.pace
        return amend(state, blocks=update.blocks, hearing=update.hearing, guard=guard, pace=pace)


# inverses, direction, length


class BlockWork(Work):
    """One step of a metric in blocks.

    Attributes:
        gradients: Of the loss, with those of a penalty.
        stacks: The gradients and their new running means, blocks that are alike together.
        lengths: By parameter, what its direction is multiplied by; None: 1 for all.
        slopes: g . d of each block, at a rate of 1, by its parameters' names; None where the rule did not say.
        vectors: What the rule remembers, by parameter.
        signal: |m|^2, |g|^2, and what |m|^2 would be on average for gradients that are noise alone.
    """

    def __init__(self, choices: Choices, state: State, batch: Batch, evidence: BlockEvidence) -> None:
        super().__init__(choices, state, batch, evidence.examples)
        self.evidence, self.averages, self.sample = evidence, evidence.averages, evidence.update.sample
        self.settings, self.owners, self.processes = evidence.settings, evidence.averages.owners, choices.processes
        self.values, self.device = evidence.values, batch.norm.device
        # a rule that turns takes the plain damped inverses until then
        self.turned = self.rule.turns_at is not None and state.is_turned
        self.shapes = self.rule.shapes and (self.rule.turns_at is None or self.turned)
        self.inverts = self.rule.needs_inverse or not self.shapes
        self.fall = self.rule.rate_at(state.step, state.noise.turned)
        self.strengths = {name: float(group["l2"]) for name, group in self.settings.items()}
        self.rates = {name: float(group["lr"]) * self.fall for name, group in self.settings.items()}
        self.momenta = {name: float(group["momentum"]) for name, group in self.settings.items()}
        self.gradients: Mapping[str, Tensor] = batch.gradients
        if any(self.strengths.values()):
            self.gradients = Penalised(batch.gradients, self.values, self.strengths)
        self.stacks, self.vectors = list[StackGradient](), dict(state.vectors)
        self.lengths: Mapping[str, float] | None = None
        self.slopes = dict[tuple[str, ...], float | None]()
        self.signal = [0.0, 0.0, 0.0]

    @cached_property
    def errors(self) -> ErrorScale:
        """How far a regression's targets lie away."""
        errors, loss = self.state.hearing.errors, self.loss
        return errors.scale(0.0 if loss is None else loss) if errors else ErrorScale()

    # 1 inverses

    def invert(self, due: bool) -> None:
        """Damped inverses of today's averages: of all blocks, or of those alone that never had one."""
        state, loss = self.state, self.loss
        keys = {key for key, block in state.blocks.items() if due or block.fresh}
        if not keys:
            return
        if state.hearing.errors and loss is not None:
            self.state = amend(state, hearing=amend(state.hearing, error=max(state.hearing.error, loss)))
        shaper = self.rule if self.shapes else None
        level = self.damp() if self.choices.needs_derivatives(self.turned) else None
        blocks, failures = self.averages.invert(state.blocks, level, self.inverts, shaper, keys)
        guard = amend(state.guard, failures=state.guard.failures + failures)
        pace = amend(state.pace, inverted=state.step) if due else state.pace
        self.state = amend(self.state, blocks=blocks, guard=guard, pace=pace)

    def damp(self) -> Callable[[Block], float]:
        """The damping of each block, by today's averages, whose eigenvalues are read where it asks for them."""
        blocks = self.state.blocks
        means = cache(partial(self.averages.mean_eigenvalues, blocks))
        mean = cache(lambda: self.averages.mean_over_blocks(blocks, means()))
        if self.owners.apart:
            mean()  # all processes together, before each looks at its own blocks
        return partial(self.level, means, mean, self.batch.list_norms())

    def level(
        self,
        means: Callable[[], Mapping[str, float]],
        mean: Callable[[], float],
        norms: Mapping[str, float],
        block: Block,
    ) -> float:
        """The damping of a block: the strategy's, a penalty's, and for a part of the loss that the metric lacks."""
        damping, hearing, outside = self.choices.damping, self.state.hearing, self.state.outside
        name, scale = block.layout.names[0], KnownScale(self.batch.nats, mean)
        number = float(self.settings[name]["damping"])
        own = KnownScale(self.batch.nats, lambda: means()[block.key]) if damping.per_block else scale
        level = damping.amount(number, own) + self.strengths[name]
        if damping.of_whole:
            # curvatures of the layers before a regression's last ones grow with the square of its unit
            unit = hearing.errors.scale(hearing.error) if hearing.errors else ErrorScale()
            level += damping.of_whole * number * mean() / unit.of(name) ** 2
        if name in outside.levels:
            level += outside.damping(name, damping.amount(number, scale))
        return max(level, least_damping([norms[name] for name in block.layout.names if name in norms]))

    # 2 direction

    def propose(self) -> Quadratic | None:
        """The quadratic model with the blocks' directions as its proposal; None where no block can be solved yet."""
        self.values.gather()
        directions, products, levels = self.directions()
        if not directions:
            return None
        vector, full = Parts(directions, {name: -self.rates[name] for name in directions}, shares=self.lengths), None
        if self.shapes:
            promise, slope = Lazy(partial(self.promise, vector, levels)), self.slope_of_blocks()
            if self.sample is not None:
                forms = self.averages.forms(self.state.blocks, vector, levels)
                self.measure(vector.tensors(), dict(zip(forms, read_scalars(forms.values()), strict=True)))
            proposal = BlockStep(vector, promise, promise, None, {}, slope=slope)
        else:
            self.follow_signal()
            full = sum(known.promise for known in products.values())
            rated = {name: known.scale_by(-self.rates[name]) for name, known in products.items()}
            even = len({self.rates[name] for name in directions}) == 1
            if self.sample is not None:  # a common rate cancels: no copies
                promised = {name: known.promise for name, known in (products if even else rated).items()}
                self.measure(directions if even else vector.tensors(), promised)
            proposal = BlockStep.of_products(vector, rated)
        errors, excess, settings = self.errors, self.state.length.excess, self.settings.values()
        true = self.form_of_blocks(vector) if excess is None else proposal.promise.scale_by(excess)
        return Quadratic(
            gradient=Parts(self.gradients),
            operator=None,
            damping=float(next(iter(settings))["damping"]),
            proposal=amend(proposal, true=true, ratio=excess, levels=self.without_penalty(levels)),
            nats=self.batch.nats,
            loss=math.nan if self.loss is None else self.loss,
            run=RunFacts(
                self.state.step,
                self.choices.bounded,
                {key: min(float(group[key]) for group in settings) for key in self.rule.options},
                lambda: self.counts,
                self.turned,
                errors,
            ),
            system=SystemFacts(full),
            layers=LayerFacts(
                names=[block.layout.names for block in self.state.blocks.values()],
                outputs=[block.outputs for block in self.state.blocks.values()],
                params=self.values,
                measure=partial(self.step_along, levels),
                exact=self.step_on_batch,
                doubt=self.state.length.doubt if self.choices.needs_derivatives(self.turned) else BLIND,
                fallen=self.state.length.fallen,
            ),
        )

    def directions(self) -> tuple[dict[str, Tensor], dict[str, Products], dict[str, float]]:
        """d by name, (G + damping I)^-1 m unless the rule shapes it, what is known of it, and the damping by name."""
        gradients, named = self.batch.gradients, self.averages.named
        known = (self.state.stacks, self.state.blocks, gradients, self.momenta, self.is_ready, self.shapes, named)
        blocks, stacks = arrange(*known)
        self.stacks = stack_gradients(stacks.parts, self.gradients, self.momenta, named)
        steps, products, parts = self.shape_directions() if self.shapes else self.solve_directions()
        levels = dict(stacks.levels)
        if len(parts) == len(stacks.parts):
            stacks = amend(stacks, parts=tuple(parts))
        else:  # what the rule remembers is not alike within a stack
            stacks = Stacks(rest=(*parts, *stacks.rest))
        self.state = amend(self.state, blocks=blocks, stacks=stacks)
        if not self.owners.apart:
            return steps, products, levels
        keys = {name: key for key, block in blocks.items() for name in block.layout.names}
        return self.owners.share_directions(gradients, steps, products, levels, keys)

    def is_ready(self, key: str, block: Block) -> bool:
        """Whether a block has what its direction takes, and is this process's."""
        return block.level is not None and self.owners.holds(key) and (block.inverse is not None or not self.inverts)

    def solve_directions(self) -> tuple[dict[str, Tensor], dict[str, Products], list[Stack]]:
        """d = (G + damping I)^-1 m by name, what is known of it by block, and the stacks after it.

        Products are read at once: of a block whose parameters share a rate and a momentum, else of each parameter.
        """
        steps, firsts, tables = dict[str, Tensor](), list[tuple[str, int]](), list[Tensor]()
        for stack in self.stacks:
            known, solved = stack.after, self.averages.solve(stack.after, stack.mean)
            parts = split_stack(known, solved)
            steps |= parts
            if known.even and all(len({self.rates[n] for n in block.layout.names}) == 1 for block in known.blocks):
                names = [block.layout.names[0] for block in known.blocks]
                triples = [(stack.gradient, stack.mean, solved)]
            else:
                names, split = list(parts), [*(split_stack(known, t) for t in (stack.gradient, stack.mean)), parts]
                triples = [tuple(side[n].unsqueeze(0) for side in split) for n in names]
            tables += [inner_products([(g, g), (m, m), (g, d), (m, d), (d, d)]) for g, m, d in triples]
            firsts += [(name, known.counts.get(name, 0)) for name in names]
        numbers = list_numbers(torch.cat([table.to(self.device) for table in tables])) if tables else []
        products = dict[str, Products]()
        for (name, count), (square, mean, slope, promise, size) in zip(firsts, numbers, strict=True):
            products[name] = Products(promise, slope, size)
            if decay := self.momenta[name]:  # without momentum nothing is known of the noise
                signal = (mean, square, square * noise_in_mean(decay, count))
                self.signal = [before + now for before, now in zip(self.signal, signal, strict=True)]
        return steps, products, [stack.after for stack in self.stacks]

    def shape_directions(self) -> tuple[dict[str, Tensor], dict[str, Products], list[Stack]]:
        """The rule's directions by name, nothing that is known of them, and the stacks after them."""
        steps, parts, examples = dict[str, Tensor](), list[Stack](), float(self.counts.get("examples", 0))
        stacks = [self.view(stack, examples) for stack in self.stacks]
        lengths = dict[str, float]()
        for stack, shaped in zip(self.stacks, self.rule.shape_stacks(stacks) if stacks else (), strict=True):
            steps |= split_stack(stack.after, shaped.directions)
            names = [tuple(n for n in block.layout.names if n in steps) for block in stack.after.blocks]
            parts += remember(stack.after, shaped.memory)
            for own, length in zip(names, shaped.lengths or [1.0] * len(names), strict=True):
                lengths |= dict.fromkeys(own, length)
            self.slopes |= dict(zip(names, shaped.slopes or [None] * len(names), strict=True))
        if self.owners.apart:  # others get them at their lengths
            steps = Parts(steps, shares=lengths).tensors() if steps else steps
        else:
            self.lengths = lengths
        return steps, {}, parts

    def view(self, stack: StackGradient, examples: float) -> BlockStack:
        """A stack as a rule sees it that shapes directions."""
        state, blocks, known = self.state, stack.after.blocks, stack.after
        units = [max(map(self.errors.of, block.layout.names)) for block in blocks]
        shape = blocks[0].layout.shape if blocks[0].layer is None else ()
        renewed = state.pace.inverted == state.step

        def list_points() -> list[BlockPoint]:
            return [
                BlockPoint(
                    names=block.layout.names,
                    kind=self.averages.kind(block),
                    mean=stack.mean[i],
                    gradient=partial(stack.gradient.select, 0, i),
                    inverse=block.inverse,
                    metric=partial(self.averages.operator, block),
                    level=0.0 if block.level is None else block.level,
                    prepared=block.prepared,
                    memory={name: tensor[i] for name, tensor in known.memory.items()},
                    steps=state.step,
                    positions=block.mean_positions,
                    shape=shape,
                    values=partial(self.matrix_of_values, block),
                    renewed=renewed,
                    examples=examples,
                    unit=units[i],
                )
                for i, block in enumerate(blocks)
            ]

        return BlockStack(
            stack.mean,
            stack.gradient,
            known.prepared,
            known.memory,
            shape,
            units,
            state.step,
            renewed,
            examples,
            list_points,
        )

    def slope_of_blocks(self) -> Lazy | None:
        """g . d for the shaped directions; None where a block has several rates, or nobody said it."""
        slopes = [(slope, {self.rates[name] for name in names}) for names, slope in self.slopes.items()]
        if self.owners.apart or any(slope is None or len(rates) > 1 for slope, rates in slopes):
            return None
        return Lazy(value=-sum(slope * rates.pop() for slope, rates in slopes if slope is not None))

    def matrix_of_values(self, block: Block) -> Tensor:
        """A block's parameters as its matrix; those without a gradient count as zero."""
        names = [name for name in block.layout.names if name in self.batch.gradients]
        return self.averages.matrix(block, {name: self.values[name].detach() for name in names})

    def follow_signal(self) -> None:
        """Follow how much of the gradients is signal; turn to the rule's own directions where that is little."""
        sums = self.signal
        if self.owners.apart:
            sums = list_numbers(self.processes.sum(torch.tensor(sums, dtype=torch.float64, device=self.device)))
        # a gradient that was cut is none
        if not self.rule.turns_at or self.batch.uncut is not None or not sums[1] > 0:
            return
        noise, is_low = follow_signal(self.state.noise, self.state.step, sums, self.rule.turns_at)
        self.state = amend(self.state, noise=noise)
        if is_low:
            self.state = turn(self.state)

    # the metric along a vector

    def measure(self, moves: Mapping[str, Tensor], promised: Mapping[str, float]) -> None:
        """Measure the metric along the proposal on the pass of the step."""
        assert self.sample is not None
        step, pace = self.state.step, self.state.pace
        length = measure_excess(
            self.state.length, self.sample, moves, promised, self.values, self.processes, self.penalty(moves)
        )
        # an excess far from what was measured falls on: ask again at the next update
        pace = amend(pace, measured=-1 if length.falls else step)
        if not self.shapes and length.excess is not None:
            measured = averaged = length.excess * sum(promised.values())
            # what today's inverses promise is damped, and no less than the averages alone: they need not be asked
            if not (pace.inverted == step and length.excess >= 1.0):
                averaged = float(self.promise(Parts(moves), self.strengths))
            length = follow_fall(length, measured, averaged)
        self.state = amend(self.state, length=length, pace=pace)

    def promise(self, vector: Parts, levels: Mapping[str, float]) -> Tensor:
        """d^T (G + damping I) d of the blocks."""
        return sum_scalars(self.averages.forms(self.state.blocks, vector, levels))

    def step_along(self, levels: Mapping[str, float], vector: Vector) -> BlockStep:
        """The step with this vector: on the pass of a measurement what is measured, else in proportion to the last."""
        assert isinstance(vector, Parts)
        promise, excess = Lazy(partial(self.promise, vector, levels)), self.state.length.excess
        if self.sample is not None:
            true = Lazy(partial(self.form_on_sample, self.sample, vector))
        else:
            true = self.form_of_blocks(vector) if excess is None else promise.scale_by(excess)
        return BlockStep(vector, true, promise, excess, self.without_penalty(levels))

    def step_on_batch(self, step: Step) -> BlockStep | None:
        """The step with d^T G d as it is on its own batch; None where that cannot be known."""
        assert isinstance(step, BlockStep)
        expected = float(0.5 * self.batch.nats * step.form())
        form = self.evidence.batch.measure(step.vector, expected)
        nats = 0.5 * float(self.batch.nats) * form
        length = compare_kl(self.state.length, self.state.step, nats, expected)
        self.state = amend(self.state, length=length)
        return None if math.isnan(form) else amend(step, true=Lazy(value=form))

    def form_of_blocks(self, vector: Parts) -> Lazy:
        """The form of the blocks, and a penalty's."""
        return Lazy(partial(self.promise, vector, self.strengths))

    def form_on_sample(self, sample: Reading, vector: Parts) -> Tensor:
        """The form on the sample of a pass, and a penalty's."""
        moves = vector.tensors()
        form, _ = pool_form(sample, moves, {}, self.values, self.processes)
        return form / sample.all_rows + self.penalty(moves)

    def without_penalty(self, levels: Mapping[str, float]) -> dict[str, float]:
        """The damping by name without a penalty, which the measured form has."""
        return {name: level - self.strengths[name] for name, level in levels.items()}

    def penalty(self, moves: Mapping[str, Tensor]) -> Tensor | float:
        """moves^T (l2 I) moves."""
        strengths = self.strengths
        return sum(strengths[name] * move.square().sum() for name, move in moves.items() if strengths[name])

    # 3 length, 4 damping

    @contextmanager
    def open_losses(self, model: Quadratic, judged: bool) -> Generator[tuple[Quadratic, PooledLoss | None]]:
        """The loss of this batch at other parameters, where somebody asks for it."""
        if not (judged or self.rule.needs_loss):
            yield model, None
            return
        processes, losses = self.processes, self.evidence.losses
        rows = sum(loss.weight for loss in losses)
        with self.evidence.trial(self.rule if self.rule.needs_loss else self.choices.damping) as objective:
            before = objective.before if self.loss is None else self.loss
            loss_at = PooledLoss(objective, rows, processes, before, self.values, self.strengths, self.state.outside)
            yield amend(model, loss=before), loss_at

    def compare_losses(self, model: Quadratic, step: Step, loss_at: Objective | None) -> tuple[float, bool]:
        """True over predicted change; a step that raised the loss, or lost it, is refused."""
        assert isinstance(loss_at, PooledLoss)
        change = loss_at.change(step.vector)
        ratio, refused = self.find_ratio(model, step, change)
        return ratio, refused or change > 0

    def settle(self, model: Quadratic, step: Step, memory: Memory, ratio: float | None, refused: bool) -> bool:
        """The step, unless it is refused, and the damping of the next one."""
        if ratio is not None:
            self.report["ratio"] = ratio
            self.adapt(ratio, refused)
        self.remember(memory, forget=refused)
        if not isinstance(step, BlockStep):
            raise TypeError(f"rule {self.rule} returned {step!r}, expected one made of the model's: proposal, along")
        if not refused:
            self.move(model, step)
        if self.rule.turns_at and not self.turned and self.state.noise.turned < 0 and self.rule.turns_after(model):
            self.state = turn(self.state)
        return True

    def adapt(self, ratio: float, refused: bool) -> None:
        """The damping of the next steps. After a refusal new inverses have it, and are judged, at once."""
        update = self.choices.damping.update
        self.dampings = {n: update(float(group["damping"]), ratio) for n, group in self.settings.items()}
        state = self.state
        self.state = amend(state, pace=amend(state.pace, judged=state.step))
        if refused:
            pace = amend(state.pace, judged=-self.choices.judged_every, inverted=-1)
            guard = amend(state.guard, refused=state.guard.refused + 1)
            self.state = amend(state, pace=pace, guard=guard)

    def memory(self) -> Memory:
        """The rule's vectors, of the parameters that have a gradient."""
        held = {name: vectors for name, vectors in self.state.vectors.items() if name in self.batch.gradients}
        keys = {key for vectors in held.values() for key in vectors}
        return {key: Parts({name: vectors[key] for name, vectors in held.items() if key in vectors}) for key in keys}

    def remember(self, memory: Memory, forget: bool) -> None:
        """Keep the rule's vectors for the next step. forget: zeros in their place, a fresh start."""
        fresh = dict[str, dict[str, Tensor]]()
        for key, vector in memory.items():
            assert isinstance(vector, Parts)
            for name, part in vector.tensors().items():
                fresh.setdefault(name, {})[key] = torch.zeros_like(part) if forget else part
        self.vectors |= fresh

    def move(self, model: Quadratic, step: BlockStep) -> None:
        """New parameters, and what is told of the step."""
        assert isinstance(model.proposal, BlockStep)
        form, vector, proposal, report = step.known_form(), step.vector, model.proposal.vector, self.report
        alike = vector.parts is proposal.parts and vector.shares is proposal.shares  # only scaled
        if model.proposal.ratio is not None:
            report["excess"] = model.proposal.ratio
        report["cuts"] = model.cuts
        report["rate"] = vector.length if alike else step.norm() / model.proposal.norm()
        if form is not None:
            report["kl"] = 0.5 * self.batch.nats * form
        starts = [self.values[name] for name in vector]
        decays = [self.rates[name] * self.settings[name]["weight_decay"] for name in vector]
        if any(decays):
            starts = [start * (1 - decay) for start, decay in zip(starts, decays, strict=True)]
        if starts:  # a rule that accepts nothing moves nothing
            self.moved = dict(zip(vector, torch_plain._foreach_add(starts, vector.list_tensors(starts)), strict=True))

    def is_sound(self) -> bool:
        """Whether no parameter becomes NaN or infinite, and the length of the step is a number."""
        return stay_finite(self.values, self.moved, self.report.get("kl", 0.0))

    def finish(self) -> State:
        """The state after a step that is taken."""
        now = self.state
        late = now.guard.late + 1 if self.evidence.late else 0
        guard = now.guard.follow_step(self.loss, taken=True, late=late, unmoved=self.count_unmoved())
        return amend(now, step=now.step + 1, vectors=self.vectors, guard=guard)

    def count_unmoved(self) -> int:
        """Steps in a row that a loss held still: read only where a rule goes by trial losses, or a share of nothing."""
        guard, rate = self.state.guard, self.report.get("rate")
        if rate is None:  # nothing was proposed, or the damping refused the step
            return guard.unmoved
        if not (self.rule.uses_loss or self.loss == 0):
            return 0
        return guard.count_unmoved(float(rate), bool(self.batch.norm > 0))


def noise_in_mean(decay: float, count: int) -> float:
    """E|m|^2 / E|g|^2 for gradients g that are noise alone, and their mean m, corrected for its start.

    A mean over k gradients with weights in proportion to b^i has (1 - b) / (1 + b) (1 + b^k) / (1 - b^k) of one
    gradient's variance.
    """
    faded = decay**count
    return (1 - decay) / (1 + decay) * (1 + faded) / (1 - faded)


# when statistics, inverses and measurements are due


def find_interval(step: int, turned: bool) -> int:
    """Steps between two updates: one at first, one more after each `RAMP` steps; twice that once a rule has turned."""
    return (1 + step // RAMP) * (TURNED if turned else 1)


def is_due(last: int, step: int, turned: bool, every: int) -> bool:
    """Whether it is time for what was done last at step `last`: after the interval, at most `every` steps apart.

    Intervals that grow no more are shortened by a step now and then, so that they do not keep in step with tasks,
    experts or losses that take turns.
    """
    interval = find_interval(step, turned)
    return step - last >= (every - vary_interval(last, every) if interval >= every else interval)


def vary_interval(step: int, every: int) -> int:
    """0, 1 or 2, by the fractional part of a multiple of the golden ratio; 0 for every = 1."""
    return int(min(every, 3) * (step * GOLDEN % 1)) if every > 1 and step > 0 else 0


def part_of_rows(pace: Pace, step: int, turned: bool) -> float:
    """The part of the rows of a pass that an update needs: less where updates come sooner than they are due.

    Averages over as many more passes are as sure with as many fewer rows of each.
    """
    since = step - pace.updated if pace.updated >= 0 else LONGEST
    return min(1.0, since / min(LONGEST, find_interval(step, turned)))


# lengths


def is_due_to_measure(pace: Pace, step: int, every: int) -> bool:
    """Whether a step's length is to be measured: at the first steps, then ever more seldom, at most `every` apart."""
    return step - pace.measured >= min(every, max(1, step // BEFORE))


def follow_fall(length: Length, measured: float, averaged: float) -> Length:
    """Note how far d^T G d of a pass has fallen below that of the running averages, which forget slowly."""
    known = math.isfinite(measured) and math.isfinite(averaged) and measured > 0 and averaged > 0
    return amend(length, fallen=min(1.0, measured / averaged) if known else 1.0)


def compare_kl(length: Length, step: int, nats: float, expected: float) -> Length:
    """Learn from a step that was measured on its own batch how far estimates may be off.

    nats: how far the step moves, NaN where that could not be measured.
    """
    length = amend(length, compared=step)
    if not math.isfinite(nats) or not expected > 0:
        return length
    past = MARGIN if length.doubt == UNKNOWN else length.doubt
    return amend(length, doubt=max(MARGIN * max(nats / expected, 1.0), MARGIN_KEEPS * past))


def is_watched(length: Length, step: int) -> bool:
    """Whether steps were near their bound lately, so that the next may have to be measured."""
    return step - length.compared < LONGEST


# noise


def turn(state: State) -> State:
    """From the next step on directions are the rule's own: it asks for fresh statistics, roots and measurements."""
    pace = amend(state.pace, updated=-1, inverted=-1, measured=-1)
    return amend(state, noise=amend(state.noise, turned=state.step), pace=pace)


def follow_signal(noise: Noise, step: int, sums: Sequence[float], least: float) -> tuple[Noise, bool]:
    """Count one step's |m|^2, |g|^2 and noise, and say whether the share of signal is low."""
    mean, single, chance = (KEEPS * old + (1 - KEEPS) * now for old, now in zip(noise.signal, sums, strict=True))
    noise = amend(noise, signal=(mean, single, chance))
    return noise, step + 1 >= YOUNG and noise.share < least


# how far the quadratic model is trusted


def measure_excess(
    length: Length,
    sample: Reading,
    steps: Mapping[str, Tensor],
    promised: Mapping[str, float],
    named: Mapping[str, Tensor],
    processes: Processes,
    penalty: Tensor | float = 0.0,
) -> Length:
    """The ratio of the true d^T G d to the d^T m that a block-diagonal metric promises for d = G~^-1 m, measured anew.

    Blocks leave out what layers do to each other, and factors what inputs and derivatives have in common: on
    classifiers and autoencoders the true form was .2 to 190 times the promised one, and not the same at the end as at
    the start. The minimum of the quadratic model along d is at m^T d / d^T G d = 1 / excess. A form that is not finite
    makes the steps from here on shorter by a factor of ten.

    sample: a part of the step's pass. steps: d, by name. promised: the steps' d^T m, by parameter as they are. penalty:
    what the form has besides the metric.
    """
    pooled, promise = pool_form(sample, steps, promised, named, processes)
    form, before = float(pooled + sample.all_rows * penalty), length.excess
    last = 1.0 if before is None else before
    if not promise > 0:  # derivatives that vanish in the dtype at hand, steps of length 0: nothing was measured
        return amend(length, excess=min(last, LARGEST_RATIO), falls=False)
    fresh, falls = form / promise, before is not None and form / promise < FALLS_TO**2 * before
    if before is not None and fresh < FALLS_TO * before:
        # a few examples carry the metric of a network that is nearly right, and a pass may miss them
        fresh = FALLS_TO * before
    if not math.isfinite(fresh):
        fresh = 10 * max(last, 1.0)
    return amend(length, excess=min(last if form == 0 else fresh, LARGEST_RATIO), falls=falls)


def pool_form(
    sample: Reading,
    steps: Mapping[str, Tensor],
    promised: Mapping[str, float],
    named: Mapping[str, Tensor],
    processes: Processes,
) -> tuple[Tensor, float]:
    """step^T G step, and what was promised of the parameters that a process's sample covers; times the rows of all."""
    like, share = next(iter(steps.values())), sample.share
    squares, sums, names = squares_and_sums(sample, steps, named)
    covered = torch.tensor([name in names for name in promised], dtype=like.dtype, device=like.device)
    sums = torch.stack([as_tensor_like(slope, like) for slope in sums]) if sums else like.new_zeros(0)
    totals = processes.sum(torch.cat([share * as_tensor_like(squares, like).reshape(1), share**0.5 * sums, covered]))
    form = totals[0] + totals[1 : 1 + len(sums)].square().sum()
    parts = zip(promised.values(), list_numbers(totals[1 + len(sums) :]) if promised else [], strict=True)
    return form, sample.all_rows * sum(value for value, processes in parts if processes > 0)


def sample_examples(reading: Reading) -> Reading:
    """A part of the examples, weighing as much as all: their memory outlives the backward pass.

    With several processes the same examples as one process would take of the joined batch, whoever has them.

    Parameters without a layer keep their scores, which are sums over examples.
    """
    examples, span = min((seen.examples for seen in reading.apart), default=0), reading.span
    size, joint_size, total = min(examples, max(FEWEST_EXAMPLES, examples // EXAMPLES_PART)), 0, 0
    if span is None or not span.count or examples % span.count:
        joint_size, total = size, examples
    else:
        size, joint_size, total = span.count_kept(examples // span.count, FEWEST_EXAMPLES, EXAMPLES_PART)
    layers = list[Seen]()
    for seen in reading.apart:
        if seen.examples % examples == 0:  # rows of examples lie side by side; else the layer counts as unseen
            layers.append(seen.take(slice(seen.examples // examples * size), (total / joint_size) ** 0.5))
    return Reading([], {}, reading.rows, layers, reading.scores, span=span)


def squares_and_sums(
    reading: Reading, steps: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> tuple[Tensor | float, list[Tensor], list[str]]:
    """sum_i E[(score_i^T step)^2] over the layers, the other parameters' score^T step per cotangent, and all names.

    score_i^T step over all layers of an example together, from the statistics' outer products, which are never written
    out. The expectation over labels of the square of summed scores is the sum of the squares. 0 if nothing moved that
    was seen.
    """
    layers = [seen for seen in reading.apart if any(name in steps for name in seen.layer.layout.names)]
    layers = [seen for seen in layers if len(seen.deltas) == len(layers[0].deltas)]
    squares, examples = 0.0, min((seen.examples for seen in layers), default=0)
    if examples:  # else other processes have those that are measured
        slopes = [slopes_of(seen, steps, named, examples) for seen in layers]
        squares = torch.stack(slopes).sum(0).square().sum()
    names = [name for seen in layers for name in seen.layer.layout.names]
    sums, like = list[Tensor](), next(iter(steps.values()))
    for scores in reading.scores:
        rest = [(score * steps[name]).sum() for name, score in scores.items() if name in steps and name not in names]
        sums.append(torch.stack(rest).sum() if rest else like.new_zeros(()))
    return squares, sums, names + [name for scores in reading.scores[:1] for name in scores]


def slopes_of(seen: Seen, steps: Mapping[str, Tensor], named: Mapping[str, Tensor], examples: int) -> Tensor:
    """score_i^T step of one layer, (cotangents, examples)."""
    layout, dtype = seen.layer.layout, seen.deltas[0].dtype
    parts = {n: (steps[n] if n in steps else torch.zeros_like(named[n])).to(dtype) for n in layout.names}
    return seen.slopes(layout.join(parts), examples)
