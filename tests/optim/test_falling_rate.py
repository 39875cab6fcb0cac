"""`rate="auto"`: spectral steps that get shorter by themselves."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from engine_state import kept_of
from models import draw
from optim_models import flat, train_batches
from spectral_points import draw_layers, make_point
from torch import Tensor, nn

import natgrad as ng
from natgrad.layers import Seen
from natgrad.rules import MeasuredLength, NoiseAware, SpectralDescent, SpectralProgress

F64 = torch.float64
CE = nn.CrossEntropyLoss()


def make_model() -> nn.Sequential:
    return draw_layers(4, 6, 3)


def train_on_noise(opt: Any, model: nn.Module, steps: range, rates: list[float] | None = None) -> None:
    """Steps on batches whose labels are noise."""
    torch.manual_seed(steps.start)  # the labels of the metric are drawn
    for k in steps:
        generator = torch.Generator().manual_seed(k)
        x, y = torch.randn(8, 4, generator=generator, dtype=F64), torch.randint(3, (8,), generator=generator)
        if rates is not None:
            opt.param_groups[0]["lr"] = rates[k]
        train_batches(opt, model, [(x, y)])


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_it_is_the_schedule_that_a_scheduler_would_set(recipe: Any) -> None:
    """The bounds on a step and the decay of weights follow as well."""
    one, other = make_model(), make_model()
    opt = recipe(one, CE, rate="auto", weight_decay=0.004)
    train_on_noise(opt, one, range(60))
    turned = opt._live.state.noise.turned
    assert 0 <= turned < 20
    rates = [1.0 if k <= turned else min(1.0, math.sqrt(20 / (k - turned))) for k in range(60)]
    assert rates[-1] < 0.7
    train_on_noise(recipe(other, CE, weight_decay=0.004), other, range(60), rates)
    torch.testing.assert_close(flat(one), flat(other), rtol=1e-12, atol=1e-12)


def test_steps_that_have_not_turned_are_as_long_as_ever() -> None:
    ends = []
    for falls_after in (1, math.inf):
        rule = NoiseAware(noise=1e-9, spectral=SpectralDescent(falls_after=falls_after))
        opt = ng.kfac(model := make_model(), CE, rule=rule)
        train_on_noise(opt, model, range(8))  # noise is not believed before the tenth step
        assert opt._live.state.noise.turned == -1
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_what_has_no_rate_that_falls_is_refused() -> None:
    for recipe in (ng.kfac, ng.ekfac):
        for rule in (MeasuredLength(), NoiseAware(noise=0.0), ng.TrustRegion(0.1)):
            words = r'rate="auto" shortens spectral steps, and .* takes none: leave rule= out'
            with pytest.raises(ValueError, match=words):
                recipe(make_model(), CE, rate="auto", rule=rule)
        for rate in ("Auto", 0.1, None):
            with pytest.raises(ValueError, match='expected "constant" or "auto"; a number goes to lr='):
                recipe(make_model(), CE, rate=rate)


def test_the_users_rule_keeps_its_numbers() -> None:
    rule = NoiseAware(move=0.05, spectral=SpectralDescent(length=0.02, falls_after=7))
    assert ng.kfac(make_model(), CE, rate="auto", rule=rule).rule == rule
    plain = ng.kfac(make_model(), CE, rate="auto", max_kl=0.5).rule
    assert plain == NoiseAware(max_kl=0.5, spectral=SpectralProgress(falls_after=20))


# a spectral step of few rows is shorter: by the root of rows per singular value of the layer


OUTPUTS, INPUTS = 16, 20


@pytest.mark.parametrize(("positions", "share"), [(8, 0.25), (32, 1.0), (500, 1.0), (math.inf, 1.0)])
def test_a_direction_is_shorter_by_the_root_of_rows(positions: float, share: float) -> None:
    few, all_rows = (
        SpectralDescent(enough=2.0).shape(make_point(draw(1, OUTPUTS, INPUTS), positions=rows))[0]
        for rows in (positions, math.inf)
    )
    torch.testing.assert_close(few, math.sqrt(share) * all_rows)


def train_spectral(model: nn.Module, x: Tensor, y: Tensor, parts: int = 1, steps: int = 1, **options: Any) -> Any:
    """Spectral steps from batches in as many micro-batches. The blocks' numbers are in the optimizer's state."""
    opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=SpectralDescent(**options), update_every=1, invert_every=1)
    for _ in range(steps):
        opt.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (opt.loss(model(a), b) / parts).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("rows", [4, 12, 64])
def test_a_step_of_few_rows_is_shorter(rows: int) -> None:
    x, y = draw(rows, INPUTS), torch.arange(rows) % OUTPUTS
    first = nn.Linear(INPUTS, OUTPUTS, dtype=F64)
    moved = dict[float, Tensor]()
    for enough in (1e-9, 2.0):
        model = copy.deepcopy(first)
        train_spectral(model, x, y, enough=enough)
        moved[enough] = model.weight.detach() - first.weight.detach()
    assert float(moved[1e-9].norm()) > 0
    torch.testing.assert_close(moved[2.0], math.sqrt(min(1, rows / 2 / OUTPUTS)) * moved[1e-9])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_count_as_one_step(parts: int) -> None:
    model = nn.Linear(INPUTS, OUTPUTS, dtype=F64)
    opt = train_spectral(model, draw(8, INPUTS), torch.arange(8) % OUTPUTS, parts, steps=3)
    numbers = kept_of(opt, model.weight)
    assert numbers["positions"] / numbers["readings"] == pytest.approx(8)


def test_positions_of_images_and_texts_count() -> None:
    image = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4)).double()
    opt = train_spectral(image, draw(7, 3, 6, 6), torch.arange(7) % 4)
    found = [kept_of(opt, image[i].weight) for i in (0, 3)]
    assert [one["positions"] / one["readings"] for one in found] == [7 * 36, 7]

    text = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double()
    model = ng.kfac(text, nn.CrossEntropyLoss(), rule=SpectralDescent())
    tokens = torch.arange(20).view(4, 5) % 9
    model.loss(text(tokens).transpose(1, 2), tokens).backward()
    model.step()
    assert kept_of(model, text[1].weight)["positions"] == 20


def test_groups_that_see_some_count_their_mean() -> None:
    layer = nn.Linear(2, 3)
    seen = Seen(layer, torch.zeros(2, 5, 4, 2), [torch.zeros(2, 5, 4, 3)], counts=torch.tensor([4.0, 6, 2, 0]))  # type: ignore[arg-type]
    assert seen.positions == 3
    assert Seen(layer, torch.zeros(6, 5, 1, 2), [torch.zeros(6, 5, 1, 3)], cotangents=3).positions == 10  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [2, 5, 40, 1000])
def test_inputs_are_whitened_as_far_as_rows_tell(rows: int) -> None:
    damping, scarce = 0.3, 1.5
    x = draw(rows, INPUTS) @ torch.diag(torch.logspace(-2, 1, INPUTS, dtype=F64))
    model = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=F64)
    opt = train_spectral(model, x, torch.arange(rows) % OUTPUTS, damping=damping, scarce=scarce)
    kept = kept_of(opt, model.weight)
    moment, root = x.T @ x / rows, kept["prepared"]["inputs"]
    ridge = max(damping, scarce * INPUTS / rows)
    expected = torch.linalg.inv(INPUTS * moment / moment.trace() + ridge * torch.eye(INPUTS, dtype=F64))
    torch.testing.assert_close(root.mT @ root, expected * (1 + ridge) / (1 + damping), rtol=1e-8, atol=1e-10)


def test_white_inputs_move_as_far_with_few_rows() -> None:
    eye = torch.eye(INPUTS, dtype=F64)
    for rows in (0.0, 1.0, 7.0, 1e6, math.inf):
        root = SpectralDescent().prepare_inputs(eye, False, rows)["inputs"]
        torch.testing.assert_close(root.mT @ root, eye / 1.3)


def test_tokens_are_whitened_by_all_rows_alike() -> None:
    often = torch.tensor([4.0, 1.0, 0.0], dtype=F64)
    few, many = (SpectralDescent().prepare_inputs(often, True, rows)["tokens"] for rows in (1.0, math.inf))
    torch.testing.assert_close(few, (often / often.mean() + 0.3).rsqrt())
    torch.testing.assert_close(few, many)
