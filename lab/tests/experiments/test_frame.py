"""Studies: pieces done once, resumed where they were put down, and told from the records alone."""

import json
import shutil

import pytest
import small_study
from small_study import STUDY, Settings
from typer.testing import CliRunner

from natgrad_lab import cli
from natgrad_lab.experiments import (
    EXPERIMENTS,
    Experiment,
    Interrupted,
    LabError,
    Piece,
    PieceRun,
    Section,
    Story,
    Table,
    execute,
)
from natgrad_lab.experiments.frame import findings
from natgrad_lab.report import build


@pytest.fixture
def know_walks(monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "walks", "small_study:STUDY")


def natgrad(*words):
    return CliRunner().invoke(cli.application(), list(words), env={"COLUMNS": "200"})


def test_every_piece_is_done_once_and_sees_the_earlier_ones(tmp_path):
    states = []
    folder = execute(STUDY, Settings(), [0, 1], tmp_path, states.append)
    assert sorted(p.name for p in folder.records.iterdir()) == [
        "distance.seed-0.json", "distance.seed-1.json", "target.json", "walk.seed-0.json", "walk.seed-1.json",
    ]  # fmt: skip
    read = findings(STUDY, folder)
    assert [numbers["value"] for numbers in read.of("distance")] == [36.0, 35.0]
    assert read.by_seed("walk", "distance")[1][0]["path"][0] == 1.0
    ended = [state for state in states if state.fraction == 1.0]
    assert [state.done for state in ended] == [1, 2, 3, 4, 5]
    assert all(state.seconds is not None and state.total == 5 for state in ended)
    assert [s.fraction for s in states if s.piece.name == "walk" and s.seed == 1] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    folder = execute(STUDY, Settings(), [0], tmp_path)
    assert json.loads((folder.records / "distance.seed-0.json").read_text())["numbers"]["limit"] is None


def test_a_stopped_study_keeps_what_is_finished_and_goes_on(tmp_path):
    states = []

    def stop_halfway():
        return any(s.piece.name == "walk" and s.seed == 1 and s.fraction == 0.5 for s in states)

    with pytest.raises(Interrupted):
        execute(STUDY, Settings(), [0, 1], tmp_path, states.append, stop_halfway)
    records = tmp_path / "records"
    times = {path.name: path.stat().st_mtime_ns for path in records.iterdir()}
    assert set(times) == {"target.json", "walk.seed-0.json", "distance.seed-0.json"}
    execute(STUDY, Settings(), [0, 1], tmp_path)
    assert {name: (records / name).stat().st_mtime_ns for name in times} == times
    assert len(list(records.iterdir())) == 5


def test_more_seeds_are_welcome_and_other_settings_are_not(tmp_path):
    execute(STUDY, Settings(), [0], tmp_path)
    execute(STUDY, Settings(), [0, 1, 2], tmp_path)
    assert len(list((tmp_path / "records").glob("walk.*"))) == 3
    with pytest.raises(LabError, match=r"steps=4, not steps=5: choose another folder with --out"):
        execute(STUDY, Settings(steps=5), [0], tmp_path)


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1]])
def test_seeds_are_different_numbers(seeds, tmp_path):
    with pytest.raises(LabError, match="expected different numbers"):
        execute(STUDY, Settings(), seeds, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_piece_returns_must_be_plain_numbers(tmp_path):
    wrong = Experiment(
        "wrong", "", Settings, lambda s: (Piece("set", "A set", lambda run: {"x": {1}}),), small_study.tell
    )
    with pytest.raises(LabError, match="set returned more than plain numbers"):
        execute(wrong, Settings(), [0], tmp_path)


def test_a_damaged_record_is_named(tmp_path):
    folder = execute(STUDY, Settings(), [0], tmp_path)
    (folder.records / "walk.seed-0.json").write_text('{"header": ')
    with pytest.raises(LabError, match=r"walk\.seed-0\.json is damaged"):
        findings(STUDY, folder)


def test_a_piece_can_be_worked_alone():
    assert small_study.walk(PieceRun(Settings(steps=2), seed=3)) == {"path": [3.0, 4.0, 5.0]}


def test_a_table_counts_its_cells():
    with pytest.raises(ValueError, match="has 1 cells, expected 2"):
        Table("T", ("", "x"), (("a",),))
    assert Table("T", ("", "x"), (("a", ("1", "small")),)).cells == [[("a", ""), ("1", "small")]]


def test_the_page_comes_from_the_records(tmp_path, know_walks):
    execute(STUDY, Settings(), [0, 1], tmp_path)
    outcome, page = build(tmp_path)
    text = page.read_text()
    assert outcome.missing == 0
    for said in (
        "A walk",
        "2 walks",
        "2 distances known",
        "natgrad run walks --seeds 2",
        "A &lt; B",
        "<td>seed 1</td>",
    ):
        assert said in text
    assert "--set" not in text
    assert text.count("<svg role") == 1
    assert str(tmp_path) not in text
    assert "prefers-color-scheme: dark" in text
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"walks.png", "walks.svg"}


