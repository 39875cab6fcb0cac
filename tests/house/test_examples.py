"""Every example is short, uses public names only, and runs."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch_settings import read_torch_settings, write_torch_settings

import natgrad as ng

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
STARTS_PROCESSES = next(path for path in EXAMPLES if path.stem == "parallel_search")
IMPORTABLE = Path(__file__).parents[1] / "vectors" / "importable_names.json"
PUBLIC = {*ng.__all__, *json.loads(IMPORTABLE.read_text(encoding="utf-8"))}
LINES = 40
SECONDS = 120  # far more than any takes: a bound on a hang, not a figure


def name_of(path: Path) -> str:
    return path.stem


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Whatever an example takes from natgrad that is not public, by attribute or by import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ng":
            if node.attr not in PUBLIC:
                yield f"ng.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("natgrad"):
            yield f"from {node.module} import ..."


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_example_is_short_and_public(path: Path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < LINES
    assert ast.get_docstring(ast.parse(source)), "the first line says what the example shows"
    assert list(private_uses(ast.parse(source))) == []


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path != STARTS_PROCESSES], ids=name_of)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    settings = read_torch_settings()
    with mock.patch.dict(os.environ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            write_torch_settings(settings)
    assert capsys.readouterr().out.strip(), "an example prints what it shows"


def test_an_example_that_starts_processes_runs_in_one_of_its_own(tmp_path: Path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(STARTS_PROCESSES)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
