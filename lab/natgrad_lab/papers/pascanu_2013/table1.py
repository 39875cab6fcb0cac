"""Table 1 of Pascanu & Bengio 2013: restricted MNIST (section 8.5, Fig. 4), MNIST (8.6, Fig. 5), faces (8.7, Fig. 2).

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
from torch import Tensor, nn

import natgrad as ng
from natgrad_lab.data import Split, fer2013, mnist
from natgrad_lab.experiments.base import Choice, Contestant, LabError, Task, add_channel
from natgrad_lab.experiments.contestants import grid, sgd
from natgrad_lab.experiments.metric_data import Observes, draw_another_batch, draw_unlabelled, join_unlabelled
from natgrad_lab.experiments.models import Convolution, classify, convolutional, perceptron
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive, fill, require_size

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

    def __post_init__(self) -> None:
        check_counts(self, "products")
        check_counts(self, "floor", least=0)

    def list_bounds(self) -> dict[str, Any]:
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
    """The Fisher metric, on the data that `observes` draws. floor: of Levenberg-Marquardt's damping."""

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


def divide(pool: Split, seed: int, validation: int, labels: int | None = None) -> Split:
    """The training part cut by a seed: so many labelled examples, a validation part, the rest without labels."""
    number = len(pool.train_x)
    labelled = number - validation if labels is None else labels  # None: all others; the pool's unlabelled stay
    if validation < 1 or labelled < 1 or labelled + validation > number:
        raise LabError(
            f"validation is {validation} and labelled examples are to be {labelled}, expected two positive numbers "
            f"with a sum of at most {number}, the training part"
        )
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).to(pool.train_x.device)
    trained, held, rest = order.split([labelled, validation, number - labelled - validation])
    x, y = pool.train_x, pool.train_y
    more = pool.unlabelled_x if labels is None else x[rest]
    return Split(x[trained], y[trained], pool.test_x, pool.test_y, x[held], y[held], more)


# Restricted MNIST: few labelled digits, the rest of the training set without labels, and metrics on different data. The
# five contestants are tuned over as many choices on a validation part; a seed is another labelled subset and start.

RESTRICTED = {  # training cross-entropy, test error
    MSGD: (0.0523, 0.0522),
    UNLABELLED: (0.0017, 0.0463),
    DIFFERENT: (0.0012, 0.0489),
    SAME: (0.0023, 0.0491),
    COVARIANCE: (0.0006, 0.0474),
}
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
        super().__post_init__()
        paper = {"hidden": 1500, "labelled": 10_000, "batch": 2500, "steps": 2000}
        fill(self, paper if self.full else {"hidden": 300, "labelled": 1000, "batch": 500, "steps": 100})
        if self.choice is not None:
            check_counts(self, "choice", least=0, most=len(POINTS) - 1)


