"""Levenberg-Marquardt for metrics in blocks: the loss at a step, beside what the quadratic model promises of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.damping import Damping, LevenbergMarquardt, Relative
from natgrad.families import Criterion
from natgrad.optim.distributed import Ranks
from natgrad.optim.flat_step import verdict
from natgrad.optim.last_pass import Recall
from natgrad.optim.objective import Closure, Objective, Reclose, replay_losses
from natgrad.optim.schedule import Clock
from natgrad.pure import RandomState
from natgrad.spaces import Space

EVERY = 5  # steps between judgements: Martens & Grosse 2015, section 6.5


class Judge:
    """Decides on every fifth step whether it is taken, and how much damping the next ones have.

    damping: a strategy as in `ng.NaturalGradient`, for the blocks' relative damping, or a number that stays as it is.
    random: the state before the user's closure.
    """

    def __init__(self, damping: float | Damping) -> None:
        self.start, self.strategy = relative(damping)
        self.random: RandomState | None = None

    def begins(self, device: torch.device, closure: Closure | None) -> None:
        """A step with a closure, which may be called a second time from the same random state."""
        self.random = None if closure is None or self.strategy is None else RandomState.capture(device)

    def objective(
        self,
        model: nn.Module,
        criterion: Criterion,
        recall: Recall,
        params: dict[str, Tensor],
        closure: Closure | None,
        value: Tensor | None,
    ) -> Objective:
        """The loss of this step at other parameters: its one pass replayed, or the closure called again.

        ValueError where the step has several losses, or none, and no closure.
        """
        space, used = Space(params), recall.used()
        problem = next((told.route.problem for told in used if told.route.problem), "")
        if len(used) == 1 and recall.passed() is not None and not problem:
            exact = used[0].dtype == space.dtype  # under autocast the loss was rounded, and a replay is not
            return replay_losses(model, criterion, recall, params, space, exact)
        if problem and (closure is None or value is None):
            raise ValueError(problem)
        if closure is None or value is None or self.random is None:
            raise ValueError(
                f"{self.strategy} compares the loss before and after a step, which has {len(used)} losses "
                "of optimizer.loss(outputs, targets) and not one: call optimizer.step(closure)"
            )
        return Reclose(model, closure, recall, params, space, value, self.random)

    def change(self, objective: Objective, moves: dict[str, Tensor], rows: int, ranks: Ranks) -> float:
        """loss(theta + moves) - loss(theta), the mean over all processes' rows; NaN where it is not finite."""
        change = objective.at(moves) - objective.before
        like = next(iter(moves.values()))
        total, weight = ranks.sum(torch.tensor([change * rows, rows], dtype=torch.float64, device=like.device))
        return float(total / weight)

    def verdict(self, change: float, slope: float, curvature: float) -> tuple[float, bool]:
        """True over predicted change, and whether the step is refused: it raised the loss, or lost it.

        slope: of the gradient along the step.   curvature: half the metric's form there.
        """
        assert self.strategy is not None
        ratio, refused = verdict(self.strategy.predicted(slope + curvature, slope), change)
        return ratio, refused or change > 0

    def due(self, clock: Clock) -> bool:
        """Whether this step is judged."""
        return self.strategy is not None and clock["step"] - clock["judged"] >= EVERY

    def adapt(self, groups: list[dict[str, Any]], clock: Clock, ratio: float, refused: bool) -> None:
        """Every group's damping for the next steps. After a refusal new inverses have it, and are judged, at once."""
        assert self.strategy is not None
        for group in groups:
            group["damping"] = self.strategy.update(float(group["damping"]), ratio)
        clock["judged"] = clock["step"]
        if refused:
            clock |= {"judged": -EVERY, "inverted": -1, "refused": clock["refused"] + 1}


def replaying(model: nn.Module, recall: Recall) -> AbstractContextManager[Any]:
    """Inside, modules are in the mode of the last pass, and compiled ones run as they were written: no new graph."""
    stack, last = ExitStack(), recall.passed()
    if last is not None:
        stack.enter_context(last.modes_of(model))
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack


def relative(damping: float | Damping) -> tuple[float, Damping | None]:
    """Where damping starts, in units of a block's mean eigenvalue, and what adapts it. TypeError for other units."""
    if isinstance(damping, Relative):
        return damping.factor, None
    if not isinstance(damping, Damping):
        return damping, None
    if not damping.needs_ratio or (isinstance(damping, LevenbergMarquardt) and damping.per_example):
        raise TypeError(
            f"damping is {damping}, which is absolute; here it is in units of a block's mean eigenvalue: give "
            "a number, ng.Relative(0.03) or ng.LevenbergMarquardt(start=0.03)"
        )
    return damping.initial(), damping


def slope_along(
    moves: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    strengths: Mapping[str, float],
) -> tuple[float, float]:
    """The slope along a step of loss + l2 / 2 |theta|^2, and how the penalty changes. strengths: l2 by name."""
    slope, penalty = [], []
    for name, move in moves.items():
        slope.append((gradients[name] * move).sum())
        if strengths[name]:
            slope.append(strengths[name] * (named[name] * move).sum())
            penalty += [slope[-1], strengths[name] / 2 * move.square().sum()]
    return float(torch.stack(slope).sum()), float(sum(penalty))
