"""Pascanu & Bengio 2013, section 8.6 and Figure 5: a convolutional network on MNIST, the metric on the gradient's batch
or on another.

Table 1's second row, with MSGD added as a baseline. A seed is another validation part, start and order of the examples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from natgrad_lab.data import mnist
from natgrad_lab.experiments.base import Contestant, Task, add_channel, pair_with_labels
from natgrad_lab.experiments.metric_data import draw_another_batch
from natgrad_lab.experiments.models import Convolution, classify, convolutional
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import fill, require_size
from natgrad_lab.papers.pascanu_2013.shared import (
    COVARIANCE,
    DIFFERENT,
    MSGD,
    SAME,
    Falling,
    Table1Settings,
    covariance,
    divide,
    kullback,
    list_adapted_choices,
    list_constant_choices,
    msgd,
)

TABLE_1 = {  # training cross-entropy, test error
    MSGD: (None, None),
    DIFFERENT: (0.00010, 0.0078),
    SAME: (0.0011, 0.0082),
    COVARIANCE: (0.024, 0.0107),
}
PAPER = {"filters": 32, "hidden": 750, "batch": 10_000, "steps": 2000, "hold": 200}
REDUCED = {"filters": 8, "hidden": 128, "batch": 200, "steps": 40, "hold": 20}


@dataclass(frozen=True)
class MnistSettings(Table1Settings):
    """What `--set` can change. full=true is the paper's size; what stays none is taken from there or from here."""

    full: bool = False  # the paper's size
    filters: int | None = None  # of the first layer, 5 x 5 pixels; the second has twice as many
    hidden: int | None = None  # tanh units; the paper names neither non-linearity nor pooling (2 x 2 here)
    validation: int = 2000  # not given in the paper
    hold: int | None = None  # updates at the first learning rate l
    fall: float = 20.0  # after them l / (1 + (t - hold) / fall)
    evaluations: int = 2  # at equal distances of updates
    looked_at: int = 5000  # the first images of each part, the test images too: evaluations took half of the time

    def __post_init__(self) -> None:
        fill(self, PAPER if self.full else REDUCED)


def tasks(settings: MnistSettings) -> tuple[Task, ...]:
    """One task, as Table 1's second row."""
    filters, hidden = require_size(settings.filters), require_size(settings.hidden)
    convolutions = Convolution(filters, 5, 2), Convolution(2 * filters, 5, 2)
    return (
        classify(
            "mnist",
            f"MNIST, {filters} and {2 * filters} filters 5 x 5, {hidden} hidden units",
            lambda: convolutional(28, convolutions, (hidden, 10), nn.Tanh),
            lambda: pair_with_labels(add_channel(mnist())),
            contestants(settings, require_size(settings.batch), require_size(settings.steps)),
            draw=lambda pool, seed: divide(pool, seed, settings.validation),
            tuned_on="valid_error",
            paper=TABLE_1,
            note=NOTE,
        ),
    )


NOTE = (
    "The paper: 32 and 64 filters, 750 hidden units, batches of 10,000 for gradient and metric, 2000 updates. It does "
    "not name pooling, non-linearity or validation part, and has no MSGD on this set."
)


def contestants(settings: MnistSettings, batch: int, steps: int) -> tuple[Contestant, ...]:
    """Three choices each; the two Fisher metrics share theirs, so that only their data differ."""
    schedule = Falling(require_size(settings.hold), settings.fall)
    points = [*list_adapted_choices(batch, (0.5, 5.0), (1.0, 5.0)), *list_constant_choices(batch, (1.0, 0.3))]
    given = settings.given() | {"schedule": schedule}
    return (
        msgd(max(1, batch // 10), (0.2, 0.1, 0.05), 20 * steps, schedule.slow_down(20)),
        kullback(DIFFERENT, points, observes=draw_another_batch(batch), **given),
        kullback(SAME, points, **given),
        covariance(list_constant_choices(batch, (1.0, 0.1), (0.3, 0.1), (0.1, 0.1)), schedule),
    )


RACE = race(
    "pascanu_2013_mnist",
    "Pascanu & Bengio 2013, Table 1: a convolutional network, metric on another batch or the same",
    MnistSettings,
    tasks,
    title="Pascanu & Bengio 2013, Table 1: MNIST",
    minutes=15,
    quick={"seeds": 1, "steps": 5, "looked_at": 500},
    paper={"full": True},
)
