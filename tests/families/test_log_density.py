"""Models that return log p(x): loss, metric at data and at draws, and what the optimisers make of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import F64, draw
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.testing import check_metric


class Couplings(nn.Module):
    """Two affine couplings, whose samples are drawn by their inverse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(len(x))
        for part in self.parts:
            still, moved = x.chunk(2, 1)
            mean, scale = part(still).chunk(2, 1)
            x, volume = torch.cat([(moved - mean) * torch.exp(-scale), still], 1), volume - scale.sum(1)
        return volume - 0.5 * x.square().sum(1) - math.log(2 * math.pi)

    def log_prob(self, x: Tensor) -> Tensor:
        return self(x)

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(count, 2, generator=generator, dtype=self.parts[0][0].weight.dtype)
        for part in reversed(list(self.parts)):
            moved, still = z.chunk(2, 1)
            mean, scale = part(still).chunk(2, 1)
            z = torch.cat([still, moved * scale.exp() + mean], 1)
        return z


class Bare(nn.Module):
    """log p(x) by a method, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Couplings()

    def log_prob(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Lazy(nn.Module):
    """Called without inputs for a distribution, as zuko's flows are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bare()

    def forward(self) -> Bare:
        return self.inner

    def log_prob(self, x: Tensor) -> Tensor:
        return self().log_prob(x)


def scores_of(flow: nn.Module, x: Tensor) -> Tensor:
    """d log p(x_i) / d theta, (b, n), an example at a time."""
    space, rows = ng.Space(ng.trainable(flow)), []
    for row in x:
        found = torch.autograd.grad(flow(row.unsqueeze(0)).sum(), list(flow.parameters()))
        rows.append(space.flatten(dict(zip(space, found, strict=True))))
    return torch.stack(rows)


def test_the_empirical_fisher_is_the_moment_of_the_scores_of_x() -> None:
    flow, x = Couplings().double(), draw(9, 2)
    scores = scores_of(flow, x)
    metric = ng.empirical_fisher(flow, ng.LogDensity())
    check_metric(metric, ng.trainable(flow), x, reference=scores.mT @ scores / len(x))


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        (ng.kfac, Couplings),
        (ng.ekfac, Lazy),
        (ng.diagonal, Bare),
        (ng.online_ng, Lazy),
    ],
)
def test_recipes_learn_a_density(recipe: Any, model: Callable[[], nn.Module]) -> None:
    flow, generator = model(), torch.Generator().manual_seed(2)
    opt = recipe(flow, ng.LogDensity())
    losses = []
    for _ in range(25):
        x = torch.randn(128, 2, generator=generator)
        x = torch.stack([x[:, 0], 0.3 * x[:, 1] + x[:, 0].square() - 1], 1)
        opt.zero_grad()
        loss = opt.loss(flow.log_prob(x))
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.3
    assert "empirical Fisher" in str(opt.report())


def test_the_flat_optimizer_takes_x_or_draws_for_its_metric() -> None:
    flow, x = Couplings().double(), draw(20, 2)
    draws = flow.sample(50, torch.Generator().manual_seed(3))
    for observed in (None, draws):
        model = Couplings().double()
        opt = ng.NaturalGradient(model, ng.empirical_fisher(model, ng.LogDensity()), damping=0.1)
        opt.loss(model(x)).backward()
        if observed is not None:
            opt.observe(observed)
        space = ng.Space(ng.trainable(model))
        start = space.flatten({name: p.detach().clone() for name, p in ng.trainable(model).items()})
        gradient = space.flatten({name: p.grad for name, p in model.named_parameters()})
        scores = scores_of(model, x if observed is None else observed)
        matrix = scores.mT @ scores / len(scores) + 0.1 * torch.eye(len(space), dtype=F64)
        opt.step()
        moved = space.flatten({name: p.detach() for name, p in ng.trainable(model).items()}) - start
        direction = -torch.linalg.solve(matrix, gradient)
        assert_close(moved / moved.norm(), direction / direction.norm())


def test_rows_are_counted_where_no_call_of_the_model_has_inputs() -> None:
    """Lengths that grow with the examples are alike, however log p was called."""
    moved = []
    for model in (Couplings, Bare, Lazy):
        flow = model()
        opt = ng.kfac(flow, ng.LogDensity())
        for seed in range(5):
            opt.zero_grad()
            opt.loss(flow.log_prob(draw(256, 2, seed=seed).float())).backward()
            opt.step()
        moved.append(torch.cat([p.detach().flatten() for p in flow.parameters()]))
    assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-6)
    assert_close(moved[2], moved[0], rtol=1e-4, atol=1e-6)


DOORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "targets": (lambda: ng.kfac(Couplings(), ng.LogDensity()).loss(torch.zeros(3), torch.zeros(3)), ValueError,
                r"expected none.*opt\.loss\(log_p\)"),
    "a mean": (lambda: ng.kfac(Couplings(), ng.LogDensity()).loss(torch.zeros(())), ValueError,
               r"log p\(x\) of every example"),
    "one per pixel": (lambda: ng.kfac(Couplings(), ng.LogDensity()).loss(torch.zeros(3, 4)), ValueError,
                      "sum the log probabilities of its variables or tokens"),
    "no targets for classes": (lambda: ng.kfac(nn.Linear(2, 3), nn.CrossEntropyLoss()).loss(torch.zeros(4, 3)),
                               TypeError, r"targets is None.*ng\.LogDensity\(\)"),
    "the exact Fisher": (lambda: ng.fisher(Couplings(), ng.LogDensity()), TypeError,
                         r"ng\.empirical_fisher\(model, ng\.LogDensity\(\)\)"),
    "the sampled Fisher": (lambda: ng.sampled_fisher(Couplings(), ng.LogDensity()), TypeError, "no targets that could"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_doors_say_what_is_wrong(name: str) -> None:
    call, kind, words = DOORS[name]
    with pytest.raises(kind, match=words):
        call()
