"""Structures of the score metric: taken from the products with every matrix in the score's own forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from energies import VECTORS, boltzmann, energy_net, two_layers, vector_case, weighted_states
from models import assert_close, build_seeded, draw, tensor
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import Arranged
from natgrad.testing import check_structure

EXACT: Any = {"estimate": ng.ExactLabels()}


def layer_block(matrix: Tensor, params: Any, *names: str) -> Tensor:
    """G's block of a layer, its entries ordered as in the layer's matrix (outputs, inputs + 1)."""
    space = ng.Space(params)
    entries = torch.arange(space.size)
    views = [entries[space.blocks[n].start : space.blocks[n].stop].view(space.blocks[n].shape) for n in names]
    place = torch.cat([views[0], views[1].unsqueeze(1)], dim=1).reshape(-1) if len(views) > 1 else views[0].reshape(-1)
    return matrix[place][:, place]


LAYERS = (("0.weight", "0.bias"), ("2.weight", "2.bias"), ("4.weight", "4.bias"))


def part(operator: Any, names: tuple[str, ...]) -> Tensor:
    assert isinstance(operator, Arranged)
    return next(found.dense() for layout, found in operator.parts if layout.names == names)


def test_diagonal_and_units_are_the_metrics_own_entries():
    net, x = energy_net(), draw(6, 3)
    params, metric = ng.trainable(net), ng.score_metric(net)
    dense = metric.at(params, x).dense()
    diagonal, _ = ng.Diagonal(**EXACT).update(None, metric, params, x)
    assert_close(diagonal.dense(), torch.diag(dense.diagonal()))
    units, _ = ng.UnitWise(**EXACT).update(None, metric, params, x)
    for names in LAYERS:
        block, side = layer_block(dense, params, *names), params[names[0]].shape[1] + 1
        same = torch.block_diag(*torch.ones(len(block) // side, side, side, dtype=block.dtype))
        assert_close(part(units, names), block * same)


def factors(net: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """S and A of every layer by their definition: the Kronecker product with the partial traces of the sum of two.

    g_bi, the gradient of score i of example b in a layer's matrix, is delta a^T from the forward pass plus d e^T from
    the backward pass, and both parts have a product of second moments of their own.
    """
    activations: list[Any] = [m for m in net if not isinstance(m, nn.Linear)]  # type: ignore[union-attr]
    linear: list[Any] = [m for m in net if isinstance(m, nn.Linear)]  # type: ignore[union-attr]
    shifts = [torch.zeros(len(x), m.out_features, dtype=x.dtype, requires_grad=True) for m in linear]
    grad: Any = torch.autograd.grad
    value, inputs, point = x.clone().requires_grad_(), [], []
    point = value
    for i, (layer, shift) in enumerate(zip(linear, shifts, strict=True)):
        inputs.append(torch.cat([value, torch.ones(len(x), 1, dtype=x.dtype)], 1))
        value = layer(value) + shift
        value = activations[i](value) if i < len(activations) else value
    arrived = grad(-value.sum(), [*shifts, point], create_graph=True)
    scores, slopes = arrived[-1], arrived[:-1]
    found = {}
    for n, (layer, a, shift, d) in enumerate(zip(linear, inputs, shifts, slopes, strict=True)):
        straight, turned = [], []
        for i in range(scores.shape[1]):
            (delta,) = grad(scores[:, i].sum(), shift, retain_graph=True, allow_unused=True, materialize_grads=True)
            straight.append(delta)
            turned.append(back(net, x, n, i))
        s1, a1 = torch.stack([t.mT @ t for t in straight]).sum(0), a.mT @ a / len(x)
        padded = [torch.nn.functional.pad(e, (0, 1)) for e in turned]
        s2, a2 = d.mT @ d, torch.stack([e.mT @ e for e in padded]).sum(0) / len(x)
        left, right = s1 * a1.trace() + s2 * a2.trace(), a1 * s1.trace() + a2 * s2.trace()
        found[f"{2 * n}.weight"] = ((left / left.trace()).detach(), (right / len(x)).detach())
        assert layer.weight.shape == (len(left), len(right) - 1)
    return found


def back(net: Any, x: Tensor, n: int, i: int) -> Tensor:
    """d score_i / d (what the n-th linear layer sends back), (b, inputs): the Jacobian of its input in x_i."""
    linear = [m for m in net if isinstance(m, nn.Linear)]

    def up_to(y: Tensor) -> Tensor:
        for module in net:
            if module is linear[n]:
                return y
            y = module(y)
        return y

    unit = torch.zeros_like(x)
    unit[:, i] = 1
    return torch.func.jvp(up_to, (x,), (unit,))[1]


def test_kronecker_factors_by_enumeration():
    net, x = energy_net(), draw(6, 3)
    params, metric = ng.trainable(net), ng.score_metric(net)
    found, _ = ng.Kronecker(**EXACT).update(None, metric, params, x)
    expected = factors(net, x)
    for names in LAYERS:
        assert_close(part(found, names), torch.kron(*expected[names[0]]), rtol=1e-10)


def test_kronecker_is_exact_where_one_side_is_constant():
    """The last layer meets its weights in the backward pass alone, with a constant: any number of examples."""
    net, x = energy_net(), draw(6, 3)
    params, metric = ng.trainable(net), ng.score_metric(net)
    dense = metric.at(params, x).dense()
    for structure in (ng.Kronecker(**EXACT), ng.EigenKronecker(**EXACT)):
        found, _ = structure.update(None, metric, params, x)
        assert_close(part(found, LAYERS[-1]), layer_block(dense, params, *LAYERS[-1]), rtol=1e-10)


@pytest.mark.parametrize("structure", [ng.Diagonal, ng.Kronecker], ids=lambda s: s.__name__)
def test_random_slices_are_unbiased(structure):
    net, x = energy_net(), draw(6, 3)
    params, metric = ng.trainable(net), ng.score_metric(net)
    expected = structure(**EXACT).update(None, metric, params, x)[0].trace()
    draws = [structure(estimate=ng.Sampled(1), seed=i).update(None, metric, params, x)[0].trace() for i in range(25)]
    found = torch.stack(draws)
    assert abs(found.mean() - expected) < 4 * found.std() / len(found) ** 0.5


def test_matrices_of_a_function_are_found_too():
    """W enters in products; V, which is used squared, is not known to be a matrix: it keeps the metric's diagonal."""
    params, x = vector_case("score_matching_n3")

    def square_second(given: Any, one: Tensor) -> Tensor:
        return two_layers({"W": given["W"], "V": given["V"].square()}, one)

    metric = ng.score_metric(square_second)
    found, memory = ng.UnitWise(**EXACT).update(None, metric, params, x)
    dense = metric.at(params, x).dense()
    block = dense[:9, :9] * torch.block_diag(*torch.ones(3, 3, 3, dtype=dense.dtype))
    assert_close(part(found, ("W",)), block)
    assert_close(part(found, ("V",)), torch.diag(dense.diagonal()[9:]))
    assert memory["held"] == ["W"]


