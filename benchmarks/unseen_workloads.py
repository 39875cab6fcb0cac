"""Networks that were written down once the rule of `ng.kfac` was settled, and raced as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.step_workloads import StepWorkload, judge, regress
from benchmarks.training import dense
from natgrad_lab.data import Split, fashion_mnist
from natgrad_lab.experiments import Task
from natgrad_lab.experiments.models import bernoulli_divergence

SIGNS, LENGTH = 16, 12  # of the sequences that are turned round
USERS, THINGS = 800, 600  # of the table of ratings
BRACKETS, DEPTHS = torch.tensor([1, -1, 3, 0]), 8  # what a sign adds to the depth, and the depths modulo
WORDS, TOPICS = 2000, 20
FREQUENCIES = math.pi * 2.0 ** torch.arange(10)  # of a place's coordinates


class Translator(nn.Module):
    """Sequences and what they become (b, 2, t) -> logits (b, signs, t): a GRU that attends to another one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SIGNS + 1, width)
        self.reader, self.writer = (nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.query, self.head = nn.Linear(width, width), nn.Linear(2 * width, SIGNS)

    def forward(self, pairs: Tensor) -> Tensor:
        source, target = pairs.unbind(1)
        read, last = self.reader(self.symbol(source))
        before = functional.pad(target[:, :-1], (1, 0), value=SIGNS)
        written, _ = self.writer(self.symbol(before), last)
        seen = (self.query(written) @ read.mT / 8).softmax(-1) @ read
        return self.head(torch.cat([written, seen], -1)).mT


class PointNetwork(nn.Module):
    """Clouds (b, 3, points) -> logits (b, 6): the same layers for every point, and the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32), (32, 64), (64, 128))
        layers = [layer for n, m in sizes for layer in (nn.Conv1d(n, m, 1), nn.BatchNorm1d(m), nn.ReLU())]
        self.points, self.body = nn.Sequential(*layers), dense((128, 64, 6), nn.ReLU)

    def forward(self, clouds: Tensor) -> Tensor:
        return self.body(self.points(clouds).amax(-1))


class CausalConvolutions(nn.Module):
    """Series (b, 1, t) -> the next value at every time (b, 1, t), by dilated convolutions."""

    def __init__(self, width: int = 32, depth: int = 5) -> None:
        super().__init__()
        self.enter, self.head = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**k) for k in range(depth))

    def forward(self, series: Tensor) -> Tensor:
        hidden = self.enter(series)
        for k, layer in enumerate(self.layers):
            hidden = hidden + functional.relu(layer(functional.pad(hidden, (2 ** (k + 1), 0))))
        return self.head(hidden)


class Recommender(nn.Module):
    """Pairs of a user and a thing (b, 2) -> ratings (b, 1): an inner product, biases and a perceptron."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.user, self.thing = nn.Embedding(USERS, width), nn.Embedding(THINGS, width)
        self.user_bias, self.thing_bias = nn.Embedding(USERS, 1), nn.Embedding(THINGS, 1)
        self.body = dense((2 * width, 32, 1), nn.ReLU)
        for table, spread in ((self.user, 0.1), (self.thing, 0.1), (self.user_bias, 0.0), (self.thing_bias, 0.0)):
            nn.init.normal_(table.weight, std=spread)

    def forward(self, pairs: Tensor) -> Tensor:
        user, thing = self.user(pairs[:, 0]), self.thing(pairs[:, 1])
        biases = self.user_bias(pairs[:, 0]) + self.thing_bias(pairs[:, 1])
        return (user * thing).sum(-1, keepdim=True) + biases + self.body(torch.cat([user, thing], -1))


class Segmenter(nn.Module):
    """Images (b, 1, 32, 32) -> a logit for every pixel: two scales down and up again, as a U-Net."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second, self.third = block(1, width), block(width, 2 * width), block(2 * width, 2 * width)
        self.up, self.fourth = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2), block(4 * width, width)
        self.up_again, self.fifth = nn.ConvTranspose2d(width, width, 2, 2), block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.max_pool2d(second, 2))
        fourth = self.fourth(torch.cat([self.up(third), second], 1))
        return self.head(self.fifth(torch.cat([self.up_again(fourth), first], 1)))


def block(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution with a norm and an activation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class DeepResidual(nn.Module):
    """Images (b, 64) -> logits (b, 10) through twelve residual blocks without a norm."""

    def __init__(self, width: int = 64, depth: int = 12) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.ReLU(), dense((width, width, width), nn.ReLU)) for _ in range(depth)
        )

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.enter(images)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


class SeparableNetwork(nn.Module):
    """Images (b, 1, 28, 28) -> logits (b, 10): each channel filtered by itself, then mixed, as a MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((16, 32, 1), (32, 64, 2), (64, 64, 1))
        layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
        for n, m, stride in sizes:
            layers += [nn.Conv2d(n, n, 3, stride, 1, groups=n, bias=False), nn.BatchNorm2d(n), nn.ReLU6()]
            layers += [nn.Conv2d(n, m, 1, bias=False), nn.BatchNorm2d(m), nn.ReLU6()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Painter(nn.Module):
    """Places (b, 2) -> colours (b, 3), from sines of their coordinates at ten frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense((2 + 4 * len(FREQUENCIES), 96, 96, 96, 3), nn.ReLU)

    def forward(self, places: Tensor) -> Tensor:
        angles = (places[..., None] * FREQUENCIES).flatten(-2)
        return self.body(torch.cat([places, angles.sin(), angles.cos()], -1)).sigmoid()


class BracketCounter(nn.Module):
    """Signs (b, t) -> logits (b, depths, t) of the depth at every place, by an LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.cells = nn.Embedding(len(BRACKETS), 16), nn.LSTM(16, 64, 2, batch_first=True)
        self.head = nn.Linear(64, DEPTHS)

    def forward(self, signs: Tensor) -> Tensor:
        return self.head(self.cells(self.symbol(signs))[0]).mT


class Labeller(nn.Module):
    """Words (b, t) -> logits (b, topics), from the mean of the words' vectors."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.body = nn.Sequential(nn.ReLU(), dense((width, width, TOPICS), nn.ReLU))

    def forward(self, words: Tensor) -> Tensor:
        return self.body(self.words(words))


class Compressor(nn.Module):
    """Images (b, 1, 28, 28) -> the same through 32 numbers, by convolutions."""

    def __init__(self) -> None:
        super().__init__()
        down = (nn.Conv2d(1, 16, 4, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 4, 2, 1), nn.GELU(), nn.Flatten())
        up = (nn.Unflatten(1, (32, 7, 7)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GELU())
        self.down = nn.Sequential(*down, nn.Linear(32 * 49, 32))
        self.up = nn.Sequential(nn.Linear(32, 32 * 49), nn.GELU(), *up)
        self.head = nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.up(self.down(images)))


# What they are trained on


def cut(x: Tensor, y: Tensor, train: int) -> Split:
    """The first rows to train on, the others to test."""
    return Split(x[:train], y[:train], x[train:], y[train:])


def turned_sequences() -> Split:
    """Sequences of signs, and the same from the end to the start."""
    signs = torch.randint(SIGNS, (6000, LENGTH), generator=start_source(1))
    return cut(torch.stack([signs, signs.flip(1)], 1), signs.flip(1), 5000)


def clouds(count: int = 3000) -> Split:
    """Noisy points of spheres, cubes, cylinders, cones, tori and balls, turned and scaled."""
    source = start_source(2)
    kinds, points = torch.randint(6, (count,), generator=source), torch.randn(count, 3, 64, generator=source)
    sphere, cube = functional.normalize(points, dim=1), points / points.abs().amax(1, keepdim=True)
    circle, height, angle = functional.normalize(points[:, :2], dim=1), points[:, 2:].tanh(), 3 * points[:, 2:]
    cylinder, cone = torch.cat([circle, height], 1), torch.cat([circle * (1 - height) / 2, height], 1)
    torus = torch.cat([circle * (1 + 0.4 * angle.cos()), 0.4 * angle.sin()], 1)
    ball = sphere * torch.rand(count, 1, 64, generator=source) ** (1 / 3)
    x = torch.stack([sphere, cube, cylinder, cone, torus, ball])[kinds, torch.arange(count)]
    x = torch.linalg.qr(torch.randn(count, 3, 3, generator=source)).Q @ x
    x = x + 0.08 * torch.randn(count, 3, 64, generator=source)
    return cut(x * (0.6 + 0.8 * torch.rand(count, 1, 1, generator=source)), kinds, 2500)


def waves(count: int = 1500, length: int = 97) -> Split:
    """Sums of three sines with noise, and their next values."""
    source = start_source(3)
    frequencies, phases, sizes = torch.rand(3, count, 3, 1, generator=source)
    angles = (0.05 + 0.5 * frequencies) * torch.arange(float(length)) + 2 * math.pi * phases
    series = (sizes * angles.sin()).sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, length, generator=source)
    return cut(series[..., :-1], series[..., 1:], 1200)


def ratings(count: int = 40_000, rank: int = 5) -> Split:
    """What users give things: inner products of hidden tastes, with noise."""
    source = start_source(4)
    users, things = torch.randn(USERS, rank, generator=source), torch.randn(THINGS, rank, generator=source)
    who, what = (torch.randint(n, (count,), generator=source) for n in (USERS, THINGS))
    liked = (users[who] * things[what]).sum(-1) / rank**0.5 + 0.5 * users[who, 0]
    given = liked + 0.3 * torch.randn(count, generator=source)
    return cut(torch.stack([who, what], 1), given.unsqueeze(1), 36_000)


def discs(count: int = 600, side: int = 32) -> Split:
    """Images of three discs under noise, and where the discs are."""
    source, line = start_source(5), torch.arange(float(side))
    inside = torch.zeros(count, side, side)
    for _ in range(3):
        centre, radius = torch.rand(2, count, 1, 1, generator=source) * side, torch.rand(count, 1, 1, generator=source)
        apart = (line[:, None] - centre[0]).square() + (line - centre[1]).square()
        inside = torch.maximum(inside, (apart < (2 + 5 * radius).square()).float())
    shades = torch.randn(count, 1, 1, generator=source)
    images = inside + 0.9 * torch.randn(count, side, side, generator=source) + shades
    return cut(images.unsqueeze(1), inside.unsqueeze(1), 500)


def heavy_tails(count: int = 6000) -> Split:
    """Four smooth functions of twelve inputs; a tenth of the noise is a Cauchy variable, cut."""
    source = start_source(6)
    x, weights = torch.randn(count, 12, generator=source), torch.randn(12, 4, generator=source)
    noise = torch.randn(count, 4, generator=source) / torch.randn(count, 4, generator=source).abs().clamp(min=0.1)
    return cut(x, 2 * (x @ weights).sin() + 0.5 * x[:, :4] * x[:, 4:8] + 0.1 * noise, 5000)


def digits() -> Split:
    """scikit-learn's images of digits."""
    x, y = (torch.from_numpy(part) for part in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=start_source(8))
    return cut((x[order].float() - 8) / 6, y[order], 1400)


def fashion(train: int, copies: bool) -> Split:
    """The first images of Fashion-MNIST. copies: with themselves for targets."""
    split = fashion_mnist()
    x, test_x = (part.reshape(-1, 1, 28, 28) for part in (split.train_x[:train], split.test_x[:1000]))
    return Split(x, x, test_x, test_x) if copies else Split(x, split.train_y[:train], test_x, split.test_y[:1000])


def pattern(count: int = 12_000) -> Split:
    """Rings, a spiral and a chess board as the three colours of places."""
    places = torch.rand(count, 2, generator=start_source(10))
    apart = places - 0.5
    radius, angle = apart.norm(dim=-1), torch.atan2(apart[:, 1], apart[:, 0])
    board = 2 * ((12 * places).floor().sum(-1) % 2) - 1
    return cut(
        places, 0.5 + 0.4 * torch.stack([(30 * radius).sin(), (8 * angle + 20 * radius).sin(), board], -1), 10_000
    )


def brackets(count: int = 3000, length: int = 40) -> Split:
    """Signs that open and close, and the depth after each."""
    signs = torch.randint(len(BRACKETS), (count, length), generator=start_source(12))
    return cut(signs, BRACKETS[signs].cumsum(1) % DEPTHS, 2500)


def topics(count: int = 8000, length: int = 20) -> Split:
    """Words of Zipf's frequencies, and the topics that some of them speak of."""
    source = start_source(13)
    some = torch.rand(WORDS, TOPICS, generator=source) < 0.1
    weights = 3 * some * torch.randn(WORDS, TOPICS, generator=source)
    often = (1 / torch.arange(1.0, WORDS + 1)).expand(count, -1)
    words = torch.multinomial(often, length, replacement=True, generator=source)
    scores = weights[words].sum(1) - 1 + 0.3 * torch.randn(count, TOPICS, generator=source)
    return cut(words, (scores > 0).float(), 7000)


def start_source(seed: int) -> torch.Generator:
    """A source of random numbers."""
    return torch.Generator().manual_seed(seed)


def decide(title: str, model: Callable[[], nn.Module], data: Callable[[], Split]) -> Task:
    """Logits of events."""
    return Task("", title, model, data, nn.BCEWithLogitsLoss(), "nats per event", bernoulli_divergence, ())


def workload(task: Callable[[], Task], batch: int, steps: int, but: Iterable[str]) -> StepWorkload:
    """One, looked at on a thousand rows."""
    return StepWorkload(task, batch, (steps,), (), tuple(but), looked_at=1000)


UNSEEN: dict[str, StepWorkload] = {
    "translator": workload(
        lambda: judge("Sequences turned round, a GRU with attention", Translator, turned_sequences, dim=1),
        *(64, 200, ("symbol.weight", "head.weight")),
    ),
    "clouds": workload(lambda: judge("Kinds of clouds of points", PointNetwork, clouds), 32, 150, ("body.2.weight",)),
    "waves": workload(
        lambda: regress("waves", "The next value of a sum of sines", CausalConvolutions, waves),
        *(32, 150, ("enter.weight", "head.weight")),
    ),
    "ratings": workload(
        lambda: regress("ratings", "Ratings of things by users", Recommender, ratings),
        *(256, 300, ("user.weight", "thing.weight", "user_bias.weight", "thing_bias.weight", "body.2.weight")),
    ),
    "discs": workload(lambda: decide("Pixels of discs, a U-Net", Segmenter, discs), 16, 120, ("head.weight",)),
    "heavy-tails": workload(
        lambda: replace(
            regress("", "12-128-128-4, heavy tails", partial(dense, (12, 128, 128, 4), nn.ReLU), heavy_tails),
            criterion=nn.SmoothL1Loss(),
            unit="smoothed absolute error",
        ),
        *(64, 300, ("4.weight",)),
    ),
    "deep-residual": workload(
        lambda: judge("Digits, twelve residual blocks without norms", DeepResidual, digits), 64, 100, ("head.weight",)
    ),
    "separable": workload(
        lambda: judge("Fashion-MNIST, separable convolutions", SeparableNetwork, partial(fashion, 6000, copies=False)),
        *(64, 120, ("head.weight",)),
    ),
    "painter": workload(
        lambda: regress("painter", "Colours of a plane from sines", Painter, pattern), 512, 200, ("body.6.weight",)
    ),
    "brackets": workload(
        lambda: judge("Depth of brackets, an LSTM of two layers", BracketCounter, brackets, dim=1),
        *(50, 250, ("symbol.weight", "head.weight")),
    ),
    "topics": workload(
        lambda: decide("Topics of bags of words", Labeller, topics), 128, 200, ("words.weight", "body.1.2.weight")
    ),
    "compressor": workload(
        lambda: regress("compressor", "Fashion-MNIST, an autoencoder", Compressor, partial(fashion, 4000, copies=True)),
        *(64, 120, ("head.weight",)),
    ),
}
SUITE: dict[str, tuple[int, float]] = {
    "translator": (200, 3.2),
    "clouds": (150, 1.9),
    "waves": (150, 2.4),
    "ratings": (300, 1.3),
    "discs": (120, 5.0),
    "heavy-tails": (300, 1.1),
    "deep-residual": (100, 1.1),
    "separable": (120, 2.9),
    "painter": (200, 1.1),
    "brackets": (250, 5.0),
    "topics": (200, 1.1),
    "compressor": (120, 4.5),
}
"""Steps, and the CPU seconds that they took `ng.kfac`, about."""
