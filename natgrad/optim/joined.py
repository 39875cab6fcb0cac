"""A metric and a loss over the examples of all processes, for steps by products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.ground.exchanges import Sums
from natgrad.ground.pure import Labelled, RandomState, as_call
from natgrad.ground.spaces import Params, Space
from natgrad.ground.typed_torch import is_mapping, measure_norm
from natgrad.metrics import Covariance, Metric, MetricSum, PullbackMetric
from natgrad.operators import Centred, Facts, JoinedRows, Operator, Pullback, Rows
from natgrad.optim.checks import dense_gradient, to_dense
from natgrad.optim.guard import NotFiniteError
from natgrad.optim.objective import Objective, Reclose, SumOverData, Total
from natgrad.optim.passes import BatchRecord, Data, Loss
from natgrad.optim.processes import Processes, mark_text
from natgrad.structures import Layerwise, Structure, StructurePreconditioner


class JoinedOperator(Operator):
    """G = sum_i share_i G_i over processes: products are added up, and all processes get the same bits.

    Args:
        local: G_i of this process's examples; None where it has none.
        space: Of the parameters.
        shares: Of the examples, by process; they add up to 1.
        columns: Of each G_i's root; None if there is no such root.
        facts: What else is known of G, the same on all processes.
        processes: The processes.
    """

    def __init__(
        self,
        local: Operator | None,
        space: Space,
        shares: Sequence[float],
        columns: Sequence[int] | None,
        facts: Facts,
        processes: Processes,
    ) -> None:
        self.local, self.space, self.shares, self.columns, self.processes = local, space, shares, columns, processes
        self.size, self.dtype, self.device = space.size, space.dtype, space.device
        self.facts = facts

    @property
    def sample_rank(self) -> int | None:
        return None if self.columns is None else sum(self.columns)

    @property
    def sample_rows(self) -> JoinedRows | None:
        return self.rows

    @property
    def rows(self) -> JoinedRows | None:
        """The columns of U over all examples; None if there is no root in rows."""
        if self.columns is None:
            return None
        rows = None if self.local is None else self.local.sample_rows
        assert rows is None or isinstance(rows, Rows)
        return JoinedRows(rows, self.space, self.columns, self.shares, self.processes)

    def mv(self, vector: Tensor) -> Tensor:
        return self._sum(lambda local: local.mv(vector).detach(), (self.size,))

    def mm(self, block: Tensor) -> Tensor:
        return self._sum(lambda local: local.mm(block).detach(), tuple(block.shape))

    def root(self) -> Tensor | None:
        if self.columns is not None:
            rows = self.rows
            assert rows is not None
            return rows.dense()
        root = None if self.local is None else self.local.root()
        widths = [int(width) for (width,) in self.processes.share_numbers([width_of(self.local, root)], self.device)]
        if min(widths) < 0:
            return None
        own = torch.zeros(self.size, 0, dtype=self.dtype, device=self.device) if root is None else root
        own = own * self.shares[self.processes.rank] ** 0.5
        return gather_columns(self.processes, own, widths)

    def diagonal(self) -> Tensor:
        return self._sum(lambda local: local.diagonal(), (self.size,))

    def trace(self) -> Tensor:
        return self._sum(lambda local: local.trace(), ())

    def mean_eigenvalue(self) -> Tensor:
        return self._sum(lambda local: local.mean_eigenvalue(), ())

    def dense(self) -> Tensor:
        return self._sum(lambda local: local.dense(), (self.size, self.size))

    def _sum(self, part: Callable[[Operator], Tensor], shape: tuple[int, ...]) -> Tensor:
        share = self.shares[self.processes.rank]
        zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.processes.sum(zeros if self.local is None else share * part(self.local))


def width_of(local: Operator | None, root: Tensor | None) -> int:
    """Columns of this process's root: 0 without examples, -1 where an operator has no root."""
    if root is None:
        return 0 if local is None else -1
    return root.shape[1]


def gather_columns(processes: Processes, own: Tensor, widths: Sequence[int]) -> Tensor:
    """Every process's columns side by side, in the order of the processes."""
    table = torch.zeros(own.shape[0], sum(widths), dtype=own.dtype, device=own.device)
    start = sum(widths[: processes.rank])
    table[:, start : start + own.shape[1]] = own
    return processes.sum(table)


