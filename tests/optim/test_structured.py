"""The drop-in optimizer layer by layer: its step, its statistics from the user's own pass, and its contracts."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from engine_state import assert_same_reading, blocks_of, kept_of, readings, record_readings
from models import CASES, F64, assert_close, build_seeded, cross
from optim_models import BLOCK_RECIPES as RECIPES
from optim_models import (
    CE,
    X,
    Y,
    dropout_net,
    flat,
    flat_gradient,
    global_random_state_is_untouched,
    is_finite,
    iterate,
    net,
    train,
)
from torch import nn

import natgrad as ng
from natgrad.ground.constants import KL_SLACK
from natgrad.rules import SpectralProgress
from natgrad.structures import hear_metric

WARM = ng.MeasuredLength().warm

EXACT = ng.ExactLabels()
FREE: dict[str, Any] = {"momentum": 0.0, "rule": ng.MeasuredLength(math.inf, math.inf), "measure": False}


# the step


@pytest.mark.parametrize(
    "structure", [ng.Kronecker(0.9, EXACT), ng.EigenKronecker(0.9, EXACT), ng.UnitWise(0.9, EXACT)]
)
def test_the_first_step_is_the_dense_formula(structure: Any):
    model, before = net(), flat(net())
    operator, _ = structure.update(None, ng.fisher(model, CE), ng.trainable(model), X)
    opt = ng.StructuredNaturalGradient(model, CE, structure, 0.3, damping=0.2, **FREE)
    opt.loss(model(X), Y).backward()
    gradient = flat_gradient(model)
    opt.step()
    expected = torch.zeros_like(before)
    entries = torch.arange(operator.size)
    views = {name: entries[b.start : b.stop].view(b.shape) for name, b in operator.space.blocks.items()}
    for layout, part in operator.parts:
        place, matrix = layout.join(views).reshape(-1), part.dense()
        damped = matrix + 0.2 * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=F64)
        expected[place] = -0.3 * torch.linalg.solve(damped, gradient[place])
    assert_close(flat(model) - before, expected, 1e-10)
    promised = -0.5 * 0.3 * expected @ gradient
    assert_close(torch.tensor(opt.state_report().kl, dtype=F64), promised, 1e-10)


def test_a_penalty_enters_gradient_metric_and_length():
    l2, structure = 0.3, ng.Diagonal(0.9, EXACT)
    model = net()
    operator, _ = structure.update(None, ng.fisher(model, CE), ng.trainable(model), X)
    before = flat(model)
    iterate(ng.StructuredNaturalGradient(model, CE, structure, 0.1, damping=1e-6, l2=l2, **FREE), model)
    expected = -0.1 * (flat_gradient(model) + l2 * before) / (operator.diagonal() + l2)
    assert_close(flat(model) - before, expected, 1e-5)
    model = net()
    free = {"momentum": 0.0, "max_kl": math.inf, "kl_share": math.inf}
    opt = ng.StructuredNaturalGradient(model, CE, structure, l2=l2, **free)
    metric = ng.fisher(model, CE).at(ng.trainable(model), X)
    iterate(opt, model)
    step, slope = flat(model) - before, flat_gradient(model) + l2 * before
    assert opt.state_report().rate < 1
    assert_close(-step @ slope, step @ metric.mv(step) + l2 * step @ step, 1e-8)


def test_momentum_is_the_corrected_mean_of_gradients_before_the_metric():
    model, plain, lr = net(), net(), 1e-6  # so small a rate that neither the metric nor the gradients move on the way
    opt = ng.kfac(model, CE, lr, estimate=EXACT, decay=0.0, **(FREE | {"momentum": 0.5}))
    gradients = []
    for shift in range(3):
        before = flat(model)
        iterate(opt, model, X, (Y + shift) % 3)
        gradients.append(flat_gradient(model))
    weights = torch.tensor([0.25, 0.5, 1.0], dtype=F64)
    mean = torch.einsum("t,tn->n", weights / weights.sum(), torch.stack(gradients))
    reference, start = ng.kfac(plain, CE, lr, estimate=EXACT, decay=0.0, **FREE), flat(plain)
    reference.loss(plain(X), Y)
    for p, part in zip(plain.parameters(), ng.Space(ng.trainable(plain)).unflatten(mean).values(), strict=True):
        p.grad = part.clone()
    reference.step()
    assert_close((flat(model) - before) / lr, (flat(plain) - start) / lr, 1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_moves_no_more_than_the_radius_and_the_share_of_the_loss(recipe: Callable[..., Any]):
    for bound in ({"max_kl": 1e-4, "kl_share": math.inf}, {"max_kl": math.inf, "kl_share": 1e-4}):
        model = net()
        opt = recipe(model, CE, 10.0, rule=ng.MeasuredLength(**bound))
        loss = float(iterate(opt, model))
        allowed = 1e-4 * (loss if bound["max_kl"] == math.inf else 1.0) / WARM
        found = opt.state_report().kl  # below what is allowed where the damping had its part in the length
        least = (
            0.5 if recipe in (ng.online_ng, ng.kfac, ng.tonga) else 1 - (KL_SLACK if bound["max_kl"] < 1 else 0) - 1e-5
        )
        assert least * allowed <= found <= allowed * (1 + 1e-5)
        assert opt.state_report().rate < 1


# statistics from the user's own pass

SAME = ["mlp", "sequence", "conv2d", "odd convolutions", "group norm", "in-place rectifier", "checkpointed", "frozen"]


@pytest.mark.parametrize("name", [*SAME, "attention", "twice used", "linear over positions", "batch norm, training"])
def test_taps_read_what_a_pass_of_its_own_would(name: str):
    case, criterion = CASES[name], ng.Categorical()
    model, params = case.make()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        targets = copy.deepcopy(model)(case.inputs).argmax(-1)
    metric, generator = ng.fisher(model, criterion), torch.Generator().manual_seed(0)
    expected = hear_metric(metric, params, case.inputs, EXACT, generator, random=None)
    reading = readings(ng.kfac(model, criterion, estimate=EXACT), model, case.inputs, targets)
    assert_same_reading(reading, expected.layers)


@pytest.mark.parametrize("name", ["tied", "behind a layer's back", "bare parameter"])
def test_parameters_without_a_layer_get_an_unbiased_diagonal(name: str):
    case = CASES[name]
    model, params = case.make()
    exact = ng.fisher(model, case.family).at(params, case.inputs).diagonal()
    expected, draws = ng.Space(params).unflatten(exact), 60
    opt = ng.kfac(model, case.family, lr=0.0, decay=0.0)
    targets, squares = case.family.sample(model(case.inputs)), []
    record_readings(opt, found := [])
    for _ in range(draws):
        opt._flow.reader.taps.armed = True
        opt.loss(model(case.inputs), targets)
        squares.append(found.pop().squares)
    assert squares[0]
    for parameter in squares[0]:
        stacked = torch.stack([one[parameter] for one in squares])
        error = stacked.std(0) / draws**0.5
        assert bool(((stacked.mean(0) - expected[parameter]).abs() <= 6 * error + 1e-12).all())
    kinds = {row.parameter: row.structure for row in opt.report()}
    assert all(kinds[parameter] == "Diagonal" for parameter in squares[0])


def test_gradients_random_state_and_buffers_are_the_user_s():
    model, twin = dropout_net(), dropout_net()
    opt = ng.kfac(model, CE)
    torch.manual_seed(5)
    CE(twin(X), Y).backward()
    torch.manual_seed(5)
    loss = opt.loss(model(X), Y)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert torch.equal(flat_gradient(model), flat_gradient(twin))
    torch.manual_seed(5)
    outputs = model(X)
    assert global_random_state_is_untouched(lambda: opt.loss(outputs, Y))
    norm = CASES["batch norm, training"].make()[0]
    ng.kfac(norm, CE).loss(norm(X), Y % 2)
    assert norm[1].num_batches_tracked == 1


PARTED: dict[str, Callable[[Any, nn.Module], Any]] = {
    "two passes with one loss": lambda opt, m: opt.loss(torch.cat([m(X[:4]), m(X[4:])]), Y).backward(),
    "uneven micro-batches": lambda opt, m: [
        (opt.loss(m(X[rows]), Y[rows]) * len(X[rows]) / len(X)).backward() for rows in (slice(0, 6), slice(6, 8))
    ],
    "a pass that leads to no loss": lambda opt, m: (m(100 * X), opt.loss(m(X), Y).backward()),
    "rows whose targets are ignored": lambda opt, m: opt.loss(
        m(torch.cat([X, 3 * X])), torch.cat([Y, torch.full((8,), -100)])
    ).backward(),
}


@pytest.mark.parametrize("name", PARTED)
def test_what_counts_are_the_rows_that_lead_to_the_loss(name: str):
    for recipe in (ng.kfac, ng.diagonal)["ignored" in name :]:  # of the inputs, ignored rows tell as much
        whole, parts = net(), net()
        one, many = (recipe(m, CE, estimate=EXACT, measure=False) for m in (whole, parts))
        one.loss(whole(X), Y).backward()
        PARTED[name](many, parts)
        one.step()
        many.step()
        assert_close(flat(parts), flat(whole), 1e-12)


# the rest of the training loop


STRAY: dict[str, Callable[[nn.Module], Any]] = {
    "training": lambda model: model(3 * X[:5]),
    "evaluation": lambda model: model.eval()(3 * X[:5]),
    "a layer": lambda model: model[0](3 * X[:5]),
}


LENGTHS = ng.MeasuredLength(), SpectralProgress()  # the latter reads inputs alone


@pytest.mark.parametrize(("recipe", "how"), cross(RECIPES[:1], RECIPES[1:], product(STRAY, LENGTHS)))
def test_passes_that_lead_to_no_loss_do_not_count(recipe: Callable[..., Any], how: tuple[str, Any]):
    stray, rule = how

    def run(passes: Callable[[nn.Module], Any]) -> torch.Tensor:
        model = net()
        opt = recipe(model, CE, rule=rule)
        for _ in range(4):
            passes(model)
            iterate(opt, model.train())
        return flat(model)

    assert_close(run(STRAY[stray]), run(lambda model: None), 0.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_graphs_of_evaluations_do_not_pile_up(recipe: Callable[..., Any]):
    model, graphs = net(), list[Any]()
    opt = recipe(model, CE)
    iterate(opt, model)
    model.eval()
    for _ in range(5):
        x = X.clone().requires_grad_()  # a leaf that only its graph holds afterwards
        graphs.append(weakref.ref(x.untyped_storage()))
        model(x)
        del x
    assert all(graph() is None for graph in graphs[:-1])


def test_a_layer_with_two_rates_keeps_its_block():
    """Rates scale the block's own solution, parameter by parameter."""
    even, odd, start = net(), net(), flat(net())
    iterate(ng.kfac(even, CE, 1.0, estimate=EXACT, **FREE), even)
    groups = [{"params": [p], "lr": 0.5 if p.dim() == 1 else 1.0} for p in odd.parameters()]
    iterate(ng.kfac(odd, CE, 1.0, estimate=EXACT, params=groups, **FREE), odd)
    rates = torch.cat([torch.full((p.numel(),), 0.5 if p.dim() == 1 else 1.0) for p in odd.parameters()])
    assert_close(flat(odd) - start, rates * (flat(even) - start), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reads_float32_statistics(dtype: torch.dtype):
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))).float()
    opt = ng.kfac(model, CE)
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = opt.loss(model(X.float()), Y)
        loss.backward()
        opt.step()
    assert {row.structure for row in opt.report()} == {"Kronecker"}
    for p in model.parameters():
        for total in kept_of(opt, p).get("totals", {}).values():
            assert total.dtype == torch.float32
            assert bool(total.isfinite().all())


