"""The drop-in optimizer layer by layer: its step, its statistics from the user's own pass, and its contracts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import blocks_of, kept_of
from models import CASES, F64, Case, assert_close, build_seeded, draw
from optim_models import BLOCK_RECIPES as RECIPES
from optim_models import CE, X, Y, dropout_net, flat, flat_gradient, global_random_state_is_untouched, net
from pass_readings import iterate, readings
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.constants import KL_SLACK
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
    model, l2 = net(), 0.3
    operator, _ = ng.Diagonal(0.9, EXACT).update(None, ng.fisher(model, CE), ng.trainable(model), X)
    before = flat(model)
    opt = ng.StructuredNaturalGradient(model, CE, ng.Diagonal(0.9, EXACT), 0.1, damping=1e-6, l2=l2, **FREE)
    opt.loss(model(X), Y).backward()
    gradient = flat_gradient(model)
    opt.step()
    expected = -0.1 * (gradient + l2 * before) / (operator.diagonal() + l2)
    assert_close(flat(model) - before, expected, 1e-5)
    model = net()
    opt = ng.StructuredNaturalGradient(
        model, CE, ng.Diagonal(0.9, EXACT), momentum=0.0, l2=l2, max_kl=math.inf, kl_share=math.inf
    )
    metric = ng.fisher(model, CE).at(ng.trainable(model), X)
    before = flat(model)
    opt.loss(model(X), Y).backward()
    slope = flat_gradient(model) + l2 * before
    opt.step()
    step = flat(model) - before
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe: Callable[..., Any]):
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)))
    x = draw(60, 3)
    y = (x @ draw(3, 3, seed=4)).argmax(1)
    opt = recipe(model, CE)
    losses = [float(iterate(opt, model, x, y)) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    assert opt.state_report().failures == 0


# statistics from the user's own pass

SAME = ["mlp", "sequence", "conv2d", "odd convolutions", "group norm", "in-place rectifier", "checkpointed", "frozen"]


@pytest.mark.parametrize("name", [*SAME, "attention", "twice used", "linear over positions", "batch norm, training"])
def test_taps_read_what_a_pass_of_its_own_would(name: str):
    case = CASES[name]
    model, params = case.make()
    inputs = case.inputs.requires_grad_(False) if case.inputs.is_floating_point() else case.inputs
    criterion = ng.Categorical()
    metric = ng.fisher(model, criterion)
    expected = hear_metric(metric, params, inputs, EXACT, torch.Generator().manual_seed(0), random=None)
    opt = ng.kfac(model, criterion, estimate=EXACT)
    reading = readings(opt, model, inputs, labels_for(model, case))
    found = {seen.key: seen for seen in reading.layers}
    assert found.keys() == {seen.key for seen in expected.layers}
    for seen in expected.layers:
        assert_close(found[seen.key].activations.to(F64), seen.activations.to(F64), 1e-13)
        for delta, other in zip(found[seen.key].deltas, seen.deltas, strict=True):
            assert_close(delta, other, 1e-12, scale=seen.deltas[0].abs().max())


def labels_for(model: nn.Module, case: Case) -> Tensor:
    """Targets of the right shape."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return copy.deepcopy(model)(case.inputs).argmax(-1)


@pytest.mark.parametrize("name", ["tied", "behind a layer's back", "bare parameter"])
def test_parameters_without_a_layer_get_an_unbiased_diagonal(name: str):
    case = CASES[name]
    model, params = case.make()
    exact = ng.fisher(model, case.family).at(params, case.inputs).diagonal()
    space, draws = ng.Space(params), 400
    opt = ng.kfac(model, case.family, lr=0.0, decay=0.0)
    targets, squares = case.family.sample(model(case.inputs)), []
    for _ in range(draws):
        opt._flow.reader.taps.armed = True
        squares.append(readings(opt, model, case.inputs, targets).squares)
    assert squares[0]
    for parameter in squares[0]:
        stacked = torch.stack([found[parameter] for found in squares])
        expected = space.unflatten(exact)[parameter]
        error = stacked.std(0) / draws**0.5
        assert bool(((stacked.mean(0) - expected).abs() <= 6 * error + 1e-12).all())
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


def test_passes_that_do_not_lead_to_the_loss_are_ignored():
    model, twin = net(), net()
    opt = ng.kfac(model, CE, estimate=EXACT)
    model(100 * X)  # in training mode, and for nothing
    iterate(opt, model)
    iterate(ng.kfac(twin, CE, estimate=EXACT), twin)
    assert_close(flat(model), flat(twin), 1e-13)


