"""Scripts as people publish them, with their own optimiser at its own settings and with `ng.kfac` by two lines.

The scripts have the form of pytorch/examples (MNIST, variational autoencoder, language model of words), of minGPT's
adder, of nanoGPT on characters and of PyG's graph network: their models, losses, clipping, accumulation and schedules.
With `ng.kfac` they keep all of these. Two lines change, `ours` in place of `own`, and the loss of a batch:

    opt = ng.kfac(model, criterion)
    loss = opt.loss(model(x), y)

Both are run for equal steps; then the script's own optimiser once more, for the CPU seconds that `ng.kfac` took, its
schedule stretched to them. Drawing batches and evaluations are not counted.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import natgrad as ng
from benchmarks.tables import ChosenTables
from benchmarks.variants import check_names
from natgrad_lab.data import mnist
from natgrad_lab.networks.char_transformer import documentation, encode_text

LossOf = Callable[[Any, Any], Tensor]
HEADS = (
    "script",
    "its optimiser",
    "steps",
    "held-out loss: its own",
    "`ng.kfac`",
    "its own in the seconds of `ng.kfac` (steps)",
    "CPU seconds",
    "a step in SGD's: its own, `ng.kfac`",
)


class Script:
    """A model, its data and its loop; batches are the same for every optimiser, by seed and number of the step."""

    name: str
    optimizer: str  # and its settings, for the table
    steps: int
    clip: float | None = None  # the largest norm of the gradients
    parts = 1  # batches of a step

    @abstractmethod
    def build(self) -> nn.Module: ...

    @abstractmethod
    def own(self, model: nn.Module) -> Optimizer: ...

    @abstractmethod
    def ours(self, model: nn.Module) -> Optimizer: ...

    @abstractmethod
    def draw(self, step: int, generator: torch.Generator) -> Any:
        """The batch of a step."""

    def criterion(self, outputs: Any, targets: Any) -> Tensor:
        """The loss as the script computes it."""
        return functional.nll_loss(outputs, targets)

    @abstractmethod
    def loss(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Tensor:
        """The loss of a batch. loss_of: `criterion`, or `opt.loss` in its place."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The held-out loss."""

    def fall(self, share: float) -> float:
        """The factor on the learning rate after this share of the run."""
        return 1.0


# pytorch/examples: MNIST


