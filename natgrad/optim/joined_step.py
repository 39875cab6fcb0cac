"""Gradient, loss and counts of the flat flow over the examples of all processes that train one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from natgrad.metrics import Metric, MetricSum
from natgrad.operators import Operator
from natgrad.optim.checks import dense_gradient
from natgrad.optim.distributed import Ranks, meet, refuse_join
from natgrad.optim.equal_models import describe_settings
from natgrad.optim.exchanges import RankExchange, share_numbers
from natgrad.optim.guard import NotFiniteError
from natgrad.optim.joined_metric import JoinedMetric
from natgrad.optim.last_pass import Recall
from natgrad.optim.loss_metrics import SumOverData
from natgrad.optim.objective import Objective, Reclose, Total
from natgrad.optim.recorded_pass import Data, RecordedLoss
from natgrad.pure import as_call
from natgrad.spaces import Params, Space
from natgrad.structures import Layerwise, Structure, StructurePreconditioner, exchanging
from natgrad.typed_torch import measure_norm

SumParts = Callable[[dict[str, Tensor]], dict[str, Tensor]]

DRIFTED = 1e-6
"""Of the step's length: how far the steps of two processes may lie apart, for round-off on unlike processors."""


def settle_ranks(optimizer: Any) -> None:
    """Look once more, before the first step: the model may have been wrapped since; then compare it with the others'.

    Args:
        optimizer: Of the flat flow.

    Raises:
        ValueError: If another process holds another model, or was given other settings; within `join`.
        TypeError: For a structure whose statistics are no sums over examples.
    """
    ranks, structure = optimizer._ranks, optimizer.structure
    if not ranks.settled:
        if ranks.group is None:
            ranks.__dict__ |= vars(meet(optimizer.model, None)[1])
        if isinstance(structure, Layerwise):
            ranks.check(structure)
        ranks.compare(optimizer._named, describe_settings(structure, *optimizer._list_settings()))
        ranks.settled = True
    refuse_join(ranks.wrappers)


def read_gradients(
    ranks: Ranks, named: Mapping[str, Tensor], active: set[int], recall: Recall
) -> tuple[dict[str, Tensor], Space, Tensor] | None:
    """The parameters that have a gradient on some process, their space, and the gradient of the mean loss (n,).

    A `DistributedDataParallel` has averaged the gradients. Otherwise they are averaged here, where gradients that are
    equal already stay as they are.

    Args:
        ranks: The processes.
        named: All parameters by name.
        active: The ids of those in the optimizer's groups.
        recall: What happened since the last step.

    Raises:
        NotFiniteError: For a gradient that is not finite: on all processes.
    """
    there = {name: p for name, p in named.items() if id(p) in active and p.grad is not None}
    if ranks.size == 1:
        if not there:
            return None
        gradients = {name: dense_gradient(name, p) for name, p in there.items()}
        space = Space(there)
        return there, space, space.flatten(gradients) / (recall.scale or 1.0)
    if ranks.wrappers:
        return read_averaged(ranks, there, recall)
    device = next(iter(named.values())).device
    told = share_numbers(ranks, [recall.scale, weigh_gradient(recall), *(name in there for name in named)], device)
    params = {name: p for i, (name, p) in enumerate(named.items()) if any(one[2 + i] for one in told)}
    if not params:
        return None
    space = Space(params)
    vector = join_vectors(ranks, space.flatten({name: to_dense(p.grad) for name, p in there.items()}), told)
    if not bool(vector.isfinite().all()):
        raise NotFiniteError("the gradient is not finite on some process; nothing was changed on any")
    return params, space, vector / mean_scale(ranks, told)


def read_averaged(
    ranks: Ranks, params: dict[str, Tensor], recall: Recall
) -> tuple[dict[str, Tensor], Space, Tensor] | None:
    """`read_gradients` where a `DistributedDataParallel` has averaged them: they are the same everywhere.

    Raises:
        ValueError: If they are not.
    """
    if not params:
        return None
    space = Space(params)
    vector = space.flatten({name: to_dense(p.grad) for name, p in params.items()})
    told = share_numbers(ranks, [recall.scale, float(measure_norm(vector.double()))], space.device)
    norms = [one[1] for one in told]
    if any(abs(norm - norms[0]) > DRIFTED * max(norms) for norm in norms):  # false where one is NaN
        raise ValueError(
            f"the {ranks.size} processes have gradients of norms {norms}, and their parameters would drift apart: call "
            "the DistributedDataParallel and not the module inside it, and do the last backward outside of no_sync()"
        )
    if not bool(vector.isfinite().all()):
        raise NotFiniteError(
            "the gradient is not finite; nothing was changed. Skip this batch, or look for an overflow"
        )
    return params, space, vector / mean_scale(ranks, told)