@dataclass(frozen=True)
class JoinedMetric(Metric):
    """A metric whose mean runs over the examples of all processes.

    All processes call `at` alike. One that has no examples takes part with none. Where one fails, all raise.

    Args:
        metric: Of a process's own examples.
        processes: The processes.
        rows: What this process's examples weigh in the mean; None: what the metric itself counts.
    """

    metric: Metric
    processes: Processes
    rows: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_targets", self.metric.needs_targets)

    @property
    def inner(self) -> Metric:
        return self.metric

    def carry(self, metric: Metric) -> Metric:
        return replace(self, metric=metric)

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        if isinstance(self.metric, Covariance) and self.metric.centred:
            return self._centre(params, inputs, random)
        return self._join(self._own(self.metric), params, inputs, random)

    def read_examples(self, inputs: Any) -> Tensor | None:
        rows = self.metric.read_examples(inputs)
        if rows is None:
            return None
        counts = [int(count) for (count,) in self.processes.share_numbers([len(rows)], rows.device)]
        return gather_columns(self.processes, rows.flatten(1).mT, counts).mT

    def count_examples(self, inputs: Any) -> int:
        device = next(iter(as_call(unlabel(self.metric, inputs)).tensors())).device
        return int(
            sum(count for (count,) in self.processes.share_numbers([self.metric.count_examples(inputs)], device))
        )

    def _own(self, metric: Metric) -> Metric:
        """The metric with a source of labels of this process's own. The shared one moves alike everywhere."""
        shared = getattr(metric, "generator", None)
        if not is_dataclass(metric) or not isinstance(shared, torch.Generator):
            return metric
        return replace(metric, generator=self.processes.generator(shared))  # type: ignore[call-arg, type-var]

    def _join(self, metric: Metric, params: Params, inputs: Any, random: RandomState | None) -> JoinedOperator:
        space, local, rows, trouble = Space(params), None, 0.0, None
        try:
            if metric.count_examples(inputs) and self.rows != 0:
                local = metric.at(params, inputs, random=random)
                rows = count_rows(metric, local, inputs) if self.rows is None else self.rows
        except Exception as error:  # noqa: BLE001 - the others wait in a sum: they are told first
            trouble = error
        return join_operator(self.processes, local, space, rows, trouble)

    def _centre(self, params: Params, inputs: Any, random: RandomState | None) -> Operator:
        assert isinstance(self.metric, Covariance)
        moment = self._join(self.metric.moment, params, inputs, random)
        local, counted = cast("Any", moment.local), torch.zeros(0, dtype=moment.dtype, device=moment.device)
        if isinstance(moment.local, Pullback):
            counted = cast("Tensor", local.form.counted.to(moment.dtype))
        assert moment.columns is not None
        counts = gather_columns(self.processes, counted.unsqueeze(0), moment.columns)[0]
        return Centred(moment, counts)  # type: ignore[arg-type]


def join_operator(
    processes: Processes, local: Operator | None, space: Space, rows: float, trouble: Exception | None = None
) -> JoinedOperator:
    """G over the examples of all processes, which all call this.

    Args:
        processes: The processes.
        local: G of this one's examples; None where it has none.
        space: Of the parameters.
        rows: What these weigh in the mean.
        trouble: Why there is none, where something failed.

    Raises:
        ValueError: On all processes, where one failed, which raises its own error; where none has an example.
    """
    reports = processes.share_numbers(describe_operator(local, rows, trouble), space.device)
    if trouble is not None:
        raise trouble
    failed = [i for i, report in enumerate(reports) if report[0]]
    if failed:
        raise ValueError(
            f"the metric of process {failed[0]} of {processes.size} could not be computed, as its own error says; "
            "nothing was changed here"
        )
    total = sum(report[1] for report in reports)
    if not total > 0:
        raise ValueError("inputs is an empty batch on every process; give at least one of them an example")
    some = [report for report in reports if report[1]]
    facts = Facts(
        nats=sum(report[1] * report[2] for report in some) / total,
        indefinite=any(report[3] for report in some),
        length_unit=some[0][4],
    )
    counts = [int(report[5]) for report in reports]
    shares = [report[1] / total for report in reports]
    return JoinedOperator(local, space, shares, None if min(counts) < 0 else counts, facts, processes)


def describe_operator(local: Operator | None, rows: float, trouble: Exception | None) -> list[float]:
    """What all processes must know of one's operator: failed, rows, nats, indefinite, unit of length, columns."""
    if local is None:
        return [float(trouble is not None), 0.0, 0.0, 0.0, 0.0, 0]
    rank = local.sample_rank
    columns = -1 if rank is None or not isinstance(local.sample_rows, Rows) else rank
    return [0.0, rows, local.nats, float(local.indefinite), local.length_unit, columns]


