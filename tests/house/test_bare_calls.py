"""No file but natgrad/ground/linalg.py calls what raises on one processor and returns inf on another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from natgrad.ground.typed_torch import as_tensor_like

ROOT = Path(__file__).parents[2]
FOLDERS = ("natgrad", "lab/natgrad_lab", "benchmarks")
HOME = "natgrad/ground/linalg.py"
INSTEAD = {
    **dict.fromkeys(("inv", "inverse"), "invert_or_nan or require_inverse"),
    "solve": "solve_or_nan or require_solution",
    "cholesky": "factor_or_nan, require_factor or linalg.cholesky",
    **dict.fromkeys(("eigh", "eigvalsh"), "eigh"),
    **dict.fromkeys(("eig", "eigvals"), "eigh, of a symmetric matrix"),
    **dict.fromkeys(("svd", "svdvals", "matrix_rank", "cond"), "svd"),
    **dict.fromkeys(("pinv", "pinverse"), "pseudo_solve or svd"),
    "lstsq": "fit_or_nan",
    "tensorinv": "invert_or_nan",
    **dict.fromkeys(("tensorsolve", "ldl_factor", "lu_factor"), "solve_or_nan"),
}
TORCH = ("torch", "torch.linalg", "linalg")
INFO = {"inv_ex", "solve_ex", "cholesky_ex", "lu_factor_ex", "ldl_factor_ex"}
"""What tells by its info, which has to be read: [0] or a name for the result alone is refused."""
WORDS = re.compile(rf"torch\.linalg|\b(torch|linalg)\.({'|'.join([*INSTEAD, *INFO])})\b")


def bare_calls(source: str) -> Iterator[str]:
    """`line: sentence` for each use of torch that depends on the processor."""
    if not WORDS.search(source):  # parsing all files takes seconds
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.linalg"):
            yield f"{node.lineno}: imports from torch.linalg; write torch.linalg.x, so that this test can see it"
        elif isinstance(node, ast.Attribute) and node.attr in INSTEAD and ast.unparse(node.value) in TORCH:
            yield f"{node.lineno}: {ast.unparse(node)}; use {INSTEAD[node.attr]} of natgrad.ground.linalg"
        if isinstance(node, ast.Subscript | ast.Attribute) and _tells(node.value) and not _reads_info(node):
            yield f"{node.lineno}: {ast.unparse(node)} drops the info; use natgrad.ground.linalg"


def _tells(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in INFO


def _reads_info(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "info"
    return isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "1"


def test_no_call_depends_on_the_processor():
    files = [(path, source) for path, source in read_files(*FOLDERS) if path != HOME]
    found = [f"{path}:{sentence}" for path, source in files for sentence in bare_calls(source)]
    assert not found, "\n" + "\n".join(found)


BARE = """
torch.linalg.inv(a)
torch.inverse(a)
torch.linalg.solve(a, b, left=False)
f(torch.linalg.cholesky)(a)
torch.linalg.eigvalsh(a)[0]
torch.linalg.pinv(a, hermitian=True)
torch.linalg.inv_ex(a)[0]
torch.linalg.cholesky_ex(a).L
from torch.linalg import inv
linalg.solve(a, b)
"""
FINE = """
x, info = torch.linalg.inv_ex(a)
fine = torch.linalg.cholesky_ex(a).info == 0
torch.linalg.solve_triangular(l, b, upper=False)
operator.inverse(0.0)
solver.solve(operator, rhs)
torch.linalg.qr(a)
"""


def test_each_kind_of_bare_call_is_found_and_what_does_not_raise_is_allowed():
    assert [len(list(bare_calls(line))) for line in BARE.strip().splitlines()] == [1] * 10
    assert not list(bare_calls(FINE))


# no number of double precision is rounded to single precision on its way into a tensor of doubles


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


def find_draws_without_a_place(source: str) -> Iterator[str]:
    """`line: call` for a draw by a generator that goes to torch's default device, where the generator need not be."""
    if "generator=" not in source:  # parsing all files takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and re.fullmatch(r"torch\.(rand|randn|randint|randperm)", ast.unparse(node.func)):
            names = {keyword.arg for keyword in node.keywords}
            if "generator" in names and not names & {"device", None}:
                yield f"{node.lineno}: {ast.unparse(node)}; write device=generator.device"


def read_files(*folders: str) -> Iterator[tuple[str, str]]:
    """Path and source of every Python file."""
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_no_number_is_rounded_on_its_way():
    files = read_files("natgrad", "lab/natgrad_lab")
    assert [f"{path}:{line}" for path, source in files for line in find_rounded_numbers(source)] == []


def test_the_search_finds_them_and_numbers_keep_their_digits():
    for call in ("torch.as_tensor(rate).to(p)", "torch.tensor([a, b]).to(torch.float64)"):
        assert len(list(find_rounded_numbers(f"x = {call}"))) == 1
    assert float(as_tensor_like(0.1, torch.zeros((), dtype=torch.float64))) == 0.1


def test_draws_are_made_where_their_generator_is():
    assert [
        f"{path}:{line}" for path, source in read_files("natgrad") for line in find_draws_without_a_place(source)
    ] == []
    calls = ("torch.rand(3, generator=g)", "torch.randperm(3, generator=g, device=g.device)")
    assert [len(list(find_draws_without_a_place(call))) for call in calls] == [1, 0]
