"""Models that return log p(x), trained by `ng.kfac` and by Adam at its best rate: held-out nats at equal steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng

STEPS = 500
BATCH = 256
KFAC_RATES = (0.03, 0.1, 0.3, 1.0)
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
HEADS = ("held-out nats, mean over the seeds (least to largest)", "milliseconds a step")


class MaskedLinear(nn.Linear):
    """Output j depends on the inputs i with number_i < number_j where it is strict, else <=. before, after: numbers."""

    def __init__(self, before: Tensor, after: Tensor, strict: bool) -> None:
        super().__init__(len(before), len(after))
        mask = after.unsqueeze(1) > before if strict else after.unsqueeze(1) >= before
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor = self.get_buffer("mask")
        return functional.linear(x, self.weight * mask, self.bias)


def masked_network(size: int, hidden: int, outputs: int, seed: int, backwards: bool = False) -> nn.Sequential:
    """Output block k of `size` values depends at place i on the inputs before i: MADE (Germain et al. 2015)."""
    places = torch.arange(1, size + 1)
    places = places.flip(0) if backwards else places
    inner = torch.randint(1, max(size, 2), (2, hidden), generator=torch.Generator().manual_seed(seed))
    return nn.Sequential(
        MaskedLinear(places, inner[0], False),
        nn.Tanh(),
        MaskedLinear(inner[0], inner[1], False),
        nn.Tanh(),
        MaskedLinear(inner[1], places.repeat(outputs), True),
    )


class Pixels(nn.Module):
    """An autoregressive model of bits: the logit of each given those before."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.net = masked_network(size, hidden, 1, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        """The logits, (b, N)."""
        return self.net(x)

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x) of every example."""
        return -functional.binary_cross_entropy_with_logits(self(x), x, reduction="none").sum(1)


class MaskedFlow(nn.Module):
    """A masked autoregressive flow (Papamakarios et al. 2017): z_i = (x_i - m_i) exp(-s_i), orders in turn."""

    def __init__(self, size: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(masked_network(size, hidden, 2, k, backwards=k % 2 == 1) for k in range(layers))

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x) of every example."""
        volume = x.new_zeros(len(x))
        for part in self.parts:
            mean, scale = part(x).chunk(2, 1)
            scale = 2 * torch.tanh(scale / 2)
            x, volume = (x - mean) * torch.exp(-scale), volume - scale.sum(1)
        return volume + standard_normal(x)


class CouplingFlow(nn.Module):
    """Affine couplings (Dinh et al. 2017): half of x is scaled and moved by functions of the other half."""

    def __init__(self, size: int, hidden: int, layers: int) -> None:
        super().__init__()
        half = size // 2
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(half, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2 * half)
            )
            for _ in range(layers)
        )

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x) of every example."""
        volume = x.new_zeros(len(x))
        for part in self.parts:
            still, moved = x.chunk(2, 1)
            mean, scale = part(still).chunk(2, 1)
            scale = torch.tanh(scale)
            x, volume = torch.cat([(moved - mean) * torch.exp(-scale), still], 1), volume - scale.sum(1)
        return volume + standard_normal(x)


def standard_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I) of every row."""
    return -0.5 * z.square().sum(1) - z.shape[1] / 2 * math.log(2 * math.pi)


@dataclass(frozen=True)
class DensityTask:
    """Data (b, N), those held out, and a model of them."""

    name: str
    model: Callable[[], nn.Module]
    train: Tensor
    test: Tensor


def draw_moons(count: int, seed: int) -> Tensor:
    """Two half circles with noise, (count, 2)."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, generator=generator) * math.pi
    side = (torch.rand(count, generator=generator) < 0.5).float()
    x = torch.stack([angle.cos() * (1 - 2 * side) + side - 0.5, angle.sin() * (1 - 2 * side) + side / 2 - 0.25], 1)
    return 1.5 * x + 0.1 * torch.randn(count, 2, generator=generator)


