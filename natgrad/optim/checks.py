"""What the optimizer checks at its door."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, LogDensity
from natgrad.ground.checks import check_integer, is_integer
from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import Labelled, as_call, leaves, map_tensors
from natgrad.ground.spaces import check_parameters, hint_at_parameters, trainable
from natgrad.ground.typed_torch import is_mapping
from natgrad.metrics import Covariance, Hessian, Metric, MetricSum, PullbackMetric, sum_metrics
from natgrad.optim.guard import NotFiniteError
from natgrad.optim.passes import Data
from natgrad.rules import LineSearch, MeasuredLength, Rule, SubspaceSearch, refuse_measured_kl
from natgrad.solvers import CG, Auto, Direct, MinresQLP, SampleSpace, Solver
from natgrad.structures import Layerwise, Structure

LIMITS = (
    {"momentum": 1.0}
    | dict.fromkeys(("lr", "damping", "weight_decay", "l2"), sys.float_info.max)
    | dict.fromkeys(("max_kl", "kl_share"), math.inf)
)
"""The most that the numbers of a parameter group may be."""
ROUNDED_BELOW = 1e-12
"""Below zero, where a schedule that falls to zero may end: LinearLR(end_factor=0) does so at -2e-18."""
WITHOUT_BASIS = (Auto, CG, Direct, MinresQLP, SampleSpace)
"""Solvers whose solution has no basis of the space that they searched."""


def named_parameters(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of all trainable parameters. ValueError for none, TypeError for anything but a module or a dict."""
    if isinstance(model, nn.Module):
        params = trainable(model)
        check_parameters(params)
        check_numbers_there(params)
        return dict(params)
    check_parameters(model)
    check_numbers_there(model)
    frozen = [name for name, p in model.items() if not (p.requires_grad and p.is_leaf)]
    if frozen:
        raise ValueError(f"params {frozen} are not leaves that require a gradient; call .requires_grad_() on them")
    return dict(model)


def check_numbers_there(params: Mapping[str, Tensor]) -> None:
    """ValueError for parameters on the meta device."""
    empty = [name for name, p in params.items() if p.is_meta]
    if empty:
        raise ValueError(
            f"params {empty} lie on the meta device and hold no numbers: call model.to_empty(device='cpu') and "
            "initialise them, or load a state_dict, before the optimizer is built"
        )


