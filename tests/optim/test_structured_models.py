"""Every trainable parameter of every kind of model is trained, and the report says what it gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import blocks_of, readings
from models import Assembled, build_seeded
from optim_models import CE, X, Y, deep, iterate, same
from optim_models import net as small_net
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import natgrad as ng

K, D = "Kronecker", "Diagonal"


LOW_RANK: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layers": lambda m, x: m.base(x) + m.up(m.down(x)),
    "matrices": lambda m, x: m.base(x) + x @ m.down.mT @ m.up.mT,
    "merged": lambda m, x: functional.linear(x, m.base.weight + m.up @ m.down, m.base.bias),
}


def build_low_rank(kind: str) -> nn.Module:
    """A frozen layer with a trained correction of low rank: two layers, two bare matrices, or merged."""
    down: Any = nn.Linear(3, 2, bias=False) if kind == "layers" else nn.Parameter(torch.randn(2, 3))
    up: Any = nn.Linear(2, 8, bias=False) if kind == "layers" else nn.Parameter(torch.zeros(8, 2))
    if kind == "layers":
        nn.init.zeros_(up.weight)
    base, out = nn.Linear(3, 8).requires_grad_(False), nn.Linear(8, 3)
    return Assembled(lambda m, x: m.out(torch.tanh(LOW_RANK[kind](m, x))), base=base, out=out, down=down, up=up)


def build_lists() -> nn.Module:
    """Weights in a list and a dictionary of parameters, one of them in an equation of indices."""

    def run(m: Any, x: Tensor) -> Tensor:
        inner = torch.tanh(functional.linear(x, m.weights[0], m.shifts["inner"]))
        return torch.einsum("bhk,hkc->bc", inner.unflatten(1, (2, 2)), m.weights[1])

    weights = nn.ParameterList([torch.randn(4, 3), torch.randn(2, 2, 3)])
    return Assembled(run, weights=weights, shifts=nn.ParameterDict({"inner": torch.zeros(4)}))


class Own(nn.Linear):
    """A subclass with a scale of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


def build_remembered() -> nn.Module:
    """An encoder layer whose activations are computed again in the backward pass."""

    def run(m: Any, x: Tensor) -> Tensor:
        inner: Any = checkpoint(m.inner, m.first(x).unflatten(1, (2, 2)).repeat(1, 1, 2), use_reentrant=False)
        return m.last(inner.mean(1))

    inner = nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)
    return Assembled(run, first=nn.Linear(3, 4), last=nn.Linear(4, 3), inner=inner)


def net(*first: nn.Module) -> nn.Module:
    """A small classifier with this first layer."""
    return nn.Sequential(*first, nn.Tanh(), nn.Linear(3, 3))


WEIGHT_NORM = ("0.parametrizations.weight.original0", "0.parametrizations.weight.original1")
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "low rank, layers": (lambda: build_low_rank("layers"), {"down.weight": K, "up.weight": K}),
    "low rank, matrices": (lambda: build_low_rank("matrices"), {"down": K, "up": K}),
    "low rank, merged": (lambda: build_low_rank("merged"), {"down": K, "up": K}),
    "weight norm": (lambda: net(parametrizations.weight_norm(nn.Linear(3, 3))), dict.fromkeys(WEIGHT_NORM, D)),
    "orthogonal": (
        lambda: net(parametrizations.orthogonal(nn.Linear(3, 3))),
        {"0.parametrizations.weight.original": D, "0.bias": D},
    ),
    "spectral norm": (
        lambda: net(parametrizations.spectral_norm(nn.Linear(3, 3))),
        {"0.parametrizations.weight.original": D, "2.weight": K},
    ),
    "lists of parameters": (build_lists, {"weights.0": K, "weights.1": D, "shifts.inner": D}),
    "a subclass": (lambda: net(Own()), {"0.weight": K, "0.bias": K, "0.scale": D}),
    "checkpointed": (build_remembered, {"inner.self_attn.in_proj_weight": K, "inner.self_attn.out_proj.bias": K}),
    "no bias, no affine": (lambda: net(nn.Linear(3, 3, bias=False), nn.LayerNorm(3, elementwise_affine=False)), {}),
}


@pytest.mark.parametrize("recipe", [ng.kfac, ng.diagonal])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_moves_and_the_report_says_what_it_gets(recipe: Callable[..., Any], name: str):
    build, expected = MODELS[name]
    model = build_seeded(build)
    start, frozen = deep(ng.trainable(model)), {n for n, p in model.named_parameters() if not p.requires_grad}
    opt = recipe(model, CE)
    losses = [float(iterate(opt, model)) for _ in range(4)]
    assert min(losses) < losses[0]
    assert [n for n, p in ng.trainable(model).items() if torch.equal(p, start[n])] == []
    kinds = {row.parameter: row.structure for row in opt.report()}
    assert kinds.keys() == start.keys()
    assert not frozen & kinds.keys()
    if recipe is ng.kfac:
        assert {n: kinds[n] for n in expected} == expected
    assert opt.state_report().failures == 0


def test_a_product_of_two_parameters_has_no_examples():
    # its rows are the matrix's, whose number happens to be the batch's
    model = build_seeded(lambda: build_low_rank("merged"))
    seen = {one.layer.layout.names: one for one in readings(ng.kfac(model, CE), model, X, Y).layers}
    assert seen["down",].pooled
    assert seen["up",].pooled
    assert not seen["out.weight", "out.bias"].pooled


@pytest.mark.parametrize("rule", [None, ng.Momentum()], ids=repr)
def test_parameters_that_are_frozen_later_stay_where_they_are(rule: ng.Rule | None):
    parts = {"later": nn.Linear(3, 3), "bare": nn.Parameter(torch.randn(3, 3)), "scale": nn.Parameter(torch.ones(3))}
    model: Any = Assembled(lambda m, x: m.scale * m.later(x) @ m.bare, **parts).double()
    opt = ng.kfac(model, CE, rule=rule)
    iterate(opt, model)
    for p in (model.later.weight, model.bare, model.scale):
        p.requires_grad_(False)
    kept, bias = deep([model.later.weight, model.bare, model.scale]), model.later.bias.detach().clone()
    for _ in range(2):
        iterate(opt, model)
    assert same(kept, [model.later.weight, model.bare, model.scale])
    assert not torch.equal(model.later.bias, bias)


def test_a_reading_whose_moments_would_overflow_is_refused_as_a_whole():
    model = small_net().float()
    opt = ng.kfac(model, CE, 1e-3, update_every=1)
    iterate(opt, model, X.float())
    before = {block.key: block.weight for block in blocks_of(opt)}
    assert any(before.values())
    opt.loss(model(1e17 * X.float()), Y)  # finite, and so are the factors: their running sums might not stay so
    assert opt.state_report().failures == 1
    assert {block.key: block.weight for block in blocks_of(opt)} == before


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise])
def test_new_statistics_leave_the_inverse_of_the_old_ones_alone(recipe: Any):
    model = small_net()
    opt = recipe(model, CE, 1e-3)
    iterate(opt, model)
    inverses = [copy.deepcopy(block.inverse.dense()) for block in blocks_of(opt)]
    opt._flow.reader.taps.armed = True
    opt.loss(model(2 * X), Y)  # read into the same storage; nothing is inverted before a step
    for block, before in zip(blocks_of(opt), inverses, strict=True):
        assert torch.equal(block.inverse.dense(), before)
