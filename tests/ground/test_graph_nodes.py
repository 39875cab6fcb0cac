"""What natgrad reads of torch's graph, which torch does not promise: operation by operation against what was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.graph_nodes import (
    CUTS,
    FLIPS,
    LINEAR,
    PRODUCTS,
    RESHAPES,
    SAME,
    VIEWS,
    adds_plainly,
    is_empty,
    kind_of,
    leaf_of,
    read_cut,
    read_dim,
    read_factor,
    read_index,
    read_order,
    read_output_shape,
    read_shape,
    read_tokens,
)


def leaf(*shape: int) -> Tensor:
    """A leaf that requires a gradient."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).requires_grad_()


def node_of(tensor: Tensor) -> Any:
    """The operation that a tensor came from."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn


W = leaf(4, 6)
STATED: dict[str, tuple[Callable[[Tensor], Tensor], frozenset[str]]] = {
    "T": (lambda w: w.T, FLIPS),
    "transpose": (lambda w: w.transpose(0, 1), FLIPS),
    "permute": (lambda w: w.permute(1, 0), FLIPS),
    "split": (lambda w: w.split(2)[0], CUTS),
    "split by sizes": (lambda w: w.split([1, 3])[0], CUTS),
    "slice": (lambda w: w[1:3], CUTS & VIEWS),
    "select": (lambda w: w[1], VIEWS - RESHAPES),
    "view": (lambda w: w.view(24), VIEWS & RESHAPES & SAME),
    "unsqueeze": (lambda w: w.unsqueeze(0), VIEWS & RESHAPES),
    "squeeze": (lambda w: w.unsqueeze(0).squeeze(0), VIEWS & RESHAPES),
    "expand": (lambda w: w.expand(3, 4, 6), SAME),
    "clone": (lambda w: w.clone(), SAME & RESHAPES),
    "cast": (lambda w: w.double(), SAME & RESHAPES),
    "sum": (lambda w: w.sum(0), LINEAR),
    "plus": (lambda w: w + 1, LINEAR),
    "minus": (lambda w: 1 - w, LINEAR),
    "index": (lambda w: w[torch.tensor([0, 2])], LINEAR),
    "gather": (lambda w: w.gather(1, torch.zeros(4, 1, dtype=torch.long)), LINEAR),
    "cat": (lambda w: torch.cat([w, w]), LINEAR),
    "stack": (lambda w: torch.stack([w, w]), LINEAR),
    "masked fill": (lambda w: w.masked_fill(torch.ones(4, 6) > 0, 0.0), LINEAR),
    "pad": (lambda w: functional.pad(w, (1, 1)), LINEAR),
    "mean": (lambda w: w.mean(), LINEAR),
    "times": (lambda w: w * w.detach(), PRODUCTS),
    "over": (lambda w: w / 2, PRODUCTS),
    "mm": (lambda w: w @ torch.ones(6, 2), PRODUCTS),
    "mv": (lambda w: w @ torch.ones(6), PRODUCTS),
    "bmm": (lambda w: torch.bmm(w.view(2, 2, 6), torch.ones(2, 6, 3)), PRODUCTS),
}


@pytest.mark.parametrize("name", STATED)
def test_operations_are_of_the_kind_that_they_are(name: str) -> None:
    make, kinds = STATED[name]
    kind = kind_of(node_of(make(W)))
    assert kind in kinds
    assert kind in LINEAR | PRODUCTS


@pytest.mark.parametrize("make", [torch.tanh, torch.exp, lambda w: w.softmax(0), lambda w: w.clamp(min=0)])
def test_what_is_not_linear_is_none_of_these(make: Callable[[Tensor], Tensor]) -> None:
    assert kind_of(node_of(make(W))) not in LINEAR | PRODUCTS


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (lambda x: x.transpose(0, -1), (2, 1, 0)),
        (lambda x: x.transpose(-2, -1), (0, 2, 1)),
        (lambda x: x.permute(2, 0, 1), (2, 0, 1)),
        (lambda x: x.permute(-1, 0, -2), (2, 0, 1)),
        (lambda x: x.mT, (0, 2, 1)),
    ],
)
def test_an_order_is_read(make: Callable[[Tensor], Tensor], order: tuple[int, ...]) -> None:
    x = leaf(2, 3, 4)
    assert tuple(read_order(node_of(make(x)), 3)) == order
    assert make(x).shape == tuple(x.shape[i] for i in order)
    assert read_order(node_of(W.T), 2) == [1, 0]


def test_dimensions_and_places_are_read() -> None:
    x = leaf(3, 4, 5)
    assert [read_dim(node_of(x.select(dim, 0)), 3) for dim in (0, 1, -1)] == [0, 1, 2]
    assert [read_index(node_of(x[i]), 3) for i in (0, 2, -1, -3)] == [0, 2, 2, 0]
    assert [read_dim(node_of(x.unsqueeze(dim)), 4) for dim in (0, -1, 1)] == [0, 3, 1]
    assert [read_dim(node_of(x.unbind(dim)[0]), 3) for dim in (0, -2)] == [0, 1]
    assert read_shape(node_of(x.view(12, 5))) == (3, 4, 5)
    assert read_shape(node_of(x.sum(0))) == read_shape(None) == ()


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (lambda w: w.split(3), [(0, 3), (3, 6), (6, 7)]),
        (lambda w: w.split([2, 5]), [(0, 2), (2, 7)]),
        (lambda w: w.chunk(2), [(0, 4), (4, 7)]),
        (lambda w: (w[1:4],), [(1, 4)]),
        (lambda w: (w[-3:],), [(4, 7)]),
        (lambda w: (w[:-2],), [(0, 5)]),
        (lambda w: (w[::2],), [None]),
    ],
)
def test_cuts_are_read(make: Callable[[Tensor], tuple[Tensor, ...]], pieces: list[tuple[int, int] | None]) -> None:
    w = leaf(7, 2)
    parts = make(w)
    assert [read_cut(node_of(part), part.output_nr, 7) for part in parts] == pieces
    for part, piece in zip(parts, pieces, strict=True):
        assert piece is None or torch.equal(part, w[slice(*piece)])
        assert read_dim(node_of(part), 2) == 0


def test_factors_are_read_until_they_are_written_over() -> None:
    a, b, c = leaf(2, 3), leaf(3, 4), leaf(4)
    assert torch.equal(read_factor(node_of(a @ b), 0), a)
    assert torch.equal(read_factor(node_of(a @ b), 1), b)
    added = torch.addmm(c, a, b)
    assert torch.equal(read_factor(node_of(added), 1), a)
    assert torch.equal(read_factor(node_of(added), 2), b)
    x, y = leaf(5, 2, 3), leaf(5, 3, 4)
    assert torch.equal(read_factor(node_of(torch.bmm(x, y)), 0), x)
    both = torch.baddbmm(leaf(5, 2, 4), x, y)
    assert torch.equal(read_factor(node_of(both), 2), y)
    assert read_factor(node_of(a * 2.0), 0) is None  # nobody asks for the derivative by a number
    other = torch.ones(2, 3)
    product = a * other
    assert torch.equal(read_factor(node_of(product), 1), other)
    other.add_(1)
    assert read_factor(node_of(product), 1) is None


def test_a_sum_tells_the_factor_of_its_second_part() -> None:
    a, b = leaf(3), leaf(3)
    assert [adds_plainly(node_of(a + b), place) for place in (0, 1)] == [True, True]
    assert [adds_plainly(node_of(torch.add(a, b, alpha=2)), place) for place in (0, 1)] == [True, False]
    assert not adds_plainly(node_of(a * b), 0)


def test_look_ups_are_read() -> None:
    table, tokens = leaf(5, 2), torch.tensor([[0, 3, 1]])
    for padding in (None, 3):
        found = read_tokens(node_of(functional.embedding(tokens, table, padding_idx=padding)), len(table))
        assert found is not None
        assert torch.equal(found[0], tokens)
        assert found[1] == padding
    assert read_tokens(node_of(functional.embedding(tokens, table, scale_grad_by_freq=True)), len(table)) is None
    for result in (
        table[tokens],
        table[tokens - len(table)],
        table[tokens, :],
        table.index_select(0, tokens.flatten()),
    ):
        found = read_tokens(node_of(result), len(table))
        assert found is not None
        assert torch.equal(found[0].flatten(), tokens.flatten())
        assert found[1] is None
    columns, mask = torch.tensor([0, 0]), torch.ones(len(table), dtype=torch.bool)
    for result in (table[:, columns], table[columns, columns], table.index_select(1, columns), table[mask]):
        assert read_tokens(node_of(result), len(table)) is None


def test_the_shape_of_a_result_is_read() -> None:
    shapes = [read_output_shape(node_of(result)) for result in (W.view(2, 12), W[None], W.T.reshape(1, 24), W @ W.T)]
    assert shapes == [(2, 12), (1, 4, 6), (1, 24), (4, 4)]


def test_leaves_and_empty_results_are_told() -> None:
    w = leaf(3, 2)
    node = node_of(w * 2)
    assert leaf_of(node) is None
    assert leaf_of(node.next_functions[0][0]) is w
    assert is_empty(node_of((w[:0] * 2).sum(1)).next_functions[0][0])
    assert not is_empty(node)
