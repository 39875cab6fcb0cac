"""Running statistics of batch norm, estimated anew from the data: what evaluation needs after long steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from natgrad.ground.checks import check_integer
from natgrad.ground.pure import BATCH_NORMS, keep_gradient_mode, map_tensors, mark_evaluation
from natgrad.ground.typed_torch import torch_distributed
from natgrad.ground.whole_tensors import naming_lost

Model = TypeVar("Model", bound=nn.Module)


@keep_gradient_mode
def recalibrate(
    model: Model,
    loader: Iterable[Any],
    *,
    forward: Callable[[Model, Any], Any] | None = None,
    batches: int | None = None,
    passes: int = 1,
    group: Any = None,
) -> Model:
    """Set the running means and variances of every batch norm to those of the data, under the weights of now.

    Running averages remember some ten updates, and steps of the natural gradient are long: a network that is right on
    its own batches can be far off in evaluation mode. Call this before an evaluation. Means and variances are those of
    all examples together, whatever the sizes of batches, without dropout. Parameters, gradients, modes, other buffers
    and torch's random state stay as they are; after an error or Ctrl-C the running statistics do too.

    In the first pass every norm uses the statistics of its batch, as in training, and so do those behind it
    ("precise batch norm", Wu & Johnson 2021). A further pass is in evaluation mode: after as many as there are norms
    behind one another, each has exactly the mean and the variance of what it gets in evaluation.

    Args:
        model: A module with batch norms.
        loader: Batches: tensors, (inputs, targets, ...), or dicts of keyword arguments. Only inputs are used, and moved
            to the model's device. With `passes` above 1 it is run through again.
        forward: Runs a batch of another kind through the model, as in `lambda model, batch: model(batch.images)`.
        batches: Use this many batches of each pass at most.
        passes: How often the data is run through.
        group: The processes of `torch.distributed` that each have batches of their own, as many as they like: means and
            variances are those of all of them, and all processes call this. Default those of the
            `DistributedDataParallel` that the model is.

    Returns:
        The model.

    Raises:
        ValueError: If there is no batch norm with running statistics, or no data, or one tensor in place of batches.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1))
        >>> x = torch.tensor([[1.0], [2.0], [6.0]])
        >>> ng.recalibrate(net, [x[:2], x[2:]])[0].running_mean
        tensor([3.])
    """
    check_integer("passes", passes)
    if isinstance(loader, Tensor):
        shape = tuple(loader.shape)
        raise ValueError(f"loader is one tensor {shape}, expected batches of examples: x.split(256), or a DataLoader")
    inner, group = unwrap_module(model, group)
    if batches is not None:
        check_integer("batches", batches)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BATCH_NORMS) and m.running_mean is not None}
    norms = {name.removeprefix("module.") if inner is not model else name: m for name, m in norms.items()}
    if not norms:
        raise ValueError("model has no batch norm with running statistics: there is nothing to recalibrate")
    run = run_batch if forward is None else forward
    devices = {buffer.device for buffer in model.buffers() if buffer.device.type == "cuda"}
    random = torch.random.fork_rng(devices)
    place = next(mean.device for m in norms.values() if (mean := m.running_mean) is not None)
    with keep_modes(model), keep_statistics(list(norms.values())) as commit, random, mark_evaluation():
        model.eval()
        for number in range(passes):
            listeners = [NormListener(norm, by_batch=number == 0) for norm in norms.values()]
            try:
                with failing_together(group, place), torch.no_grad():
                    count = 0
                    for batch in islice(loader, batches):
                        run(inner, batch)
                        count += 1
            finally:
                for listener in listeners:
                    listener.detach()
            count = join_moments(listeners, count, group)
            if not count:
                again = ", as an iterator that is used up: give a DataLoader or a list" if number else ""
                raise ValueError(f"loader has no batches in pass {number + 1}{again}")
            for listener in listeners:
                listener.write()
        missing = [name for name, listener in zip(norms, listeners, strict=True) if not listener.moments.count]
        if len(missing) == len(norms):
            raise ValueError("no batch norm was called; give the module itself and not a compiled or traced one")
        commit()
    if missing:
        warnings.warn(f"batch norms {missing} were not called and keep their statistics", stacklevel=2)
    return model


def unwrap_module(model: Any, group: Any) -> tuple[Any, Any]:
    """The module within a `DistributedDataParallel`, whose own passes exchange buffers, and its processes."""
    if not (distributed.is_available() and isinstance(model, nn.parallel.DistributedDataParallel)):
        return model, group
    return model.module, model.process_group if group is None else group


@contextmanager
def failing_together(group: Any, device: torch.device) -> Iterator[None]:
    """An error within is an error on all processes of the group, none of which waits for another then."""
    if group is None:
        yield
        return
    trouble: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again, when the others know
        trouble = error
    failed = gather_numbers(torch.tensor([float(trouble is not None)], dtype=torch.float64, device=device), group)[:, 0]
    if trouble is not None:
        raise trouble
    if bool(failed.any()):
        rank = int(failed.nonzero()[0])
        raise RuntimeError(
            f"process {rank} of {len(failed)} met an error, which it reports itself; nothing was changed"
        )


def gather_numbers(own: Tensor, group: Any) -> Tensor:
    """The numbers of every process, shape (processes, n), from (n,) each."""
    table = own.new_zeros(distributed.get_world_size(group), len(own))
    table[distributed.get_rank(group)] = own
    with naming_lost(group):
        torch_distributed.all_reduce(table, group=group)
    return table


def join_moments(listeners: Sequence[NormListener], count: int, group: Any) -> int:
    """Give listeners the moments of all processes' batches, the same bits on each; how many batches there were."""
    if group is None:
        return count
    each = [listener.moments for listener in listeners]
    parts = [torch.cat([own.mean.new_tensor([own.count]), own.mean, own.scatter]) for own in each]
    table = gather_numbers(torch.cat([parts[0].new_tensor([count]), *parts]), group)
    for listener, columns in zip(listeners, table[:, 1:].split([len(part) for part in parts], dim=1), strict=True):
        rows = [ChannelMoments(int(row[0]), *row[1:].chunk(2)) for row in columns]
        listener.moments = reduce(ChannelMoments.add, rows)
    return int(table[:, 0].sum())


