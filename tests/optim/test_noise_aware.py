"""`NoiseAware`: natural steps within a share of each layer, then spectral ones in noise."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_state import kept_of
from models import draw
from optim_models import flat, train_batches
from spectral_points import describe_fit, draw_layers, join_bias, make_point, polar_by_svd, refuse_metric
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import natgrad as ng
from natgrad.layers import Seen
from natgrad.optim.block_step import follow_signal, noise_in_mean
from natgrad.optim.state import Noise
from natgrad.rules import BlockPoint, MeasuredLength, NoiseAware, SpectralDescent, SpectralProgress
from natgrad.rules.spectral_descent import apply_root, polar, polish, table_rows, whitener

F64 = torch.float64
SAFE = ng.Relative(0.03, per="block", whole=1.0)


@pytest.mark.parametrize("shape", [(5, 5), (3, 9), (9, 3), (2, 4, 6)])
def test_polar_factor_by_products_is_that_of_the_singular_vectors(shape: tuple[int, ...]) -> None:
    matrix = draw(*shape)
    torch.testing.assert_close(polar(matrix), polar_by_svd(matrix), atol=2e-3, rtol=0)
    torch.testing.assert_close(polar(1e-12 * matrix), polar(matrix))
    assert not polar(torch.zeros(shape)).any()


def fading_values(rows: int, columns: int) -> Tensor:
    """A matrix with singular values .8^i, down to 1.5e-4 for 40 of them."""
    left, values, right = torch.linalg.svd(draw(rows, columns), full_matrices=False)
    return (left * values.new_tensor(0.8).pow(torch.arange(len(values)))) @ right


class RoundedProducts(TorchFunctionMode):
    """The factors of matrix products are rounded to so many bits: 11 as in TF32 on an accelerator, 24 as they are."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.matmul, Tensor.__matmul__, torch.matmul, torch.mm, torch.addmm, torch.bmm):
            args = [self.round(arg) if isinstance(arg, Tensor) else arg for arg in args]
        return func(*args, **(kwargs or {}))

    def round(self, tensor: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(tensor)
        return torch.ldexp(torch.round(mantissa * 2**self.bits) / 2**self.bits, exponent)


@pytest.mark.parametrize("bits", [11, 24])
@pytest.mark.parametrize("shape", [(40, 50), (40, 400)])
def test_five_iterations_leave_singular_values_near_one_in_low_precision_too(shape: tuple[int, int], bits: int) -> None:
    matrix = fading_values(*shape)
    with RoundedProducts(bits):
        product = polish((matrix / (1.01 * matrix.norm())).float(), 5)
    values = torch.linalg.svdvals(product)
    large = int((0.8 ** torch.arange(40) > 1.5e-3 * matrix.norm()).sum())
    assert values.max() < 1.13
    assert values[large - 1] > 0.87


@pytest.mark.parametrize("shape", [(40, 50), (30, 90), (90, 30)])
def test_one_inverse_leaves_singular_values_within_a_quarter_of_one_in_single_precision_too(
    shape: tuple[int, int],
) -> None:
    matrix = fading_values(*shape)
    found = torch.linalg.svdvals(polar(matrix.float(), 5))
    large = int((0.8 ** torch.arange(min(shape)) > 0.02 * (matrix @ matrix.mT).norm().sqrt()).sum())
    assert found.max() < 1.245
    assert found[:large].min() > 0.755
    assert not polar(torch.zeros(shape), 5).any()
    for scale in (1e-16, 1e-30, 1e16):  # the squares of a square leave single precision
        torch.testing.assert_close(polar(scale * matrix.float(), 5), polar(matrix.float(), 5), atol=2e-3, rtol=0)


def test_a_triangular_product_in_blocks_is_the_whole_one() -> None:
    matrix, root = draw(7, 600), draw(600, 600, seed=1).tril()
    torch.testing.assert_close(apply_root(matrix, root, transposed=True), matrix @ root.mT)
    torch.testing.assert_close(apply_root(matrix, root), matrix @ root)


def test_whitened_second_moment_is_its_damped_share() -> None:
    rows = draw(40, 4) * torch.tensor([3.0, 1.0, 0.1, 0.0], dtype=F64)
    moment = rows.mT @ rows / 40
    root = whitener(moment, False, 0.3)["inputs"]
    mean = moment.diagonal().mean()
    torch.testing.assert_close(root.mT @ root, torch.linalg.inv(moment / mean + 0.3 * torch.eye(4, dtype=F64)))
    torch.testing.assert_close(
        whitener(moment.diagonal(), True, 0.3)["tokens"], (moment.diagonal() / mean + 0.3).rsqrt()
    )
    assert torch.isfinite(whitener(torch.zeros(4, 4), False, 0.3)["inputs"]).all()


@pytest.mark.parametrize("shape", [(3, 5), (1, 5, 3), (4, 1, 4)])
def test_a_spectral_step_of_a_table_without_a_layer_is_its_polar_factor(shape: tuple[int, ...]) -> None:
    """All directions of positions move alike, by the root of entries per row, and not the one that they share alone."""
    rows, entries = (side for side in shape if side > 1)
    mean = draw(1, 1, rows * entries)
    point = BlockPoint(("place",), "Diagonal", mean, lambda: mean, None, refuse_metric, 0.0, shape=shape)
    found, _ = SpectralDescent(iterations=7).shape(point)
    expected = max(1.0, entries / rows) ** 0.5 * polar_by_svd(mean.view(rows, entries))
    assert torch.allclose(found.view(rows, entries), expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1, 1), (2, 3, 4), (1025, 1026)])
