"""The networks of `python -m benchmarks step`: what is trained, on what, for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.training import dense
from natgrad_lab.data import Split, fashion_mnist, mnist, sample_photographs, uci
from natgrad_lab.experiments import Experiment, Task
from natgrad_lab.experiments.models import classify, gaussian_divergence
from natgrad_lab.networks import autoencoder, char_transformer, fashion_cnn, llama_text, survival, vae_mnist, vit_cifar
from natgrad_lab.networks.char_transformer import SYMBOLS, documentation, windows
from natgrad_lab.networks.scaled_blocks import scaled_data, scaled_net

Rates = Mapping[str, tuple[float, ...]]
# Of losses that are sums over the pixels of an image.
SUMMED: Rates = {
    "muon": (0.01, 0.02, 0.05, 0.1, 0.2),
    "adam": (2e-4, 5e-4, 1e-3, 3e-3, 6e-3),
    "adamw": (2e-4, 5e-4, 1e-3, 3e-3, 6e-3),
    "sgd": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
}


# Of networks whose inputs are multiplied by 30 in each layer.
SINES: Rates = {
    "muon": (1e-3, 3e-3, 0.01, 0.03, 0.1),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
    "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
    "soap": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
    "sgd": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
}


@dataclass(frozen=True)
class StepWorkload:
    """A task and its budgets."""

    make: Callable[[], Task]  # its own contestants are not looked at
    batch: int
    steps: tuple[int, ...]  # the lengths of the races
    seconds: tuple[float, ...] = ()  # and of those on equal seconds of one thread
    but: tuple[str, ...] = ()  # matrices that are Adam's where Muon has the rest
    rates: Rates = field(default_factory=dict)  # a peer's own five
    looked_at: int = 500


def task_of(race: Experiment, **settings: Any) -> Task:
    """The first task of a race of the laboratory."""
    assert race.tasks is not None
    return race.tasks(race.settings(methods="adam", **settings))[0]


def regress(
    name: str, title: str, model: Callable[[], nn.Module], data: Callable[[], Split], unit: str = "squared error"
) -> Task:
    """Squared error."""
    return Task(name, title, model, data, nn.MSELoss(), unit, gaussian_divergence, ())


def table(name: str, regression: bool, widths: tuple[int, ...], activation: type[nn.Module] = nn.Tanh) -> Task:
    """A network on one of scikit-learn's tables, standardised; a fifth of the rows to test."""
    title, unit = f"{name}, {'-'.join(map(str, widths))}", "squared error" if regression else "nats per row"
    make, rows = regress if regression else classify, partial(rows_of, name, regression)
    return make(name, title, partial(dense, widths, activation), rows, unit=unit)


def rows_of(name: str, regression: bool) -> Split:
    """A table by scikit-learn's name for it."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, cut = x[order], y[order], len(x) * 4 // 5
    x = (x - x[:cut].mean(0)) / x[:cut].std(0).clamp(min=1e-6)
    y = ((y - y[:cut].mean()) / y[:cut].std()).float().unsqueeze(1) if regression else y.long()
    return Split(x[:cut], y[:cut], x[cut:], y[cut:])


def plain(
    name: str, images: Callable[[], Split], widths: tuple[int, ...], batch: int, steps: int, looked_at: int
) -> StepWorkload:
    """Linear layers and rectifiers on images as they are, pixels in [0, 1]."""
    title = f"{name}, {'-'.join(map(str, widths))}"
    make = partial(classify, name, title, partial(dense, widths, nn.ReLU), lambda: images().flat())
    return StepWorkload(make, batch, (steps,), (), ("4.weight",), looked_at=looked_at)


def sigmoid() -> Task:
    """Six layers of sigmoids on the digits: a plateau that plain gradients hardly leave."""
    task = table("digits", False, (64, *[64] * 6, 10), nn.Sigmoid)
    return replace(task, name="sigmoid", title="digits, six layers of sigmoids")


def scaled_blocks(kind: str, gamma: float) -> Task:
    """Blocks x + gamma f(norm(x))."""

    def data() -> Split:
        x, y = scaled_data(kind, 1280)
        return Split(x[:1024], y[:1024], x[1024:], y[1024:])

    title, dim = f"blocks with a scale of {gamma:g}, {kind}", -1 if kind == "convolution" else 1
    return classify(f"{kind}-{gamma:g}", title, lambda: scaled_net(kind, gamma), data, dim=dim, unit="nats per label")


# Networks of kinds that the others lack: nobody had tuned a rule on them

NODES, COLOURS = 20, 4  # of a graph
ARMS = 3 * math.pi  # the length of a spiral's arm, as an angle
FASTEST = 8  # frequencies of a time, each twice the one before
SIDE = 96  # of the cut of a photograph


class Mixer(nn.Module):
    """Images (b, 784) -> logits: patches of 4 x 4 mixed over places and over channels by turns."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Linear(16, width)
        self.places = nn.ModuleList(
            nn.Sequential(nn.Linear(49, 64), nn.GELU(), nn.Linear(64, 49)) for _ in range(depth)
        )
        self.channels = nn.ModuleList(dense((width, 2 * width, width), nn.GELU) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unflatten(1, (28, 28)).unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).flatten(1, 2)
        hidden = self.patch(patches)
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            hidden = hidden + places(self.norms[2 * i](hidden).mT).mT
            hidden = hidden + channels(self.norms[2 * i + 1](hidden))
        return self.head(self.norms[-1](hidden).mean(1))


