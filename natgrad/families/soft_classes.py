"""Class probabilities as targets and log-probabilities as outputs: the loss of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from natgrad.families.base import check_range, check_same_shape, require_one_tensor, require_tensor_targets
from natgrad.families.criteria import Criterion
from natgrad.families.discrete import Categorical

ROUNDING = 0.1
"""Of the logarithm of a sum of probabilities; log-softmax in half precision is within .03."""


@dataclass(frozen=True, repr=False)
class SoftClasses(Categorical):
    """Logarithms of class probabilities (b, ..., C), with class probabilities as targets.

    The form in the log-probabilities l is diag(y) - y y^T with y = exp(l), as it is in logits: behind a log-softmax
    l = r - logsumexp(r) its pullback is diag(y) - y y^T in the logits r.
    """

    def check_targets(self, outputs: Any, targets: Any) -> None:
        outputs = require_one_tensor(outputs)
        if outputs.dim() < 2:
            raise ValueError(f"outputs has shape {tuple(outputs.shape)}, expected log-probabilities (b, ..., C)")
        if not require_tensor_targets(targets).is_floating_point():
            raise ValueError(
                f"targets are {targets.dtype}, expected class probabilities in the shape of the outputs, as KLDivLoss "
                "takes them; for class numbers take CrossEntropyLoss on logits, or NLLLoss"
            )
        check_same_shape(outputs, targets)
        check_range(targets, 0, 1 + ROUNDING, "class probabilities in [0, 1], or their logarithms with log_target=True")
        if not sums_to_one(outputs, -1):
            second = outputs.dim() > 2 and sums_to_one(outputs, 1)
            raise ValueError(
                "outputs are not log-probabilities over the last axis, as KLDivLoss is understood: exp(outputs) does "
                + (
                    "not sum to 1 there, and does over the second. Move the classes of outputs and targets to the end, "
                    "with .movedim(1, -1)"
                    if second
                    else "not sum to 1. End the model with torch.nn.LogSoftmax(dim=-1)"
                )
            )


def sums_to_one(outputs: Tensor, axis: int) -> bool:
    """Whether the exponentials add up to one along an axis, wherever that is a number."""
    total = outputs.detach().logsumexp(axis)
    return not bool(((total.abs() > ROUNDING) & total.isfinite()).any())


def kl_div(criterion: nn.KLDivLoss) -> Criterion:
    """sum t (log t - l) over the classes: the cross-entropy of soft targets less their entropy, which has no gradient.

    A row whose targets add up to less, such as one that is masked, weighs as much less. 'batchmean' divides by the
    examples, 'mean' by all entries, over the classes too.

    Args:
        criterion: The loss of `torch.nn`.
    """

    def weigh(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = targets.to(outputs.dtype).flatten(0, -2).sum(1)
        count = {"sum": len(rows), "batchmean": len(outputs), "mean": outputs.numel()}[criterion.reduction]
        return rows, rows.new_tensor(float(count))

    def exponentiate(outputs: Tensor, targets: Any) -> Any:
        return targets.exp() if isinstance(targets, Tensor) and targets.is_floating_point() else targets

    return Criterion(
        SoftClasses(),
        criterion,
        weigh,
        criterion.reduction == "sum",
        prepare=exponentiate if criterion.log_target else None,
        over_classes=criterion.reduction == "mean",
    )
