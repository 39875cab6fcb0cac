"""`SpectralProgress`: shares of each layer, lengths that follow progress, a bound by the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzz_nets import Net, nets
from hypothesis import given, settings
from hypothesis.strategies import sampled_from
from models import Assembled, build_seeded, draw
from optim_models import flat, flat_gradient, train_batches
from spectral_points import describe_fit, draw_layers, join_bias, make_point, polar_by_svd
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.constants import FRESH
from natgrad.optim import blocks
from natgrad.rules import BlockPoint, BlockStack, NoiseAware, Rule, SpectralDescent, SpectralProgress
from natgrad.rules.spectral_progress import least_size, unwhiten, whiten, whitener_of_few
from natgrad.structures import Layerwise

F64 = torch.float64
FREE = SpectralProgress(kl_share=math.inf, warm=1)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_step_is_the_written_out_one(recipe: Callable[..., Any], scale: float) -> None:
    """lr * share of the layer in the metric of its whitened inputs; a layer near zero counts as the floor."""
    model, x, y = draw_layers(4, 3), draw(50, 4), draw(50, 3, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    before = join_bias(model[0])
    opt = recipe(model, nn.MSELoss(), rule=replace(FREE, share=0.1, damping=0.2), lr=0.5)
    train_batches(opt, model, [(x, y)])
    gradient, white, root = describe_fit(before, x, y, 0.2)
    move = before - join_bias(model[0])
    size = max(float((before @ white * before).sum().sqrt()), 0.05 * 3**0.5)
    expected = 0.5 * 0.1 * size / 3**0.5 * polar_by_svd(gradient @ root) @ root
    assert float((move - expected).norm()) < 0.24 * float(expected.norm())  # as near as the polar factor is
    assert float((move @ white * move).sum().sqrt()) == pytest.approx(0.5 * 0.1 * size, rel=0.24)
    assert opt.state_report().status == "stepped"


def test_few_rows_whiten_less_and_move_directions_of_mean_size_as_before() -> None:
    rule = SpectralProgress()
    moment = torch.diag(torch.tensor([1.9, 1.0, 0.1], dtype=F64))
    many, few = (rule.prepare_inputs(moment, False, rows)["inputs"].diagonal() for rows in (math.inf, 1.0))
    torch.testing.assert_close(many, (moment.diagonal() + 0.3).rsqrt())
    torch.testing.assert_close(few, (1.3 / 4) ** -0.5 * (moment.diagonal() + 3.0).rsqrt())
    assert few[1] == pytest.approx(float(many[1]) * (1.3 / 4) ** -0.5 * (1.3 / 4) ** 0.5)


def test_many_inputs_of_few_rows_are_whitened_along_their_largest_directions() -> None:
    rows, inputs = 10, 300
    x = draw(40 * rows, inputs) * torch.logspace(0, -1.5, inputs, dtype=F64) + 0.3
    moment = x.mT @ x / len(x)
    few = SpectralProgress().prepare_inputs(moment, False, rows)
    assert few["inputs"].shape == (inputs, 2 * rows)
    scarce = inputs / rows
    white = moment / moment.diagonal().mean() + scarce * torch.eye(inputs, dtype=F64)
    expected = (1 + scarce) / 1.3 * torch.linalg.inv(white)
    found = whiten(whiten(torch.eye(inputs, dtype=F64), few), few, last=True)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    theta = draw(5, inputs)
    torch.testing.assert_close(unwhiten(whiten(theta, few, last=True), few), theta)
    assert SpectralProgress().prepare_inputs(moment, False, 1000.0)["inputs"].shape == (inputs, inputs)


def test_a_whitener_of_few_directions_is_the_whole_one_where_the_others_are_equal() -> None:
    basis = torch.linalg.qr(draw(60, 60))[0]
    values = torch.full((60,), 0.2, dtype=F64)
    values[:4] = torch.tensor([30.0, 10.0, 6.0, 4.0], dtype=F64)
    moment = 7 * (basis * values) @ basis.mT  # in any unit
    scaled = moment / moment.diagonal().mean()
    roots = whitener_of_few(moment, 10.0, 4)
    root = unwhiten(torch.eye(60, dtype=F64), roots)
    expected = scaled + 10 * torch.eye(60, dtype=F64)
    torch.testing.assert_close(root @ root.mT, expected, atol=0.02, rtol=0)  # two steps of iteration
    torch.testing.assert_close(whiten(root, roots, last=True), torch.eye(60, dtype=F64))


def shape_alike(rule: SpectralProgress, points: list[BlockPoint]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What a rule makes of blocks whose neighbours may be alike, in their order."""
    kinds = [(p.mean.shape, p.shape, {name: t.shape for name, t in p.prepared.items()}) for p in points]
    groups = [[i for i, other in enumerate(kinds) if other == kind] for kind in kinds]
    groups = [group for i, group in enumerate(groups) if group not in groups[:i]]
    shaped = rule.shape_stacks([BlockStack.of([points[i] for i in group]) for group in groups])
    found = dict[int, tuple[Tensor, dict[str, Tensor]]]()
    for group, (directions, memory, lengths, _) in zip(groups, shaped, strict=True):
        assert isinstance(memory, Mapping)
        for j, i in enumerate(group):
            found[i] = lengths[j] * directions[j], {name: tensor[j] for name, tensor in memory.items()}
    return [found[i] for i in range(len(points))]