def mean_scale(ranks: Ranks, told: list[list[float]]) -> float:
    """What the mean of the gradients is divided by under reduction='sum': the mean of the processes' counts; else 1."""
    return sum(one[0] for one in told) / ranks.size or 1.0


def join_vectors(ranks: Ranks, vector: Tensor, told: list[list[float]]) -> Tensor:
    """The mean of all processes' vectors, weighted by the second of the numbers that they told."""
    total = sum(one[1] for one in told)
    weight = told[ranks.rank][1] / total if total else 0.0
    return ranks.sum(weight * vector if weight else torch.zeros_like(vector))


def to_dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient that may be sparse, or missing."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def weigh_gradient(recall: Recall) -> float:
    """What this process's gradient weighs: 1 where its losses were weighed, else the rows of its pass."""
    if recall.computed or recall.losses:
        return 1.0
    return 1.0 if recall.last is None else float(as_call(recall.last.call).batch())


def join_metric(ranks: Ranks, metric: Metric, recall: Recall, drawn: bool, device: torch.device) -> Metric:
    """The metric over all processes' examples; as it is for one process.

    Args:
        ranks: The processes.
        metric: Of the step's losses.
        recall: What happened since the last step.
        drawn: True if the metric is taken on some of the pass's examples.
        device: Of the parameters.
    """
    if ranks.size == 1 or metric.is_joined:
        return metric
    if isinstance(metric, SumOverData):
        told = {id(data.targets): one for one in recall.used_losses() for data in [one.data()]}
        weights = join_weights(ranks, [weight for weight, _, _ in metric.parts], recall, device)
        parts = [
            (weight, JoinedMetric(one, ranks, rows_of(told.get(id(data.targets)))), data)
            for weight, (_, one, data) in zip(weights, metric.parts, strict=True)
        ]
        return replace(metric, parts=parts)
    if isinstance(metric, MetricSum):
        return replace(metric, terms={name: JoinedMetric(term, ranks) for name, term in metric.terms.items()})
    own = recall.observed is None and not drawn
    return JoinedMetric(metric, ranks, rows_of(recall.last_told) if own else None)


def join_weights(ranks: Ranks, weights: Sequence[float], recall: Recall, device: torch.device) -> list[float]:
    """What the losses of a step weigh, on all processes: under reduction='sum' it follows from everyone's counts."""
    told = share_numbers(ranks, [recall.scale, *weights], device)
    scales = [one[0] for one in told]
    scales = scales if any(scales) else [1.0] * len(scales)  # a process without examples counts none of a sum
    return [
        sum(scale * weight for scale, weight in zip(scales, column, strict=True)) / sum(scales)
        for column in list(zip(*told, strict=True))[1:]
    ]


def rows_of(told: RecordedLoss | None) -> float | None:
    """What a loss is a mean over, if that is known."""
    return None if told is None or math.isnan(told.count) else told.count


def join_choice(ranks: Ranks, metric: Metric, choice: Any, data: Data) -> tuple[Metric, Any, SumParts | None]:
    """The metric and the structure or preconditioner for all processes' examples.

    One that hears the layers does so on this process's pass, and its statistics are added up.

    Args:
        ranks: The processes.
        metric: From `join_metric`.
        choice: A structure or a preconditioner.
        data: The metric's.

    Returns:
        The two, and what adds statistics up while they are read, if anything does.
    """
    structure = choice.structure if isinstance(choice, StructurePreconditioner) else choice
    if ranks.size == 1 or not isinstance(structure, Layerwise):
        return metric, choice, None
    known = isinstance(metric, JoinedMetric) and metric.rows is not None
    rows = metric.rows if isinstance(metric, JoinedMetric) and known else float(as_call(data.inputs).batch())
    device = next(iter(as_call(data.inputs).tensors())).device
    told = [one for (one,) in share_numbers(ranks, [rows or 0.0], device)]
    if not all(told):
        raise ValueError(
            f"process {told.index(0.0)} has no examples, which {structure!r} needs on every process: leave out such "
            "batches everywhere, or use a structure that is solved by products, ng.Exact()"
        )
    share = told[ranks.rank] / sum(told)
    apart = replace(structure, seed=structure.seed + 15485863 * ranks.rank)  # labels of its own

    def exchange(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: ranks.sum(share * tensor) for key, tensor in fresh.items()}

    return metric.inner, replace(choice, structure=apart) if structure is not choice else apart, exchange


