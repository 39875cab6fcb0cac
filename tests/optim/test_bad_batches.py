"""Bad batches of every kind: nothing becomes infinite, statistics and momentum stay as they were, training goes on."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from models import Assembled, build_seeded, cross, draw
from optim_models import RECIPES as EVERY
from optim_models import flat, iterate, same, train_batches
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.pure import leaves
from natgrad.optim.guard import Guard

BLOCKS = [ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng]


def trust_region(model: nn.Module, criterion: Any, **options: Any) -> Any:
    """The exact Fisher with a bound on the KL."""
    metric = ng.fisher(model, criterion)
    return ng.NaturalGradient(model, metric, lr=1.0, damping=0.01, rule=ng.TrustRegion(0.1), **options)


READ, UNREAD = 6, 9  # steps with and without a reading of statistics
STEPS = 13


def build_convolution() -> nn.Module:
    return Assembled(
        lambda m, x: m.last(torch.relu(m.filters(x.unsqueeze(1))).flatten(1)),
        filters=nn.Conv1d(1, 4, 2),
        last=nn.Linear(12, 3),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3)),
    "convolution": build_convolution,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)),
}


def first_row(x: Tensor, value: float) -> Tensor:
    return torch.cat([torch.full_like(x[:1], value), x[1:]])


def spoil_targets(y: Tensor, value: float) -> Tensor:
    return first_row(y, value) if y.is_floating_point() else torch.full_like(y, -100)


BAD: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a row of NaN": lambda x, y: (first_row(x, math.nan), y),
    "a row of inf": lambda x, y: (first_row(x, math.inf), y),
    "targets of inf, or none": lambda x, y: (x, spoil_targets(y, math.inf)),
    "targets of NaN, or none": lambda x, y: (x, spoil_targets(y, math.nan)),
    "constant inputs": lambda x, y: (torch.ones_like(x), y),
    "equal labels": lambda x, y: (x, y[:1].expand_as(y).clone()),
    "inputs x 1e6": lambda x, y: (1e6 * x, y),
    "a row x 1e4": lambda x, y: (torch.cat([1e4 * x[:1], x[1:]]), y),
    "targets x 1e6": lambda x, y: (x, 1e6 * y if y.is_floating_point() else (y + 1) % 3),
    "noise": lambda x, y: (30 * draw(*x.shape, seed=3), y),
    "empty": lambda x, y: (x[:0], y[:0]),
    "one row": lambda x, y: (x[:1], y[:1]),
    "one row x 1e4": lambda x, y: (1e4 * x[:1], y[:1]),
}
FEW = {"empty", "one row", "one row x 1e4"}  # torch refuses them behind a batch norm
MILD = {"constant inputs", "equal labels", "noise", "one row"}  # K-FAC alone takes these
LEFT_OUT = [name for name in BAD if name.startswith(("a row of", "targets of"))]


def batch(step: int, classes: bool, rows: int = 32) -> tuple[Tensor, Tensor]:
    x = draw(rows, 4, seed=100 + step)
    outputs = x @ draw(4, 3, seed=5)
    return x, outputs.argmax(1) if classes else torch.sin(outputs)


def criterion_of(classes: bool) -> nn.Module:
    return nn.CrossEntropyLoss() if classes else nn.MSELoss()


def train(
    recipe: Any,
    net: str,
    classes: bool,
    steps: int,
    bad: Mapping[int, str | None] | None = None,
    falls: int = STEPS,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """A run whose rate falls to nothing within so many steps. Some steps have a bad batch, or none at all."""
    bad = bad or {}
    first = min([*bad, steps])
    model = build_seeded(NETS[net])
    opt = recipe(model, criterion_of(classes), **options)
    rate = opt.param_groups[0]["lr"]
    if 0 < first < steps:  # runs that begin alike share that part
        states = save_beginning(recipe, net, classes, first, falls, tuple(options.items()))
        model.load_state_dict(states[0])
        opt.load_state_dict(states[1])
    for step in range(first if first < steps else 0, steps):
        x, y = batch(step, classes)
        kind = bad.get(step, "good")
        opt.param_groups[0]["lr"] = rate * (1 - step / falls)
        if kind is not None:
            iterate(opt, model, *(BAD[kind](x, y) if kind in BAD else (x, y)))
    return model, opt


@functools.cache
def save_beginning(recipe: Any, net: str, classes: bool, steps: int, falls: int, options: tuple[Any, ...]) -> Any:
    """The states of model and optimiser after so many good batches."""
    model, opt = train(recipe, net, classes, steps, falls=falls, **dict(options))
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


@functools.cache
def clean_loss(recipe: Any, net: str, classes: bool) -> float:
    """Of runs that have all batches, and of runs that never have one of those that will be bad: the highest."""
    runs = [{}, {READ: None}]
    return max(held_out_loss(train(recipe, net, classes, STEPS, bad)[0], classes) for bad in runs)


@torch.no_grad()
def held_out_loss(model: nn.Module, classes: bool) -> float:
    return float(criterion_of(classes)(model((pair := batch(10_000, classes, 400))[0]), pair[1]))


@pytest.mark.filterwarnings("ignore:none of the last|the statistics of the last")
@pytest.mark.parametrize(
    ("recipe", "net", "classes", "step"),
    [(recipe, "layer norm", True, READ) for recipe in (ng.kfac, ng.online_ng, ng.natgrad_cg, trust_region)]
    + [(ng.kfac, "dense", False, UNREAD), (ng.kfac, "convolution", True, READ), (ng.kfac, "batch norm", True, READ)],
)
def test_one_bad_batch_of_any_kind_costs_little(recipe: Any, net: str, classes: bool, step: int):
    """All that stands is finite, and the loss is near that of a run without it."""
    few = FEW if net == "batch norm" else set()
    for kind in BAD.keys() - set(LEFT_OUT) - (few if recipe is ng.kfac else MILD | {"empty", "one row x 1e4"}):
        model, opt = train(recipe, net, classes, STEPS, {step: kind})
        numbers = [t for t in leaves(dict(opt._by_parameter())) if t.is_floating_point()]
        assert all(bool(t.isfinite().all()) for t in (*model.parameters(), *numbers)), kind
        assert held_out_loss(model, classes) < 2.5 * clean_loss(recipe, net, classes) + 0.02, kind


@pytest.mark.parametrize(
    ("recipe", "classes"), cross([ng.kfac], [*BLOCKS[1:], ng.natgrad_cg, trust_region], [True, False, False])
)
def test_a_batch_that_is_not_finite_leaves_no_trace(recipe: Any, classes: bool):
    model, opt = train(recipe, "dense", classes, READ)
    before = flat(model), copy.deepcopy(list(leaves(dict(opt._by_parameter()))))
    for count, kind in enumerate(LEFT_OUT, 1):
        iterate(opt, model, *BAD[kind](*batch(READ, classes)))
        assert same(before, (flat(model), list(leaves(dict(opt._by_parameter()))))), kind
        assert opt.state_report().failures == count


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_targets_that_are_not_finite_raise_on_demand(recipe: Any):
    with pytest.raises(ValueError, match="targets range from"):
        train(recipe, "dense", False, READ + 1, {READ: "targets of NaN, or none"}, on_trouble="raise")


def totals_of(opt: Any) -> list[Tensor]:
    """The running statistics."""
    return [t.clone() for _, numbers in sorted(opt._by_parameter().items()) for t in leaves(numbers.get("totals", {}))]


@pytest.mark.parametrize(
    ("recipe", "kind"), cross([ng.kfac], BLOCKS[1:], ["inputs x 1e6", "a row x 1e4", "one row x 1e4"])
)
def test_inputs_far_larger_than_before_do_not_enter_the_statistics(recipe: Any, kind: str):
    _, before = train(recipe, "layer norm", True, READ)
    _, after = train(recipe, "layer norm", True, READ + 1, {READ: kind})
    assert same(totals_of(before), totals_of(after))
    assert after.state_report().failures == 1


@pytest.mark.parametrize("recipe", BLOCKS)
def test_a_first_batch_whose_squares_overflow_is_left_out(recipe: Any):
    model = build_seeded(NETS["dense"])
    opt, start = recipe(model, criterion_of(True)), flat(model)
    x, y = batch(0, True)
    iterate(opt, model, 1e200 * x, y)
    assert opt.state_report().failures == 1
    assert torch.equal(flat(model), start)
    iterate(opt, model, x, y)
    assert not torch.equal(flat(model), start)


def test_a_wild_loss_does_not_enter_the_statistics():
    _, before = train(ng.kfac, "dense", False, 12, update_every=1)
    _, after = train(ng.kfac, "dense", False, 13, {12: "targets x 1e6"}, update_every=1)
    assert same(totals_of(before), totals_of(after))


def test_inputs_of_a_new_scale_are_read_after_three_readings():
    bad = dict.fromkeys(range(READ, STEPS), "inputs x 1e6")
    _, opt = train(ng.kfac, "layer norm", True, 2 * READ, bad, update_every=1)
    assert opt.state_report().failures == 3
    assert max(float(t.abs().max()) for t in totals_of(opt)) > 1e10


def test_a_checkpoint_knows_how_large_inputs_were():
    _, opt = train(ng.kfac, "layer norm", True, READ)
    model = build_seeded(NETS["layer norm"])
    twin = ng.kfac(model, nn.CrossEntropyLoss())
    twin.load_state_dict(opt.state_dict())
    x, y = batch(READ, True)
    twin.loss(model(1e4 * x), y).backward()
    assert same(totals_of(opt), totals_of(twin))


def test_running_statistics_that_a_pass_has_spoilt_are_named():
    """The user's own pass writes them; `ng.recalibrate` takes them anew."""
    model = build_seeded(NETS["batch norm"])
    opt = ng.kfac(model, nn.CrossEntropyLoss())
    good = [batch(step, True) for step in range(4)]
    train_batches(opt, model, good[:2])
    with pytest.warns(UserWarning, match=r"buffer '1.running_mean' .*is not finite.*recalibrate"):
        iterate(opt, model, *BAD["a row of NaN"](*good[2]))
    iterate(opt, model, *good[3])
    ng.recalibrate(model, [x for x, _ in good])
    model.eval()
    assert torch.isfinite(model(good[0][0])).all()


