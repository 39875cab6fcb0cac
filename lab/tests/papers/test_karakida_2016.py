"""Karakida et al. 2016: learners side by side are the library's own steps, the data are as said, a page is told."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor

import natgrad as ng
from natgrad.energies import TwoLayer
from natgrad.energies.two_layer import gradients
from natgrad.ground.spaces import Positive, Square, positive
from natgrad_lab.experiments import PieceRun, execute, find, override
from natgrad_lab.experiments.records import Folder
from natgrad_lab.papers.karakida_2016 import runs, two_layer
from natgrad_lab.papers.karakida_2016.page import count_degraded, draw_all, find_first_steps, find_mean_step
from natgrad_lab.report import build, read_outcome

SMALL = ["runs=2", "examples=60", "held_out=30", "descent_steps=6", "natural_steps=6", "tuned_steps=20", "batch=4"]
SMALL += ["our_steps=6", "our_single=10", "dtype=float64", "processes=1", "rounds=5"]
STUDIES = runs.TABLE1, runs.FIGURE1, runs.GAP


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of every study, each in one of its name."""
    root = tmp_path_factory.mktemp("studies")
    for study in STUDIES:
        execute(study, override(study.settings, SMALL), range(2), root / study.name)
    return root


def three(link: Positive | Square) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in two_layer.starts(0, 3, link).items()}


@pytest.mark.parametrize("link", [positive, Square()], ids=repr)
def test_the_tight_loop_has_the_gradient_of_the_model(link: Positive | Square) -> None:
    params, x = three(link), draw(3, 1, 8)
    single, expected = two_layer.SingleExample(params, link), three(link)
    for ours, general in zip(single.gradient(x), gradients(params["W"], link(params["V"]), x), strict=True):
        assert_close(ours, general, 1e-12)
    rates = torch.tensor([1e-3, 1e-2, 0.0], dtype=F64).view(3, 1, 1)
    for rate in (1e-3, rates):
        descent = TwoLayer(link).gradient(expected, x)
        expected = {name: p - rate * descent[name] for name, p in expected.items()}
        single.descend(x, rate)
        assert_close(params["W"], expected["W"], 1e-12)
        assert_close(params["V"], expected["V"], 1e-12)
        assert_close(single.V, link(params["V"]), 1e-14)


@pytest.mark.parametrize("link", [positive, Square()], ids=repr)
def test_the_tight_loop_has_the_scores_jacobian_of_the_model(link: Positive | Square) -> None:
    params, model = three(link), TwoLayer(link)
    single = two_layer.SingleExample(params, link)
    for seed in range(2):
        x = draw(3, 1, 8, seed=seed)
        rows = single.slopes(x)
        assert_close(rows[:, :-1], model.score_jacobian(params, x).flatten(1, 2), 1e-12)
        gradient = torch.cat([part.flatten(1) for part in model.gradient(params, x).values()], 1)
        assert_close(rows[:, -1], gradient, 1e-12)


@pytest.mark.parametrize("link", [positive, Square()], ids=repr)
def test_the_closed_metric_is_the_mean_of_outer_products(link: Positive | Square) -> None:
    W, raw = draw(3, 6, 5), 0.5 * draw(3, 4, 6, seed=1)
    x = draw(3, 7, 5, seed=2)
    rows = TwoLayer(link).score_jacobian({"W": W, "V": raw}, x).flatten(1, 2)  # (R, b N, K)
    assert_close(two_layer.score_gram(W, link(raw), link.slope(raw), x), rows.mT @ rows / 7, 1e-12)


@pytest.mark.parametrize("batch", [1, 4])
def test_ours_side_by_side_is_ng_ang(batch: int) -> None:
    together, model = three(positive), TwoLayer()
    alone = {name: p[1].clone().requires_grad_() for name, p in together.items()}
    learner, opt = two_layer.NatgradLearner(model, together), ng.ang(alone, ng.score_metric(model))
    for t in range(12):
        x = 0.5 * draw(batch, 8, seed=t)
        learner.step(x.expand(3, -1, -1))
        opt.zero_grad()
        ng.score_matching_loss(model, alone, x).backward()
        opt.step()
        for name, p in alone.items():
            assert_close(together[name][1], p.detach(), 1e-8)


