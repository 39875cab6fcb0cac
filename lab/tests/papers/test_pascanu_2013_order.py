"""Order robustness: runs side by side are runs alone, only the resampled segment differs, and the verdict is open."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import natgrad as ng
from natgrad_lab.data import Split
from natgrad_lab.experiments import LabError, PieceRun, execute
from natgrad_lab.experiments.frame import Findings, FinishedPiece
from natgrad_lab.papers.pascanu_2013 import order
from natgrad_lab.report import build

TINY = order.OrderSettings(
    side=4, hidden=3, batch=6, segments=3, steps=2, runs=2, held_out=20, tolerance=0.5, rate=0.1, threads=None
)


def pictures():
    """Three classes: noise with a bright band at the top, in the middle, or below."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 8, 8, generator=generator), torch.arange(60) % 3
    x[torch.arange(60)[:, None], 1 + 2 * y[:, None] + torch.arange(2)] += 1
    return Split(x[:40], y[:40], x[40:], y[40:])


@pytest.fixture(autouse=True)
def no_files(monkeypatch):
    monkeypatch.setitem(order.SOURCES, "mnist", pictures)


def joint(runs=3, b=6):
    generator = torch.Generator().manual_seed(1)
    model = order.Perceptrons(list(range(runs)), 4, 3, 3).double()
    inputs = torch.randn(b, runs, 4, generator=generator, dtype=torch.float64)
    return model, (inputs, torch.randint(3, (b, runs), generator=generator))


def alone(params, x):
    """One perceptron by itself, from the definition."""
    hidden = (x @ params["weight1"] + params["bias1"]).tanh()
    return hidden @ params["weight2"] + params["bias2"]


def parts(model, r):
    return {name: p.detach()[r].clone() for name, p in model.named_parameters()}


def test_the_joint_model_holds_independent_perceptrons():
    model, (x, _) = joint()
    for r in range(model.runs):
        torch.testing.assert_close(model(x)[:, r], alone(parts(model, r), x[:, r]))


def test_one_solve_on_the_joint_model_is_a_solve_for_every_run():
    model, (x, y) = joint()
    damping = 0.3
    joint_steps = order.NaturalDirection(damping, ng.CG(rtol=1e-12, max_steps=500))(model, (x, y))
    plain = order.gradient(model, (x, y))
    for r in range(model.runs):
        params = parts(model, r)
        g = torch.func.grad(lambda p, r=r: functional.cross_entropy(alone(p, x[:, r]), y[:, r]))(params)
        metric = ng.fisher(alone, ng.Categorical()).at(params, x[:, r])
        space = ng.Space(params)
        dense = metric.dense() + damping * torch.eye(len(metric.dense()), dtype=torch.float64)
        expected = space.unflatten(torch.linalg.solve(dense, space.flatten(g)))
        for (name, value), ours, theirs in zip(expected.items(), joint_steps, plain, strict=True):
            torch.testing.assert_close(ours[r], value, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(theirs[r], g[name])


def test_every_run_has_its_own_rate():
    model, batch = joint()
    before = parts(model, 0), parts(model, 1)
    direction = order.gradient(model, batch)
    order.step(model, direction, torch.tensor([0.0, 0.5, 1.0]).double())
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), parts(model, 0).values(), strict=True))
    torch.testing.assert_close(parts(model, 1)["weight1"], before[1]["weight1"] - 0.5 * direction[0][1])


def test_losses_are_those_of_every_run():
    model, (x, y) = joint()
    loss, wrong, outputs = order.losses(model, (x, y))
    for r in range(model.runs):
        logits = alone(parts(model, r), x[:, r])
        torch.testing.assert_close(loss[r], functional.cross_entropy(logits, y[:, r]))
        assert wrong[r] == (logits.argmax(1) != y[:, r]).double().mean()
        torch.testing.assert_close(outputs[:, r], logits.softmax(1))


def test_equal_seeds_start_equal():
    model = order.Perceptrons([5, 5, 6], 4, 3, 3)
    assert torch.equal(model.weight1[0], model.weight1[1])
    assert not torch.equal(model.weight1[0], model.weight1[2])


def test_a_deformation_of_nothing_changes_nothing():
    still = order.Deformation(0.0, 0.0, 0.0, 0.0, 0.0)
    images = pictures().train_x
    torch.testing.assert_close(still(images, torch.Generator()), images, rtol=0, atol=1e-5)
    bent = order.Deformation()(images, torch.Generator().manual_seed(0))
    assert bent.shape == images.shape
    assert (bent - images).abs().max() > 0.1


