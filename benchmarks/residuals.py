"""Physics-informed networks: relative error after equal CPU seconds of one thread, `ng.residuals` beside three others.

Adam (the best of its rates, each with a cosine schedule), torch's L-BFGS, and Gauss-Newton in sample space as people
write it by hand: the Jacobian by `torch.func`, one damping from a ladder, a line search on a logarithmic grid.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import natgrad as ng
from natgrad.linalg import cholesky

F64 = torch.float64
HEADS = ("ng.residuals", "by hand", "L-BFGS", "Adam")
RATES = (1e-3, 1e-2)
DAMPINGS = (1e-8, 1e-5)
Terms = Mapping[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Equation:
    """A boundary value problem.

    Args:
        name: Its name.
        sizes: Of the network's layers.
        terms: For `ng.residuals`, all of weight 1.
        batched: The same for batches: a network and the points of a term -> residuals (b, 1).
        points: Of each term.
        solution: Points (b, d) -> values (b,).
        test: Points where the error is taken.
    """

    name: str
    sizes: tuple[int, ...]
    terms: Terms
    batched: Mapping[str, Callable[[nn.Module, Tensor], Tensor]]
    points: Mapping[str, Tensor]
    solution: Callable[[Tensor], Tensor]
    test: Tensor

    def network(self, seed: int) -> nn.Sequential:
        """A perceptron with tanh."""
        torch.manual_seed(seed)
        parts = [part for a, b in pairwise(self.sizes) for part in (nn.Linear(a, b, dtype=F64), nn.Tanh())]
        return nn.Sequential(*parts[:-1])

    def loss(self, net: nn.Module) -> Tensor:
        """The sum of the terms' mean squares, as the others take it."""
        return torch.stack([self.batched[name](net, x).square().mean() for name, x in self.points.items()]).sum()

    def error(self, net: nn.Module) -> float:
        """Relative, in L2."""
        with torch.no_grad():
            exact = self.solution(self.test)
            return float((net(self.test).squeeze(1) - exact).norm() / exact.norm())


def uniform(count: int, dims: int, seed: int) -> Tensor:
    """Points of the unit cube."""
    return torch.rand(count, dims, generator=torch.Generator().manual_seed(seed), dtype=F64)