def test_two_passes_with_one_loss_both_count():
    model, twin = net(), net()
    opt, other = (ng.diagonal(m, CE, estimate=EXACT, measure=False) for m in (model, twin))
    opt.loss(torch.cat([model(X[:4]), model(X[4:])]), Y).backward()
    other.loss(twin(X), Y).backward()
    opt.step()
    other.step()
    assert_close(flat(model), flat(twin), 1e-12)


def test_micro_batches_count_by_their_rows():
    whole, parts = net(), net()
    one, many = (ng.kfac(m, CE, estimate=EXACT, measure=False) for m in (whole, parts))
    one.loss(whole(X), Y).backward()
    for rows in (slice(0, 6), slice(6, 8)):  # uneven
        (many.loss(parts(X[rows]), Y[rows]) * len(X[rows]) / len(X)).backward()
    one.step()
    many.step()
    assert_close(flat(parts), flat(whole), 1e-12)


def test_ignored_targets_weigh_nothing():
    some, fewer = net(), net()
    targets = torch.where(torch.arange(8) < 5, Y, -100)
    opt, other = (ng.diagonal(m, CE, estimate=EXACT) for m in (some, fewer))
    iterate(opt, some, X, targets)
    iterate(other, fewer, X[:5], Y[:5])
    assert_close(flat(some), flat(fewer), 1e-12)


# the rest of the training loop


def test_a_layer_with_two_rates_keeps_its_block():
    # rates scale the block's own solution, parameter by parameter
    even, odd = net(), net()
    iterate(ng.kfac(even, CE, 1.0, estimate=EXACT, **FREE), even)
    groups = [{"params": [p], "lr": 0.5 if p.dim() == 1 else 1.0} for p in odd.parameters()]
    start = flat(odd)
    iterate(ng.kfac(odd, CE, 1.0, estimate=EXACT, params=groups, **FREE), odd)
    for name, p in ng.trainable(net()).items():
        moved, whole = (dict(m.named_parameters())[name].detach() - p.detach() for m in (odd, even))
        assert_close(moved, whole * (0.5 if p.dim() == 1 else 1.0), 1e-10)
    assert start.shape == flat(odd).shape


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
    assert [row.structure for row in opt.report()] == ["Kronecker"] * 4
    held = [t for p in model.parameters() for t in kept_of(opt, p).get("totals", {}).values()]
    assert held
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in held)


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


SWAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "a wider head": lambda model: put(model, 2, nn.Linear(4, 7)),
    "a narrower head": lambda model: put(model, 2, nn.Linear(4, 3, bias=False)),
    "a head of the same shape": lambda model: put(model, 2, nn.Linear(4, 3)),
    "a layer more, which renames those behind it": lambda model: put(model, 1, nn.LayerNorm(4), insert=True),
}


def put(model: Any, place: int, layer: nn.Module, insert: bool = False) -> nn.Module:
    """The layer, now in the model."""
    layer.to(next(model.parameters()).dtype)
    if insert:
        model.insert(place, layer)
    else:
        model[place] = layer
    return layer


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("build", [ng.kfac, ng.ekfac, ng.hessian_free])
@pytest.mark.parametrize("name", SWAPS)
def test_a_layer_that_was_put_into_the_model_starts_without_statistics(name: str, build: Callable[..., Any]):
    model = net()
    options = {} if build is ng.hessian_free else {"update_every": 50, "invert_every": 50}
    opt = build(model, CE, **options)
    for _ in range(3):
        iterate(opt, model)
    layer = SWAPS[name](model)
    opt.add_param_group({"params": layer.parameters()})
    losses, before = [], flat(layer)
    for _ in range(30):  # a run whose statistics were due and not read would raise
        losses.append(float(iterate(opt, model)))
    assert not torch.equal(flat(layer), before)
    assert losses[-1] < losses[0]
    saved = opt.state_dict()
    opt.load_state_dict(saved)


def test_sparse_gradients():
    model = CASES["sparse embedding"].make()[0]
    opt = ng.kfac(model, CE)
    losses = [float(iterate(opt, model, CASES["sparse embedding"].inputs, Y[:3] % 2)) for _ in range(10)]
    assert losses[-1] < losses[0]


# failures


def test_a_dead_layer_does_no_harm():
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    model[0].bias.data.fill_(-100.0)  # every unit is off: zero derivatives below, zero inputs above
    opt = ng.kfac(model, CE)
    for _ in range(5):
        iterate(opt, model)
    assert bool(flat(model).isfinite().all())
    assert opt.state_report().failures == 0


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
