"""Several processes, one model: what they agree on, and what they add up, so that all take the same step.

Every process reads statistics from its own examples, with labels of its own; sums over the processes go into the
running averages, weighted by rows. All else follows from equal numbers: every process computes inverses and steps.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.layers import GraphLeaves, Seen
from natgrad.lost_processes import listen_for_questions, naming_lost
from natgrad.optim.equal_models import check_equal_models
from natgrad.optim.last_pass import Loss
from natgrad.optim.parallel_models import find_data_group, refuse_recut, refuse_sharded
from natgrad.structures import Layerwise
from natgrad.typed_torch import is_mapping, list_numbers, split_tensor, torch_distributed


@dataclass
class Ranks:
    """The processes that train one model.

    Attributes:
        group: Given, or that of the wrappers.
        size: How many; one alone exchanges nothing.
        rank: This one's number.
        wrappers: What averages the gradients, if that is known.
        settled: True once `settle` has looked.
        device: Where the model is.
        averaged: True if gradients are averaged over them as they arise, by `fully_shard`.
        looking: True while this process alone goes backward in a loss, whose gradient is not the user's.
        sent: Bytes of messages so far, by what they are: "statistics", "inverses", "directions", "scalars".
        messages: Their number.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    wrappers: Sequence[DistributedDataParallel] = ()
    settled: bool = False
    device: torch.device = torch.device("cpu")
    averaged: bool = False
    looking: bool = False
    sent: dict[str, int] = field(default_factory=dict[str, int])
    messages: dict[str, int] = field(default_factory=dict[str, int])

    def settle(self, model: nn.Module, structure: Layerwise, leaves: GraphLeaves) -> None:
        """Look once more, before the first statistics: the model may have been wrapped since, which `meet` reads.

        Raises:
            ValueError: If another process holds another model; within `join`, where a process that is out of examples
                takes no part in sums of statistics.
        """
        self.device = next(iter(leaves.named.values())).device
        if not self.settled:
            if self.group is None:
                refuse_recut(model, leaves.named)
                found = meet(model, None, parts=True)[1]
                group = find_data_group(leaves)
                if group is not None:
                    found = Ranks(group, distributed.get_world_size(group), distributed.get_rank(group))
                    self.averaged = True
                self.group, self.size, self.rank, self.wrappers = found.group, found.size, found.rank, found.wrappers
            self.check(structure)
            self.compare(leaves.named)
            self.settled = True
        refuse_join(self.wrappers)

    def sum(self, tensor: Tensor, kind: str = "scalars", owner: int | None = None) -> Tensor:
        """The sum over all processes, the same bits on each. owner: the only process that gets it, if there is one."""
        if self.size == 1:
            return tensor
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.count(kind, found)
        with naming_lost(self.group):
            if owner is None:
                torch_distributed.all_reduce(found, group=self.group)
            else:
                distributed.reduce(found, group=self.group, group_dst=owner)
        return found

    def compare(self, named: Mapping[str, Tensor], settings: str = "") -> None:
        """ValueError on all processes unless they hold parameters of the same names and shapes, and start alike."""
        if self.size > 1 and named:
            listen_for_questions()
            # a DistributedDataParallel has broadcast its values
            check_equal_models(named, self.group, values=not (self.wrappers or self.averaged), settings=settings)

    def broadcast(self, tensor: Tensor, source: int, kind: str) -> Tensor:
        """The source's tensor, written into this process's."""
        if tensor.numel():
            self.count(kind, tensor)
            with naming_lost(self.group):
                distributed.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def count(self, kind: str, tensor: Tensor) -> None:
        """Count a message."""
        self.sent[kind] = self.sent.get(kind, 0) + tensor.numel() * tensor.element_size()
        self.messages[kind] = self.messages.get(kind, 0) + 1

    def check(self, structure: Layerwise) -> None:
        """TypeError for a structure whose statistics several processes cannot add up."""
        if self.size > 1 and not structure.sums:
            raise TypeError(
                f"structure is {structure!r}, whose statistics are no sums over examples that {self.size} processes "
                "could add up; use ng.Kronecker, ng.EigenKronecker, ng.Diagonal or ng.UnitWise"
            )

    def pool_losses(
        self, losses: Sequence[Loss], nats: float, scale: float, norms: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Any, Any, Tensor]:
        """The mean loss over all rows (None: there was none), nats per unit of it, and what the gradient is divided by.

        The gradient that all processes have is the mean of theirs, and so is its scale. Last, its norm before that: not
        finite on all of them, where one entry on one of them is not.

        Args:
            losses: Of this process's micro-batches; the mean of one process is NaN if none of them has rows.
            nats: Per unit of this process's loss.
            scale: Of this process's gradient; 0 stands for 1.
            norms: Of this process's gradients, by name.

        Raises:
            ValueError: On all processes, if their gradients differ, so that parameters would drift apart.
        """
        norm = torch.stack(list(norms.values())).square().sum().sqrt()
        rows = sum(self.weight(loss) for loss in losses)
        parts = [loss.value * self.weight(loss) for loss in losses if loss.rows]
        total = torch.stack(parts).sum() if parts else torch.zeros(())
        if self.size == 1:
            return total / rows if losses else None, nats, scale or 1.0, norm
        own = torch.tensor([nats * rows if rows else 0.0, rows, scale], dtype=torch.float64, device=norm.device)
        numbers = [total.reshape(1).to(own), own, torch.stack([norm, norm.square()]).double()]
        loss, nats_rows, all_rows, scales, sizes, squares = self.sum(torch.cat(numbers))
        self._check_gradients(sizes / self.size, squares / self.size)
        scale_mean = torch.where(scales > 0, scales / self.size, 1.0)
        # without rows the loss says nothing: infinite
        return (
            torch.where(all_rows > 0, loss / all_rows, torch.inf),
            torch.where(all_rows > 0, nats_rows / all_rows, 1.0),
            scale_mean,
            sizes / self.size,
        )

    def count_rows(self, losses: Sequence[Loss], nats: Any, device: torch.device) -> float:
        """Examples times positions of the losses of all processes, where `nats` of a loss are one event's."""
        own = torch.tensor(float(sum(loss.rows for loss in losses)), dtype=torch.float64, device=device)
        return float(self.sum(own)) / float(nats)

    def weight(self, loss: Loss) -> float:
        """What a loss weighs: its rows; over several processes, what it is a mean over."""
        return loss.weight or loss.count or loss.rows if self.size > 1 and loss.rows else loss.rows

    @property
    def averages(self) -> bool:
        """True if somebody is known to take the mean over the processes of their gradients."""
        return self.averaged or bool(self.wrappers)

    def _check_gradients(self, norm: Tensor, square: Tensor) -> None:
        """Check that all processes have the same gradient.

        Args:
            norm: The mean over processes of their gradients' norms.
            square: Of the norms' squares.
        """
        if not bool(square - norm.square() > 1e-6 * square):  # of equal numbers it is round-off; false for NaN
            return
        what = f"the {self.size} processes have different gradients, and their parameters would drift apart: "
        if self.wrappers:
            raise ValueError(
                f"{what}call the DistributedDataParallel and not the module inside it, with a communication hook that "
                "averages over all of them, do the last backward outside of no_sync(), and change gradients alike"
            )
        if self.averaged:
            raise ValueError(
                f"{what}call fully_shard on the whole model too, and do the last backward with "
                "set_requires_gradient_sync(True)"
            )
        raise ValueError(
            f"{what}wrap the model in a DistributedDataParallel, or average the gradients before optimizer.step()"
        )

    def sum_entries(self, fresh: dict[str, Tensor], owner: int | None = None) -> dict[str, Tensor]:
        """`sum`, by name, in one message per dtype."""
        return self._in_messages(fresh, "statistics", owner)

    def average(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The means over all processes by name, in one message per dtype."""
        found = self._in_messages(tensors, "gradients")
        return {name: total / self.size for name, total in found.items()}

    def _in_messages(self, tensors: Mapping[str, Tensor], kind: str, owner: int | None = None) -> dict[str, Tensor]:
        kinds: dict[Any, list[str]] = {}
        for name, tensor in tensors.items():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
        found = dict[str, Tensor]()
        for names in kinds.values():
            flat = self.sum(torch.cat([tensors[name].reshape(-1) for name in names]), kind, owner)
            parts = split_tensor(flat, [tensors[name].numel() for name in names])
            found |= {name: part.view_as(tensors[name]) for name, part in zip(names, parts, strict=True)}
        return {name: found[name] for name in tensors}

    def generator(self, shared: torch.Generator) -> torch.Generator:
        """A source of labels of this process's own. The shared one moves alike everywhere: one checkpoint fits all."""
        if self.size == 1:
            return shared
        seed = torch.randint(2**62, (), generator=shared, device=shared.device)
        return torch.Generator(shared.device).manual_seed(int(seed) + self.rank)


def meet(model: Any, group: Any, parts: bool = False) -> tuple[Any, Ranks]:
    """The model without its `DistributedDataParallel`, and the processes that train it: one, if there is none.

    Args:
        model: As the user gave it; a dict of tensors has no wrapper of its own.
        group: The processes whose statistics are added up; None: those of the wrapper around the model, or around what
            it is a part of.
        parts: True for an optimizer that puts models in parts together.

    Raises:
        TypeError: For a model whose parameters are not whole on this process, and for a group that is none.
        ValueError: For a group that this process is not in or that is not the wrapper's, for static_graph=True, which
            takes the first backward that comes for the user's, and for a wrapper around some of the parameters only.
    """
    refuse_sharded(model, parts=parts)
    given, wrappers = model, list[Any](find_wrappers(name_parameters(model).values()))
    if isinstance(model, DistributedDataParallel):
        wrappers = [given]
    inner = given.module if isinstance(model, (DistributedDataParallel, DataParallel)) else given
    groups = [wrapper.process_group for wrapper in wrappers] + ([] if group is None else [check_group(group)])
    if any(other is not groups[0] for other in groups):
        raise ValueError(
            "the model is within a DistributedDataParallel of other processes than group: leave group out, or give the "
            "wrapper's process_group"
        )
    check_wrappers(inner, wrappers)
    if not groups:
        return inner, Ranks()
    found = groups[0]
    return inner, Ranks(found, distributed.get_world_size(found), distributed.get_rank(found), wrappers)


def name_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters of a module, or of a dict of tensors, by name."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    return dict(model) if is_mapping(model) else {}


def find_wrappers(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Every `DistributedDataParallel` that averages gradients of these parameters."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    own = {id(p) for p in params}
    objects = gc.get_objects()  # a wrapper leaves no trace in what it wraps
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    alive = [one for one in objects if type(one) in kinds] if kinds else []
    return [one for one in alive if not own.isdisjoint(id(p) for p in one.parameters())]


def check_wrappers(model: Any, wrappers: Sequence[DistributedDataParallel]) -> None:
    """ValueError for a wrapper that statistics cannot go with."""
    if any(wrapper.static_graph for wrapper in wrappers):
        raise ValueError(
            "model is a DistributedDataParallel with static_graph=True, which reduces the gradients after the very "
            "first backward, here that of the statistics; use find_unused_parameters=True instead, if anything"
        )
    averaged = {id(p) for wrapper in wrappers for p in wrapper.parameters()}
    alone = [name for name, p in name_parameters(model).items() if p.requires_grad and id(p) not in averaged]
    if wrappers and alone:
        raise ValueError(
            f"parameters {alone} lie outside of the DistributedDataParallel that the others are in: nobody averages "
            "their gradients; wrap the whole model"
        )


def check_group(group: Any) -> Any:
    """The group. TypeError for anything else, ValueError for one that this process is not in."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("group is given, and torch.distributed is not initialized: call init_process_group first")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group is {group!r}, expected a process group that this process is in: torch.distributed.group.WORLD for "
            "all processes, or what torch.distributed.new_group returned"
        )
    if distributed.get_rank(group) < 0:
        raise ValueError("group is a process group that this process is not in")
    return group


def refuse_join(wrappers: Sequence[DistributedDataParallel]) -> None:
    """ValueError within `join`, for uneven inputs."""
    # torch says so nowhere else; the statistics would wait for a process that has gone, or meet its gradients
    if any(getattr(getattr(wrapper, "_join_config", None), "enable", False) for wrapper in wrappers):
        raise ValueError(
            "the model is within DistributedDataParallel.join(): a process that is out of examples adds no statistics, "
            "and the others would wait for ever. Give all as many batches: drop_last=True, or empty ones (x[:0]) last"
        )


@dataclass(frozen=True)
class Roll:
    """Who heard what in one pass, over all processes.

    Attributes:
        failed: True if the pass of some process was not finite.
        layers: Rows by layer.
        positions: Examples times positions by layer.
        names: Rows by parameter without a layer.
        refused: Layers that did not explain the gradients of some process.
        tokens: Matrices that some process looked rows up in, and did nothing else with.
        parts: How many passes a matrix had where it was used most, of those that were used more than once.
    """

    failed: bool
    layers: dict[str, int]
    positions: dict[str, int]
    names: dict[str, int]
    refused: set[str]
    tokens: set[str]
    parts: Mapping[str, int]


def call_roll(
    ranks: Ranks,
    layers: Sequence[str],
    names: Sequence[str],
    heard: Mapping[str, bool] | None,
    squares: Collection[str] = (),
    rows: int = 0,
    passes: Sequence[Seen] = (),
) -> Roll:
    """Agree on one pass. heard: this process's layers, and whether they explained its gradients; None: it failed."""
    known: Mapping[str, bool] = {} if heard is None else heard
    tokens, parts = {one.key for one in passes if one.by_token}, {one.key: len(one.split_parts()) for one in passes}
    positions = {one.key: round(one.positions) for one in passes}
    entries: list[int] = [heard is None, *(rows if known.get(key) else 0 for key in layers)]
    entries += [known.get(key) is False for key in layers]
    entries += [key in tokens for key in layers]
    entries += [parts.get(key, 1) > 1 for key in layers]
    entries += [positions.get(key, 0) if known.get(key) else 0 for key in layers]
    entries += [rows if name in squares else 0 for name in names]
    failed, *found = entries
    if ranks.size > 1:
        failed, *found = list_numbers(ranks.sum(torch.tensor([int(entry) for entry in entries], device=ranks.device)))
    size = len(layers)
    used, refused, looked, mixed, seen = (found[i * size : (i + 1) * size] for i in range(5))
    several = [key for key, count in zip(layers, mixed, strict=True) if count]
    return Roll(
        bool(failed),
        {key: count for key, count in zip(layers, used, strict=True) if count},
        dict(zip(layers, seen, strict=True)),
        {name: count for name, count in zip(names, found[5 * size :], strict=True) if count},
        {key for key, count in zip(layers, refused, strict=True) if count},
        {key for key, count in zip(layers, looked, strict=True) if count},
        dict(zip(several, find_largest(ranks, [parts.get(key, 1) for key in several]), strict=True)),
    )


def find_largest(ranks: Ranks, counts: Sequence[int]) -> list[int]:
    """The largest of each count over all processes."""
    if ranks.size == 1 or not counts:
        return list(counts)
    table = torch.zeros(ranks.size, len(counts), dtype=torch.int64, device=ranks.device)
    table[ranks.rank] = torch.tensor(counts, dtype=torch.int64, device=ranks.device)
    return list_numbers(ranks.sum(table).amax(0))
