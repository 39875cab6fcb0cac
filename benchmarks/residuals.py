"""Physics-informed networks: relative error after equal CPU seconds of one thread, `ng.residuals` beside three others.

Adam, torch's L-BFGS, and Gauss-Newton in sample space as people write it by hand: the Jacobian by `torch.func`, one
damping from a ladder, a line search on a logarithmic grid. The losses of Adam and L-BFGS carry derivatives forward
through the layers, which costs less than backward passes twice. Who has something to choose is tuned on the first seed,
for the whole of the seconds: Adam over five rates and three schedules, the method by hand over two dampings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import natgrad as ng
from benchmarks.residual_equations import (
    BoundaryProblem,
    Points,
    allen_cahn,
    build_net,
    burgers,
    cavity,
    diffusion,
    heat,
    helmholtz,
    poisson,
    squares,
)
from benchmarks.tables import ChosenTables
from benchmarks.timing import ratios
from benchmarks.variants import check_names, race_variants, write_errors
from natgrad.ground.linalg import cholesky

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1)
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "exponential": lambda share: 0.01**share,
}
"""Of Adam: the share of its seconds that is spent -> the share of its rate."""
DAMPINGS = (1e-8, 1e-5)
MANY = 10  # for points that are drawn anew: how many draws L-BFGS has at once, which needs the same ones at every step
EVERY = 20  # steps between new points where residuals are large, of a Gauss-Newton method
ADAM_EVERY, LBFGS_EVERY = 200, 5
"""The same of Adam, and of L-BFGS, whose step has up to twenty iterations: all three draw about as often per second."""

EQUATIONS: dict[str, tuple[Callable[[], BoundaryProblem], float]] = {  # name -> the equation and its CPU seconds
    "poisson2": (lambda: poisson(2, (2, 32, 1)), 6.0),
    "poisson5": (lambda: poisson(5, (5, 40, 40, 1)), 10.0),
    "poisson100": (squares, 10.0),
    "heat": (lambda: heat(1), 6.0),
    "heat4": (lambda: heat(4), 10.0),
    "burgers": (burgers, 20.0),
    "helmholtz": (helmholtz, 6.0),
    "allen_cahn": (allen_cahn, 20.0),
    "cavity": (cavity, 10.0),
    "diffusion": (diffusion, 10.0),
}

Contestant = Callable[[BoundaryProblem, nn.ModuleList, float], Iterator[None]]


def draw_points(equation: BoundaryProblem, nets: nn.ModuleList, times: int = 1, every: int = EVERY) -> Iterator[Points]:
    """The points of step after step, of so many draws: the same, others, or after `every` steps where residuals are."""
    generator = torch.Generator().manual_seed(1)
    while True:
        draws = [equation.draw(generator) for _ in range(times)]
        points = {name: torch.cat([drawn[name] for drawn in draws]) for name in draws[0]}
        yield points
        while not equation.anew:
            for _ in range(every):
                yield points
            if equation.adaptive:
                points = equation.adapt(nets, points, generator)


def by_library(equation: BoundaryProblem, nets: nn.ModuleList, seconds: float, **options: Any) -> Iterator[None]:
    """`ng.residuals` as it comes."""
    unknowns = nets[0] if len(nets) == 1 else list(nets)
    opt = ng.residuals(unknowns, equation.terms(), equation.weights, **options)
    for points in draw_points(equation, nets):
        opt.step(**points)
        yield


def by_hand(equation: BoundaryProblem, nets: nn.ModuleList, seconds: float, damping: float) -> Iterator[None]:
    """J^T (J J^T + damping)^-1 r with the Jacobian written out, and the best of 2^0 ... 2^-12 times it."""
    params = {name: p.detach() for name, p in nets.named_parameters()}
    space, terms = ng.Space(params), equation.terms()

    def evaluate(chosen: dict[str, Tensor], i: int) -> Callable[[Tensor], Tensor]:
        own = {name.removeprefix(f"{i}."): p for name, p in chosen.items() if name.startswith(f"{i}.")}
        return lambda y: functional_call(nets[i], own, (y.unsqueeze(0),)).squeeze(0)

    def residual(chosen: dict[str, Tensor], name: str, x: Tensor, count: int) -> Tensor:
        value = terms[name](*(evaluate(chosen, i) for i in range(len(nets))), x)
        return value.reshape(-1) * (equation.weights.get(name, 1.0) / count) ** 0.5

    def stack(chosen: dict[str, Tensor], points: Points) -> Tensor:
        return torch.cat(
            [
                vmap(lambda x, n=name, c=len(some): residual(chosen, n, x, c))(some).reshape(-1)
                for name, some in points.items()
            ]
        )

    def jacobian(name: str, some: Tensor) -> Tensor:
        rows = vmap(lambda x: jacrev(lambda chosen: residual(chosen, name, x, len(some)))(params))(some)
        return torch.cat([rows[key].flatten(2).flatten(0, 1) for key in params], 1)

    for points in draw_points(equation, nets):
        r = stack(params, points)
        rows = torch.cat([jacobian(name, some) for name, some in points.items()])
        kernel = rows @ rows.mT
        kernel.diagonal().add_(damping)
        d = rows.mT @ cholesky(kernel).solve(r)
        here = space.flatten(params)
        trials = [space.unflatten(here - 0.5**i * d) for i in range(13)]
        best = min(trials, key=lambda chosen: float(stack(chosen, points).square().sum().nan_to_num(math.inf)))
        params = {name: p.clone() for name, p in best.items()}
        nets.load_state_dict(params)
        yield


def by_lbfgs(equation: BoundaryProblem, nets: nn.ModuleList, seconds: float) -> Iterator[None]:
    """torch's, with its strong Wolfe line search and a memory of 100."""
    opt, used = torch.optim.LBFGS(nets.parameters()), Points()  # another one for every set of points

    def closure() -> Tensor:
        opt.zero_grad()
        loss = equation.loss(nets, used)
        loss.backward()
        return loss

    sets = draw_points(equation, nets, MANY if equation.anew else 1, LBFGS_EVERY)
    given = next(sets)
    while True:
        if given is not used:
            opt = torch.optim.LBFGS(nets.parameters(), max_iter=20, history_size=100, line_search_fn="strong_wolfe")
            used = given
        opt.step(closure)
        yield
        if not equation.anew:
            given = next(sets)


