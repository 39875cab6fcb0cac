"""What a black box gave, read as numbers: one for a point, one per row of a batch, or why there are none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = (str, bytes, bytearray)


class NoNumberError(ValueError):
    """What f gave is no number; the message says what it is."""


def read_number(found: Any) -> float:
    """The value of one point, NaN included.

    Args:
        found: A number, or an array or tensor with one entry.

    Raises:
        NoNumberError: If it is anything else, such as None, a tuple, a string or several numbers.
    """
    if isinstance(found, tuple):
        raise NoNumberError(f"f(x) is a tuple of {len(found)}, expected a number")
    numbers = read_numbers(found, "f(x)")
    if numbers.numel() != 1:
        raise NoNumberError(f"f(x) has shape {tuple(numbers.shape)} for one point, expected a number")
    return float(numbers)


def read_rows(found: Any, points: Tensor) -> Tensor:
    """The values (b,) of a batch; an entry that is no number is NaN.

    Args:
        found: Values of shape (b,) or (b, 1), as a tensor, an array or a list; one number for a batch of one.
        points: The batch, shape (b, d).

    Raises:
        NoNumberError: If it is anything else.
    """
    numbers = read_numbers(found, "f(X)")
    alone = len(points) == 1 and numbers.numel() == 1
    if not alone and numbers.shape not in ((len(points),), (len(points), 1)):
        raise NoNumberError(
            f"f(X) has shape {tuple(numbers.shape)} for X of shape {tuple(points.shape)}, expected ({len(points)},): "
            "a value per row; pass vectorized=False if f takes one point"
        )
    return numbers.reshape(-1).to(points.device)


def read_numbers(found: Any, name: str) -> Tensor:
    """A float64 tensor of any shape and of its own memory.

    Args:
        found: What f gave.
        name: How the message calls it.

    Raises:
        NoNumberError: If nothing in it is a number.
    """
    if isinstance(found, np.ndarray) and found.dtype == object:
        found = found.tolist()
    if isinstance(found, (list, tuple)):
        return torch.tensor([read_entry(entry) for entry in found], dtype=torch.float64)
    if isinstance(found, (int, float)):
        return torch.tensor(read_entry(found), dtype=torch.float64)
    if found is None or isinstance(found, WORDS):
        raise NoNumberError(f"{name} is {type(found).__name__}, expected numbers, lower is better")
    try:
        numbers = torch.as_tensor(found)
    except Exception as error:
        value = read_entry(found)  # a fraction, a decimal: what float() takes
        if math.isnan(value):
            raise NoNumberError(f"{name} is {type(found).__name__}, expected numbers, lower is better") from error
        return torch.tensor(value, dtype=torch.float64)
    if numbers.is_complex():
        raise NoNumberError(f"{name} is complex, expected real values: lower is better")
    return numbers.detach().to(torch.float64, copy=True)


def read_entry(entry: Any) -> float:
    """A float, or NaN for what is no number: None, a word, a pair.

    Args:
        entry: Anything.
    """
    if isinstance(entry, WORDS):
        return math.nan
    try:
        return float(entry)
    except Exception:  # noqa: BLE001 what an object's float() raises is its own affair
        return math.nan
