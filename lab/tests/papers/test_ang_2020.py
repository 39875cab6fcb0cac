"""Figures 2 and 3 of Ang's report: the experiment on synthetic images, the numbers of its claims, its pictures."""

import numpy as np
import pytest

from natgrad_lab.experiments import execute, find
from natgrad_lab.experiments.race_summary import Spread
from natgrad_lab.papers.ang_2020 import page
from natgrad_lab.papers.ang_2020.normals import PAIRS, READINGS, measure_divergence

TINY = {"images": 32, "batch": 16, "side": 8, "epochs": 2, "dense_depth": 7, "growth": 2, "evaluations": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A race of four updates, DenseNet alone, two seeds."""
    place, rng = tmp_path_factory.mktemp("ang"), np.random.default_rng(0)
    parts = {
        f"x_{part}": rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for part, n in (("train", 40), ("test", 20))
    }
    labels = {f"y_{part}": np.arange(n, dtype=np.uint8) % 10 for part, n in (("train", 40), ("test", 20))}
    np.savez(place / "cifar10_subset.npz", **parts, **labels, class_names=np.array([f"class {i}" for i in range(10)]))
    race = find("ang_2020_cifar")
    settings = race.settings(**TINY, looked_at=20, networks="densenet", threads=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NATGRAD_DATA", str(place))
        execute(race, settings, [0, 1], place / "runs")
    return place / "runs"


def test_all_contestants_of_all_seeds_are_measured(folder):
    networks = page.collect([folder])
    assert list(networks) == ["densenet"]
    assert list(networks["densenet"]) == list(page.NAMES)
    numbers = page.measure(networks["densenet"])
    assert {key for _, key, _ in page.CLAIMS} <= set(numbers["K-FAC"])
    assert all(len(measured.values) == 2 for of in numbers.values() for measured in of.values())
    assert numbers["SGD-momentum"]["time of a step"].values == (1.0, 1.0)


def test_a_seed_that_somebody_has_not_finished_does_not_count(folder, tmp_path):
    (tmp_path / "records").mkdir()
    for path in (folder / "records").glob("*.json"):
        if "k-fac.seed-1" not in path.name:
            (tmp_path / "records" / path.name).write_text(path.read_text())
    assert {len(runs) for runs in page.collect([tmp_path])["densenet"].values()} == {1}


def test_pictures_and_tables_are_written(folder, tmp_path):
    lines = page.draw_all([folder], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ang_claims.png", "ang_densenet.png"}
    assert sum(line.startswith("| ") for line in lines) == len(page.NAMES)


def test_a_level_is_reached_on_the_straight_line_between_two_evaluations():
    steps = np.array([0.0, 10.0, 20.0])
    assert page.reach(steps, np.array([0.1, 0.2, 0.4]), 0.3) == pytest.approx(15)
    assert page.reach(steps, np.array([0.5, 0.2, 0.4]), 0.3) == 0
    assert page.reach(steps, np.array([0.1, 0.2, 0.25]), 0.3) is None


def test_losses_are_means_of_the_last_batches(folder):
    record = page.collect([folder])["densenet"]["Adam"][0]
    steps, _, smooth = page.smooth_losses(record)
    losses = [row["loss"] for row in record.rows if "loss" in row]
    assert smooth == pytest.approx(np.cumsum(losses) / np.arange(1, len(losses) + 1))
    assert page.reach(steps, -smooth, -(max(losses) + 1)) == 1


def test_an_interval_is_that_of_student():
    numbers = Spread((1.0, 2.0, 3.0))
    assert (numbers.mean, page.measure_half(numbers)) == (2.0, pytest.approx(4.303 / 3**0.5, rel=1e-3))
    assert page.write_interval(numbers, 1) == "2.0 ± 2.5"
    assert page.subtract(numbers, Spread((1.0, 1.0, 1.0))).values == (0.0, 1.0, 2.0)
    assert page.write_interval(Spread((1.0, None, 2.0)), 1) == "2 of 3"


@pytest.mark.parametrize("power", READINGS.values())
@pytest.mark.parametrize("pair", PAIRS)
def test_normals_of_equal_spread_are_apart_by_the_square_of_their_means_over_twice_the_variance(pair, power):
    (mean, second), (other, _) = pair
    assert measure_divergence(pair, power) == pytest.approx((other - mean) ** 2 / (2 * second**power), rel=1e-12)