def test_products_whose_rows_are_not_examples_are_left_to_the_diagonal():
    """Two rows per example: which belongs to whom cannot be told."""

    def pairs(given: Any, one: Tensor) -> Tensor:
        return -torch.tanh(one.view(2, 2) @ given["W"].mT).square().sum()

    params, x = {"W": draw(3, 2).requires_grad_()}, draw(5, 4, seed=1)
    metric = ng.score_metric(pairs)
    found, memory = ng.UnitWise(**EXACT).update(None, metric, params, x)
    assert memory["held"] == []
    assert_close(found.dense(), torch.diag(metric.at(params, x).dense().diagonal()))


CASES = {
    "score, function": lambda: (ng.score_metric(two_layers), *vector_case("score_matching_n3")),
    "score, module": lambda: (lambda n: (ng.score_metric(n), ng.trainable(n), draw(5, 3)))(energy_net()),
    "score, chunks": lambda: (ng.score_metric(two_layers, chunk_size=2), *vector_case("score_matching_n3")),
    "ratio": lambda: (
        ng.ratio_metric(boltzmann),
        {"xi": tensor(VECTORS["ratio_matching"]["inputs"]["xi"])},
        weighted_states(),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [False, True])
def test_blocks_are_the_metrics_own(name, rows):
    metric, params, x = CASES[name]()
    found, _ = ng.Blocks(rows=rows).update(None, metric, params, x)
    dense, space = metric.at(params, x).dense(), ng.Space(params)
    mask = torch.block_diag(
        *(torch.ones(b.size // n, b.size // n) for b in space.blocks.values() for n in [b.shape[0] if rows else 1]
          for _ in range(n))
    )  # fmt: skip
    assert_close(found.dense(), dense * mask, rtol=1e-11)


def mask_units(params: Any, groups: Any) -> Tensor:
    """1 where two entries belong to the same unit of a group, or to the same tensor of no group."""
    space, labels = ng.Space(params), {}
    for count, (name, p) in enumerate(params.items()):
        group = next((number for number, group in enumerate(groups) if name in group), None)
        unit = torch.zeros(p.shape)
        if group is not None:
            dim = groups[group][name]
            unit = torch.arange(p.shape[dim]).view([-1 if d == dim else 1 for d in range(p.dim())]).expand(p.shape)
        labels[name] = 1000.0 * (len(params) + group if group is not None else count) + unit
    flat = space.flatten(labels)
    return (flat.unsqueeze(0) == flat.unsqueeze(1)).double()


def convolutional_case() -> Any:
    net = build_seeded(lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 3), nn.Flatten())).double()
    return ng.fisher(net, ng.Categorical()), ng.trainable(net), draw(5, 4).unsqueeze(1)