def test_a_shift_of_the_whole_width_at_most():
    """One white column, shifted by up to a quarter of the width either way, stays within that reach."""
    images = torch.zeros(50, 16, 16)
    images[:, :, 8] = 1.0
    bent = order.Deformation(0.0, 0.0, 0.0, 0.25, 0.0)(images, torch.Generator().manual_seed(0))
    columns = bent.amax((0, 1)).nonzero().flatten()
    assert 3 <= columns.min() < 6
    assert 10 < columns.max() <= 13


def test_a_stream_can_be_drawn_again():
    stream = order.Stream(pictures(), 6, 4, seed=1)
    assert torch.equal(stream.batch(3)[0], stream.batch(3)[0])
    assert stream.batch(3)[0].shape == (6, 16)
    others = stream.batch(4), stream.batch(3, draw=1), replace(stream, seed=2).batch(3), stream.held_out(6)
    assert all(not torch.equal(stream.batch(3)[0], other[0]) for other in others)


def test_seeds_of_the_generator_do_not_meet():
    pieces = {order.number(s, p, t, d) for s in (0, 1, 2047) for p in (0, 1) for t in (0, 1, 65_535) for d in range(16)}
    assert len(pieces) == 3 * 2 * 3 * 16
    assert max(pieces) < 2**32


def test_only_the_resampled_segment_differs():
    s, many = TINY, TINY.segments * TINY.runs
    seen = []

    def record(model, batch):
        seen.append(batch[0])
        return [torch.zeros_like(p) for p in model.parameters()]

    order.measure(PieceRun(s, seed=3), record, 0.1)
    assert len(seen) == 2 * s.segments * s.steps
    plain = order.Stream(pictures(), s.batch, s.side, 3)
    for at, inputs in enumerate(seen):
        base = plain.batch(at)[0]
        other = [r for r in range(many) if not torch.equal(inputs[:, r], base)]
        now = at // s.steps
        assert other == [now * s.runs + j for j in range(s.runs) if now < s.segments]
        assert len({float(inputs[:, r].sum()) for r in other}) == len(other)


def test_a_model_that_does_not_move_has_no_variance():
    still = order.measure(PieceRun(TINY), order.gradient, 0.0)
    assert still["variance"] == [0.0] * TINY.segments
    moved = order.measure(PieceRun(TINY), order.gradient, 0.5)
    assert min(moved["variance"]) > 0


def test_variance_is_that_over_the_runs_of_a_segment():
    s, seen = TINY, {}

    def watch_gradient(model, batch):
        seen["model"] = model
        return order.gradient(model, batch)

    numbers = order.measure(PieceRun(s), watch_gradient, 0.5)
    x, _ = order.Stream(pictures(), s.batch, s.side, 0).held_out(s.held_out)
    p = seen["model"](x[:, None].expand(-1, s.segments * s.runs, -1)).softmax(-1)
    for segment, variance in enumerate(numbers["variance"]):
        first, second = p[:, 2 * segment], p[:, 2 * segment + 1]
        assert variance == pytest.approx(((first - second) ** 2 / 2).mean().item(), rel=1e-4)


def test_crossing_interpolates_where_the_loss_first_falls_to_the_target():
    assert order.crossing({0.1: 3.0, 1.0: 1.0, 10.0: 5.0}, 2.0) == pytest.approx(10**-0.5)
    with pytest.raises(LabError, match="no two of the rates tried"):
        order.crossing({0.1: 3.0, 1.0: 2.5}, 2.0)


def test_matching_ends_within_the_tolerance_or_says_so():
    s = replace(TINY, tolerance=0.002, steps=4)
    level = {"level": {"loss": order.level(PieceRun(s))["loss"]}}
    matched_rate = order.match(PieceRun(s, earlier=level), s.natural(3.0))
    assert abs(matched_rate["loss"] / matched_rate["target"] - 1) <= s.tolerance
    assert matched_rate["rate"] in [rate for rate, _ in matched_rate["tried"]]
    with pytest.raises(LabError, match="no two of the rates tried"):
        order.match(PieceRun(s, earlier={"level": {"loss": 0.001}}), s.natural(3.0))


def test_rates_that_diverge_are_left_out(monkeypatch):
    monkeypatch.setattr(
        order, "measure_last_losses", lambda run, direction, rates, advance: [float("nan")] * len(rates)
    )
    with pytest.raises(LabError, match="diverges: change rate"):
        order.match(PieceRun(TINY, earlier={"level": {"loss": 1.0}}), TINY.natural(3.0))


