"""Running averages between steps: of gradients, how much one update changed them, and where they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.linalg import stays_finite
from natgrad.rules import inner_product
from natgrad.structures import Statistics
from natgrad.typed_torch import measure_norm
from natgrad.whole_tensors import gather_whole

SHARED = frozenset({"totals", "inverse", "prepared"})
"""A block's numbers whose tensors may lie in one another's storage."""


def dense(p: Tensor) -> Tensor:
    """p.grad, dense, at least in float32."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else gather_whole(p.grad)
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def add_penalty(gradient: Tensor, p: Tensor, l2: float) -> Tensor:
    """The gradient of loss + l2 / 2 |theta|^2."""
    return torch.add(gradient, p, alpha=l2) if l2 else gradient


class Penalised(Mapping[str, Tensor]):
    """The gradients of loss + l2 / 2 |theta|^2 by name, each made when it is asked for."""

    def __init__(
        self, gradients: Mapping[str, Tensor], named: Mapping[str, Tensor], strengths: Mapping[str, float]
    ) -> None:
        self.gradients, self.named, self.strengths = gradients, named, strengths

    def __getitem__(self, name: str) -> Tensor:
        return add_penalty(self.gradients[name], self.named[name], self.strengths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)


def average_gradient(state: Mapping[str, Any], gradient: Tensor, decay: float) -> tuple[Tensor, dict[str, Any]]:
    """The gradient's running mean, corrected for its start, and what to keep of it in the parameter's state."""
    if decay == 0:
        return gradient, {}
    count = state.get("count", 0) + 1
    mean = state["mean"].lerp(gradient, 1 - decay) if "mean" in state else (1 - decay) * gradient
    weight = 1 - decay**count
    # late in a run the weights add up to 1, and nothing is copied
    whole = 1 - weight < torch.finfo(mean.dtype).eps / 4
    return (mean if whole else mean / weight), {"count": count, "mean": mean}


def change(old: Statistics, new: Statistics, share: float) -> Tensor:
    """|M' - M| / |M| in Frobenius norm, the largest over a block's moments; by inner products, without a copy.

    share: the old totals' weight over the new ones', so that M' - M is new - old / share, up to a factor.
    """
    found = [torch.zeros((), dtype=torch.float64)]
    for key in {"left", "right", "squares", "blocks"} & old.keys() & new.keys():
        if old[key].shape == new[key].shape:
            before = inner_product(old[key], old[key]).double()
            moved = (
                share**2 * inner_product(new[key], new[key]).double()
                - 2 * share * inner_product(new[key], old[key]).double()
                + before
            )
            found.append(torch.where(before > 0, moved.clamp(min=0) / before, 0).sqrt().to(found[0].device))
    return torch.stack(found).max()


def renew_entry(numbers: Mapping[str, Any], entry: str, new: dict[str, Any]) -> dict[str, Any]:
    """The new values of one entry of a block's numbers, in the old ones' storage if they fit and nobody else uses it.

    What lives from step to step then stays where it is, and what is freed leaves no holes between: the heap of a
    classifier 784-1000-500-250-10 grew to 94 MiB without this, of which 49 were in use between steps.
    """
    old, others = numbers.get(entry, {}), (numbers.get(key, {}) for key in SHARED - {entry})
    # EKFAC's inverse lies in its totals' basis, and what a rule prepares may too
    used = {t.data_ptr() for other in others for t in other.values() if isinstance(t, Tensor)}
    return {key: write_into(old.get(key), value, used) for key, value in new.items()}


def write_into(old: Any, new: Any, used: set[int]) -> Any:
    """`new`, in old's storage if it is a tensor of old's kind; new itself otherwise."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or {old.data_ptr(), new.data_ptr()} & used:
        return new
    alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return old.copy_(new) if alike else new


def signal_sums(
    norms: Mapping[str, Tensor], kept: Mapping[str, Mapping[str, Any]], decays: Mapping[str, float]
) -> Tensor:
    """|m|^2, |g|^2, and what |m|^2 would be on average for gradients that are noise alone: (3,), double precision.

    A mean over k gradients with weights in proportion to b^i has (1 - b) / (1 + b) (1 + b^k) / (1 - b^k) of one
    gradient's variance.

    Args:
        norms: |g| by name, scalar tensors.
        kept: What `average_gradient` keeps of m, by name.
        decays: b by name.
    """
    found, weights = list[Tensor](), list[tuple[float, float]]()
    for name, norm in norms.items():
        decay, faded = decays[name], decays[name] ** kept[name]["count"]
        found += [measure_norm(kept[name]["mean"]), norm]
        weights.append(((1 - faded) ** -2, (1 - decay) / (1 + decay) * (1 + faded) / (1 - faded)))
    home = found[0].device
    mean, single = torch.stack([one.to(home, torch.float64) for one in found]).square().view(-1, 2).T
    corrected, noise = torch.tensor(weights, dtype=torch.float64, device=home).T
    return torch.stack([corrected @ mean, single.sum(), noise @ single])


def all_stay_finite(before: Mapping[str, Tensor], after: Mapping[str, Tensor], size: Tensor | None = None) -> bool:
    """Whether no entry of these becomes NaN or infinite; one that is so already, and stays, does no harm.

    Args:
        before: The parameters before a step.
        after: Some of them after it.
        size: A number that must be finite, such as the step's length in the metric: one that overflows is cut to
            nothing, and would be taken for a step.
    """
    sums = [new.sum(dtype=torch.promote_types(new.dtype, torch.float32)) for new in after.values()]
    known = sums if size is None or not sums else [*sums, size.to(sums[0].device)]
    if not sums or bool(torch.isfinite(torch.stack([total.double() for total in known])).all()):
        return True
    return (size is None or bool(torch.isfinite(size))) and all(
        stays_finite(before[name], new) for name, new in after.items()
    )


def sum_scalars(scalars: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalar tensors, which may lie apart."""
    found = list(scalars.values())
    return torch.stack([one.to(found[0].device) for one in found]).sum() if found else torch.zeros(())


def count_positions(numbers: dict[str, Any], positions: float, decay: float) -> None:
    """Follow how many examples times positions of a step a layer sees.

    Args:
        numbers: The block's; `positions` and `readings` are written, whose ratio is the mean.
        positions: Of one reading; infinite where nothing is known, which changes nothing.
        decay: Weight of the past; 1 for a further micro-batch of the same step, which is no reading of its own.
    """
    if math.isfinite(positions):
        first = "readings" not in numbers
        numbers["positions"] = positions if first else decay * numbers["positions"] + positions
        numbers["readings"] = 1.0 if first else decay * numbers["readings"] + (decay < 1)


def mean_positions(numbers: Mapping[str, Any]) -> float:
    """What `count_positions` followed; infinite where it knows nothing."""
    return numbers["positions"] / numbers["readings"] if "readings" in numbers else math.inf
