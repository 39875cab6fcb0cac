"""Products G v, whole solves and truncated-Newton steps in multiples of one gradient, with curvlinops' products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from curvlinops import GGNLinearOperator
from torch import Tensor, nn

import natgrad as ng
from benchmarks.timing import peak_memory, ratios
from benchmarks.training import dense
from natgrad.ground.pure import PureModel, as_call
from natgrad.operators import Linearization, OutputMap, Pullback


@dataclass(frozen=True)
class ProductWorkload:
    """A network, a batch and its loss, and on how many of the examples a smaller metric is taken."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    some: int
    criterion: nn.Module = nn.CrossEntropyLoss()


def mlp(batch: int = 500) -> ProductWorkload:
    """784-1000-500-250-30 with tanh, classes out."""
    net = dense([784, 1000, 500, 250, 30], nn.Tanh)
    return ProductWorkload("MLP 784-1000-500-250-30", net, torch.rand(batch, 784), labels(batch, 30), 125)


def cnn(batch: int = 128) -> ProductWorkload:
    """Two 3x3 convolutions of 16 and 32 channels with pooling on 28x28, and a linear layer."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 10),
    )
    return ProductWorkload("CNN 16-32 on 28x28", model, torch.rand(batch, 1, 28, 28), labels(batch, 10), 32)


def labels(batch: int, classes: int) -> Tensor:
    """Random class numbers."""
    return torch.randint(0, classes, (batch,))


def gradient_of(work: ProductWorkload) -> Callable[[], object]:
    """One forward and backward pass."""
    params = list(work.model.parameters())
    return lambda: torch.autograd.grad(work.criterion(work.model(work.inputs), work.targets), params)


def pullback(work: ProductWorkload, linearise_after: int | None) -> Pullback:
    """The Fisher with a chosen way of products."""
    family = ng.Categorical()
    outputs = OutputMap(PureModel(work.model, as_call(work.inputs)), family.rows)
    return Pullback(Linearization(outputs, ng.trainable(work.model), linearise_after), family)


def fresh_product(work: ProductWorkload, vector: Tensor) -> Callable[[], object]:
    """The same product with a graph of its own each time, through torch.func."""
    family, params = ng.Categorical(), {k: p.detach() for k, p in work.model.named_parameters()}
    space = ng.Space(params)
    function = OutputMap(PureModel(work.model, as_call(work.inputs)), family.rows)

    def product() -> object:
        outputs, tangents = torch.func.jvp(function, (params,), (space.unflatten(vector),))
        _, pull = torch.func.vjp(function, params)
        return pull(family.mv(outputs, tangents) / len(outputs))

    return product


def report(work: ProductWorkload, repeats: int) -> list[tuple[str, str, str]]:
    """Rows (what, multiples of a gradient, peak memory in multiples of a gradient's)."""
    cached, linear = pullback(work, None), pullback(work, 1)
    vector = torch.randn(cached.size)
    linear.mv(vector)  # prepares the linearised form
    params = list(work.model.parameters())
    peer = GGNLinearOperator(
        work.model, nn.CrossEntropyLoss(), params, [(work.inputs, work.targets)], check_deterministic=False
    )
    works = {
        "product, graph kept": lambda: cached.mv(vector),
        "product, linearised and kept": lambda: linear.mv(vector),
        "product, fresh graph (jvp + vjp)": fresh_product(work, vector),
        "product, curvlinops GGN": lambda: peer @ vector,
        "building the kept graph": lambda: pullback(work, None).linearization.jvp(vector),
        "preparing the linearised form": lambda: pullback(work, 1).mv(vector),
    }
    times = ratios(gradient_of(work), works, repeats)
    base = peak_memory(gradient_of(work))
    return [(name, str(times[name]), f"{peak_memory(thing) / base:.2f}") for name, thing in works.items()]


# A whole damped solve of a small residual net with many rows


def report_solves(repeats: int, rows: int = 1000) -> list[tuple[str, str, str]]:
    """Net 2-64-64-1 on `rows` points: sample space, the dense matrix, ten CG steps."""
    model = dense([2, 64, 64, 1], nn.Tanh)
    x, y = torch.rand(rows, 2), torch.rand(rows, 1)
    metric, params = ng.fisher(model, ng.Gaussian()), ng.trainable(model)
    leaves = list(params.values())

    def gradient() -> tuple[Tensor, ...]:
        return torch.autograd.grad((model(x) - y).square().mean(), leaves)

    flat = ng.Space(params).flatten(dict(zip(params, gradient(), strict=True)))

    def solve(solver: ng.Solver) -> Callable[[], object]:
        return lambda: ng.natural_gradient(metric.at(params, x), flat, solver=solver, damping=1e-3)

    works = {
        "sample space, layer by layer": solve(ng.SampleSpace()),
        "dense matrix and Cholesky": solve(ng.Direct()),
        "ten CG steps": solve(ng.CG(rtol=0, max_steps=10)),
    }
    times = ratios(gradient, works, repeats)
    base = peak_memory(gradient)
    return [(name, str(times[name]), f"{peak_memory(thing) / base:.2f}") for name, thing in works.items()]


# One truncated-Newton step, and how much of it is products with the metric

PRODUCTS = 10
HEADS = ("step / gradient", "products", "their share of it")


def autoencoder(batch: int = 1000) -> ProductWorkload:
    """784-1000-500-250-30-250-500-1000-784 with tanh, on random grey pixels."""
    images, net = torch.rand(batch, 784), dense([784, 1000, 500, 250, 30, 250, 500, 1000, 784], nn.Tanh)
    return ProductWorkload("Autoencoder 784-1000-500-250-30-...", net, images, images, 125, nn.BCEWithLogitsLoss())


def step_of(work: ProductWorkload, optimizer: ng.NaturalGradient) -> Callable[[], object]:
    """A whole iteration: forward, backward, step. The model is put back, so that every one starts from one point."""
    model = work.model
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def iteration() -> None:
        optimizer.zero_grad()
        optimizer.loss(model(work.inputs), work.targets).backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])

    return iteration


