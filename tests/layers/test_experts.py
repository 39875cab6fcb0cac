"""Batched matrices of experts: the blocks of linear layers of their own, however the products are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from engine_state import blocks_of, metric_of
from models import F64, Assembled, assert_close, draw
from optim_models import CE, iterate
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.ground.exchanges import Sums

EXPERTS, IN, OUT, TOKENS = 3, 4, 5, 12
X, LABELS = draw(TOKENS, IN), torch.arange(TOKENS) % 3
ROUTES = [[0, 2, 5, 7], [1, 3], [4, 6, 8, 9, 10, 11]]  # which tokens an expert gets
ORDER = torch.tensor([token for route in ROUTES for token in route]).argsort()
SLOTS = 7  # of an expert, more than it has tokens

Way = Callable[[Tensor, Tensor], Tensor]

# x (experts, slots, IN) and a parameter -> (experts, slots, OUT)
STORED_AS_ROWS: dict[str, Way] = {
    "bmm, transposed": lambda x, w: torch.bmm(x, w.transpose(1, 2)),
    "matmul, mT": lambda x, w: x @ w.mT,
    "einsum": lambda x, w: torch.einsum("end,eod->eno", x, w),
    "matrix first": lambda x, w: torch.bmm(w, x.mT).mT,
    "linear, one by one": lambda x, w: torch.stack([functional.linear(x[e], w[e]) for e in range(EXPERTS)]),
    "unbind": lambda x, w: torch.stack([a @ b.mT for a, b in zip(x.unbind(), w.unbind(), strict=True)]),
}
STORED_AS_COLUMNS: dict[str, Way] = {
    "bmm": torch.bmm,
    "matmul": lambda x, w: x @ w,
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(EXPERTS, 1, OUT, dtype=x.dtype), x, w),
    "einsum, turned": lambda x, w: torch.einsum("end,edo->eno", x, w),
    "tokens first": lambda x, w: torch.einsum("ned,edo->neo", x.transpose(0, 1), w).transpose(0, 1),
    "negative index": lambda x, w: torch.stack([x[e] @ w[e - EXPERTS] for e in range(EXPERTS)]),
}
WAYS = STORED_AS_ROWS | STORED_AS_COLUMNS


def draw_weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, OUT, IN)


def build_batched(way: str) -> nn.Module:
    """Tokens sorted into slots, one matrix per expert, back to the tokens' places, a linear layer."""

    def run(m: Any, x: Tensor) -> Tensor:
        slots = torch.stack([functional.pad(x[route], (0, 0, 0, SLOTS - len(route))) for route in ROUTES])
        found = WAYS[way](slots, m.experts)
        parts = torch.cat([part[: len(route)] for part, route in zip(found, ROUTES, strict=True)])
        return m.out(torch.tanh(parts[ORDER]))

    weight = draw_weight()
    experts = nn.Parameter(weight if way in STORED_AS_ROWS else weight.mT.contiguous())
    return Assembled(run, experts=experts, out=nn.Linear(OUT, 3)).double()


def build_apart() -> nn.Module:
    """The same with a linear layer per expert."""

    def run(m: Any, x: Tensor) -> Tensor:
        parts = torch.cat([expert(x[route]) for expert, route in zip(m.experts, ROUTES, strict=True)])
        return m.out(torch.tanh(parts[ORDER]))

    weight, out = draw_weight(), nn.Linear(OUT, 3)
    experts = nn.ModuleList(nn.Linear(IN, OUT, bias=False) for _ in range(EXPERTS))
    for layer, one in zip(experts, weight, strict=True):
        layer.weight.data = one.clone()
    return Assembled(run, out=out, experts=experts).double()


def blocks(opt: Any) -> dict[str, Tensor]:
    """Every parameter's block of the metric, dense."""
    return {name: metric_of(opt, b).dense() for b in blocks_of(opt) for name in b.layout.names[:1]}


@pytest.mark.parametrize("way", WAYS)
def test_experts_have_the_blocks_of_linear_layers_of_their_own(way: str):
    model, twin = build_batched(way), build_apart()
    opt, other = ng.kfac(model, CE), ng.kfac(twin, CE)
    for one, net in ((opt, model), (other, twin)):
        iterate(one, net, X, LABELS)
        assert {row.structure for row in one.report()} == {"Kronecker"}
    found, expected = blocks(opt)["experts"], blocks(other)
    whole = torch.block_diag(*(expected[f"experts.{e}.weight"] for e in range(EXPERTS)))
    assert_close(found, whole, 1e-11)


