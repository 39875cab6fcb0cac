"""The exact score of the rings and of the spiral under noise, by sums over a curve: the best that a network can do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh

SPREAD = 0.05
"""Standard deviation of a ring's radius, and of an arm's points around it."""


@dataclass(frozen=True)
class Curve:
    """Points (k, 2) with weights (k,) that sum to 1, and the variance that is around each of them besides the noise."""

    points: Tensor
    weights: Tensor
    variance: float


def curve(task: str, turns: int = 240) -> Curve | None:
    """Where the density of a task has its mass; None for a task that is known by its examples alone."""
    return {"rings": trace_rings, "spiral": trace_spiral}[task](turns) if task in ("rings", "spiral") else None


def trace_rings(turns: int) -> Curve:
    """Three rings, each at nine radii of Gauss and Hermite."""
    # E f(N(0, 1)) = sum w f(t): eigenvalues of Hermite's recurrence, and squares of first entries
    recurrence = torch.diag(torch.arange(1, 9, dtype=torch.float64).sqrt(), 1)
    places, vectors = eigh(recurrence + recurrence.T)
    radii = (torch.arange(1, 4).unsqueeze(1) + SPREAD * places).flatten()
    weights = (vectors[0].square() / (3 * turns)).repeat(3)
    angles = 2 * math.pi * torch.arange(turns, dtype=torch.float64) / turns
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    points = (radii.view(-1, 1, 1) * circle).flatten(0, 1)
    return Curve(points, weights.repeat_interleave(turns), 0.0)


def trace_spiral(turns: int) -> Curve:
    """Both arms, at the middle of as many equal parts of the draws that they are made of."""
    count = 5 * turns
    turn = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).sqrt() * 3 * math.pi
    arm = torch.stack([turn.cos(), turn.sin()], 1) * (turn / math.pi).unsqueeze(1)
    return Curve(torch.cat([arm, -arm]), torch.full((2 * count,), 1 / (2 * count), dtype=torch.float64), SPREAD**2)


def exact_score(traced: Curve, x: Tensor, noise: float) -> Tensor:
    """d log p / dx of the curve's mass under noise, (b, 2): (E[point | x] - x) / variance."""
    variance = traced.variance + noise**2
    parts = []
    for some in x.double().split(100):
        logits = traced.weights.log() - torch.cdist(some, traced.points).square() / (2 * variance)
        parts.append((logits.softmax(1) @ traced.points - some) / variance)
    return torch.cat(parts).to(x.dtype)
