"""What a step in the score metric costs as the model grows: seconds and memory by structure, with slopes in K."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks.timing import peak_memory, time_in_turn
from natgrad.ground.densities import Density, Energy
from natgrad.ground.pure import leaves

VARIABLES, EXAMPLES, CYCLES = 16, 16, 3
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
HEADS = (*(f"K = {size:,}" for size in SIZES), "slope")


class StructureChoice(NamedTuple):
    """A structure with its solver, and the largest model that it is asked to hold."""

    build: Callable[[nn.Module], Any]
    largest: int = 1_000_000


def of(structure: ng.Structure) -> Callable[[nn.Module], ng.NaturalGradient]:
    """The optimiser with a structure that has a closed-form inverse."""
    return lambda net: ng.NaturalGradient(net, ng.score_metric(net), 0.1, structure=structure, damping=1.0)


def by_products(net: nn.Module) -> ng.NaturalGradient:
    """Truncated Newton: ten products of the exact metric."""
    metric = ng.score_metric(net)
    return ng.NaturalGradient(net, metric, 0.1, solver=ng.CG(rtol=0.0, max_steps=10), damping=1.0)


def by_slices(net: nn.Module) -> ng.NaturalGradient:
    """One random direction per example, solved exactly in the space of the examples."""
    metric = ng.score_metric(net, slices=1)
    return ng.NaturalGradient(net, metric, 0.1, solver=ng.SampleSpace(), damping=1.0)


WAYS: dict[str, StructureChoice] = {
    "`ng.ang`, K x K": StructureChoice(lambda net: ng.ang(net, ng.score_metric(net)), 10_000),
    "`ng.ang`, Woodbury": StructureChoice(lambda net: ng.ang(net, ng.score_metric(net), method=ng.Woodbury()), 10_000),
    "`ng.Blocks()`": StructureChoice(of(ng.Blocks(0.9, largest=20_000)), 10_000),
    "`ng.Blocks(rows=True)`": StructureChoice(of(ng.Blocks(0.9, rows=True))),
    "`ng.UnitWise`": StructureChoice(of(ng.UnitWise(0.9))),
    "`ng.Kronecker`": StructureChoice(of(ng.Kronecker(0.9))),
    "`ng.EigenKronecker`": StructureChoice(of(ng.EigenKronecker(0.9))),
    "`ng.Diagonal`": StructureChoice(of(ng.Diagonal(0.9))),
    "matrix-free, 10 products": StructureChoice(by_products),
    "sample space, 1 slice": StructureChoice(by_slices),
}


def energy(size: int) -> nn.Module:
    """Two hidden layers of one width, softplus, with about `size` parameters: h^2 + (N + 3) h + 1."""
    linear = VARIABLES + 3
    width = round((math.sqrt(linear**2 + 4 * (size - 1)) - linear) / 2)
    return nn.Sequential(
        nn.Linear(VARIABLES, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1)
    )


def step(net: nn.Module, opt: Any, x: Tensor) -> None:
    """A denoising loss, its gradient, and the step."""
    opt.zero_grad()
    loss = ng.denoising_score_matching_loss(net, ng.trainable(net), x, noise=0.3)
    loss.backward()
    opt.step()


def cost(build: Callable[[nn.Module], Any], size: int) -> tuple[float, float]:
    """Median seconds (CPU) of a step after the first, and MiB: what is kept between steps, and the most a step adds."""
    torch.manual_seed(0)
    net, x = energy(size), torch.randn(EXAMPLES, VARIABLES)
    opt = build(net)
    step(net, opt, x)
    times = time_in_turn({"": lambda: step(net, opt, x)}, CYCLES, warm=0)[""]
    state = {t.data_ptr(): t.numel() * t.element_size() for t in leaves(opt.state_dict())}
    return median(times), sum(state.values()) / 2**20 + peak_memory(lambda: step(net, opt, x))


def report() -> list[tuple[str, ...]]:
    """Rows of seconds and MiB, and the exponent of the time in K."""
    ways = {"SGD": StructureChoice(lambda net: torch.optim.SGD(net.parameters(), 1e-3)), **WAYS}
    rows = []
    for name, way in ways.items():
        sizes = [size for size in SIZES if size <= way.largest]
        costs = [cost(way.build, size) for size in sizes]
        cells = [f"{1e3 * seconds:.3g} ms, {memory:.2g} MiB" for seconds, memory in costs]
        # the exponent of K between the last two sizes, where fixed costs weigh least
        slope = math.log(costs[-1][0] / costs[-2][0]) / math.log(sizes[-1] / sizes[-2])
        rows.append((name, *cells, *["-"] * (len(SIZES) - len(sizes)), f"{slope:.2f}"))
        print("  ".join(rows[-1]), flush=True)
    return rows


LAYERED = ((2, (64, 64), 200), (8, (64,), 200), (64, (128,), 100), (64, (128, 128), 100), (784, (256,), 32))
LAYERED_HEADS = ("layered", "general", "ratio")


def layered_report(repeats: int) -> list[tuple[str, ...]]:
    """The exact loss and its gradient, through the layers and by a backward pass per variable."""
    rows = []
    for variables, widths, examples in LAYERED:
        sizes = (variables, *widths)
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Softplus())]
        net, x = nn.Sequential(*layers, nn.Linear(sizes[-1], 1)), torch.randn(examples, variables)
        ways = {"fast": Energy.scores_and_curvatures, "slow": Density.scores_and_curvatures}
        works = {name: partial(gradient_by, way, net, x) for name, way in ways.items()}
        fast, slow = (median(times) for times in time_in_turn(works, repeats, warm=0).values())
        title = f"N = {variables}, {'-'.join(map(str, widths))}, batch {examples}"
        rows.append((title, f"{1e3 * fast:.3g} ms", f"{1e3 * slow:.3g} ms", f"{slow / fast:.1f}"))
    return rows


def gradient_by(way: Callable[..., tuple[Tensor, Tensor]], net: nn.Module, x: Tensor) -> None:
    """The loss's gradient with second derivatives taken that way."""
    params = ng.trainable(net)
    scores, curvatures = way(Energy(net), params, x)
    value = (0.5 * scores.square() + curvatures).sum(1).mean()
    torch.autograd.grad(value, list(params.values()), allow_unused=True)
