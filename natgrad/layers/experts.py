"""Batched matrices, one per expert: (experts, rows, columns) parameters in `torch.bmm`, `@`, `einsum`, or one by one.

Every expert is a group with a block of its own. Which examples its rows come from is not known: tokens were sorted by
expert. Rows that are zero, or where no derivative arrives, are empty slots and count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional

from natgrad.ground.graph_nodes import FLIPS, SAME, kind_of, read_dim, read_factor, read_index, read_order
from natgrad.ground.pure import version_of
from natgrad.layers.kinds import Layer
from natgrad.layers.moments import Seen
from natgrad.layers.taps import MatrixProduct

EXPERTS, ROWS, COLUMNS, NEW = "e", "r", "c", "1"
MOVES = FLIPS | {"Unsqueeze", "Select", "Unbind"}


@dataclass(frozen=True)
class ExpertSource:
    """What an edge of the graph carries: all experts' matrices, or one's."""

    layer: Any
    order: str  # what its dimensions are: experts, rows, columns, or new ones of size 1
    expert: int | None = None  # the one that was taken; None for all

    @property
    def matrix(self) -> str:
        """The order without dimensions of size 1."""
        return self.order.replace(NEW, "")


@dataclass(frozen=True)
class ExpertProduct(MatrixProduct):
    """y = W_e x for the rows x of every expert, (experts, n, d), or of one, (n, d)."""

    loose: bool = True  # which example a row comes from is not known
    expert: int | None = None  # the one; None for all


def find_experts(child: Node, number: int, leaves: Mapping[Node, Layer]) -> ExpertSource | None:
    """The experts' matrices behind an edge, through transposes, casts and the choice of one; None for anything else."""
    node: Any = child
    chain = list[tuple[Node, int]]()
    while node not in leaves:
        if node is None or kind_of(node) not in SAME | MOVES:
            return None
        chain.append((node, number))
        node, number = node.next_functions[0]
    source: ExpertSource | None = ExpertSource(leaves[node], EXPERTS + ROWS + COLUMNS)
    for step, output in reversed(chain):
        if source is not None and kind_of(step) in MOVES:
            source = move_source(step, output, source)
    return source


def move_source(node: Node, output: int, source: ExpertSource) -> ExpertSource | None:
    """What a node makes of the matrices: dimensions in another order, a new one, one expert; None for other cuts."""
    kind, order = kind_of(node), source.order
    if kind in FLIPS:
        return replace(source, order="".join(order[dim] for dim in read_order(node, len(order))))
    if kind == "Unsqueeze":
        at = read_dim(node, len(order) + 1)
        return replace(source, order=order[:at] + NEW + order[at:])
    dim = read_dim(node, len(order))
    if order[dim] != EXPERTS:
        return None
    expert = output if kind == "Unbind" else read_index(node, source.layer.layout.groups)
    return replace(source, order=order[:dim] + order[dim + 1 :], expert=expert)


def expert_product(node: Any, place: int, source: ExpertSource) -> ExpertProduct | None:
    """The product that a node forms with experts' matrices as one of its arguments; None if it forms none."""
    kind, batched = kind_of(node), source.expert is None
    first = {"Bmm": 0, "Baddbmm": 1} if batched else {"Mm": 0, "Addmm": 1}
    if kind not in first or place < first[kind]:
        return None
    second = place > first[kind]
    other = read_factor(node, first[kind] + (not second))
    if other is None:
        return None
    order = source.matrix.removeprefix(EXPERTS)
    layout = source.layer.layout
    shape = (layout.outputs, layout.inputs) if order == ROWS + COLUMNS else (layout.inputs, layout.outputs)
    if len(order) != 2 or EXPERTS in order or (batched and len(other) != layout.groups):
        return None
    if other.shape[-1 if second else -2] != shape[0 if second else 1]:  # several dimensions were made one
        return None
    # x @ W^T and W @ x are the same map; x @ W and W^T @ x the other
    turned = second == (order == ROWS + COLUMNS)
    how = {"turned": turned, "columns": not second, "expert": source.expert}
    return ExpertProduct(source.layer, other, GradientEdge(node, 0), other.dtype, version_of(other), **how)


def collect_experts(layer: Layer, calls: Sequence[tuple[Any, list[Tensor]]], dtype: torch.dtype) -> Seen | None:
    """All products with one parameter as one pass; None where they are of several kinds."""
    if len({(call.turned, call.expert is None) for call, _ in calls}) > 1:
        return None
    count = layer.layout.groups
    inputs = stack_rows([(call, call.inputs.to(dtype)) for call, _ in calls], count)
    columns = zip(*(deltas for _, deltas in calls), strict=True)
    rows = [stack_rows([(call, d) for (call, _), d in zip(calls, ds, strict=True)], count) for ds in columns]
    used = (inputs != 0).any(-1) & torch.stack([(delta != 0).any(-1) for delta in rows]).any(0)  # (experts, n)
    mask = used.unsqueeze(-1).to(dtype)
    a, deltas = by_group(inputs * mask), [by_group(delta * mask) for delta in rows]
    how: dict[str, Any] = {"counts": used.sum(1).to(dtype), "pooled": True}
    if not calls[0][0].turned:
        return Seen(layer, a, deltas, **how)
    # the inputs meet the rows of the matrix and the derivatives its columns; cotangents are more examples
    return Seen(layer, torch.cat(deltas), [a.repeat(len(deltas), 1, 1, 1)], cotangents=len(deltas), **how)


def stack_rows(parts: Sequence[tuple[ExpertProduct, Tensor]], count: int) -> Tensor:
    """Inputs or derivatives of all products, (experts, n, d), filled up with zeros where experts have fewer rows."""
    laid = [(call.expert, part.mT if call.columns else part) for call, part in parts]
    if laid[0][0] is None:
        return torch.cat([part for _, part in laid], dim=1)
    empty = laid[0][1][:0]
    rows = [torch.cat([empty, *(part for expert, part in laid if expert == e)]) for e in range(count)]
    most = max(len(part) for part in rows)
    return torch.stack([functional.pad(part, (0, 0, 0, most - len(part))) for part in rows])


def by_group(rows: Tensor) -> Tensor:
    """(experts, n, d) -> (1, n, experts, d): one example's positions."""
    return rows.transpose(0, 1).unsqueeze(0)
