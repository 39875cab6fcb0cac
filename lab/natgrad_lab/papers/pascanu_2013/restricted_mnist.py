"""Pascanu & Bengio 2013, section 8.5 and Figure 4: few labelled digits, and metrics on different data.

One hidden layer, a few labelled images of MNIST, the rest of the training set without labels. The five contestants of
Table 1, each tuned over as many choices on a validation part; a seed is another labelled subset and another start.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from natgrad_lab.data import mnist
from natgrad_lab.experiments.base import Contestant, LabError, Task, pair_with_labels
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled
from natgrad_lab.experiments.models import classify, perceptron
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import fill, require_size
from natgrad_lab.papers.pascanu_2013.shared import (
    COVARIANCE,
    DIFFERENT,
    MSGD,
    SAME,
    UNLABELLED,
    Table1Settings,
    covariance,
    divide,
    kullback,
    list_adapted_choices,
    list_constant_choices,
    msgd,
)

TABLE_1 = {  # training cross-entropy, test error
    MSGD: (0.0523, 0.0522),
    UNLABELLED: (0.0017, 0.0463),
    DIFFERENT: (0.0012, 0.0489),
    SAME: (0.0023, 0.0491),
    COVARIANCE: (0.0006, 0.0474),
}
PAPER = {"hidden": 1500, "labelled": 10_000, "batch": 2500, "steps": 2000}
REDUCED = {"hidden": 300, "labelled": 1000, "batch": 500, "steps": 100}
POINTS = (  # of the Fisher metrics: rate and damping, constant or where Levenberg-Marquardt starts
    (list_constant_choices, (0.1, 0.01)),
    (list_constant_choices, (0.3, 0.1)),
    (list_constant_choices, (1.0, 1.0)),
    (list_adapted_choices, (5.0, 2.0)),
    (list_adapted_choices, (1.0, 2.0)),
    (list_adapted_choices, (1.0, 0.2)),
)


@dataclass(frozen=True)
class RestrictedMnistSettings(Table1Settings):
    """What `--set` can change. full=true is the paper's size; what stays none is taken from there or from here."""

    full: bool = False  # the paper's size
    hidden: int | None = None  # tanh units; the paper does not name the non-linearity
    labelled: int | None = None  # not given in the paper
    validation: int = 5000  # not given in the paper
    choice: int | None = None  # races the Fisher metrics alone, all at this point of their grid (0 to 5), not tuned
    evaluations: int = 15  # at equal distances of updates

    def __post_init__(self) -> None:
        fill(self, PAPER if self.full else REDUCED)
        if self.choice is not None and not 0 <= self.choice < len(POINTS):
            raise LabError(f"choice is {self.choice}, expected none or 0 to {len(POINTS) - 1}")


def tasks(settings: RestrictedMnistSettings) -> tuple[Task, ...]:
    """One task, as Table 1's first row."""
    return (
        classify(
            "restricted-mnist",
            f"MNIST with {settings.labelled:,} labels, 784-{settings.hidden}-10, tanh",
            lambda: perceptron([784, require_size(settings.hidden), 10], nn.Tanh),
            lambda: pair_with_labels(mnist().flat()),
            contestants(settings, require_size(settings.batch), require_size(settings.steps)),
            draw=lambda pool, seed: divide(pool, seed, settings.validation, settings.labelled),
            tuned_on="valid_error",
            paper=TABLE_1,
            note=NOTE,
        ),
    )


NOTE = (
    "The paper: 1500 hidden units, batches of 2500 (MSGD 250), 2000 updates (MSGD 40,000). It does not say how many "
    "labels it kept, how it validated, or which non-linearity it used."
)


def contestants(settings: RestrictedMnistSettings, batch: int, steps: int) -> tuple[Contestant, ...]:
    """Six choices each; the Fisher metrics share theirs, so that only their data differ. The paper's are among them."""
    points = [kind(batch, pair)[0] for kind, pair in POINTS]
    given = settings.given()
    if settings.choice is not None:
        points = [points[settings.choice]]
    fishers = (
        kullback(UNLABELLED, points, observes=draw_unlabelled(batch), **given),
        kullback(DIFFERENT, points, observes=draw_another_batch(batch), **given),
        kullback(SAME, points, **given),
    )
    if settings.choice is not None:
        return fishers
    return (
        msgd(max(1, batch // 10), (1.0, 2.0, 0.5, 0.2, 0.1, 0.05), 20 * steps),
        *fishers,
        covariance(
            list_constant_choices(batch, (5.0, 0.1), (1.0, 0.1), (0.2, 0.1), (1.0, 1.0), (0.2, 0.01), (0.05, 0.01))
        ),
    )


RACE = race(
    "pascanu_2013_restricted_mnist",
    "Pascanu & Bengio 2013, Table 1: metrics on unlabelled data, another batch, the same",
    RestrictedMnistSettings,
    tasks,
    seeds=5,
    title="Pascanu & Bengio 2013, Table 1: restricted MNIST",
    minutes=15,
    quick={"seeds": 1, "steps": 10, "evaluations": 2, "looked_at": 1000},
    paper={"full": True},
)