def test_a_part_of_the_pieces_makes_a_page_too(tmp_path, know_walks):
    folder = execute(STUDY, Settings(steps=2), [0, 1], tmp_path)
    (folder.records / "distance.seed-1.json").unlink()
    outcome, page = build(tmp_path)
    assert outcome.missing == 1
    assert "1 of the planned pieces are not finished" in page.read_text()
    assert "--set steps=2" in page.read_text()
    for path in folder.records.iterdir():
        path.unlink()
    with pytest.raises(LabError, match="no finished piece: run the same command again"):
        build(tmp_path)


def test_a_plan_of_another_version_or_kind_is_refused(tmp_path, know_walks):
    folder = execute(STUDY, Settings(), [0], tmp_path)
    plan = folder.plan()
    folder.plan_path.write_text(json.dumps(plan | {"settings": {"stride": 3}}))
    with pytest.raises(LabError, match="another version of walks"):
        build(tmp_path)
    folder.plan_path.write_text(json.dumps(plan | {"kind": "dream"}))
    with pytest.raises(LabError, match="another version of natgrad"):
        build(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"experiment": 3}', b'{"experiment": ', b"\xff\xfe", b"null"], ids=repr
)
def test_a_damaged_plan_is_named(content, tmp_path, know_walks):
    folder = execute(STUDY, Settings(), [0], tmp_path)
    folder.plan_path.write_bytes(content)
    for words in (("run", "walks", "--out", str(tmp_path)), ("report", str(tmp_path))):
        answer = natgrad(*words)
        assert answer.exit_code == 2
        assert "into another folder" in answer.output


def test_a_plan_under_which_nothing_was_done_gives_way(tmp_path):
    """So that a run that failed at its start leaves nothing behind that refuses the next."""
    folder = execute(STUDY, Settings(), [0], tmp_path)
    shutil.rmtree(folder.records)
    execute(STUDY, Settings(steps=5), [0], tmp_path)
    assert folder.plan()["settings"]["steps"] == 5
    assert len(list(folder.records.iterdir())) == 3


@pytest.mark.parametrize(
    ("file", "out"), [("notes", "notes/below"), ("records", ""), ("plots", ""), ("report.html/notes", "")]
)
def test_a_place_that_cannot_be_written_is_named(file, out, tmp_path, know_walks):
    """Below a file, and where a file stands in place of a folder or the other way round."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    answer = natgrad("run", "walks", "--out", str(tmp_path / out))
    assert answer.exit_code == 2, answer.output
    assert f"natgrad: {tmp_path / out}" in answer.output
    assert "give a place that can be read and written" in answer.output


def test_pictures_have_different_names(tmp_path, monkeypatch, know_walks):
    section = small_study.tell(findings(STUDY, execute(STUDY, Settings(), [0], tmp_path))).sections[0]
    twice = Section("", "", (), section.pictures * 2)
    monkeypatch.setattr(
        small_study,
        "STUDY",
        Experiment("walks", "", Settings, small_study.pieces, lambda f: Story("", "", "", (twice,))),
    )
    with pytest.raises(ValueError, match="expected different names"):
        build(tmp_path)


def test_the_command_runs_and_resumes(tmp_path, know_walks):
    assert "Walks along a line" in natgrad("list").output
    said = natgrad("run", "walks", "--set", "steps=3", "--out", str(tmp_path))
    assert said.exit_code == 0, said.output
    assert "Walking, seed 1" in said.output  # the study's own number of seeds is two
    assert "2 distances known" in said.output
    again = natgrad("run", "walks", "--set", "steps=3", "--out", str(tmp_path))
    assert "read from its record" in again.output
    assert natgrad("report", str(tmp_path)).exit_code == 0
    sized = natgrad("run", "walks", "--size", "paper", "--set", "steps=3", "--out", str(tmp_path / "paper"))
    assert "walks has no settings of its own for --size paper" in sized.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "steps=0"), "expected a positive number"),
        (("--set", "step=1"), "expected one of steps, threads, device"),
        (("--set", "device=abacus"), "abacus"),
        (("--seeds", "0"), "seeds"),
        (("--set", "threads=0"), "threads is 0, expected a number of at least 1"),
        (("--set", "threads=-1"), "threads=-1: expected a whole number"),
    ],
)
def test_bad_input_is_refused_at_the_door(words, said, tmp_path, know_walks):
    answer = natgrad("run", "walks", *words, "--out", str(tmp_path / "new"))
    assert answer.exit_code == 2
    assert said in answer.output
    assert not (tmp_path / "new").exists()
