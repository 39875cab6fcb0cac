"""Several outputs of one model, each with its own likelihood, and targets that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from natgrad.families.base import (
    Likelihood,
    SeparableLikelihood,
    Wrapper,
    check_same_shape,
    flatten_rows,
    require_tensor_targets,
)
from natgrad.ground.checks import is_integer


class Heads(Likelihood):
    """Independent heads: Heads((Categorical(), 10), (Gaussian(), 2)) for a model that returns a tuple of outputs.

    One tensor (b, sum of widths) is cut into its heads. Targets are a tuple in the same order, or for outputs in a
    dict a dict of the same names. The negative log-likelihoods add up, the form is block diagonal. A head with
    `ng.Masked(likelihood)` has targets that may be missing: its loss is the mean over those that are there, and a head
    with none in a batch adds nothing.

    Args:
        *heads: (likelihood, width) per output, width: the number of parameters in a row of that head.

    Raises:
        ValueError: If a head's rows do not have its width, or if the heads disagree on the number of rows.

    Example:
        >>> heads = ng.Heads((ng.Categorical(), 3), (ng.Gaussian(), 1))
        >>> outputs, targets = (torch.zeros(2, 3), torch.zeros(2, 1)), (torch.tensor([0, 2]), torch.zeros(2, 1))
        >>> heads.nll(outputs, targets)  # log 3 + 1/2 log 2 pi
        tensor([2.0176, 2.0176])
    """

    def __init__(self, *heads: tuple[Likelihood, int]) -> None:
        if not heads:
            raise ValueError("heads is empty, expected (likelihood, width) pairs")
        for i, head in enumerate(heads):
            check_head(i, head)
        self.families = [family for family, _ in heads]
        self.widths = [width for _, width in heads]

    def rows(self, outputs: Any) -> Tensor:
        parts = [family.rows(part) for family, part in self._heads(outputs)]
        widths = [part.shape[1] for part in parts]
        if widths != self.widths:
            raise ValueError(f"the heads' rows have widths {widths}, expected {self.widths} as given to Heads")
        if len({len(part) for part in parts}) > 1:
            raise ValueError(f"the heads have {[len(p) for p in parts]} rows, expected equal numbers, one per example")
        return torch.cat(parts, dim=1)

    def write_out(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return outputs
        parts = [family.write_out(part) for family, part in self._heads(outputs)]
        return dict(zip(outputs, parts, strict=True)) if isinstance(outputs, dict) else tuple(parts)

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        return torch.stack([family.nll(*pair) for family, *pair in self._heads(outputs, targets)]).sum(0)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> tuple[Any, ...]:
        return tuple(family.sample(part, generator) for family, part in self._heads(outputs))

    def score(self, outputs: Any, targets: Any) -> Tensor:
        return torch.cat([family.score(*pair) for family, *pair in self._heads(outputs, targets)], dim=1)

    def fisher(self, rows: Tensor) -> Tensor:
        return block_diagonal([family.fisher(part) for family, part in self._heads(rows)])

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return torch.cat([family.mv(*pair) for family, *pair in self._heads(outputs, tangents)], dim=1)

    def root(self, outputs: Tensor) -> Tensor:
        return block_diagonal([family.root(part) for family, part in self._heads(outputs)])

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return torch.stack([family.kl(*pair) for family, *pair in self._heads(outputs, other)]).sum(0)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        self.rows(outputs)  # ValueError unless the heads have equal numbers
        for family, part, target in self._heads(outputs, targets):
            family.check_targets(part, target)

    @property
    def masks(self) -> bool:  # type: ignore[override]
        """Whether targets of a head may be missing."""
        return any(family.masks for family in self.families)

    def weigh(
        self, outputs: Any, targets: Any, weight: Any, add: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Tensor]:
        """As each head does, with a weight of its own where `weight` has one for each."""
        self.rows(outputs)  # ValueError, as in `check_targets`
        each = [weight] * len(self.families) if weight is None or isinstance(weight, Tensor) else weight
        pairs = [family.weigh(*parts, add) for family, *parts in self._heads(outputs, targets, each)]
        shares = [share.expand(-1, width) for (_, share), width in zip(pairs, self.widths, strict=True)]
        weights = torch.cat(shares, dim=1)
        none = weights.isnan()
        return tuple(filled for filled, _ in pairs), weights if bool(none.all()) else weights.masked_fill(none, 0)

    def weighted_nll(self, outputs: Any, targets: Any, weights: Tensor) -> Tensor:
        heads = self._heads(outputs, targets, weights)
        return torch.stack([family.weighted_nll(*parts) for family, *parts in heads]).sum(0)

    def __repr__(self) -> str:
        return f"Heads({', '.join(f'({f}, {w})' for f, w in zip(self.families, self.widths, strict=True))})"

    def _heads(self, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Every likelihood with its parts of outputs, rows, targets or weights, in dicts by the outputs' names."""
        names = list(cast("Mapping[Any, Any]", values[0])) if isinstance(values[0], Mapping) else None
        return zip(self.families, *(self._values(value, names) for value in values), strict=True)

    def _values(self, value: Any, names: list[Any] | None) -> list[Any]:
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == sum(self.widths):
            return list(value.split(self.widths, dim=1))
        if isinstance(value, Mapping):
            named = cast("Mapping[Any, Any]", value)
            if names is None or set(named) != set(names):
                raise ValueError(
                    f"targets or weights are a dict of {list(named)}, expected {names or 'a tuple'}: a dict has the "
                    "names of the outputs, a tuple the order of the heads"
                )
            parts = [named[name] for name in names]
        elif isinstance(value, Tensor):
            raise ValueError(
                f"outputs or targets have shape {tuple(value.shape)}, expected a tuple or dict of {len(self.families)} "
                f"heads, or one tensor (b, {sum(self.widths)})"
            )
        else:
            parts = list(value)
        if len(parts) != len(self.families):
            raise ValueError(f"outputs has {len(parts)} parts, expected a tuple or dict of {len(self.families)} heads")
        return parts


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


