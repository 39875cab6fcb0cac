"""Blocks of equal shape as one stack with a leading axis: their gradients, running means, and what a rule remembers.

All that is done at every step is done for a stack at once. Blocks are arranged into stacks when statistics or inverses
are new, or other parameters have gradients than at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.stacks import stack_tensors
from natgrad.ground.states import amend
from natgrad.ground.typed_torch import torch_plain
from natgrad.ground.whole_tensors import zeros_whole
from natgrad.operators import split_operator, stack_operators
from natgrad.optim.state import Block, Place, Stack, Stacks


@dataclass(frozen=True)
class StackGradient:
    """A stack with the gradients of a step, (k, groups, outputs, columns)."""

    gradient: Tensor  # this step's
    mean: Tensor  # the running mean with it, corrected for its start
    after: Stack  # the stack with that mean


# which blocks are alike


def arrange(
    stacks: Stacks,
    blocks: Mapping[str, Block],
    gradients: Mapping[str, Tensor],
    decays: Mapping[str, float],
    is_ready: Callable[[str, Block], bool],
    shapes: bool,
    named: Mapping[str, Tensor],
) -> tuple[Mapping[str, Block], Stacks]:
    """The blocks in stacks, and those of which nothing can be done at this step apart; as they are where they fit.

    is_ready: True for a block that takes part. shapes: True to keep those apart of which a rule prepared or remembers
    something else.
    """
    key = (tuple(gradients), dict(decays), shapes)
    if stacks.blocks is blocks and stacks.key == key:
        return blocks, stacks
    before, groups, rest = stacks.by_key(), dict[Any, list[Stack]](), list[Stack]()
    means = cache(lambda: {name: part for single in before.values() for name, part in single.list_means()})
    for block in blocks.values():
        single, names = before.get(block.key), tuple(name for name in block.layout.names if name in gradients)
        if single is None or single.blocks[0].layout != block.layout:  # its parameters may have been another block's
            single = Stack((block,)).join_means(means(), named)
        ages = {(single.counts.get(name, 0), decays[name]) for name in names}
        even = len(ages) == 1 and len(names) == len(block.layout.names)
        single = amend(single, blocks=(block,), names=names, even=even)
        if not names or not is_ready(block.key, block):
            rest.append(single)
            continue
        like = gradients[names[0]]
        kind: tuple[Any, ...] = (block.layout.matrix_shape, like.dtype, like.device, *ages)
        if shapes:
            own = () if block.layer else block.layout.shape
            kind += (own, signature(block.prepared), signature(single.memory))
        groups.setdefault(kind if even else block.key, []).append(single)
    parts = [merge(alike) for alike in groups.values()]
    blocks = {**blocks, **{block.key: block for stack in parts for block in stack.blocks}}
    levels = {name: block.level or 0.0 for stack in parts for block in stack.blocks for name in block.layout.names}
    return blocks, Stacks(tuple(parts), tuple(rest), blocks, key, levels)


def merge(alike: Sequence[Stack]) -> Stack:
    """Stacks of one block each as one."""
    if len(alike) == 1:
        (single,) = alike
        prepared = {name: tensor.unsqueeze(0) for name, tensor in single.blocks[0].prepared.items()}
        return amend(single, prepared=prepared, places=find_places(single.blocks, single.names))
    blocks = [single.blocks[0] for single in alike]
    prepared = {name: stack_tensors([block.prepared[name] for block in blocks]) for name in blocks[0].prepared}
    rows = {name: tensor.unbind() for name, tensor in prepared.items()}  # in one piece: held once
    inverse, inverses = None, [block.inverse for block in blocks]
    if known := [each for each in inverses if each is not None]:
        inverse = stack_operators(known) if len(known) == len(blocks) else None
        inverses = inverses if inverse is None else split_operator(inverse, len(blocks))
    blocks = tuple(
        amend(b, prepared={name: row[i] for name, row in rows.items()}, inverse=inverses[i])
        for i, b in enumerate(blocks)
    )
    names = tuple(name for single in alike for name in single.names)
    means = [single.mean for single in alike if single.mean is not None]
    return Stack(
        blocks,
        names,
        torch.cat(means) if means else None,
        {name: count for single in alike for name, count in single.counts.items()},
        prepared,
        {name: torch.cat([single.memory[name] for single in alike]) for name in alike[0].memory},
        find_places(blocks, names),
        inverse,
        even=True,
    )


def find_places(blocks: Sequence[Block], names: Sequence[str]) -> Sequence[Place] | None:
    """Where the parameters lie in the memory of a stack: sizes, strides and offset of each; None for those copied."""
    places, wanted, start = list[Place](), set(names), 0
    for block in blocks:
        if (own := block.layout.places) is None:
            return None
        places += [(size, strides, start + offset) for n, (size, strides, offset) in own.items() if n in wanted]
        start += math.prod(block.layout.matrix_shape)
    return places


def signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The names and shapes of tensors: those of others that can be stacked with them are equal."""
    return (*tensors, *[tensor.shape for tensor in tensors.values()])