def test_frozen_unfrozen_and_unused_parameters():
    model = CASES["not reached"].make()[0]
    model.used.weight.requires_grad_(False)
    opt = ng.kfac(model, CE)
    before = flat(model)
    iterate(opt, model, X, Y % 2)
    assert {row.parameter for row in opt.report()} == {"used.bias", "unused.weight", "unused.bias"}
    model.used.weight.requires_grad_(True)
    opt.add_param_group({"params": model.used.weight})
    iterate(opt, model, X, Y % 2)
    kinds = {row.parameter: row.structure for row in opt.report()}
    assert kinds["used.weight"] == kinds["used.bias"] == "Kronecker"
    assert kinds["unused.weight"] == "not read yet"
    assert torch.equal(flat(model.unused), before[-8:])


SWAPS: dict[str, Callable[[], nn.Module]] = {
    "a wider head": lambda: nn.Linear(4, 7),
    "a narrower head": lambda: nn.Linear(4, 3, bias=False),
    "a head of the same shape": lambda: nn.Linear(4, 3),
    "a layer more, which renames those behind it": lambda: nn.LayerNorm(4),
}


@pytest.mark.parametrize(("build", "name"), cross([ng.kfac], [ng.ekfac, ng.hessian_free], SWAPS))
def test_a_layer_that_was_put_into_the_model_starts_without_statistics(name: str, build: Callable[..., Any]):
    model: Any = net()
    opt = build(model, CE, **({} if build is ng.hessian_free else {"update_every": 50, "invert_every": 50}))
    train(opt, model, 3)
    layer = SWAPS[name]().double()
    if isinstance(layer, nn.LayerNorm):
        model.insert(1, layer)
    else:
        model[2] = layer
    opt.add_param_group({"params": layer.parameters()})
    before = flat(layer)
    # a run whose statistics were due and not read would raise
    losses = train(opt, model, 4 if build is ng.hessian_free else 30)
    assert not torch.equal(flat(layer), before)
    assert losses[-1] < losses[0]
    opt.load_state_dict(opt.state_dict())


