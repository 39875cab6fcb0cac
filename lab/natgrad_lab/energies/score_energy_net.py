"""An energy network by denoising score matching: rings, a spiral and digits, with Kronecker factors beside Adam.

The score of the network is a module (`ng.Score`), so that denoising is a regression; samples are drawn by Langevin
dynamics down a ladder of noise levels that the network is not told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.densities import Energy
from natgrad.rules import NoiseAware, SpectralDescent
from natgrad_lab.data import digits, mnist
from natgrad_lab.energies import score_energy_page
from natgrad_lab.energies.exact_scores import curve as trace
from natgrad_lab.energies.exact_scores import exact_score
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.experiments.settings import check_positive

TASKS = ("rings", "spiral", "digits", "mnist")
GRID, HELD_OUT, SHOWN = 60, 1000, 40
LAST = 0.001
"""The smallest share of K-FAC's first learning rate."""


@dataclass(frozen=True)
class ScoreEnergySettings:
    """What `--set` can change."""

    tasks: str = "rings,spiral,digits"  # and mnist, where its data are
    seconds: float = 30.0  # of CPU time per method and task
    batch: int = 1000  # better than 250 for both methods
    width: int = 64  # of both hidden layers in two dimensions; four times that on images
    noise: float = 0.1  # in two dimensions
    image_noise: float = 0.3  # on pixels in [0, 1]
    kfac: float = 1.5  # falls with a power of the time that is left; .375 to 6 were tried
    fall: float = 2.0  # that power: the steps of the end are spectral, and keep their length at any gradient
    move: float = 0.3  # of a layer in one natural step
    signal: float = 0.8  # share of signal below which steps become spectral: most of this loss is noise from the start
    whitening: float = 0.01  # damping of the spectral steps; .3 is the default
    adam: float = 0.01  # falls linearly to a twentieth; .0025 to .04 were tried, and .04 is better on the spiral
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in TASKS]
        if unknown:
            raise LabError(f"tasks has {unknown}, expected some of {', '.join(TASKS)}")
        check_positive(self, "seconds", "noise", "image_noise", "fall")

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks to do."""
        return tuple(self.tasks.split(","))


def rings(count: int, generator: torch.Generator) -> Tensor:
    """Three rings of radius 1, 2 and 3, (count, 2)."""
    radius = torch.randint(1, 4, (count,), generator=generator) + 0.05 * torch.randn(count, generator=generator)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def spiral(count: int, generator: torch.Generator) -> Tensor:
    """Two arms of one turn and a half each, (count, 2)."""
    turn = torch.rand(count, generator=generator).sqrt() * 3 * math.pi
    arm = math.pi * torch.randint(2, (count,), generator=generator)
    points = torch.stack([(turn + arm).cos(), (turn + arm).sin()], 1) * (turn / math.pi).unsqueeze(1)
    return points + 0.05 * torch.randn(count, 2, generator=generator)


def images(name: str) -> tuple[Tensor, Tensor]:
    """Training and held-out pixels, (n, pixels)."""
    split = (digits if name == "digits" else mnist)().flat()
    return split.train_x, split.test_x[:HELD_OUT]


Source = Callable[[int, torch.Generator], Tensor]


def source(name: str) -> tuple[Source, Tensor]:
    """How examples are drawn, and held-out ones."""
    if name in ("rings", "spiral"):
        draw = rings if name == "rings" else spiral
        return draw, draw(HELD_OUT, torch.Generator().manual_seed(12345))
    train, test = images(name)
    return lambda count, generator: train[torch.randint(len(train), (count,), generator=generator)], test


def network(name: str, variables: int, width: int, seed: int) -> nn.Module:
    """Two hidden layers with SiLU."""
    width = width if name in ("rings", "spiral") else 4 * width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [m for a, b in pairwise((variables, width, width)) for m in (nn.Linear(a, b), nn.SiLU())]
        return nn.Sequential(*layers, nn.Linear(width, 1))


def optimizers(s: ScoreEnergySettings) -> dict[str, Callable[[nn.Module], Any]]:
    """The methods by name: two lines apart."""
    rule = NoiseAware(
        kl_share=0.05, move=s.move, floor=0.5, noise=s.signal, spectral=SpectralDescent(damping=s.whitening)
    )
    return {
        "K-FAC": lambda score: ng.kfac(score, nn.MSELoss(), s.kfac, rule=rule),
        "Adam": lambda score: torch.optim.Adam(score.parameters(), s.adam),
    }


def training(run: PieceRun, task: str, method: str) -> Numbers:
    """Held-out loss against CPU seconds and steps; the energy's map or samples at the end.

    A curve's points are seconds, steps, loss, and the distance from the exact score where that is known.
    """
    s: ScoreEnergySettings = run.settings
    draw, test = source(task)
    noise = s.noise if task in ("rings", "spiral") else s.image_noise
    energy = network(task, test.shape[1], s.width, run.seed)
    score, generator = ng.Score(energy), torch.Generator().manual_seed(run.seed)
    opt = optimizers(s)[method](score)
    rate, spent, steps = opt.param_groups[0]["lr"], 0.0, 0
    look = watch(task, test, noise)
    curve = [(0.0, 0, *look(score))]
    while spent < s.seconds:
        run.advance(spent / s.seconds)
        began = time.process_time()
        for group in opt.param_groups:
            group["lr"] = rate * share_of_rate(s, method, 1 - spent / s.seconds)
        step(opt, score, draw(s.batch, generator), noise, generator)
        spent, steps = spent + time.process_time() - began, steps + 1
        if spent >= s.seconds * len(curve) / 20:
            curve.append((spent, steps, *look(score)))
    drawn = samples(energy, test, noise, generator, task)
    return {"curve": curve, "steps": steps, "samples": round_numbers(drawn), **picture(energy, task, test, noise)}


def share_of_rate(s: ScoreEnergySettings, method: str, left: float) -> float:
    """What part of its first learning rate a method has while this share of the time is left."""
    return max(left**s.fall, LAST) if method == "K-FAC" else 0.05 + 0.95 * left


def step(opt: Any, score: nn.Module, x: Tensor, noise: float, generator: torch.Generator) -> None:
    """One step on (x + noise z, -z / noise)."""
    z = torch.randn(x.shape, generator=generator)
    opt.zero_grad()
    found = score(x + noise * z)
    loss = (
        nn.functional.mse_loss(found, -z / noise) if isinstance(opt, torch.optim.Adam) else opt.loss(found, -z / noise)
    )
    loss.backward()
    opt.step()


def watch(task: str, test: Tensor, noise: float) -> Callable[[nn.Module], tuple[float, float | None]]:
    """What is looked at on the way: the held-out loss, and noise^2 |s - exact s|^2 per variable, None on images."""
    traced = trace(task)
    if traced is None:
        return lambda score: (held_out(score, test, noise), None)
    noisy = test + noise * held_out_noise(test)
    exact = exact_score(traced, noisy, noise)

    def look(score: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            distance = (noise**2 * (score(noisy) - exact).square()).mean().item()
        return held_out(score, test, noise), distance

    return look


def held_out(score: nn.Module, x: Tensor, noise: float) -> float:
    """noise^2 |s + z / noise|^2 per variable with always the same z: 1 for a network that says nothing."""
    z = held_out_noise(x)
    with torch.no_grad():
        return (noise**2 * (score(x + noise * z) + z / noise).square()).mean().item()


def held_out_noise(x: Tensor) -> Tensor:
    """Always the same draws, in the shape of x."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(54321))