def test_blocks_in_a_stack_move_as_each_alone() -> None:
    rule, points = SpectralProgress(), list[BlockPoint]()
    for i, shape in enumerate([(1, 4, 6), (1, 4, 6), (1, 6, 4), (2, 4, 6), (1, 1, 5), (1, 4, 6)]):
        prepared = {"inputs": torch.linalg.inv(torch.linalg.cholesky(torch.eye(shape[-1], dtype=F64) * (1 + i)))}
        points.append(make_point(draw(*shape, seed=i), values=draw(*shape, seed=9 + i), prepared=prepared))
    points += [make_point(draw(1, 1, 7, seed=i), prepared={}) for i in (20, 21, 22)]
    points += [make_point(draw(1, 1, 12, seed=i), prepared={}, shape=(3, 4)) for i in (30, 31)]
    points += [make_point(draw(1, 9, 3, seed=40), prepared={"tokens": torch.ones(9, dtype=F64)})]
    together, alone = shape_alike(rule, points), [rule.shape(point) for point in points]
    memories = list[dict[str, Tensor]]()
    for (direction, memory), (expected, other) in zip(together, alone, strict=True):
        torch.testing.assert_close(direction, expected)
        assert memory.keys() == other.keys()
        memories.append(memory)
    later = [replace(p, memory=m, steps=1, gradient=lambda p=p: -p.mean) for p, m in zip(points, memories, strict=True)]
    for (direction, memory), point in zip(shape_alike(rule, later), later, strict=True):
        expected, other = rule.shape(point)
        torch.testing.assert_close(direction, expected)
        torch.testing.assert_close(memory["scale"], other["scale"])


def test_lengths_grow_while_the_slope_stays_and_shrink_where_it_turned() -> None:
    rule, gradient = SpectralProgress(), draw(1, 4, 6)

    def follow(sign: float) -> float:
        _, memory = rule.shape(make_point(gradient, examples=100.0))
        _, memory = rule.shape(make_point(sign * gradient, memory, steps=1, examples=100.0))
        return float(memory["scale"])

    growth = math.exp(0.2 / (1 + (2 / 20) ** 2))
    assert follow(1.0) == pytest.approx(growth, rel=1e-6)
    assert follow(-1.0) == pytest.approx(1 / growth, rel=1e-6)
    assert follow(0.0) == 1


@pytest.mark.parametrize(
    ("shape", "rows", "twice"), [((300, 280), 20.0, True), ((300, 280), 1e4, False), ((9, 280), 20.0, False)]
)
def test_a_direction_that_costs_more_than_its_gradient_serves_two_steps(
    shape: tuple[int, int], rows: float, twice: bool
) -> None:
    """Counted in the layer's own steps: one that is seen every other step of a run has new directions all the same."""
    rule, memory, directions = SpectralProgress(), dict[str, Tensor](), list[Tensor]()
    prepared = rule.prepare_inputs(torch.eye(shape[1], dtype=F64), False, rows)
    for step in range(0, 12, 2):
        point = make_point(draw(1, *shape, seed=step), memory, prepared=prepared, steps=step)
        memory = rule.shape(point)[1]
        again = twice and len(directions) % 2 == 1
        expected = directions[-1] if again else rule.shape(replace(point, memory={}))[1]["direction"]
        torch.testing.assert_close(memory["direction"], expected, rtol=0, atol=0)
        directions.append(memory["direction"])


