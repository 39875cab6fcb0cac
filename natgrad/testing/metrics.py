"""Metrics and structures: sound operators that leave no trace."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.pure import Call, as_call, leaves, map_tensors
from natgrad.ground.spaces import Params, Space
from natgrad.metrics import Metric
from natgrad.operators import Operator
from natgrad.testing.operators import check_operator
from natgrad.testing.requirements import require, require_close, require_untouched, tolerance


def check_metric(
    metric: Metric,
    params: Params,
    inputs: Any,
    *,
    reference: Metric | Operator | Tensor | None = None,
    draws: bool = False,
    rtol: float | None = None,
) -> None:
    """G(params) is a sound operator, a mean over examples, and leaves no trace in the model.

    No trace: parameters, their `.grad`, buffers and the global random state are as before.

    Args:
        metric: The metric.
        params: Name -> tensor, such as `ng.trainable(model)`.
        inputs: As `metric.at` takes them.
        reference: What G must equal: a matrix (n, n), an operator or another metric. None: nothing.
        draws: True for a metric with draws of its own (sampled labels, dropout): two calls are then not compared.
        rtol: Allowed error relative to the largest entry, default 1e4 eps of the operator's dtype.

    Raises:
        AssertionError: With a sentence, for a property that does not hold.

    Example:
        >>> from natgrad.testing import check_metric
        >>> model = nn.Linear(2, 3)
        >>> check_metric(ng.fisher(model, ng.Categorical()), ng.trainable(model), torch.randn(5, 2))
    """
    rtol = tolerance(rtol, Space(params).dtype)
    with require_untouched(params, getattr(metric, "model", None), "metric.at"):
        operator = metric.at(params, inputs)
        require(isinstance(operator, Operator), f"metric.at returned {type(operator).__name__}, expected an Operator")
        size = Space(params).size
        require(operator.size == size, f"metric.at returned {operator!r}, but params have {size} entries")
        check_operator(operator, rtol=rtol)
        matrix = operator.dense()
        if not draws:
            with torch.no_grad():
                require_close("G taken under torch.no_grad()", metric.at(params, inputs).dense(), matrix, rtol)
            twice = metric.at(params, _duplicate(inputs, metric.needs_targets)).dense()
            require_close("G of the batch taken twice (a mean over examples)", twice, matrix, rtol)
        if reference is not None:
            known = reference.at(params, inputs) if isinstance(reference, Metric) else reference
            expected = known.dense() if isinstance(known, Operator) else known
            require_close("G against the reference", matrix, expected, rtol)


def check_structure(structure: Any, metric: Metric, params: Params, inputs: Any, *, rtol: float | None = None) -> None:
    """`structure.update` gives a sound operator and a memory that survives a checkpoint.

    Each of three updates is taken twice, from the memory and from the memory saved and loaded with weights_only=True,
    and the operators are compared bit for bit.

    Args:
        structure: The structure.
        metric: A metric that does not draw (no sampled labels).
        params: Name -> tensor, such as `ng.trainable(model)`.
        inputs: As `metric.at` takes them.
        rtol: Allowed error relative to the largest entry, default 1e4 eps of the operator's dtype.

    Raises:
        AssertionError: With a sentence, for a property that does not hold.

    Example:
        >>> from natgrad.testing import check_structure
        >>> model = nn.Linear(2, 3)
        >>> metric = ng.fisher(model, ng.Categorical())
        >>> check_structure(ng.Kronecker(), metric, ng.trainable(model), torch.randn(5, 2))
    """
    with require_untouched(params, getattr(metric, "model", None), "structure.update"):
        memory = None
        for _ in range(3):
            stored = _reload(memory)
            operator, following = structure.update(memory, metric, params, inputs)
            again, _ = structure.update(stored, metric, params, inputs)
            require(isinstance(operator, Operator), f"structure.update returned {operator!r} first, no Operator")
            check_operator(operator, rtol=rtol)
            same = torch.equal(operator.dense(), again.dense())
            require(same, "structure.update gives another operator from its memory saved and loaded: a part is missing")
            intact = all(torch.equal(a, b) for a, b in zip(leaves(memory), leaves(stored), strict=True))
            require(intact, "structure.update changed the memory that was passed in; return a new one")
            memory = following


def _duplicate(inputs: Any, with_targets: bool) -> Any:
    data, targets = inputs if with_targets else (inputs, None)
    batch = as_call(data).batch()

    def twice(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor]) if tensor.dim() and len(tensor) == batch else tensor

    data = data.map(twice) if isinstance(data, Call) else map_tensors(data, twice)
    return (data, map_tensors(targets, twice)) if with_targets else data


def _reload(memory: Any) -> Any:
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise AssertionError(f"torch.load(weights_only=True) refuses the memory; keep plain values: {error}") from error
