"""The metric of a step's losses: of what each was computed on, which need not be the model's outputs as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from natgrad.metrics import Covariance, Metric
from natgrad.operators import Operator, Scaled, Sum
from natgrad.optim.checks import inputs_of
from natgrad.optim.last_pass import Recall
from natgrad.optim.loss_inputs import OTHER_BATCH, Linearised
from natgrad.optim.recorded_pass import Data, RecordedLoss
from natgrad.pure import RandomState, Select
from natgrad.spaces import Params

SCALER = 128.0
"""Weights of losses from here on come from a gradient scaler, whose factor the gradients no longer have."""


@dataclass(frozen=True)
class SumOverData(Metric):
    """The weighted sum of metrics on data of their own: several losses of one pass."""

    parts: Sequence[tuple[float, Metric, Data]]

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        terms = [
            Scaled(metric.at(params, inputs_of(metric, data), random=data.random), weight)
            for weight, metric, data in self.parts
        ]
        return Sum(tuple(terms))


def metric_of_step(metric: Metric, recall: Recall, model: Any, params: Mapping[str, Tensor]) -> Metric:
    """The metric of the outputs that the step's last loss was computed on, added up over the losses of its pass.

    Gradients of several passes (micro-batches) keep the metric of the last one. ValueError for a loss of something that
    cannot be followed.
    """
    used, last = recall.used_losses(), recall.last_told
    if last is None or not isinstance(model, nn.Module):
        return metric
    group = [told for told in used if told.route.passes == last.route.passes]
    metrics = [choose_outputs(metric, told.settle(model, params, recall.outputs)) for told in group]
    if recall.observed is not None:
        if any(isinstance(chosen_outputs(one), Linearised) for one in metrics):
            raise ValueError(OTHER_BATCH)
        return metrics[-1]
    if len(group) == 1:
        return metrics[-1]
    weights = weights_of(used, recall.scale)
    share = sum(weights) / sum(w for w, told in zip(weights, used, strict=True) if told in group)
    parts = [(share * weights[used.index(told)], one, told.data()) for told, one in zip(group, metrics, strict=True)]
    return SumOverData(parts)


def chosen_outputs(metric: Metric) -> Select | None:
    """What a metric takes of the model's outputs, None for all of them."""
    return getattr(metric.moment if isinstance(metric, Covariance) else metric, "outputs", None)


def choose_outputs(metric: Metric, select: Select | None) -> Metric:
    """The same metric, of what `select` makes of the model's outputs. ValueError for one that cannot be of that."""
    if isinstance(metric, Covariance):
        return replace(metric, moment=choose_outputs(metric.moment, select))
    if is_dataclass(metric) and "outputs" in {field.name for field in fields(metric)}:
        return replace(metric, outputs=select)  # type: ignore[call-arg]
    if select is None:
        return metric
    raise ValueError(
        f"optimizer.loss was given a part or a function of the model's outputs, and {metric!r} is of the outputs as "
        "they are: let the model return what the loss is computed on"
    )


def weights_of(used: Sequence[RecordedLoss], scale: float) -> list[float]:
    """What each loss, as a mean, weighs in the gradient. ValueError where a gradient scaler hides it.

    scale: what the gradient is divided by.
    """
    found = [1.0 if told.weight is None else float(told.weight) for told in used]
    if len(used) > 1 and min(found) >= SCALER:
        raise ValueError(
            f"the step has {len(used)} losses with weights {found}, as from a GradScaler: what each weighs in the "
            "gradients is not known; make one optimizer.loss(outputs, targets) of them, or do without scaling"
        )
    return [weight * (told.scale / scale if scale else 1.0) for weight, told in zip(found, used, strict=True)]
