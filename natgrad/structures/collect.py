"""What a metric's own pass tells about the layers: one forward pass with taps, one backward pass per cotangent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.metrics import Metric
from natgrad.operators import Linearization, Pullback, Rows
from natgrad.pure import RandomState
from natgrad.spaces import Params, Space
from natgrad.structures.estimates import Estimate, Outputs
from natgrad.structures.layers import known_layers
from natgrad.structures.statistics import Seen
from natgrad.structures.taps import Tap, derivatives, passes

PROBES = 8
LARGEST = 2**25  # entries of row gradients that are written out for parameters without a layer


@dataclass(frozen=True)
class Collected:
    """A pass's layers, the squares of the scores of the parameters that no layer holds, and the metric it came from."""

    metric: Pullback
    layers: list[Seen]
    squares: dict[str, Tensor]


def collect(
    metric: Metric,
    params: Params,
    inputs: Any,
    estimate: Estimate,
    generator: torch.Generator,
    *,
    random: RandomState | None = None,
    trusted: set[str] | None = None,
) -> Collected:
    """The layers' activations and deltas in one pass of the metric's model at params on inputs.

    trusted: names of parameters whose layers are known to be all there is to them; None: find out, by comparing the
    gradients that the layers explain with those of a plain backward pass (a parameter may be used behind its layer's
    back; such parameters count as having no layer). TypeError for a metric that is not a pullback in one graph.
    """
    pullback, taps = tapped(metric, params, inputs, random)
    cotangents = [c.detach() for c in estimate.cotangents(Outputs.of(pullback), generator)]
    leaves = pullback.linearization.leaves if trusted is None else {}
    deltas, slopes = derivatives(pullback.linearization.graph, taps, cotangents[:1], list(leaves.values()))
    deltas += derivatives(pullback.linearization.graph, taps, cotangents[1:])[0]
    seen = passes(taps, deltas, pullback.dtype)
    if trusted is None:
        gradients = dict(zip(leaves, slopes[0], strict=True))
        seen = [one for one in seen if explains(one, gradients)]
    else:
        seen = [one for one in seen if trusted.issuperset(one.layer.layout.names)]
    held = {name for one in seen for name in one.layer.layout.names}
    rest = {name: p for name, p in params.items() if name not in held}
    return Collected(pullback, seen, squares_of(pullback, rest, torch.stack(cotangents, dim=2)) if rest else {})


def tapped(metric: Metric, params: Params, inputs: Any, random: RandomState | None) -> tuple[Pullback, list[Tap]]:
    """The metric at a point, and a tap on every call of a known layer in its pass."""
    model, taps = getattr(metric, "model", None), []
    known = known_layers(model, Space(params)) if isinstance(model, nn.Module) else {}

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            taps.append(Tap.of(known[module], args[0], output))

    handles = [module.register_forward_hook(hook) for module in known]
    try:
        pullback = metric.at(params, inputs, random=random)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(pullback, Pullback):
        raise TypeError(
            f"{metric!r} gave a {type(pullback).__name__}, expected a pulled-back metric in one graph such as "
            "ng.fisher(model, criterion) with chunk_size=None; or use the structure ng.Exact()"
        )
    return pullback, taps


def explains(seen: Seen, gradients: Mapping[str, Tensor | None], eps: float = 0.0) -> bool:
    """Whether the layer's activations and deltas give its parameters' whole gradient.

    eps: of the coarsest dtype on the way (autocast), if that is not the layer's own.
    """
    found, dense = seen.gradient(), {}
    for name in seen.layer.layout.names:
        gradient = gradients[name]
        if gradient is None:
            return False
        dense[name] = gradient.to_dense().to(found.dtype)
    expected = seen.layer.layout.join(dense)
    eps = max(eps, torch.finfo(found.dtype).eps)
    tolerance = eps**0.5 * expected.norm().clamp(min=torch.finfo(found.dtype).tiny)
    return bool((found - expected).norm() <= tolerance)


def squares_of(pullback: Pullback, rest: Params, factor: Tensor) -> dict[str, Tensor]:
    """The metric's diagonal in parameters without a layer, by name, from row gradients.

    Where those would be too many to write down: squares of combinations with random signs, unbiased too.
    """
    leaves = [pullback.linearization.leaves[name] for name in rest]
    slopes = torch.autograd.grad(
        pullback.linearization.graph, leaves, factor[..., 0], retain_graph=True, allow_unused=True
    )
    reached = {name: rest[name] for name, slope in zip(rest, slopes, strict=True) if slope is not None}
    zeros = {name: torch.zeros_like(p, dtype=pullback.dtype) for name, p in rest.items() if name not in reached}
    return zeros | (row_squares(pullback, reached, factor) if reached else {})


def row_squares(pullback: Pullback, rest: Params, factor: Tensor) -> dict[str, Tensor]:
    """`squares_of` parameters that the outputs depend on."""
    rows = Rows(Linearization(pullback.linearization.function, rest), factor)
    if rows.rank * rows.space.size <= LARGEST:
        return rows.space.unflatten(rows.squares())
    generator = torch.Generator(factor.device).manual_seed(0)
    found = torch.zeros(rows.space.size, dtype=rows.space.dtype, device=factor.device)
    for _ in range(PROBES):
        bits = torch.randint(0, 2, (rows.rank,), generator=generator, device=factor.device)
        found += rows.backward((2 * bits - 1).to(rows.space.dtype)).square() / PROBES
    return rows.space.unflatten(found)