def test_heavy_damping_is_plain_gradient_descent():
    """(G + lambda I)^-1 g -> g / lambda: at lambda = 1e6 the two protocols give the same variances."""
    heavy = order.measure(PieceRun(TINY), TINY.natural(1e6), 0.5e6)
    plain = order.measure(PieceRun(TINY), order.gradient, 0.5)
    assert heavy["variance"] == pytest.approx(plain["variance"], rel=1e-3)


def test_runs_of_different_seeds_do_not_mix():
    s = TINY
    both = order.ParallelTraining(s, pictures(), [1, 2], lambda n: [(1, 0), (2, 0)], torch.tensor([0.5, 0.5]))
    both.run(order.gradient, lambda fraction: None)
    single = order.ParallelTraining(s, pictures(), [2], lambda n: [(2, 0)], torch.tensor([0.5]))
    single.run(order.gradient, lambda fraction: None)
    torch.testing.assert_close(both.model.weight1[1], single.model.weight1[0])


def test_the_study_ends_in_a_page(tmp_path):
    execute(order.STUDY, TINY, [0, 1], tmp_path)
    outcome, page = build(tmp_path)
    assert outcome.missing == 0
    text = page.read_text()
    assert "Variance of the outputs by resampled segment" in text
    assert "natural gradient, damping 3" in text
    (tmp_path / "records" / "small.seed-0.json").unlink()
    (tmp_path / "records" / "small.seed-1.json").unlink()
    assert "No seed is finished for every method" in build(tmp_path)[1].read_text()


def tell_outcome(**variances):
    headers = {"msgd": variances["msgd"], "paper": variances["msgd"], "small": variances["small"]}
    matched = {"rate": 0.1, "loss": 1.0, "target": 1.0, "tried": [[0.1, 1.0], [0.2, 0.8]]}
    pieces = [FinishedPiece({"piece": "level", "seed": 0}, {"loss": 1.0})]
    pieces += [FinishedPiece({"piece": piece, "seed": 0}, matched) for piece in ("rate-paper", "rate-small")]
    for piece, by_seed in headers.items():
        for seed, variance in enumerate(by_seed):
            numbers = {"rate": 0.1, "variance": variance, "loss": [1.0], "error": [0.5]}
            pieces.append(FinishedPiece({"piece": piece, "seed": seed}, numbers))
    return order.tell(Findings(order.OrderSettings(), tuple(pieces)))


LOW, HIGH = [[1.0, 1.0], [1.1, 1.1], [0.9, 0.9]], [[2.0, 2.0], [2.2, 2.2], [1.8, 1.8]]


def test_the_verdict_may_go_either_way():
    fell = tell_outcome(msgd=HIGH, small=LOW)
    assert "damping 0.1: 50 % less (shows) overall" in fell.sections[0].verdict
    assert "0.50 times with the natural gradient, damping 0.1" in fell.lead
    rose = tell_outcome(msgd=LOW, small=HIGH)
    assert "100 % more (the reverse shows) overall" in rose.sections[0].verdict
    assert "damping 3: 0 % more (not told apart) overall" in rose.sections[0].verdict


def test_ratios_and_fading():
    runs = [{"msgd": {"variance": [4.0, 2.0, 2.0, 1.0]}, "small": {"variance": [1.0, 2.0, 2.0, 1.0]}}]
    assert order.ratios(runs, "small") == [6 / 9]
    assert order.ratios(runs, "small", 0) == [0.25]
    assert order.fading(runs[0]["msgd"]) == pytest.approx(8 / 5)
    assert order.shows([2.0]) == "one seed"


def test_what_the_matching_leaves_open_is_not_a_finding():
    """loss = rate^-1/2: a relative error e of the loss is 2 e of the rate, 4 e of its square."""
    matched = {"rate": 1.0, "tried": [[0.25, 2.0], [1.0, 1.0], [1.21, 1 / 1.1]]}
    assert order.margin(matched, 0.01) == pytest.approx(0.04)
    assert order.shows([1.03, 1.031], order.margin(matched, 0.01)) == "not told apart"
    assert order.shows([1.03, 1.031]) == "shows"


def test_omniglot_s_stream_holds_out_writers(monkeypatch):
    x, y = torch.rand(80, 28, 28), torch.arange(80) // 20
    monkeypatch.setattr(order, "omniglot", lambda: Split(x, y, x[:1], y[:1]))
    characters = order.omniglot_characters(3)
    assert characters.train_x.shape == (48, 28, 28)
    assert torch.equal(characters.test_x, torch.cat([x[16:20], x[36:40], x[56:60]]))
    assert characters.test_y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
