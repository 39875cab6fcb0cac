"""Classifiers of CIFAR-10 whose logits are the samples: kernelised Wasserstein metric, K-FAC, and gradient descent.

The last layer sees the features through a fixed matrix, whose condition number is 1 in one task and large in the other.
Arbel et al. train residual networks on whole images; here a small network sees small images, for seconds of one core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.metrics import RBF
from natgrad_lab.data import cifar10
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Choice, Contestant, LabError, Task, standardise_pictures
from natgrad_lab.experiments.models import classify
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts, check_positive

METHODS = ("kwng", "kfac", "sgd")
FEATURES = 64  # inputs of the last layer
RADIUS = 1.0  # half the mean square by which a kernelised step may move the logits, as its metric sees it


@dataclass(frozen=True)
class ArbelCifarSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 6.0  # of training per run
    evaluations: int = 4  # at equal distances of time
    looked_at: int = 1000
    images: int = 10_000  # of the training set, its first
    side: int = 16  # pixels: 32, or 16, or 8 as means of neighbours
    batch: int = 128  # images per step
    condition: float = 1000.0  # of the last layer's matrix in the second task
    basis: int = 20  # functions of the kernelised metric
    metric_batch: int = 64  # of a step's images, on which the kernelised metric is taken
    damping: float = 0.1  # of the kernelised metric
    methods: str = "paper"  # or names of contestants such as kwng,sgd

    def __post_init__(self) -> None:
        if self.side not in (8, 16, 32):
            raise LabError(f"side is {self.side}, expected 8, 16 or 32")
        check_counts(self, "condition", "images", "batch", "basis", "metric_batch")
        check_positive(self, "seconds", "damping")


def tasks(settings: ArbelCifarSettings) -> tuple[Task, ...]:
    """Well and ill conditioned."""
    return task("well", 1.0, settings), task("ill", settings.condition, settings)


def task(name: str, condition: float, settings: ArbelCifarSettings) -> Task:
    """Cross-entropy of ten classes."""
    size = f"{settings.images} images of {settings.side} x {settings.side}"
    return classify(
        name,
        f"CIFAR-10, {size}, the last layer's matrix of condition {condition:g}",
        lambda: network(settings.side, condition),
        lambda: standardise_pictures(cifar10(), settings.images, settings.side),
        contestants.select(settings.methods, among(settings), {"paper": METHODS}),
    )


def network(side: int, condition: float) -> nn.Sequential:
    """Two convolutions with pooling, a layer of features, the fixed matrix, and the layer of the logits."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * side * side, FEATURES), nn.ReLU()),
        FixedMatrix(FEATURES, condition),
        nn.Linear(FEATURES, 10),
    )


class FixedMatrix(nn.Module):
    """x -> M x, M = U diag(s) V^T with orthogonal U, V and s from 1 to 1 / condition, as long as the identity."""

    matrix: Tensor

    def __init__(self, size: int, condition: float) -> None:
        super().__init__()
        left, right = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2))
        scale = torch.logspace(0, -math.log10(condition), size)
        self.register_buffer("matrix", (left * (scale * size**0.5 / scale.norm())) @ right.mT)

    def forward(self, x: Tensor) -> Tensor:
        """Of rows (b, size)."""
        return x @ self.matrix.mT


def among(settings: ArbelCifarSettings) -> dict[str, Contestant]:
    """Five rates each; all rates fall linearly with the share of the seconds, to a twentieth."""
    grid, batch = contestants.grid, (settings.batch,)

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return ng.NaturalGradient(
            model,
            ng.transport_metric(model, kernel=RBF(), basis=settings.basis),
            choice["lr"],
            damping=settings.damping,
            metric_batch=settings.metric_batch,
            rule=ng.Momentum(0.9, radius=RADIUS),
        )

    rates = (0.003, 0.006, 0.01, 0.015, 0.02)  # .03 leaves the finite numbers without the bound
    rows = {
        "kwng": Contestant("kernelised Wasserstein", tuple(grid(batch=batch, lr=rates)), build),
        "kfac": contestants.apply_recipe("K-FAC", ng.kfac, grid(batch=batch, lr=(0.1, 0.3, 0.6, 1.0, 1.5))),
        "sgd": contestants.sgd(grid(batch=batch, lr=(0.003, 0.01, 0.03, 0.1, 0.3))),
    }
    return {key: replace(row, falls=lambda spent: 1 - 0.95 * spent) for key, row in rows.items()}


RACE = race(
    "arbel_2020_cifar",
    "kernelised Wasserstein beside K-FAC and SGD on CIFAR-10, last layer well and ill conditioned (needs the data)",
    ArbelCifarSettings,
    tasks,
    title="Arbel et al. 2020: classifiers whose last layer is well or ill conditioned",
    minutes=10,
    quick={"seeds": 1, "images": 1000, "side": 8, "seconds": 1.0, "looked_at": 200},
)