def update_jointly(
    processes: RankExchange, structure: Structure, memory: Any, metric: Metric, params: Params, inputs: Any
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
    joined = JoinedMetric(metric, processes.ranks)
    if isinstance(structure, Layerwise):
        processes.ranks.check(structure)
    own, apart, exchange = join_choice(processes.ranks, joined, structure, Data(inputs, None, None))
    with exchanging(exchange):
        return apart.update(memory, own, params, inputs)


def join_mean_loss(ranks: Ranks, recall: Recall, device: torch.device) -> Tensor | None:
    """The mean over all processes' rows of this step's losses; NaN where no target counts; None if none was told.

    Args:
        ranks: The processes.
        recall: What happened since the last step.
        device: Of the parameters.
    """
    own = recall.mean_loss()
    if ranks.size == 1:
        return own
    rows = sum(loss.rows for loss in recall.losses or recall.computed)
    part = 0.0 if own is None or not rows else float(own) * rows
    told = share_numbers(ranks, [own is not None, rows, part], device)
    if not any(one[0] for one in told):
        return None
    total = sum(one[1] for one in told)
    mean = sum(one[2] for one in told) / total if total else math.nan
    return torch.tensor(mean, dtype=torch.float64, device=device)


class JoinedLoss(Objective):
    """The mean over all processes' rows of a loss that each has of its own rows.

    Args:
        ranks: The processes.
        part: The loss of this process's rows.
        rows: What that is a mean over; None: what the criterion counts there.
        averaged: True if `part`'s gradients are the same on all processes already.
    """

    def __init__(self, ranks: Ranks, part: Objective, rows: float | None = None, averaged: bool = False) -> None:
        super().__init__(part.params, part.space, math.nan)
        self.ranks, self.part, self.averaged = ranks, part, averaged
        self.rows = part.count if rows is None else rows
        self.before = self._mean(part.before)
        self.before = self.before if math.isfinite(self.before) else math.nan

    def _mean(self, value: float) -> float:
        told = share_numbers(self.ranks, [value * self.rows if self.rows else 0.0, self.rows], self.space.device)
        rows = sum(one[1] for one in told)
        return sum(one[0] for one in told) / rows if rows else math.nan

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return self._mean(self.part._evaluate(step))

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        value, parts = self.part._differentiate(step)
        weights = [[0.0, 1.0]] * self.ranks.size
        if not self.averaged:
            weights = [[0.0, one[0]] for one in share_numbers(self.ranks, [self.rows], self.space.device)]
        vector = join_vectors(self.ranks, self.space.flatten(parts), weights)
        return self._mean(value), self.space.unflatten(vector)


def join_objective(ranks: Ranks, objective: Objective | None, recall: Recall) -> Objective | None:
    """The loss over all processes' rows; as it is for one process.

    Args:
        ranks: The processes.
        objective: The loss of this process's rows.
        recall: What happened since the last step.
    """
    if ranks.size == 1 or objective is None:
        return objective
    if isinstance(objective, Total):
        device = objective.space.device
        weights = join_weights(ranks, [weight for weight, _ in objective.parts], recall, device)
        return Total([(w, JoinedLoss(ranks, part)) for w, (_, part) in zip(weights, objective.parts, strict=True)])
    if not isinstance(objective, Reclose):
        return JoinedLoss(ranks, objective)
    rows = sum(loss_rows for loss_rows in (rows_of(told) for told in recall.used_losses()) if loss_rows is not None)
    return JoinedLoss(ranks, objective, rows or 1.0, averaged=bool(recall.computed or ranks.wrappers))


def check_in_step(ranks: Ranks, vector: Tensor) -> None:
    """Check that all processes are about to take the same step.

    Args:
        ranks: The processes.
        vector: The step, shape (n,).

    Raises:
        RuntimeError: On all processes, if some step lies apart by more than round-off.
    """
    if ranks.size == 1:
        return
    probe = torch.cos(torch.arange(len(vector), dtype=torch.float64, device=vector.device))
    numbers = [float(vector.double() @ probe), float(measure_norm(vector.double()))]
    told = share_numbers(ranks, [number if math.isfinite(number) else math.inf for number in numbers], vector.device)
    most = max(one[1] for one in told)
    if any(abs(a - b) > DRIFTED * most for one in told for a, b in zip(one, told[0], strict=True) if a != b):
        raise RuntimeError(
            f"the {ranks.size} processes found different steps, of lengths {[one[1] for one in told]}: nothing was "
            "changed. Give all of them the same options, and let all call loss and step alike"
        )
