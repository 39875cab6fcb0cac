"""The metric of the examples of all processes, for what is solved by products: each keeps its own, images are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.metrics import Covariance, Metric, PullbackMetric
from natgrad.operators import Centred, Facts, JoinedRows, Operator, Pullback, Rows
from natgrad.optim.distributed import Ranks
from natgrad.optim.exchanges import RankExchange, share_numbers
from natgrad.pure import Labelled, RandomState, as_call
from natgrad.spaces import Params, Space
from natgrad.typed_torch import is_mapping


class JoinedOperator(Operator):
    """G = sum_i share_i G_i over processes: products are added up, and all processes get the same bits.

    Args:
        local: G_i of this process's examples; None where it has none.
        space: Of the parameters.
        shares: Of the examples, by process; they add up to 1.
        columns: Of each G_i's root; None if there is no such root.
        facts: What else is known of G, the same on all processes.
        ranks: The processes.
    """

    def __init__(
        self,
        local: Operator | None,
        space: Space,
        shares: Sequence[float],
        columns: Sequence[int] | None,
        facts: Facts,
        ranks: Ranks,
    ) -> None:
        self.local, self.space, self.shares, self.columns, self.ranks = local, space, shares, columns, ranks
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
        return JoinedRows(rows, self.space, self.columns, self.shares, RankExchange(self.ranks))

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
        widths = [int(found) for (found,) in share_numbers(self.ranks, [width_of(self.local, root)], self.device)]
        if min(widths) < 0:
            return None
        own = torch.zeros(self.size, 0, dtype=self.dtype, device=self.device) if root is None else root
        own = own * self.shares[self.ranks.rank] ** 0.5
        return gather_columns(self.ranks, own, widths)

    def diagonal(self) -> Tensor:
        return self._sum(lambda local: local.diagonal(), (self.size,))

    def trace(self) -> Tensor:
        return self._sum(lambda local: local.trace(), ())

    def mean_eigenvalue(self) -> Tensor:
        return self._sum(lambda local: local.mean_eigenvalue(), ())

    def dense(self) -> Tensor:
        return self._sum(lambda local: local.dense(), (self.size, self.size))

    def _sum(self, part: Callable[[Operator], Tensor], shape: tuple[int, ...]) -> Tensor:
        share = self.shares[self.ranks.rank]
        found = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.ranks.sum(found if self.local is None else share * part(self.local))


def width_of(local: Operator | None, root: Tensor | None) -> int:
    """Columns of this process's root: 0 without examples, -1 where an operator has no root."""
    if root is None:
        return 0 if local is None else -1
    return root.shape[1]


def gather_columns(ranks: Ranks, own: Tensor, widths: Sequence[int]) -> Tensor:
    """Every process's columns side by side, in the order of the ranks."""
    found = torch.zeros(own.shape[0], sum(widths), dtype=own.dtype, device=own.device)
    start = sum(widths[: ranks.rank])
    found[:, start : start + own.shape[1]] = own
    return ranks.sum(found)


@dataclass(frozen=True)
class JoinedMetric(Metric):
    """A metric whose mean runs over the examples of all processes.

    All processes call `at` alike. One that has no examples takes part with none. Where one fails, all raise.

    Args:
        metric: Of a process's own examples.
        ranks: The processes.
        rows: What this process's examples weigh in the mean; None: what the metric itself counts.
    """

    metric: Metric
    ranks: Ranks
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
        counts = [int(count) for (count,) in share_numbers(self.ranks, [len(rows)], rows.device)]
        return gather_columns(self.ranks, rows.flatten(1).mT, counts).mT

    def count_examples(self, inputs: Any) -> int:
        device = next(iter(as_call(unlabel(self.metric, inputs)).tensors())).device
        return int(sum(count for (count,) in share_numbers(self.ranks, [self.metric.count_examples(inputs)], device)))

    def _own(self, metric: Metric) -> Metric:
        """The metric with a source of labels of this process's own. The shared one moves alike everywhere."""
        shared = getattr(metric, "generator", None)
        if not is_dataclass(metric) or not isinstance(shared, torch.Generator):
            return metric
        return replace(metric, generator=self.ranks.generator(shared))  # type: ignore[call-arg, type-var]

    def _join(self, metric: Metric, params: Params, inputs: Any, random: RandomState | None) -> JoinedOperator:
        space, local, rows, trouble = Space(params), None, 0.0, None
        try:
            if metric.count_examples(inputs) and self.rows != 0:
                local = metric.at(params, inputs, random=random)
                rows = count_rows(metric, local, inputs) if self.rows is None else self.rows
        except Exception as error:  # noqa: BLE001 - the others wait in a sum: they are told first
            trouble = error
        return join_operator(self.ranks, local, space, rows, trouble)

    def _centre(self, params: Params, inputs: Any, random: RandomState | None) -> Operator:
        assert isinstance(self.metric, Covariance)
        moment = self._join(self.metric.moment, params, inputs, random)
        local, counted = cast("Any", moment.local), torch.zeros(0, dtype=moment.dtype, device=moment.device)
        if isinstance(moment.local, Pullback):
            counted = cast("Tensor", local.form.counted.to(moment.dtype))
        assert moment.columns is not None
        whole = gather_columns(self.ranks, counted.unsqueeze(0), moment.columns)[0]
        return Centred(moment, whole)  # type: ignore[arg-type]


def join_operator(
    ranks: Ranks, local: Operator | None, space: Space, rows: float, trouble: Exception | None = None
) -> JoinedOperator:
    """G over the examples of all processes, which all call this.

    Args:
        ranks: The processes.
        local: G of this one's examples; None where it has none.
        space: Of the parameters.
        rows: What these weigh in the mean.
        trouble: Why there is none, where something failed.

    Raises:
        ValueError: On all processes, where one failed, which raises its own error; where none has an example.
    """
    told = share_numbers(ranks, describe_operator(local, rows, trouble), space.device)
    if trouble is not None:
        raise trouble
    failed = [i for i, one in enumerate(told) if one[0]]
    if failed:
        raise ValueError(
            f"the metric of process {failed[0]} of {ranks.size} could not be computed, as its own error says; "
            "nothing was changed here"
        )
    total = sum(one[1] for one in told)
    if not total > 0:
        raise ValueError("inputs is an empty batch on every process; give at least one of them an example")
    some = [one for one in told if one[1]]
    facts = Facts(
        nats=sum(one[1] * one[2] for one in some) / total,
        indefinite=any(one[3] for one in some),
        length_unit=some[0][4],
    )
    counts = [int(one[5]) for one in told]
    shares = [one[1] / total for one in told]
    return JoinedOperator(local, space, shares, None if min(counts) < 0 else counts, facts, ranks)


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
    """The same metric of the modules within torch's wrappers, whose own forward is no function of parameters.

    Args:
        metric: A metric, or a part of one.
    """
    given: Any = metric
    if isinstance(metric, (DataParallel, DistributedDataParallel)):
        return given.module
    if is_mapping(metric):
        found = {name: unwrap_models(value) for name, value in metric.items()}
        return found if any(found[name] is not value for name, value in metric.items()) else metric
    if not isinstance(metric, Metric) or not is_dataclass(metric):
        return metric
    values = {field.name: getattr(metric, field.name) for field in fields(metric) if field.init}
    found = {name: unwrap_models(value) for name, value in values.items()}
    changed = {name: value for name, value in found.items() if value is not values[name]}
    return replace(metric, **changed) if changed else metric