class Convolutions(nn.Module):
    """Two convolutions, pooling, two linear layers, dropout after the pooling and between these."""

    def __init__(self, side: int, channels: tuple[int, int], hidden: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, channels[0], 3), nn.Conv2d(*channels, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(channels[1] * ((side - 4) // 2) ** 2, hidden), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        return functional.log_softmax(self.fc2(self.dropout2(functional.relu(self.fc1(x)))), dim=1)


@dataclass(frozen=True)
class LabelledImages:
    """Inputs (n, 1, side, side) with labels, and others that are held out."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    def read() -> LabelledImages:
        """MNIST, of its test part 2000 images."""
        split = mnist()
        test_x, test_y = split.test_x[:2000], split.test_y[:2000]
        return LabelledImages(as_images(split.train_x), split.train_y, as_images(test_x), test_y)


def as_images(pixels: Tensor) -> Tensor:
    """(n, 1, side, side)."""
    side = math.isqrt(pixels[0].numel())
    return pixels.reshape(-1, 1, side, side)


class Mnist(Script):
    """Digits: Adadelta, whose rate falls by .7 in each of 14 epochs."""

    name, optimizer, steps = "MNIST", "Adadelta, 1.0, `StepLR` .7", 200

    def __init__(self, images: LabelledImages, channels: tuple[int, int] = (32, 64), hidden: int = 128) -> None:
        self.images, self.widths = images, (channels, hidden)

    def build(self) -> nn.Module:
        return Convolutions(self.images.x.shape[-1], *self.widths)

    def own(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adadelta(model.parameters(), lr=1.0)

    def ours(self, model: nn.Module) -> Optimizer:
        return ng.kfac(model, functional.nll_loss)

    def draw(self, step: int, generator: torch.Generator) -> Any:
        picked = torch.randint(len(self.images.x), (64,), generator=generator)
        return self.images.x[picked], self.images.y[picked]

    def loss(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Tensor:
        return loss_of(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        return float(functional.nll_loss(model(self.images.test_x), self.images.test_y))

    def fall(self, share: float) -> float:
        return 0.7 ** int(14 * share)


# pytorch/examples: variational autoencoder


class SigmoidVAE(nn.Module):
    """pixels-hidden-code-hidden-pixels: probabilities of the pixels, means and log variances of the code."""

    def __init__(self, pixels: int, hidden: int, code: int) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, hidden), nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.fc3, self.fc4 = nn.Linear(code, hidden), nn.Linear(hidden, pixels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = functional.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decode(z), mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        """The probabilities of the pixels."""
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))


class Autoencoder(Script):
    """Images by a variational autoencoder: the sum over pixels and rows, and the divergence from the prior."""

    name, optimizer, steps = "variational autoencoder", "Adam, 1e-3", 600

    def __init__(self, images: LabelledImages, hidden: int = 400, code: int = 20) -> None:
        self.x, self.test, self.sizes = images.x.flatten(1), images.test_x.flatten(1), (hidden, code)

    def build(self) -> nn.Module:
        return SigmoidVAE(self.x.shape[1], *self.sizes)

    def own(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)

    def ours(self, model: nn.Module) -> Optimizer:
        return ng.kfac(model, nn.BCELoss(reduction="sum"))

    def draw(self, step: int, generator: torch.Generator) -> Any:
        return self.x[torch.randint(len(self.x), (128,), generator=generator)]

    def criterion(self, outputs: Any, targets: Any) -> Tensor:
        return functional.binary_cross_entropy(outputs, targets, reduction="sum")

    def loss(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Tensor:
        pixels, mean, log_variance = model(batch)
        return loss_of(pixels, batch) - 0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())

    def evaluate(self, model: nn.Module) -> float:
        """Nats per image, by one draw of each code."""
        return float(self.loss(model, self.criterion, self.test)) / len(self.test)


# pytorch/examples: language model of words


class WordNet(nn.Module):
    """Embedding, LSTM layers, a layer of the words; dropout between them. Sequences are the first axis."""

    def __init__(self, words: int, width: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, width)
        self.rnn, self.decoder = nn.LSTM(width, width, layers, dropout=0.2), nn.Linear(width, words)
        if tied:
            self.decoder.weight = self.encoder.weight
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        outputs, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        scores = self.decoder(self.drop(outputs)).flatten(0, 1)
        return functional.log_softmax(scores, dim=1), hidden


class Words(Script):
    """Words by an LSTM whose state is carried from batch to batch; SGD with clipped gradients."""

    name, optimizer, steps, clip = "words, LSTM", "SGD, 20", 150, 0.25
    length, columns = 35, 20

    def __init__(self, text: Tensor, width: int = 200, layers: int = 2, tied: bool = False) -> None:
        self.words, self.sizes = int(text.max()) + 1, (width, layers, tied)
        rows = len(text) // self.columns
        self.data = text[: rows * self.columns].view(self.columns, rows).t().contiguous()
        self.cut = rows - max(rows // 20, 2 * self.length)
        self.hidden: Any = None

    def build(self) -> nn.Module:
        return WordNet(self.words, *self.sizes)

    def own(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=20.0)

    def ours(self, model: nn.Module) -> Optimizer:
        return ng.kfac(model, nn.NLLLoss())

    def draw(self, step: int, generator: torch.Generator) -> Any:
        start = step % ((self.cut - 1) // self.length) * self.length
        return start, *self.take(start)

    def take(self, start: int) -> tuple[Tensor, Tensor]:
        """Words (length, columns), and those that follow."""
        return self.data[start : start + self.length], self.data[start + 1 : start + 1 + self.length].flatten()

    def loss(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Tensor:
        start, x, y = batch
        hidden = None if start == 0 else tuple(part.detach() for part in self.hidden)
        outputs, self.hidden = model(x, hidden)
        return loss_of(outputs, y)

    def evaluate(self, model: nn.Module) -> float:
        hidden, losses = None, list[Tensor]()
        for start in range(self.cut, len(self.data) - self.length, self.length):
            x, y = self.take(start)
            outputs, hidden = model(x, hidden)
            losses.append(self.criterion(outputs, y))
        return float(torch.stack(losses).mean())


def read_words(most: int = 5000) -> Tensor:
    """Python's documentation in words and signs, numbered by their frequency; rare ones are the last number."""
    words = re.findall(r"\w+|[^\w\s]", documentation().lower())
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(most))}
    return torch.tensor([known.get(word, most) for word in words])


# minGPT and nanoGPT


class GPTBlock(nn.Module):
    """Attention and a perceptron, norms before each."""

    def __init__(self, width: int, heads: int, bias: bool, dropout: float, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        widen, narrow = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)
        self.mlp, self.drop = nn.Sequential(widen, nn.GELU(), narrow, nn.Dropout(dropout)), nn.Dropout(dropout)
        self.heads, self.fused = heads, fused

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = (query @ key.transpose(2, 3) / math.sqrt(key.shape[3])).masked_fill(ahead, -math.inf)
            mixed = self.drop(scores.softmax(3)) @ value
        x = x + self.drop(self.c_proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.ln_2(x))


class ScriptGPT(nn.Module):
    """Tokens (b, t) and targets -> (logits, loss). nano: weights tied, no biases, fused attention."""

    def __init__(
        self, words: int, length: int, width: int, layers: int, heads: int, dropout: float, nano: bool
    ) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(words, width), nn.Embedding(length, width), nn.Dropout(dropout)
        self.h = nn.ModuleList(GPTBlock(width, heads, not nano, dropout, nano) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width, bias=not nano), nn.Linear(width, words, bias=False)
        if nano:
            self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("c_proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, decay: float) -> list[dict[str, Any]]:
        """Groups with weight decay, for matrices, and without."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


class LanguageModel(Script):
    """A GPT with AdamW, clipped gradients, and a rate that rises and then falls to a tenth by a cosine."""

    clip, rate, betas, decay = 1.0, 1e-3, (0.9, 0.95), 0.1

    def own(self, model: Any) -> Optimizer:
        return torch.optim.AdamW(model.configure_optimizers(self.decay), lr=self.rate, betas=self.betas)

    def ours(self, model: Any) -> Optimizer:
        # AdamW decays by lr times weight_decay, and lr is 1 here
        groups = model.configure_optimizers(self.rate * self.decay)
        return ng.kfac(model, "token_cross_entropy(ignore_index=-1)", params=groups)

    def criterion(self, outputs: Any, targets: Any) -> Tensor:
        return outputs[1]

    def loss(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Tensor:
        x, y = batch
        return loss_of(model(x, y), y)

    def fall(self, share: float) -> float:
        warm = 0.05
        return (share + 0.01) / (warm + 0.01) if share < warm else 0.55 + 0.45 * math.cos(math.pi * share)


class Adder(LanguageModel):
    """Sums of two numbers of two digits, read digit by digit; only the digits of the sum count."""

    name, optimizer, steps, rate = "minGPT's adder", "AdamW, 5e-4, cosine", 1000, 5e-4

    def __init__(self, width: int = 48, layers: int = 3, heads: int = 3, dropout: float = 0.1) -> None:
        self.sizes = (width, layers, heads, dropout)
        order = torch.randperm(10_000, generator=torch.Generator().manual_seed(1337))
        self.train, self.test = order[500:], order[:500]

    def build(self) -> nn.Module:
        return ScriptGPT(10, 6, *self.sizes, nano=False)

    def draw(self, step: int, generator: torch.Generator) -> Any:
        return self.write(self.train[torch.randint(len(self.train), (64,), generator=generator)])

    def write(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """a b and the sum from its last digit on, of numbers 100 a + b; targets of places before the sum are -1."""
        a, b = numbers // 100, numbers % 100
        total = a + b
        digits = torch.stack([a // 10, a % 10, b // 10, b % 10, total % 10, total // 10 % 10, total // 100], 1)
        targets = digits[:, 1:].clone()
        targets[:, :3] = -1
        return digits[:, :-1], targets

    def evaluate(self, model: nn.Module) -> float:
        return float(model(*self.write(self.test))[1])


class Characters(LanguageModel):
    """Characters by nanoGPT at its settings for a CPU; four batches of 12 windows are accumulated."""

    name, optimizer, steps, betas, parts = "nanoGPT, characters", "AdamW, 1e-3, cosine", 80, (0.9, 0.99), 4

    def __init__(self, text: Tensor, length: int = 64, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        self.length, self.sizes, self.words = length, (width, layers, heads), int(text.max()) + 1
        cut = len(text) * 9 // 10
        self.train, self.test = text[:cut], text[cut:]

    def build(self) -> nn.Module:
        return ScriptGPT(self.words, self.length, *self.sizes, dropout=0.0, nano=True)

    def draw(self, step: int, generator: torch.Generator) -> Any:
        return self.take(self.train, torch.randint(len(self.train) - self.length - 1, (12,), generator=generator))

    def take(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (b, length), and those one further."""
        places = starts[:, None] + torch.arange(self.length)
        return text[places], text[places + 1]

    def evaluate(self, model: nn.Module) -> float:
        starts = torch.linspace(0, len(self.test) - self.length - 2, 128).long()
        return float(model(*self.take(self.test, starts))[1])


# PyG: a graph network


class GraphConvolution(nn.Module):
    """D^-1/2 (A + I) D^-1/2 X W + b, by gathering and scattering over the edges."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(len(x))
        source, target = torch.cat([edges[0], loops]), torch.cat([edges[1], loops])
        scale = torch.zeros(len(x)).scatter_add(0, target, torch.ones(len(target))).rsqrt()
        sent = self.lin(x)[source] * (scale[source] * scale[target]).unsqueeze(1)
        return torch.zeros(len(x), sent.shape[1]).index_add(0, target, sent) + self.bias


class GCN(nn.Module):
    """Two graph convolutions with dropout before each."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConvolution(inputs, hidden), GraphConvolution(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = functional.dropout(x, 0.5, self.training)
        x = functional.dropout(self.conv1(x, edges).relu(), 0.5, self.training)
        return functional.log_softmax(self.conv2(x, edges), dim=1)


class GraphNodes(Script):
    """Digits, joined to their five nearest others: 20 nodes of each class are labelled, 1000 others held out."""

    name, optimizer, steps = "PyG's GCN", "Adam, .01, penalty 5e-4", 200

    def __init__(self, hidden: int = 16) -> None:
        images, labels = load_digits(return_X_y=True)
        self.x, self.y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
        near = torch.cdist(self.x, self.x).topk(6, largest=False).indices[:, 1:]
        self.edges = torch.stack([near.flatten(), torch.arange(len(self.x)).repeat_interleave(5)])
        rank = torch.stack([(self.y == c).cumsum(0) for c in range(10)], 1).gather(1, self.y[:, None])[:, 0]
        self.seen, self.test = rank <= 20, torch.arange(len(self.x)) >= len(self.x) - 1000
        self.hidden = hidden

    def build(self) -> nn.Module:
        return GCN(self.x.shape[1], self.hidden, 10)

    def own(self, model: Any) -> Optimizer:
        penalised, free = ({"params": part.parameters()} for part in (model.conv1, model.conv2))
        return torch.optim.Adam([penalised | {"weight_decay": 5e-4}, free | {"weight_decay": 0.0}], lr=0.01)

    def ours(self, model: Any) -> Optimizer:
        penalised, free = ({"params": part.parameters()} for part in (model.conv1, model.conv2))
        return ng.kfac(model, functional.nll_loss, params=[penalised | {"l2": 5e-4}, free | {"l2": 0.0}])

    def draw(self, step: int, generator: torch.Generator) -> Any:
        return self.seen

    def loss(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Tensor:
        return loss_of(model(self.x, self.edges)[batch], self.y[batch])

    def evaluate(self, model: nn.Module) -> float:
        return float(functional.nll_loss(model(self.x, self.edges)[self.test], self.y[self.test]))


SCRIPTS: dict[str, Callable[[], Script]] = {
    "mnist": lambda: Mnist(LabelledImages.read()),
    "vae": lambda: Autoencoder(LabelledImages.read()),
    "words": lambda: Words(read_words()),
    "adder": Adder,
    "characters": lambda: Characters(encode_text(documentation())),
    "graph": GraphNodes,
}


# The loop of a script, and the race


def take_step(script: Script, model: nn.Module, opt: Optimizer, batches: list[Any]) -> float:
    """One step of a script's loop; the loss before it."""
    loss_of: LossOf = getattr(opt, "loss", script.criterion)
    opt.zero_grad()
    total = 0.0
    for batch in batches:
        loss = script.loss(model, loss_of, batch) / len(batches)
        loss.backward()
        total += float(loss.detach())
    if script.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), script.clip)
    opt.step()
    return total


def draw_batches(script: Script, seed: int, step: int) -> list[Any]:
    """Those of a step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return [script.draw(step, generator) for _ in range(script.parts)]


@dataclass(frozen=True)
class ScriptRun:
    """How a run ended."""

    held_out: float  # loss
    steps: int
    seconds: float  # of the processor, for the steps


def run(
    script: Script, build: Callable[[nn.Module], Optimizer], seed: int, steps: int | None, seconds: float = math.inf
) -> ScriptRun:
    """Train for so many steps, or seconds."""
    torch.manual_seed(seed)
    model = script.build()
    opt = build(model)
    base = [group["lr"] for group in opt.param_groups]
    spent, step = 0.0, 0
    while spent < seconds and (steps is None or step < steps):
        batches = draw_batches(script, seed, step)
        factor = script.fall(spent / seconds if steps is None else step / steps)
        for group, rate in zip(opt.param_groups, base, strict=True):
            group["lr"] = factor * rate
        start = time.process_time()
        take_step(script, model, opt, batches)
        spent, step = spent + time.process_time() - start, step + 1
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        return ScriptRun(script.evaluate(model), step, spent)


def compare(script: Script, seeds: range, steps: int) -> tuple[str, ...]:
    """A row of HEADS."""
    own, ours, timed, costs = list[ScriptRun](), list[ScriptRun](), list[ScriptRun](), list[tuple[float, float]]()
    for seed in seeds:
        # CPU seconds of a step of SGD that hardly moves, the median
        torch.manual_seed(seed)
        model = script.build()
        opt, times = torch.optim.SGD(model.parameters(), lr=1e-9), list[float]()
        for step in range(20):
            batches = draw_batches(script, seed, step)
            start = time.process_time()
            take_step(script, model, opt, batches)
            times.append(time.process_time() - start)
        plain = statistics.median(times)
        own.append(run(script, script.own, seed, steps))
        ours.append(run(script, script.ours, seed, steps))
        timed.append(run(script, script.own, seed, None, ours[-1].seconds))
        costs.append((own[-1].seconds / steps / plain, ours[-1].seconds / steps / plain))
    taken, seconds = (statistics.median(values) for values in zip(*((r.steps, r.seconds) for r in timed), strict=True))
    return (
        script.name,
        script.optimizer,
        str(steps),
        spread(own),
        spread(ours),
        f"{spread(timed)} ({taken:.0f})",
        f"{seconds:.3g}",
        ", ".join(f"{statistics.median(column):.2g}" for column in zip(*costs, strict=True)),
    )


def spread(runs: list[ScriptRun]) -> str:
    """The median of the held-out losses, and their range."""
    losses = [run.held_out for run in runs]
    return f"{statistics.median(losses):.4g} ({min(losses):.4g}–{max(losses):.4g})"


def rows(seeds: range, names: tuple[str, ...], steps: int | None) -> Iterator[tuple[str, ...]]:
    """One for each script."""
    check_names("scripts", names, SCRIPTS)
    for name in names or SCRIPTS:
        script = SCRIPTS[name]()
        yield compare(script, seeds, steps or script.steps)


def race_scripts(choices: ChosenTables) -> tuple[()]:
    """Print the table in Markdown, each row when it is there."""
    print(f"\n| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    for row in rows(choices.seeds or range(3), choices.workloads, choices.steps):
        print(f"| {' | '.join(row)} |", flush=True)
    return ()
