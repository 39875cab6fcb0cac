"""Metrics of several terms of a loss, each on data of its own, added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from natgrad.ground.checks import check_positive
from natgrad.ground.pure import RandomState
from natgrad.ground.spaces import Params
from natgrad.ground.typed_torch import is_mapping
from natgrad.metrics.base import Metric
from natgrad.operators import Operator, Scaled, Sum


def sum_metrics(metrics: Mapping[str, Metric], weights: Mapping[str, float] | None = None) -> MetricSum:
    """G = sum_k w_k G_k of named terms, each on data of its own: points inside a domain and on its boundary, two tasks.

    `ng.NaturalGradient(model, metrics={...})` is short for it. Its unit is that of the term with the most nats, so that
    a bound on the KL holds. Terms that sample labels draw from the first one's generator, one after the other.

    Args:
        metrics: Name -> metric, all in the same parameters.
        weights: Name -> w > 0, the weight of the term in the loss; default 1.

    Returns:
        A metric; `.at(params, {"inside": x, "boundary": y})` gives the operator, with every term's data as its own
        metric takes them.

    Raises:
        TypeError: For a term that is no metric.
        ValueError: For no term at all, or a weight that belongs to no term or is no finite number > 0.

    Example:
        >>> net, x, y = nn.Linear(2, 1), torch.randn(6, 2), torch.randn(3, 2)
        >>> metric = ng.fisher(net, ng.Gaussian())
        >>> both = ng.metrics.sum_metrics({"inside": metric, "boundary": metric}, weights={"boundary": 10.0})
        >>> both.at(ng.trainable(net), {"inside": x, "boundary": y}).dense().shape
        torch.Size([3, 3])
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise TypeError(f'metrics is {metrics!r}, expected a dict of metrics by name, {{"inside": ng.fisher(...)}}')
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"metrics has the name {name!r}, expected a string")
        if not isinstance(metric, Metric):
            hint = "; did you forget the parentheses?" if isinstance(metric, type) else ""
            raise TypeError(f"metrics[{name!r}] is {metric!r}, expected a natgrad Metric such as ng.fisher(...){hint}")
    weights = dict(weights or {})
    unknown = sorted(weights.keys() - metrics.keys())
    if unknown:
        raise ValueError(f"weights has {unknown}, which is no term: the terms are {list(metrics)}")
    for name, weight in weights.items():
        check_positive(f"weights[{name!r}]", weight)
    return MetricSum(share_generator(metrics), {name: float(weights.get(name, 1.0)) for name in metrics})


@dataclass(frozen=True, repr=False)
class MetricSum(Metric):
    """What `sum_metrics` gives: G = sum_k w_k G_k.

    Args:
        terms: Name -> metric.
        weights: Name -> w.
    """

    terms: Mapping[str, Metric]
    weights: Mapping[str, float]

    @property
    def generator(self) -> torch.Generator | None:
        """The source of labels of the terms that draw them."""
        return find_generator(self.terms)

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        data = self.check_data(inputs)
        operators = {name: term.at(params, data[name], random=random) for name, term in self.terms.items()}
        nats = max(operator.nats for operator in operators.values())
        parts = [Scaled(operator.declare(nats=nats), self.weights[name]) for name, operator in operators.items()]
        return Sum(tuple(parts))

    def add_up(self, params: Params, inputs: Any) -> tuple[Operator, float]:
        data = self.check_data(inputs)
        if any(weight != 1.0 for weight in self.weights.values()):
            raise ValueError(
                f"weights is {dict(self.weights)}, expected none: the information of all examples together is the sum "
                "of the terms', whatever they weigh in a loss; build ng.metrics.sum_metrics(metrics) for it"
            )
        terms = [term.add_up(params, data[name]) for name, term in self.terms.items()]
        return Sum(tuple(Scaled(operator.declare(nats=1.0), count) for operator, count in terms)), 1.0

    def count_examples(self, inputs: Any) -> int:
        data = self.check_data(inputs)
        return sum(term.count_examples(data[name]) for name, term in self.terms.items())

    def check_data(self, inputs: Any) -> Mapping[str, Any]:
        """The data by term.

        Args:
            inputs: What came.

        Raises:
            TypeError: For anything but a dict.
            ValueError: Unless it has data for every term, and for nothing else.
        """
        names = list(self.terms)
        if not is_mapping(inputs):
            raise TypeError(
                f"inputs is {type(inputs).__name__}, expected a dict with the data of {names}: before each step call "
                f"optimizer.observe({{{names[0]!r}: x, ...}})"
            )
        missing, unknown = sorted(self.terms.keys() - inputs.keys()), sorted(inputs.keys() - self.terms.keys())
        if missing or unknown:
            said = f"no data for {missing}" if missing else f"data for {unknown}, which is no term"
            raise ValueError(f"inputs has {said}: the metrics are of {names}, each on data of its own")
        return inputs


def find_generator(metrics: Mapping[str, Metric]) -> torch.Generator | None:
    """The source of labels of the first metric that draws any."""
    return next((own for metric in metrics.values() if (own := getattr(metric, "generator", None)) is not None), None)


def share_generator(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The same metrics with one source of labels: a checkpoint has one generator."""
    shared = find_generator(metrics)
    sharing = dict[str, Metric]()
    for name, metric in metrics.items():
        if getattr(metric, "generator", None) in (None, shared):
            sharing[name] = metric
        elif is_dataclass(metric) and "generator" in {field.name for field in fields(metric) if field.init}:
            sharing[name] = replace(metric, generator=shared)  # type: ignore[call-arg]
        else:
            raise ValueError(f"metrics[{name!r}] has a generator of its own: build it with that of the first term")
    return sharing
