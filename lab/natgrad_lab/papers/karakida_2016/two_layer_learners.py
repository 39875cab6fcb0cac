"""Methods on many two-layer models at once: gradient descent, Adam, the paper's adaptive natural gradient, `ng.ang`.

A learner has the parameters {"W", "V"} of R models, (R, 8, 8), and `step(X)`, X (R, b, 8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import natgrad as ng
from natgrad.applications import TwoLayer
from natgrad.returning_rows import count_passes, join_returns
from natgrad.structures.adaptive_inverse import adaptation_rate
from natgrad.structures.inverse_updates import adapt_inverse, average_metric, stays_positive, woodbury_inverse
from natgrad.structures.score_unit import join_spread, measure_data_unit
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
    """xi <- xi - eta G^-1 grad l, then G^-1 by eq. 4 or by Woodbury's formula, in place; eta the paper's, no bound."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float
    method: ng.FirstOrder | ng.Woodbury
    count: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        W = self.params["W"]
        self.slopes = Slopes(self.model, self.params)
        self.inverse = torch.eye(2 * W[0].numel(), dtype=W.dtype).repeat(len(W), 1, 1) / self.method.start_at

    def step(self, examples: Tensor) -> None:
        """One step of every run by the inverse that the paper adapts."""
        self.count += 1
        gradient, root = self.slopes(examples)
        both = torch.bmm(self.inverse, torch.cat([root, gradient.unsqueeze(-1)], -1))  # one pass over G^-1
        step = both[..., -1]  # G_t^-1: this sample joins G_t+1
        rate = adaptation_rate(self.count, self.method.offset, self.method.floor)
        self._update(root, both[..., :-1], rate)
        move(self.params, step, self.rate)

    def _update(self, root: Tensor, image: Tensor, rate: float) -> None:
        if isinstance(self.method, ng.Woodbury):
            woodbury_inverse(self.inverse, root, rate, image=image, out=self.inverse)
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
        self.slopes = Slopes(self.model, self.params)
        self.metric = W.new_zeros(len(W), 2 * W[0].numel(), 2 * W[0].numel())
        self.lower = torch.eye(2 * W[0].numel(), dtype=W.dtype).repeat(len(W), 1, 1)

    def step(self, examples: Tensor) -> None:
        """One step of every run by the library's own metric and inverse."""
        batch = examples.shape[1]
        self.count, self.seen = self.count + 1, self.seen + batch
        gradient, root = self.slopes(examples)
        self.columns = self.method.columns(self.columns, root, self.seen)
        average_metric(self.metric, root, root.shape[-1] / self.columns, out=self.metric)
        self.spread = join_spread(self.spread, examples)
        unit = measure_data_unit(self.spread)
        self.returned = join_returns(self.returned, examples[0])  # all models see the same
        passes = count_passes(self.returned, self.seen, examples.shape[-1], self.metric.shape[-1])
        if self.count == 1 or self.count % self.method.every == 0:
            damped = self.metric.clone()
            damped.diagonal(dim1=1, dim2=2).add_(self.method.amount(self.metric, self.seen, unit, passes).unsqueeze(1))
            found = torch.linalg.cholesky_ex(damped)
            failed = (found.info != 0).view(-1, 1, 1)
            self.lower = torch.where(failed, self.lower, found.L)  # keeps the last good one
        half = torch.linalg.solve_triangular(self.lower, gradient.unsqueeze(-1), upper=False)
        step = torch.linalg.solve_triangular(self.lower.mT, half, upper=True).squeeze(-1)
        length = self.rate * half.squeeze(-1).norm(dim=1, keepdim=True)
        bound = self.rule.length(batch, self.seen, passes) * unit.unsqueeze(1)
        move(self.params, step * (bound / length).clamp(max=1), self.rate)


class Slopes:
    """The mean loss's gradient (R, K) and the metric's root (R, K, b N) at X (R, b, N)."""

    def __init__(self, model: TwoLayer, params: dict[str, Tensor]) -> None:
        self.model, self.params = model, params
        self.single = SingleExample(params, model.link)

    def __call__(self, examples: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._single(examples) if examples.shape[1] == 1 else self.model.gradient(self.params, examples)
        root = self.model.score_jacobian(self.params, examples).flatten(1, 2).mT
        scale = examples.shape[1] ** 0.5
        return torch.cat([part.flatten(1) for part in parts.values()], 1), root / scale if scale != 1 else root

    def _single(self, examples: Tensor) -> dict[str, Tensor]:
        link, raw = self.model.link, self.params["V"]
        self.single.V.copy_(link(raw))
        by_W, by_V = self.single.gradient(examples)
        return {"W": by_W, "V": by_V * link.slope(raw)}


def move(params: dict[str, Tensor], step: Tensor, rate: float) -> None:
    """params less rate * step (R, K), in place."""
    for part, moved in zip(params.values(), step.split([p[0].numel() for p in params.values()], 1), strict=True):
        part.sub_(moved.view_as(part), alpha=rate)
