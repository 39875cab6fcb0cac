"""Lessons whose examples lie on several processes: what all of them taught, as one process with all rows has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.typed_torch import split_tensor
from natgrad.helmholtz.logistic_rows import LogisticRows
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.machine_blocks import Taught
from natgrad.helmholtz.phases import Algorithm, Lesson
from natgrad.helmholtz.unit_blocks import most_rows, thin_rows
from natgrad.optim import RankExchange


@dataclass(frozen=True)
class JoinedLesson:
    """A step's rows, and what the processes add to one another's.

    Args:
        taught: Name, weight and rows of every layer that is trained. The rows' weights sum to this process's share of
            all examples.
        counts: Rows of each layer on all processes.
        bound: The mean over all examples, in nats.
        processes: What exchanges the sums.
    """

    taught: Taught
    counts: list[int]
    bound: float
    processes: RankExchange

    def ascents(self) -> list[Tensor]:
        """Every layer's gradient over the rows of all processes."""
        own = [rows.ascent() for _, _, rows in self.taught]
        if self.processes.size == 1 or not own:
            return own
        total = self.processes.sum(torch.cat([part.reshape(-1) for part in own]))
        parts = split_tensor(total, [part.numel() for part in own])
        return [part.view_as(like) for part, like in zip(parts, own, strict=True)]

    def gather_for_blocks(self) -> Taught:
        """The layers with as many rows of all processes as a Fisher block is estimated from."""
        return [(name, weight, self.gather(rows, most_rows(rows))) for name, weight, rows in self.taught]

    def gather(self, rows: LogisticRows, most: int) -> LogisticRows:
        """Rows of all processes, at most as many of each; what a Fisher block is made of, without residuals."""
        if self.processes.size == 1:
            return rows
        few = thin_rows(rows, most)
        columns, units = few.inputs.shape[1], few.logits.shape[1]
        found = self.processes.gather_rows(torch.cat([few.inputs, few.logits, few.weights.unsqueeze(1)], dim=1))
        inputs, logits, weights = found.split([columns, units, 1], dim=1)
        return LogisticRows(inputs, logits[:, :0], logits, weights.squeeze(1), rows.mask)


def join_lesson(lesson: Lesson, taught: Taught, processes: RankExchange) -> JoinedLesson:
    """A process's lesson with what it weighs among those of all processes, which all call this."""
    counts = [len(rows.inputs) for _, _, rows in taught]
    if processes.size == 1:
        return JoinedLesson(taught, counts, float(lesson.bound.mean()), processes)
    numbers = [len(lesson.bound), float(lesson.bound.sum()), *counts]
    told = processes.share_numbers(numbers, lesson.bound.device)
    examples, bound, *rows = [sum(column) for column in zip(*told, strict=True)]
    if not examples:
        raise ValueError("x is an empty batch on every process; give at least one of them an example")
    share = len(lesson.bound) / examples
    weighed = [(name, weight, one.scale_by(share)) for name, weight, one in taught]
    return JoinedLesson(weighed, [int(count) for count in rows], bound / examples, processes)


def draw_lesson(
    machine: HelmholtzMachine, algorithm: Algorithm, x: Tensor, samples: int, generator: torch.Generator
) -> Lesson:
    """What a batch teaches both networks; nothing, in the same shapes, if it has no examples.

    x: Examples, (b, visible), b >= 0.
    """
    if len(x):
        return algorithm.lesson(machine, x, samples, generator)
    stand_in = x.new_full((1, x.shape[1]), machine.units[0])
    found = algorithm.lesson(machine, stand_in, samples, generator)
    generation, recognition = ([rows.drop_all() for rows in part] for part in (found.generation, found.recognition))
    return Lesson(generation, recognition, found.bound[:0])