class Recurrent(nn.Module):
    """Characters (b, t) -> logits (b, symbols, t) of the ones that follow, by a GRU."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.symbol, self.cells = nn.Embedding(len(SYMBOLS), 32), nn.GRU(32, width, batch_first=True)
        self.head = nn.Linear(width, len(SYMBOLS))

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.cells(self.symbol(characters))[0]).mT


class TableTransformer(nn.Module):
    """Rows (b, columns) -> (b, 1): every column is a token."""

    def __init__(self, columns: int, width: int = 32) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.randn(columns, width) * 0.3),
            nn.Parameter(torch.zeros(columns, width)),
        )
        self.answer = nn.Parameter(torch.randn(1, width) * 0.3)
        layers = (
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = rows.unsqueeze(-1) * self.scale + self.shift
        hidden = torch.cat([self.answer.expand(len(rows), 1, -1), tokens], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden[:, 0]))


class GraphNetwork(nn.Module):
    """Graphs (b, nodes, colours + nodes), each node's colour and its neighbours -> logits (b, kinds, nodes)."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(COLOURS, width)
        self.near, self.own, self.out = (nn.ModuleList(nn.Linear(width, width) for _ in range(depth)) for _ in range(3))
        self.head = nn.Linear(width, COLOURS + 1)

    def forward(self, graphs: Tensor) -> Tensor:
        hidden, edges = self.enter(graphs[..., :COLOURS]), graphs[..., COLOURS:]
        for near, own, out in zip(self.near, self.own, self.out, strict=True):
            hidden = hidden + out(functional.relu(own(hidden) + edges @ near(hidden)))
        return self.head(hidden).mT


class Denoiser(nn.Module):
    """Points of the plane with a time (b, 3) -> the noise in them (b, 2)."""

    frequencies: Tensor

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.body = dense((2 + 2 * FASTEST, width, width, width, 2), nn.SiLU)
        self.register_buffer("frequencies", 0.5 * 2.0 ** torch.arange(FASTEST))

    def forward(self, points: Tensor) -> Tensor:
        angles = points[:, 2:] * self.frequencies
        return self.body(torch.cat([points[:, :2], angles.sin(), angles.cos()], 1))


