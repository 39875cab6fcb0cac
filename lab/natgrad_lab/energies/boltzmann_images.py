"""A Boltzmann machine on binary images: a pair of weights for every two pixels, learnt by four optimisers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import natgrad as ng
from natgrad.energies.boltzmann import PairPreconditioner
from natgrad_lab import data
from natgrad_lab.experiments.frame import Numbers

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Images:
    """Binary images as rows of bits, for learning and for testing."""

    train: Tensor
    test: Tensor
    side: int

    def hold_out(self) -> Images:
        """The last training images, a thousand or a fifth, in the place of the test images: to choose rates on."""
        held = min(1000, len(self.train) // 5)
        return Images(self.train[:-held], self.train[-held:], self.side)


SETS = ("digits", "mnist")


def images(name: str, looked_at: int) -> Images:
    """The fixed binarisation of MNIST, or the embedded 8 x 8 digits, black where the ink is above 7 of 16."""
    if name == "mnist":
        split = data.binarized_mnist().flat()
        return Images(split.train_x, split.test_x[:: max(1, len(split.test_x) // looked_at)][:looked_at], 28)
    split = data.digits().flat()
    return Images((split.train_x > 7.5 / 16).float(), (split.test_x > 7.5 / 16).float(), 8)


@dataclass(frozen=True)
class EnergyContestant:
    """A loss and a way to minimise it. build(params, machine, rate); rates: what is tried."""

    loss: str  # "ratio matching" or "pseudo-likelihood"
    rates: tuple[float, ...]
    build: Callable[[dict[str, Tensor], ng.Boltzmann, float], torch.optim.Optimizer]


def natural(params: dict[str, Tensor], machine: ng.Boltzmann, rate: float, **options: Any) -> torch.optim.Optimizer:
    """Natural steps in the metric of ratio matching."""
    return ng.NaturalGradient(params, ng.ratio_metric(machine), lr=rate, damping=DAMPING, **options)


class RowsDescent(torch.optim.Optimizer):
    """Heavy-ball momentum .9 of P g, P the metric's inverse by rows: no product with the metric."""

    def __init__(self, params: dict[str, Tensor], machine: ng.Boltzmann, lr: float) -> None:
        super().__init__(params.values(), {"lr": lr})
        self.named, self.metric, self.space = params, ng.ratio_metric(machine), ng.Space(params)
        self.preconditioner = PairPreconditioner(machine, every=20, by_rows=True)
        self.memory: Any = None
        self.velocity: Any = 0.0

    @torch.no_grad()
    def take_step(self, x: Tensor) -> None:
        """With the gradients of the loss, and the images that the metric is taken on."""
        g = self.space.flatten({name: p.grad for name, p in self.named.items() if p.grad is not None})
        g[-self.named["J"].numel() :] += RIDGE * self.named["J"]
        inverse, self.memory = self.preconditioner.update(self.memory, self.metric, self.named, x, ROWS_DAMPING, None)
        self.velocity = 0.9 * self.velocity + inverse.mv(g)
        for name, d in self.space.unflatten(self.velocity).items():
            self.named[name].sub_(d, alpha=self.param_groups[0]["lr"])


def build_adam(params: dict[str, Tensor], machine: ng.Boltzmann, rate: float) -> torch.optim.Optimizer:
    """torch's Adam."""
    return torch.optim.Adam(params.values(), lr=rate)


def build_sgd(params: dict[str, Tensor], machine: ng.Boltzmann, rate: float) -> torch.optim.Optimizer:
    """torch's SGD with momentum .9."""
    return torch.optim.SGD(params.values(), lr=rate, momentum=0.9)