def samples(energy: nn.Module, test: Tensor, noise: float, generator: torch.Generator, task: str) -> Tensor:
    """Langevin draws with Metropolis' correction, in two dimensions from a wide start, on images from noisy ones."""
    density, params = Energy(energy), ng.trainable(energy)
    flat = task in ("rings", "spiral")
    start = 6 * torch.rand(500, 2, generator=generator) - 3 if flat else test[:SHOWN].clone()
    if not flat:
        start = start + noise * torch.randn(start.shape, generator=generator)
    dynamics = ng.Langevin(steps=300 if flat else 200, step=0.3 * noise**2)
    return dynamics.draw(density, params, start, generator)


def picture(energy: nn.Module, task: str, test: Tensor, noise: float) -> Numbers:
    """In two dimensions log p on a grid, its highest value 0; on images noisy ones and their means given the noise."""
    with torch.no_grad():
        if task in ("rings", "spiral"):
            ticks = torch.linspace(-3.8, 3.8, GRID)
            grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).view(-1, 2)
            height = -energy(grid).view(GRID, GRID)
            return {"map": round_numbers(height - height.max()), "data": round_numbers(test[:500])}
        noisy = test[:SHOWN] + noise * torch.randn(test[:SHOWN].shape, generator=torch.Generator().manual_seed(1))
        cleaned = noisy + noise**2 * ng.Score(energy)(noisy)  # Tweedie's formula
        return {"data": round_numbers(test[:SHOWN]), "noisy": round_numbers(noisy), "cleaned": round_numbers(cleaned)}


def round_numbers(tensor: Tensor) -> list[Any]:
    """Three digits behind the point."""
    return tensor.mul(1000).round().div(1000).tolist()


def pieces(s: ScoreEnergySettings) -> tuple[Piece, ...]:
    """One per task and method."""
    return tuple(
        Piece(f"{task} {method}", f"{task}, {method}", lambda run, t=task, m=method: training(run, t, m))
        for task in s.names
        for method in optimizers(s)
    )


STUDY = Experiment(
    name="score_energy_net",
    summary="energy networks by denoising score matching: rings, a spiral, digits; K-FAC beside Adam",
    settings=ScoreEnergySettings,
    pieces=pieces,
    tell=score_energy_page.tell,
    seeds=1,
    minutes=3,
    quick={"seconds": 8.0},
)
