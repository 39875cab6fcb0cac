"""The toy example of Malago's lectures as its slides print it, beside flows of the library.

`python -m natgrad_lab.papers.malago_2023.printed_toy docs/images` draws the picture and prints how far both are apart.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from natgrad.flows import draw_levels, draw_trajectory, lattice, paths
from natgrad.ground.typed_torch import as_tensor_like
from natgrad_lab.figures import GRID, PALETTE, put_title, save_picture
from natgrad_lab.papers.malago_2023.flows import KINDS, TOY_CASES, shrink, toy

STEPS = {"mu": 0.025, "theta": 0.15}  # lambda of the slides' "Gradient vectors"
GREEK = {"mu": "μ", "theta": "θ"}
LATTICE = 9  # arrows per axis; not given in the lectures
TITLE = (
    'Malagò 2023, "Gradient Flows on the Independence Model": left the slides\' formulas for E[f] and their gradient '
    "vectors, λ = .025 and .15; right the library's E[f] and its flows, Euclidean (orange) and natural (blue)"
)


def print_value(name: str, point: Tensor) -> Tensor:
    """F as the slides print it, shape (...)."""
    a, b = point.unbind(-1)
    if name == "mu":
        return -4 * a - 2 * b + 12 * a * b
    weights = -4 * (a - b).exp() - 2 * (b - a).exp() + 6 * (a + b).exp()
    return weights / (4 * a.cosh() * b.cosh())


def print_gradient(name: str, point: Tensor) -> Tensor:
    """Its gradient as the slides print it: (-4 + 12 mu_2, -2 + 12 mu_1), and Cov(f, X) in theta, shape (..., 2)."""
    if name == "mu":
        return torch.stack([-4 + 12 * point[..., 1], -2 + 12 * point[..., 0]], -1)
    x = as_tensor_like([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], point)  # the four states
    p = (point @ x.mT).softmax(-1)
    return (p * toy(x)) @ x - (p * toy(x)).sum(-1, keepdim=True) * (p @ x)


def measure_difference(name: str, count: int = 25) -> tuple[float, float]:
    """The largest difference of value and of gradient between slides and library, on a lattice of the view."""
    case = TOY_CASES[name]
    at = lattice(*case.view, count)
    ours = replace(case, maximise=True).field(natural=False)(at)
    value = (print_value(name, at) - case.at(at)).abs().max()
    return float(value), float((print_gradient(name, at) - ours).abs().max())


def fill(figure: Figure) -> None:
    """A row for each coordinate system, the slides on the left."""
    grid = figure.subplots(2, 2)
    for (left, right), name in zip(grid, TOY_CASES, strict=True):
        # Level lines of the slides' formula and gradient vectors of the slides' length
        draw_levels(left, partial(print_value, name), *shrink(TOY_CASES[name].view), colors=GRID, levels=28)
        at = lattice(*TOY_CASES[name].view, LATTICE)
        step = -STEPS[name] * print_gradient(name, at)
        look = {"angles": "xy", "scale_units": "xy", "scale": 1, "color": PALETTE[0], "width": 0.005}
        left.quiver(*at.mT.numpy(), *step.mT.numpy(), **look)
        # Level lines of E[f] by the library, and both kinds of flow
        case = TOY_CASES[name]
        draw_levels(right, case.at, *shrink(case.view), colors=GRID, levels=28)
        times = 4.0 * torch.linspace(0, 1, 50, dtype=torch.float64) ** 2.5
        for number, natural in enumerate(KINDS.values()):
            for way in paths(case.field(natural), lattice(*case.view, 4), times, case.inside, 2):
                draw_trajectory(right, way, color=PALETTE[number])
        for axes in (left, right):
            view, letter = TOY_CASES[name].view, GREEK[name]
            axes.set(xlim=view[0], ylim=view[1], xlabel=f"{letter}₁", ylabel=f"{letter}₂", aspect="equal")
        left.set_title(f"the slides: -λ ∇F({GREEK[name]})", loc="left", fontsize=10)
        right.set_title(f"ours: flows in {GREEK[name]}", loc="left", fontsize=10)
    put_title(figure, TITLE)


def draw_all(folder: Path) -> None:
    """Write the picture as a PNG."""
    save_picture(fill, (8.4, 8.6), folder / "malago_printed")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
    for name in TOY_CASES:
        value, gradient = measure_difference(name)
        sys.stdout.write(f"{name}: values differ by {value:.0e}, gradients by {gradient:.0e}\n")
