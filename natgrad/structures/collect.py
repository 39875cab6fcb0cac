"""What a metric's own pass tells about the layers: one forward pass with taps, one backward pass per cotangent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.metrics import Metric
from natgrad.operators import Linearization, Pullback, Rows
from natgrad.pure import RandomState
from natgrad.spaces import Params, Space
from natgrad.structures.estimates import Estimate
from natgrad.structures.layers import Layer, known_layers
from natgrad.structures.statistics import Seen

PROBES = 8
LARGEST = 2**25  # entries of row gradients that are written out for parameters without a layer


@dataclass(frozen=True)
class Collected:
    """A pass's layers, the squares of the scores of the parameters that no layer holds, and the metric it came from."""

    metric: Pullback
    layers: list[Seen]
    squares: dict[str, Tensor]


@dataclass
class Tap:
    """One call of a module: its input, and a zero added to its output, whose gradient is the derivative there."""

    layer: Layer
    inputs: Tensor
    dummy: Tensor


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
    model = getattr(metric, "model", None)
    known = known_layers(model, Space(params)) if isinstance(model, nn.Module) else {}
    with tapped(known) as taps:
        pullback = metric.at(params, inputs, random=random)
    if not isinstance(pullback, Pullback):
        raise TypeError(
            f"{metric!r} gave a {type(pullback).__name__}, expected a pulled-back metric in one graph such as "
            "ng.fisher(model, criterion) with chunk_size=None; or use the structure ng.Exact()"
        )
    cotangents = [c.detach() for c in estimate.cotangents(pullback, generator)]
    leaves = pullback.linearization.leaves if trusted is None else {}
    seen, gradients = backward(pullback, taps, cotangents, leaves)
    if trusted is not None:
        seen = [one for one in seen if trusted.issuperset(one.layer.layout.names)]
    else:
        seen = [one for one in seen if explains(one, gradients)]
    held = {name for one in seen for name in one.layer.layout.names}
    rest = {name: p for name, p in params.items() if name not in held}
    return Collected(pullback, seen, squares_of(pullback, rest, torch.stack(cotangents, dim=2)) if rest else {})


@contextmanager
def tapped(known: Mapping[nn.Module, Layer]) -> Iterator[list[Tap]]:
    """Inside, every known module records its calls."""
    taps: list[Tap] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        dummy = torch.zeros_like(output, requires_grad=True)
        taps.append(Tap(known[module], args[0].detach(), dummy))
        return output + dummy  # a new tensor: an in-place activation after it does no harm

    handles = [module.register_forward_hook(hook) for module in known]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def backward(
    pullback: Pullback, taps: list[Tap], cotangents: list[Tensor], leaves: Mapping[str, Tensor]
) -> tuple[list[Seen], dict[str, Tensor]]:
    """The layers' passes, and J^T c of the first cotangent c in the given leaves."""
    dummies, gradients = [tap.dummy for tap in taps], dict[str, Tensor]()
    passes: list[tuple[Tensor, ...]] = []
    for cotangent in cotangents:
        wanted = [*dummies, *(leaves.values() if not gradients else ())]
        if wanted:
            found = torch.autograd.grad(
                pullback.linearization.graph, wanted, cotangent, retain_graph=True, materialize_grads=True
            )
            gradients = gradients or dict(zip(leaves, found[len(dummies) :], strict=True))
            passes.append(found[: len(dummies)])
    calls: dict[Layer, list[tuple[Tap, list[Tensor]]]] = {}
    for i, tap in enumerate(taps):
        calls.setdefault(tap.layer, []).append((tap, [found[i] for found in passes]))
    dtype = pullback.dtype
    all_seen = (merged(layer, of_layer, dtype) for layer, of_layer in calls.items())
    return [one for one in all_seen if one is not None], gradients


def merged(layer: Layer, calls: list[tuple[Tap, list[Tensor]]], dtype: torch.dtype) -> Seen | None:
    """All calls of one module as one pass: more positions of the same examples. None where they do not fit together."""
    if not all(layer.batched(tap.inputs) for tap, _ in calls) or len({len(tap.inputs) for tap, _ in calls}) > 1:
        return None
    inputs = (tap.inputs.to(dtype) if tap.inputs.is_floating_point() else tap.inputs for tap, _ in calls)
    activations = torch.cat([layer.activations(x) for x in inputs], dim=1)
    columns = zip(*([layer.deltas(delta.to(dtype)) for delta in deltas] for _, deltas in calls), strict=True)
    found = [torch.cat(parts, dim=1) for parts in columns]
    fits = bool(found) and found[0].shape[:2] == activations.shape[:2]  # output_size=... of a transposed convolution
    return Seen(layer, activations, found) if fits else None


def explains(seen: Seen, gradients: Mapping[str, Tensor]) -> bool:
    """Whether the layer's activations and deltas give its parameters' whole gradient."""
    found = seen.gradient()
    dense = {name: gradients[name].to_dense().to(found.dtype) for name in seen.layer.layout.names}
    expected = seen.layer.layout.join(dense)
    tolerance = torch.finfo(found.dtype).eps ** 0.5 * expected.norm().clamp(min=torch.finfo(found.dtype).tiny)
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
