"""Methods on many two-layer models at once: gradient descent, Adam, the paper's adaptive natural gradient, `ng.ang`.

A learner has the parameters {"W", "V"} of R models, (R, 8, 8), and `step(X)`, X (R, b, 8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import natgrad as ng
from natgrad.energies import TwoLayer
from natgrad.ground.returning_rows import count_passes, join_returns
from natgrad.structures.adaptive_inverse import (
    adapt_inverse,
    adaptation_rate,
    average_metric,
    join_spread,
    measure_data_unit,
    stays_positive,
    woodbury_inverse,
)
from natgrad_lab.papers.karakida_2016.two_layer_gram import score_gram
from natgrad_lab.papers.karakida_2016.two_layer_single import SingleExample


class Learner(Protocol):
    """R models that learn side by side."""

    model: TwoLayer
    params: dict[str, Tensor]

    def step(self, examples: Tensor) -> None:
        """One step from X (R, b, 8), in place."""
        ...


@dataclass
class DescentLearner:
    """xi <- xi - eta grad l, eta a number or one per model (R, 1, 1)."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float | Tensor
    single: SingleExample = field(init=False)

    def __post_init__(self) -> None:
        self.single = SingleExample(self.params, self.model.link)

    def step(self, examples: Tensor) -> None:
        """One step of every run against its gradient."""
        if examples.shape[1] == 1:
            self.single.descend(examples, self.rate)
            return
        for name, gradient in self.model.gradient(self.params, examples).items():
            self.params[name].sub_(self.rate * gradient)


@dataclass
class Adam:
    """Adam with its usual averages (.9, .999), a rate per model."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float | Tensor
    count: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, examples: Tensor) -> None:
        """One step of every run by Adam."""
        self.count += 1
        for name, gradient in self.model.gradient(self.params, examples).items():
            zeros = (torch.zeros_like(gradient), torch.zeros_like(gradient))
            first, second = self.moments.setdefault(name, zeros)
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
            self.params[name].sub_(self.rate * first / scale / (1 - 0.9**self.count))


@dataclass
class Paper:
    """xi <- xi - eta G^-1 grad l, then G^-1 by eq. 4 or by Woodbury's formula, in place; eta the paper's, no bound.

    Without a method: eq. 4 as printed, eps = 1 / t from t = 1, and no look at whether G^-1 stays positive.
    """

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float
    method: ng.FirstOrder | ng.Woodbury | None
    count: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        W = self.params["W"]
        self.single = SingleExample(self.params, self.model.link)
        self.inverse = torch.eye(2 * W[0].numel(), dtype=W.dtype).repeat(len(W), 1, 1)
        self.both = torch.empty_like(self.single.rows)

    def step(self, examples: Tensor) -> None:
        """One step of every run by the inverse that the paper adapts."""
        self.count += 1
        rows = self.single.slopes(examples)
        torch.bmm(rows, self.inverse, out=self.both)  # one pass over G^-1; four times faster than G^-1 times columns
        offset, floor = (0.0, 0.0) if self.method is None else (self.method.offset, self.method.floor)
        rate = adaptation_rate(self.count, offset, floor)
        self._update(rows[:, :-1].mT, self.both[:, :-1].mT, rate)
        move(self.params, self.both[:, -1], self.rate)  # by G_t^-1: this sample joins G_t+1

    def _update(self, root: Tensor, image: Tensor, rate: float) -> None:
        if isinstance(self.method, ng.Woodbury):
            woodbury_inverse(self.inverse, root, rate, image=image, out=self.inverse)
            return
        bound = (root * image).sum((1, 2))  # tr U^T G^-1 U, at least its largest eigenvalue
        if self.method is None or bool((rate * bound < 1 + rate).all()):
            adapt_inverse(self.inverse, root, rate, image=image, out=self.inverse)
            return
        positive = stays_positive(self.inverse, root, rate, image=image)
        if bool(positive.all()):
            adapt_inverse(self.inverse, root, rate, image=image, out=self.inverse)
            return
        exact = woodbury_inverse(self.inverse, root, rate, image=image)
        adapt_inverse(self.inverse, root, rate, image=image, out=self.inverse)
        self.inverse[~positive] = exact[~positive]
        self.refused += int((~positive).sum())


@dataclass
class NatgradLearner:
    """`ng.ang` with its defaults, for many models."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float = 0.5
    method: ng.Averaged = field(default_factory=ng.Averaged)
    rule: ng.OnlineRadius = field(default_factory=ng.OnlineRadius)
    seen: int = 0
    columns: float = 0.0
    count: int = 0
    spread: dict[str, Any] | None = None
    returned: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        W = self.params["W"]
        self.single = SingleExample(self.params, self.model.link)
        self.metric = W.new_zeros(len(W), 2 * W[0].numel(), 2 * W[0].numel())
        self.upper = torch.eye(2 * W[0].numel(), dtype=W.dtype).repeat(len(W), 1, 1)

    def step(self, examples: Tensor) -> None:
        """One step of every run by the library's own metric and inverse."""
        batch = examples.shape[1]
        self.count, self.seen = self.count + 1, self.seen + batch
        gradient = self._join_metric(examples)
        self.spread = join_spread(self.spread, examples)
        unit = measure_data_unit(self.spread)
        self.returned = join_returns(self.returned, examples[0])  # all models see the same
        passes = count_passes(self.returned, self.seen, examples.shape[-1], self.metric.shape[-1])
        if self.count == 1 or self.count % self.method.every == 0:
            self._factorise(self.method.amount(self.metric, self.seen, unit, passes))
        half = torch.linalg.solve_triangular(self.upper.mT, gradient.unsqueeze(-1), upper=False)
        step = torch.linalg.solve_triangular(self.upper, half, upper=True).squeeze(-1)
        length = self.rate * half.squeeze(-1).norm(dim=1, keepdim=True)
        bound = self.rule.length(batch, self.seen, passes) * unit.unsqueeze(1)
        move(self.params, step * (bound / length).clamp(max=1), self.rate)

    def _join_metric(self, examples: Tensor) -> Tensor:
        """The running average of G with these examples in it; the gradient (R, K)."""
        batch, variables = examples.shape[1:]
        self.columns = self.method.count_columns(self.columns, self.metric.shape[-1], batch * variables, self.seen)
        share = batch * variables / self.columns
        if batch == 1:
            rows = self.single.slopes(examples)
            average_metric(self.metric, rows[:, :-1].mT, share, out=self.metric)
            return rows[:, -1]
        link, raw = self.model.link, self.params["V"]
        self.metric.lerp_(score_gram(self.params["W"], link(raw), link.slope(raw), examples), share)
        return torch.cat([part.flatten(1) for part in self.model.gradient(self.params, examples).values()], 1)

    def _factorise(self, amount: Tensor) -> None:
        """U with U^T U = G + amount I, which LAPACK makes faster than L; the last good one where that fails."""
        damped = self.metric.clone()
        damped.diagonal(dim1=1, dim2=2).add_(amount.unsqueeze(1))
        result = torch.linalg.cholesky_ex(damped, upper=True)
        failed = result.info != 0
        self.upper = torch.where(failed.view(-1, 1, 1), self.upper, result.L) if bool(failed.any()) else result.L


def move(params: dict[str, Tensor], step: Tensor, rate: float) -> None:
    """params less rate * step (R, K), in place."""
    for part, moved in zip(params.values(), step.split([p[0].numel() for p in params.values()], 1), strict=True):
        part.sub_(moved.view_as(part), alpha=rate)