def run_batch(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a tensor, a dict of arguments, or the first of a tuple or list."""
    device = next((p.device for p in model.parameters()), None) or next(b.device for b in model.buffers())
    if isinstance(batch, dict):
        return model(**map_tensors(batch, lambda t: t.to(device)))
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    return model(map_tensors(inputs, lambda t: t.to(device)))


@contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """Gives every module's mode back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def keep_statistics(norms: list[nn.Module]) -> Iterator[Callable[[], None]]:
    """Gives the norms' buffers back at the end: the running ones not if the given function was called."""
    named = [(name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    buffers = [(name.startswith("running"), buffer, buffer.clone()) for name, buffer in named]
    done = False

    def commit() -> None:
        nonlocal done
        done = True

    try:
        yield commit
    finally:
        with torch.no_grad():
            for running, buffer, old in buffers:
                if not (done and running):
                    buffer.copy_(old)


@dataclass(frozen=True)
class ChannelMoments:
    """How many values each channel had, their mean, and the sum of their squared deviations from it."""

    count: int
    mean: Tensor  # (channels,)
    scatter: Tensor  # (channels,)

    @classmethod
    def read(cls, inputs: Tensor) -> ChannelMoments:
        """Those of inputs (b, channels, ...), in float64 where there is one."""
        wide = inputs.detach() if inputs.device.type == "mps" else inputs.detach().double()
        rows = wide.movedim(1, -1).reshape(-1, inputs.shape[1])
        mean = rows.mean(0) if len(rows) else rows.sum(0)
        return cls(len(rows), mean, (rows - mean).square().sum(0))

    def add(self, other: ChannelMoments) -> ChannelMoments:
        """Those of both together (Chan, Golub & LeVeque 1979)."""
        if not other.count:
            return self
        count = self.count + other.count
        away = other.mean - self.mean
        scatter = self.scatter + other.scatter + away.square() * (self.count * other.count / count)
        return ChannelMoments(count, self.mean + away * (other.count / count), scatter)


class NormListener:
    """Reads what a batch norm gets until `detach`, and lets it normalise by its batch or by its running statistics.

    A batch with one value per channel has no variance, and is normalised by the data until then.
    """

    def __init__(self, norm: Any, *, by_batch: bool) -> None:
        self.norm, self.by_batch = norm, by_batch
        self.moments = ChannelMoments.read(norm.running_mean.new_empty(0, len(norm.running_mean)))
        self._handle = norm.register_forward_pre_hook(self._read)

    def _read(self, norm: Any, args: tuple[Any, ...]) -> None:
        moments = ChannelMoments.read(args[0])
        if moments.count == 0:
            norm.training = False
            return
        self.moments = self.moments.add(moments)
        norm.training = self.by_batch and moments.count > 1
        if self.by_batch and moments.count == 1 and self.moments.count > 1:
            self.write()

    def write(self) -> None:
        """Writes the running statistics, with the divisor n - 1 as torch, where anything was recorded."""
        if self.moments.count:
            with torch.no_grad():
                self.norm.running_mean.copy_(self.moments.mean)
                self.norm.running_var.copy_(self.moments.scatter / max(1, self.moments.count - 1))

    def detach(self) -> None:
        """No longer listens."""
        self._handle.remove()
        self.norm.training = False
