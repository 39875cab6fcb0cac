"""The autoencoder of one unit: steps as defined, the mirror between the readings, and a page that may go either way."""

import shutil
from itertools import pairwise

import pytest
import torch

from natgrad_lab.experiments import PieceRun, execute
from natgrad_lab.experiments.records import Folder
from natgrad_lab.papers.pascanu_2013 import figure1
from natgrad_lab.report import build, read_outcome

FEW = figure1.AutoencoderUnitSettings(points=5, steps=6, continued=5, lattice=3)


def units():
    x = torch.randn(7, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    return figure1.Unit(x, -1.0), figure1.Unit(x, 1.0)


def places():
    return 2 * torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", figure1.RATES)
def test_steps_through_the_metrics_are_those_of_the_definitions(method):
    for unit in units():
        expected = torch.stack([figure1.step(unit, at, method) for at in places()])
        torch.testing.assert_close(figure1.at_many(unit, places(), method), expected, rtol=1e-9, atol=1e-12)


def test_the_printed_error_is_that_of_the_paper():
    unit, _ = units()
    b, w = at = torch.tensor([0.3, -1.2], dtype=torch.float64)
    printed = (unit.x - w * torch.sigmoid(w * unit.x + b) + b).square().mean()
    torch.testing.assert_close(unit.error(figure1.point(at)), printed)


@pytest.mark.parametrize("method", figure1.RATES)
def test_the_readings_are_mirror_images(method):
    """The printed one at (b, w) with data x is the other at (b, -w) with data -x: same error, mirrored steps."""
    printed, other = units()[0], figure1.Unit(-units()[0].x, 1.0)
    mirror = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for at in places():
        torch.testing.assert_close(printed.error(figure1.point(at)), other.error(figure1.point(mirror * at)))
    torch.testing.assert_close(
        figure1.at_many(printed, places(), method), mirror * figure1.at_many(other, mirror * places(), method)
    )


def test_saddle_safe_newton_goes_downhill_where_newton_does_not():
    """On symmetric data (0, 0) is a saddle of H + I with an eigenvalue below -1 nearby for wide data."""
    x = torch.tensor([[-4.0], [4.0]], dtype=torch.float64)
    unit, at = figure1.Unit(x, 1.0), torch.tensor([0.0, 0.1], dtype=torch.float64)
    g = figure1.gradient(unit, at)
    assert g @ figure1.step(unit, at, "Newton") < 0
    assert g @ figure1.step(unit, at, "Newton, |H|") > 0


def test_what_lies_at_the_end_is_named():
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    unit = figure1.Unit(x, 1.0)
    assert figure1.ending(unit, torch.zeros(2, dtype=torch.float64)) == "saddle"
    assert figure1.ending(unit, torch.tensor([1.0, 1.0], dtype=torch.float64)) == "still moving"
    assert figure1.path(unit, (1.0, 2.0), "natural gradient", 60)["end"] == "minimum"
    assert figure1.path(unit, (49.9, 49.9), "gradient descent", 2)["end"] == "diverged"


def test_length_in_kl_and_errors_belong_to_the_points():
    unit, _ = units()
    way = figure1.path(unit, (1.0, 2.0), "natural gradient", 4)
    points = torch.tensor(way["points"], dtype=torch.float64)
    expected = sum((2 * unit.divergence(figure1.point(a), figure1.point(b))).sqrt() for a, b in pairwise(points))
    assert way["length"] == pytest.approx(float(expected))
    assert way["errors"][-1] == pytest.approx(unit.error(figure1.point(points[-1])).item())


def test_counts_are_shares():
    counted = figure1.starts(PieceRun(FEW), "printed")
    assert counted["starts"] == 9
    assert counted["both"] <= min(counted["shorter"], counted["other error"]) <= 1
    assert set(counted["methods"]) == set(figure1.RATES)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return execute(figure1.STUDY, FEW, [0], tmp_path_factory.mktemp("study"))


def test_the_study_ends_in_both_readings(study):
    outcome = read_outcome(figure1.STUDY, study)
    assert outcome.missing == 0
    assert [section.title for section in outcome.story.sections] == list(figure1.TITLES.values())
    assert all(section.pictures for section in outcome.story.sections)


def test_a_half_finished_study_ends_in_a_page_of_the_reading_that_is_there(study, tmp_path):
    folder = Folder(shutil.copytree(study.path, tmp_path / "half"))
    (folder.records / "starts-other.json").unlink()
    outcome, page = build(folder.path)
    text = page.read_text()
    assert [section.title for section in outcome.story.sections] == [figure1.TITLES["printed"]]
    assert text.count("<svg role") == 3
    assert "Not complete" in text
    assert "not given in the paper" in text


@pytest.mark.parametrize(("natural", "newton", "shown"), [(1.0, 3.0, True), (2.5, 3.0, False), (1.0, 1.5, False)])
def test_the_first_observation_may_fail(natural, newton, shown):
    steps = {"natural gradient": [natural, 0.0], "gradient descent": [0.0, 2.0], "Newton": [newton, 0.0]}
    assert figure1.observed_shorter({"around": {"3": {"steps": steps}}}) is shown


@pytest.mark.parametrize(
    ("end", "error", "shown"), [([3.0, 0.0], 2.0, True), ([0.5, 0.0], 2.0, False), ([3.0, 0.0], 1.1, False)]
)
def test_the_second_observation_may_fail(end, error, shown):
    task = {"points": [[9.0, 9.0], [0.0, 0.0]], "errors": [9.0, 1.0]}
    other = {"points": [[9.0, 9.0], end], "errors": [9.0, error]}
    assert figure1.observed_elsewhere({"natural gradient": task, "gradient descent": other}) is shown


def test_steps_to_the_best_error_are_counted():
    paths = {"a": {"errors": [9.0, 1.005, 1.0]}, "b": {"errors": [9.0, 5.0, 2.0]}}
    assert figure1.steps_to_best(paths) == {"a": 1, "b": None}