def test_one_odd_batch_does_not_turn_the_run_to_spectral_steps():
    """Its gradient is many times longer than those before, and passed for noise."""
    _, opt = train(ng.kfac, "dense", True, 26, {20: "constant inputs"}, falls=26)
    assert opt._live.state.noise.turned < 0


def test_a_gradient_is_cut_to_three_times_those_before():
    guard, factors = Guard(), []
    for step in range(40):
        length = 100.0 if step == 20 else 1.0
        factor, guard = guard.cut_gradient(length, step)
        factors.append(factor)
    assert factors[20] == pytest.approx(0.03)
    assert [step for step, factor in enumerate(factors) if factor < 1] == [20]
    guard = Guard()
    for step in range(80):  # a third more with each step is never cut
        factor, guard = guard.cut_gradient(1.3**step, step)
        assert factor == 1


@pytest.mark.parametrize("start", [0.0, 1e-6, 1e-3])
def test_layers_that_start_near_zero_may_grow_at_once(start: float) -> None:
    """What the last layer sees grows by orders of magnitude within a step, and no batch is at fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
    with torch.no_grad():
        model[0].weight.mul_(start)
    opt = ng.kfac(model, nn.CrossEntropyLoss())
    for _ in range(8):
        iterate(opt, model, torch.randn(40, 6, dtype=torch.float64), torch.arange(40) % 4)
        assert opt.state_report().status == "stepped"
    assert opt.state_report().failures == 0


# one wild batch is left out of a run, in parameters and in momentum; data of a new scale are not


def train_regression(recipe: Any, steps: int, scales: dict[int, float], **options: Any) -> tuple[Tensor, int]:
    """A regression in which the first target of some steps is multiplied: its parameters, and the steps left out."""
    points, failures = trace_regression(recipe, steps, scales, **options)
    return points[-1], failures


def trace_regression(recipe: Any, steps: int, scales: dict[int, float], **options: Any) -> tuple[list[Tensor], int]:
    """Its parameters after every step, and the steps left out."""
    torch.manual_seed(0)
    model = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    opt, weight, points = recipe(model, nn.MSELoss(), **options), draw(4, 2), list[Tensor]()
    for step in range(steps):
        x = draw(16, 4, seed=step)
        y = torch.sin(x @ weight)
        y[0] *= scales.get(step, 1.0)
        iterate(opt, model, x, y)
        points.append(flat(model))
    return points, opt.state_report().failures


@pytest.mark.parametrize(
    ("recipe", "wild"),
    cross([ng.kfac, ng.natgrad_cg], [ng.ekfac, ng.online_ng, ng.tonga], [{12: 1e3, 13: -1e6, 15: 1e12}, {1: 1e8}]),
)
def test_a_step_on_a_wild_batch_is_none(recipe: Any, wild: dict[int, float]):
    """Beyond all measure, the second batch of a run is left out too."""
    points, failures = trace_regression(recipe, max(wild) + 1, wild)
    stays = {step for step in range(1, len(points)) if torch.equal(points[step], points[step - 1])}
    assert stays == wild.keys()
    assert failures == len(wild)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_the_first_steps_set_the_scale_and_data_of_a_new_one_are_taken_after_three_batches(recipe: Any):
    assert train_regression(recipe, 8, {3: 100.0})[1] == 0
    assert train_regression(recipe, 20, dict.fromkeys(range(12, 20), 1e4))[1] == 3


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_raising_names_the_loss(recipe: Any):
    with pytest.raises(ValueError, match="more than ten times the highest"):
        train_regression(recipe, 13, {12: 1e6}, on_trouble="raise")


@pytest.mark.parametrize(
    ("recipe", "reduction"), cross([ng.kfac], [each for each in EVERY if each is not ng.kfac], ["mean", "sum", "sum"])
)
def test_a_batch_without_a_target_that_counts_is_left_out(recipe: Any, reduction: str):
    model = build_seeded(lambda: nn.Linear(4, 3))
    opt, x, y = recipe(model, nn.CrossEntropyLoss(reduction=reduction)), draw(6, 4), torch.arange(6) % 3
    for step, targets in enumerate([y, torch.full_like(y, -100), y]):
        before = flat(model)
        iterate(opt, model, x, targets)
        assert torch.equal(flat(model), before) == (step == 1)
    assert opt.state_report().failures == 1
