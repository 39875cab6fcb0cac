"""Reports: the numbers in them are those of the records, the verdict is fair, the page stands alone."""

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from small_races import Settings, contestants, race, results, task

import natgrad as ng
from natgrad_lab.experiments import LabError, execute
from natgrad_lab.experiments.contestants import apply_recipe, grid, sgd
from natgrad_lab.experiments.race_story import Plot, band
from natgrad_lab.experiments.race_summary import Record, Spread, after_steps, entry, final, lead, verdict
from natgrad_lab.experiments.records import Folder
from natgrad_lab.figures import DARK, DASHES, PALETTE, draw
from natgrad_lab.report import build, read_outcome
from natgrad_lab.words import join_words, short

TASKS = task(), task("squares")
BOTH = race(*TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return execute(BOTH, Settings(steps=5), [0, 1, 2], tmp_path_factory.mktemp("race"))


@pytest.fixture(scope="module")
def part(folder, tmp_path_factory):
    """A copy of it, without a contestant's runs on one of the tasks."""
    copy = Folder(shutil.copytree(folder.path, tmp_path_factory.mktemp("part") / "race"))
    for path in copy.records.glob("squares-adam*"):
        path.unlink()
    return copy


@pytest.fixture(scope="module")
def page(part):
    return build(part.path, BOTH)[1].read_text()


def test_numbers_are_medians_over_the_seeds(folder):
    result = results(folder, *TASKS)[0]
    for row in result.entries:
        finals = [r.rows[-1]["train_loss"] for r in row.records]
        assert len(finals) == 3
        assert row.train_loss.middle == np.median(finals)
    losses = [row.train_loss.middle for row in result.entries]
    assert losses == sorted(losses)
    assert result.target == losses[1]


def test_every_choice_of_the_grid_is_shown(folder):
    for row in results(folder, *TASKS)[0].entries:
        assert len(row.grid) == 2
        assert min(row.grid, key=final).header["choice"] == row.choice


def test_plots_are_written_twice(part, page):
    names = {path.stem for path in (part.path / "plots").glob("*.png")}
    assert names == {path.stem for path in (part.path / "plots").glob("*.svg")}
    assert {"rings-loss-seconds", "rings-loss-steps", "rings-kl-steps", "rings-damping-steps", "overview"} <= names


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.attributes = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag, attrs):
        self._note(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def _note(self, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_needs_nothing_else(page):
    elements = Elements(page)
    assert elements.open == []
    assert all(link.startswith("#") for link in elements.links)
    assert not re.search(r"url\((?!#)", page)
    assert "<script" not in page


def test_ids_are_unique_and_what_refers_to_them_finds_them(page):
    elements = Elements(page)
    assert len(elements.ids) == len(set(elements.ids))
    referred = {link[1:] for link in elements.links} | set(re.findall(r"url\(#([^)]+)\)", page))
    assert referred <= set(elements.ids)


def test_the_page_says_what_was_done(part, page):
    assert [task.title in page for task in TASKS] == [True, False]
    assert "natgrad run tiny --seeds 3" in page
    assert "--set steps=5" in page
    assert torch.__version__ in page
    assert str(part.path) not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg role") == 6
    assert "Not complete:</b> 5 of" in page


def test_a_race_is_told_when_all_have_finished_a_task(folder, part, tmp_path):
    complete, outcome = (read_outcome(BOTH, each) for each in (folder, part))
    assert (complete.missing, outcome.missing) == (0, 5)
    assert [section.title for section in complete.story.sections] == [task.title for task in TASKS]
    assert [section.title for section in outcome.story.sections] == [TASKS[0].title]
    (overview,) = complete.story.files
    assert len(draw(overview.draw, overview.size).axes) == 4
    empty = Folder(shutil.copytree(part.path, tmp_path / "race"))
    for path in empty.records.glob("rings-adam*"):
        path.unlink()
    with pytest.raises(LabError, match="run the same command again"):
        build(empty.path, BOTH)


def test_who_was_not_tuned_is_said(tmp_path):
    untuned = apply_recipe("K-FAC", ng.kfac, grid(batch=(8,)))
    among = race(task(among=(*contestants()[:2], untuned)))
    story = read_outcome(among, execute(among, Settings(), [0, 1], tmp_path)).story
    assert "Every contestant but K-FAC, not tuned at all, was tuned over 2 choices" in story.method
    (section,) = story.sections
    assert "K-FAC" in section.verdict
    (grid_table,) = section.folded
    assert [row[0] for row in grid_table.rows if row[-1] == "not tuned"] == ["K-FAC"]


def test_colours_and_dashes_are_enough_for_a_crowd():
    assert len(PALETTE) == len(DARK) == len(set(PALETTE)) == len(DASHES) >= 10


def test_a_folder_without_an_experiment_is_refused(tmp_path):
    with pytest.raises(LabError, match=r"holds no experiment\.json"):
        build(tmp_path)


def make_record(name, losses, steps=100):
    rows = [{"step": 0, "seconds": 0.0, "train_loss": 9.0}, {"step": 50, "seconds": 0.5, "train_loss": 5.0}]
    records = [
        Record(
            {"choice": {"lr": 0.1}, "index": 0, "seed": seed, "phase": "race", "budget": 1.0},
            (*rows, {"step": steps, "seconds": 1.0, "train_loss": loss, "test_loss": loss}),
            {"end": "seconds", "steps": steps, "seconds": 1.0},
        )
        for seed, loss in enumerate(losses)
    ]
    return entry(name, records, [], target=4.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ((1.0, 1.1), (3.0, 3.2), "Adam ends 3 times higher"),
        ((3.0, 3.2), (1.0, 1.1), "Natural gradient loses here: it ends 3 times higher"),
        ((1.0, 2.0), (1.1, 2.2), "are level: their seeds overlap"),
        ((1.1, 2.2), (1.0, 2.0), "are level: their seeds overlap"),
        ((1.0, 1.01), (1.1, 1.11), "Adam ends 10 % higher"),
        ((1.0,), (3.0,), "Adam ends 3 times higher (3, on one seed)"),
        ((0.0, 0.0), (3.0, 3.2), "Adam ends higher (3.1)"),
        ((1e-20, 1e-20), (3.0, 3.2), "Adam ends higher (3.1)"),
        ((-2.0, -2.1), (3.0, 3.2), "Adam ends higher (3.1)"),
        ((3.0, 3.2), (-2.0, -2.1), "Natural gradient loses here: it ends higher (3.1)"),
    ],
)
def test_the_verdict_says_who_lost(ours, theirs, said):
    entries = sorted(
        [make_record("natural gradient", ours), make_record("Adam", theirs)], key=lambda e: e.train_loss.middle
    )
    assert said in verdict(entries, "nats", 1.0, 100)


def test_sentences_begin_with_a_capital():
    said = verdict([make_record("K-FAC", (1.0, 1.1)), make_record("natural gradient", (3.0, 3.2))], "nats", 1.0, 100)
    assert ". Natural gradient ends 3 times higher (3.1)." in said


def test_step_for_step_is_told_beside_second_for_second():
    entries = [make_record("Adam", (1.0, 1.1), steps=400), make_record("natural gradient", (3.0, 3.2), steps=60)]
    said = verdict(entries, "nats", 1.0, 60)
    assert "Step for step, after 60 steps: natural gradient 3.1, Adam 5" in said
    assert after_steps(entries, 60)["Adam"] == 5.0


def test_the_verdict_says_who_is_ahead_on_the_test_part():
    first, second = make_record("Adam", (1.0, 1.1)), make_record("natural gradient", (2.0, 2.1))
    second = replace(second, test_loss=Spread((0.5, 0.6)))
    said = verdict([first, second], "nats", 1.0, 100)
    assert "On the test part natural gradient ends lowest: 0.55 against 1.05." in said


def test_a_contestant_that_broke_down_is_named():
    entries = [make_record("Adam", (1.0, 1.1)), make_record("natural gradient", (float("nan"), float("inf")))]
    assert "Natural gradient broke down" in verdict(entries, "nats", 1.0, 10)


def test_a_choice_that_broke_down_in_the_tuning_leaves_the_race_on_equal_seconds(tmp_path):
    sample = task(among=(sgd(grid(batch=(8,), lr=(0.1, 3e38))), contestants()[1]))
    (result,) = results(execute(race(sample), Settings(seconds=0.05, steps=None), [0], tmp_path), sample)
    (descent,) = (entry for entry in result.entries if entry.name == "SGD-momentum")
    assert [final(tried) == float("inf") for tried in descent.grid] == [False, True]
    assert descent.choice["lr"] == 0.1
    assert result.seconds == 0.05


def test_what_came_after_the_budget_does_not_count():
    late = make_record("natural gradient", (1.0, 1.0)).records[0]
    rows = (*late.rows[:-1], {**late.rows[-1], "seconds": 1.5})
    assert final(Record(late.header, rows, late.end)) == 5.0


def test_the_lead_counts_the_tasks_won(folder):
    raced = results(folder, *TASKS)
    won = sum(result.entries[0].name == "natural gradient" for result in raced)
    assert lead(raced) == f"Natural gradient had the lowest training loss on {won} of 2 tasks."


def test_targets_are_found_where_the_loss_first_passes_them():
    entry = make_record("Adam", (4.0, 4.5))
    assert entry.steps_to_target.values == (100, None)
    assert entry.steps_to_target.middle is None


def test_spread_counts_missing_values_as_infinite():
    assert Spread((1.0, None, 2.0)).middle == 2.0
    assert Spread((None, None, 2.0)).middle is None


def test_band_is_the_median_where_all_curves_are_known():
    plot = Plot("", "", "", "", "", "", log_y=False)
    x, low, middle, high = band(
        [(np.array([0.0, 2.0]), np.array([0.0, 2.0])), (np.array([1.0, 4.0]), np.array([3.0, 3.0]))], plot
    )
    assert x.tolist() == [1.0, 2.0]
    np.testing.assert_allclose((low, middle, high), ([1, 2], [2, 2.5], [3, 3]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (0, "0"),
        (1234.5, "1234"),
        (2e-4, "2e-4"),
        (1.26e7, "1.3e7"),
        (None, "-"),
        (float("inf"), "-"),
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text


@pytest.mark.parametrize(("words", "text"), [("", ""), ("a", "a"), ("ab", "a and b"), ("abc", "a, b and c")])
def test_words_are_listed(words, text):
    assert join_words(list(words)) == text
