"""The command of the benchmarks: what it refuses before anything is measured."""

import sys

import pytest

command = pytest.importorskip("benchmarks.__main__")  # beside the packages, not in them


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("kfak",), "expected some of products"),
        (("products", "--repeats", "1"), "--repeats is 1, expected at least 2"),
        (("products", "--threads", "0"), "--threads is 0, expected at least 1"),
        (("densities", "--steps", "0"), "--steps is 0, expected at least 1"),
        (("residuals", "--seconds", "-1"), "--seconds is -1.0, expected a number above 0"),
        (("search-bits", "--seeds", "0"), "'0' is no seed, expected 10 for 0 to 9"),
        (("search-bits", "--seeds", "5:3"), "'5:3' is no seed"),
        *(((race, "--workloads", "nope"), "nope") for race in ("densities", "scripts", "ground-states", "residuals")),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit) as refusal:
        command.main()
    answer = f"{refusal.value} {capsys.readouterr().err}"
    assert refusal.value.code not in (0, None)
    assert said in answer
    assert "expected" in answer
