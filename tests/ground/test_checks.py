"""A number that is not what it should be is named in one sentence."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from natgrad.ground.checks import check_choice, check_integer, check_number, check_positive, is_integer


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3)])
def test_any_integer_comes_back_as_pythons(value: object):
    found = check_integer("n", value)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None, math.nan, [3]])
def test_what_is_no_positive_integer_is_named(value: object):
    with pytest.raises(ValueError, match=r"^draws is .*, expected the number of draws, an integer >= 1, or None$"):
        check_integer("draws", value, of="the number of draws", hint=", or None")


def test_the_least_integer_is_allowed():
    assert check_integer("n", 0, 0) == 0
    with pytest.raises(ValueError, match="an integer >= 2"):
        check_integer("n", 1, 2)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), torch.tensor(0.5), 1e-300])
def test_positive_numbers_pass(value: float):
    check_positive("rate", value)
    check_number("rate", value, 0.0, 1.0)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", None, True, 1j, torch.ones(1), torch.tensor(True)])
def test_others_are_named(value: object):
    with pytest.raises(ValueError, match=r"^rate is .*, expected a finite number > 0: of learning$"):
        check_positive("rate", value, hint=": of learning")


@pytest.mark.parametrize("value", [-0.1, 1.1, math.inf, math.nan, "1", None, False])
def test_numbers_out_of_range_are_named(value: object):
    with pytest.raises(ValueError, match=r"^share is .*, expected a number in \[0, 1\]$"):
        check_number("share", value, 0.0, 1.0)


@pytest.mark.parametrize("value", ["parallel", None])
def test_a_choice_passes(value: object):
    check_choice("transport", value, ("cheap", "parallel", None))


@pytest.mark.parametrize("value", ["Cheap", 1, ["cheap"]])
def test_another_word_is_named(value: object):
    with pytest.raises(ValueError, match=r"^transport is .*, expected one of 'cheap', 'parallel'$"):
        check_choice("transport", value, ("cheap", "parallel"))


@pytest.mark.parametrize(
    ("value", "integer"), [(-3, True), (np.int8(3), True), (True, False), (3.0, False), (None, False)]
)
def test_an_integer_is_told_from_what_looks_like_one(value: object, integer: bool):
    assert is_integer(value) is integer


def test_kinds_of_numbers_are_asked_for_in_one_file():
    root = Path(__file__).parents[2]
    for package in ("natgrad", "lab/natgrad_lab", "benchmarks"):
        for path in (root / package).rglob("*.py"):
            found = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
            taken = [node.lineno for node in found if node.module == "numbers"]
            assert not taken or path == root / "natgrad" / "ground" / "checks.py", (
                f"{path}:{taken[0]}: use natgrad.ground.checks"
            )
