"""Levenberg-Marquardt for metrics in blocks: the loss at a step, beside what the quadratic model promises of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.damping import Damping, Relative, as_damping
from natgrad.families import Criterion
from natgrad.optim.distributed import Ranks
from natgrad.optim.flat_step import verdict
from natgrad.optim.last_pass import Recall
from natgrad.optim.objective import Called, Objective, Reclose, replay_losses, tells_another
from natgrad.optim.outside_losses import Outside
from natgrad.pure import run_uncompiled
from natgrad.rules import Parts, Quadratic, Step, Vector
from natgrad.spaces import Space

EVERY = 5  # steps between judgements: Martens & Grosse 2015, section 6.5


class PooledLoss:
    """d -> the loss at theta + d, the mean over all processes' rows, penalty included; `before` is that at d = 0.

    Args:
        objective: The loss of this process's rows.
        rows: What they weigh: how many they are; 0 where this process has none.
        ranks: The processes.
        before: The mean loss over all rows.
        named: The parameters.
        strengths: The l2 of a penalty l2 / 2 |theta|^2, by name.
        outside: What is known of losses that `opt.loss` was not told of.
    """

    def __init__(
        self,
        objective: Objective,
        rows: float,
        ranks: Ranks,
        before: float,
        named: Mapping[str, Tensor],
        strengths: Mapping[str, float],
        outside: Outside,
    ) -> None:
        self.outside = Outside() if isinstance(objective, Reclose) else outside
        self.objective, self.rows, self.ranks = objective, rows, ranks
        self.before, self.named, self.strengths = before, named, strengths
        self._last: tuple[Vector, float] | None = None

    def __call__(self, vector: Vector) -> float:
        return self.before + self.change(vector)

    def change(self, vector: Vector) -> float:
        """loss(theta + d) - loss(theta); NaN where it is not finite."""
        if self._last is None or self._last[0] is not vector:
            assert isinstance(vector, Parts)
            change = self.objective(vector) - self.objective.before if self.rows else 0.0
            pair = torch.tensor([change * self.rows, self.rows], dtype=torch.float64, device=self._device)
            total, weight = self.ranks.sum(pair)
            self._last = vector, float(total / weight) + self._penalty(vector)
        return self._last[1]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.named.values())).device

    def _penalty(self, vector: Parts) -> float:
        """How l2 / 2 |theta|^2 changes, and the losses outside of `opt.loss`, to second order."""
        found = 0.0
        for name in vector:
            if self.strengths[name]:
                move = vector[name]
                found += self.strengths[name] * float((self.named[name] * move).sum() + 0.5 * move.square().sum())
            if name in self.outside.levels:
                found += self.outside.change(name, self.named[name], vector[name])
        return found


def objective_of_blocks(
    model: nn.Module, criterion: Criterion, recall: Recall, params: dict[str, Tensor], called: Called, asks: object
) -> Objective:
    """The loss of this step at other parameters: its one pass replayed, or the closure called again.

    Args:
        model: The model.
        criterion: Its loss.
        recall: What happened since the last step.
        params: The parameters that may move.
        called: How `step` was called.
        asks: Who needs it, for the error message.

    Raises:
        ValueError: If the step has several losses, or none, and no closure.
    """
    space, used = Space(params), recall.used_losses()
    problem = next((told.route.problem for told in used if told.route.problem), "")
    if len(used) == 1 and recall.find_pass() is not None and not problem:
        exact = used[0].dtype == space.dtype  # under autocast the loss was rounded, and a replay is not
        replayed = replay_losses(model, criterion, recall, params, space, exact)
        if not tells_another(called, replayed, recall):
            return replayed
    if called.closure is None or called.value is None or called.random is None:
        raise ValueError(
            problem
            or f"{asks} compares the loss before and after a step, which has {len(used)} losses "
            "of optimizer.loss(outputs, targets) and not one: call optimizer.step(closure)"
        )
    return Reclose(model, called.closure, recall, params, space, called.value, called.random)


def judge_step(damping: Damping, model: Quadratic, step: Step, loss_at: PooledLoss) -> tuple[float, bool]:
    """True over predicted change, and whether the step is refused: it raised the loss, or lost it."""
    change = loss_at.change(step.vector)
    predicted = damping.predict_change(float(model.change(step)), float(model.slope(step)))
    ratio, refused = verdict(predicted, change)
    return ratio, refused or change > 0


def replaying(model: nn.Module, recall: Recall) -> AbstractContextManager[Any]:
    """Inside, modules are in the mode of the last pass, and compiled ones run as they were written: no new graph."""
    stack, last = ExitStack(), recall.find_pass()
    if last is not None:
        stack.enter_context(last.modes_of(model))
    stack.enter_context(run_uncompiled())
    return stack


def as_block_damping(damping: float | Damping) -> Damping:
    """A strategy; a number stands for `Relative(number, per="block")`. TypeError or ValueError for anything else."""
    if isinstance(damping, Damping):
        return damping
    as_damping(damping)  # checks it
    return Relative(float(damping), per="block")