def tasks() -> Iterator[DensityTask]:
    """The three."""
    yield DensityTask(
        "moons, coupling flow 2-d", partial(CouplingFlow, 2, 32, 4), draw_moons(10_000, 0), draw_moons(4_000, 1)
    )
    images = torch.tensor(load_digits().data, dtype=torch.float32)
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    bits = (images > 8).float()
    yield DensityTask("digits in bits, autoregressive 64-d", partial(Pixels, 64, 128), bits[:1400], bits[1400:])
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    share = 0.02 + 0.96 * (images + noise) / 17
    values = torch.logit(share)
    yield DensityTask("digits in grey, masked flow 64-d", partial(MaskedFlow, 64, 128, 3), values[:1400], values[1400:])


@dataclass(frozen=True)
class Trainer:
    """An optimiser of a model, and the loss of optimiser, model and batch that it is told."""

    name: str
    build: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Any, Tensor], Tensor]


def build_adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), rate)


def list_trainers(task: DensityTask) -> Iterator[Trainer]:
    """Of a task: Adam at each rate, K-FAC as it comes, and with the true Fisher of the bits."""
    for rate in RATES:
        adam = partial(build_adam, rate=rate)
        yield Trainer(f"Adam, lr {rate:g}", adam, lambda opt, model, x: -model.log_prob(x).mean())
    options: dict[str, dict[str, Any]] = {f"lr {rate:g}": {"lr": rate} for rate in KFAC_RATES}
    for words, chosen in (options | {"natural first": {"rule": ng.rules.NoiseAware()}}).items():
        kfac = partial(ng.kfac, criterion=ng.LogDensity(), **chosen)
        yield Trainer(f"ng.kfac, {words}", kfac, lambda opt, model, x: opt.loss(model.log_prob(x)))
    if "bits" in task.name:
        bernoulli = partial(ng.kfac, criterion=ng.Bernoulli())
        yield Trainer("ng.kfac, Bernoulli", bernoulli, lambda opt, model, x: opt.loss(model(x), x))


def train(task: DensityTask, trainer: Trainer, seed: int, falls: bool, steps: int) -> tuple[float, float]:
    """Held-out nats after the steps, and milliseconds of CPU time a step."""
    torch.manual_seed(seed)
    model, generator = task.model(), torch.Generator().manual_seed(seed)
    opt = trainer.build(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps) if falls else None
    start = time.process_time()
    for _ in range(steps):
        x = task.train[torch.randint(len(task.train), (BATCH,), generator=generator)]
        opt.zero_grad()
        trainer.loss(opt, model, x).backward()
        opt.step()
        if schedule is not None:
            schedule.step()
    spent = time.process_time() - start
    with torch.no_grad():
        held_out = -float(model.log_prob(task.test).mean())  # type: ignore[operator]
    return held_out, 1e3 * spent / steps


def report(seeds: range, steps: int | None = None, workloads: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """A row per task, optimiser and schedule; rates stay, or fall by a cosine."""
    among = list(tasks())
    unknown = [word for word in workloads if not any(word in task.name for task in among)]
    if unknown:
        raise SystemExit(f"workloads {', '.join(unknown)}: expected words of {'; '.join(task.name for task in among)}")
    for task in among:
        if workloads and not any(word in task.name for word in workloads):
            continue
        for falls in (False, True):
            for trainer in list_trainers(task):
                runs = [train(task, trainer, seed, falls, steps or STEPS) for seed in seeds]
                nats = [run[0] for run in runs]
                mean = sum(nats) / len(nats)
                name = f"{task.name.split(',')[0]}: {trainer.name}{', falls' * falls}"
                cost = sorted(run[1] for run in runs)[len(runs) // 2]
                yield name, f"{mean:.3f} ({min(nats):.3f} to {max(nats):.3f})", f"{cost:.1f}"
