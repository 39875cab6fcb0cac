"""G v in multiples of one gradient, beside curvlinops' GGN product, with the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from curvlinops import GGNLinearOperator
from torch import Tensor, nn

import natgrad as ng
from benchmarks.timing import peak_memory, ratios
from natgrad.ground.pure import PureModel, as_call
from natgrad.operators import Linearization, OutputMap, Pullback


@dataclass(frozen=True)
class ProductWorkload:
    """A network, a batch and its loss."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor


def mlp(batch: int = 500) -> ProductWorkload:
    """784-1000-500-250-30 with tanh, classes out."""
    sizes = [784, 1000, 500, 250, 30]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())][:-1]
    return ProductWorkload("MLP 784-1000-500-250-30", nn.Sequential(*layers), torch.rand(batch, 784), labels(batch, 30))


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
    return ProductWorkload("CNN 16-32 on 28x28", model, torch.rand(batch, 1, 28, 28), labels(batch, 10))


def labels(batch: int, classes: int) -> Tensor:
    """Random class numbers."""
    return torch.randint(0, classes, (batch,))


def gradient_of(work: ProductWorkload) -> Callable[[], object]:
    """One forward and backward pass."""
    params, loss = list(work.model.parameters()), nn.CrossEntropyLoss()
    return lambda: torch.autograd.grad(loss(work.model(work.inputs), work.targets), params)


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
