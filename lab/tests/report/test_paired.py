"""Reports of contestants compared seed by seed: differences are those of the records, words follow from them."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from small_races import contestants, results, task

from natgrad_lab.experiments import execute, race
from natgrad_lab.experiments.race_story import beyond, write_difference, write_mean
from natgrad_lab.experiments.race_summary import Record, Spread, balance, pair_all, write_verdict
from natgrad_lab.papers.pascanu_2013.table1 import divide
from natgrad_lab.report import build, render_terminal

PAPER = {"SGD-momentum": (0.05, 0.3), "Adam": (None, 0.2), "natural gradient": (None, None)}


@dataclass(frozen=True)
class Settings:
    steps: int | None = 6
    evaluations: int = 3
    looked_at: int = 100
    tuning_seed: int = 100
    threads: int | None = None
    device: str = "cpu"


TASK = replace(
    task(),
    draw=lambda pool, seed: divide(pool, seed, 8),
    tuned_on="valid_error",
    paper=PAPER,
    note="The paper had other rings.",
)
RACE = race("tiny", "Rings", Settings, lambda settings: (TASK,), title="Rings, compared")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return execute(RACE, Settings(), [0, 1, 2], tmp_path_factory.mktemp("paired"))


def runs(errors, losses=None, end="steps"):
    return [
        Record(
            {"seed": seed, "budget": None},
            ({"step": 3, "seconds": 1.0, "test_error": error, "train_loss": loss, "test_loss": loss},),
            {"end": end},
        )
        for seed, (error, loss) in enumerate(zip(errors, losses or errors, strict=True))
    ]


def test_differences_are_taken_seed_by_seed(folder):
    result = results(folder, TASK)[0]
    ends = {e.name: {r.header["seed"]: r.rows[-1]["test_error"] for r in e.records} for e in result.entries}
    assert len(result.pairs) == 3
    for pair in result.pairs:
        gaps = np.array([ends[pair.first][seed] - ends[pair.second][seed] for seed in (0, 1, 2)])
        assert math.isclose(pair.test_error.mean, gaps.mean(), abs_tol=1e-12)
        assert math.isclose(pair.test_error.error, gaps.std(ddof=1) / math.sqrt(3), abs_tol=1e-12)
    assert [pair.paper for pair in result.pairs] == [pytest.approx(0.1), None, None]


def test_contestants_stay_in_the_order_of_the_plan(folder):
    names = [entry.name for entry in results(folder, TASK)[0].entries]
    assert names == [contestant.name for contestant in contestants()]


def test_what_seeds_share_cancels():
    level = [0.1, 0.5, 0.9]
    pairs = pair_all({"a": runs(level), "b": runs([x + 0.01 for x in level])}, {})
    assert pairs[0].lower == "a"
    pairs = pair_all({"a": runs(level), "b": runs([0.9, 0.2, 0.5])}, {})
    assert pairs[0].lower is None


@pytest.mark.parametrize(
    ("published", "agrees", "said"),
    [
        ({"a": (None, 0.1), "b": (None, 0.2)}, True, "Of the paper's 1 order of two, 1 came out the same"),
        ({"a": (None, 0.2), "b": (None, 0.1)}, False, "1 the other way round"),
        ({"a": (None, 0.2)}, None, ""),
    ],
)
def test_the_verdict_goes_the_way_of_the_numbers(published, agrees, said):
    raced = {"a": runs([0.1, 0.2, 0.3]), "b": runs([0.21, 0.29, 0.4]), "c": runs([0.1, 0.22, 0.29])}
    pairs = pair_all(raced, published)
    words = write_verdict(raced, pairs)
    assert pairs[0].agrees is agrees
    assert words.startswith("A has the lowest mean test error, 20.00 % ± 5.77.")
    assert "Higher by more than two standard errors of the paired difference: b." in words
    assert "Not told apart from it: c." in words
    assert said in words
    turned = {"a": raced["b"], "b": raced["a"]}
    assert write_verdict(turned, pair_all(turned, published)).startswith("B has the lowest")
    assert balance(pairs).startswith("Of 3 differences in test error, 2 exceed two standard errors.")


def test_one_seed_decides_nothing():
    raced = {"a": runs([0.1]), "b": runs([0.9])}
    assert pair_all(raced, {})[0].lower is None
    assert beyond(1) == 1.0
    assert write_mean(Spread((0.25,)), 100, " %") == ("25.00 %", "")


def test_contestants_without_a_common_seed_are_not_compared():
    late = [Record({**r.header, "seed": r.header["seed"] + 5}, r.rows, r.end) for r in runs([0.1, 0.2])]
    pair = pair_all({"a": runs([0.3, 0.4]), "b": late}, {})[0]
    assert pair.lower is None
    assert write_difference(pair.test_error, str) == ("-", "")


def test_a_run_that_broke_down_is_not_compared():
    raced = {"a": runs([0.1, 0.2]), "b": runs([0.3, 0.4], end="not finite")}
    pair = pair_all(raced, {})[0]
    assert pair.lower is None
    assert write_difference(pair.test_error, str) == ("-", "")
    assert write_verdict(raced, [pair]).startswith("A has the lowest")
    assert write_verdict({"b": raced["b"]}, []) == "Every contestant broke down."


def test_two_standard_errors_are_passed_by_chance_as_often_as_the_page_says():
    draws = np.random.default_rng(0).standard_normal((20_000, 5))
    share = np.mean([Spread(tuple(row)).sign != 0 for row in draws[:4000].tolist()])
    assert abs(share - beyond(5)) < 4 * math.sqrt(0.116 * 0.884 / 4000)


def test_the_page_shows_our_numbers_beside_the_paper_s(folder):
    numbers, path = build(folder.path, RACE)
    page = path.read_text()
    assert "<h1>Rings, compared</h1>" in page
    assert "Paired differences" in page
    assert "30.00 %" in page
    assert "+10.00" in page
    assert "The paper had other rings." in page
    assert "the lowest validation error" in page
    assert "validation error</th>" in page
    assert {"rings-error-steps", "rings-loss-steps"} <= {p.stem for p in (folder.path / "plots").glob("*.png")}
    table, verdict = render_terminal(numbers)
    assert [column.header for column in table.columns][1:4] == ["training loss", "paper", "test error"]
    assert "has the lowest mean test error" in verdict
