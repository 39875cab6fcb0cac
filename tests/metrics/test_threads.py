"""Threads that ask for metrics of one model at points of their own get what each would get alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from models import build_seeded, draw
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.pure import RandomState

X = draw(6, 3)


class Slow(nn.Module):
    """Lets other threads run in the middle of its pass, as large operations do. Its mask is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        time.sleep(2e-3)
        hidden = self.dropout(hidden)
        time.sleep(2e-3)
        return self.last(hidden)


def multiply(model: nn.Module, params: dict[str, Tensor], seed: int) -> Tensor:
    random = seed_state(seed)
    G = ng.fisher(model, ng.Categorical()).at(params, X, random=random)
    return G @ torch.ones(G.shape[0]).to(X)


def seed_state(seed: int) -> Any:
    """The random state after a seed, made without moving the global one."""
    return RandomState({torch.device("cpu"): torch.Generator().manual_seed(seed).get_state()})


def read_diagonal(model: nn.Module, params: dict[str, Tensor], seed: int) -> Tensor:
    return ng.fisher(model, ng.Categorical()).at(params, X, random=seed_state(seed)).diagonal()


def read_layers(model: nn.Module, params: dict[str, Tensor], seed: int) -> Tensor:
    metric = ng.fisher(model, ng.Categorical())
    return ng.UnitWise().update(None, metric, params, X, random=seed_state(seed))[0].dense()


def bend(model: nn.Module, params: dict[str, Tensor], seed: int) -> Tensor:
    G = ng.hessian(model, nn.CrossEntropyLoss()).at(params, (X, torch.arange(6) % 2), random=seed_state(seed))
    return G @ torch.ones(G.shape[0]).to(X)


@pytest.mark.parametrize("ask", [multiply, read_diagonal, read_layers, bend])
def test_two_threads_at_two_points_of_one_model(ask: Callable[..., Tensor]):
    model = build_seeded(Slow)
    own = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    points = [{name: p.detach() + shift for name, (p, _) in own.items()} for shift in (0.0, 0.5)]
    expected = [ask(model, point, seed) for seed, point in enumerate(points)]
    barrier = Barrier(2)

    def ask_often(place: int) -> list[Tensor]:
        barrier.wait(10)
        return [ask(model, points[place], place) for _ in range(4)]

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(ask_often, range(2)))
    for place, of_thread in enumerate(answers):
        assert all(torch.equal(answer, expected[place]) for answer in of_thread)
    assert not torch.equal(*expected)
    assert torch.backends.cudnn.enabled
    for name, p in model.named_parameters():
        assert p is own[name][0]
        assert torch.equal(p, own[name][1])
