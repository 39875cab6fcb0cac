"""Statistics from the user's own pass: taps in the forward, and a backward pass of sampled labels before the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion
from natgrad.metrics import fisher
from natgrad.optim.recall import Recall
from natgrad.pure import Labelled, leaves, map_tensors
from natgrad.spaces import Space
from natgrad.structures import Estimate
from natgrad.structures.collect import collect, explains, seconds
from natgrad.structures.estimates import Outputs
from natgrad.structures.layers import Layer, known_layers
from natgrad.structures.passes import passes
from natgrad.structures.statistics import Seen
from natgrad.structures.taps import Taps, reached, tap
from natgrad.structures.traced import Product, products, second_layers, traced_layers


@dataclass(frozen=True)
class Reading:
    """What one pass tells: the layers, squares for the parameters without a layer, and the number of its rows."""

    layers: list[Seen]
    squares: dict[str, Tensor]
    rows: int


class Reader:
    """Listens to a model's layers while armed, and reads statistics when a loss is known.

    The first reading that reaches a parameter compares the gradient that its layer explains with the plain one;
    parameters where they differ (used behind their layer's back) and parameters without a layer get squares: of the
    gradient for sampled labels. Its expectation over labels is the metric's diagonal, since scores of different rows
    are independent with mean 0.   trusted: claims of the layers that passed.   open: names that nothing reached yet.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor], estimate: Estimate, seed: int) -> None:
        self.model, self.estimate, self.seed = model, estimate, seed
        self.taps = Taps()
        self.generator: torch.Generator | None = None
        self.attach(named)

    def attach(self, named: Mapping[str, Tensor]) -> None:
        """Listen to the layers of these parameters."""
        self.named = dict(named)
        self.layers: dict[nn.Module, Layer] = known_layers(self.model, Space(self.named))
        self.spare = second_layers(self.layers.values())
        self.matrices = [*traced_layers(self.model, Space(self.named), self.layers.values()), *self.spare]
        self.trusted: set[str] | None = None
        self.open = set(self.named)
        self.handles = tap(self.taps, self.layers)

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()
        self.taps.armed = False  # compiled graphs keep their taps
        self.taps.take()

    def generator_on(self, device: torch.device) -> torch.Generator:
        """The private source of labels."""
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator

    def by_names(self) -> dict[tuple[str, ...], Layer]:
        """The trusted layers, by their parameters' names."""
        layers = [*self.layers.values(), *self.matrices]
        return {layer.layout.names: layer for layer in layers if self._trusts(layer)}

    def read(self, criterion: Criterion, outputs: Any, targets: Any, recall: Recall) -> Reading:
        """The statistics of the pass that made these outputs. Its graph is kept, `.grad` is not touched."""
        rows = criterion.family.rows(outputs)
        heard = self.taps.take()
        calls = [call for call in heard if self._wants(call.layer)]
        calls += products(rows, [layer for layer in self.matrices if self._wants(layer)], self.named)
        held = {name for names in self.by_names() for name in names}
        watched = {name: p for name, p in self.named.items() if name not in held and p.requires_grad}
        examples = max(len(next(leaves(outputs))), 1)
        cotangents = [c.to(rows.dtype) for c in self._cotangents(criterion, outputs, targets, examples)]
        try:
            calls, deltas, slopes = reached(rows, self.taps, calls, cotangents, list(watched.values()))
        except RuntimeError as error:
            if "donated" not in str(error) or not self.layers:
                raise
            calls, deltas, slopes, heard = [], [], [], []  # a compiled backward of the user's own does not run again
        if self.layers and not heard and all(isinstance(call, Product) for call in calls):
            return self._replayed(criterion, targets, recall, len(rows))
        seen = passes(calls, deltas, examples=examples)
        if self.open:
            gradients = dict(zip(watched, slopes[0], strict=True))
            eps = max((torch.finfo(call.dtype).eps for call in calls), default=0.0)
            wanted = [one for one in seen if self._wants(one.layer)]
            found = [one for one in wanted if self._trusts(one.layer) or explains(one, gradients, eps)]
            spare = [layer for layer in self.spare if self.open.issuperset(layer.layout.names)]
            more = passes(*seconds(rows, found, spare, self.named, cotangents), examples=examples)
            seen = found + [one for one in more if explains(one, gradients, eps)]
            self.trusted = (self.trusted or set()) | {claim for one in seen for claim in one.layer.claims}
            self.open -= {name for name, gradient in gradients.items() if gradient is not None}
        seen = [one for one in seen if self._trusts(one.layer)]
        held = {name for one in seen for name in one.layer.layout.names}
        squares = {name: squared([found[i] for found in slopes]) for i, name in enumerate(watched) if name not in held}
        return Reading(seen, {name: s for name, s in squares.items() if s is not None}, len(rows))

    def skip(self, value: Tensor) -> None:
        """Read nothing of a loss. A compiled graph's first backward settles whether there may be two: there may."""
        dummy, like = self.taps.recorder.dummy, torch.ones_like(value)
        torch.autograd.grad(value, [dummy], like, retain_graph=True, allow_unused=True)

    def _wants(self, layer: Layer) -> bool:
        return self._trusts(layer) or (layer not in self.spare and self.open.issuperset(layer.layout.names))

    def _trusts(self, layer: Layer) -> bool:
        return self.trusted is not None and self.trusted.issuperset(layer.claims)

    def _cotangents(self, criterion: Criterion, outputs: Any, targets: Any, examples: int) -> list[Tensor]:
        tree = map_tensors(outputs, lambda t: t.detach().to(torch.promote_types(t.dtype, torch.float32)))
        family = criterion.family

        def slope() -> Tensor:
            return family.rows(criterion.slope(tree, targets))

        weights = criterion.weights(tree, targets)
        rows = family.rows(tree)
        batch = examples if len(rows) % examples == 0 else 1
        with torch.no_grad():
            known = Outputs(tree, rows, family, weights, batch, slope)
            return list(self.estimate.cotangents(known, self.generator_on(rows.device)))

    def _replayed(self, criterion: Criterion, targets: Any, recall: Recall, rows: int) -> Reading:
        """From one more pass, as a pure function: graphs compiled before there were taps let nobody listen."""
        last = recall.passed()
        if last is None:
            raise ValueError(
                "no statistics: no layer of the model was heard in training mode since the last step; call "
                "model.train() and the model itself (not a copy of it) before optimizer.loss(outputs, targets); if it "
                "was compiled and called before the optimizer was built, give the optimizer the compiled model, or "
                "call torch.compiler.reset() once"
            )
        with last.modes_of(self.model), torch.compiler.set_stance("force_eager"):
            found = collect(
                fisher(self.model, criterion),
                self.named,
                Labelled(last.call, targets),
                self.estimate,
                self.generator_on(next(iter(self.named.values())).device),
                random=last.random,
                trusted=self.trusted,
            )
        self.trusted, self.open = {claim for one in found.layers for claim in one.layer.claims}, set()
        return Reading(found.layers, found.squares, rows)


def squared(slopes: list[Tensor | None]) -> Tensor | None:
    """Sum over the cotangents of the gradient's squares; None for a parameter that the outputs do not depend on."""
    known = [
        slope.to_dense().to(torch.promote_types(slope.dtype, torch.float32)) for slope in slopes if slope is not None
    ]
    return torch.stack([slope.square() for slope in known]).sum(0) if known else None
