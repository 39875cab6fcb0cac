"""`ng.ang` with its defaults beside tuned Adam on energies that its defaults were not all chosen on: held-out loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn

import natgrad as ng
from benchmarks.kept_results import keep_result
from natgrad.energies import TwoLayer
from natgrad.ground.linalg import svd
from natgrad.ground.spaces import Params

STEPS, BATCH = 300, 50
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
HEADS = ("untrained", "Adam at its best rate", "ng.ang", "lowest of ng.ang")
KNOWN = Path("build/benchmarks/ang.json")
"""What was raced already, by model, data and method: an interrupted run goes on from here. Delete it to begin anew."""

Build = Callable[["EnergyTask", dict[str, Tensor]], Any]


def race(name: str, which: int, build: Build, steps: int = STEPS) -> list[float]:
    """Held-out loss (a fifth of the rows) before and after every tenth part of so many steps; NaN from a failure on."""
    task = make(name, which)
    cut = len(task.data) // 5
    held_out, rows = task.data[:cut], task.data[cut:]
    params = {key: p.clone().requires_grad_() for key, p in task.params.items()} or ng.trainable(task.log_p)
    opt, g = build(task, params), generator(7)
    losses = [value(task, params, held_out)]
    for step in range(1, steps + 1):
        opt.zero_grad()
        x = rows[torch.randint(0, len(rows), (BATCH,), generator=g)]
        try:
            ng.score_matching_loss(task.log_p, params, x).backward()
            opt.step()
        except (ValueError, RuntimeError):  # losses or gradients that are not finite
            return losses + [math.nan] * (11 - len(losses))
        if step % (steps // 10) == 0:
            losses.append(value(task, params, held_out))
    return losses


def value(task: EnergyTask, params: dict[str, Tensor], x: Tensor) -> float:
    return float(ng.score_matching_loss(task.log_p, params, x).detach())


def adam(rate: float) -> Build:
    return lambda task, params: torch.optim.Adam(list(params.values()), lr=rate)


def ours(task: EnergyTask, params: dict[str, Tensor]) -> ng.NaturalGradient:
    return ng.ang(params, ng.score_metric(task.log_p))


def figures(steps: int = STEPS) -> Iterator[tuple[str, ...]]:
    """A row per model and set of data."""
    for name in MODELS:
        for which in range(3):
            ends = {rate: recall_race(name, which, f"adam {rate:g}", adam(rate), steps) for rate in RATES}
            best = min(RATES, key=lambda rate: last(ends[rate]))
            own = recall_race(name, which, "ang", ours, steps)
            lowest = min(v for v in own if not math.isnan(v))
            theirs = f"{ends[best][-1]:.4g} ({best:g})"
            yield f"{name} {which}", f"{own[0]:.4g}", theirs, f"{own[-1]:.4g}", f"{lowest:.4g}"


def recall_race(name: str, which: int, method: str, build: Build, steps: int) -> list[float]:
    """`race`, or what it said in an earlier run."""
    return keep_result(KNOWN, f"{name} {which} {method} {steps}", lambda: race(name, which, build, steps))


def last(losses: list[float]) -> float:
    return math.inf if math.isnan(losses[-1]) else losses[-1]


# Unnormalised densities with three sets of data each, from easy to hard

Draw = Callable[..., Tensor]  # standard normals of a shape, each call from the task's own generator


class Batched(ng.Density):
    """log p of rows (b, N), written for all of them at once."""

    def __init__(self, function: Callable[[Params, Tensor], Tensor]) -> None:
        self.function = function

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        return self.function(params, inputs)


@dataclass(frozen=True)
class EnergyTask:
    """log p, parameters to start from ({}: the module's own), and rows (n, N) in random order."""

    log_p: Any
    params: dict[str, Tensor]
    data: Tensor


def ica(p: Params, x: Tensor) -> Tensor:
    return -torch.log(torch.cosh(x @ p["W"].mT)).sum(1)


def products(p: Params, x: Tensor) -> Tensor:
    """Student-t experts: no lower bound of the loss on few rows."""
    return -(p["nu"].exp() * torch.log1p((x @ p["W"].mT) ** 2)).sum(1)


def mixture(p: Params, x: Tensor) -> Tensor:
    gap = x.unsqueeze(1) - p["m"]
    logs = torch.log_softmax(p["w"], 0) + 0.5 * p["s"].sum(1)
    return torch.logsumexp(logs - 0.5 * (gap**2 * p["s"].exp()).sum(2), 1)


def torus(p: Params, x: Tensor) -> Tensor:
    s, c = x.sin(), x.cos()
    return c @ p["k"] + s @ p["l"] + ((s @ p["A"]) * s).sum(1) + ((c @ p["B"]) * c).sum(1)


def precision(p: Params, x: Tensor) -> Tensor:
    return -0.5 * (x @ p["L"].mT).square().sum(1)


def harmonium(p: Params, x: Tensor) -> Tensor:
    hidden = nn.functional.softplus(x @ p["W"].mT + p["c"]).sum(1)
    return hidden - 0.5 * ((x - p["b"]) ** 2 * p["s"].exp()).sum(1)


def quartic(p: Params, x: Tensor) -> Tensor:
    return -0.25 * (p["q"].exp() * x**4).sum(1) + 0.5 * ((x @ p["A"]) * x).sum(1) + x @ p["h"]


def smooth(p: Params, x: Tensor) -> Tensor:
    return -(p["a"].exp() * torch.sqrt((x @ p["W"].mT - p["m"]) ** 2 + 0.01)).sum(1)


def make(name: str, which: int) -> EnergyTask:
    """The task of one model on its data 0, 1 or 2; the same at every call."""
    g = generator(100 + which)
    torch.manual_seed(100 + which)
    return MODELS[name](which, g, lambda *size: torch.randn(*size, generator=g))


def ica_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    scales = torch.tensor([0.3, 0.5, 1, 1, 1, 1, 2, 3])
    sources = [laplace(g, 3000, 8), student(g, 5, 3000, 8), laplace(g, 3000, 8) * scales][which]
    return EnergyTask(Batched(ica), {"W": r(8, 8) / 8**0.5}, shuffle_rows(sources @ r(8, 8)))


def products_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    x = [table("diabetes"), table("cancer"), laplace(g, 3000, 10) @ (r(10, 10) / 3)][which]
    n = x.shape[1]
    return EnergyTask(Batched(products), {"W": r(2 * n, n) / n**0.5, "nu": torch.zeros(2 * n)}, shuffle_rows(x))


def two_layer_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    return EnergyTask(TwoLayer(), {"W": 0.5 * r(8, 8), "V": 0.5 * r(8, 8)}, shuffle_rows(common_scales(4000, 8, which)))


def mixture_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    blobs = datasets.make_blobs(2500, 4, centers=5, cluster_std=1.5, random_state=1)[0]
    x = [plane("ring", 0), components(3, [0, 1, 2, 3]), white(blobs)][which]
    n = x.shape[1]
    start = {"w": torch.zeros(6), "m": (2 if which == 0 else 1) * r(6, n), "s": torch.zeros(6, n)}
    return EnergyTask(Batched(mixture), start, shuffle_rows(x))


def mlp_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    net = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
    return EnergyTask(net, {}, shuffle_rows(plane(["moons", "circles", "ring"][which], which)))


def harmonium_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    ring = plane("ring", 1) @ r(2, 6) + 0.5 * r(2500, 6)
    x = [ring, components(10, list(range(10))), laplace(g, 3000, 8) @ r(8, 8) / 3][which]
    n = x.shape[1]
    start = {"b": torch.zeros(n), "s": torch.zeros(n), "W": 0.1 * r(12, n), "c": torch.zeros(12)}
    return EnergyTask(Batched(harmonium), start, shuffle_rows(x))


def torus_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    chained = r(2500, 3) @ torch.tensor([[1, 0.5, 0], [0, 0.7, 0.3], [0, 0, 0.4]])
    uniform = math.pi * (2 * torch.rand(2500, 4, generator=g) - 1) + 2 * torch.arange(4.0)
    x = [chained, uniform, (r(2500, 5) @ r(5, 5)) * 0.3][which]
    if which == 1:
        x = torch.cat([x[:, :2], x[:, :2] + 0.4 * r(2500, 2)], 1)
    n = x.shape[1]
    start = {"k": torch.zeros(n), "l": torch.zeros(n), "A": 0.1 * r(n, n), "B": 0.1 * r(n, n)}
    return EnergyTask(Batched(torus), start, shuffle_rows(x))


def precision_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    spread = torch.diag(10 ** torch.linspace(-1, 1, 8))
    mixes = [r(8, 8) / 3, spread @ torch.linalg.qr(r(8, 8))[0], torch.eye(8) + 0.5]
    return EnergyTask(Batched(precision), {"L": torch.eye(8) + 0.1 * r(8, 8)}, shuffle_rows(r(3000, 8) @ mixes[which]))


def quartic_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    n = 5
    z = r(2500, n)
    modes = z.sign() + 0.3 * r(2500, n) + 0.3 * z[:, :1]
    bounded = z / (1 + z.abs()) @ r(n, n)
    cubes = (2 * torch.rand(2500, n, generator=g) - 1) @ (torch.eye(n) + 0.3 * r(n, n))
    x = [modes, bounded, cubes][which]
    return EnergyTask(Batched(quartic), {"q": torch.zeros(n), "A": 0.1 * r(n, n), "h": torch.zeros(n)}, shuffle_rows(x))


def smooth_task(which: int, g: torch.Generator, r: Draw) -> EnergyTask:
    x = [laplace(g, 2500, 4) @ r(4, 4), table("diabetes")[:, :6], student(g, 4, 2500, 5)][which]
    n = x.shape[1]
    start = {"a": torch.zeros(n), "m": torch.zeros(n), "W": torch.eye(n) + 0.1 * r(n, n)}
    return EnergyTask(Batched(smooth), start, shuffle_rows(x))


MODELS: dict[str, Callable[[int, torch.Generator, Draw], EnergyTask]] = {
    "ica": ica_task,
    "products": products_task,
    "mixture": mixture_task,
    "two-layer": two_layer_task,
    "mlp": mlp_task,
    "torus": torus_task,
    "harmonium": harmonium_task,
    "precision": precision_task,
    "quartic": quartic_task,
    "smooth": smooth_task,
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def white(x: Any) -> Tensor:
    x = torch.as_tensor(x, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-6)


def shuffle_rows(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x), generator=generator(0))]


