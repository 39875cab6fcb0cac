"""Parameters that a model adds or multiplies entry by entry: their examples' own gradients from one backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from natgrad.ground.graph_nodes import VIEWS, adds_plainly, kind_of, read_factor
from natgrad.ground.typed_torch import measure_norm
from natgrad.ground.whole_tensors import any_split
from natgrad.layers.examples import Examples


@dataclass(frozen=True)
class Use:
    """A sum or a product that a parameter is in, spread over the examples: position embeddings, layer scales."""

    edge: GradientEdge  # where the derivative of what comes out arrives
    other: Tensor | None  # what the parameter is multiplied by; None: it is added
    path: tuple[Any, ...] = ()  # the views between, the parameter's own first: `positions[:length]` is a slice of it


def square_elementwise(
    outputs: Tensor,
    params: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    examples: Examples,
    plain: Sequence[Sequence[Tensor | None]],
) -> list[Tensor | None]:
    """sum over cotangents and examples of the example's squared gradient, of parameters that are added or multiplied.

    One backward pass per cotangent, with a number n_i on every example i. Where the examples run along the first
    dimension of what comes out, row i is n_i g_i, and then sum_i (n_i g_i) / n_i is the gradient: that is asked.

    Args:
        outputs: (R, m), with a graph, which is kept.
        params: Leaves of it.
        cotangents: (R, m) each.
        examples: Which entries of them are whose.
        plain: Per cotangent, the gradients of the parameters.

    Returns:
        Tensors, at least in float32; None for a parameter that is used in another way, or whose examples are not told
        apart.
    """
    uses = [None] * len(params) if any_split(params) else find_uses(outputs.grad_fn, params)
    known = [i for i, each in enumerate(uses) if each]
    squares: list[Tensor | None] = [None] * len(params)
    if not known or not cotangents:
        return squares
    generator = torch.Generator(outputs.device).manual_seed(0)
    numbers = 1 + torch.rand(examples.count, generator=generator, device=outputs.device, dtype=outputs.dtype)
    edges = [use.edge for i in known for use in uses[i] or ()]
    paths = {i: each[0].path for i in known if (each := uses[i])}
    edges += [GradientEdge(path[-1], 0) for path in paths.values() if path]  # for the shapes of views
    sums: dict[int, Tensor | None] = {i: torch.zeros_like(params[i], dtype=widest(params[i])) for i in known}
    for cotangent, gradients in zip(cotangents, plain, strict=True):
        scaled = examples.scale(cotangent, numbers)
        arrived = iter(torch.autograd.grad(outputs, edges, scaled, retain_graph=True, allow_unused=True))
        parts = {i: [(use, next(arrived)) for use in uses[i] or ()] for i in known}
        views = {i: next(arrived) if path else params[i] for i, path in paths.items()}
        for i in known:
            view, total, before = views[i], gradients[i], sums[i]
            rows = None if view is None else sum_rows(view, parts[i], numbers)
            sums[i] = None
            if rows is not None and total is not None and before is not None:
                gap = widen_views(rows.sum(0), paths[i]) - total.to(rows)
                if measure_norm(gap) <= torch.finfo(total.dtype).eps ** 0.5 * measure_norm(rows):
                    sums[i] = before + widen_views(rows.square().sum(0), paths[i])
    return [sums.get(i) for i in range(len(params))]


def find_uses(root: Node | None, params: Sequence[Tensor]) -> list[list[Use] | None]:
    """Where each parameter is added or multiplied; None for one that the graph uses in another way, or not at all."""
    parents = defaultdict[Any, list[tuple[Any, int]]](list)
    stack = [] if root is None else [root]
    visited = set(stack)
    while stack:
        node = stack.pop()
        for place, (child, _) in enumerate(node.next_functions):
            if child is not None:
                parents[child].append((node, place))
                if child not in visited:
                    visited.add(child)
                    stack.append(child)

    def collect(node: Any, path: tuple[Any, ...]) -> Iterator[Use | None]:
        for parent, place in parents[node]:
            if kind_of(parent) in VIEWS:
                yield from collect(parent, (*path, parent))
            else:
                yield use_of(parent, place, path)

    all_uses = list[list[Use] | None]()
    for p in params:
        uses = list(collect(get_gradient_edge(p).node, ())) if p.requires_grad else []
        clear = [use for use in uses if use is not None]
        alike = len(clear) == len(uses) and len({use.path for use in clear}) == 1  # several views might overlap
        all_uses.append(clear if alike else None)
    return all_uses


def use_of(node: Any, place: int, path: tuple[Any, ...] = ()) -> Use | None:
    """The sum or product that a node forms with its argument at this place; None for anything else."""
    if kind_of(node) == "Expand" or adds_plainly(node, place):
        return Use(GradientEdge(node, 0), None, path)
    other = read_factor(node, 1 - place) if kind_of(node) == "Mul" else None
    return None if other is None else Use(GradientEdge(node, 0), other, path)


def widen_views(numbers: Tensor, path: Sequence[Any]) -> Tensor:
    """Numbers of a view's entries at the places of the parameter that it is a view of, 0 elsewhere."""
    for view in reversed(path):
        numbers = view(numbers)  # the derivative of a view puts each entry back
    return numbers


def sum_rows(p: Tensor, parts: Sequence[tuple[Use, Tensor | None]], numbers: Tensor) -> Tensor | None:
    """Each example's gradient, (b, *p.shape), from what arrived with its number on it; None if p has no such rows."""
    total: Tensor | None = None
    for use, delta in parts:
        if delta is None:
            continue
        value = delta if use.other is None else delta * use.other
        lead = value.dim() - p.dim()
        if lead < 0 or not value.dim() or len(value) != len(numbers) or (lead == 0 and len(p) != 1):
            return None
        spread = [lead + i for i, size in enumerate(p.shape) if size == 1]
        dims = [i for i in (*range(lead), *spread) if i > 0]
        rows = (value.sum(dims) if dims else value).to(widest(p)).reshape(len(numbers), *p.shape)
        total = rows if total is None else total + rows
    return None if total is None else total / numbers.to(total).view(-1, *[1] * p.dim())


def widest(p: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(p.dtype, torch.float32)
