"""Several processes, one model: what they agree on, and what they add up, so that all take the same step.

Every process reads statistics from its own examples, with labels of its own; sums over the processes go into the
running averages, weighted by rows. All else follows from equal numbers: every process computes inverses and steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.optim.recall import Loss
from natgrad.structures import Layerwise
from natgrad.structures.layers import EmbeddingLayer, Layer
from natgrad.structures.statistics import Seen


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model. size: how many; one exchanges nothing.   rank: this one's number."""

    group: Any = None
    size: int = 1
    rank: int = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each."""
        if self.size == 1:
            return tensor
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(found, group=self.group)
        return found

    def check(self, structure: Layerwise) -> None:
        """TypeError for a structure whose statistics several processes cannot add up."""
        if self.size > 1 and not structure.sums:
            raise TypeError(
                f"structure is {structure!r}, whose statistics are no sums over examples that {self.size} processes "
                "could add up; use ng.Kronecker, ng.EigenKronecker, ng.Diagonal or ng.UnitWise"
            )

    def pooled(
        self, losses: Sequence[Loss], nats: float, scale: float, device: torch.device
    ) -> tuple[Tensor | None, Any, Any]:
        """The mean loss over all rows (None: there was none), nats per unit of it, and what the gradient is divided by.

        losses: of this process's micro-batches; NaN if there are some, and none has rows.   scale: of its gradient; 0
        stands for 1. The gradient that all processes have is the mean of theirs, and so is its scale.
        """
        rows = sum(loss.rows for loss in losses)
        parts = [loss.value * loss.rows for loss in losses if loss.rows]
        total = torch.stack(parts).sum() if parts else torch.zeros(())
        if self.size == 1:
            return total / rows if losses else None, nats, scale or 1.0
        own = torch.tensor([nats * rows, rows, scale], dtype=torch.float64, device=device)
        loss, nats_rows, all_rows, scales = self.sum(torch.cat([total.reshape(1).to(own), own]))
        scale_mean = torch.where(scales > 0, scales / self.size, 1.0)
        # without rows the loss says nothing: infinite
        return (
            torch.where(all_rows > 0, loss / all_rows, torch.inf),
            torch.where(all_rows > 0, nats_rows / all_rows, 1.0),
            scale_mean,
        )

    def summed(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """`sum`, entry by entry."""
        return {key: self.sum(tensor) for key, tensor in fresh.items()}

    def generator(self, shared: torch.Generator) -> torch.Generator:
        """A source of labels of this process's own. The shared one moves alike everywhere: one checkpoint fits all."""
        if self.size == 1:
            return shared
        seed = torch.randint(2**62, (), generator=shared, device=shared.device)
        return torch.Generator(shared.device).manual_seed(int(seed) + self.rank)


def together(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """The model without its `DistributedDataParallel`, and the processes that train it: all, if it has none.

    ValueError for static_graph=True: it takes the first backward that comes for the user's.
    """
    group = None
    if isinstance(model, DistributedDataParallel):
        if model.static_graph:
            raise ValueError(
                "model is a DistributedDataParallel with static_graph=True, which reduces the gradients after the very "
                "first backward, here that of the statistics; use find_unused_parameters=True instead, if anything"
            )
        model, group = model.module, model.process_group
    if not (distributed.is_available() and distributed.is_initialized()):
        return model, Ranks()
    return model, Ranks(group, distributed.get_world_size(group), distributed.get_rank(group))


@dataclass(frozen=True)
class Roll:
    """Who heard what in one pass, over all processes.

    failed: whether anybody's pass was not finite.   layers, names: rows by layer and by parameter without a layer.
    refused: layers that did not explain somebody's gradients.   tokens: matrices that somebody looked rows up in, and
    did nothing else with.
    """

    failed: bool
    layers: dict[str, int]
    names: dict[str, int]
    refused: set[str]
    tokens: set[str]


def call_roll(
    ranks: Ranks,
    device: torch.device,
    layers: Sequence[str],
    names: Sequence[str],
    heard: Mapping[str, bool] | None,
    squares: Sequence[str] = (),
    rows: int = 0,
    tokens: Collection[str] = (),
) -> Roll:
    """Agree on one pass. heard: this process's layers, and whether they explained its gradients; None: it failed."""
    known = {} if heard is None else heard
    entries = [heard is None, *(rows if known.get(key) else 0 for key in layers)]
    entries += [known.get(key) is False for key in layers]
    entries += [key in tokens for key in layers]
    entries += [rows if name in squares else 0 for name in names]
    failed, *found = entries
    if ranks.size > 1:
        failed, *found = ranks.sum(torch.tensor([int(entry) for entry in entries], device=device)).tolist()
    size = len(layers)
    used, refused, looked = (found[i * size : (i + 1) * size] for i in range(3))
    return Roll(
        bool(failed),
        {key: count for key, count in zip(layers, used, strict=True) if count},
        {name: count for name, count in zip(names, found[3 * size :], strict=True) if count},
        {key for key, count in zip(layers, refused, strict=True) if count},
        {key for key, count in zip(layers, looked, strict=True) if count},
    )


def unheard(layer: Layer, cotangents: int, like: Tensor, by_token: bool) -> Seen:
    """A pass of a layer that this process did not use: it adds zeros to the others' sums, in the shapes of theirs."""
    groups, outputs, columns = layer.layout.matrix_shape
    if by_token or isinstance(layer, EmbeddingLayer):
        tokens = torch.zeros(1, 1, dtype=torch.long, device=like.device)
        return Seen(layer, tokens, [like.new_zeros(1, 1, columns)] * cotangents, 0.0)
    deltas = [like.new_zeros(1, 1, groups, outputs)] * cotangents
    return Seen(layer, like.new_zeros(1, 1, groups, columns), deltas, 0.0)