def laplace(g: torch.Generator, *size: int) -> Tensor:
    u = torch.rand(*size, generator=g) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.4999999))


def student(g: torch.Generator, freedom: int, *size: int) -> Tensor:
    z = torch.randn(*size, generator=g)
    squares = torch.stack([torch.randn(*size, generator=g) ** 2 for _ in range(freedom)])
    return z / squares.mean(0).sqrt()


def common_scales(rows: int, n: int, seed: int) -> Tensor:
    """Pairs of normals with a common scale each, rotated: the paper's kind of data."""
    g = generator(seed)
    scale = torch.rand(rows, n // 2, 1, generator=g)
    turn = torch.linalg.qr(torch.randn(n, n, generator=g))[0]
    return (scale * torch.randn(rows, n // 2, 2, generator=g)).flatten(1) @ turn * 1.7


def plane(kind: str, seed: int) -> Tensor:
    """2500 points: two moons, two circles, or six normals on a ring."""
    if kind == "ring":
        g = generator(seed)
        angle = torch.randint(0, 6, (2500,), generator=g) * math.pi / 3
        return 3 * torch.stack([angle.cos(), angle.sin()], 1) + 0.4 * torch.randn(2500, 2, generator=g)
    moons = datasets.make_moons(2500, noise=0.08, random_state=seed)[0]
    circles = datasets.make_circles(2500, noise=0.06, factor=0.4, random_state=seed)[0]
    return torch.as_tensor({"moons": moons, "circles": circles}[kind], dtype=torch.float32)


def table(name: str) -> Tensor:
    """Ten columns of a set of scikit-learn's, whitened, with noise over repeated values."""
    load = {"diabetes": datasets.load_diabetes, "cancer": datasets.load_breast_cancer}[name]
    x = white(load().data)[:, :10]
    return x + 0.1 * torch.randn(x.shape, generator=generator(3))


def components(count: int, classes: list[int]) -> Tensor:
    """The first principal components of scikit-learn's digits, whitened."""
    digits = datasets.load_digits()
    chosen = torch.isin(torch.as_tensor(digits.target), torch.tensor(classes))
    x = torch.as_tensor(digits.data, dtype=torch.float32)[chosen]
    x = x - x.mean(0)
    return white(x @ svd(x)[2][:count].mT)