@pytest.mark.parametrize("method", [ng.FirstOrder(offset=5.0), ng.Woodbury()], ids=repr)
def test_the_papers_method_side_by_side_is_its_update(method: ng.FirstOrder | ng.Woodbury) -> None:
    """xi_t+1 from G_t^-1, and G_t+1^-1 as the structure updates it; eq. 4 refused for some models, not for others."""
    together, model = three(positive), TwoLayer()
    together["W"][2] *= 30
    learner = two_layer.Paper(model, together, 1e-4, method)
    memory = {"step": 0, **method.start(ng.operators.DenseOperator(torch.eye(128, dtype=F64)))}
    for t in range(5):
        x = 0.5 * draw(1, 8, seed=t)
        point = {name: p[0].clone() for name, p in together.items()}
        memory = {**memory, "step": t + 1}
        gradient = ng.Space(point).flatten(model.gradient(point, x))
        inverse = method.operator(memory).inverse()
        assert inverse is not None
        expected = ng.Space(point).flatten(point) - 1e-4 * inverse.mv(gradient)
        memory = {**memory, **(method.step(memory, model.score_jacobian(point, x).flatten(0, 1).mT) or {})}
        learner.step(x.expand(3, -1, -1))
        assert_close(torch.cat([p[0].flatten() for p in together.values()]), expected, 1e-10)
        assert_close(learner.inverse[0], memory["inverse"], 1e-9)
        assert bool((torch.linalg.eigvalsh(learner.inverse)[:, 0] > 0).all())
    assert (learner.refused > 0) == isinstance(method, ng.FirstOrder)


def test_adam_is_torchs() -> None:
    together, model = three(positive), TwoLayer()
    alone = {name: p.clone().requires_grad_() for name, p in together.items()}
    learner, opt = two_layer.Adam(model, together, 1e-2), torch.optim.Adam(list(alone.values()), lr=1e-2)
    for t in range(5):
        x = draw(3, 4, 8, seed=t)
        learner.step(x)
        for name, gradient in model.gradient({n: p.detach() for n, p in alone.items()}, x).items():
            alone[name].grad = gradient
        opt.step()
    for name, p in alone.items():
        assert_close(together[name], p.detach(), 1e-10)


def test_a_batch_descends_along_the_mean_gradient() -> None:
    params, x = three(Square()), draw(3, 4, 8)
    expected = {n: p - 1e-2 * TwoLayer(Square()).gradient(params, x)[n] for n, p in params.items()}
    two_layer.DescentLearner(TwoLayer(Square()), params, 1e-2).step(x)
    for name, p in expected.items():
        assert_close(params[name], p, 1e-12)


def test_data_are_independent_subspaces_under_a_rotation() -> None:
    """E[x x^T] = E[u^2] I = I / 3, within six standard errors; equal seeds give equal data."""
    x = two_layer.isa(0, 40_000)
    assert torch.equal(two_layer.isa(3, 10), two_layer.isa(3, 10))
    covariance = x.mT @ x / len(x)
    error = (x.unsqueeze(2) * x.unsqueeze(1)).std(0) / math.sqrt(len(x))
    assert bool(((covariance - torch.eye(8, dtype=F64) / 3).abs() <= 6 * error).all())
    assert float((x**4).mean() / (x**2).mean() ** 2) > 3.3  # heavier tails than a Gaussian


def test_starts_are_the_same_model_for_both_links() -> None:
    task, other = two_layer.starts(2, 3, positive), two_layer.starts(2, 3, Square())
    assert torch.equal(task["W"], other["W"])
    assert_close(positive(task["V"]), Square()(other["V"]), 1e-13)


def test_steps_to_the_level_are_read_from_the_record() -> None:
    numbers = {"steps": [0, 10, 20], "errors": [[-1.0, -2.0, None], [-29.0, -3.0, -30.0], [-27.0, -4.0, -31.0]]}
    assert find_first_steps(numbers, -28.0) == [10, None, 10]
    assert count_degraded(numbers, -28.0) == 1
    assert runs.rank({**numbers, "errors": [[-1.0], [-29.0], [-30.0]]}, -28.0) == (0, 10, -30.0)
    missed, steps, last = runs.rank({**numbers, "errors": [[-1.0], [math.nan], [math.nan]]}, -28.0)
    assert (missed, steps, last) == (1, math.inf, math.inf)


def test_runs_end_when_all_have_stayed_for_as_long_again() -> None:
    class Still:
        model, params = TwoLayer(), three(positive)

        def step(self, examples: Tensor) -> None:
            assert examples.shape == (3, 2, 8)

    still: two_layer.Learner = Still()
    settings = override(runs.KarakidaSettings, ["level=1000", "dtype=float64", "examples=20", "held_out=10"])
    assert runs.learn(PieceRun(settings), still, runs.place_looks(100, 20), 2)["steps"] == [0, 5, 10]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_study_runs_and_its_page_tells(study, studies) -> None:
    assert find(study.name) is study
    outcome, page = build(studies / study.name)
    assert page.exists()
    assert outcome.missing == 0
    if study is runs.TABLE1:
        tables = [table for section in outcome.story.sections for table in section.tables]
        assert all(row[3].endswith("of 4") for table in tables[:2] for row in table.rows)
    again = execute(study, override(study.settings, SMALL), range(2), studies / study.name)
    assert again.path == studies / study.name