STANDS_FOR = {
    nn.CrossEntropyLoss: "ng.Categorical()",
    nn.NLLLoss: "ng.Categorical()",
    nn.BCEWithLogitsLoss: "ng.Bernoulli()",
    nn.MSELoss: "ng.Gaussian()",
    nn.GaussianNLLLoss: "ng.HeteroscedasticGaussian()",
    nn.PoissonNLLLoss: "ng.Poisson()",
    nn.L1Loss: "ng.families.Laplace()",
    nn.HuberLoss: "ng.families.Huber()",
}
"""The likelihoods of torch's criteria."""


def check_head(place: int, head: Any) -> None:
    """TypeError unless a head is a likelihood with its width."""
    pair = head if isinstance(head, tuple) and len(head) == 2 else (head, None)
    family, width = pair
    if isinstance(family, Likelihood) and is_integer(width):
        return
    ready = STANDS_FOR.get(type(family), "ng.Categorical()")
    instead = f": for {type(family).__name__} it is {ready}" if type(family) in STANDS_FOR else ""
    instead += f", with labels missing ng.Masked({ready})" if hasattr(family, "ignore_index") else ""
    raise TypeError(
        f"heads[{place}] is {head!r}, expected a pair of an ng likelihood and the width of its output, ({ready}, 10)"
        f"{instead}; Heads((ng.Categorical(), 10), (ng.Gaussian(), 1)) is the criterion of two outputs"
    )


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """(R, m_i, q_i) blocks -> (R, sum m_i, sum q_i)."""
    rows = len(blocks[0])
    total = blocks[0].new_zeros(rows, sum(b.shape[1] for b in blocks), sum(b.shape[2] for b in blocks))
    m = q = 0
    for block in blocks:
        total[:, m : m + block.shape[1], q : q + block.shape[2]] = block
        m, q = m + block.shape[1], q + block.shape[2]
    return total
