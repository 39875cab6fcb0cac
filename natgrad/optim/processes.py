"""Processes that train one model together: what they agree on and add up, and which of them holds which block."""

from __future__ import annotations

import functools
import gc
import hashlib
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.families import Criterion
from natgrad.ground.exchanges import ALONE, Sums
from natgrad.ground.pure import leaves, map_tensors, refuse_scripted
from natgrad.ground.typed_torch import (
    hook_gradient,
    is_mapping,
    list_numbers,
    measure_norm,
    split_tensor,
    torch_distributed,
)
from natgrad.ground.whole_tensors import any_split, is_fully_sharded, is_split, listen_for_questions, naming_lost
from natgrad.layers import GraphLeaves, Layout, Seen
from natgrad.optim.guard import NotFiniteError
from natgrad.optim.passes import Loss
from natgrad.rules import Products
from natgrad.structures import Layerwise, Statistics

# Processes that train one model together hold the same one: compared once, before they add anything up

MODULUS = 2**61 - 1
DTYPES = (  # by numbers, which processes can exchange
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
ROUNDED = 1e-12
"""Of the square of a sum over processes: the variance below which all of them have the same number."""


def check_equal_models(named: Mapping[str, Tensor], group: Any, *, values: bool = False, settings: str = "") -> None:
    """Check that all processes of a group train parameters of the same names, shapes and dtypes.

    All of them call it at the same time. Two numbers a process are exchanged; the names only where these differ.
    """
    device = next(iter(named.values())).device
    numbers = [hash_names(named), hash_values(named) if values else 0, hash_text(settings)]
    own = torch.tensor(numbers, device=device)
    rows = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    with naming_lost(group):
        torch_distributed.all_gather(rows, own, group=group)
    hashes: list[list[int]] = list_numbers(torch.stack(rows))
    if any(names != hashes[0][0] for names, _, _ in hashes):
        tables: list[Any] = [None] * len(rows)
        torch_distributed.all_gather_object(tables, describe_parameters(named), group=group)
        rank = next(i for i, table in enumerate(tables) if table != tables[0])
        first = next(name for name in {**tables[0], **tables[rank]} if tables[0].get(name) != tables[rank].get(name))
        raise ValueError(
            f"the {len(rows)} processes hold different models: parameter {first!r} is "
            f"{tables[0].get(first, 'missing')} on rank 0 and {tables[rank].get(first, 'missing')} on rank {rank}. "
            "Build the same model on all of them, or give each model a group of its own processes"
        )
    rank = next((i for i, row in enumerate(hashes) if row[2] != hashes[0][2]), None)
    if rank is not None:
        texts: list[Any] = [None] * len(rows)
        torch_distributed.all_gather_object(texts, settings, group=group)
        first, other = list_differences(texts[0], texts[rank])
        raise ValueError(
            f"the {len(rows)} processes were given different settings, {first} on rank 0 and {other} on rank {rank}: "
            "build the optimizer alike on all of them"
        )
    rank = next((i for i, row in enumerate(hashes) if row[1] != hashes[0][1]), None)
    if rank is not None:
        raise ValueError(
            f"the parameters have other values on rank {rank} than on rank 0, and would stay different: seed all "
            "processes alike before the model is built, load one checkpoint on all, or wrap it in a "
            "DistributedDataParallel"
        )


def describe_parameters(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and dtype by name, as text."""
    return {name: f"{tuple(p.shape)} of {p.dtype}" for name, p in named.items()}


def hash_names(named: Mapping[str, Tensor]) -> int:
    """A number that differs where a name, a shape, a dtype or their order does."""
    text = "\n".join(f"{name}: {what}" for name, what in describe_parameters(named).items())
    return hash_text(text)


def hash_text(text: str) -> int:
    """A number that differs where a text does, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % MODULUS


def describe_settings(*settings: object) -> str:
    """Choices as they are printed, one a line, without addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(map(repr, settings)))


def describe_groups(groups: Iterable[Mapping[str, Any]], *keys: str) -> str:
    """The numbers of parameter groups that every process must have alike, one group a line."""
    return "\n".join(", ".join(f"{key}={float(group[key])}" for key in keys) for group in groups)


def list_differences(first: str, other: str) -> list[str]:
    """The lines of either text that the other has not, in one line each."""
    texts = first.splitlines(), other.splitlines()
    pairs = (texts, texts[::-1])
    return [", ".join([line for line in own if line not in others] or own) for own, others in pairs]


def mark_text(text: str) -> float:
    """A number in [1, 2) that differs where a text does, the same in every process."""
    return 1.0 + hash_text(text) / MODULUS


def hash_values(named: Mapping[str, Tensor]) -> int:
    """A number that differs where an entry does, but for rare chance."""
    device = next(iter(named.values())).device
    sums: list[int] = list_numbers(torch.stack([sum_bits(p.detach()).to(device) for p in named.values()]))
    number = 0
    for bits in sums:
        number = (number * 1_000_003 + bits) % MODULUS
    return number


def sum_bits(tensor: Tensor) -> Tensor:
    """The sum of all entries' bits as integers, a scalar tensor."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return plain.contiguous().view(kinds[plain.element_size()]).sum(dtype=torch.int64)


def meet_processes(named: Mapping[str, Tensor], group: Any, *settings: object) -> Processes:
    """The processes of a group, after they compared what they train; one alone for no group.

    Args:
        named: What is trained, by name.
        group: Of `torch.distributed`, or None.
        *settings: What must be alike on all of them.

    Raises:
        TypeError: For a group that is none.
        ValueError: For a group that this process is not in; if the processes start from other values.
    """
    if group is None:
        return Processes()
    processes = meet(named, group)[1]
    processes.device = next(iter(named.values())).device
    processes.compare(named, describe_settings(*settings))
    return processes


def count_trouble(trouble: Exception | None) -> float:
    """An error as a number: 0 for none, 1 for a number that is not finite, 2 for any other."""
    if trouble is None:
        return 0.0
    return 1.0 if isinstance(trouble, NotFiniteError) else 2.0


# Several processes, one model: what they agree on, and what they add up, so that all take the same step

SLAB = 2**22
"""Numbers that a process receives of a matrix at a time."""


@dataclass(eq=False)
class Processes:
    """The processes that train one model; one alone exchanges nothing. All make the same calls in the same order.

    Attributes:
        group: Given, or that of the wrappers.
        size: How many.
        rank: This one's number.
        wrappers: What averages the gradients, if that is known.
        settled: True once `settle` has looked.
        device: Where the model is.
        averaged: True if gradients are averaged over them as they arise, by `fully_shard`.
        looking: True while this process alone goes backward in a loss, whose gradient is not the user's.
        sent: Bytes of messages so far, by what they are: "statistics", "inverses", "directions", "gradients", "rows",
            "checkpoints" and "scalars".
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

    def settle(
        self,
        model: Any,
        named: Mapping[str, Tensor],
        structure: object,
        settings: Iterable[object],
        leaves: GraphLeaves | None = None,
    ) -> None:
        """Look once more, before the first step, as the model may have been wrapped since; then compare all processes.

        Args:
            model: That is trained.
            named: Its parameters.
            structure: How its metric is stored.
            settings: What else must be alike on all processes, for the same sums to be made everywhere.
            leaves: The parameters as they are in the graph of a pass, of a model that may lie in parts.
        """
        self.device = next(iter(named.values())).device
        if not self.settled:
            if self.group is None:
                if leaves is not None and not any_split(named.values()):
                    refuse_sharded(model)  # cut into parts since: the parameters are others now
                others = meet(model, None, parts=leaves is not None)[1]
                self.group, self.wrappers = others.group, others.wrappers
                parts = None if leaves is None else find_data_group(leaves)
                self.group, self.averaged = parts or self.group, parts is not None
                if self.group is not None:
                    self.size, self.rank = distributed.get_world_size(self.group), distributed.get_rank(self.group)
            if isinstance(structure, Layerwise):
                self.check(structure)
            self.compare(named, describe_settings(structure, *settings))
            self.settled = True
        if self.wrappers:
            refuse_join(self.wrappers)

    def sum(self, tensor: Tensor, kind: str = "scalars", owner: int | None = None) -> Tensor:
        """The sum over all processes, the same bits on each.

        Args:
            tensor: This one's.
            kind: Under which name the bytes are counted.
            owner: The only process that gets it; None for all.
        """
        if self.size == 1:
            return tensor
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.count(kind, total)
        with naming_lost(self.group):
            if owner is None:
                torch_distributed.all_reduce(total, group=self.group)
            else:
                distributed.reduce(total, group=self.group, group_dst=owner)
        return total

    def compare(self, named: Mapping[str, Tensor], settings: str = "") -> None:
        """ValueError on all processes unless they hold parameters of the same names and shapes, and start alike.

        Args:
            named: The parameters.
            settings: What else must be alike, as text.
        """
        if self.size > 1 and named:
            listen_for_questions()
            # a DistributedDataParallel has broadcast its values
            check_equal_models(named, self.group, values=not (self.wrappers or self.averaged), settings=settings)

    def broadcast(self, tensor: Tensor, source: int, kind: str) -> Tensor:
        """The source's tensor, written into this process's.

        Args:
            tensor: This process's, of its shape.
            source: Its number.
            kind: Under which name the bytes are counted.
        """
        if tensor.numel():
            self.count(kind, tensor)
            with naming_lost(self.group):
                distributed.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def count(self, kind: str, tensor: Tensor) -> None:
        """Count a message.

        Args:
            kind: What it is, for reports.
            tensor: What is sent.
        """
        self.sent[kind] = self.sent.get(kind, 0) + tensor.numel() * tensor.element_size()
        self.messages[kind] = self.messages.get(kind, 0) + 1

    def check(self, structure: Layerwise) -> None:
        """TypeError for a structure whose statistics several processes cannot add up.

        Args:
            structure: How the metric is stored.
        """
        if self.size > 1 and not structure.sums:
            raise TypeError(
                f"structure is {structure!r}, whose statistics are no sums over examples that {self.size} processes "
                "could add up; use ng.Kronecker, ng.EigenKronecker, ng.Diagonal or ng.UnitWise"
            )

    def pool_losses(
        self, losses: Sequence[Loss], nats: float, scale: float, norms: Mapping[str, Tensor], groups: Callable[[], str]
    ) -> tuple[Tensor | None, Any, Any, Tensor]:
        """The mean loss over all rows (None: none was told), nats per unit of it, and what the gradient is divided by.

        The gradient that all processes have is the mean of theirs, and so is its scale. Last, its norm before that: not
        finite on all of them, where one entry on one of them is not.

        Args:
            losses: This process's.
            nats: Per example in one unit of the mean loss.
            scale: What this process's gradient is multiplied by.
            norms: Of its gradients, by name.
            groups: Describes the numbers of the step's parameter groups.
        """
        norm = measure_norm(torch.stack(list(norms.values())))
        rows = sum(loss.weight for loss in losses)
        parts = [loss.value * loss.weight for loss in losses if loss.rows]
        total = torch.stack(parts).sum() if parts else torch.zeros(())
        if self.size == 1:
            return total / rows if losses else None, nats, scale or 1.0, norm
        numbers_of_groups = groups()
        mark = mark_text(numbers_of_groups)
        few = [nats * rows if rows else 0.0, rows, float(len(losses)), scale, mark, mark**2]
        own = torch.tensor(few, dtype=torch.float64, device=norm.device)
        numbers = [total.reshape(1).to(own), own, torch.stack([norm, norm.square()]).double()]
        loss, nats_rows, all_rows, told, scales, marks, mark_squares, sizes, squares = self.sum(torch.cat(numbers))
        if bool(self.size * mark_squares - marks.square() > ROUNDED * marks.square()):
            self.refuse_groups(numbers_of_groups)
        self._check_gradients(sizes / self.size, squares / self.size)
        scale_mean = torch.where(scales > 0, scales / self.size, 1.0)
        # where no target counts the loss is no number; one that nobody was told of bounds nothing: infinite
        return (
            torch.where(all_rows > 0, loss / all_rows, torch.where(told > 0, torch.nan, torch.inf)),
            torch.where(all_rows > 0, nats_rows / all_rows, 1.0),
            scale_mean,
            sizes / self.size,
        )

    @property
    def averages(self) -> bool:
        """True if somebody is known to take the mean over the processes of their gradients."""
        return self.averaged or bool(self.wrappers)

    def refuse_groups(self, groups: str) -> NoReturn:
        """ValueError, on all processes, for parameter groups that differ between them.

        Args:
            groups: `describe_groups`, of this process's.
        """
        texts = self.share_objects(groups)
        rank = next(i for i, text in enumerate(texts) if text != texts[0])
        first, other = list_differences(texts[0], texts[rank])
        raise ValueError(
            f"the {self.size} processes have other numbers in their parameter groups, {first} on rank 0 and {other} on "
            f"rank {rank}, and their parameters would drift apart; nothing was changed. Set them alike on all: a "
            "scheduler that reads the loss takes opt.state_report().loss, which is that of all rows"
        )

    def _check_gradients(self, norm: Tensor, square: Tensor) -> None:
        """Check that all processes have the same gradient."""
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
        """`sum`, by name, in one message per dtype.

        Args:
            fresh: This process's.
            owner: As for `sum`.
        """
        return self._in_messages(fresh, "statistics", owner)

    def average(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The means over all processes by name, in one message per dtype.

        Args:
            tensors: This process's.
        """
        totals = self._in_messages(tensors, "gradients")
        return {name: total / self.size for name, total in totals.items()}

    def _in_messages(self, tensors: Mapping[str, Tensor], kind: str, owner: int | None = None) -> dict[str, Tensor]:
        kinds: dict[Any, list[str]] = {}
        for name, tensor in tensors.items():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
        totals = dict[str, Tensor]()
        for names in kinds.values():
            flat = self.sum(torch.cat([tensors[name].reshape(-1) for name in names]), kind, owner)
            parts = split_tensor(flat, [tensors[name].numel() for name in names])
            totals |= {name: part.view_as(tensors[name]) for name, part in zip(names, parts, strict=True)}
        return {name: totals[name] for name in tensors}

    # exchanges besides sums

    def share_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Every process's numbers, in the order of the processes.

        Args:
            numbers: This one's; as many on all of them.
            device: Where they are exchanged.
        """
        if self.size == 1:
            return [[float(number) for number in numbers]]
        table = torch.zeros(self.size, len(numbers), dtype=torch.float64, device=device)
        table[self.rank] = torch.tensor(numbers, dtype=torch.float64, device=device)
        return list_numbers(self.sum(table))  # adding zeros rounds nothing, and infinities stay in their own entries

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes, (sum of all b, ...) from (b, ...) each, in the order of the processes.

        Args:
            rows: This process's; of the dtype that holds those of all, real or complex, afterwards.
        """
        if self.size == 1:
            return rows
        shapes = self.share_numbers([len(rows), DTYPES.index(rows.dtype)], rows.device)
        counts = [int(count) for count, _ in shapes]
        dtype = functools.reduce(torch.promote_types, (DTYPES[int(place)] for _, place in shapes))
        table = rows.new_zeros((sum(counts), *rows.shape[1:]), dtype=dtype)
        start = sum(counts[: self.rank])
        table[start : start + len(rows)] = rows
        return self.sum(table)

    def send_tree(self, tree: Any, source: int, kind: str) -> Any:
        """The source's tree on every process, the source too: each tensor lies as the source's, in storage of its own.

        Products round by how a matrix lies in memory.

        Args:
            tree: Nested dicts and lists of tensors and plain values. Only the source's counts.
            source: Its number.
            kind: Under which name the bytes are counted.
        """
        device = self.device
        box = [map_tensors(tree, lambda t: t.to("meta")) if self.rank == source else None]
        with naming_lost(self.group):
            distributed.broadcast_object_list(box, group=self.group, group_src=source, device=device)
        shapes = box[0]
        wanted = list(leaves(shapes))
        own = list(leaves(tree)) if self.rank == source else []
        tensors: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(t.dtype for t in wanted):
            places = [i for i, t in enumerate(wanted) if t.dtype == dtype]
            sizes = [wanted[i].numel() for i in places]
            if own:
                flat = torch.cat([own[i].reshape(-1) for i in places])
            else:
                flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            parts = split_tensor(self.broadcast(flat, source, kind), sizes)
            for i, part in zip(places, parts, strict=True):
                tensors[i] = torch.empty_like(wanted[i], device=device).copy_(part.view(wanted[i].shape))
        numbers = iter(range(len(wanted)))
        return map_tensors(shapes, lambda t: tensors[next(numbers)])

    @contextmanager
    def failing_together(self, device: torch.device) -> Generator[None]:
        """An error within is an error on all processes, before any of them waits for another.

        Nothing is exchanged within. The process that fails raises its own error.

        Args:
            device: Where numbers are exchanged.

        Raises:
            NotFiniteError: On the others, where one met a number that is not finite.
            RuntimeError: On the others, for any other error.
        """
        trouble: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            trouble = error
        if self.size == 1:
            return
        codes = [numbers[0] for numbers in self.share_numbers([count_trouble(trouble)], device)]
        if trouble is not None:
            raise trouble
        if any(codes):
            rank = next(i for i, code in enumerate(codes) if code)
            kind = NotFiniteError if codes[rank] == 1 else RuntimeError
            raise kind(
                f"process {rank} of {self.size} met an error, which it reports itself; nothing was changed anywhere"
            )

    def share_objects(self, thing: Any) -> list[Any]:
        """Every process's object, in the order of the processes. It is pickled: a few plain values.

        Args:
            thing: This one's.
        """
        if self.size == 1:
            return [thing]
        objects: list[Any] = [None] * self.size
        with naming_lost(self.group):
            torch_distributed.all_gather_object(objects, thing, group=self.group)
        return objects

    def receive_from(self, source: int, tensor: Tensor) -> Tensor:
        """The tensor of one process.

        Args:
            source: Its number.
            tensor: There what is sent; elsewhere one of its shape, which is written over.
        """
        return self.broadcast(tensor.contiguous(), source, "rows")

    def share_columns(self, matrix: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """All processes' rows, some columns at a time: each column of the slabs comes to one process.

        The Gram matrix of all rows is the sum over processes and slabs of S S^T. A process receives its share of all
        rows' entries, and holds `SLAB` of them at a time.

        Args:
            matrix: This process's rows, shape (r, columns).
            counts: Every process's r.

        Yields:
            S, shape (sum of counts, some columns), rows in the order of the processes.
        """
        columns, size = matrix.shape[1], self.size
        width = max(1, SLAB // max(1, sum(counts))) * size
        for start in range(0, columns, width):
            stop = min(start + width, columns)
            edges = [start + (stop - start) * i // size for i in range(size + 1)]
            widths = [edges[i + 1] - edges[i] for i in range(size)]
            sent = torch.cat([matrix[:, edges[i] : edges[i + 1]].reshape(-1) for i in range(size)])
            own = widths[self.rank]
            received = sent.new_empty(sum(counts) * own)
            sizes = [count * own for count in counts], [len(matrix) * w for w in widths]
            with naming_lost(self.group):
                torch_distributed.all_to_all_single(received, sent, *sizes, group=self.group)
            yield received.view(sum(counts), own)

    def generator(self, shared: torch.Generator) -> torch.Generator:
        """A source of labels of this process's own. The shared one moves alike everywhere: one checkpoint fits all.

        Args:
            shared: In the same state on all processes.
        """
        if self.size == 1:
            return shared
        seed = torch.randint(2**62, (), generator=shared, device=shared.device)
        return torch.Generator(shared.device).manual_seed(int(seed) + self.rank)


def meet(model: Any, group: Any, parts: bool = False) -> tuple[Any, Processes]:
    """The model without its `DistributedDataParallel`, and the processes that train it: one, if there is none."""
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
        return inner, Processes()
    group = groups[0]
    return inner, Processes(group, distributed.get_world_size(group), distributed.get_rank(group), wrappers)


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
    alive = [thing for thing in objects if type(thing) in kinds] if kinds else []
    return [wrapper for wrapper in alive if not own.isdisjoint(id(p) for p in wrapper.parameters())]


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
    """Who heard what in one pass, over all processes."""

    failed: bool  # True if the pass of some process was not finite
    layers: dict[str, int]  # rows by layer
    positions: dict[str, int]  # examples times positions by layer
    names: dict[str, int]  # rows by parameter without a layer
    refused: set[str]  # layers that did not explain the gradients of some process
    tokens: set[str]  # matrices that some process looked rows up in, and did nothing else with
    # how many passes a matrix had where it was used most, of those that were used more than once
    parts: dict[str, int]


def call_roll(
    processes: Processes,
    layers: Sequence[str],
    names: Sequence[str],
    heard: Mapping[str, bool] | None,
    squares: Collection[str] = (),
    rows: int = 0,
    passes: Sequence[Seen] = (),
) -> Roll:
    """Agree on one pass. heard: this process's layers, and whether they explained its gradients; None: it failed."""
    known: Mapping[str, bool] = {} if heard is None else heard
    passed = {seen.key: seen for seen in passes}
    entries: list[int] = [heard is None]
    for key in layers:
        seen, explains = passed.get(key), known.get(key)
        counted = (rows, 0 if seen is None else round(seen.positions)) if explains else (0, 0)
        entries += [*counted, explains is False]
        entries += [False, False] if seen is None else [seen.by_token, len(seen.split_parts()) > 1]
    for name in names:
        entries.append(rows if name in squares else 0)
    if processes.size > 1:
        table = torch.tensor([int(entry) for entry in entries], device=processes.device)
        entries = list_numbers(processes.sum(table))
    numbers, several = iter(entries), list[str]()
    roll = Roll(bool(next(numbers)), {}, {}, {}, set(), set(), {})
    for key in layers:
        used, roll.positions[key], refused, looked, mixed = islice(numbers, 5)
        if used:
            roll.layers[key] = used
        if refused:
            roll.refused.add(key)
        if looked:
            roll.tokens.add(key)
        if mixed:
            several.append(key)
    for name, count in zip(names, numbers, strict=True):
        if count:
            roll.names[name] = count
    if several:
        own = [len(passed[key].split_parts()) if key in passed else 1 for key in several]
        tables = processes.share_numbers(own, processes.device)
        roll.parts.update({key: int(max(counts)) for key, *counts in zip(several, *tables, strict=True)})
    return roll


# Statistics on their way: messages of many blocks

BUCKET = 2**25
"""Bytes of a message, about: what comes while one is full goes into the next."""
AHEAD = 2**28
"""Bytes that are on their way at most. Then a process waits for the first of them, whose memory it frees."""
STRIPS = 4
"""Strips of rows that a symmetric matrix is sent in, each up to its diagonal block: 5/8 of its entries."""
SMALL = 64
"""Rows of a symmetric matrix below which it is sent as it is: strips would take longer than its bytes."""

Wait = Callable[[], Tensor]


@dataclass
class Message:
    """Entries of one dtype and device for one owner, or for all."""

    kind: tuple[int | None, torch.dtype, torch.device]  # the owner (None: all), the dtype and the device
    # block, entry, the shape that comes out, and its numbers in this message
    entries: list[tuple[str, str, torch.Size, int]] = field(default_factory=list[tuple[str, str, torch.Size, int]])
    parts: list[Tensor] = field(default_factory=list[Tensor])  # what is sent, in pieces that follow one another
    numbers: int = 0  # how many there are

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numbers * self.kind[1].itemsize

    def pack(self) -> Tensor:
        """All parts in one flat tensor; they are let go."""
        flat = torch.empty(self.numbers, dtype=self.kind[1], device=self.kind[2])
        for part, place in zip(self.parts, split_tensor(flat, [p.numel() for p in self.parts]), strict=True):
            place.view(part.shape).copy_(part)
        self.parts.clear()
        return flat


class ArrivingSums:
    """Statistics of one pass on their way to all processes, or to their blocks' owners.

    All processes send the same blocks in the same order. Waiting sends nothing: each may do that when it likes.

    Args:
        processes: The processes.
        symmetric: The entries whose matrices are symmetric: a part of them is sent.
        deliver: Takes a block's sums, once they are known to be good.
        fine: Whether this process's own part is finite.
    """

    def __init__(
        self,
        processes: Processes,
        symmetric: frozenset[str],
        deliver: Callable[[str, dict[str, Tensor]], None],
        fine: bool,
    ) -> None:
        self.processes, self.symmetric, self.deliver = processes, symmetric, deliver
        self.bad = start_sum(processes, torch.tensor(float(not fine), device=processes.device), "scalars")
        self.taken: bool | None = None
        self.open: dict[Any, Message] = {}
        self.going: deque[tuple[Message, Wait]] = deque()
        self.missing: dict[str, tuple[list[str], dict[str, Tensor]]] = {}

    def send(self, key: str, fresh: Mapping[str, Tensor], owner: int | None) -> None:
        """Send a block's part, with those that come after it."""
        self.missing[key] = list(fresh), {}
        for name, tensor in fresh.items():
            kind = owner, tensor.dtype, tensor.device
            message = self.open.setdefault(kind, Message(kind))
            parts = list(cut_strips(tensor)) if name in self.symmetric else [tensor]
            numbers = sum(part.numel() for part in parts)
            message.entries.append((key, name, tensor.shape, numbers))
            message.parts += parts
            message.numbers += numbers
            if message.size >= BUCKET:
                self._start(self.open.pop(kind))

    def finish(self) -> None:
        """Send what is left."""
        while self.open:
            self._start(self.open.pop(next(iter(self.open))))

    def wait(self) -> bool:
        """Deliver all that is on its way; False where some part was not finite: then nothing is delivered."""
        while self.going:
            self._receive()
        return self._is_good()

    def _start(self, message: Message) -> None:
        self.going.append((message, start_sum(self.processes, message.pack(), "statistics", message.kind[0])))
        while sum(bucket.size for bucket, _ in self.going) > AHEAD and len(self.going) > 1:
            self._receive()

    def _receive(self) -> None:
        message, wait = self.going.popleft()
        flat = wait()
        if not self._is_good():
            return
        parts = split_tensor(flat, [numbers for *_, numbers in message.entries])
        for (key, name, shape, _), part in zip(message.entries, parts, strict=True):
            names, tensors = self.missing[key]
            tensors[name] = join_strips(part, shape) if name in self.symmetric else part.clone().view(shape)
            if len(tensors) == len(names):  # entries of several dtypes come one after the other
                self.deliver(key, {n: tensors[n] for n in names})
                del self.missing[key]

    def _is_good(self) -> bool:
        if self.taken is None:
            self.taken = not bool(self.bad())
        return self.taken


def start_sum(processes: Processes, tensor: Tensor, kind: str, owner: int | None = None) -> Wait:
    """Start `processes.sum` of a tensor, which is written over. What comes back waits for it."""
    processes.count(kind, tensor)
    with naming_lost(processes.group):
        if owner is None:
            work: Any = torch_distributed.all_reduce(tensor, group=processes.group, async_op=True)
        else:
            work = torch_distributed.reduce(tensor, group=processes.group, group_dst=owner, async_op=True)

    def wait() -> Tensor:
        with naming_lost(processes.group):
            work.wait()
        return tensor

    return wait


def list_strips(shape: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row, excluded, of the strips of a symmetric matrix (..., n, n); one strip of a small one."""
    n = shape[-1] if len(shape) > 1 else 0
    count = STRIPS if n >= SMALL else 1
    return [(n * i // count, n * (i + 1) // count) for i in range(count)]


def cut_strips(matrix: Tensor) -> Iterator[Tensor]:
    """The rows of symmetric matrices (..., n, n) in a few strips, each without what lies right of its diagonal block.

    Views of them: nothing is copied.
    """
    if matrix.dim() < 2:
        yield matrix
        return
    for first, last in list_strips(matrix.shape):
        yield matrix[..., first:last, :last]


def join_strips(flat: Tensor, shape: torch.Size) -> Tensor:
    """The symmetric matrices whose strips follow one another.

    shape: (..., n, n); a vector's comes back as it is.
    """
    if len(shape) < 2:
        return flat.clone().view(shape)
    matrix, lead, start = flat.new_empty(shape), shape[:-2], 0
    for first, last in list_strips(shape):
        size = lead.numel() * (last - first) * last
        strip = flat[start : start + size].view(*lead, last - first, last)
        matrix[..., first:last, :last] = strip
        matrix[..., :first, first:last] = strip[..., :first].mT
        start += size
    return matrix


# Which process solves which block: by modelled cost, the dearest first to whoever has the least to do

BUDGET = 2**32
"""Bytes of state that a process keeps with `share="auto"` before the state is shared out."""
WAYS = ("auto", "speed", "memory")


@dataclass(frozen=True)
class Cost:
    """What a block takes."""

    work: float  # the sum of n^3 over the matrices that are inverted; its entries where nothing is
    state: float  # numbers that are remembered between steps


@dataclass
class Owners:
    """Every block has an owner, who alone inverts it."""

    processes: Processes  # the processes
    # "speed" sends inverses to all, and nothing between updates; "memory" leaves a block's statistics, inverse and mean
    # gradient with its owner, who sends its direction at every step; "auto" is one of them, by the budget
    share: str = "auto"
    budget: int = BUDGET  # most bytes of state per process with "speed", where share is "auto"
    costs: dict[str, Cost] = field(default_factory=dict[str, Cost])  # by block
    of: dict[str, int] = field(default_factory=dict[str, int])  # the owner's number by block
    done: float = 0.0  # sum of n^3 over all inversions that this process made so far

    @property
    def is_shared(self) -> bool:
        """True if there is somebody to share with."""
        return self.processes.size > 1

    @property
    def apart(self) -> bool:
        """True if a block's numbers are its owner's alone."""
        return self.is_shared and self.share == "memory"

    def solves(self, key: str) -> bool:
        """Whether this process inverts a block."""
        return not self.is_shared or self.of.get(key, 0) == self.processes.rank

    def holds(self, key: str) -> bool:
        """Whether this process remembers a block's numbers."""
        return not self.apart or self.solves(key)

    def is_new(self, key: str) -> bool:
        """Whether nobody was made a block's owner yet; costs may have been known before there were several."""
        return key not in self.costs or (self.is_shared and key not in self.of)

    def assign(self, costs: Mapping[str, Cost], itemsize: int) -> None:
        """Give blocks that have no owner yet to one. All processes call this with the same blocks."""
        self.costs |= costs
        fresh = {key: cost for key, cost in costs.items() if key not in self.of} if self.is_shared else {}
        if not fresh:
            return
        if self.share == "auto":
            state = itemsize * sum(cost.state for cost in self.costs.values())
            self.share = "memory" if state > self.budget else "speed"
        self.of |= balance(fresh, self.costs, self.of, self.processes.size, self.share == "memory")

    def load(self, saved: Mapping[str, Any] | None) -> Owners:
        """The same with the owners of an older checkpoint of one process's part, if that is of as many processes."""
        fresh = replace(self, costs={}, of={})
        if saved and saved["size"] == self.processes.size:
            fresh.share, fresh.of = saved["share"], dict(saved["of"])
        return fresh

    # statistics

    def sums(self, key: str) -> Sums:
        """How a block's statistics are added up, and how what its owner alone computes comes to all."""
        if not self.is_shared:
            return ALONE
        owner = self.of[key]
        return Sums(partial(self._sum_statistics, owner), self.processes.sum_entries, partial(self._solve, owner))

    def share_past(self, key: str, own: Statistics | None, needed: bool) -> Statistics | None:
        """A block's totals so far: where its owner alone remembers them and all need them, from it to all."""
        if not (self.apart and needed):
            return own
        return self.processes.send_tree(own, self.of[key], "statistics")

    def _sum_statistics(self, owner: int, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums for all processes, or for the owner alone."""
        return self.processes.sum_entries(fresh, owner if self.apart else None)

    def _solve(self, owner: int, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        solution = make().contiguous() if self.processes.rank == owner else torch.empty_like(like).contiguous()
        return self.processes.broadcast(solution, owner, "statistics")

    # inverses

    def share_trees(self, trees: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        """With "speed": what their owners made of these blocks, one message each.

        The owners' own take the same way: products round by how a matrix lies in memory, and the processes would drift
        apart.
        """
        received, order = dict[str, Any](), list(keys)
        for owner in range(self.processes.size):
            mine = {key: trees[key] for key in order if self.of[key] == owner and key in trees}
            received |= self.processes.send_tree(mine, owner, "inverses")
        return {key: received[key] for key in order if key in received}

    # with "memory": what owners found, for all

    def share_scalars(self, scalars: Mapping[str, Any], names: Iterable[str], like: Tensor) -> dict[str, Tensor]:
        """Scalars of which every process has some, by name; without those that nobody has."""
        known = list(names)
        if not self.apart:
            return dict(scalars)
        table = torch.zeros(2, len(known), dtype=torch.float64, device=like.device)
        for i, name in enumerate(known):
            if name in scalars:
                table[0, i], table[1, i] = 1.0, torch.as_tensor(scalars[name]).double()
        there, values = self.processes.sum(table, "scalars")
        present = [name for name, flag in zip(known, list_numbers(there), strict=True) if flag]
        return {name: values[i].to(like.dtype) for i, name in enumerate(known) if name in set(present)}

    def share_directions(
        self,
        gradients: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        products: Mapping[str, Products],
        levels: Mapping[str, float],
        keys: Mapping[str, str],
    ) -> tuple[dict[str, Tensor], dict[str, Products], dict[str, float]]:
        """The directions of all blocks by name, what is known of them and the damping, from their owners."""
        none = (0.0,) * len(Products._fields)
        own = [(n in steps, n in levels, levels.get(n, 0.0), n in products, *products.get(n, none)) for n in keys]
        table = torch.tensor(own, dtype=torch.float64, device=next(iter(gradients.values())).device)
        moved, damping, known = list[str](), dict[str, float](), dict[str, Products]()
        for name, (moves, levelled, level, has, *numbers) in zip(
            keys, list_numbers(self.processes.sum(table, "scalars")), strict=True
        ):
            moved += [name] if moves else []
            damping |= {name: level} if levelled else {}
            known |= {name: Products(*numbers)} if has else {}
        directions = self.share_parts(dict(steps), {name: gradients[name] for name in moved}, keys)
        return directions, known, damping

    def share_parts(
        self, directions: Mapping[str, Tensor], like: Mapping[str, Tensor], keys: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Directions, from the owners to all, in one message of each."""
        results = dict[str, Tensor]()
        for owner in range(self.processes.size):
            names = [name for name in like if self.of[keys[name]] == owner]
            for kind in dict.fromkeys((like[name].dtype, like[name].device) for name in names):
                those = [name for name in names if (like[name].dtype, like[name].device) == kind]
                sizes = [like[name].numel() for name in those]
                if owner == self.processes.rank:
                    flat = torch.cat([directions[name].to(kind[0]).reshape(-1) for name in those])
                else:
                    flat = torch.empty(sum(sizes), dtype=kind[0], device=kind[1])
                parts = split_tensor(self.processes.broadcast(flat, owner, "directions"), sizes)
                results |= {n: part.clone().view_as(like[n]) for n, part in zip(those, parts, strict=True)}
        return {name: results[name] for name in like}


def balance(
    fresh: Mapping[str, Cost], known: Mapping[str, Cost], owners: Mapping[str, int], size: int, state: bool
) -> dict[str, int]:
    """Owners by longest processing time first: the dearest block to the process with the least so far."""
    works, states = (sum(getattr(cost, kind) for cost in known.values()) or 1.0 for kind in ("work", "state"))

    def weigh(cost: Cost) -> float:
        return cost.work / works + state * cost.state / states

    loads = [
        sum(weigh(known[key]) for key, owner in owners.items() if owner == r and key in known) for r in range(size)
    ]
    new_owners = dict[str, int]()
    for key, cost in sorted(fresh.items(), key=lambda pair: (-weigh(pair[1]), pair[0])):
        new_owners[key] = min(range(size), key=lambda r: (loads[r], r))
        loads[new_owners[key]] += weigh(cost)
    return new_owners


def cost_of(layout: Layout, sizes: Iterable[tuple[int, int]] | None) -> Cost:
    """A block's cost.

    sizes: (count, n) of the (n, n) matrices that are inverted; None or none of them for a diagonal.
    """
    groups, outputs, columns = layout.matrix_shape
    entries = float(groups * outputs * columns)
    pairs = list(sizes or ())
    work = sum(count * float(n) ** 3 for count, n in pairs) or entries
    memory = sum(count * float(n) ** 2 for count, n in pairs) or entries
    return Cost(work, 2 * memory + entries)  # the averages, the inverse, the gradient's mean


def check_share(share: Any) -> tuple[str, int]:
    """The way and the budget that an option names. ValueError for anything else."""
    if isinstance(share, int) and not isinstance(share, bool) and share > 0:
        return "auto", share
    if share not in WAYS:
        raise ValueError(
            f'share is {share!r}, expected "speed" (every process keeps all inverses), "memory" (blocks\' numbers are '
            'their owners\' alone), "auto", or a number of bytes of state from which on it is "memory"'
        )
    return share, BUDGET


# Models that several processes or devices hold in parts, or train together: refused where that is not known yet

PARTS = {
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "FSDPModule"),
    "torch.distributed.tensor": ("DTensor",),
}
WHOLE = (
    "whose parameters are not whole on this process: ng.kfac and its like train such a model, if they are built after "
    "fully_shard or parallelize_module; other optimizers need DistributedDataParallel, or one process"
)
DRIFT = (
    "each process would take its own metric and its own step, and the parameters drift apart. Use ng.kfac or its like, "
    "which add statistics up over the processes, or train in one process and give the module inside"
)


FLAT = (
    "which flattens all parameters of some modules into one on each process, so that no layer has a weight of its own: "
    "use torch.distributed.fsdp.fully_shard instead"
)


def refuse_sharded(model: Any, name: str = "model", parts: bool = False) -> None:
    """TypeError for a module with parameters that are not whole tensors here, and for one that is copied to devices."""
    own = type(model).__name__
    refuse_scripted(model)
    if isinstance(model, nn.Module):
        members: list[Any] = [*model.modules(), *model.parameters()]
    elif isinstance(model, Mapping):
        members = [*cast("Mapping[str, Any]", model).values()]
    else:
        return
    kinds = [getattr(sys.modules[key], kind) for key, kinds in PARTS.items() if key in sys.modules for kind in kinds]
    if parts:
        kinds = [kind for kind in kinds if kind.__name__ == "FullyShardedDataParallel"]
    for part in members:
        for kind in kinds:
            if isinstance(part, kind):
                why = FLAT if kind.__name__ == "FullyShardedDataParallel" else WHOLE
                raise TypeError(f"{name} is {own} with a {kind.__name__} in it, {why}")
        if isinstance(part, DataParallel) and len(part.device_ids) > 1:
            raise TypeError(
                f"{name} is {own} with a DataParallel over {len(part.device_ids)} devices in it, "
                "whose copies an optimizer cannot read: use DistributedDataParallel, one process per device"
            )


def refuse_trials(model: Any, asks: Any) -> None:
    """ValueError for a rule or a damping that computes the loss at other parameters than the model's, in parts."""
    if asks is not None and isinstance(model, nn.Module) and any_split(model.parameters()):
        raise ValueError(
            f"{asks} computes the loss at trial points, which a model in parts (fully_shard, tensor parallelism) "
            "does not allow: take a rule and a damping that trust the model, such as the defaults"
        )


def mesh_of(tensor: Any) -> Any:
    """The mesh over which a tensor lies in parts; None of a whole one."""
    return tensor.device_mesh if is_split(tensor) else None


def find_data_group(leaves: GraphLeaves) -> Any:
    """The processes that see other examples than this one, of a model in parts; None where all see the same.

    A dimension of the mesh that the pass's own tensors still have is tensor parallelism's; over the others each process
    put the whole parameter together, for examples of its own.
    """
    for name, p in leaves.named.items():
        if not is_split(p):
            continue
        mesh, leaf_mesh = mesh_of(p), mesh_of(leaves[name])
        names = list(mesh.mesh_dim_names or range(mesh.ndim))
        within = [] if leaf_mesh is None else list(leaf_mesh.mesh_dim_names or range(leaf_mesh.ndim))
        data = [dim for dim, of in enumerate(names) if of not in within and mesh.size(dim) > 1]
        if len(data) == 1:
            return mesh.get_group(data[0])
        if len(data) == mesh.ndim and mesh.size() == distributed.get_world_size():
            return distributed.group.WORLD
        if data:
            raise ValueError(
                f"the model lies on a mesh {tuple(mesh.shape)} over {len(data)} of whose dimensions examples differ: "
                "give the processes that see other examples as group=torch.distributed.new_group(...)"
            )
    return None


def refuse_processes(model: Any, name: str = "model") -> None:
    """TypeError for a model that several processes hold or train, where each would take a step of its own.

    Args:
        model: Anything.
        name: What the error calls it.
    """
    refuse_sharded(model, name)
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(part, DataParallel) for part in parts):
        raise TypeError(
            f"{name} is a DataParallel, or has one in it, which is no function of parameters: give its module"
        )
    if any(isinstance(part, DistributedDataParallel) for part in parts):
        raise TypeError(f"{name} is a DistributedDataParallel, or has one in it: {DRIFT}")


def refuse_nested(model: Any) -> None:
    """TypeError for a model with a wrapper of torch inside, whose forward is no function of parameters."""
    refuse_sharded(model)
    parts = [(type(part).__name__, part) for part in model.modules()] if isinstance(model, nn.Module) else []
    for kind, part in parts:
        if isinstance(part, (DataParallel, DistributedDataParallel)):
            raise TypeError(
                f"model has a {kind} in it, which is no function of parameters: wrap the whole model in "
                "one DistributedDataParallel, and give that"
            )


# Backward passes in step on all processes: the user's, weighed by rows, and others through a model in parts

EQUAL = 1e-10
"""Of the square of the losses' weights: the variance below which all processes weigh the same."""


class AlignedPasses:
    """Statistics' own backward passes. Nobody's gradients are averaged in them.

    Each of them gathers the parameters from all processes, so that one that takes more of them than another would wait
    for ever. Where their numbers differ, every process keeps the whole model until the last of them.

    Args:
        model: Of the optimizer.
        processes: The processes.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self.model, self.processes = model, processes
        self._kept: list[tuple[Any, bool]] = []

    @contextmanager
    def run(self, *numbers: float) -> Generator[None]:
        """The passes of one loss are taken within."""
        if not self.processes.averaged:
            yield
            return
        modules = list_sharded_modules(self.model)
        syncs = [(module, *read_settings(module, "reduce_grads", "all_reduce_grads")) for module in modules]
        for module in modules:  # what earlier backward passes left to be averaged is not theirs to average
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            self.align(*numbers)
            yield
        finally:
            for module, reduces, copies in syncs:
                module.set_requires_gradient_sync(reduces, recurse=False)
                module.set_requires_all_reduce(copies, recurse=False)
            while self._kept:
                module, reshards = self._kept.pop()
                module.set_reshard_after_backward(reshards, recurse=False)
                module.reshard()

    def align(self, *numbers: float) -> None:
        """Keep the model whole from here on, if these numbers are not the same on all processes."""
        if not self.processes.averaged or self._kept:
            return
        own = torch.tensor(numbers, dtype=torch.float64, device=self.processes.device)
        sums, squares = self.processes.sum(torch.stack([own, own.square()]))
        if list_numbers(sums.square()) == list_numbers(self.processes.size * squares):
            return
        for module in list_sharded_modules(self.model):
            self._kept.append((module, read_settings(module, "reshard_after_backward")[0]))
            module.unshard()
            module.set_reshard_after_backward(False, recurse=False)


def list_sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [module for module in model.modules() if is_fully_sharded(module)]


def read_settings(module: Any, *names: str) -> list[bool]:
    """What was set of a module by `set_requires_gradient_sync` and the like, for which torch has no public name."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [bool(getattr(groups[0], name, True)) for name in names]


class RowWeight:
    """Tensor hook on a loss: the mean over processes of the gradients becomes the mean over all rows.

    It is a sum over processes, and they all go backward at the same time: they average gradients there anyway. Where
    the losses already weigh unlike, the user has weighted them, and that stands.

    Args:
        processes: The processes.
        rows: What this process's loss is a mean over.
    """

    def __init__(self, processes: Processes, rows: float) -> None:
        self.processes, self.rows = processes, rows

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.processes.looking:
            return gradient
        weight = gradient.detach().double().reshape(())
        own = torch.stack([torch.full_like(weight, self.rows), weight, weight.square()])
        total, weights, squares = self.processes.sum(own).unbind()
        unlike = self.processes.size * squares - weights.square() > EQUAL * weights.square()
        share = torch.where(unlike, 1.0, self.rows * self.processes.size / total)
        return gradient * share.to(gradient.dtype) if self.rows else torch.zeros_like(gradient)


def weigh_loss(
    processes: Processes, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, averaged: bool = True
) -> float | None:
    """What a loss is a mean over; its gradient weighs that much in the mean over processes from now on."""
    if processes.size == 1:
        return None
    count = criterion.count_part(map_tensors(outputs, torch.detach), targets)
    if averaged and not criterion.summed:
        hook_gradient(value, RowWeight(processes, count))
    return count