def product_of(work: ProductWorkload, count: int) -> Callable[[], Tensor]:
    """One product with the metric on `count` examples, its graph kept."""
    metric = ng.gauss_newton(work.model, work.criterion)
    operator = metric.at(ng.trainable(work.model), (work.inputs[:count], work.targets[:count]))
    vector = torch.randn(operator.size)
    operator.mv(vector)
    return lambda: operator.mv(vector)


def optimizers(work: ProductWorkload) -> dict[str, tuple[ng.NaturalGradient, int]]:
    """Steps with a fixed number of products, and the examples that each of them is on."""
    model, criterion, batch = work.model, work.criterion, len(work.inputs)
    cg = ng.CG(rtol=0.0, max_steps=PRODUCTS)

    def freely(**options: int) -> ng.NaturalGradient:
        return ng.hessian_free(model, criterion, solver=cg, **options)  # type: ignore[arg-type]

    return {
        "natgrad_cg": (ng.natgrad_cg(model, criterion, solver=cg), batch),
        "hessian_free": (freely(), batch),
        f"hessian_free, metric on {work.some}": (freely(metric_batch=work.some), work.some),
    }


def report_steps(work: ProductWorkload, repeats: int) -> list[tuple[str, str, str, str]]:
    """Rows (which step, its cost in gradients, that of its products, their share)."""
    chosen = optimizers(work)
    works = {name: step_of(work, optimizer) for name, (optimizer, _) in chosen.items()}
    counts = sorted({count for _, count in chosen.values()})
    products = {f"product on {count}": product_of(work, count) for count in counts}
    times = ratios(gradient_of(work), {**works, **products}, repeats)
    rows = []
    for name, (optimizer, count) in chosen.items():
        cost = optimizer.state_report().solver_steps * times[f"product on {count}"].median
        rows.append((name, str(times[name]), f"{cost:.1f}", f"{cost / times[name].median:.0%}"))
    return rows
