"""Imports stand at the top of a file, but for what may be missing or is slow to load."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("natgrad", "lab/natgrad_lab", "benchmarks", "docs", "examples")
# Packages that an installation for users or for the tests may lack.
OPTIONAL = re.compile(
    "blackjax|cma|cmaes|cocoex|dask|gpytorch|gymnasium|ioh|jax|lightning|linear_operator|matplotlib|mpi4py|optax|"
    "pytorch_lightning|pytorch_optimizer|ray|sb3_contrib|scipy|stable_baselines3|transformers"
)
LATE = {
    "lab/natgrad_lab/cli.py": "the command says that it loads, and what is missing, before it loads PyTorch",
    "lab/natgrad_lab/data.py": "scikit-learn takes seconds, and most data sets do without it",
    "natgrad/layers/taps.py": "DTensor takes seconds, and models in one part do without it",
    "natgrad/ground/whole_tensors.py": "the same",
    "natgrad/policy/sb3.py": "torch's writer imports tensorboard, which few need",
}
# of benchmarks: they import optional packages at the top
NEEDY = re.compile("search(_bbob|_coco|_costs|_noise)?|policy")


def find_late_imports(source: str) -> Iterator[str]:
    """Modules that a function imports, each as `package.module` or `package.name`.

    Args:
        source: Of a Python file.
    """
    if not re.search(r"^ +(import|from) ", source, re.MULTILINE):  # parsing all files takes seconds
        return
    functions = [f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_be_late(module: str) -> bool:
    """True for what an installation may lack."""
    package, _, rest = module.partition(".")
    return bool(OPTIONAL.fullmatch(package) or (package == "benchmarks" and NEEDY.fullmatch(rest)))


def test_imports_stand_at_the_top():
    found: dict[str, list[str]] = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        if late := [name for name in find_late_imports(path.read_text(encoding="utf-8")) if not may_be_late(name)]:
            found[path.relative_to(ROOT).as_posix()] = late
    assert set(found) == set(LATE), f"{found}, expected only {sorted(LATE)}"
    example = "import os\ndef f():\n    import scipy.linalg\n    from natgrad.ground.pure import trainable"
    assert list(find_late_imports(example)) == ["scipy.linalg", "natgrad.ground.pure.trainable"]
    assert [may_be_late(module) for module in find_late_imports(example)] == [True, False]


def read_typed_imports(path: Path) -> set[str]:
    """What a file imports for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    parts = [part for block in blocks for part in block.body if isinstance(part, ast.ImportFrom)]
    return {alias.name for part in parts for alias in part.names}


@pytest.mark.parametrize("package", ["natgrad", "natgrad.families", "natgrad.optim"])
def test_type_checkers_see_the_names_that_are_loaded_late(package: str):
    module = importlib.import_module(package)
    names = {name for names in module.HOMES.values() for name in names}
    assert read_typed_imports(Path(module.__file__ or "")) == names
    assert names <= set(dir(module))
    assert all(getattr(module, name) is not None for name in names)


def test_fields_are_loaded_when_they_are_asked_for():
    """`import natgrad` loads next to nothing, a K-FAC optimizer no field; asking for one loads what it stands on."""
    code = """
import sys, natgrad as ng
assert not [name for name in sys.modules if name.startswith("natgrad.") and not name.startswith("natgrad.ground")]
names = "energies estimation flows helmholtz policy residuals search variational vmc geometry families.wishart"
fields = {f"natgrad.{name}" for name in names.split()}
ng.kfac
assert not fields & set(sys.modules)
ng.residuals
assert fields & set(sys.modules) == {"natgrad.residuals"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