def to_dense(gradient: Tensor) -> Tensor:
    """A gradient that may be sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def dense_gradient(name: str, p: Tensor) -> Tensor:
    """p.grad, dense. NotFiniteError if it is not finite."""
    assert p.grad is not None
    gradient = to_dense(p.grad)
    if not all_finite(gradient):
        raise NotFiniteError(
            f"the gradient of {name!r} is not finite; nothing was changed. Skip this batch, or look for an overflow in "
            "the loss (with GradScaler, scaler.step(optimizer) skips such steps)"
        )
    return gradient


SUCH_AS = {
    Metric: "ng.fisher(model, nn.CrossEntropyLoss())",
    Structure: "ng.Kronecker(0.95)",
    Solver: "ng.CG()",
    Rule: "ng.TrustRegion(0.01)",
}
"""An example of each choice, as it is written."""


def describe_wrong_choice(name: str, choice: Any, kind: type) -> str:
    """What is wrong with an argument that is not of its kind, as a sentence."""
    hint = "; did you forget the parentheses?" if isinstance(choice, type) else ""
    return f"{name} is {choice!r}, expected a natgrad {kind.__name__} such as {SUCH_AS[kind]}{hint}"


def check_choices(metric: Any, structure: Any, solver: Any, rule: Any) -> None:
    """TypeError unless every choice is of its kind, ValueError for a rule without the solver that it needs."""
    kinds = {"metric": (metric, Metric), "structure": (structure, Structure), "solver": (solver, Solver)}
    for name, (choice, kind) in {**kinds, "rule": (rule, Rule)}.items():
        if not isinstance(choice, kind) and (choice is not None or name == "metric"):
            raise TypeError(describe_wrong_choice(name, choice, kind))
    if isinstance(metric, MetricSum) and isinstance(structure, Layerwise):
        raise TypeError(
            f"structure {structure!r} records one pass, metrics are of several: use ng.Exact(), ng.Blocks()"
        )
    if isinstance(rule, Rule):
        check_rule(rule, solver or Auto())


def check_rule(rule: Rule, solver: Solver) -> None:
    """ValueError for a rule that the flat flow cannot serve with this solver."""
    if rule.shapes:
        raise ValueError(f"rule {rule} shapes the directions of layers: use ng.kfac or another of its like")
    refuse_measured_kl(rule)
    if isinstance(rule, SubspaceSearch) and isinstance(solver, WITHOUT_BASIS):
        raise ValueError(f"rule {rule} searches the solver's space: use solver=ng.KrylovSubspace(dimension=...)")
    keeps = isinstance(solver, CG) and solver.keep is not None
    if isinstance(rule, LineSearch) and rule.iterates and isinstance(solver, WITHOUT_BASIS) and not keeps:
        raise ValueError(
            f"rule {rule} chooses among the solver's iterates, and the solver keeps none: use ng.CG(keep=1.3)"
        )


def choose_metric(metric: Any, metrics: Any, weights: Any) -> Metric:
    """The metric, or the sum of several. TypeError or ValueError for both, for none, and for weights of one."""
    if metrics is None:
        if metric is None:
            raise TypeError("metric is None, expected one, ng.fisher(model, ...), or several, metrics={name: metric}")
        if weights is not None:
            raise TypeError(f"weights is {weights!r} without metrics: it weighs those by their names")
        return metric
    if metric is not None:
        raise TypeError(f"metric is {metric!r} and metrics is given too: give one of them")
    return sum_metrics(metrics, weights)


def maximize_criterion(criterion: Criterion) -> Criterion:
    """The same loss, to be raised. ValueError for one that is no number to raise."""
    if isinstance(criterion.family, LogDensity):
        raise ValueError(
            "maximize is True with ng.LogDensity(), whose loss is minus the mean of log p: leave maximize out, and "
            "log p rises"
        )
    return replace(criterion, maximize=True)


def maximize_metric(metric: Metric) -> Metric:
    """The same metric, of a loss that is to be raised. ValueError for the Hessian."""
    if isinstance(metric, Hessian):
        raise ValueError(
            "maximize is True with ng.hessian, and a Newton step leads to where the gradient is zero, up or down: take "
            "a metric that is positive, ng.fisher or ng.gauss_newton"
        )
    if isinstance(metric, Covariance):
        return replace(metric, moment=maximize_metric(metric.moment))
    criterion = getattr(metric, "criterion", None)
    if not isinstance(criterion, Criterion) or not is_dataclass(metric):
        return metric
    return replace(metric, criterion=maximize_criterion(criterion))  # type: ignore[call-arg]


def refuse_maximize(maximize: Any, processes: int) -> None:
    """TypeError for anything but True and False, ValueError for several processes, whose scales are added up."""
    if not isinstance(maximize, bool):
        raise TypeError(f"maximize is {maximize!r}, expected True or False")
    if maximize and processes > 1:
        raise ValueError("maximize is True with several processes: negate the loss there, and leave maximize out")


def inputs_of(metric: Metric, data: Data) -> Any:
    """Data in the form in which the metric takes it."""
    if isinstance(metric, MetricSum):
        return inputs_of_terms(metric, data)
    if metric.needs_targets:
        return data.inputs, data.targets
    known = isinstance(metric.inner, PullbackMetric) and data.targets is not None
    return Labelled(data.inputs, data.targets) if known else data.inputs


def inputs_of_terms(metric: MetricSum, data: Data) -> dict[str, Any]:
    """Data by term, each with its targets where they were observed beside it."""
    given: Mapping[str, Any] = metric.check_data(data.inputs)
    targets: Any = {} if data.targets is None else data.targets
    unknown = sorted(targets.keys() - given.keys()) if is_mapping(targets) else [type(targets).__name__]
    if unknown:
        raise ValueError(f"targets has {unknown}, expected a dict by the metrics' names {list(given)}")
    return {
        name: inputs_of(term, replace(data, inputs=given[name], targets=targets[name]))
        if name in targets
        else given[name]
        for name, term in metric.terms.items()
    }


def check_batches(model: Any, **sizes: int | None) -> None:
    """TypeError or ValueError unless sizes are integers >= 1 or None, and a search batch has a module to evaluate."""
    for name, size in sizes.items():
        if size is not None and not is_integer(size):
            raise TypeError(f"{name} is {size!r}, expected a number of examples, an integer >= 1, or None for all")
        if size is not None:
            check_integer(name, size, hint=", or None for all examples")
    if sizes.get("search_batch") is not None and not isinstance(model, nn.Module):
        raise TypeError("search_batch needs an nn.Module; with a dict of tensors pass a closure to step")


def check_search(inputs: Any, targets: Any) -> None:
    """ValueError unless there are examples with targets to evaluate a loss on."""
    if targets is None:
        raise ValueError(
            "targets is None: trial points need a loss; give labelled examples, or use optimizer.observe(inputs) for a "
            "metric on unlabelled ones"
        )
    if as_call(inputs).batch() == 0:
        raise ValueError("inputs is an empty batch; give at least one example")


def check_number(name: str, value: float, most: float = sys.float_info.max) -> None:
    """ValueError unless 0 <= value <= most, TypeError for anything but a number."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, expected a number >= 0")
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}, expected a number >= 0" + (f" and <= {most}" if most == 1 else ""))


