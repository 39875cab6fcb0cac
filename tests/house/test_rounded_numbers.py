"""No number of double precision is rounded to single precision on its way into a tensor of doubles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from natgrad.ground.typed_torch import as_tensor_like

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("natgrad", "lab/natgrad_lab") for path in (ROOT / folder).rglob("*.py"))


def find_rounded_numbers(source: str) -> Iterator[str]:
    """`line: call` for `torch.as_tensor(x).to(y)`, which makes single precision of a Python number."""
    if not re.search(r"torch\.(as_)?tensor\(", source):  # parsing all files takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"):
            continue
        made = node.func.value
        if not (isinstance(made, ast.Call) and ast.unparse(made.func) in ("torch.as_tensor", "torch.tensor")):
            continue
        typed = any(keyword.arg == "dtype" for keyword in made.keywords)
        if not typed and not (node.args and ast.unparse(node.args[0]).endswith("device")):
            yield f"{node.lineno}: {ast.unparse(node)}; use natgrad.ground.typed_torch.as_tensor_like"


def test_no_number_is_rounded_on_its_way():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in find_rounded_numbers(path.read_text())]
    assert found == []


@pytest.mark.parametrize("call", ["torch.as_tensor(rate).to(p)", "torch.tensor([a, b]).to(torch.float64)"])
def test_the_search_finds_them(call: str):
    assert len(list(find_rounded_numbers(f"x = {call}"))) == 1


def test_numbers_keep_their_digits():
    like = torch.zeros((), dtype=torch.float64)
    assert float(as_tensor_like(0.1, like)) == 0.1