def test_sparse_gradients_and_dead_layers_do_no_harm():
    sparse = CASES["sparse embedding"].make()[0]
    losses = train(ng.kfac(sparse, CE), sparse, 10, CASES["sparse embedding"].inputs, Y[:3] % 2)
    assert losses[-1] < losses[0]
    dead = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    dead[0].bias.data.fill_(-100.0)  # every unit is off: zero derivatives below, zero inputs above
    opt = ng.kfac(dead, CE)
    train(opt, dead, 5)
    assert is_finite(dead)
    assert opt.state_report().failures == 0


# failures


def test_a_failing_decomposition_keeps_the_last_good_inverse(monkeypatch: pytest.MonkeyPatch):
    model = net()
    opt = ng.ekfac(model, CE)
    iterate(opt, model)
    inverses = [block.inverse for block in blocks_of(opt)]

    def fail(self: Any, damping: float) -> Any:
        raise RuntimeError("linalg.eigh: failed to converge")

    monkeypatch.setattr("natgrad.operators.Spectral.inverse", fail)
    iterate(opt, model)
    assert [block.inverse for block in blocks_of(opt)] == inverses
    assert opt.state_report().failures == 2
    monkeypatch.undo()
    iterate(opt, model)
    assert [block.inverse for block in blocks_of(opt)] != inverses
