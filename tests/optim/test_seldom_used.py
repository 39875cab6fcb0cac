"""Heads, experts and losses that take turns: each is read and moved at its first use, and an empty one does no harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Assembled, pair
from optim_models import BLOCK_RECIPES, CE, flat, iterate
from torch import Tensor, nn

import natgrad as ng

HEADS = 5


def look_up(m: Any, x: Tensor) -> Tensor:
    """Rows of a table by the signs of two inputs."""
    return m.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Linear(5, 5),
    "a norm": lambda: nn.LayerNorm(5),
    "a matrix": lambda: Assembled(lambda m, x: x @ m.matrix, matrix=nn.Parameter(torch.randn(5, 5) / 2)),
    "factors": lambda: Assembled(lambda m, x: x * m.gain, gain=nn.Parameter(torch.ones(5))),
    "a look-up": lambda: Assembled(look_up, table=nn.Embedding(4, 5)),
    "a convolution": lambda: Assembled(
        lambda m, x: m.filter(x.unsqueeze(1)).squeeze(1), filter=nn.Conv1d(1, 1, 3, padding=1)
    ),
    "two layers": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5)),
}


class Turns(nn.Module):
    """A body, parts of which one works at a time or each on some rows, and a last layer."""

    def __init__(self, kind: str, count: int, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.parts = nn.ModuleList(KINDS[kind]() for _ in range(count))
        self.route: Any = 0
        self.skips = skips
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if isinstance(self.route, int):
            return self.last(self.parts[self.route](hidden))
        total = hidden
        for k, part in enumerate(self.parts):
            rows = (self.route == k).nonzero()[:, 0]
            if len(rows) or not self.skips:
                total = total.index_add(0, rows, part(hidden[rows]))
        return self.last(total)


def step(model: Turns, opt: Any, generator: torch.Generator) -> None:
    x = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    iterate(opt, model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def take_turns(model: Turns, opt: Any, turns: list[int]) -> None:
    """A step for each turn: the part whose turn it is moves, and no other one."""
    generator = torch.Generator().manual_seed(1)
    for turn in turns:
        model.route, before = turn, [flat(part) for part in model.parts]
        step(model, opt, generator)
        moved = [k for k, part in enumerate(model.parts) if not torch.equal(flat(part), before[k])]
        assert moved == [turn]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_moved_at_its_first_use_and_at_every_later_one(kind: str):
    model = Turns(kind, HEADS)
    take_turns(model, ng.kfac(model, CE), [k % HEADS for k in range(2 * HEADS)] + [0] * 6 + [HEADS - 1])


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
def test_one_that_comes_late_is_moved_at_once_by_every_structure(recipe: Any):
    model = Turns("a layer", 3)
    opt = recipe(model, CE)
    take_turns(model, opt, [0] * 21 + [1] + [0] * 3 + [2, 1, 2])
    assert {row.structure for row in opt.report()} != {"not read yet"}


def test_a_saved_run_goes_on_as_if_it_had_not_stopped_where_some_parts_were_not_used_yet():
    model, twin = Turns("a layer", 4), Turns("a layer", 4)
    opt, other = ng.kfac(model, CE), ng.kfac(twin, CE)
    for each, optimizer in ((model, opt), (twin, other)):
        take_turns(each, optimizer, [0] * 9 + [1])
    fresh = Turns("a layer", 4)
    fresh.load_state_dict(twin.state_dict())
    resumed = ng.kfac(fresh, CE)
    resumed.load_state_dict(other.state_dict())
    for each, optimizer in ((model, opt), (fresh, resumed)):
        take_turns(each, optimizer, [2, 0, 3, 2, 1])
    assert torch.equal(flat(model), flat(fresh))


SEEN = Counter[str]()


class Counted(ng.Diagonal):
    """The diagonal metric, which counts the passes of each layer."""

    def statistics(self, seen: Any, before: Any, decay: float) -> Any:
        SEEN[seen.key] += 1
        return super().statistics(seen, before, decay)


@pytest.mark.parametrize(("count", "every"), [(2, 6), (4, 4)])
def test_readings_do_not_keep_in_step_with_turns(count: int, every: int):
    model = Turns("a layer", count)
    opt = ng.StructuredNaturalGradient(model, CE, Counted(0.95), update_every=every)
    take_turns(model, opt, [k % count for k in range(5 * every)])
    SEEN.clear()
    take_turns(model, opt, [k % count for k in range(12 * every)])
    assert all(SEEN[f"parts.{k}.weight parts.{k}.bias"] for k in range(count))
    assert SEEN["body.weight body.bias"] < 24  # and are not much more frequent for it


ROUTES = {"at the first step": {0}, "in the middle": {3}, "for long": {0, 1, 2, 3, 4, 5}}


@pytest.mark.parametrize(
    ("recipe", "kind", "route"),
    [
        (ng.ekfac, "a layer", "for long"),
        *((ng.kfac, *case) for case in [*pair(KINDS, ROUTES), *pair(["a layer"], ROUTES)]),
    ],
)
def test_a_part_without_rows_counts_as_one_that_is_not_called(recipe: Any, kind: str, route: str):
    """The gradient of one is zero, of the other None: without momentum that is the same."""
    empty = ROUTES[route]
    models = [Turns(kind, 2), Turns(kind, 2, skips=True)]
    for model in models:
        opt, generator = recipe(model, CE, momentum=0.0), torch.Generator().manual_seed(2)
        for k in range(9):
            model.route = torch.arange(12) % (1 if k in empty else 2)
            step(model, opt, generator)
        assert opt.state_report().failures == 0
    torch.testing.assert_close(flat(models[0]), flat(models[1]), atol=1e-9, rtol=1e-9)


STRUCTURES = ng.Kronecker(0.9), ng.EigenKronecker(0.9), ng.UnitWise(0.9)
TAKING: dict[str, Any] = {
    **{recipe.__name__: lambda model, recipe=recipe: recipe(model, CE) for recipe in BLOCK_RECIPES},
    **{
        f"flat, {s}": lambda m, s=s: ng.NaturalGradient(m, ng.fisher(m, CE), lr=0.1, damping=0.1, structure=s)
        for s in (*STRUCTURES, ng.Exact())
    },
}


@pytest.mark.parametrize("name", TAKING)
def test_every_structure_and_recipe_takes_a_part_without_rows(name: str):
    model = Turns("a layer", 2)
    opt = TAKING[name](model)
    generator, before = torch.Generator().manual_seed(3), flat(model.parts[1])
    for k in range(7):
        model.route = torch.arange(12) % (1 if k in (0, 4) else 2)
        step(model, opt, generator)
    assert not torch.equal(flat(model.parts[1]), before)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
