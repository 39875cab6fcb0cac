"""`natgrad show`: the gradient beside the natural gradient, for a function that is typed on the command line."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.backend_bases import FigureCanvasBase
from torch import Tensor

import natgrad as ng
from natgrad_lab.experiments.base import LabError

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name) for name in ("abs", "cos", "cosh", "exp", "log", "sin", "sinh", "sqrt", "tanh")
}
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "normal": (("x",), "(x - 1)^2"),
    "signs": (("x1", "x2"), "x1 + 2*x2 - 1.5*x1*x2"),
}
"""Family -> its variables, and the function that is drawn where none is given."""
SIGNS = [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
PLAIN = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)


def draw_descent(
    text: str | None, family: str, start: str | None, x: str | None, y: str | None, out: Path
) -> tuple[str, Path]:
    """The function that was drawn and the file that holds the picture. LabError for what cannot be drawn."""
    if family not in FAMILIES:
        raise LabError(f"--family is {family!r}, expected {' or '.join(FAMILIES)}")
    check_place(out)
    names, usual = FAMILIES[family]
    text = usual if text is None else text
    f = read_function(text, names)
    points = torch.arange(-120, 121).double()[:, None] / 10 if family == "normal" else torch.tensor(SIGNS).double()
    if not bool(torch.isfinite(f(points)).all()):
        bad = points[~torch.isfinite(f(points))][0].tolist()
        raise LabError(f"{text} is not finite at {', '.join(f'{v:g}' for v in bad)}: the picture needs its mean")
    distributions = ng.families.MultivariateNormal(1) if family == "normal" else ng.families.Ising(2, [(0,), (1,)])
    if bool((f(points) == f(points[:1])).all()):
        raise LabError(f"{text} is the same everywhere: nothing falls; write a formula such as '{usual}'")
    point, across, up = read_pair("start", start), read_pair("x", x), read_pair("y", y)
    out.parent.mkdir(parents=True, exist_ok=True)  # an error here comes before what takes seconds
    try:
        figure = ng.show_descent(f, distributions, point, x=across, y=up)
    except ValueError as error:
        raise LabError(f"E[{text}] cannot be drawn there ({error}): give another --start, --x or --y") from error
    figure.suptitle(f"E[{text}]")
    figure.savefig(out, dpi=150)
    return text, out


def read_function(text: str, names: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
    """f of a batch (m, d) -> (m,) from a formula in these variables; `^` is a power. LabError for anything else."""
    where = f"{text!r} is no formula in {' and '.join(names)}"
    try:
        tree = ast.parse(text.replace("^", "**").strip(), mode="eval")
    except SyntaxError as error:
        raise LabError(f"{where}: write it as '{FAMILIES['normal'][1]}', with * between factors") from error
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            known = FUNCTIONS if id(node) in called else (*names, "pi")
            fits = node.id in known
        elif isinstance(node, ast.Call):
            fits = isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords
        else:
            fits = isinstance(node, PLAIN) or (isinstance(node, ast.Constant) and type(node.value) in (int, float))
        if not fits:
            own = next((name for name, (others, _) in FAMILIES.items() if ast.unparse(node) in others), None)
            advice = f"it is of --family {own}" if own else f"besides them it may have pi, {', '.join(FUNCTIONS)}"
            raise LabError(f"{where}: {ast.unparse(node)!r} is unknown; {advice}")
    code = compile(ast.fix_missing_locations(Numbers().visit(tree)), "formula", "eval")

    def f(points: Tensor) -> Tensor:
        variables: dict[str, Any] = {name: points[..., i] for i, name in enumerate(names)}
        scope = {"__builtins__": {}, "pi": as_double(torch.pi), "number": as_double, **FUNCTIONS}
        return torch.zeros_like(points[..., 0]) + eval(code, scope, variables)

    return f


class Numbers(ast.NodeTransformer):
    """Numbers as tensors: 1 / 0 is infinite, 9^9^9 too and at once, and functions take them."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """number(node), which `read_function` has in its scope."""
        return ast.Call(ast.Name("number", ast.Load()), [node], [])


def as_double(number: float) -> Tensor:
    """A scalar tensor in double precision."""
    return torch.tensor(float(number), dtype=torch.float64)


def read_pair(name: str, given: str | None) -> tuple[float, float] | None:
    """Two numbers from `a,b`. LabError for anything else."""
    if given is None:
        return None
    try:
        first, second = (float(part) for part in given.split(","))
    except ValueError as error:
        raise LabError(f"--{name} is {given!r}, expected two numbers with a comma: --{name} -3,3") from error
    if not (math.isfinite(first) and math.isfinite(second)):
        raise LabError(f"--{name} is {given!r}, expected two finite numbers")
    if name != "start" and not first < second:
        raise LabError(f"--{name} is {given!r}, expected the smaller number first")
    return first, second


def check_place(out: Path) -> None:
    """LabError unless the file's name has the ending of a kind of picture, before anything is computed."""
    if out.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():
        raise LabError(f"--out {out} ends in {out.suffix or 'nothing'}, expected .png, .svg or .pdf")
    if out.is_dir():
        raise LabError(f"--out {out} is a folder, expected a file")
