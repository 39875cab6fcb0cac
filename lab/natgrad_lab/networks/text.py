"""Text that every Python has at hand: its licence, and the docstrings of modules of its standard library."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from natgrad_lab.experiments.base import LabError, TaskData

SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))  # what is left of the text: 96 characters


def documentation(library: Path | None = None) -> str:
    """The licence, where the installation has it, and the docstrings of all single-file modules, by their names.

    The modules are read, not imported. The same for one installation of Python; others differ a little. library: the
    folder to read, by default the running Python's. LabError where there are no sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    licence = root / "LICENSE.txt"
    parts = [licence.read_text("utf-8")] if licence.is_file() else []
    parts += [text for path in sorted(root.glob("*.py")) for text in docstrings(path.read_text("utf-8"))]
    if not parts:
        raise LabError(f"{root} has no docstrings to read: Python's standard library is installed without its sources")
    return "\n\n".join(parts)


def docstrings(source: str) -> list[str]:
    """Of a module, its classes and its functions, in the order in which they are met; none where it cannot be read."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    try:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    except SyntaxError:  # some files are there to be wrong
        return []
    return [text for node in nodes if (text := ast.get_docstring(node))]


def encode_text(text: str) -> Tensor:
    """Numbers in SYMBOLS, (n,) int64; other characters are dropped."""
    place = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    return torch.tensor([place[symbol] for symbol in text if symbol in place])


def windows(text: str, length: int, test: float = 0.1) -> TaskData:
    """Windows that follow one another: inputs (n, length), and at every place the next character as target.

    test: the share of the text, its end, that is kept for testing.
    """
    symbols = encode_text(text)
    n = (len(symbols) - 1) // length
    cut = n - int(test * n)
    if not 0 < cut < n:
        raise LabError(
            f"length is {length}: the text has {len(symbols)} characters, too few for windows of that length"
        )
    x, y = symbols[: n * length].view(n, length), symbols[1 : n * length + 1].view(n, length)
    return TaskData(x[:cut], y[:cut], x[cut:], y[cut:])
