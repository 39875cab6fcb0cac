"""Parameters that a model adds or multiplies entry by entry: their examples' own gradients from one backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from natgrad.ground.typed_torch import measure_norm
from natgrad.ground.whole_tensors import any_split
from natgrad.layers.examples import Examples
from natgrad.layers.experts import kind_of


@dataclass(frozen=True)
class Use:
    """A sum or a product that a parameter is in, spread over the examples: position embeddings, layer scales.

    Args:
        edge: Where the derivative of what comes out arrives.
        other: What the parameter is multiplied by; None: it is added.
    """

    edge: GradientEdge
    other: Tensor | None


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
    found: list[Tensor | None] = [None] * len(params)
    if not known or not cotangents:
        return found
    generator = torch.Generator(outputs.device).manual_seed(0)
    numbers = 1 + torch.rand(examples.count, generator=generator, device=outputs.device, dtype=outputs.dtype)
    edges = [use.edge for i in known for use in uses[i] or ()]
    sums: dict[int, Tensor | None] = {i: torch.zeros_like(params[i], dtype=widest(params[i])) for i in known}
    for cotangent, gradients in zip(cotangents, plain, strict=True):
        scaled = examples.scale(cotangent, numbers)
        arrived = iter(torch.autograd.grad(outputs, edges, scaled, retain_graph=True, allow_unused=True))
        for i in known:
            parts = [(use, next(arrived)) for use in uses[i] or ()]
            rows = sum_rows(params[i], parts, numbers)
            total, before = gradients[i], sums[i]
            fits = rows is not None and total is not None and before is not None and adds_up(rows, total)
            sums[i] = before + rows.square().sum(0) if fits and before is not None and rows is not None else None
    return [sums.get(i) for i in range(len(params))]


def find_uses(root: Node | None, params: Sequence[Tensor]) -> list[list[Use] | None]:
    """Where each parameter is added or multiplied; None for one that the graph uses in another way, or not at all."""
    leaves = {get_gradient_edge(p).node: i for i, p in enumerate(params) if p.requires_grad}
    found, opaque = defaultdict[int, list[Use]](list), set[int]()
    stack = [] if root is None else [root]
    visited = set(stack)
    while stack:
        node = stack.pop()
        for place, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            if child in leaves:
                use = use_of(node, place)
                found[leaves[child]] += [] if use is None else [use]
                opaque |= {leaves[child]} if use is None else set()
            elif child not in visited:
                visited.add(child)
                stack.append(child)
    return [None if i in opaque or i not in found else found[i] for i in range(len(params))]


def use_of(node: Any, place: int) -> Use | None:
    """The sum or product that a node forms with its argument at this place; None for anything else."""
    kind = kind_of(node)
    try:
        if kind == "Expand" or (kind == "Add" and (place == 0 or node._saved_alpha == 1)):
            return Use(GradientEdge(node, 0), None)
        if kind == "Mul":
            return Use(GradientEdge(node, 0), (node._saved_self if place else node._saved_other).detach())
    except (RuntimeError, AttributeError):  # overwritten since, or a number
        return None
    return None


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


def adds_up(rows: Tensor, gradient: Tensor) -> bool:
    """True if the examples' gradients (b, ...) sum up to this one."""
    gap = measure_norm(rows.sum(0) - gradient.to(rows))
    return bool(gap <= torch.finfo(gradient.dtype).eps ** 0.5 * measure_norm(rows))


def widest(p: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(p.dtype, torch.float32)