# gradients into stacks, and back


def stack_gradients(
    stacks: Sequence[Stack], gradients: Mapping[str, Tensor], decays: Mapping[str, float], named: Mapping[str, Tensor]
) -> list[StackGradient]:
    """The stacks with their gradients, and the running means with these."""
    matrices, targets, sources = list[Tensor](), list[Tensor](), list[Tensor]()
    for stack in stacks:
        layouts = [block.layout for block in stack.blocks]
        like, size = gradients[stack.names[0]], (len(layouts), *layouts[0].matrix_shape)
        complete = len(stack.names) == sum(len(layout.names) for layout in layouts)
        matrix = like.new_empty(size) if complete else like.new_zeros(size)
        matrices.append(matrix)
        if stack.places is not None:
            targets += [matrix.as_strided(*place) for place in stack.places]
            sources += [gradients[name] for name in stack.names]
            continue
        for row, layout in zip(matrix.unbind(), layouts, strict=True):
            zeros = {name: zeros_whole(named[name], like.dtype) for name in layout.names if name not in gradients}
            targets.append(row)
            sources.append(layout.join({**gradients, **zeros}))
    if targets:
        torch_plain._foreach_copy_(targets, sources)
    return [average(stack, matrix, decays, named) for stack, matrix in zip(stacks, matrices, strict=True)]


def average(stack: Stack, gradient: Tensor, decays: Mapping[str, float], named: Mapping[str, Tensor]) -> StackGradient:
    """m <- b m + (1 - b) g, and m / (1 - b^count): of blocks whose parameters have the same momenta and counts."""
    if not stack.even:
        return average_entries(stack, gradient, decays, named)
    decay, count = decays[stack.names[0]], stack.counts.get(stack.names[0], 0) + 1
    if decay == 0:
        return StackGradient(gradient, gradient, stack)
    if stack.mean is None:
        running = gradient * (1 - decay)
    else:
        running = stack.mean.to(gradient).lerp(gradient, 1 - decay)
    weight = 1 - decay**count
    # late in a run the weights add up to 1, and nothing is copied
    mean = running if 1 - weight < torch.finfo(gradient.dtype).eps / 4 else running / weight
    return StackGradient(gradient, mean, amend(stack, mean=running, counts=dict.fromkeys(stack.names, count)))


def average_entries(
    stack: Stack, gradient: Tensor, decays: Mapping[str, float], named: Mapping[str, Tensor]
) -> StackGradient:
    """The same where momenta or counts differ within a block: an entry has those of its parameter."""
    layout, counts = stack.blocks[0].layout, dict(stack.counts)
    counts |= {name: counts.get(name, 0) + 1 for name in stack.names}

    def fill(numbers: Mapping[str, float]) -> Tensor:
        parts = {n: torch.full_like(zeros_whole(named[n], gradient.dtype), numbers.get(n, 0.0)) for n in layout.names}
        return layout.join(parts).unsqueeze(0)

    fresh = fill({name: 1 - decays[name] for name in stack.names})
    weights = fill({name: 1 - decays[name] ** counts[name] for name in stack.names})
    before = torch.zeros_like(gradient) if stack.mean is None else stack.mean.to(gradient)
    running = before + fresh * (gradient - before)
    mean = torch.where(weights > 0, running / weights, 0.0)
    return StackGradient(gradient, mean, amend(stack, mean=running, counts=counts))


def split_stack(stack: Stack, matrices: Tensor) -> dict[str, Tensor]:
    """What a stack's matrices hold of each parameter that has a gradient, without a copy where that can be."""
    if stack.places is None:
        names = set(stack.names)
        parts = [block.layout.split(row) for block, row in zip(stack.blocks, matrices.unbind(), strict=True)]
        return {name: part for split in parts for name, part in split.items() if name in names}
    matrices = matrices.contiguous()
    start = matrices.storage_offset()
    views = (matrices.as_strided(size, strides, start + offset) for size, strides, offset in stack.places)
    return dict(zip(stack.names, views, strict=True))


# what a rule remembers


def remember(stack: Stack, memory: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> list[Stack]:
    """The stack with what a rule returned of it; its blocks one by one where that is not alike for all of them."""
    if not isinstance(memory, Mapping):
        if len({signature(row) for row in memory}) > 1:
            rows = ({name: tensor.unsqueeze(0) for name, tensor in row.items()} for row in memory)
            return [amend(single, memory=row) for single, row in zip(stack.split(), rows, strict=True)]
        memory = {name: stack_tensors([row[name] for row in memory]) for name in memory[0]}
    return [amend(stack, memory=memory)]
