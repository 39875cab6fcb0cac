"""Layer kinds of a user's own: their blocks against the dense definition, and registrations that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from layer_blocks import assert_blocks
from models import Assembled, Case, assert_close, cross, draw, reference_metric
from optim_models import CE, iterate, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.layers.kinds import OWN_KINDS
from natgrad.operators import Arranged
from natgrad.rules import SpectralProgress

EXACT = ng.ExactLabels()
X, LABELS = draw(4, 2, 4), torch.tensor([0, 2, 1, 1])


class Turned(nn.Module):
    """y = x W + b, W (inputs, outputs), under names of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(inputs, outputs))
        self.shift = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return torch.einsum("...i,io->...o", x, self.matrix) + self.shift


class Grouped(nn.Module):
    """Two matrices side by side, of squared inputs; no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, outputs // 2, inputs // 2))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        found = torch.einsum("...gi,goi->...go", x.square().unflatten(-1, (2, -1)), self.weight)
        return found.flatten(-2)


def build_net(kind: Callable[[int, int], nn.Module]) -> nn.Module:
    """A layer of one's own at every position, the sum over positions, a linear layer: (b, t, 4) -> (b, 3)."""
    return Assembled(lambda m, x: m.out(torch.tanh(m.own(x)).sum(1)), own=kind(4, 6), out=nn.Linear(6, 3))


def groups(module: Any, tensor: Tensor) -> Tensor:
    return tensor.unflatten(-1, (2, -1))


RULES: dict[type, dict[str, Any]] = {
    Turned: {"weight": "matrix", "bias": "shift", "transposed": True},
    Grouped: {
        "activations": lambda module, x: groups(module, x.square()),
        "deltas": groups,
        "shape": lambda module: tuple(module.weight.shape),
    },
}


@pytest.fixture(autouse=True)
def register_kinds() -> Iterator[None]:
    """The kinds here, forgotten afterwards."""
    for kind, rules in RULES.items():
        ng.layers.register(kind, **rules)
    yield
    for kind in RULES:
        OWN_KINDS.pop(kind, None)


def operator_of(structure: ng.Structure, kind: type, inputs: Tensor) -> tuple[Arranged, Tensor]:
    case = Case(lambda: build_net(kind), inputs)
    model, params = case.make()
    operator, _ = structure.update(None, ng.fisher(model, case.family), params, inputs)
    assert isinstance(operator, Arranged)
    assert any(len(layout.shape) > 1 and layout.names[0].startswith("own.") for layout, _ in operator.parts)
    return operator, reference_metric(case, model, params)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("build", [ng.Kronecker, ng.EigenKronecker])
def test_blocks_of_one_example_at_one_position_are_the_fisher_s(build: Any, kind: type):
    operator, dense = operator_of(build(estimate=EXACT), kind, X[:1, :1])
    if kind is Turned:
        assert_blocks(operator, dense)
    else:  # a block per group
        assert_close(operator.diagonal(), dense.diagonal(), 1e-11)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.unitwise])
def test_an_optimizer_reads_and_trains_them(recipe: Any, kind: type):
    torch.manual_seed(0)
    model = build_net(kind).double()
    opt = recipe(model, CE)
    losses = train(opt, model, 8, X, LABELS)
    assert {row.structure for row in opt.report()} == {type(opt.structure).__name__}
    assert losses[-1] < losses[0]


def test_a_wrong_registration_keeps_the_diagonal():
    ng.layers.register(Grouped, **(RULES[Grouped] | {"activations": groups}))  # forgets the square
    model = build_net(Grouped).double()
    opt = ng.kfac(model, CE)
    iterate(opt, model, X, LABELS)
    kinds = {row.parameter: row.structure for row in opt.report()}
    assert kinds["own.weight"] == "Diagonal"
    assert kinds["out.weight"] == "Kronecker"


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"module is .*expected a class of torch.nn modules"):
        ng.layers.register(Turned(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="deltas is 3, expected a function"):
        ng.layers.register(Turned, deltas=3)  # type: ignore[arg-type]
    ng.layers.register(Turned, **RULES[Turned], activations=lambda module, x: x.flatten())
    model = build_net(Turned).double()
    opt = ng.kfac(model, CE)
    with pytest.raises(ValueError, match=r"activations gave a tensor of shape .*expected \(b, t, d\)"):
        opt.loss(model(X), LABELS)


def transpose(kind: str, matrix: Tensor, shift: Tensor) -> nn.Module:
    """x W^T + b by a module that stores W^T, (inputs, outputs)."""
    outputs, inputs = matrix.shape
    if kind == "convolution":
        conv = nn.ConvTranspose1d(inputs, outputs, 1)
        layer = Assembled(lambda m, x: m.conv(x.unsqueeze(2)).squeeze(2), conv=conv)
    elif kind == "registered":
        layer = Turned(inputs, outputs)
    else:
        layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)
    weight, bias = layer.parameters()
    weight.data, bias.data = matrix.T.clone().view(weight.shape), shift.clone()
    return layer


@pytest.mark.parametrize(
    ("recipe", "how"),
    cross(
        [ng.kfac],
        [ng.ekfac, ng.unitwise, ng.diagonal],
        product(["convolution", "registered", "transformers"], [None, SpectralProgress()]),
    ),
)
def test_a_matrix_stored_the_other_way_round_takes_the_same_steps(recipe: Any, how: tuple[str, Any]):
    kind, rule = how
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    layers = [transpose(kind, layer.weight.detach(), layer.bias.detach()) for layer in (usual[0], usual[2])]
    other = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    x, y = draw(8, 9) * torch.arange(1, 10), torch.arange(8) % 3
    for model in (usual, other):
        train(recipe(model, CE, estimate=EXACT, rule=rule), model, 6, x, y)
    assert_close(other(x).detach(), usual(x).detach(), 1e-10)


def test_a_matrix_stored_the_other_way_round_may_be_used_elsewhere_too():
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(m.own(x)[:, 0].tanh() @ m.own.matrix.T)

    torch.manual_seed(0)
    model = Assembled(run, own=Turned(4, 6), out=nn.Linear(4, 3)).double()
    opt = ng.kfac(model, CE)
    losses = train(opt, model, 8, X, LABELS)
    assert losses[-1] < losses[0]
    assert opt.state_report().failures == 0


class Product(Turned):
    """The same by a product that a graph tells of."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs) -> (b, outputs)."""
        return x @ self.matrix + self.shift


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal])
def test_a_state_from_before_a_kind_was_known_goes_on(recipe: Any):
    """The layer is read anew; its parameters' statistics were those of other blocks."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Product(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), X[:, 0]
    old = recipe(model, CE)
    train(old, model, 6, x, LABELS)
    state = old.state_dict()
    assert ["0.matrix"] in state["natgrad"]["blocks"].values()
    ng.layers.register(Product, **RULES[Turned])
    try:
        opt = recipe(model, CE)
        opt.load_state_dict(state)
        losses = train(opt, model, 4, x, LABELS)
    finally:
        del OWN_KINDS[Product]
    assert losses[-1] < losses[0]
    blocks = opt.state_dict()["natgrad"]["blocks"].values()
    assert sorted(map(tuple, blocks)) == [("0.matrix", "0.shift"), ("2.weight", "2.bias")]
