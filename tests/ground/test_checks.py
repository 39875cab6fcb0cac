"""A number that is not what it should be is named in one sentence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from natgrad.ground.checks import check_choice, check_integer, check_number, check_positive, check_range, is_integer

DRAWS = r"^draws is .*, expected the number of draws, an integer >= 1, or None$"
RATE = r"^rate is .*, expected a finite number > 0: of learning$"
SHARE = r"^share is .*, expected a number in \[0, 1\]$"
HALF = r"^half is .*, expected a number in \(0, 1\]: with one end$"
WORD = r"^transport is .*, expected one of 'cheap', 'parallel'$"
WRONG = [
    *((check_integer, value, DRAWS) for value in (0, -1, 2.0, True, "3", None, math.nan, [3])),
    *((check_positive, value, RATE) for value in (0, -1.0, math.inf, math.nan, "1", None, True, 1j, torch.ones(1))),
    *((check_number, value, SHARE) for value in (-0.1, 1.1, math.inf, math.nan, "1", None, False)),
    *((check_range, value, HALF) for value in (0, 1.1, -math.inf, math.nan, "1", None, False)),
    *((check_choice, value, WORD) for value in ("Cheap", 1, ["cheap"])),
]
CALLS = {
    check_integer: lambda value: check_integer("draws", value, of="the number of draws", hint=", or None"),
    check_positive: lambda value: check_positive("rate", value, hint=": of learning"),
    check_number: lambda value: check_number("share", value, 0.0, 1.0),
    check_range: lambda value: check_range("half", value, "(0, 1]", hint=": with one end"),
    check_choice: lambda value: check_choice("transport", value, ("cheap", "parallel")),
}


@pytest.mark.parametrize(("check", "value", "words"), WRONG)
def test_what_does_not_fit_is_named(check, value: object, words: str):
    with pytest.raises(ValueError, match=words):
        CALLS[check](value)


def test_what_fits_passes_and_integers_come_back_as_pythons():
    for value in (3, np.int64(3), np.array(3)):
        assert type(check_integer("n", value)) is int
    for number in (1, 0.5, np.float32(0.5), torch.tensor(0.5), 1e-300):
        check_positive("rate", number)
        check_number("rate", number, 0.0, 1.0)
    for number in (1, 0.5, torch.tensor(1.0)):
        check_range("half", number, "(0, 1]")
    check_choice("transport", None, ("cheap", None))
    assert check_integer("n", 0, 0) == 0
    found = [is_integer(value) for value in (-3, np.int8(3), True, 3.0, None)]
    assert found == [True, True, False, False, False]