def check_key(key: str, value: float, most: float) -> None:
    """ValueError or TypeError unless a group key is a number in its range: momentum below 1, a bound above 0."""
    check_number(key, value, most)
    if key == "momentum" and value == 1:
        raise ValueError("momentum is 1, expected less than 1: with 1 the running mean of the gradient never changes")
    if key in ("damping", "max_kl", "kl_share") and value == 0:
        raise ValueError(f"{key} is 0, expected a number > 0" + ("" if key == "damping" else "; math.inf for no bound"))


def check_numbers(group: Mapping[str, Any], keys: Iterable[str]) -> None:
    """ValueError or TypeError unless the numbers of a group under these keys are in their ranges."""
    for key in keys:
        if key in LIMITS:
            check_key(key, read_number(group[key]), LIMITS[key])


def read_number(value: Any) -> Any:
    """A number that a loop or a schedule may have written as a tensor or one of NumPy; anything else as it is."""
    plain = isinstance(value, (int, float))  # a tenth of the time that a protocol takes
    if not plain and (not isinstance(value, SupportsFloat) or math.prod(getattr(value, "shape", ())) != 1):
        return value
    number = float(value)
    return 0.0 if -ROUNDED_BELOW < number < 0 else number


def check_blocks(model: Any, structure: Any, **intervals: int) -> None:
    """TypeError unless a module and a structure in blocks per layer, ValueError for an interval below one step."""
    if not isinstance(model, nn.Module):
        came = f"model is {type(model).__name__}"
        raise TypeError(f"{came}, expected a torch.nn.Module: its layers are the blocks{hint_at_engine(model)}")
    if not isinstance(structure, Layerwise):
        raise TypeError(f"structure is {structure!r}, expected one in blocks per layer such as ng.Kronecker(0.95)")
    for name, every in intervals.items():
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"{name} is {every}, expected an integer >= 1")


def hint_at_engine(model: Any) -> str:
    """What to do instead, where an engine of several processes gives something else than a module."""
    if type(model).__name__ in ("PipelineStage", "ScheduleGPipe", "Schedule1F1B"):
        return ". A stage of a pipeline has no outputs that labels could be drawn from: use fully_shard"
    return hint_at_parameters(model)


