"""What a pass tells of the layers: which explain the gradients of their parameters, and with which activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from natgrad.layers.examples import Examples, find_examples
from natgrad.layers.kinds import Layer, known_layers
from natgrad.layers.moments import Seen
from natgrad.layers.passes import collect_passes
from natgrad.layers.taps import Tap, derivatives, record_calls
from natgrad.layers.traced import Traced, find_products
from natgrad.spaces import Space


@dataclass(frozen=True)
class Heard:
    """What one pass gave.

    Args:
        layers: Those that explain their parameters' gradients, with activations and deltas.
        squares: Of the parameters that no layer holds, by name: the sum over examples of their squared scores, in the
            parameters' shapes. Empty where nobody asked.
        answers: By layer, whether it explains its parameters' gradients; of those that could be judged.
        sure: True if every layer was judged by a gradient that is not zero, which explains anything.
    """

    layers: list[Seen]
    squares: dict[str, Tensor] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)
    sure: bool = True

    @property
    def held_names(self) -> set[str]:
        """The names of the parameters that the layers hold."""
        return {name for one in self.layers for name in one.layer.layout.names}


@dataclass(frozen=True)
class Pass:
    """A pass with the derivatives at all its taps.

    Args:
        outputs: (R, m), with a graph, which is kept.
        taps: The calls of layers and the products with matrices in it.
        examples: Which entries of the outputs are whose.
        cotangents: (R, m) each.
        deltas: Per cotangent, the derivatives at the taps; None where it did not arrive.
        params: The leaves of the graph, by name.
        gradients: The first cotangent's gradients by name, of the parameters that are watched.
        dtype: Of the activations and deltas; default the widest of float32 and the deltas' own.
        eps: Of the coarsest dtype on the way (autocast), if that is not the layers' own.
    """

    outputs: Tensor
    taps: Sequence[Tap]
    examples: Examples
    cotangents: Sequence[Tensor]
    deltas: Sequence[Sequence[Tensor | None]]
    params: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    dtype: torch.dtype | None = None
    eps: float = 0.0

    def collect_layers(self) -> list[Seen]:
        """All layers that the taps tell of."""
        return collect_passes(self.taps, self.deltas, self.dtype, self.examples.count)

    def collect_products(self, spare: Sequence[Traced]) -> list[Seen]:
        """What the graph's products with these matrices tell.

        Args:
            spare: The matrices.
        """
        if not spare:
            return []
        found = list[Tap](find_products(self.outputs, spare, self.params))
        found = find_examples(self.outputs, found, [self.examples], strict=False)[1]
        deltas = derivatives(self.outputs, found, self.cotangents)[0]
        return collect_passes(found, deltas, self.dtype, self.examples.count)

    def explains(self, seen: Seen) -> bool | None:
        """True if a layer gives its parameters' whole gradient; None where that cannot be told.

        Args:
            seen: The layer's pass.
        """
        return explains(seen, self.gradients, self.eps)


def hear(
    one: Pass,
    asks: Callable[[Layer], bool],
    *,
    takes: Callable[[Seen], bool] = lambda seen: True,
    silent: Iterable[Layer] = (),
    spare: Callable[[Mapping[str, bool]], Sequence[Traced]] = lambda answers: (),
) -> Heard:
    """The layers that explain their parameters' gradients in a pass.

    A parameter may be used outside of its layer too: then the layer's activations and deltas are not all there is to
    its gradient, and the products with its matrix in the graph are looked at instead.

    Args:
        one: The pass.
        asks: True for a layer that is judged; the others are trusted.
        takes: True for a layer whose pass is of use to the caller at all.
        silent: Layers that do not explain a gradient that is not zero unless the taps told of them.
        spare: The matrices to look for in the graph, given the answers so far.

    Returns:
        The layers, without squares.
    """
    seen, answers, sure = one.collect_layers(), dict[str, bool](), True
    for each in seen:
        answer = one.explains(each) if asks(each.layer) else True
        sure &= answer is not None
        answers[each.key] = answer is not False
    for layer in silent:
        reached = [g for name in layer.layout.names if (g := one.gradients.get(name)) is not None]
        if any(bool(g.to_dense().any()) for g in reached):
            answers.setdefault(layer.key, False)
    answers |= {each.key: False for each in seen if not takes(each)}
    more = one.collect_products(spare(answers))
    answers |= {each.key: one.explains(each) is True and takes(each) for each in more}
    return Heard([each for each in [*seen, *more] if answers[each.key]], {}, answers, sure)


def explains(seen: Seen, gradients: Mapping[str, Tensor | None], eps: float = 0.0) -> bool | None:
    """True if a layer's activations and deltas give its parameters' whole gradient.

    Args:
        seen: The layer's pass.
        gradients: By name, of a plain backward pass from the first cotangent.
        eps: Of the coarsest dtype on the way (autocast), if that is not the layer's own.

    Returns:
        None where that cannot be told: 0 = 0 behind a head that starts at zero, or a gradient that is not finite.
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


def is_asking(readings: int) -> bool:
    """True if layers are judged afresh: at readings 0, 2, 4, 8, 16, and at every 32nd.

    A second use of a weight may be hidden at first, by a gate or a head that starts at zero.

    Args:
        readings: The number of readings before this one.
    """
    return readings % 32 == 0 or (readings > 1 and readings & (readings - 1) == 0)


@dataclass(frozen=True)
class Recording:
    """A forward pass with its layers' calls.

    Args:
        outputs: (R, m), with a graph.
        taps: The calls in it.
    """

    outputs: Tensor
    taps: Sequence[Tap]


def record_pass(model: nn.Module, space: Space, run: Callable[[], Tensor]) -> Recording:
    """A forward pass that is listened to.

    Args:
        model: The module.
        space: Of the parameters.
        run: The pass, which gives the outputs (R, m).
    """
    with record_calls(known_layers(model, space)) as taps, torch.enable_grad():
        return Recording(run(), taps)


def hear_rows(recording: Recording, dtype: torch.dtype, cotangents: Sequence[Tensor], batch: int) -> list[Seen]:
    """What a pass tells of the layers, one delta per cotangent. The graph is kept.

    Args:
        recording: The pass.
        dtype: Of the activations and deltas.
        cotangents: On the outputs, (R, m) each.
        batch: The number of examples.

    Returns:
        The layers whose inputs and derivatives fit together; no embeddings, whose rows are better not written out.
    """
    deltas = fill_zeros(derivatives(recording.outputs, recording.taps, cotangents)[0])
    return [seen for seen in collect_passes(recording.taps, deltas, dtype, batch) if not seen.by_token]


def fill_zeros(deltas: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
    """Zeros where a cotangent's derivative does not arrive at a tap that others' reach."""
    like = [next((found for found in column if found is not None), None) for column in zip(*deltas, strict=True)]

    def fill(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return torch.zeros_like(other) if one is None and other is not None else one

    return [[fill(one, other) for one, other in zip(row, like, strict=True)] for row in deltas]
