"""One truncated-Newton step in multiples of one gradient, and how much of it is products with the metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks.products import ProductWorkload, cnn, mlp
from benchmarks.timing import ratios

PRODUCTS = 10
HEADS = ("step / gradient", "products", "their share of it")


@dataclass(frozen=True)
class Setting:
    """A workload, its loss, and on how many of its examples a smaller metric is taken."""

    work: ProductWorkload
    criterion: nn.Module
    some: int


def autoencoder(batch: int = 1000) -> ProductWorkload:
    """784-1000-500-250-30-250-500-1000-784 with tanh, on random grey pixels."""
    sizes = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())][:-1]
    images = torch.rand(batch, 784)
    return ProductWorkload("Autoencoder 784-1000-500-250-30-...", nn.Sequential(*layers), images, images)


def settings() -> list[Setting]:
    """The networks of the other tables, and a deep autoencoder."""
    return [
        Setting(mlp(), nn.CrossEntropyLoss(), 125),
        Setting(cnn(), nn.CrossEntropyLoss(), 32),
        Setting(autoencoder(), nn.BCEWithLogitsLoss(), 125),
    ]


def gradient_of(setting: Setting) -> Callable[[], object]:
    """One forward and backward pass."""
    work, params = setting.work, list(setting.work.model.parameters())
    return lambda: torch.autograd.grad(setting.criterion(work.model(work.inputs), work.targets), params)


def step_of(setting: Setting, optimizer: ng.NaturalGradient) -> Callable[[], object]:
    """A whole iteration: forward, backward, step. The model is put back, so that every one starts from one point."""
    work, model = setting.work, setting.work.model
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def iteration() -> None:
        optimizer.zero_grad()
        optimizer.loss(model(work.inputs), work.targets).backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])

    return iteration


def product_of(setting: Setting, count: int) -> Callable[[], Tensor]:
    """One product with the metric on `count` examples, its graph kept."""
    work = setting.work
    metric = ng.gauss_newton(work.model, setting.criterion)
    operator = metric.at(ng.trainable(work.model), (work.inputs[:count], work.targets[:count]))
    vector = torch.randn(operator.size)
    operator.mv(vector)
    return lambda: operator.mv(vector)


def optimizers(setting: Setting) -> dict[str, tuple[ng.NaturalGradient, int]]:
    """Steps with a fixed number of products, and the examples that each of them is on."""
    model, criterion, batch = setting.work.model, setting.criterion, len(setting.work.inputs)
    cg = ng.CG(rtol=0.0, max_steps=PRODUCTS)

    def freely(**options: int) -> ng.NaturalGradient:
        return ng.hessian_free(model, criterion, solver=cg, **options)  # type: ignore[arg-type]

    return {
        "natgrad_cg": (ng.natgrad_cg(model, criterion, solver=cg), batch),
        "hessian_free": (freely(), batch),
        f"hessian_free, metric on {setting.some}": (freely(metric_batch=setting.some), setting.some),
    }


def report(setting: Setting, repeats: int) -> list[tuple[str, str, str, str]]:
    """Rows (which step, its cost in gradients, that of its products, their share)."""
    made = optimizers(setting)
    works = {name: step_of(setting, optimizer) for name, (optimizer, _) in made.items()}
    counts = sorted({count for _, count in made.values()})
    products = {f"product on {count}": product_of(setting, count) for count in counts}
    times = ratios(gradient_of(setting), {**works, **products}, repeats)
    rows = []
    for name, (optimizer, count) in made.items():
        cost = optimizer.state_report().solver_steps * times[f"product on {count}"].median
        rows.append((name, str(times[name]), f"{cost:.1f}", f"{cost / times[name].median:.0%}"))
    return rows