def by_adam(
    equation: BoundaryProblem, nets: nn.ModuleList, seconds: float, rate: float, schedule: Callable[[float], float]
) -> Iterator[None]:
    """Adam, its rate on a schedule over the seconds."""
    opt, began = torch.optim.Adam(nets.parameters(), rate), time.process_time()
    for points in draw_points(equation, nets, every=ADAM_EVERY):
        share = min(1.0, (time.process_time() - began) / seconds)
        opt.param_groups[0]["lr"] = rate * schedule(share)
        opt.zero_grad()
        equation.loss(nets, points).backward()
        opt.step()
        yield


Variants = Mapping[str, Contestant]  # what is chosen -> a contestant with it
CONTESTANTS: dict[str, Variants] = {  # name -> its variants, of which the best one on the first seed counts
    "ng.residuals": {"": by_library},
    "by hand": {f"damping {damping:g}": partial(by_hand, damping=damping) for damping in DAMPINGS},
    "L-BFGS": {"": by_lbfgs},
    "Adam": {
        f"{rate:g} {name}": partial(by_adam, rate=rate, schedule=schedule)
        for rate in RATES
        for name, schedule in SCHEDULES.items()
    },
}
HEADS = tuple(CONTESTANTS)
TITLE = "Relative error, {}: median (least to largest) at equal CPU seconds of one thread, float64"


def train(equation: BoundaryProblem, contestant: Contestant, seed: int, seconds: float) -> float:
    """The error after these CPU seconds; infinite for a run that fails."""
    nets = equation.networks(seed)
    began = time.process_time()
    try:
        for _ in contestant(equation, nets, seconds):
            if time.process_time() - began >= seconds:
                break
    except (ValueError, RuntimeError):
        return math.inf
    error = equation.error(nets)
    return error if math.isfinite(error) else math.inf


def figures(seeds: range, choices: ChosenTables) -> Iterator[tuple[str, ...]]:
    """One row per equation: median, least and largest error of each contestant, and which of its variants that is."""
    check_names("equations", choices.workloads, EQUATIONS)
    check_names("methods", choices.methods, HEADS)
    torch.set_num_threads(1)
    for make, usual in (EQUATIONS[name] for name in choices.workloads or EQUATIONS):
        equation, budget = make(), choices.seconds or usual
        run = partial(train, equation, seconds=budget)
        chosen = {name: variants for name, variants in CONTESTANTS.items() if name in (choices.methods or HEADS)}
        cells = {name: write_errors(*race_variants(run, variants, seeds)) for name, variants in chosen.items()}
        yield f"{equation.name}, {budget:g} s", *(cells.get(name, "-") for name in HEADS)


# what a term takes that calls `torch.autograd.grad` at its point

DERIVATIVES_TITLE = "A step with derivatives by torch.autograd.grad, over one with natgrad's own"
DERIVATIVES_HEADS = ("100 points", "1000 points")
NETS = ((2, 32, 1), (2, 64, 64, 1), (5, 40, 40, 1))


def differentiate_twice(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Laplacian at one point, by backward passes."""
    slope = torch.autograd.grad(u(x), x, create_graph=True)[0]
    return torch.stack([torch.autograd.grad(part, x, create_graph=True)[0][i] for i, part in enumerate(slope)]).sum()


def differentiate_four_times(u: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Laplacian of the Laplacian at one point, by backward passes."""
    return differentiate_twice(lambda y: differentiate_twice(u, y), x)


OPERATORS = {"laplacian": (ng.laplacian, differentiate_twice), "biharmonic": (ng.biharmonic, differentiate_four_times)}


def time_derivatives(repeats: int) -> Iterator[tuple[str, ...]]:
    """One row per operator and network, the same steps in turn, in double precision."""
    for (name, (own, by_autograd)), sizes in product(OPERATORS.items(), NETS):
        cells = list[str]()
        for count in (100, 1000):
            inside = torch.rand(count, sizes[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)

            def build(operator: Callable[..., Tensor], sizes: Any = sizes, x: Tensor = inside) -> Callable[[], object]:
                torch.manual_seed(0)
                net = build_net(sizes)
                opt = ng.residuals(net, {"inside": lambda u, x: operator(u, x) + x.sin().prod()})
                return lambda: opt.step(inside=x)

            works = {"autograd": build(by_autograd)}
            cells.append(str(ratios(build(own), works, repeats)["autograd"]))
        yield f"{name}, {'-'.join(map(str, sizes))}", *cells
