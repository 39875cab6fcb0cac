"""What a metric's own pass tells about the layers: one forward pass with taps, one backward pass per cotangent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.densities import Density
from natgrad.ground.pure import PureModel, RandomState, mixes_examples
from natgrad.ground.spaces import Params
from natgrad.layers import (
    Examples,
    ModelLayers,
    Pass,
    Seen,
    Tap,
    Traced,
    combine,
    derivatives,
    find_examples,
    find_products,
    has_no_place,
    hear,
    partitions,
    record_calls,
)
from natgrad.metrics import Metric
from natgrad.metrics.score import ScoreMetric
from natgrad.operators import Linearization, Pullback, Rows
from natgrad.structures.estimates import Estimate, Outputs, Sampled

PROBES = 8
LARGEST = 2**25  # entries of row gradients that are written out for parameters without a layer


@dataclass(frozen=True)
class Collected:
    """What a metric's own pass gave, and the metric that it came from."""

    metric: Pullback  # the metric at the point
    layers: list[Seen]  # those that explain their parameters' gradients
    squares: dict[str, Tensor]  # of the parameters that no layer holds, by name
    sure: bool  # True if every layer was judged by a gradient that is not zero, and every example has its place
    meet: bool  # True if all rows are one example's


def hear_metric(
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

    Args:
        metric: One that is pulled back in one graph.
        params: The point.
        inputs: The metric's data.
        estimate: How the expectation over labels is taken.
        generator: Of the draws.
        random: The random state of the pass, for dropout.
        trusted: Claims of the layers that are known to be all there is to their parameters; None: find out, by
            comparing the gradients that the layers explain with those of a plain backward pass.
        ask: Whether examples meet somewhere is asked also where the shapes of all layers' inputs leave no doubt.

    Returns:
        The layers and the squares of the other parameters.

    Raises:
        TypeError: For a metric that is not a pullback in one graph.
    """
    pullback, taps, spare = tap_metric(metric, params, inputs, random, trusted)
    graph, strict = pullback.linearization.graph, not mixes_examples(model_of(metric))
    examples, taps = find_examples(graph, taps, examples_of(pullback), strict, ask and strict)
    cotangents = [c.detach() for c in estimate.cotangents(Outputs.of(pullback, examples), generator)]
    leaves = pullback.linearization.leaves
    watched = leaves if trusted is None else {}
    parameters = list(watched.values())
    if len(cotangents) == 1:
        deltas, slopes = derivatives(graph, taps, cotangents, parameters)
    else:  # all cotangents' gradients would take too much memory
        deltas = derivatives(graph, taps, cotangents)[0]
        slopes = derivatives(graph, [], [combine(cotangents)], parameters)[1]
    gradients = dict(zip(watched, slopes[0], strict=True))
    heard = hear(
        Pass(
            graph,
            taps,
            examples,
            cotangents,
            deltas,
            leaves,
            gradients,
            pullback.dtype,
            judged=len(cotangents),
            weights=examples.weigh(pullback.weights),
        ),
        lambda layer: trusted is None,
        # examples that cannot be told apart give squares that are right on average over drawn labels alone
        takes=lambda seen: not seen.pooled or (seen.layer.is_routed and isinstance(estimate, Sampled)),
        spare=lambda answers: spare_of(spare, answers) if trusted is None else (),
    )
    layers, squares = heard.layers, heard.squares
    rest = {name: p for name, p in params.items() if name not in heard.held_names}
    if rest:
        squares = squares_of(pullback, rest, torch.stack(apart(cotangents, examples), dim=2))
    placed = not (ask and strict and any(has_no_place(tap) for tap in taps))
    return Collected(pullback, layers, squares, heard.sure and placed, examples.count == 1)


def spare_of(spare: Sequence[Traced], answers: Mapping[str, bool]) -> list[Traced]:
    """The matrices of layers that were not heard, or do not explain their gradients."""
    held = {name for key, answer in answers.items() if answer for name in key.split(" ")}
    return [layer for layer in spare if not held.issuperset(layer.layout.names)]


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
    known, rows, batch = pullback.linearization.origin, pullback.outputs, pullback.linearization.examples
    if known is None:
        return partitions(rows, rows, None, pullback.form.mv, batch)
    return partitions(known.first, rows, known.rows, pullback.form.mv, batch, known.pure.call.tensors())


def apart(cotangents: Sequence[Tensor], examples: Examples) -> list[Tensor]:
    """The cotangents, cut by examples where a row of the outputs holds several ones' entries."""
    if examples.by_row is not None:
        return list(cotangents)
    labels = range(examples.count)
    return [torch.where(examples.labels == e, cotangent, 0) for cotangent in cotangents for e in labels]


def tap_metric(
    metric: Metric, params: Params, inputs: Any, random: RandomState | None, trusted: set[str] | None
) -> tuple[Pullback, list[Tap], list[Traced]]:
    """The metric at a point, a tap on every call of a layer and product with a matrix in its pass, and spare layers.

    With `trusted`, those of trusted layers alone.
    """
    density = getattr(metric, "density", None)
    layers = ModelLayers.of(model_of(metric), params, density)
    layers = layers if trusted is None else layers.restrict(trusted)
    at, listener = metric.graph if isinstance(metric, ScoreMetric) else metric.at, Always()
    handles = layers.unroll(listener)
    try:
        with record_calls(layers.known) as taps:
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
    products = list[Tap](find_products(line.graph, layers.list_matrices(), line.leaves))
    if isinstance(density, Density):
        products = by_example(products, line.examples)
    return pullback, [*taps, *products], layers.spare


def by_example(products: Sequence[Tap], examples: int) -> list[Tap]:
    """The products of matrices that meet one row per example everywhere: whose rows are whose is certain there only."""
    unclear = {product.layer for product in products if len(product.inputs) != examples}
    return [product for product in products if product.layer not in unclear]


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
    squares = torch.zeros(rows.space.size, dtype=rows.space.dtype, device=factor.device)
    for _ in range(PROBES):
        bits = torch.randint(0, 2, (rows.rank,), generator=generator, device=factor.device)
        squares += rows.backward((2 * bits - 1).to(rows.space.dtype)).square() / PROBES
    return rows.space.unflatten(squares)


def alone(linearization: Linearization, rest: Params) -> Callable[[Params], Tensor]:
    """The outputs as a function of some parameters. A module fills in its own for the others, a function does not."""
    known = linearization.origin
    if known is None or isinstance(known.pure.model, nn.Module) or len(rest) == len(linearization.leaves):
        return linearization.function
    others = {name: leaf.detach() for name, leaf in linearization.leaves.items() if name not in rest}
    model = known.pure.model

    def call_filled(params: Params, *args: Any, **kwargs: Any) -> Any:
        return model({**others, **params}, *args, **kwargs)

    return known.of(PureModel(call_filled, known.pure.call, known.pure.random))
