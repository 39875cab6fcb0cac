"""Functions of one number with their derivatives, and chains of layers with theirs, beside torch's own derivatives."""

from __future__ import annotations

import pytest
import torch
from models import assert_close, build_seeded, draw
from torch import Tensor, nn

from natgrad.ground.chains import ACTIVATIONS, read_chain
from natgrad.ground.jets import SMOOTH, Derivatives, Function, differentiate_elementwise

PARTS: dict[str, Function] = {kind.__name__: kind() for kind in ACTIVATIONS}
PARTS |= {"Softplus, beta": nn.Softplus(beta=2.5, threshold=3.0), "tanh GELU": nn.GELU("tanh")}


def differentiate_in_turn(function: Function, z: Tensor, order: int) -> list[Tensor]:
    """f, f', ... by one backward pass after the other."""
    point = z.clone().requires_grad_()
    values = [function(point)]
    for _ in range(order):
        value = values[-1].sum()
        values.append(
            torch.autograd.grad(value, point, create_graph=True)[0] if value.requires_grad else torch.zeros_like(z)
        )
    return [value.detach() for value in values]


@pytest.mark.parametrize("name", PARTS)
def test_derivatives_of_activations_are_those_of_torch(name: str):
    z = 2 * draw(40, 3)
    expected = differentiate_in_turn(PARTS[name], z, 3)
    for values in (
        differentiate_elementwise(PARTS[name], z, 3),
        torch.func.vmap(lambda row: tuple(differentiate_elementwise(PARTS[name], row, 3)))(z),
    ):
        for value, other in zip(values, expected, strict=True):
            assert_close(value, other, scale=1.0)


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_of_torch_functions_are_those_of_torch(name: str):
    z = draw(40, 3).abs() + 0.2
    function: Function = nn.functional.silu if name == "silu" else getattr(torch, name)
    for value, other in zip(SMOOTH[name](z), differentiate_in_turn(function, z, 2), strict=False):
        assert_close(value, other, rtol=1e-12)


def test_a_second_derivative_keeps_its_graph():
    z, weight = draw(5, 3), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for part in (nn.Softplus(), nn.GELU()):
        bend = differentiate_elementwise(part, weight * z, 2)[2].sum()
        third = differentiate_in_turn(part, 0.7 * z, 3)[3]
        assert_close(torch.autograd.grad(bend, weight)[0], (third * z).sum())


@pytest.mark.parametrize("wish", [((), ((0, 1, 2),)), ((1,), ((0, 2),)), ((0, 1, 2), ()), ((2,), ((0,), (1, 2)))])
@pytest.mark.parametrize("kind", [nn.Tanh, nn.SiLU, nn.Mish])
def test_values_and_rows_of_a_chain_are_those_of_nested_derivatives(wish, kind):
    net = build_seeded(lambda: nn.Sequential(nn.Linear(3, 5), kind(), nn.Linear(5, 4), kind(), nn.Linear(4, 2)))
    x, wanted = draw(4, 3), Derivatives(*wish)
    params = {name: p.detach() for name, p in net.named_parameters()}

    def stack_derivatives(chosen: dict[str, Tensor], point: Tensor) -> Tensor:
        """Value, first derivatives and sums of second ones at a point, (T, m)."""

        def evaluate(y: Tensor) -> Tensor:
            return torch.func.functional_call(net, chosen, (y,))

        first, second = torch.func.jacrev(evaluate)(point), torch.func.hessian(evaluate)(point)
        sums = [second[:, list(group), list(group)].sum(1) for group in wanted.second]
        return torch.stack([evaluate(point), *first.mT[list(wanted.first)], *sums])

    chain = read_chain(net)
    assert chain is not None
    jets = chain.run(params, x, wanted)
    expected = torch.stack([stack_derivatives(params, point) for point in x], 1)
    assert_close(jets.outputs, expected, scale=1.0)
    cotangents = draw(1, expected.numel()).view(1, *expected.shape)
    rows = {
        f"{r.layer.weight}": (r.deltas.unsqueeze(-1) * r.inputs.unsqueeze(-2)).sum(1)
        for r in jets.pull_back(cotangents)
    }
    for place, point in enumerate(x):
        slopes = torch.func.jacrev(stack_derivatives)(params, point)
        for name, row in rows.items():
            wide = torch.einsum("tm,tmoi->oi", cotangents[0, :, place], slopes[name])
            assert_close(row[0, place], wide, rtol=1e-10, scale=1.0)


class Perceptron(nn.Sequential):
    """A chain that makes its own layers."""

    def __init__(self, *widths: int) -> None:
        super().__init__(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:]))


class Residual(Perceptron):
    """Another function of the same layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_sequence_of_a_class_of_its_own_is_a_chain_unless_it_computes_something_else():
    assert read_chain(Perceptron(2, 4, 2)) is not None
    assert read_chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Perceptron(2, 4, 2))) is not None
    assert read_chain(Residual(2, 4, 2)) is None