def test_what_is_no_table_or_a_large_one_moves_by_entries(shape: tuple[int, ...]) -> None:
    assert table_rows(shape) is None


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_a_spectral_step_is_the_written_out_one(recipe: Any) -> None:
    model, x, y = draw_layers(4, 3), draw(50, 4), draw(50, 3, seed=1)
    before = join_bias(model[0])
    rule = SpectralDescent(length=0.1, damping=0.2, ahead=0.25, iterations=7)
    train_batches(recipe(model, nn.MSELoss(), rule=rule, lr=0.5), model, [(x, y)])
    gradient, _, root = describe_fit(before, x, y, 0.2)
    expected = polar_by_svd(gradient @ root) @ root  # 3 outputs, 5 inputs: no factor
    torch.testing.assert_close(before - join_bias(model[0]), 0.5 * 0.1 * expected, atol=2e-4, rtol=0)


def test_a_spectral_step_of_an_embedding_changes_its_outputs_by_as_much_as_asked() -> None:
    """R n at a fixed root mean square over the tokens of the batch, whatever the vocabulary."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).double()
    x, y = torch.tensor([0, 0, 0, 1, 1, 5]), draw(6, 3, seed=1)
    opt = ng.kfac(model, nn.MSELoss(), rule=SpectralDescent(length=0.1, damping=0.2, ahead=0.25, rows=0.7))
    before = model[0].weight.detach().clone()
    train_batches(opt, model, [(x, y)])
    moved = before - model[0].weight.detach()
    counts = torch.bincount(x, minlength=9).double() / 6
    gradient = torch.zeros(9, 4, dtype=F64).index_add_(0, x, model[0].weight.grad[x] / (6 * counts[x, None]))
    expected = gradient * (counts / counts.mean() + 0.2).rsqrt()[:, None]
    size = (counts @ expected.square().mean(1)).sqrt()
    torch.testing.assert_close(moved, 0.1 * 0.7 * expected / size)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
def test_a_head_of_many_words_takes_spectral_steps_too(recipe: Any) -> None:
    """Only the factor of the inputs is asked, and it is whole: in white inputs all singular values are the same."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2100, bias=False).double()
    x, y = draw(50, 4), torch.arange(50)
    opt = recipe(model, nn.CrossEntropyLoss(), rule=SpectralDescent(length=1e-3, damping=0.2, iterations=7))
    before = model.weight.detach().clone()
    train_batches(opt, model, [(x, y)])
    moment = x.mT @ x / 50
    white = moment / moment.diagonal().mean() + 0.2 * torch.eye(4, dtype=F64)
    step = (before - model.weight.detach()) @ torch.linalg.cholesky(white)
    torch.testing.assert_close(
        torch.linalg.svdvals(step), torch.full((4,), 1e-3 * math.sqrt(2100 / 4), dtype=F64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(("rows", "turns"), [(4.0, 3), (16.0, 12), (32.0, 24), (math.inf, 24)])
def test_a_direction_is_kept_until_as_many_rows_were_seen_as_it_has_singular_values(rows: float, turns: int) -> None:
    """A step of 16 x 20 needs 32 rows, two per singular value: with 16 every second has a direction of its own."""
    rule, memory, found = SpectralDescent(), dict[str, Tensor](), list[Tensor]()
    for step in range(24):
        direction, memory = rule.shape(make_point(draw(1, 16, 20, seed=step), memory, steps=step, positions=rows))
        found.append(direction)
    changes = sum(not torch.equal(a, b) for a, b in pairwise(found)) + 1
    # the first one may come between two of its turns
    assert turns <= changes <= turns + 1


def test_the_move_of_a_layer_is_a_share_of_it() -> None:
    model = draw_layers(6, 8, 3)
    with torch.no_grad():
        model[2].weight.mul_(1e-3)  # so small a layer counts as a fresh one
        model[2].bias.zero_()
    opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=NoiseAware(move=0.01, kl_share=1e6), damping=1e-6)
    before = [join_bias(model[i]) for i in (0, 2)]
    train_batches(opt, model, [(draw(30, 6), torch.arange(30) % 3)])
    for old, now in zip(before, [join_bias(model[i]) for i in (0, 2)], strict=True):
        bound = 0.01 * max(float(old.norm()), 0.05 * math.sqrt(len(old)))
        assert float((now - old).norm()) == pytest.approx(bound, rel=1e-6)


def test_without_its_bounds_the_rule_is_the_measured_length() -> None:
    found = []
    for rule in (MeasuredLength(), NoiseAware(kl_share=0.05, move=math.inf, noise=0.0)):
        opt = ng.kfac(model := draw_layers(6, 8, 3), nn.CrossEntropyLoss(), rule=rule)
        found.append(train_batches(opt, model, [(draw(30, 6, seed=k), torch.arange(30) % 3) for k in range(15)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_the_share_of_signal_is_none_in_noise_and_all_in_a_constant_gradient(decay: float) -> None:
    for signal, expected in ((0.0, 0.0), (1.0, 1.0)):
        mean, totals = torch.zeros(20_000, dtype=F64), torch.zeros(3, dtype=F64)
        for count in range(1, 30):
            gradient = signal + (1 - signal) * draw(20_000, seed=count)
            mean = mean.lerp(gradient, 1 - decay)
            square = gradient.square().sum()
            totals += torch.stack(
                [(mean / (1 - decay**count)).square().sum(), square, noise_in_mean(decay, count) * square]
            )
        m, g, z = totals.tolist()
        assert (m - z) / (g - z) == pytest.approx(expected, abs=0.02)


def test_the_turn_comes_after_ten_steps_at_the_least() -> None:
    noise, turns = Noise(), list[bool]()
    for step in range(10):
        noise, is_low = follow_signal(noise, step, [0.0, 1.0, 0.05], 0.26)
        turns.append(is_low)
    assert turns == [False] * 9 + [True]


@pytest.mark.parametrize(("damping", "far", "turned"), [(0.03, 1.5, -1), (1e-6, 1.5, 0), (1e-6, 1e9, -1)])
def test_natural_steps_far_beyond_their_layers_give_way_to_spectral_ones(damping: float, far: float, turned: int):
    """Without damping, directions that the loss hardly depends on take a step many times as far as the layers are."""
    x = draw(64, 6).float()
    opt = ng.kfac(
        model := draw_layers(6, 8, 3, dtype=x.dtype), nn.CrossEntropyLoss(), damping=damping, rule=NoiseAware(far=far)
    )
    cuts = list[float]()
    for _ in range(3):
        train_batches(opt, model, [(x, x[:, :3].argmax(1))])
        cuts.append(opt.state_report().cuts.get("move", 0.0))
    assert (cuts[0] * 0.12 > 1.5) == (damping < 0.03)
    assert (max(cuts[1:]) == 0) == (turned == 0)  # spectral steps have bounds of their own
    said = "Since step 0 a natural step would move layers by more than 1.5 of their size"
    assert (said in opt.explain()) == (turned == 0)


def test_steps_turn_spectral_where_labels_are_noise_and_a_checkpoint_keeps_that() -> None:
    def fresh() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(12, 6), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        return model, ng.kfac(model, nn.CrossEntropyLoss(), rule=NoiseAware(), damping=SAFE)

    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(12, (16, 4), generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(40)
    ]
    model, opt = fresh()
    train_batches(opt, model, batches[:30])
    assert 9 <= opt._live.state.noise.turned < 29
    again, other = fresh()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    assert train_batches(other, again, batches[30:]) == train_batches(opt, model, batches[30:])


WRONG: list[tuple[Any, str, float]] = [
    *[(NoiseAware, name, 0.0) for name in ("move", "floor", "max_kl", "warm")],
    *[(NoiseAware, "noise", value) for value in (1.0, -0.1)],
    (NoiseAware, "kl_share", -1.0),
    *[(SpectralDescent, name, 0.0) for name in ("length", "damping", "enough", "renewed", "falls_after")],
    *[(SpectralDescent, "falls_after", value) for value in (-1.0, math.nan)],
    *[(SpectralDescent, "scarce", value) for value in (-1.0, math.inf)],
    (SpectralDescent, "ahead", 1.5),
    (SpectralDescent, "vectors", -1.0),
    (SpectralDescent, "iterations", 8),
    *[
        (SpectralProgress, name, 0.0)
        for name in ("share", "damping", "fades", "few", "kl_share", "warm", "falls_after")
    ],
    (SpectralProgress, "floor", -1.0),
    (SpectralProgress, "ahead", 1.5),
    (SpectralProgress, "floor", math.nan),
    (SpectralProgress, "progress", -0.1),
]


@pytest.mark.parametrize(("rule", "name", "value"), WRONG)
def test_settings_are_checked(rule: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        rule(**{name: value})


# rate="auto": spectral steps that get shorter by themselves

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