def on_faces(count: int, dims: int, seed: int) -> Tensor:
    """Points of the unit cube's boundary, as many on each face."""
    x = uniform(count, dims, seed)
    face = torch.arange(count) % (2 * dims)
    x[torch.arange(count), face // 2] = (face % 2).to(F64)
    return x


def derive(net: nn.Module, x: Tensor, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """u (b, 1), its gradient (b, d) and its Laplacian over the first `dims` coordinates (b, 1), by autograd."""
    x = x.detach().requires_grad_()
    u = net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(dims)]
    return u, slope, torch.stack(seconds).sum(0).unsqueeze(1)


def poisson(dims: int, sizes: tuple[int, ...]) -> Equation:
    """-Laplace u = f in the unit cube, u = sum of cosines (product of sines in two dimensions), values on the faces."""
    two = dims == 2

    def exact(x: Tensor) -> Tensor:
        return torch.sin(math.pi * x).prod(-1) if two else torch.cos(math.pi * x).sum(-1)

    def source(x: Tensor) -> Tensor:
        return (2 if two else 1) * math.pi**2 * exact(x)

    return Equation(
        f"Poisson, {dims} dimensions",
        sizes,
        {"inside": lambda u, x: ng.laplacian(u, x) + source(x), "boundary": lambda u, x: u(x) - exact(x)},
        {
            "inside": lambda net, x: derive(net, x, dims)[2] + source(x).unsqueeze(1),
            "boundary": lambda net, x: net(x) - exact(x).unsqueeze(1),
        },
        {"inside": uniform(400 if two else 800, dims, 1), "boundary": on_faces(120 if two else 300, dims, 2)},
        exact,
        uniform(4000, dims, 3),
    )


def heat() -> Equation:
    """u_t = u_xx / 4 on (0, 1) x (0, 1), u = exp(-pi^2 t / 4) sin(pi x)."""

    def exact(x: Tensor) -> Tensor:
        return torch.exp(-(math.pi**2) * x[..., 1] / 4) * torch.sin(math.pi * x[..., 0])

    edge = on_faces(160, 2, 2)
    edge = edge[edge[:, 1] < 1]  # no values at the end of time
    return Equation(
        "heat, 1 + 1 dimensions",
        (2, 32, 1),
        {
            "inside": lambda u, x: ng.time_derivative(u, x) - ng.laplacian(u, x, dims=[0]) / 4,
            "boundary": lambda u, x: u(x) - exact(x),
        },
        {
            "inside": lambda net, x: (lambda d: d[1][:, 1:] - d[2] / 4)(derive(net, x, 1)),
            "boundary": lambda net, x: net(x) - exact(x).unsqueeze(1),
        },
        {"inside": uniform(400, 2, 1), "boundary": edge},
        exact,
        uniform(4000, 2, 3),
    )


def helmholtz(k: float = 10.0) -> Equation:
    """Laplace u + k^2 u = f in the unit square, u = sin(pi x) sin(2 pi y), values on the edges."""

    def exact(x: Tensor) -> Tensor:
        return torch.sin(math.pi * x[..., 0]) * torch.sin(2 * math.pi * x[..., 1])

    def source(x: Tensor) -> Tensor:
        return (k**2 - 5 * math.pi**2) * exact(x)

    return Equation(
        f"Helmholtz, k = {k:g}",
        (2, 40, 1),
        {
            "inside": lambda u, x: ng.laplacian(u, x) + k**2 * u(x) - source(x),
            "boundary": lambda u, x: u(x) - exact(x),
        },
        {
            "inside": lambda net, x: (lambda d: d[2] + k**2 * d[0])(derive(net, x, 2)) - source(x).unsqueeze(1),
            "boundary": lambda net, x: net(x) - exact(x).unsqueeze(1),
        },
        {"inside": uniform(500, 2, 1), "boundary": on_faces(120, 2, 2)},
        exact,
        uniform(4000, 2, 3),
    )


EQUATIONS: dict[str, tuple[Callable[[], Equation], float]] = {
    "poisson2": (lambda: poisson(2, (2, 32, 1)), 6.0),
    "poisson5": (lambda: poisson(5, (5, 40, 40, 1)), 10.0),
    "heat": (heat, 6.0),
    "helmholtz": (helmholtz, 6.0),
}
"""Name -> the equation and its CPU seconds."""

Contestant = Callable[[Equation, nn.Module, float], Iterator[None]]


def by_library(equation: Equation, net: nn.Module, seconds: float, **options: Any) -> Iterator[None]:
    """`ng.residuals` as it comes."""
    opt = ng.residuals(net, equation.terms, **options)
    while True:
        opt.step(**equation.points)
        yield


def by_hand(equation: Equation, net: nn.Module, seconds: float, damping: float) -> Iterator[None]:
    """J^T (J J^T + damping)^-1 r with the Jacobian written out, and the best of 2^0 ... 2^-12 times it."""
    params = {name: p.detach() for name, p in net.named_parameters()}
    space = ng.Space(params)

    def residual(chosen: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        term = equation.terms[name]
        found = term(lambda y: functional_call(net, chosen, (y.unsqueeze(0),)).squeeze(0), x)
        return found.reshape(()) / len(equation.points[name]) ** 0.5

    def stack(chosen: dict[str, Tensor]) -> Tensor:
        found = [vmap(lambda x, n=name: residual(chosen, n, x))(points) for name, points in equation.points.items()]
        return torch.cat(found)

    def jacobian(name: str, points: Tensor) -> Tensor:
        rows = vmap(lambda x: jacrev(lambda chosen: residual(chosen, name, x))(params))(points)
        return torch.cat([rows[key].flatten(1) for key in params], 1)

    while True:
        r = stack(params)
        rows = torch.cat([jacobian(name, points) for name, points in equation.points.items()])
        kernel = rows @ rows.mT
        kernel.diagonal().add_(damping)
        d = rows.mT @ cholesky(kernel).solve(r)
        here = space.flatten(params)
        trials = [space.unflatten(here - 0.5**i * d) for i in range(13)]
        best = min(trials, key=lambda chosen: float(stack(chosen).square().sum().nan_to_num(math.inf)))
        params = {name: p.clone() for name, p in best.items()}
        net.load_state_dict(params)
        yield


def by_lbfgs(equation: Equation, net: nn.Module, seconds: float) -> Iterator[None]:
    """torch's, with its strong Wolfe line search and a memory of 100."""
    opt = torch.optim.LBFGS(net.parameters(), max_iter=20, history_size=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        opt.zero_grad()
        loss = equation.loss(net)
        loss.backward()
        return loss

    while True:
        opt.step(closure)
        yield


def by_adam(equation: Equation, net: nn.Module, seconds: float, rate: float) -> Iterator[None]:
    """Adam, its rate on a cosine to zero over the seconds."""
    opt, began = torch.optim.Adam(net.parameters(), rate), time.process_time()
    while True:
        share = min(1.0, (time.process_time() - began) / seconds)
        opt.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * share)) / 2
        opt.zero_grad()
        equation.loss(net).backward()
        opt.step()
        yield


CONTESTANTS: dict[str, tuple[Contestant, ...]] = {
    "ng.residuals": (by_library,),
    "by hand": tuple(
        lambda equation, net, seconds, damping=damping: by_hand(equation, net, seconds, damping) for damping in DAMPINGS
    ),
    "L-BFGS": (by_lbfgs,),
    "Adam": tuple(lambda equation, net, seconds, rate=rate: by_adam(equation, net, seconds, rate) for rate in RATES),
}
"""Name -> its variants, of which the best median counts."""


def train(equation: Equation, contestant: Contestant, seed: int, seconds: float) -> float:
    """The error after these CPU seconds; infinite for a run that fails."""
    net = equation.network(seed)
    began = time.process_time()
    try:
        for _ in contestant(equation, net, seconds):
            if time.process_time() - began >= seconds:
                break
    except (ValueError, RuntimeError):
        return math.inf
    error = equation.error(net)
    return error if math.isfinite(error) else math.inf


def report(seeds: range, names: tuple[str, ...] = (), seconds: float | None = None) -> Iterator[tuple[str, ...]]:
    """One row per equation: median, least and largest error of each contestant's best variant."""
    torch.set_num_threads(1)
    for make, usual in (EQUATIONS[name] for name in names or tuple(EQUATIONS)):
        equation, budget = make(), seconds or usual
        cells = []
        for variants in CONTESTANTS.values():
            errors = [sorted(train(equation, one, seed, budget) for seed in seeds) for one in variants]
            best = min(errors, key=statistics.median)
            cells.append(f"{statistics.median(best):.1e} ({best[0]:.1e} to {best[-1]:.1e})")
        yield f"{equation.name}, {budget:g} s", *cells
