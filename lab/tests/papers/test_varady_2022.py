"""The experiments on Helmholtz machines: data, tuning, curves and the page, in miniature."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from natgrad_lab.data import Split
from natgrad_lab.experiments import EXPERIMENTS, PieceRun, execute, find, override
from natgrad_lab.experiments.frame import Findings, FinishedPiece, findings
from natgrad_lab.papers.kept_tables import insert, tell_kept
from natgrad_lab.papers.varady_2022 import page, runs
from natgrad_lab.papers.varady_2022.page import curve, find_first_epoch, tell
from natgrad_lab.report import draw_titled

SMALL = runs.VaradySettings(data="lines", sizes="4-1", epochs=2, batch=100, samples=3, evaluation=0, tuning=1)
WEIGHT = "generation.0.weight"


def test_every_study_is_found_with_its_own_defaults():
    names = [name for name in EXPERIMENTS if name.startswith("varady_2022")]
    assert names == [f"varady_2022_{data}" for data in ("lines", "digits", "mnist", "fashion", "faces")]
    for name in names:
        settings = find(name).settings()
        assert settings.data == name.removeprefix("varady_2022_")
    assert runs.LINES.settings().hidden_widths() == [6, 1]
    assert override(runs.DIGITS.settings, ["sizes=5-4-3", "train=70"]).hidden_widths() == [5, 4, 3]


def test_all_contestants_have_as_many_settings():
    for settings in (SMALL, find("varady_2022_mnist").settings()):
        assert {len(contestant.choices(settings)) for contestant in runs.CONTESTANTS} == {4}
    assert len(runs.pieces(SMALL)) == 5 * 4 + 5
    two = runs.pieces(replace(SMALL, contestants="nrws, rws-adam"))
    assert [piece.name for piece in two if piece.name.startswith("race")] == ["race-rws-adam", "race-nrws"]


def test_lines_are_twelve_patterns():
    images = runs.lines()
    assert len({tuple(row) for row in images.train.tolist()}) == len(images.test) == 12
    for pattern in images.test.view(-1, 3, 3):
        rows, columns = (bool((p == p[:, :1]).all()) for p in (pattern, pattern.mT))
        assert rows != columns
        assert 0 < float(pattern.sum()) < 9


def test_digits_are_cut_and_held_out():
    images = runs.bits("digits", 100, 50, signs=False)
    assert (images.train.shape, images.valid.shape, images.test.shape) == ((100, 64), (50, 64), (50, 64))
    signs = runs.bits("digits", 100, 50, signs=True)
    assert torch.equal(signs.train, 2 * images.train - 1)
    all_images = runs.bits("digits", None, None, signs=False)
    assert len(all_images.train) + len(all_images.valid) == 1437


def test_faces_are_compared_with_their_median(monkeypatch):
    images = torch.rand(20, 48, 48, generator=torch.Generator().manual_seed(0))
    split = Split(images, torch.zeros(20), images[:4], torch.zeros(4))
    monkeypatch.setattr(runs, "fer2013", lambda: split)
    images = runs.bits("faces", None, None, signs=False)
    assert images.shape == (24, 24)
    assert (len(images.train), len(images.valid), len(images.test)) == (18, 2, 4)
    assert (images.train.mean(1) - 0.5).abs().max() < 0.01


def test_a_part_of_a_test_set_that_is_sorted_by_class_has_all_classes(monkeypatch):
    labels = torch.arange(10).repeat_interleave(100)
    images = functional.one_hot(labels, 784).float().view(-1, 28, 28)  # pixel k is up in class k alone
    split = Split(images, labels, images, labels, images, labels)
    monkeypatch.setattr(runs, "binarized_mnist", lambda: split)
    counts = runs.bits("mnist", None, 200, signs=False).test.sum(0)[:10]
    assert counts.sum() == 200
    assert counts.min() > 5


def test_training_on_lines_raises_the_exact_likelihood():
    settings = replace(SMALL, sizes="6-1", batch=20, samples=5)
    natural = next(contestant for contestant in runs.CONTESTANTS if contestant.name == "nrws")
    training = runs.WakeSleepTraining(settings, natural, runs.WakeSleepChoice(0.3, 0.0), seed=0)
    start = training.estimate_bound(training.bits.test)
    assert start == pytest.approx(9 * math.log(0.5), abs=0.5)
    for _ in training.epochs(6, PieceRun(settings)):
        pass
    assert not training.trainer.failures
    assert -math.log(12) > training.estimate_bound(training.bits.test) > start + 1.5
    assert len(training.images()) == runs.PICTURES


def test_a_race_looks_as_often_as_it_is_told():
    settings = replace(SMALL, looks=4, epochs=2)
    training = runs.WakeSleepTraining(settings, runs.CONTESTANTS[0], runs.WakeSleepChoice(0.3, 0.0), seed=0)
    seen = [(epoch, training.steps) for epoch in training.epochs(2, PieceRun(settings), looks=4)]
    assert [epoch for epoch, _ in seen] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    assert [steps for _, steps in seen] == [2, 3, 4, 6, 8, 9, 10, 12]  # six steps per epoch


def test_a_rate_falls():
    training = runs.WakeSleepTraining(SMALL, runs.CONTESTANTS[0], runs.WakeSleepChoice(1.0, 0.5), seed=0)
    for _ in training.epochs(1, PieceRun(SMALL)):
        pass
    assert training.steps == 6
    assert training.trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1 / 3.5)


@pytest.mark.parametrize("name", ["rws-adam", "nrws"])
def test_a_rule_and_the_mean_of_the_iterates(name):
    settings = replace(SMALL, rates="rws-adam:.02/4,nrws:.5/10", averaged=True, contestants=name, batch=200)
    (piece,) = runs.pieces(settings)  # nothing to tune
    numbers = piece.work(PieceRun(settings))
    ((rate, fall),) = settings.rules()[name]
    assert numbers["choice"] == f"rate {rate:g}, / (1 + {fall:g} t / T)"
    assert all(math.isfinite(point["mean"]) for point in numbers["curve"])

    contestant = next(contestant for contestant in runs.CONTESTANTS if contestant.name == name)
    (choice,) = contestant.choices(settings)
    training = runs.WakeSleepTraining(settings, contestant, choice, seed=0)
    plain = runs.WakeSleepTraining(replace(settings, averaged=False), contestant, choice, seed=0)
    rates, iterates = [], []
    for _ in range(6):  # two epochs of three steps: the whole run
        training._step()
        plain._step()
        rates.append(training.trainer.optimizer.param_groups[0]["lr"])
        iterates.append(training.machine.get_parameter(WEIGHT).detach().double().clone())
    assert rates == pytest.approx([rate / (1 + fall * t / 6) for t in range(6)])
    assert torch.equal(plain.machine.get_parameter(WEIGHT), training.machine.get_parameter(WEIGHT))
    weights = [9 / (t + 9) * math.prod(s / (s + 9) for s in range(t + 1, 6)) for t in range(6)]
    assert sum(weights) == pytest.approx(1)
    mean = sum(w * iterate for w, iterate in zip(weights, iterates, strict=True))
    assert training.mean is not None
    assert torch.allclose(training.mean.get_parameter(WEIGHT).double(), torch.as_tensor(mean), atol=1e-5)
    assert not torch.allclose(iterates[-1], torch.as_tensor(mean), atol=1e-3)


def test_a_study_by_a_rule_tells_its_means(tmp_path):
    given = {"rates": "rws-adam:.02/4,nrws:.5/10", "averaged": True, "contestants": "rws-adam,nrws"}
    folder = execute(runs.LINES, replace(runs.LINES.settings(), epochs=2, batch=600, samples=2, **given), [0], tmp_path)
    story = tell(findings(runs.LINES, folder))
    assert [section.title for section in story.sections] == ["Learning", "Dreams"]  # no settings were tried
    _, means = story.sections[0].tables
    assert [row[:2] for row in means.rows] == [(n, e) for n in ("RWS, Adam", "NRWS") for e in ("1", "2")]


def test_of_several_rules_the_best_runs_and_each_is_tried_as_a_whole_short_run(tmp_path):
    settings = replace(SMALL, rates="nrws:.5/10,nrws:.001/0", contestants="nrws", epochs=3, batch=200)
    folder = execute(runs.LINES, settings, [0], tmp_path)
    read = findings(runs.LINES, folder)
    first, second = (read.of(f"tune-nrws-{i}")[0] for i in (0, 1))
    assert first["valid"] > second["valid"]  # a rate of .001 moves nothing
    assert read.of("race-nrws")[0]["choice"] == "rate 0.5, / (1 + 10 t / T)"
    assert [section.title for section in tell(read).sections] == ["Learning", "Dreams", "Settings"]

    contestant = next(contestant for contestant in runs.CONTESTANTS if contestant.name == "nrws")
    short = replace(settings, epochs=1, tuning=1)  # a tuning run of one epoch falls as a run of one epoch does
    alone = runs.WakeSleepTraining(short, contestant, runs.WakeSleepChoice(0.5, 10, by_run=True), runs.TUNING_SEED)
    for _ in alone.epochs(1, PieceRun(short)):
        pass
    assert alone.estimate_bound(alone.bits.valid) == first["valid"]


def test_a_race_takes_the_setting_that_was_best_and_is_sound():
    contestant = runs.CONTESTANTS[1]
    tuned: dict[str, Any] = {f"tune-rws-{i}": {"valid": v} for i, v in enumerate((-5.0, None, -3.0, -4.0))}
    numbers = runs.run_best(contestant, PieceRun(SMALL, 0, tuned))
    assert numbers["choice"] == str(contestant.choices(SMALL)[2])
    assert [p["epoch"] for p in numbers["curve"]] == [0, 1, 2]
    assert [look["epoch"] for look in numbers["looks"]] == [1, 2]
    assert runs.run_best(contestant, PieceRun(SMALL, 1, tuned))["looks"] == []
    again = runs.run_best(contestant, PieceRun(SMALL, 0, tuned))
    assert [p["bound"] for p in again["curve"]] == [p["bound"] for p in numbers["curve"]]
    assert runs.try_choice(contestant, contestant.choices(SMALL)[0], PieceRun(SMALL))["valid"] < 0


def test_levels_are_reached_where_the_curve_says():
    run = {"curve": [{"epoch": e, "seconds": 2.0 * e, "bound": b} for e, b in enumerate((-9.0, None, -5.0, -4.0))]}
    assert find_first_epoch(run, -5.0) == (2.0, 4.0)
    assert find_first_epoch(run, -1.0) == (math.inf, math.inf)
    assert np.isnan(curve(run)[2][1])


def test_of_two_seeds_the_level_is_the_lower_end():
    def build_runs(*ends: float) -> list[FinishedPiece]:
        name, pieces = {2: "rws-adam", 4: "nrws"}[int(-ends[0])], []
        for seed, end in enumerate(ends):
            points = [{"epoch": e, "seconds": 2.0 * e, "bound": -8.0 + (8.0 + end) * e / 4} for e in range(5)]
            numbers = {"choice": "", "curve": points, "looks": [], "steps": 8}
            pieces.append(FinishedPiece({"piece": f"race-{name}", "seed": seed}, numbers))
        return pieces

    faster = [replace(piece, numbers=piece.numbers) for piece in build_runs(-4.0, -4.0)]
    for piece in faster:
        piece.numbers["curve"][2]["bound"] = -2.0
    story = tell(Findings(SMALL, (*build_runs(-2.5, -2.25), *faster)))
    assert "To -2.50" in story.sections[0].verdict
    assert "takes 0.50 of its epochs and 0.50 of its seconds" in story.sections[0].verdict


def test_a_whole_study_tells_its_story(tmp_path):
    folder = execute(
        runs.LINES, replace(runs.LINES.settings(), epochs=1, tuning=1, batch=600, samples=2), [0, 1], tmp_path
    )
    story = tell(findings(runs.LINES, folder))
    titles = [section.title for section in story.sections]
    assert titles == ["Learning", "Dreams", "Settings"]
    assert [len(row) for row in story.sections[0].tables[0].rows] == [6] * 5
    assert len(story.sections[2].tables[0].rows) == 20
    for section in story.sections:
        for picture in section.pictures:
            assert draw_titled(picture, story.title).axes


@pytest.mark.parametrize("name", page.KEPT)
def test_the_page_holds_the_kept_races(name):
    text = (Path(__file__).parents[3] / "docs" / "papers" / "varady_2022.md").read_text()
    story = tell_kept(find("varady_2022_mnist"), page.RECORDS / name)
    assert insert(text, name, page.write_tables(story)) == text
    with pytest.raises(ValueError, match="not one pair of <!-- other: begin -->"):
        insert(text, "other", "")
