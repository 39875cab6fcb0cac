"""Pascanu & Bengio 2013, section 8.7 and Figure 2: seven emotions, and a metric that unlabelled faces take part in.

FER2013 in place of the Toronto Face Dataset, which may not be passed on: the same seven emotions and size, 48 x 48, but
faces found on the web, on which far more are mistaken. A seed is another validation part, start and order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from natgrad_lab.data import fer2013
from natgrad_lab.experiments.base import Contestant, Task, TaskData
from natgrad_lab.experiments.metric_data import draw_another_batch, join_unlabelled
from natgrad_lab.experiments.models import Convolution, classify, convolutional
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import fill, require_size
from natgrad_lab.papers.pascanu_2013.shared import (
    DIFFERENT,
    JOINED,
    MSGD,
    SAME,
    Falling,
    Table1Settings,
    divide,
    kullback,
    list_adapted_choices,
    list_constant_choices,
    msgd,
)

TABLE_1 = {  # training cross-entropy, test error, on the Toronto faces
    MSGD: (None, None),
    JOINED: (0.054, 0.1696),
    DIFFERENT: (None, None),
    SAME: (0.098, 0.1887),  # printed in the column of the different batch; section 8.7 says that it is the same
}
PAPER = {"filters": 300, "stride": 1, "pooling": 4, "first": 2048, "second": 1024}
PAPER |= {"batch": 960, "unlabelled": 480, "steps": 2000, "hold": 200}
REDUCED = {"filters": 16, "stride": 3, "pooling": 2, "first": 128, "second": 64}
REDUCED |= {"batch": 240, "unlabelled": 120, "steps": 50, "hold": 25}


@dataclass(frozen=True)
class FacesSettings(Table1Settings):
    """What `--set` can change. full=true is the paper's size; what stays none is taken from there or from here."""

    full: bool = False  # the paper's size
    filters: int | None = None  # 12 x 12 pixels
    stride: int | None = None  # the paper names neither stride nor pooling
    pooling: int | None = None  # without it 300 filters on 48 x 48 pixels would feed 400,000 values to the 2048 units
    first: int | None = None  # units of the first hidden layer, tanh: the paper does not name the non-linearity
    second: int | None = None  # and of the second
    validation: int = 1000  # not given in the paper
    unlabelled: int | None = None  # faces without labels that join the batch in the metric
    hold: int | None = None  # updates at the first learning rate l
    fall: float = 20.0  # after them l / (1 + (t - hold) / fall)

    def __post_init__(self) -> None:
        fill(self, PAPER if self.full else REDUCED)


def tasks(settings: FacesSettings) -> tuple[Task, ...]:
    """One task, as Table 1's third row."""
    filters, first, second = require_size(settings.filters), require_size(settings.first), require_size(settings.second)
    convolution = Convolution(filters, 12, require_size(settings.pooling), require_size(settings.stride))
    return (
        classify(
            "faces",
            f"Faces of FER2013, {filters} filters 12 x 12, {first} and {second} hidden units",
            lambda: convolutional(48, [convolution], (first, second, 7), nn.Tanh),
            faces,
            contestants(settings, require_size(settings.batch), require_size(settings.steps)),
            draw=lambda pool, seed: divide(pool, seed, settings.validation),
            tuned_on="valid_error",
            paper=TABLE_1,
            note=NOTE,
        ),
    )


NOTE = (
    "The paper's numbers are of the Toronto Face Dataset: 300 filters 12 x 12, 2048 and 1024 hidden units, batches of "
    "960, 480 unlabelled faces. Its second row of Table 1 stands in the column of the different batch; section 8.7 "
    "says that gradient and metric had the same batch there. It has neither MSGD nor a different batch on this set."
)


def faces() -> TaskData:
    """Faces as (n, 1, 48, 48), each with mean 0 and variance 1: lighting differs more than expression."""
    split = fer2013()
    assert split.unlabelled_x is not None
    train, test, more = (standardise_images(x) for x in (split.train_x, split.test_x, split.unlabelled_x))
    return TaskData(train, split.train_y, test, split.test_y, unlabelled_x=more)


def standardise_images(images: Tensor) -> Tensor:
    """(n, h, w) -> (n, 1, h, w), every image with mean 0 and variance 1."""
    centred = images - images.mean((1, 2), keepdim=True)
    return (centred / centred.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-3))[:, None]


def contestants(settings: FacesSettings, batch: int, steps: int) -> tuple[Contestant, ...]:
    """Three choices each; the Fisher metrics share theirs, so that only their data differ. The paper's is the first."""
    schedule = Falling(require_size(settings.hold), settings.fall)
    points = [*list_adapted_choices(batch, (1.0, 8.0), (1.0, 1.0)), *list_constant_choices(batch, (1.0, 1.0))]
    given = settings.given() | {"schedule": schedule}
    return (
        msgd(max(1, batch // 10), (0.1, 0.05, 0.02), 20 * steps, schedule.slow_down(20)),
        kullback(JOINED, points, observes=join_unlabelled(require_size(settings.unlabelled)), **given),
        kullback(DIFFERENT, points, observes=draw_another_batch(batch), **given),
        kullback(SAME, points, **given),
    )


RACE = race(
    "pascanu_2013_faces",
    "Pascanu & Bengio 2013, Table 1: faces, with unlabelled ones in the metric",
    FacesSettings,
    tasks,
    title="Pascanu & Bengio 2013, Table 1: faces",
    minutes=15,
    quick={"seeds": 1, "steps": 5, "evaluations": 2, "looked_at": 500},
    paper={"full": True},
)
