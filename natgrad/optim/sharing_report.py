"""How several processes share out one optimizer's blocks: exact counts of work, state and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from natgrad.optim.structured import StructuredNaturalGradient
from natgrad.pure import leaves


@dataclass(frozen=True)
class SharingReport:
    """What one process does of what all do.

    Attributes:
        share: "alone", "speed" or "memory"; "auto" before the first statistics.
        ranks: The processes.
        rank: This one's number.
        owners: By block, the number of the process that inverts it.
        inversions: Sum of n^3 over the matrices of this process's blocks.
        all_inversions: The same over all blocks.
        done: Sum of n^3 over all inversions that this process made so far.
        state_bytes: Of the tensors that this process remembers between steps.
        sent_bytes: Of messages so far, by what they are: "statistics" and "inverses" at updates; "directions" at every
            step with "memory"; "scalars" are counts and sums.
        messages: The number of messages so far, by what they are.
    """

    share: str
    ranks: int
    rank: int
    owners: Mapping[str, int]
    inversions: float
    all_inversions: float
    done: float
    state_bytes: int
    sent_bytes: Mapping[str, int]
    messages: Mapping[str, int]


def report_sharing(optimizer: StructuredNaturalGradient) -> SharingReport:
    """What this process does of the optimizer's work, and what it sent. Nothing is exchanged for it.

    Args:
        optimizer: `ng.kfac` or its like.

    Returns:
        Counts, exact ones.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss())
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
        >>> ng.report_sharing(opt).share
        'alone'
    """
    if not isinstance(optimizer, StructuredNaturalGradient):
        raise TypeError(f"optimizer is {type(optimizer).__name__}, expected ng.kfac or its like, which have blocks")
    owners = optimizer._choices.averages.owners  # pyright: ignore[reportPrivateUsage] (a report of the folder's own)
    kept = optimizer._state.by_parameter()  # pyright: ignore[reportPrivateUsage]
    tensors = {t.data_ptr(): t for t in leaves(kept)}
    return SharingReport(
        share=owners.share if owners.is_shared else "alone",
        ranks=owners.ranks.size,
        rank=owners.ranks.rank,
        owners=dict(owners.of),
        inversions=sum(cost.work for key, cost in owners.costs.items() if owners.solves(key)),
        all_inversions=sum(cost.work for cost in owners.costs.values()),
        done=owners.done,
        state_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
        sent_bytes=dict(owners.ranks.sent),
        messages=dict(owners.ranks.messages),
    )