def count_rows(metric: Metric, operator: Operator, inputs: Any) -> float:
    """What the mean of a metric runs over: rows of outputs, or the sum of their weights in the loss."""
    if not isinstance(operator, Pullback):
        return float(metric.count_examples(inputs))
    known = operator.linearization.origin
    labelled = isinstance(metric, PullbackMetric) and (metric.needs_targets or isinstance(inputs, Labelled))
    if known is None or not labelled:
        return float(len(operator.outputs))
    targets = inputs.targets if isinstance(inputs, Labelled) else inputs[1]
    return metric.criterion.count(known.first, targets)  # type: ignore[attr-defined]


def unlabel(metric: Metric, inputs: Any) -> Any:
    """A metric's inputs without their targets."""
    if isinstance(inputs, Labelled):
        return inputs.inputs
    return inputs[0] if metric.needs_targets else inputs


def unwrap_models(metric: Any) -> Any:
    """The same metric of the modules within torch's wrappers, whose own forward is no function of parameters."""
    given: Any = metric
    if isinstance(metric, (DataParallel, DistributedDataParallel)):
        return given.module
    if is_mapping(metric):
        inner = {name: unwrap_models(value) for name, value in metric.items()}
        return inner if any(inner[name] is not value for name, value in metric.items()) else metric
    if not isinstance(metric, Metric) or not is_dataclass(metric):
        return metric
    values = {field.name: getattr(metric, field.name) for field in fields(metric) if field.init}
    inner = {name: unwrap_models(value) for name, value in values.items()}
    changed = {name: value for name, value in inner.items() if value is not values[name]}
    return replace(metric, **changed) if changed else metric


# Gradient, loss and counts of the flat flow over the examples of all processes that train one model

DRIFTED = 1e-6
"""Of the step's length: how far the steps of two processes may lie apart, for round-off on unlike processors."""


def read_gradients(
    processes: Processes, named: Mapping[str, Tensor], active: set[int], record: BatchRecord
) -> tuple[dict[str, Tensor], Space, Tensor] | None:
    """The parameters that have a gradient on some process, their space, and the gradient of the mean loss (n,).

    A `DistributedDataParallel` has averaged the gradients. Otherwise they are averaged here, where gradients that are
    equal already stay as they are.
    """
    there = {name: p for name, p in named.items() if id(p) in active and p.grad is not None}
    if processes.size == 1:
        if not there:
            return None
        gradients = {name: dense_gradient(name, p) for name, p in there.items()}
        space = Space(there)
        return there, space, space.flatten(gradients) / (record.scale or 1.0)
    if processes.wrappers:
        return read_averaged(processes, there, record)
    device = next(iter(named.values())).device
    reports = processes.share_numbers(
        [record.scale, weigh_gradient(record), *(name in there for name in named)], device
    )
    params = {name: p for i, (name, p) in enumerate(named.items()) if any(report[2 + i] for report in reports)}
    if not params:
        return None
    space = Space(params)
    own = {name: to_dense(p.grad) for name, p in there.items() if p.grad is not None}
    vector = join_vectors(processes, space.flatten(own), reports)
    if not bool(vector.isfinite().all()):
        raise NotFiniteError("the gradient is not finite on some process; nothing was changed on any")
    return params, space, vector / mean_scale(processes, reports)


def read_averaged(
    processes: Processes, params: dict[str, Tensor], record: BatchRecord
) -> tuple[dict[str, Tensor], Space, Tensor] | None:
    """`read_gradients` where a `DistributedDataParallel` has averaged them: they are the same everywhere."""
    if not params:
        return None
    space = Space(params)
    vector = space.flatten({name: to_dense(p.grad) for name, p in params.items() if p.grad is not None})
    reports = processes.share_numbers([record.scale, float(measure_norm(vector.double()))], space.device)
    norms = [report[1] for report in reports]
    if any(abs(norm - norms[0]) > DRIFTED * max(norms) for norm in norms):  # false where one is NaN
        raise ValueError(
            f"the {processes.size} processes have gradients of norms {norms}, and their parameters would drift apart: "
            "call the DistributedDataParallel and not the module inside it, and do the last backward outside of "
            "no_sync()"
        )
    if not bool(vector.isfinite().all()):
        raise NotFiniteError(
            "the gradient is not finite; nothing was changed. Skip this batch, or look for an overflow"
        )
    return params, space, vector / mean_scale(processes, reports)