UNITS: dict[str, Any] = {
    "features": (lambda: (ng.score_metric(two_layers), *vector_case("score_matching_n3")), ({"W": 0, "V": 1},)),
    "hidden units": (convolutional_case, ({"0.weight": 0, "0.bias": 0, "2.weight": 1},)),
}


@pytest.mark.parametrize("name", UNITS)
def test_blocks_of_units_are_the_metrics_own(name):
    (metric, params, x), units = UNITS[name][0](), UNITS[name][1]
    dense, mask = metric.at(params, x).dense(), mask_units(params, units)
    found, memory = ng.Blocks(0.5, units=units).update(None, metric, params, x)
    assert mask.sum() < mask.numel()
    assert_close(found.dense(), dense * mask, rtol=1e-11)
    vector = draw(len(dense))
    assert_close(found.mv(vector), (dense * mask) @ vector, rtol=1e-11)
    inverse = found.inverse(0.1)
    assert inverse is not None
    damped = dense * mask + 0.1 * torch.eye(len(dense), dtype=dense.dtype)
    assert_close(inverse.mv(vector), torch.linalg.solve(damped, vector), rtol=1e-8)
    again, _ = ng.Blocks(0.5, units=units).update(memory, metric, params, 2 * x)
    assert_close(again.dense(), (0.5 * dense + metric.at(params, 2 * x).dense()) / 1.5 * mask, rtol=1e-11)


def test_blocks_without_a_root_and_with_a_memory():
    def divergence(given: Any, other: Any, inputs: Tensor) -> Tensor:
        return 0.5 * ((given["W"] - other["W"]) @ inputs.mT).square().sum() + (given["W"] - other["W"]).sum() ** 2

    params, metric = {"W": draw(2, 3).requires_grad_()}, ng.divergence(divergence)
    found, memory = ng.Blocks(decay=0.5, rows=True).update(None, metric, params, draw(4, 3))
    again, _ = ng.Blocks(decay=0.5, rows=True).update(memory, metric, params, 2 * draw(4, 3))
    first, second = (metric.at(params, s * draw(4, 3)).dense() for s in (1, 2))
    mask = torch.block_diag(*torch.ones(2, 3, 3, dtype=first.dtype))
    assert_close(found.dense(), first * mask, rtol=1e-11)
    assert_close(again.dense(), (0.5 * first + second) / 1.5 * mask, rtol=1e-11)


def test_blocks_are_a_sound_structure():
    params, x = vector_case("score_matching_n3")
    check_structure(ng.Blocks(decay=0.5), ng.score_metric(two_layers), params, x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decay": 1.0}, ("decay", "[0, 1)")),
        ({"largest": 8}, ("'W'", "9 rows", "largest=8")),
        ({"units": ({"W": 0}, {"W": 1})}, ("units", "one of them")),
        ({"units": ({"U": 0},)}, ("'U'", "'W': (3, 3)", "a dimension")),
        ({"units": {"W": 2}}, ("'W'", "dimension 2")),
    ],
)
def test_blocks_say_what_is_wrong(options, words):
    params, x = vector_case("score_matching_n3")
    with pytest.raises(ValueError) as caught:
        ng.Blocks(**options).update(None, ng.score_metric(two_layers), params, x)
    assert all(word in str(caught.value) for word in words), str(caught.value)


STRUCTURES = [ng.UnitWise(0.9), ng.EigenKronecker(0.9), ng.Blocks(0.9)]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
def test_an_optimizer_matches_scores_with_every_structure(structure):
    net, x = energy_net(), 0.5 * draw(60, 3) + 1
    params, choices = ng.trainable(net), {"structure": structure, "damping": 0.1, "rule": ng.TrustRegion(0.1)}
    opt = ng.NaturalGradient(net, ng.score_metric(net), **choices)

    def step(optimizer: Any, model: nn.Module) -> float:
        optimizer.zero_grad()
        loss = ng.score_matching_loss(model, ng.trainable(model), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [step(opt, net) for _ in range(15)]
    assert losses[-1] < losses[0] - 0.1
    assert {row.structure for row in opt.report()[:-1]} == {type(structure).__name__}  # the last bias has no gradient
    other = copy.deepcopy(net)
    later = ng.NaturalGradient(other, ng.score_metric(other), **choices)
    later.load_state_dict(opt.state_dict())
    step(opt, net)
    step(later, other)
    for name, p in params.items():
        assert torch.equal(p, ng.trainable(other)[name])
