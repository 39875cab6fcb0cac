"""How near each comparison of the suite is to its bound: what a processor with other round-off would break first.

    NATGRAD_MARGINS=margins.txt PYTHONPYCACHEPREFIX=/tmp/margins python -m pytest -o enable_assertion_pass_hook=true
    python tests/shared/margins.py margins.txt

The first line writes the share of its bound that every `assert a < b` between numbers, `torch.testing.assert_close` and
`pytest.approx` has used; a compiled test says nothing, so the cache of bytecode goes elsewhere. The second lists the
comparisons above a tenth, the nearest first. Counts are left out: they are exact. Tests of what is freed may fail: the
words for an assertion keep what it compared.
"""

from __future__ import annotations

import ast
import math
import operator
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

NEAR = 0.1
HELPERS = [path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("test_")]
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
BELOW, ABOVE = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)
WRAPPED = re.compile(r"\b(?:np\.float(?:64|32)|tensor)\(([-+.\deinf]+)(?:, dtype=[\w.]+)?(?:, grad_fn=<\w+>)?\)")


def shares(explanation: str) -> Iterator[float]:
    """The share of its bound that each comparison of an assertion uses, from pytest's words for it."""
    line = WRAPPED.sub(r"\1", explanation.splitlines()[0]) if explanation else ""
    try:
        tree = ast.parse(line.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            values = [_value(part) for part in (node.left, *node.comparators)]
            for low, sign, high in zip(values, node.ops, values[1:], strict=False):
                yield from _share(low, sign, high)


def _share(first: float | None, sign: ast.cmpop, second: float | None) -> Iterator[float]:
    if isinstance(sign, ABOVE):
        first, second = second, first
    elif not isinstance(sign, BELOW):
        return
    if first is None or second is None or (isinstance(first, int) and isinstance(second, int)):
        return
    if 0 < first <= second < math.inf:
        yield first / second
    elif first <= second < 0:
        yield second / first


def _value(node: ast.expr) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _value(node.left), _value(node.right)
        if left is not None and right is not None:
            try:
                return ARITHMETIC[type(node.op)](left, right)
            except (ArithmeticError, ValueError):
                return None
    return None


class Recorder:
    """Appends `share<tab>place<tab>test` to the file as tests pass."""

    def __init__(self, path: Path) -> None:
        self.path, self.test = path, ""

    def note(self, share: float, place: str) -> None:
        if share >= NEAR:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{share:.4f}\t{place}\t{self.test}\n")

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
        for share in shares(expl):
            self.note(share, orig)

    def watch_assert_close(self) -> None:
        """Of torch.testing.assert_close, the largest |a - b| / (atol + rtol |b|)."""
        real = torch.testing.assert_close

        def assert_close(actual: Any, expected: Any, *others: Any, **options: Any) -> None:
            real(actual, expected, *others, **options)
            if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and actual.is_floating_point():
                rtol, atol = options.get("rtol"), options.get("atol")
                if rtol is None:
                    rtol, atol = (1.3e-6, 1e-5) if torch.float32 in (actual.dtype, expected.dtype) else (1e-7, 1e-7)
                shares = (actual - expected).detach().abs() / (atol + rtol * expected.detach().abs())
                if shares.numel() and rtol + atol > 0:
                    self.note(float(shares.nan_to_num().max()), f"assert_close, rtol={rtol:g}, atol={atol:g}")

        torch.testing.assert_close = assert_close

    def watch_approx(self) -> None:
        """Of pytest.approx on numbers."""
        scalar = type(pytest.approx(1.0))
        real = scalar.__eq__

        def equal(approx: Any, actual: Any) -> bool:
            found = real(approx, actual)
            if found and isinstance(actual, float) and float(approx.tolerance) > 0:
                self.note(abs(actual - approx.expected) / float(approx.tolerance), f"{actual!r} == {approx!r}")
            return found

        scalar.__eq__ = equal


pytest.register_assert_rewrite(*HELPERS)  # modules that compare on behalf of tests


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(Path(os.environ["NATGRAD_MARGINS"]))
    recorder.watch_assert_close()
    recorder.watch_approx()
    config.pluginmanager.register(recorder)


def summary(lines: list[str]) -> list[str]:
    """One line per comparison, with the largest share over its tests."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for line in lines:
        share, place, test = line.rstrip("\n").split("\t")
        found[test.split("[")[0], re.sub(r"[\d.e+-]{4,}", "#", place)].append((float(share), test))
    worst = sorted(((max(all_), test, place, len(all_)) for (test, place), all_ in found.items()), reverse=True)
    return [f"{share:.3f}  {count:4d}  {name}\n             {place}" for (share, name), _, place, count in worst]


if __name__ == "__main__":
    print("\n".join(summary(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())))