@pytest.mark.parametrize("share", [1.5, 0.4, -0.3])
def test_the_second_step_along_a_direction_is_shorter_by_as_much_as_the_slope_has_fallen(share: float) -> None:
    rule, gradient = SpectralProgress(progress=1e-12, warm=1), draw(1, 260, 280)
    prepared = rule.prepare_inputs(torch.eye(280, dtype=F64), False, 20.0)
    first, memory = rule.shape(make_point(gradient, prepared=prepared))
    second, _ = rule.shape(make_point(share * gradient, memory, prepared=prepared, steps=1))
    torch.testing.assert_close(second, min(max(share, 0.0), 1.0) * first)


def test_lengths_go_to_the_root_of_the_examples_over_few_and_no_further() -> None:
    """From the usual one, or from half of that root."""
    rule, gradient = SpectralProgress(fades=1e6), draw(1, 4, 6)
    cases = ((2.0, 0.25, 0.25), (32.0, 1.0, 1.0), (128.0, 1.0, 2.0), (800.0, 2.5, 5.0), (0.0, 1.0, 1.0))
    for examples, start, most in cases:  # 0 where nobody counts them
        memory = rule.shape(make_point(gradient, examples=examples))[1]
        assert float(memory["scale"]) == pytest.approx(start)
        for step in range(30):
            _, memory = rule.shape(make_point(gradient, memory, steps=step, examples=examples))
        assert float(memory["scale"]) == pytest.approx(most)


def test_a_batch_of_a_few_examples_makes_its_own_step_shorter_and_no_other() -> None:
    rule, gradient, memory = SpectralProgress(), draw(1, 4, 6), dict[str, Tensor]()
    norms, scales = list[float](), list[float]()
    for step, examples in enumerate((64.0,) * 30 + (2.0,) + (64.0,) * 2):
        direction, memory = rule.shape(make_point(gradient, memory, steps=step, examples=examples))
        norms.append(float(direction.norm()))
        scales.append(float(memory["scale"]))
    assert norms[30] == pytest.approx(norms[29] / 32**0.5)
    assert norms[31] == norms[29]
    assert scales[29] == scales[30] == scales[32] == pytest.approx(2**0.5)


def test_a_layer_without_a_gradient_stays_and_has_its_length_later() -> None:
    rule, memory = SpectralProgress(), dict[str, Tensor]()
    for step in range(8):
        direction, memory = rule.shape(make_point(torch.zeros(1, 4, 6, dtype=F64), memory, steps=step))
        assert not direction.any()
    assert float(memory["scale"]) == 1
    direction, memory = rule.shape(make_point(draw(1, 4, 6), memory, steps=8))
    assert torch.isfinite(direction).all()
    assert direction.norm() == pytest.approx(0.075 * 24**0.5, rel=0.1)


