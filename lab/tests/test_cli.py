"""The command as a user types it: what it prints, what it refuses, how it stops and goes on."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import small_study
import torch
from typer.testing import CliRunner

from natgrad_lab import cli
from natgrad_lab.data import DataError, digits
from natgrad_lab.descent import read_function
from natgrad_lab.experiments import EXPERIMENTS, find, override
from natgrad_lab.experiments.records import read
from natgrad_lab.experiments.settings import describe_settings

FEW = ("--seeds", "1", "--set", "steps=1", "--set", "threads=1")


def natgrad(*words):
    return CliRunner().invoke(cli.application(), list(words), env={"COLUMNS": "200"})


def test_list_says_how_many_minutes_each_takes():
    assert all(find(name).minutes for name in EXPERIMENTS)
    said = natgrad("list").output
    assert all(name in said for name in EXPERIMENTS)
    assert re.search(r"^digits +3 min +A classifier and an autoencoder", said, re.M)
    assert re.search(r"^malago_2023_toy +9 s ", said, re.M)
    assert not re.search(r"(minutes?|hour)( on|\)| *$)", said.rpartition("Minutes are")[0], re.M)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_size_of_about_a_minute(name):
    experiment = find(name)
    assert experiment.quick or experiment.minutes <= 1
    for size in ("quick", "paper"):
        values = {key: value for key, value in experiment.size(size).items() if key != "seeds"}
        settings = override(experiment.settings, ["device=meta"], values)
        assert {key: getattr(settings, key) for key in values} == values
        assert settings.device == "meta"


def test_a_size_has_a_folder_and_seeds_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(small_study, "STUDY", replace(small_study.STUDY, quick={"seeds": 3, "steps": 1}))
    monkeypatch.setitem(EXPERIMENTS, "walks", "small_study:STUDY")
    for words, seeds in (((), 3), (("--seeds", "4"), 4)):
        said = natgrad("run", "walks", "--size", "quick", *words)
        assert said.exit_code == 0, said.output
        assert len(list(tmp_path.glob("runs/walks-quick/records/walk.seed-*.json"))) == seeds
    assert read(tmp_path / "runs/walks-quick/records/walk.seed-0.json").numbers["path"] == [0.0, 1.0]
    assert "--size is 'huge', expected quick or paper" in natgrad("run", "walks", "--size", "huge").output


def test_a_terminal_hears_at_once_that_something_happens():
    """Before anything slow is imported, and nothing where output is not looked at."""
    shown, piped = io.StringIO(), io.StringIO()
    shown.isatty = lambda: True
    cli.say_loading(shown)
    cli.say_loading(piped)
    assert shown.getvalue() == "natgrad: loading PyTorch ...\n"
    assert piped.getvalue() == ""
    command = [sys.executable, "-c", "import natgrad_lab.cli, sys; print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_help_does_not_wait_for_torch():
    """Nor does it say that something is loaded; whatever else is asked for does both."""
    helps = [(), *((word, "--help") for word in ("run", "report", "list", "show")), ("--help",), ("run",)]
    code = """
import sys
from natgrad_lab import cli
for words in HELPS:
    sys.argv[1:] = words
    try:
        cli.main()
    except SystemExit:
        print("torch" in sys.modules, *words, flush=True)