def mean_scale(processes: Processes, reports: list[list[float]]) -> float:
    """What the mean of the gradients is divided by under reduction='sum': the mean of the processes' counts; else 1."""
    return sum(report[0] for report in reports) / processes.size or 1.0


def join_vectors(processes: Processes, vector: Tensor, reports: list[list[float]]) -> Tensor:
    """The mean of all processes' vectors, weighted by the second number of their reports."""
    total = sum(report[1] for report in reports)
    weight = reports[processes.rank][1] / total if total else 0.0
    return processes.sum(weight * vector if weight else torch.zeros_like(vector))


def weigh_gradient(record: BatchRecord) -> float:
    """What this process's gradient weighs: 1 where its losses were weighed, else the rows of its pass."""
    if record.computed or record.losses:
        return 1.0
    return 1.0 if record.last is None else float(as_call(record.last.call).batch())


def join_metric(processes: Processes, metric: Metric, record: BatchRecord, drawn: bool, device: torch.device) -> Metric:
    """The metric over all processes' examples; as it is for one process."""
    if processes.size == 1 or metric.is_joined:
        return metric
    if isinstance(metric, SumOverData):
        losses = {id(data.targets): loss for loss in record.used_losses() for data in [loss.data()]}
        weights = join_weights(processes, [weight for weight, _, _ in metric.parts], record, device)
        parts = [
            (weight, JoinedMetric(term, processes, rows_of(losses.get(id(data.targets)))), data)
            for weight, (_, term, data) in zip(weights, metric.parts, strict=True)
        ]
        return replace(metric, parts=parts)
    if isinstance(metric, MetricSum):
        return replace(metric, terms={name: JoinedMetric(term, processes) for name, term in metric.terms.items()})
    own = record.observed is None and not drawn
    return JoinedMetric(metric, processes, rows_of(record.last_told) if own else None)


def join_weights(
    processes: Processes, weights: Sequence[float], record: BatchRecord, device: torch.device
) -> list[float]:
    """What the losses of a step weigh, on all processes: under reduction='sum' it follows from everyone's counts."""
    reports = processes.share_numbers([record.scale, *weights], device)
    scales = [report[0] for report in reports]
    scales = scales if any(scales) else [1.0] * len(scales)  # a process without examples counts none of a sum
    return [
        sum(scale * weight for scale, weight in zip(scales, column, strict=True)) / sum(scales)
        for column in list(zip(*reports, strict=True))[1:]
    ]


def rows_of(loss: Loss | None) -> float | None:
    """What a loss is a mean over, if that is known."""
    return None if loss is None or math.isnan(loss.count) else loss.count


@dataclass(frozen=True)
class JoinedStructure(Structure):
    """A structure in blocks, whose statistics are added up over processes."""

    structure: Layerwise
    sums: Sums

    def update(
        self, memory: Any, metric: Metric, params: Params, inputs: Any, *, random: RandomState | None = None
    ) -> tuple[Operator, Any]:
        return self.structure.update(memory, metric, params, inputs, random=random, sums=self.sums)


def join_choice(processes: Processes, metric: Metric, choice: Any, data: Data) -> tuple[Metric, Any]:
    """The metric and the structure or preconditioner for all processes' examples.

    One that hears the layers does so on this process's pass, and its statistics are added up.
    """
    structure = choice.structure if isinstance(choice, StructurePreconditioner) else choice
    if processes.size == 1 or not isinstance(structure, Layerwise):
        return metric, choice
    known = isinstance(metric, JoinedMetric) and metric.rows is not None
    rows = metric.rows if isinstance(metric, JoinedMetric) and known else float(as_call(data.inputs).batch())
    device = next(iter(as_call(data.inputs).tensors())).device
    counts = [count for (count,) in processes.share_numbers([rows or 0.0], device)]
    if not all(counts):
        raise ValueError(
            f"process {counts.index(0.0)} has no examples, which {structure!r} needs on every process: leave out such "
            "batches everywhere, or use a structure that is solved by products, ng.Exact()"
        )
    share = counts[processes.rank] / sum(counts)
    local = replace(structure, seed=structure.seed + 15485863 * processes.rank)  # labels of its own

    def add(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: processes.sum(share * tensor) for key, tensor in fresh.items()}

    joined = JoinedStructure(local, Sums(add, add))
    return metric.inner, replace(choice, structure=joined) if structure is not choice else joined


