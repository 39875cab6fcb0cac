"""What the experiments of Pascanu & Bengio 2013 share: contestants named as in Table 1, and the falling rate.

The paper's algorithm 1: `ng.natgrad_cg` with MINRES-QLP, 20 steps, rtol 1e-4. Its Levenberg-Marquardt rule compares
the loss with eq. 30, the linear model, which is what lets rates above 2 stand: under the quadratic model a step of
twice the solution promises nothing. A metric on other data than the gradient's has a damping floor, since the step
grows like 1 / damping in the directions that those data do not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import natgrad as ng
from natgrad_lab.experiments.base import Choice, Contestant, LabError, TaskData
from natgrad_lab.experiments.contestants import grid, sgd
from natgrad_lab.experiments.metric_data import Observes
from natgrad_lab.experiments.settings import StudySettings

MSGD = "MSGD"
UNLABELLED = "KL, unlabelled"
JOINED = "KL, batch + unlabelled"  # on the faces; Table 1 has it in the column of the unlabelled
DIFFERENT = "KL, different batch"
SAME = "KL, same batch"
COVARIANCE = "covariance"
ADAPTED = "LM from"  # in a choice: Levenberg-Marquardt from that damping, in place of a constant "damping"


@dataclass(frozen=True)
class Table1Settings(StudySettings):
    """Of every race of Table 1."""

    batch: int | None = None  # of the gradient, and of the metric on the same or another batch; MSGD takes a tenth
    steps: int | None = None  # updates; MSGD takes 20 times as many
    products: int = 20  # with the metric per update, at most
    floor: float = 0.01  # of the damping under Levenberg-Marquardt; not given in the paper
    evaluations: int = 10  # at equal distances of updates
    looked_at: int = 10_000
    tuning_seed: int = 100

    def given(self) -> dict[str, Any]:
        """What the metrics of Fisher have in common."""
        return {"products": self.products, "floor": self.floor}


@dataclass(frozen=True)
class Falling:
    """The factor on the learning rate: 1 for `hold` updates, then 1 / (1 + (t - hold) / fall). Section 8.6."""

    hold: int
    fall: float

    def slow_down(self, times: int) -> Falling:
        """The same course over so many times as many updates."""
        return Falling(self.hold * times, self.fall * times)

    def __call__(self, update: int) -> float:
        return 1.0 if update <= self.hold else 1 / (1 + (update - self.hold) / self.fall)


def msgd(batch: int, rates: Iterable[float], steps: int, schedule: Falling | None = None) -> Contestant:
    """Minibatch stochastic gradient descent, without momentum."""
    return replace(sgd(grid(batch=(batch,), lr=rates), momentum=0.0), name=MSGD, steps=steps, schedule=schedule)


def kullback(
    name: str,
    points: Sequence[Choice],
    *,
    products: int,
    floor: float,
    observes: Observes | None = None,
    schedule: Falling | None = None,
) -> Contestant:
    """The Fisher metric, on the data that `observes` draws. products: steps of the solver at most.

    floor: below which Levenberg-Marquardt does not lower the damping.
    """

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        solver = ng.MinresQLP(rtol=1e-4, max_steps=products)
        return ng.natgrad_cg(model, criterion, choice["lr"], solver=solver, damping=damping(choice, floor))

    return Contestant(name, tuple(points), build, schedule=schedule, observes=observes)


def covariance(points: Sequence[Choice], schedule: Falling | None = None) -> Contestant:
    """The uncentred covariance of the batch's gradients, which is what the published experiments used."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        metric = ng.covariance(model, criterion)
        return ng.NaturalGradient(model, metric, choice["lr"], solver=ng.SampleSpace(), damping=damping(choice, 1e-4))

    return Contestant(COVARIANCE, tuple(points), build, schedule=schedule)


def damping(choice: Choice, floor: float) -> float | ng.LevenbergMarquardt:
    """A choice's damping: constant, or adapted by eq. 30 and not below the floor."""
    if ADAPTED in choice:
        return ng.LevenbergMarquardt(start=choice[ADAPTED], floor=floor, linear_model=True, per="loss")
    return choice["damping"]


def list_constant_choices(batch: int, *pairs: tuple[float, float]) -> list[Choice]:
    """Choices of (rate, constant damping)."""
    return [{"batch": batch, "lr": rate, "damping": level} for rate, level in pairs]


def list_adapted_choices(batch: int, *pairs: tuple[float, float]) -> list[Choice]:
    """Choices of (rate, damping from which Levenberg-Marquardt starts)."""
    return [{"batch": batch, "lr": rate, ADAPTED: start} for rate, start in pairs]


def divide(pool: TaskData, seed: int, validation: int, labels: int | None = None) -> TaskData:
    """The training part cut by a seed: so many labelled examples, a validation part, the rest without labels.

    labels: None for all but the validation part; unlabelled inputs that the pool has are kept then.
    """
    number = len(pool.train_x)
    labelled = number - validation if labels is None else labels
    if validation < 1 or labelled < 1 or labelled + validation > number:
        raise LabError(
            f"validation is {validation} and labelled examples are to be {labelled}, expected two positive numbers "
            f"with a sum of at most {number}, the training part"
        )
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).to(pool.train_x.device)
    trained, held, rest = order.split([labelled, validation, number - labelled - validation])
    x, y = pool.train_x, pool.train_y
    more = pool.unlabelled_x if labels is None else x[rest]
    return TaskData(x[trained], y[trained], pool.test_x, pool.test_y, x[held], y[held], more)