def test_the_page_is_drawn_from_records_alone(studies, tmp_path) -> None:
    lines = draw_all(studies, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"karakida", "karakida_own"}
    assert any(line.startswith("| ANG, exact, 1/(t + 30), V = exp v |") for line in lines)


def test_eq_4_as_printed_begins_with_the_whole_first_example() -> None:
    """eps = 1 at t = 1: G^-1 is 2 I - U U^T, which is positive only where U U^T is small."""
    together, model = three(positive), TwoLayer()
    together["W"][0] *= 0.1
    x = 0.5 * draw(1, 8)
    roots = model.score_jacobian(together, x.expand(3, -1, -1)).flatten(1, 2).mT
    learner = two_layer.Paper(model, together, 1e-4, None)
    learner.step(x.expand(3, -1, -1))
    assert_close(learner.inverse, 2 * torch.eye(128, dtype=F64) - roots @ roots.mT, 1e-10)
    small = torch.linalg.eigvalsh(learner.inverse)[:, 0] > 0
    assert torch.equal(small, torch.linalg.eigvalsh(roots.mT @ roots)[:, -1] < 2)


def test_runs_see_one_stream_of_examples_or_their_own() -> None:
    class Seeing:
        model, params = TwoLayer(), three(positive)

        def __init__(self) -> None:
            self.alike: list[bool] = []

        def step(self, examples: Tensor) -> None:
            self.alike.append(bool((examples == examples[:1]).all()))

    for own in (False, True):
        settings = override(
            runs.KarakidaSettings, [f"own_examples={own}", "dtype=float64", "examples=20", "held_out=10"]
        )
        seeing = Seeing()
        runs.learn(PieceRun(settings), seeing, [20], 2)
        assert len(seeing.alike) == 20
        assert all(seeing.alike) != own


def test_looks_end_with_the_last_step() -> None:
    assert runs.place_looks(25, 5) == [5, 10, 15, 20, 25]
    for steps in (1, 7, 60_000):
        looks = runs.spread_looks(steps)
        assert looks[-1] == steps
        assert all(step < other <= max(1.03 * step, step + 1) for step, other in pairwise(looks))


def test_the_mean_of_all_runs_waits_for_those_that_never_arrive() -> None:
    numbers = {"steps": [0, 10, 20, 30], "errors": [[-1.0, -1.0], [-40.0, -1.0], [-40.0, -11.0], [-40.0, None]]}
    assert find_mean_step(numbers, -25.0) == 20
    assert find_mean_step(numbers, -28.0) is None


def test_a_part_is_told_too(studies, tmp_path) -> None:
    folder = Folder(shutil.copytree(studies / runs.TABLE1.name, tmp_path / "part"))
    for record in folder.records.glob("*.json"):
        if not record.name.startswith("sgd"):
            record.unlink()
    assert read_outcome(runs.TABLE1, folder).missing > 0


def test_a_unit_that_pools_two_subspaces_is_counted_as_merged() -> None:
    """Rows of W along the axes of the subspaces, pairwise: units 0 to 3 pool one pair each, or the first one two."""
    mixing = two_layer.draw_mixing(torch.Generator().manual_seed(3))
    pools = torch.eye(4, dtype=F64).repeat_interleave(2, 1)
    own = torch.cat([pools, 1e-3 * torch.ones(4, 8, dtype=F64)]).clamp(min=1e-6)
    merged = own.clone()
    merged[0, 2:4], merged[1] = 1.0, 1e-6
    params = {"W": mixing.mT.repeat(2, 1, 1), "V": torch.stack([own, merged])}
    assert two_layer.count_units({**params, "V": positive.inverse(params["V"])}, positive, 3) == [(4, 0), (2, 1)]


def test_starts_have_the_sizes_that_are_asked_for() -> None:
    usual, other = two_layer.starts(2, 3, Square()), two_layer.starts(2, 3, Square(), 0.6, 0.25)
    assert_close(other["W"], 2 * usual["W"], 1e-14)
    assert_close(other["V"], usual["V"] / 2, 1e-12)