class Siren(nn.Module):
    """Places (b, 2) in [-1, 1] -> a grey value (b, 1), by sines (Sitzmann et al. 2020)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 1)
        for i, layer in enumerate([*self.layers, self.head]):
            bound = 0.5 if i == 0 else math.sqrt(6 / width) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, places: Tensor) -> Tensor:
        for layer in self.layers:
            places = torch.sin(30 * layer(places))
        return self.head(places)


# What they are trained on


def standard_table(name: str) -> Split:
    """One of the UCI tables, inputs and targets standardised by the training part."""
    table = uci(name)
    x, test_x = (part.float() for part in (table.train_x, table.test_x))
    y, test_y = (part.float().reshape(-1, 1) for part in (table.train_y, table.test_y))
    centre, size = x.mean(0), x.std(0).clamp(min=1e-6)
    middle, spread = y.mean(), y.std()
    return Split((x - centre) / size, (y - middle) / spread, (test_x - centre) / size, (test_y - middle) / spread)


def coloured_graphs(train: int = 4000, test: int = 500) -> Split:
    """Graphs with the most frequent colour at two steps from each node as its label; one more kind: no neighbour."""
    source, count = torch.Generator().manual_seed(5), train + test
    edges = (torch.rand(count, NODES, NODES, generator=source) < 0.12).float().triu(1)
    edges = edges + edges.mT
    colours = functional.one_hot(torch.randint(COLOURS, (count, NODES), generator=source), COLOURS).float()
    beyond = (edges @ edges > 0).float() * (1 - torch.eye(NODES))
    most = (beyond @ colours + 0.01 * torch.arange(COLOURS)).argmax(2)
    labels = torch.where(edges.sum(2) == 0, COLOURS, most)
    graphs = torch.cat([colours, edges / 3], 2)
    return Split(graphs[:train], labels[:train], graphs[train:], labels[train:])


def noisy_spirals(train: int = 40000, test: int = 3000) -> Split:
    """Points of a spiral with two arms on their way to pure noise, and that noise."""
    source, count = torch.Generator().manual_seed(5), train + test
    angle = torch.rand(count, 1, generator=source) * ARMS
    turned = angle + torch.randint(2, (count, 1), generator=source) * math.pi
    clean = angle * torch.cat([turned.cos(), turned.sin()], 1) / 5
    clean = clean + 0.03 * torch.randn(count, 2, generator=source)
    time, noise = torch.rand(count, 1, generator=source), torch.randn(count, 2, generator=source)
    points = torch.cat([(time * math.pi / 2).cos() * clean + (time * math.pi / 2).sin() * noise, time], 1)
    return Split(points[:train], noise[:train], points[train:], noise[train:])


def photograph() -> Split:
    """Every second pixel of a photograph's cut to train on, as on a chess board; the others to test."""
    cut = sample_photographs()[0][100 : 100 + SIDE, 200 : 200 + SIDE]
    grey = ((cut - cut.mean()) / cut.std()).reshape(-1, 1)
    line, numbers = torch.linspace(-1, 1, SIDE), torch.arange(SIDE)
    places = torch.cartesian_prod(line, line)
    even = ((numbers[:, None] + numbers) % 2 == 0).reshape(-1)
    return Split(places[even], grey[even], places[~even], grey[~even])


def judge(title: str, model: Callable[[], nn.Module], data: Callable[[], Split], dim: int = -1) -> Task:
    """Classes of whatever has labels."""
    return classify("", title, model, data, dim=dim, unit="nats per label")


def kin8nm() -> Task:
    network = partial(dense, (8, 128, 128, 128, 1), nn.ReLU)
    return regress("kin8nm", "kin8nm, 8-128-128-128-1", network, partial(standard_table, "kin8nm"))


def protein() -> Task:
    network, data = partial(TableTransformer, 9), partial(standard_table, "protein")
    return regress("protein", "protein, a transformer of columns", network, data)


