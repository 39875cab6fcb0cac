"""What a metric's own pass tells about the layers: one forward pass with taps, one backward pass per cotangent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.densities import Density, Energy
from natgrad.layers.examples import Examples, find_examples, partitions, unplaced
from natgrad.layers.kinds import known_layers
from natgrad.layers.moments import Seen
from natgrad.layers.passes import passes
from natgrad.layers.recurrent import unroll_recurrence
from natgrad.layers.taps import Tap, derivatives
from natgrad.layers.traced import Product, Traced, matrices_of, products, second_layers, traced_layers
from natgrad.metrics import Metric
from natgrad.metrics.score import ScoreMetric
from natgrad.operators import Linearization, Pullback, Rows
from natgrad.operators.linearization import output_map
from natgrad.operators.rows import batch_of
from natgrad.pure import PureModel, RandomState, mixes_examples
from natgrad.spaces import Params, Space
from natgrad.structures.estimates import Estimate, Outputs

PROBES = 8
LARGEST = 2**25  # entries of row gradients that are written out for parameters without a layer


@dataclass(frozen=True)
class Collected:
    """A pass's layers, the squares of the scores of the parameters that no layer holds, and the metric it came from.

    sure: whether every layer was judged by a gradient that is not zero.   meet: whether all rows are one example's.
    """

    metric: Pullback
    layers: list[Seen]
    squares: dict[str, Tensor]
    sure: bool = True
    meet: bool = False


def collect(
    metric: Metric,
    params: Params,
    inputs: Any,
    estimate: Estimate,
    generator: torch.Generator,
    *,
    random: RandomState | None = None,
    trusted: set[str] | None = None,
    ask: bool = True,
) -> Collected:
    """The layers' activations and deltas in one pass of the metric's model at params on inputs.

    trusted: claims of the layers that are known to be all there is to their parameters; None: find out, by comparing
    the gradients that the layers explain with those of a plain backward pass (a parameter may be used behind its
    layer's back). ask: whether examples meet somewhere, also where the shapes of all layers' inputs leave no doubt.
    TypeError for a metric that is not a pullback in one graph.
    """
    pullback, taps, spare = tapped(metric, params, inputs, random, trusted)
    graph, strict = pullback.linearization.graph, not mixes_examples(model_of(metric))
    examples, taps = find_examples(graph, taps, examples_of(pullback), strict, ask and strict)
    sure = not (ask and strict and any(unplaced(tap) for tap in taps))
    cotangents = [c.detach() for c in estimate.cotangents(Outputs.of(pullback, examples), generator)]
    leaves = pullback.linearization.leaves if trusted is None else {}
    deltas, slopes = derivatives(graph, taps, cotangents[:1], list(leaves.values()))
    deltas += derivatives(graph, taps, cotangents[1:])[0]
    seen = passes(taps, deltas, pullback.dtype, examples.count)
    if trusted is None:
        gradients = dict(zip(leaves, slopes[0], strict=True))
        answers = [explains(one, gradients) for one in seen]
        seen, sure = (
            [one for one, answer in zip(seen, answers, strict=True) if answer is not False],
            sure and None not in answers,
        )
        held = {name for one in seen for name in one.layer.layout.names}
        lost = [layer for layer in spare if not held.issuperset(layer.layout.names)]
        more = seconds(graph, lost, leaves, cotangents, examples)
        seen += [one for one in passes(*more, pullback.dtype, examples.count) if explains(one, gradients)]
    # examples that cannot be told apart give squares that are right on average over labels alone: not here
    seen = [one for one in seen if not one.pooled]
    held = {name for one in seen for name in one.layer.layout.names}
    rest = {name: p for name, p in params.items() if name not in held}
    factor = torch.stack(apart(cotangents, examples), dim=2) if rest else None
    return Collected(
        pullback, seen, {} if factor is None else squares_of(pullback, rest, factor), sure, examples.count == 1
    )


class Always:
    """Listens to every pass."""

    def listens(self) -> bool:
        """True."""
        return True


def model_of(metric: Metric) -> Any:
    """The module or function behind a metric, if it has one."""
    return getattr(metric, "model", None)


def examples_of(pullback: Pullback) -> list[Examples]:
    """What the examples of a metric's pass may be, likeliest first."""
    function, rows = pullback.linearization.function, pullback.outputs
    known, batch = output_map(function), batch_of(function, len(rows))
    if known is None:
        return partitions(rows, rows, None, pullback.form.mv, batch)
    return partitions(known.first, rows, known.rows, pullback.form.mv, batch, known.pure.call.tensors())


def apart(cotangents: Sequence[Tensor], examples: Examples) -> list[Tensor]:
    """The cotangents, cut by examples where a row of the outputs holds several ones' entries."""
    if examples.by_row is not None:
        return list(cotangents)
    whole = range(examples.count)
    return [torch.where(examples.labels == e, cotangent, 0) for cotangent in cotangents for e in whole]


def tapped(
    metric: Metric, params: Params, inputs: Any, random: RandomState | None, trusted: set[str] | None
) -> tuple[Pullback, list[Tap], list[Traced]]:
    """The metric at a point, a tap on every call of a layer and product with a matrix in its pass, and spare layers.

    With `trusted`, those of trusted layers alone.
    """
    model, density, taps = model_of(metric), getattr(metric, "density", None), list[Tap]()
    known = known_layers(model, Space(params)) if isinstance(model, nn.Module) else {}
    matrices = traced_layers(model, Space(params), known.values()) if isinstance(model, nn.Module) else []
    if isinstance(density, Density):  # its layers' calls lie inside a derivative: their matrices are found in the graph
        inside = isinstance(density, Energy)
        matrices = traced_layers(density.module, Space(params), ()) if inside else matrices_of(params)
    spare = second_layers(known.values())
    if trusted is not None:
        known = {module: layer for module, layer in known.items() if trusted.issuperset(layer.claims)}
        matrices = [layer for layer in [*matrices, *spare] if trusted.issuperset(layer.claims)]

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            taps.append(Tap.of(known[module], args[0], output))

    listener = Always()
    handles = [module.register_forward_hook(hook) for module in known]
    handles += unroll_recurrence((layer.module for layer in matrices if layer.module is not None), listener)
    try:
        at = metric.graph if isinstance(metric, ScoreMetric) else metric.at
        pullback = at(params, inputs, random=random)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(pullback, Pullback):
        raise TypeError(
            f"{metric!r} gave a {type(pullback).__name__}, expected a pulled-back metric in one graph such as "
            "ng.fisher(model, criterion) with chunk_size=None; or use the structure ng.Exact()"
        )
    line = pullback.linearization
    found = products(line.graph, matrices, line.leaves)
    if isinstance(density, Density):
        found = by_example(found, batch_of(line.function, len(line.outputs)))
    return pullback, [*taps, *found], spare


def by_example(found: Sequence[Product], examples: int) -> list[Product]:
    """The products of matrices that meet one row per example everywhere: whose rows are whose is certain there only."""
    unclear = {product.layer for product in found if len(product.inputs) != examples}
    return [product for product in found if product.layer not in unclear]


def seconds(
    outputs: Tensor, spare: Sequence[Traced], params: Params, cotangents: Sequence[Tensor], examples: Examples
) -> tuple[list[Tap], list[list[Tensor | None]]]:
    """The products with the matrices that nothing explained so far, and the derivatives there, for `passes`."""
    found = find_examples(outputs, products(outputs, spare, params), [examples], strict=False)[1]
    return found, derivatives(outputs, found, cotangents)[0]


def explains(seen: Seen, gradients: Mapping[str, Tensor | None], eps: float = 0.0) -> bool | None:
    """Whether the layer's activations and deltas give its parameters' whole gradient.

    None where that cannot be told: 0 = 0 behind a head that starts at zero, or a gradient that is not finite.

    Args:
        seen: The layer's pass.
        gradients: By name, of a plain backward pass from the first cotangent.
        eps: Of the coarsest dtype on the way (autocast), if that is not the layer's own.
    """
    found = seen.gradient()
    reached = {name: g for name in seen.layer.layout.names if (g := gradients.get(name)) is not None}
    if not reached:
        return False
    parts = seen.layer.layout.split(torch.zeros_like(found))  # the bias of an energy moves no score
    expected = seen.layer.layout.join(parts | {name: g.to_dense().to(found.dtype) for name, g in reached.items()})
    size, gap = float(expected.norm()), float((found - expected).norm())
    if not (math.isfinite(size) and math.isfinite(gap)) or max(size, gap) == 0:
        return None
    return gap <= max(eps, torch.finfo(found.dtype).eps) ** 0.5 * size


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
    rows = Rows(Linearization(alone(pullback.linearization, rest), rest), factor)
    if rows.rank * rows.space.size <= LARGEST:
        return rows.space.unflatten(rows.squares())
    generator = torch.Generator(factor.device).manual_seed(0)
    found = torch.zeros(rows.space.size, dtype=rows.space.dtype, device=factor.device)
    for _ in range(PROBES):
        bits = torch.randint(0, 2, (rows.rank,), generator=generator, device=factor.device)
        found += rows.backward((2 * bits - 1).to(rows.space.dtype)).square() / PROBES
    return rows.space.unflatten(found)


def alone(linearization: Linearization, rest: Params) -> Callable[[Params], Tensor]:
    """The outputs as a function of some parameters. A module fills in its own for the others, a function does not."""
    known = output_map(linearization.function)
    if known is None or isinstance(known.pure.model, nn.Module) or len(rest) == len(linearization.leaves):
        return linearization.function
    others = {name: leaf.detach() for name, leaf in linearization.leaves.items() if name not in rest}
    model = known.pure.model

    def filled(params: Params, *args: Any, **kwargs: Any) -> Any:
        return model({**others, **params}, *args, **kwargs)

    return known.of(PureModel(filled, known.pure.call, known.pure.random))