"""
    command = [sys.executable, "-c", code.replace("HELPS", repr(helps))]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    assert said.count("Usage:") == len(helps)
    assert re.findall(r"^(?:True|False)\b.*", said, re.M) == [" ".join(("False", *words)) for words in helps]
    assert not any(map(cli.needs_torch, helps))
    asked = [("list",), ("show",), ("show", "x^2"), ("run", "digits"), ("run", "digits", "--help"), ("report", "runs")]
    assert all(map(cli.needs_torch, asked))


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_a_run_ends_in_a_report(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "walks", "small_study:STUDY")
    said = natgrad("run", "walks", *FEW, "--out", str(tmp_path))
    assert said.exit_code == 0, said.output
    assert "1 distances known" in said.output
    assert "seed 0" in said.output
    page = tmp_path / "report.html"
    text = page.read_text()
    page.unlink()
    again = natgrad("report", str(tmp_path))
    assert again.exit_code == 0
    assert page.read_text() == text
    refused = natgrad("run", "walks", "--seeds", "1", "--set", "steps=3", "--out", str(tmp_path))
    assert refused.exit_code == 2
    assert "--out" in refused.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "digit"), "did you mean digits?"),
        (("run", "digit", "--help"), "did you mean digits?"),
        (("run", "zzz"), "see `natgrad list`"),
        (("run", "digits", "--set", "second=1"), "expected one of seconds, steps"),
        (("run", "digits", "--set", "seconds=soon"), "expected a number"),
        (("run", "digits", "--set", "seconds=-1"), "expected a positive number"),
        (("run", "digits", "--set", "device=abacus"), "abacus"),
        (("run", "digits", "--seeds", "0"), "seeds"),
        (("report", "nowhere"), "holds no experiment.json"),
        (("report", __file__), "holds no experiment.json"),
        (("fly",), "fly"),
        (("show", "x x"), "no formula in x: write it as '(x - 1)^2'"),
        (("show", "x1 + 1"), "'x1' is unknown; it is of --family signs"),
        (("show", "__import__('os').getcwd()"), "is unknown; besides them it may have pi, abs"),
        (("show", "log(x)"), "log(x) is not finite at -12"),
        (("show", "--family", "gamma"), "expected normal or signs"),
        (("show", "--x", "3,-3"), "expected the smaller number first"),
        (("show", "--start", "3"), "expected two numbers with a comma"),
        (("show", "--start", "nan,1"), "expected two finite numbers"),
        (("show", "--out", "a.doc"), "ends in .doc, expected .png"),
        (("show", "5"), "is the same everywhere: nothing falls"),
        (("show", "1/x"), "1/x is not finite at 0"),
        (("show", "x + 1/0"), "x + 1/0 is not finite at -12"),
        (("show", "x * 9^9^9^9"), "is not finite at -12"),
        (("show", "x + (-8)^.5"), "is not finite at -12"),
        (("show", "sqrt(2)"), "is the same everywhere: nothing falls"),
        (("show", "x^40"), "give another --start, --x or --y"),
        (("show", "--y", "1000,2000"), "give another --start, --x or --y"),
        (("show", "x1", "--family", "signs", "--start", "2,.7"), "give another --start, --x or --y"),
        (("show", "x1", "--family", "signs", "--x", "-1,2"), "give another --start, --x or --y"),
        (("show", "--out", f"{__file__}/a.png"), "give a place that can be read and written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = natgrad(*words)
    assert answer.exit_code == 2
    assert said in answer.output
    assert "Traceback" not in answer.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "name", "drawn"),
    [
        ((), "descent.png", "(x - 1)^2"),
        (
            ("x1 * x2", "--family", "signs", "--x", "0.1,0.9", "--start", "0.3,0.4", "--out", "deep/signs.svg"),
            "deep/signs.svg",
            "x1 * x2",
        ),
    ],
)
def test_show_draws_a_descent(words, name, drawn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = natgrad("show", *words)
    assert said.exit_code == 0, said.output
    assert f"E[{drawn}]" in said.output
    assert name in said.output
    start = (tmp_path / name).read_bytes()[:60]
    assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start


def test_a_formula_is_its_function():
    x = torch.linspace(-2, 2, 9).double()[:, None]
    values = read_function("-2*sin(pi*x)^2 + exp(x)/3 - 1", ("x",))(x)
    expected = -2 * torch.sin(torch.pi * x) ** 2 + torch.exp(x) / 3 - 1
    torch.testing.assert_close(values, expected[:, 0])
    both = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    assert read_function("x1 - 2*x2", ("x1", "x2"))(both).tolist() == [3.0, 1.0]
    assert read_function("3", ("x",))(x).tolist() == [3.0] * 9


def test_a_missing_data_set_says_how_to_get_it(tmp_path, monkeypatch):
    def offline(*args, **how):
        raise OSError

    monkeypatch.delenv("NATGRAD_DATA", raising=False)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    said = natgrad("run", "fashion", *FEW, "--out", str(tmp_path))
    assert said.exit_code == 2
    assert "set NATGRAD_DATA to a folder that holds fashion-mnist" in said.output


def test_missing_extras_name_the_extra(monkeypatch):
    monkeypatch.setattr(cli, "NEEDED", ("typer", "a_package_that_nobody_has"))
    with pytest.raises(SystemExit, match=r"needs a_package_that_nobody_has: pip install -e ./lab"):
        cli.main()


def test_help_of_an_experiment_shows_its_settings_and_defaults():
    said = natgrad("run", "digits", "--help")
    assert said.exit_code == 0
    assert "Usage" in said.output
    for name in ("seconds", "steps", "evaluations"):
        assert name in said.output
    assert find("digits").summary in " ".join(said.output.split())
    plain = natgrad("run", "--help")
    assert plain.exit_code == 0
    assert "evaluations" not in plain.output
    assert "default: runs/NAME" in plain.output


def test_comments_of_settings_are_their_help():
    rows = {name: (default, comment) for name, default, comment in describe_settings(find("malago_2023_toy").settings)}
    assert rows["lattice"] == ("25", "per axis, for basins")


def test_every_setting_is_explained():
    settings = [(name, *row) for name in EXPERIMENTS for row in describe_settings(find(name).settings)]
    assert [(name, setting) for name, setting, _, comment in settings if not comment] == []


def test_out_must_not_be_a_file(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    said = natgrad("run", "digits", *FEW, "--out", str(file))
    assert said.exit_code == 2
    assert "notes.txt is a file, expected a folder" in said.output
    assert file.read_text() == "mine"


def start(out):
    """Six runs of some tenths of a second each."""
    code = "from natgrad_lab import cli, experiments; experiments.EXPERIMENTS['tiny'] = 'small_races:RACE'; cli.main()"
    words = ["run", "tiny", "--seeds", "1", "--set", "steps=1000", "--set", "threads=1", "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_an_interrupt_is_heard_between_two_steps(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("records/*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from here" in said
    assert "Traceback" not in said
    assert len(list(tmp_path.glob("records/*.checkpoint"))) <= 1