def update_jointly(
    processes: Processes, structure: Structure, memory: Any, metric: Metric, params: Params, inputs: Any
) -> tuple[Operator, Any]:
    """`structure.update` on the examples of all processes, for what makes its own gradients.

    Args:
        processes: What exchanges.
        structure: How the metric is stored.
        memory: What the last call returned, None at first.
        metric: Which G.
        params: The parameters by name.
        inputs: This process's examples.
    """
    if processes.size == 1:
        return structure.update(memory, metric, params, inputs)
    joined = JoinedMetric(metric, processes)
    if isinstance(structure, Layerwise):
        processes.check(structure)
    own, local = join_choice(processes, joined, structure, Data(inputs, None, None))
    return local.update(memory, own, params, inputs)


def join_mean_loss(processes: Processes, record: BatchRecord, device: torch.device) -> Tensor | None:
    """The mean over all processes' rows of this step's losses; NaN where no target counts; None if none was told."""
    own = record.mean_loss()
    if processes.size == 1:
        return own
    rows = record.weight
    part = 0.0 if own is None or not rows else float(own) * rows
    reports = processes.share_numbers([own is not None, rows, part], device)
    if not any(report[0] for report in reports):
        return None
    total = sum(report[1] for report in reports)
    mean = sum(report[2] for report in reports) / total if total else math.nan
    return torch.tensor(mean, dtype=torch.float64, device=device)


class JoinedLoss(Objective):
    """The mean over all processes' rows of a loss that each has of its own rows.

    Args:
        processes: The processes.
        part: The loss of this process's rows.
        rows: What that is a mean over; None: what the criterion counts there.
        averaged: True if `part`'s gradients are the same on all processes already.
    """

    def __init__(
        self, processes: Processes, part: Objective, rows: float | None = None, averaged: bool = False
    ) -> None:
        super().__init__(part.params, part.space, math.nan)
        self.processes, self.part, self.averaged = processes, part, averaged
        self.rows = part.count if rows is None else rows
        self.before = self._mean(part.before)
        self.before = self.before if math.isfinite(self.before) else math.nan

    def _mean(self, value: float) -> float:
        reports = self.processes.share_numbers([value * self.rows if self.rows else 0.0, self.rows], self.space.device)
        rows = sum(report[1] for report in reports)
        return sum(report[0] for report in reports) / rows if rows else math.nan

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return self._mean(self.part._evaluate(step))

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        value, parts = self.part._differentiate(step)
        weights = [[0.0, 1.0]] * self.processes.size
        if not self.averaged:
            weights = [[0.0, report[0]] for report in self.processes.share_numbers([self.rows], self.space.device)]
        vector = join_vectors(self.processes, self.space.flatten(parts), weights)
        return self._mean(value), self.space.unflatten(vector)


def join_objective(processes: Processes, objective: Objective | None, record: BatchRecord) -> Objective | None:
    """The loss over all processes' rows; as it is for one process."""
    if processes.size == 1 or objective is None:
        return objective
    if isinstance(objective, Total):
        device = objective.space.device
        weights = join_weights(processes, [weight for weight, _ in objective.parts], record, device)
        return Total([(w, JoinedLoss(processes, part)) for w, (_, part) in zip(weights, objective.parts, strict=True)])
    if not isinstance(objective, Reclose):
        return JoinedLoss(processes, objective)
    rows = sum(loss_rows for loss_rows in (rows_of(loss) for loss in record.used_losses()) if loss_rows is not None)
    return JoinedLoss(processes, objective, rows or 1.0, averaged=bool(record.computed or processes.wrappers))


def check_in_step(processes: Processes, vector: Tensor, groups: str) -> None:
    """Check that all processes are about to take the same step.

    vector: The step, (n,). groups: The numbers of the parameter groups.
    """
    if processes.size == 1:
        return
    probe = torch.cos(torch.arange(len(vector), dtype=torch.float64, device=vector.device))
    numbers = [float(vector.double() @ probe), float(measure_norm(vector.double())), mark_text(groups)]
    table = processes.share_numbers(
        [number if math.isfinite(number) else math.inf for number in numbers], vector.device
    )
    if any(row[2] != table[0][2] for row in table):
        processes.refuse_groups(groups)
    most = max(row[1] for row in table)
    if any(abs(a - b) > DRIFTED * most for row in table for a, b in zip(row, table[0], strict=True) if a != b):
        raise RuntimeError(
            f"the {processes.size} processes found different steps, of lengths {[row[1] for row in table]}: nothing "
            "was changed. Give all of them the same options, and let all call loss and step alike"
        )