DAMPING, ROWS_DAMPING, RIDGE = 1e-3, 1e-2, 3e-4
CONTESTANTS = {
    "ratio matching, natural": EnergyContestant(  # one step of CG: P gives the direction, the metric its length
        *("ratio matching", (0.3, 0.6, 1.0)),
        lambda p, m, rate: natural(
            p, m, rate, solver=ng.CG(max_steps=1), preconditioner=PairPreconditioner(m, every=20)
        ),
    ),
    "ratio matching, natural, CG alone": EnergyContestant(
        *("ratio matching", (0.3, 0.6, 1.0)),
        lambda p, m, rate: natural(p, m, rate, solver=ng.CG(max_steps=10), warm_start=0.5),
    ),
    "ratio matching, natural by rows": EnergyContestant("ratio matching", (0.03, 0.06, 0.1), RowsDescent),
    "ratio matching, Adam": EnergyContestant("ratio matching", (0.01, 0.03, 0.1), build_adam),
    "ratio matching, SGD": EnergyContestant("ratio matching", (0.1, 0.3, 1.0), build_sgd),
    "pseudo-likelihood, Adam": EnergyContestant("pseudo-likelihood", (0.01, 0.03, 0.1), build_adam),
    "pseudo-likelihood, SGD": EnergyContestant("pseudo-likelihood", (0.03, 0.1, 0.3), build_sgd),
}


def train(
    contestant: EnergyContestant,
    rate: float,
    shown: Images,
    batch: int,
    seconds: float,
    seed: int,
    evaluations: int = 12,
) -> Iterator[Numbers]:
    """Points (steps, seconds of the steps alone, losses) of a run from no couplings; the last one has the parameters.

    The rate falls in a line to zero. A run ends early when a loss is not finite.
    """
    machine = ng.Boltzmann(shown.side**2)
    params, loss = start(machine, shown.train), list_losses(machine)[contestant.loss]
    optimizer = contestant.build(params, machine, rate)
    generator = torch.Generator().manual_seed(seed)
    spent, steps, due = 0.0, 0, 0.0
    while True:
        if spent >= due:
            point = {"steps": steps, "seconds": spent, **losses(machine, params, shown)}
            due += seconds / evaluations
            if spent >= seconds or not math.isfinite(sum(point.values())):
                yield {**point, "params": params}
                return
            yield point
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * max(0.0, 1 - spent / seconds)
        x = shown.train[torch.randint(len(shown.train), (batch,), generator=generator)]
        optimizer.zero_grad()
        loss(params, x).backward()
        if isinstance(optimizer, RowsDescent):
            optimizer.take_step(x)
        else:
            optimizer.step()
        spent, steps = spent + time.process_time() - began, steps + 1
        due = min(due, seconds)


def start(machine: ng.Boltzmann, x: Tensor) -> dict[str, Tensor]:
    """No couplings, and biases that give every pixel its own mean."""
    params = machine.parameters()
    with torch.no_grad():
        params["h"].copy_(find_log_odds(x))
    return params


def find_log_odds(x: Tensor) -> Tensor:
    """Of every pixel."""
    return ((x.sum(0) + 0.5) / (len(x) + 1)).logit()


def losses(machine: ng.Boltzmann, params: dict[str, Tensor], shown: Images) -> dict[str, float]:
    """Both losses on the test images, and on as many for training."""
    some = shown.train[:: max(1, len(shown.train) // len(shown.test))][: len(shown.test)]
    with torch.no_grad():
        return {
            name + part: loss(params, x).item()
            for part, x in {"": shown.test, ", training": some}.items()
            for name, loss in list_losses(machine).items()
        }


def list_losses(machine: ng.Boltzmann) -> dict[str, Loss]:
    """Name -> loss(params, X)."""
    matching = partial(ng.ratio_matching_loss, machine)
    return {"ratio matching": matching, "pseudo-likelihood": machine.pseudo_likelihood_loss}


def draw_noise(shown: Images, count: int, generator: torch.Generator) -> Tensor:
    """Independent pixels with their own means."""
    return torch.bernoulli(shown.train.mean(0).expand(count, -1), generator=generator)


def draws(params: dict[str, Tensor], shown: Images, count: int, sweeps: int) -> list[list[int]]:
    """Images after so many sweeps of Gibbs sampling, from noise with every pixel's own mean."""
    generator = torch.Generator().manual_seed(0)
    noise = draw_noise(shown, count, generator)
    return ng.Boltzmann(shown.side**2).gibbs(params, noise, sweeps=sweeps, generator=generator).int().tolist()