def given_parameters(params: Any, known: Mapping[str, Tensor]) -> list[Any]:
    """What `torch.optim.Optimizer` takes: parameters, (name, parameter) pairs, or groups of either."""
    if params is None:
        return list(known.values())
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    return list(params.items() if is_mapping(params) else params)


def checked_group(
    group: Mapping[str, Any],
    known: Mapping[int, str],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """A parameter group with its parameters, or pairs, as a list."""
    params = given_parameters(group["params"], {})
    tensors: list[Any] = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    strangers = [tuple(p.shape) for p in tensors if isinstance(p, Tensor) and id(p) not in known]
    if strangers:
        raise ValueError(f"params holds tensors of shapes {strangers} that are not parameters of the model")
    check_numbers({**defaults, **group}, defaults)
    return {**group, "params": params}


def evaluate_loss(criterion: Criterion, outputs: Any, targets: Any, skips: bool) -> Tensor:
    """The criterion's value. Targets that are not finite make it so too where such a batch is to be skipped."""
    try:
        return criterion.value(outputs, targets)
    except ValueError:
        floats = [t for t in leaves(targets) if t.is_floating_point()]
        if not skips or all(all_finite(t) for t in floats):
            raise
    criterion.check(outputs, map_tensors(targets, lambda t: torch.where(torch.isfinite(t), t, 0)))
    return criterion.evaluate(outputs, targets)


ALIKE = 1e-3
"""Of a loss: by so much at most a model's own differs from the criterion's of its logits, by rounding."""


def agree_on_loss(own: Tensor, value: Tensor, criterion: Criterion) -> bool:
    """Whether a model's own loss is seen to be the criterion's; False where there is no number to compare.

    ValueError if it is another.
    """
    pair = torch.stack([own.detach().double(), value.detach().double()])
    if not all_finite(pair):
        return False
    if float((pair[0] - pair[1]).abs()) <= ALIKE * float(pair.abs().max()):
        return True
    raise ValueError(
        f"the model returned the loss {float(pair[0]):.5g}, and of its logits {criterion} is {float(pair[1]):.5g}: "
        'build the optimizer with the loss that the model computes, as "token_cross_entropy(ignore_index=-1)", or '
        "model.loss_function of a language model of transformers, which shifts the labels; or leave the targets out of "
        "the model's call, for the criterion's alone. A term that the model adds goes beside it: (opt.loss(logits, "
        "targets) + term).backward()"
    )


def check_statistics(missing: bool) -> None:
    """ValueError where a step has none."""
    if missing:
        raise ValueError(
            "no statistics yet: compute the loss with optimizer.loss(outputs, targets), in training mode (or build "
            "the optimizer with train_in_eval=True), and call backward() on it"
        )


def settle_rule(rule: Rule | None, max_kl: float | None, kl_share: float | None) -> Rule:
    """The rule, by default `MeasuredLength` with these bounds. ValueError for one that the blocks cannot serve."""
    bounds = [key for key, value in (("max_kl", max_kl), ("kl_share", kl_share)) if value is not None]
    if rule is None:
        usual = MeasuredLength()
        share = usual.kl_share if kl_share is None else kl_share
        return MeasuredLength(usual.max_kl if max_kl is None else max_kl, share)
    if not isinstance(rule, Rule):
        raise TypeError(describe_wrong_choice("rule", rule, Rule))
    if bounds:
        raise ValueError(f"{bounds} are settings of rule=ng.MeasuredLength(...): give them to the rule")
    if isinstance(rule, SubspaceSearch) or (isinstance(rule, LineSearch) and rule.iterates):
        raise ValueError(
            f"rule {rule} needs the search space of an iterative solver: use ng.NaturalGradient, ng.hessian_free"
        )
    refuse_measured_kl(rule)
    return rule