TEXT, TIED = ("symbol.weight", "place.weight", "head.weight"), ("symbol.weight", "head.weight")
CHARACTERS, LLAMA = partial(task_of, char_transformer.RACE), partial(task_of, llama_text.RACE)
CIFAR, DEEP = partial(task_of, vit_cifar.RACE), partial(task_of, autoencoder.RACE)
WORKLOADS: dict[str, StepWorkload] = {
    "char": StepWorkload(CHARACTERS, 32, (200, 400), (30.0,), TEXT, looked_at=64),
    "char-wide": StepWorkload(partial(CHARACTERS, layers=4, width=192), 32, (200,), (), TEXT, looked_at=64),
    "llama": StepWorkload(LLAMA, 32, (200,), (30.0,), TIED, looked_at=64),
    "llama-tied": StepWorkload(partial(LLAMA, tied=True), 32, (200,), (), TIED, looked_at=64),
    "fashion-cnn": StepWorkload(partial(task_of, fashion_cnn.RACE), 128, (150, 600), (15.0,), ("9.weight",)),
    "resnet": StepWorkload(partial(CIFAR, networks="resnet"), 64, (150,), (60.0,), ("head.weight",), looked_at=250),
    "vit": StepWorkload(CIFAR, 64, (200,), (60.0,), ("place", "head.weight"), looked_at=250),
    "autoencoder": StepWorkload(partial(DEEP, data="mnist"), 500, (80,), (60.0,), rates=SUMMED),
    "autoencoder-glorot": StepWorkload(partial(DEEP, data="mnist", start="glorot"), 500, (80,), (60.0,), rates=SUMMED),
    "curves": StepWorkload(partial(DEEP, data="curves"), 500, (80,), (10.0,), rates=SUMMED),
    "digits-autoencoder": StepWorkload(partial(DEEP, data="digits"), 256, (200,), (), rates=SUMMED),
    "plain-fashion": plain("plain-fashion", fashion_mnist, (784, 256, 256, 10), 32, 300, 5000),
    "plain-mnist": plain("plain-mnist", mnist, (784, 512, 512, 10), 64, 300, 5000),
    "mnist-1": plain("mnist-1", mnist, (784, 128, 128, 10), 1, 600, 4000),
    "mnist-4": plain("mnist-4", mnist, (784, 128, 128, 10), 4, 600, 4000),
    "mnist-16": plain("mnist-16", mnist, (784, 128, 128, 10), 16, 150, 4000),
    "mnist-2000": plain("mnist-2000", mnist, (784, 128, 128, 10), 2000, 25, 4000),
    "vae": StepWorkload(partial(task_of, vae_mnist.RACE), 128, (300,), (20.0,), rates=SUMMED),
    "digits": StepWorkload(lambda: table("digits", False, (64, 128, 128, 10)), 256, (100,), ()),
    "wine": StepWorkload(lambda: table("wine", False, (13, 32, 32, 3)), 64, (60,), ()),
    "cancer": StepWorkload(lambda: table("breast_cancer", False, (30, 32, 32, 2)), 64, (60,), ()),
    "diabetes": StepWorkload(lambda: table("diabetes", True, (10, 32, 32, 1)), 64, (60,), ()),
    "sigmoid": StepWorkload(sigmoid, 256, (300,), ()),
    "survival": StepWorkload(partial(task_of, survival.RACE), 128, (200,), (), ("4.weight",)),
    "mixer": StepWorkload(
        lambda: judge("Fashion-MNIST, MLP-Mixer", Mixer, lambda: fashion_mnist().flat()),
        *(24, (100,), (), ("head.weight",)),
    ),
    "gru": StepWorkload(
        lambda: judge("Next character, GRU of 96", Recurrent, lambda: windows(documentation(), 32), dim=1),
        *(12, (100,), (), TIED),
        looked_at=64,
    ),
    "gcn": StepWorkload(
        lambda: judge("Colours at two steps in a graph, three layers", GraphNetwork, coloured_graphs, dim=1),
        *(32, (100,), (), ("head.weight",)),
        looked_at=250,
    ),
    "denoiser": StepWorkload(
        lambda: regress("denoiser", "Noise in points of a spiral", Denoiser, noisy_spirals),
        *(256, (150,), (), ("body.6.weight",)),
        looked_at=3000,
    ),
    "siren": StepWorkload(
        lambda: regress("siren", "A photograph by sines", Siren, photograph),
        *(1024, (150,), (), ("layers.0.weight", "head.weight"), SINES),
        looked_at=4608,
    ),
    "kin8nm": StepWorkload(kin8nm, 128, (150,), (), ("6.weight",), looked_at=2000),
    "protein": StepWorkload(protein, 64, (100,), (), ("head.weight", "scale", "shift", "answer"), looked_at=1000),
} | {
    f"{name}-{gamma:g}": StepWorkload(partial(scaled_blocks, kind, gamma), 64, (150,), (), but=TIED)
    for name, kind in (("convnext", "convolution"), ("eva", "attention"), ("mamba", "scan"))
    for gamma in (1e-6, 1e-3, 1.0)
}

SUITES: dict[str, dict[str, tuple[int, float]]] = {
    "chosen": {
        "digits-autoencoder": (100, 0.5),
        "sigmoid": (200, 0.8),
        "digits": (100, 0.35),
        "mnist-16": (150, 0.8),
        "mnist-2000": (25, 0.8),
        "siren": (150, 0.6),
        "mixer": (100, 1.6),
        "gru": (100, 1.0),
        "char": (100, 9.0),
    },
    "judged": {
        "survival": (120, 0.25),
        "diabetes": (60, 0.14),
        "wine": (60, 0.14),
        "kin8nm": (150, 0.6),
        "protein": (100, 1.2),
        "gcn": (100, 0.7),
        "denoiser": (150, 0.5),
        "fashion-cnn": (60, 2.6),
    },
}
"""Workloads that the default rule was chosen on, and others: steps, and the CPU seconds that they took it, about."""
