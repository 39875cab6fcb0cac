"""Targets that are missing: which ones, and what the others count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from natgrad.families.base import (
    Likelihood,
    SeparableLikelihood,
    Wrapper,
    check_same_shape,
    flatten_rows,
    require_tensor_targets,
)


@dataclass(frozen=True)
class Masked(Wrapper):
    """A likelihood some of whose targets are missing: NaN, or for class numbers `ignore_index`.

    The loss is the mean over the targets that are there, times the number of targets in a row: as without gaps, it is
    in nats per row. Each head of `ng.Heads` has a mean of its own. Gradient and metric are those of that loss.

    Args:
        family: The likelihood. Where its entries are independent, as those of `ng.Gaussian` and `ng.Bernoulli`, each
            may be missing by itself; else whole rows.
        ignore_index: The class number that stands for none.

    Raises:
        TypeError: Unless family is a likelihood.

    Example:
        >>> heads = ng.Heads((ng.Masked(ng.Categorical()), 3), (ng.Masked(ng.Gaussian()), 1))
        >>> model, x = nn.Linear(5, 4), torch.randn(6, 5)
        >>> labels, sizes = torch.tensor([0, 2, -100, 1, -100, 0]), torch.randn(6, 1)
        >>> sizes[:3] = torch.nan
        >>> opt = ng.kfac(model, heads)
        >>> opt.loss(model(x), (labels, sizes)).backward()
        >>> opt.step()
    """

    family: Likelihood
    ignore_index: int = -100
    masks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.family, Likelihood):
            raise TypeError(
                f"family is {self.family!r}, expected an ng likelihood such as ng.Gaussian(); a loss of torch has "
                "ignore_index= itself"
            )

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        """-log p of the targets that are there, one number per row (R,)."""
        filled, came = self.fill(outputs, targets)
        assert came is not None
        return self.family.weighted_nll(outputs, filled, came)

    def weighted_nll(self, outputs: Any, targets: Any, weights: Tensor) -> Tensor:
        return self.family.weighted_nll(outputs, targets, weights)

    def score(self, outputs: Any, targets: Any) -> Tensor:
        return self.family.score(outputs, targets)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        self.family.check_targets(outputs, self.fill(outputs, targets)[0])

    def fill(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        targets = require_tensor_targets(targets)
        gone = targets.isnan() if targets.is_floating_point() else targets == self.ignore_index
        filled, rows = targets.masked_fill(gone, 0), self.family.rows(outputs)
        if isinstance(self.family, SeparableLikelihood):
            check_same_shape(outputs, targets)
            return filled, flatten_rows(~gone).to(rows.dtype)
        came = (~gone).reshape(len(rows), -1 if len(rows) else 1)
        if bool((came.any(1) != came.all(1)).any()):
            raise ValueError(
                f"targets of {self.family!r} are missing in a part of a row, expected all of a row's or none: its "
                "entries are not independent"
            )
        return filled, came[:, :1].to(rows.dtype)
