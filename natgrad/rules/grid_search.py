"""The best of several lengths of a step, on a logarithmic grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

from natgrad.ground.checks import check_integer
from natgrad.rules.base import Objective, Rule, require_loss
from natgrad.rules.parts import Memory
from natgrad.rules.quadratic import Quadratic, Step
from natgrad.rules.step_rules import check_backtracking


@dataclass(frozen=True)
class GridSearch(Rule):
    """The length among 1, shrink, shrink^2, ... times the proposal with the lowest loss; none where that is no lower.

    Every length costs one evaluation of the loss. A loss that is not finite counts as infinite. Backtracking stops at
    the first length that will do; where the best one is far below 1, as in energy natural gradients without damping,
    this is the search that their papers have.

    Args:
        trials: Lengths, at least 1.
        shrink: Factor between two of them, in (0, 1).

    Reference:
        Mueller & Zeinhofer 2023, section 4, with 31 lengths from 1 to 2^-30.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> opt = ng.NaturalGradient(net, ng.gauss_newton(net, nn.MSELoss()), rule=ng.rules.GridSearch())
        >>> opt.rule
        GridSearch(trials=13, shrink=0.5)
    """

    needs_form = False
    trials: int = 13
    shrink: float = 0.5

    def __post_init__(self) -> None:
        check_integer("trials", self.trials)
        check_backtracking(self.trials, self.shrink)

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        require_loss(self, loss_at)
        assert loss_at is not None
        best, lowest = model.nothing(), float(model.loss)
        for k in range(self.trials):
            step = model.proposal.scale_by(self.shrink**k)
            loss = loss_at(step.vector)
            if not math.isnan(loss) and loss < lowest:
                best, lowest = step, loss
        return best, memory