def restrict_mnist(settings: RestrictedMnistSettings) -> tuple[Task, ...]:
    """Six choices each; the Fisher metrics share theirs, so that only their data differ. The paper's are among them."""
    batch, steps = require_size(settings.batch), require_size(settings.steps)
    points = [kind(batch, pair)[0] for kind, pair in POINTS]
    points = points if settings.choice is None else [points[settings.choice]]
    contestants = (
        kullback(UNLABELLED, points, observes=draw_unlabelled(batch), **settings.list_bounds()),
        kullback(DIFFERENT, points, observes=draw_another_batch(batch), **settings.list_bounds()),
        kullback(SAME, points, **settings.list_bounds()),
    )
    if settings.choice is None:
        pairs = (5.0, 0.1), (1.0, 0.1), (0.2, 0.1), (1.0, 1.0), (0.2, 0.01), (0.05, 0.01)
        plain = msgd(max(1, batch // 10), (1.0, 2.0, 0.5, 0.2, 0.1, 0.05), 20 * steps)
        contestants = (plain, *contestants, covariance(list_constant_choices(batch, *pairs)))
    task = classify(
        "restricted-mnist",
        f"MNIST with {settings.labelled:,} labels, 784-{settings.hidden}-10, tanh",
        lambda: perceptron([784, require_size(settings.hidden), 10], nn.Tanh),
        lambda: mnist().flat(),
        contestants,
        draw=lambda pool, seed: divide(pool, seed, settings.validation, settings.labelled),
        tuned_on="valid_error",
        paper=RESTRICTED,
        note="The paper: 1500 hidden units, batches of 2500 (MSGD 250), 2000 updates (MSGD 40,000). It does not say "
        "how many labels it kept, how it validated, or which non-linearity it used.",
    )
    return (task,)


RESTRICTED_RACE = race(
    "pascanu_2013_restricted_mnist",
    "Pascanu & Bengio 2013, Table 1: metrics on unlabelled data, another batch, the same",
    RestrictedMnistSettings,
    restrict_mnist,
    seeds=5,
    title="Pascanu & Bengio 2013, Table 1: restricted MNIST",
    minutes=15,
    quick={"seeds": 1, "steps": 10, "evaluations": 2, "looked_at": 1000},
    paper={"full": True},
)

# MNIST: a convolutional network, the metric on the gradient's batch or on another; MSGD is added as a baseline. A seed
# is another validation part, start and order of the examples.


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
        super().__post_init__()
        check_positive(self, "fall")
        paper = {"filters": 32, "hidden": 750, "batch": 10_000, "steps": 2000, "hold": 200}
        fill(self, paper if self.full else {"filters": 8, "hidden": 128, "batch": 200, "steps": 40, "hold": 20})


def learn_mnist(settings: MnistSettings) -> tuple[Task, ...]:
    """Three choices each; the two Fisher metrics share theirs, so that only their data differ."""
    filters, hidden = require_size(settings.filters), require_size(settings.hidden)
    batch, steps = require_size(settings.batch), require_size(settings.steps)
    schedule = Falling(require_size(settings.hold), settings.fall)
    points = [*list_adapted_choices(batch, (0.5, 5.0), (1.0, 5.0)), *list_constant_choices(batch, (1.0, 0.3))]
    given: dict[str, Any] = {**settings.list_bounds(), "schedule": schedule}
    convolutions = Convolution(filters, 5, 2), Convolution(2 * filters, 5, 2)
    task = classify(
        "mnist",
        f"MNIST, {filters} and {2 * filters} filters 5 x 5, {hidden} hidden units",
        lambda: convolutional(28, convolutions, (hidden, 10), nn.Tanh),
        lambda: add_channel(mnist()),
        (
            msgd(max(1, batch // 10), (0.2, 0.1, 0.05), 20 * steps, schedule.slow_down(20)),
            kullback(DIFFERENT, points, observes=draw_another_batch(batch), **given),
            kullback(SAME, points, **given),
            covariance(list_constant_choices(batch, (1.0, 0.1), (0.3, 0.1), (0.1, 0.1)), schedule),
        ),
        draw=lambda pool, seed: divide(pool, seed, settings.validation),
        tuned_on="valid_error",
        paper={MSGD: (None, None), DIFFERENT: (0.00010, 0.0078), SAME: (0.0011, 0.0082), COVARIANCE: (0.024, 0.0107)},
        note="The paper: 32 and 64 filters, 750 hidden units, batches of 10,000 for gradient and metric, 2000 updates. "
        "It does not name pooling, non-linearity or validation part, and has no MSGD on this set.",
    )
    return (task,)


MNIST_RACE = race(
    "pascanu_2013_mnist",
    "Pascanu & Bengio 2013, Table 1: a convolutional network, metric on another batch or the same",
    MnistSettings,
    learn_mnist,
    title="Pascanu & Bengio 2013, Table 1: MNIST",
    minutes=15,
    quick={"seeds": 1, "steps": 5, "looked_at": 500},
    paper={"full": True},
)

# Faces: seven emotions, and a metric that unlabelled faces take part in. FER2013 in place of the Toronto Face Dataset,
# which may not be passed on: the same seven emotions and size, 48 x 48, but faces found on the web, on which far more
# are mistaken. A seed is another validation part, start and order.


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
        super().__post_init__()
        check_positive(self, "fall")
        names = "filters", "stride", "pooling", "first", "second", "batch", "unlabelled", "steps", "hold"
        sizes = (300, 1, 4, 2048, 1024, 960, 480, 2000, 200) if self.full else (16, 3, 2, 128, 64, 240, 120, 50, 25)
        fill(self, dict(zip(names, sizes, strict=True)))


def learn_faces(settings: FacesSettings) -> tuple[Task, ...]:
    """Three choices each; the Fisher metrics share theirs, so that only their data differ. The paper's is the first."""
    filters, first, second = require_size(settings.filters), require_size(settings.first), require_size(settings.second)
    convolution = Convolution(filters, 12, require_size(settings.pooling), require_size(settings.stride))
    batch, steps = require_size(settings.batch), require_size(settings.steps)
    schedule = Falling(require_size(settings.hold), settings.fall)
    points = [*list_adapted_choices(batch, (1.0, 8.0), (1.0, 1.0)), *list_constant_choices(batch, (1.0, 1.0))]
    given: dict[str, Any] = {**settings.list_bounds(), "schedule": schedule}
    task = classify(
        "faces",
        f"Faces of FER2013, {filters} filters 12 x 12, {first} and {second} hidden units",
        lambda: convolutional(48, [convolution], (first, second, 7), nn.Tanh),
        faces,
        (
            msgd(max(1, batch // 10), (0.1, 0.05, 0.02), 20 * steps, schedule.slow_down(20)),
            kullback(JOINED, points, observes=join_unlabelled(require_size(settings.unlabelled)), **given),
            kullback(DIFFERENT, points, observes=draw_another_batch(batch), **given),
            kullback(SAME, points, **given),
        ),
        draw=lambda pool, seed: divide(pool, seed, settings.validation),
        tuned_on="valid_error",
        paper={  # on the Toronto faces; the last is printed in the column of the different batch, see the note
            MSGD: (None, None),
            JOINED: (0.054, 0.1696),
            DIFFERENT: (None, None),
            SAME: (0.098, 0.1887),
        },
        note="The paper's numbers are of the Toronto Face Dataset: 300 filters 12 x 12, 2048 and 1024 hidden units, "
        "batches of 960, 480 unlabelled faces. Its second row of Table 1 stands in the column of the different batch; "
        "section 8.7 says that gradient and metric had the same batch there. It has neither MSGD nor a different batch "
        "on this set.",
    )
    return (task,)


def faces() -> Split:
    """Faces as (n, 1, 48, 48), each with mean 0 and variance 1: lighting differs more than expression."""
    split = fer2013()
    assert split.unlabelled_x is not None
    train, test, more = (standardise_images(x) for x in (split.train_x, split.test_x, split.unlabelled_x))
    return Split(train, split.train_y, test, split.test_y, unlabelled_x=more)


def standardise_images(images: Tensor) -> Tensor:
    """(n, h, w) -> (n, 1, h, w), every image with mean 0 and variance 1."""
    centred = images - images.mean((1, 2), keepdim=True)
    return (centred / centred.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-3))[:, None]


FACES_RACE = race(
    "pascanu_2013_faces",
    "Pascanu & Bengio 2013, Table 1: faces, with unlabelled ones in the metric",
    FacesSettings,
    learn_faces,
    title="Pascanu & Bengio 2013, Table 1: faces",
    minutes=15,
    quick={"seeds": 1, "steps": 5, "evaluations": 2, "looked_at": 500},
    paper={"full": True},
)
