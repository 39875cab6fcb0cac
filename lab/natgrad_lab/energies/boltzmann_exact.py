"""A small Boltzmann machine learnt from its exact distribution: steps that each loss and each direction needs.

Three losses whose minimum is the truth, as functions of the parameters theta (R, K) of R runs at once: ratio matching,
pseudo-likelihood, maximum likelihood. All states are enumerated, so that nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import natgrad as ng
from natgrad.ground.spaces import Space

LOSSES = ("ratio matching", "pseudo-likelihood", "maximum likelihood")
FAR = 1e3  # nats: a run that comes there has diverged


class ExactMachine:
    """The machine of spins, the truth's probabilities q of all states, and gradients and metrics of the losses."""

    def __init__(self, units: int, scale: float, seed: int) -> None:
        self.machine = ng.Boltzmann(units, spins=True)
        generator = torch.Generator().manual_seed(seed)
        truth = self.machine.parameters(scale, generator=generator, dtype=torch.float64)
        self.space, self.states = Space(truth), self.machine.states
        with torch.no_grad():
            self.log_q = self.machine.log_probabilities(truth)
            self.q = self.log_q.exp()
            self.jacobian = self.machine.ratio_jacobian(truth, self.states)  # (S, N, K), the same everywhere
        v = self.machine.values(self.states)
        first, second = torch.triu_indices(units, units, 1)
        self.statistics = torch.cat([v, v[:, first] * v[:, second]], dim=1)  # (S, K)

    def gap(self, theta: Tensor) -> Tensor:
        """KL(truth, model) of every run, (R, K) -> (R,), in nats."""
        return ((self.log_q - (theta @ self.statistics.mT).log_softmax(1)) * self.q).sum(1)

    def gradient(self, loss: str, theta: Tensor) -> Tensor:
        """d loss / d theta of every run, (R, K) -> (R, K)."""
        if loss == "maximum likelihood":
            return ((theta @ self.statistics.mT).softmax(1) - self.q) @ self.statistics
        rows = self.jacobian.flatten(0, 1)  # (S N, K)
        ratios = theta @ rows.mT
        missed = torch.sigmoid(-ratios)
        slopes = -missed if loss == "pseudo-likelihood" else -2 * missed.square() * torch.sigmoid(ratios)
        return (slopes * self.q.repeat_interleave(self.machine.units)) @ rows

    def metric(self, loss: str, theta: Tensor) -> Tensor:
        """The Hessian of the loss at q = p with expectations over q: (K,) -> (K, K). Of likelihoods, over the model."""
        if loss == "ratio matching":
            return ng.ratio_metric(self.machine, weights=self.q).at(self.params(theta), self.states).dense()
        if loss == "maximum likelihood":
            p = (self.statistics @ theta).softmax(0)
            centred = self.statistics - p @ self.statistics
            return centred.mT @ (p.unsqueeze(1) * centred)
        rows = self.jacobian.flatten(0, 1)
        entries = ng.Bernoulli().curvature(rows @ theta) * self.q.repeat_interleave(self.machine.units)
        return rows.mT @ (entries.unsqueeze(1) * rows)

    def params(self, theta: Tensor) -> dict[str, Tensor]:
        """theta (K,) as the machine's parameters."""
        return {name: value.requires_grad_() for name, value in self.space.unflatten(theta.clone()).items()}


def descend(
    exact: ExactMachine, loss: str, rates: Tensor, goal: float, steps: int, heard: Callable[[], None]
) -> list[int | None]:
    """Steps of gradient descent from zero until KL <= goal, for every rate at once; None where that is not in time.

    Stops when the best rate is known. KL is looked at after every step up to 200, then every hundredth of the steps so
    far, so that the count is at most 1 % too large.
    """
    theta = torch.zeros(len(rates), exact.space.size, dtype=torch.float64)
    look = 1
    for step in range(1, steps + 1):
        theta = theta - rates.unsqueeze(1) * exact.gradient(loss, theta)
        if step >= look:
            look = step + max(1, step // 100 if step >= 200 else 1)
            heard()
            reached = exact.gap(theta) <= goal
            if bool(reached.any()):
                return [step if r else None for r in reached.tolist()]
    return [None] * len(rates)


def natural(exact: ExactMachine, loss: str, goal: float, steps: int) -> list[float]:
    """KL after every undamped natural step at rate 1 from zero, the start first, until it is below the goal, or FAR."""
    theta = torch.zeros(exact.space.size, dtype=torch.float64)
    gaps = [exact.gap(theta.unsqueeze(0)).item()]
    while goal < gaps[-1] < FAR and len(gaps) <= steps:
        gradient = exact.gradient(loss, theta.unsqueeze(0)).squeeze(0)
        operator = ng.operators.DenseOperator(exact.metric(loss, theta))
        theta = theta - ng.natural_gradient(operator, gradient).value
        gaps.append(exact.gap(theta.unsqueeze(0)).item())
    return gaps


def path(exact: ExactMachine, loss: str, rate: float, steps: int) -> list[tuple[int, float]]:
    """(step, KL) of gradient descent at that rate, at steps that grow by a tenth."""
    theta = torch.zeros(1, exact.space.size, dtype=torch.float64)
    points, look = [(0, exact.gap(theta).item())], 1
    for step in range(1, steps + 1):
        theta = theta - rate * exact.gradient(loss, theta)
        if step >= look or step == steps:
            look = max(step + 1, int(1.1 * step))
            points.append((step, exact.gap(theta).item()))
    return points