def test_an_expert_without_tokens_stays_finite():
    def run(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(EXPERTS, 1, 1, dtype=F64).index_fill(0, torch.tensor(m.used), 1.0)
        return torch.bmm(mask * x, m.experts).sum(0)

    model = Assembled(run, experts=nn.Parameter(torch.randn(EXPERTS, IN, 3)), used=[0, 1]).double()
    opt = ng.StructuredNaturalGradient(model, CE, ng.Kronecker(0.5))
    iterate(opt, model, X, LABELS)
    before = metric_of(opt, blocks_of(opt)[0]).right.clone()
    model.used = [0, 2]
    iterate(opt, model, X, LABELS)
    after = metric_of(opt, blocks_of(opt)[0]).right
    assert bool(torch.isfinite(after).all())
    assert opt.state_report().failures == 0
    # the right factor is that of the inputs; expert 1 was not used again, and keeps its mean
    assert_close(after[1], before[1], 1e-12)
    assert float(before[2].abs().max()) == 0 < float(after[2].abs().max())


@pytest.mark.parametrize(
    "way",
    [
        lambda x, w: torch.einsum("nd,edo->neo", x, w).sum(1),  # one product for all experts
        lambda x, w: torch.bmm(x.expand(6, -1, -1), w.repeat(2, 1, 1)).sum(0),
        lambda x, w: torch.bmm(x.expand(3, -1, -1), w * 2).sum(0),
        lambda x, w: torch.bmm(x.expand(3, -1, -1), w).sum(0) + w.sum(),  # one more use
    ],
)
def test_what_is_no_such_product_keeps_the_diagonal(way: Any):

    model = Assembled(lambda m, x: way(x, m.experts), experts=nn.Parameter(torch.randn(EXPERTS, IN, 3))).double()
    opt = ng.kfac(model, CE)
    iterate(opt, model, X, LABELS)
    assert [row.structure for row in opt.report()] == ["Diagonal"]


@pytest.mark.parametrize("batched", [False, True])
def test_processes_that_have_other_numbers_of_rows_average_the_inputs_of_all(batched: bool):
    """By the sums that each of them gives, which count as its examples among all do."""

    def run(m: Any, x: Tensor) -> Tensor:
        used, outputs = x[:, 0] > 0, x.new_zeros(len(x), OUT)
        for rows, expert in zip((used, ~used), m.experts, strict=True):
            outputs[rows] = x[rows] @ expert.mT if batched else expert(x[rows])
        return outputs

    experts = nn.Parameter(draw_weight()[:2]) if batched else nn.ModuleList(nn.Linear(IN, OUT) for _ in range(2))
    model = Assembled(run, experts=experts).double()
    params, metric = ng.trainable(model), ng.fisher(model, CE)

    def add_up(parts: Sequence[Tensor]) -> Tensor:
        sums = defaultdict[int, list[dict[str, Tensor]]](list)
        for x in parts:
            order, share = count(), len(x) / TOKENS

            def add(fresh: dict[str, Tensor], order: Any = order, share: float = share) -> dict[str, Tensor]:
                sums[next(order)].append({key: share * total for key, total in fresh.items()})
                return fresh

            ng.Kronecker(0.5).update(None, metric, params, x, sums=Sums(add))
        totals = [{key: sum(part[key] for part in each) for key in each[0]} for each in sums.values()]
        return torch.cat([(total["right"] / total["counts"].view(-1, 1, 1)).flatten() for total in totals])

    assert_close(add_up(X.split([5, TOKENS - 5])), add_up([X]), 1e-12)


def test_processes_of_which_some_have_no_rows_of_a_layer_are_refused():
    model = build_apart()
    sums = Sums(lambda fresh: fresh, lambda few: {name: number / 2 for name, number in few.items()})
    with pytest.raises(ValueError, match=r"some processes read the layer of .*experts\.0\.weight"):
        ng.Kronecker(0.5).update(None, ng.fisher(model, CE), ng.trainable(model), X, sums=sums)
