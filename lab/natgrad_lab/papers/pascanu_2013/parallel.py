"""Many small networks trained at once: one module whose parameters have a leading axis for the run.

With the loss a mean over b examples and R runs, its gradient in run r's parameters is that of the run alone over R,
and the Fisher matrix is block diagonal over runs, each block that of the run alone over R. So one solve with damping
lambda / R on the joint model gives R natural-gradient steps with damping lambda.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng


class Perceptrons(nn.Module):
    """R perceptrons of one tanh layer: inputs (b, R, i) -> logits (b, R, classes).

    Glorot-uniform weights from the generator of each run's seed: equal seeds start equal. Zero biases.
    """

    def __init__(self, seeds: list[int], inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        drawn = {seed: _draw(seed, inputs, hidden, classes) for seed in set(seeds)}
        self.weight1 = nn.Parameter(torch.stack([drawn[seed][0] for seed in seeds]))
        self.bias1 = nn.Parameter(torch.zeros(len(seeds), 1, hidden))
        self.weight2 = nn.Parameter(torch.stack([drawn[seed][1] for seed in seeds]))
        self.bias2 = nn.Parameter(torch.zeros(len(seeds), 1, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.bias1, inputs.transpose(0, 1), self.weight1).tanh()
        return torch.baddbmm(self.bias2, hidden, self.weight2).transpose(0, 1)

    @property
    def runs(self) -> int:
        """R."""
        return len(self.weight1)


def _draw(seed: int, inputs: int, hidden: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (inputs, hidden), (hidden, classes)
    first, second = ((2 * torch.rand(s, generator=generator) - 1) * (6 / sum(s)) ** 0.5 for s in sizes)
    return first, second


Batch = tuple[Tensor, Tensor]  # inputs (b, R, i), labels (b, R)
Direction = Callable[[Perceptrons, Batch], list[Tensor]]  # per parameter (R, ...), of every run for itself


def gradient(model: Perceptrons, batch: Batch) -> list[Tensor]:
    """The gradient of every run's own mean loss."""
    return [model.runs * part for part in _joint(model, batch)]


def _joint(model: Perceptrons, batch: Batch) -> list[Tensor]:
    loss = functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return list(torch.autograd.grad(loss, list(model.parameters())))


@dataclass(frozen=True)
class NaturalDirection:
    """(G + damping I)^-1 g of every run, the metric on the gradient's batch."""

    damping: float
    solver: ng.Solver

    def __call__(self, model: Perceptrons, batch: Batch) -> list[Tensor]:
        params = ng.trainable(model)
        space = ng.Space(params)
        metric = ng.fisher(model, ng.Categorical()).at(params, batch[0])
        rhs = space.flatten(dict(zip(params, _joint(model, batch), strict=True)))
        solution = ng.natural_gradient(metric, rhs, solver=self.solver, damping=self.damping / model.runs)
        return list(space.unflatten(solution.value).values())


def step(model: Perceptrons, direction: list[Tensor], rates: Tensor) -> None:
    """parameter <- parameter - rate * direction, a rate for every run: rates (R,)."""
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), direction, strict=True):
            parameter -= rates[:, None, None] * part


@torch.no_grad()
def losses(model: Perceptrons, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy (R,), share of mistakes (R,), probabilities (b, R, classes)) of every run."""
    logits = model(batch[0])
    labels = batch[1]
    nll = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    wrong = (logits.argmax(-1) != labels).to(nll.dtype)
    return nll.mean(0), wrong.mean(0), logits.softmax(-1)