def build_heads() -> nn.Module:
    """Of the second head nothing is seen in passes that do not ask for it."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.norm(m.body(x).tanh())
        return m.first(hidden) + (m.second(hidden) if m.both else 0)

    heads = {"first": nn.Linear(6, 3), "second": nn.Linear(6, 3), "both": True}
    return Assembled(run, body=nn.Linear(4, 6), norm=nn.LayerNorm(6), **heads)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_spectral_steps_read_no_labels_once_every_layer_is_known(recipe: Callable[..., Any]) -> None:
    model, decay = build_seeded(build_heads), 0.8
    opt = recipe(model, nn.CrossEntropyLoss(), rule=SpectralProgress(), update_every=1, decay=decay)
    inputs = [draw(50, 4, seed=k) * (1 + k) for k in range(4)]
    labels = list[Tensor]()
    for x in inputs:
        train_batches(opt, model, [(x, torch.arange(50) % 3)])
        labels.append(opt._live.state.hearing.labels)
    assert all(torch.equal(labels[0], later) for later in labels)
    block = opt._live.state.blocks["body.weight body.bias"]
    assert "left" not in block.totals  # nothing is told of derivatives
    ones = [torch.cat([x, torch.ones(50, 1, dtype=F64)], 1) for x in inputs]
    moment = sum(decay ** (3 - k) * a.mT @ a for k, a in enumerate(ones))
    white = moment / moment.diagonal().mean() + 0.3 * torch.eye(5, dtype=F64)
    root = block.prepared["inputs"]
    torch.testing.assert_close(root.mT @ root, torch.linalg.inv(white))
    model.both = False  # the second head's inputs are not heard: derivatives say what that means
    train_batches(opt, model, [(inputs[0], torch.arange(50) % 3)])
    assert not torch.equal(labels[0], opt._live.state.hearing.labels)


@pytest.mark.parametrize("slope", [1e-38, 1e-200])
def test_a_slope_that_grows_out_of_nothing_leaves_numbers_finite(slope: float) -> None:
    rule, gradient = SpectralProgress(), draw(1, 4, 6)
    _, memory = rule.shape(make_point(slope * gradient))
    for step in range(1, 5):
        direction, memory = rule.shape(make_point(gradient, memory, steps=step))
        assert all(torch.isfinite(t).all() for t in (direction, *memory.values()))


@pytest.mark.parametrize("lr", [0.5, 1.0, 10.0])
def test_a_step_promises_no_more_than_a_share_of_the_loss(lr: float) -> None:
    """g . d = -kl_share * loss, where a step at this rate would promise more."""
    model, x = draw_layers(6, 20, 3), draw(40, 6)
    y = model(x).argmax(1)  # classes that it knows
    with torch.no_grad():
        model[2].weight.mul_(20)
    opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=SpectralProgress(kl_share=0.01), lr=lr)
    before = flat(model)
    (loss,) = train_batches(opt, model, [(x, y)])
    assert float((flat(model) - before) @ flat_gradient(model)) == pytest.approx(-0.01 * loss, rel=1e-9)
    assert "kl_share (now 0.01) bounds" in opt.explain()


def test_a_step_that_other_batches_lead_uphill_is_bounded_by_the_loss_of_its_own() -> None:
    """g . d = kl_share * loss, where the running mean points the other way and the loss is near 0."""
    model, x = draw_layers(6, 20, 3), draw(40, 6)
    opt = ng.kfac(model, nn.MSELoss(), rule=SpectralProgress())
    for _ in range(10):
        train_batches(opt, model, [(x, model(x).detach() + 1)])
    before = flat(model)
    (loss,) = train_batches(opt, model, [(x, model(x).detach() - 1e-3)])
    assert float((flat(model) - before) @ flat_gradient(model)) == pytest.approx(0.3 * loss, rel=1e-9)


@pytest.mark.parametrize("scale", [0.1, 100.0])
def test_a_bound_that_is_set_while_inputs_alone_are_read_holds(scale: float) -> None:
    model = draw_layers(6, 16, 3)
    opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=NoiseAware(noise=0.99))
    batches = [(scale * draw(40, 6, seed=k), torch.randint(3, (40,))) for k in range(60)]  # labels are noise
    train_batches(opt, model, batches[:40])
    assert any("left" not in block.totals for block in opt._live.state.blocks.values())
    opt.param_groups[0]["max_kl"] = 1e-4
    for step, (x, y) in enumerate(batches[40:]):
        before = model(x).detach().log_softmax(1)
        train_batches(opt, model, [(x, y)])
        after = model(x).detach().log_softmax(1)
        kl = (before.exp() * (before - after)).sum(1).mean()
        # the bound holds to second order, of which units that saturate see less
        assert float(kl) < (5e-4 if scale == 1 else 2e-3)
        assert float(kl) > 1e-6 or step < 2  # the first pass was not kept to be done again


def test_a_loss_that_may_be_negative_bounds_no_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    opt = ng.kfac(model, ng.Gaussian(), rule=replace(FREE, kl_share=1e-9))
    before = model.weight.detach().clone()
    train_batches(opt, model, [(draw(30, 4), draw(30, 2, seed=1))])
    assert float((model.weight.detach() - before).norm()) > 0.01


def test_with_a_constant_rate_steps_shorten_as_the_loss_falls() -> None:
    """Noise of small batches would hold steps of one length at a loss far above."""
    x = draw(400, 8).float()
    y = (x[:, :3] + 0.1 * x[:, 3:6]).argmax(1)

    def train(kl_share: float) -> float:
        model, generator = draw_layers(8, 32, 3, dtype=x.dtype), torch.Generator().manual_seed(0)
        opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=SpectralProgress(kl_share=kl_share))
        picks = [torch.randint(400, (32,), generator=generator) for _ in range(80)]
        return sum(train_batches(opt, model, [(x[i], y[i]) for i in picks])[-30:])

    assert train(0.3) < 0.8 * train(math.inf)


def test_the_outputs_of_a_regression_count_as_what_they_must_become() -> None:
    assert least_size(0.05, 9, 1.0) == pytest.approx(0.15)
    assert least_size(0.05, 9, 1001.0) == pytest.approx((0.05 + FRESH * 1000) * 3)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_a_checkpoint_continues_bit_for_bit(recipe: Callable[..., Any]) -> None:
    def fresh() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        return model, recipe(model, nn.CrossEntropyLoss(), rule=NoiseAware(noise=0.99))

    batches = [((torch.arange(i, i + 16) % 6), torch.arange(i, i + 16) % 3) for i in range(24)]
    (model, opt), (again, other) = fresh(), fresh()
    train_batches(opt, model, batches[:3])
    again.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    assert train_batches(other, again, batches[3:]) == train_batches(opt, model, batches[3:])


@pytest.mark.parametrize("rule", [SpectralProgress(), SpectralDescent(), NoiseAware()], ids=repr)
@pytest.mark.parametrize("rows", [10.0, 1000.0])
def test_layers_that_are_alike_are_prepared_together_as_each_alone(rule: Rule, rows: float) -> None:
    inputs = 300
    draws = [draw(2 * inputs, inputs) * torch.logspace(0, -i, inputs, dtype=F64) for i in (1, 2)]
    moments = torch.stack([x.mT @ x for x in draws])
    together = rule.prepare_inputs(moments, False, rows)
    assert together
    for i, moment in enumerate(moments):
        torch.testing.assert_close({n: t[i] for n, t in together.items()}, rule.prepare_inputs(moment, False, rows))


def test_layers_that_are_alike_train_as_those_whose_moments_are_factored_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]).to(F64)
        grouped = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1, groups=2), nn.Conv1d(6, 6, 1, groups=2))
        model = nn.Sequential(model, grouped.to(F64), nn.Flatten())
        opt = ng.kfac(model, nn.MSELoss(), rule=SpectralProgress())
        train_batches(opt, model, [(draw(20, 6), draw(20, 6).sin())] * 6)
        return [p.detach().clone() for p in model.parameters()]

    together = train()
    monkeypatch.setattr(blocks, "MOMENTS", 1)
    torch.testing.assert_close(together, train())


# steps from second moments of inputs alone are those of the statistics with derivatives, on random networks

STEPS = 3


def call(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    assert isinstance(outputs, Tensor)
    return outputs


def train(net: Net, recipe: Any, separates: bool) -> tuple[nn.Module, Any]:
    """Some steps with the same inputs, where the structure says that it can do without derivatives, or does not."""
    model = copy.deepcopy(net.model)
    opt = recipe(model, nn.MSELoss(), rule=SpectralProgress(), update_every=1, decay=0.5)
    y = torch.ones_like(call(copy.deepcopy(model), net.inputs).detach())
    with pytest.MonkeyPatch.context() as patch:
        if not separates:
            patch.setattr(Layerwise, "separates", False)
        for _ in range(STEPS):
            opt.zero_grad()
            opt.loss(call(model, net.inputs), y).backward()
            opt.step()
    return model, opt


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=settings().max_examples // 2)
@given(net=nets(), recipe=sampled_from([ng.kfac, ng.ekfac]))
def test_inputs_alone_give_the_steps_of_all_statistics(recipe: Any, net: Net) -> None:
    model, opt = train(net, recipe, separates=True)
    other, _ = train(net, recipe, separates=False)
    assert torch.isfinite(flat(model)).all()
    layered = [
        block for block in opt._live.state.blocks.values() if block.layer is not None and block.totals is not None
    ]
    known = [set(block.totals) & {"left", "right"} for block in layered]
    if any(len(sides) > 1 for sides in known):  # a matrix in several roles keeps what it has
        return
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-7, atol=1e-9)
