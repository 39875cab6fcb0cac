"""Every structure that several processes can share, with every way of sharing, on two and on four of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, draw
from optim_models import flat
from process_ranks import count_ranks, needs_gloo, run_ranks, take_part, wrap_model
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.pure import leaves
from natgrad.layers import Seen, layer_squares
from natgrad.operators import DiagonalOperator, Operator
from natgrad.rules import SpectralProgress
from natgrad.structures import Layerwise, Statistics, accumulate_statistics

pytestmark = needs_gloo

X = draw(40, 9)
Y = X[:, :4].argmax(1)
SPLITS = {1: ((40,),), 2: ((20, 20), (33, 7), (40, 0)), 4: ((10, 10, 10, 10), (22, 12, 5, 1), (20, 13, 7, 0))}
EXACT = ng.ExactLabels()


class Net(nn.Module):
    """(b, 9) -> four logits: a table, a convolution, a norm, a bare parameter and layers of unlike widths.

    No layer's inputs depend on one another linearly: eigenvectors of a null space would be round-off's choice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(7, 3), nn.Conv1d(1, 2, 3), nn.LayerNorm(17)
        self.mix, self.out = nn.Linear(17, 12), nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.table((3 * x[:, 0]).long() % 7)
        heard = self.norm(torch.cat([looked_up, self.conv(x.unsqueeze(1)).flatten(1)], 1)).tanh()
        return self.out((self.mix(heard).tanh() * self.scale).tanh())


@dataclass(frozen=True)
class Whitened(Layerwise):
    """A user's own: the diagonal, of gradients that are first divided by the root of what is known so far."""

    sums = True

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        known = 1.0 if before is None else before["known"].clamp(min=1e-6)
        squares = layer_squares(seen)
        past = None if before is None else {"scaled": before["scaled"], "known": before["known"]}
        return accumulate_statistics(past, seen.sums.total({"scaled": squares / known, "known": squares}), decay)

    def operator(self, layer: Any, totals: Statistics, weight: float) -> Operator:
        return DiagonalOperator((totals["scaled"] * totals["known"]).sqrt().reshape(-1) / weight)


def share(structure: Layerwise, model: nn.Module, criterion: Any, **options: Any) -> Any:
    return ng.StructuredNaturalGradient(model, criterion, structure, **options)


BUILT: dict[str, Callable[..., Any]] = {
    "kfac": partial(ng.kfac, estimate=EXACT),
    "ekfac": partial(ng.ekfac, estimate=EXACT),
    "unitwise": partial(ng.unitwise, estimate=EXACT),
    "diagonal": partial(ng.diagonal, estimate=EXACT),
    "online_ng": partial(ng.online_ng, estimate=EXACT),
    "online_ng of gradients": partial(ng.online_ng, estimate=EXACT, gradient=True),
    "Kronecker in blocks": partial(share, ng.Kronecker(0.9, EXACT, largest=8)),
    "EigenKronecker, stale": partial(share, ng.EigenKronecker(0.9, EXACT, stale=0.3)),
    "EigenKronecker, always stale": partial(share, ng.EigenKronecker(0.9, EXACT, stale=0.999)),
    "EigenKronecker in blocks": partial(share, ng.EigenKronecker(0.9, EXACT, largest=8)),
    "UnitWise, quasi-diagonal": partial(share, ng.UnitWise(0.9, EXACT, largest=4)),
    "OnlineLowRank of rank 1": partial(share, ng.OnlineLowRank(0.9, EXACT, rank_in=1, rank_out=1)),
    "a user's own": partial(share, Whitened(0.9, EXACT)),
    **{
        f"{recipe.__name__}, by inputs alone": partial(recipe, estimate=EXACT, rule=SpectralProgress())
        for recipe in (ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng)
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "speed": {"share": "speed"},
    "memory": {"share": "memory"},
    "auto": {"share": "auto"},
    "a budget": {"share": 1000},
}
CHOSEN = {"auto": "speed", "a budget": "memory"}
ASKING = ["ekfac", "online_ng", "EigenKronecker, stale"]
"""Those with messages that depend on what is known so far take all ways, the others the first two."""
CASES = [(name, way) for name in BUILT for way in (WAYS if name in ASKING else ("speed", "memory"))]


def train(build: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Four steps, on the whole data split in another way at each. The last one has two micro-batches."""
    model, splits = build_seeded(Net), SPLITS[count_ranks()]
    outer = wrap_model(model)
    opt = build(outer, nn.CrossEntropyLoss(reduction="sum"), update_every=1, invert_every=1, **options)
    for step in range(4):
        opt.zero_grad()
        for split in (splits[step % len(splits)], *(splits[:1] if step == 3 else ())):
            own = take_part(split)
            opt.loss(outer(X[own]), Y[own]).backward()
        opt.step()
    found = ng.report_sharing(opt)
    state = opt.state_dict()["state"]
    kept = torch.cat([t.double().reshape(-1) for key in sorted(state) for t in leaves(sort_entries(state[key]))])
    return {"flat": flat(model), "kl": opt.state_report().kl, "state": kept, "share": found.share}


def sort_entries(tree: Any) -> Any:
    """By name: who owns a block wrote its entries in another order."""
    return {key: sort_entries(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    f"{name}, {way}": partial(train, BUILT[name], WAYS[way]) for name, way in CASES
}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: train(build, {}) for name, build in BUILT.items()}


@pytest.mark.parametrize(("name", "way"), CASES)
def test_the_steps_and_the_states_are_those_of_one_process(
    ranks: list[dict[str, Any]], alone: dict[str, dict[str, Any]], name: str, way: str
):
    found = [rank[f"{name}, {way}"] for rank in ranks]
    for one in found:
        assert one["share"] == CHOSEN.get(way, way)
        assert torch.equal(one["flat"], found[0]["flat"])
        assert torch.equal(one["state"], found[0]["state"])
    by_inputs = name.endswith("by inputs alone")
    # frequencies of tokens, of which nothing tells the dtype, are sent in single precision
    assert_close(found[0]["flat"], alone[name]["flat"], 1e-8 if by_inputs else 1e-9)
    assert by_inputs or math.isclose(found[0]["kl"], alone[name]["kl"], rel_tol=1e-8)
