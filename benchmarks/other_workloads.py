"""Seven more networks for the step's races, of kinds that the others lack: nobody had tuned a rule on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.data import fashion_mnist, sample_photographs, uci
from natgrad_lab.experiments import Task, TaskData
from natgrad_lab.experiments.base import pair_with_labels
from natgrad_lab.experiments.models import categorical_divergence, gaussian_divergence, mistakes
from natgrad_lab.networks.char_transformer import SYMBOLS, documentation, windows

Make = Callable[[], nn.Module]
NODES, COLOURS = 20, 4  # of a graph
ARMS = 3 * math.pi  # the length of a spiral's arm, as an angle
FASTEST = 8  # frequencies of a time, each twice the one before
SIDE = 96  # of the cut of a photograph


def dense(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers as torch starts them, with an activation between them."""
    return nn.Sequential(*[part for a, b in pairwise(widths) for part in (nn.Linear(a, b), activation())][:-1])


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


# what they are trained on


def standard_table(name: str) -> TaskData:
    """One of the UCI tables, inputs and targets standardised by the training part."""
    table = uci(name)
    x, test_x = (part.float() for part in (table.train_x, table.test_x))
    y, test_y = (part.float().reshape(-1, 1) for part in (table.train_y, table.test_y))
    centre, size = x.mean(0), x.std(0).clamp(min=1e-6)
    middle, spread = y.mean(), y.std()
    return TaskData((x - centre) / size, (y - middle) / spread, (test_x - centre) / size, (test_y - middle) / spread)


def coloured_graphs(train: int = 4000, test: int = 500) -> TaskData:
    """Graphs with the most frequent colour at two steps from each node as its label; one more kind: no neighbour."""
    source, count = torch.Generator().manual_seed(5), train + test
    edges = (torch.rand(count, NODES, NODES, generator=source) < 0.12).float().triu(1)
    edges = edges + edges.mT
    colours = functional.one_hot(torch.randint(COLOURS, (count, NODES), generator=source), COLOURS).float()
    beyond = (edges @ edges > 0).float() * (1 - torch.eye(NODES))
    most = (beyond @ colours + 0.01 * torch.arange(COLOURS)).argmax(2)
    labels = torch.where(edges.sum(2) == 0, COLOURS, most)
    graphs = torch.cat([colours, edges / 3], 2)
    return TaskData(graphs[:train], labels[:train], graphs[train:], labels[train:])


def noisy_spirals(train: int = 40000, test: int = 3000) -> TaskData:
    """Points of a spiral with two arms on their way to pure noise, and that noise."""
    source, count = torch.Generator().manual_seed(5), train + test
    angle = torch.rand(count, 1, generator=source) * ARMS
    turned = angle + torch.randint(2, (count, 1), generator=source) * math.pi
    clean = angle * torch.cat([turned.cos(), turned.sin()], 1) / 5
    clean = clean + 0.03 * torch.randn(count, 2, generator=source)
    time, noise = torch.rand(count, 1, generator=source), torch.randn(count, 2, generator=source)
    points = torch.cat([(time * math.pi / 2).cos() * clean + (time * math.pi / 2).sin() * noise, time], 1)
    return TaskData(points[:train], noise[:train], points[train:], noise[train:])


def photograph() -> TaskData:
    """Every second pixel of a photograph's cut to train on, as on a chess board; the others to test."""
    cut = sample_photographs()[0][100 : 100 + SIDE, 200 : 200 + SIDE]
    grey = ((cut - cut.mean()) / cut.std()).reshape(-1, 1)
    line, numbers = torch.linspace(-1, 1, SIDE), torch.arange(SIDE)
    places = torch.cartesian_prod(line, line)
    even = ((numbers[:, None] + numbers) % 2 == 0).reshape(-1)
    return TaskData(places[even], grey[even], places[~even], grey[~even])


# the tasks


def classify(name: str, title: str, model: Make, data: Callable[[], TaskData], dim: int = -1) -> Task:
    """Cross-entropy."""
    return Task(
        name=name,
        title=title,
        model=model,
        data=data,
        criterion=nn.CrossEntropyLoss(),
        unit="nats per label",
        divergence=partial(categorical_divergence, dim=dim),
        error=partial(mistakes, dim=dim),
        contestants=(),
    )


def regress(name: str, title: str, model: Make, data: Callable[[], TaskData]) -> Task:
    """Squared error."""
    return Task(
        name=name,
        title=title,
        model=model,
        data=data,
        criterion=nn.MSELoss(),
        unit="squared error",
        divergence=gaussian_divergence,
        contestants=(),
    )


def mixer() -> Task:
    return classify("mixer", "Fashion-MNIST, MLP-Mixer", Mixer, lambda: pair_with_labels(fashion_mnist().flat()))


def gru() -> Task:
    return classify("gru", "Next character, GRU of 96", Recurrent, lambda: windows(documentation(), 32), dim=1)


def gcn() -> Task:
    return classify("gcn", "Colours at two steps in a graph, three layers", GraphNetwork, coloured_graphs, dim=1)


def denoiser() -> Task:
    return regress("denoiser", "Noise in points of a spiral", Denoiser, noisy_spirals)


def siren() -> Task:
    return regress("siren", "A photograph by sines", Siren, photograph)


def kin8nm() -> Task:
    network = partial(dense, (8, 128, 128, 128, 1), nn.ReLU)
    return regress("kin8nm", "kin8nm, 8-128-128-128-1", network, partial(standard_table, "kin8nm"))


def protein() -> Task:
    network, data = partial(TableTransformer, 9), partial(standard_table, "protein")
    return regress("protein", "protein, a transformer of columns", network, data)
