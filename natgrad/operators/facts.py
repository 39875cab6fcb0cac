"""What an operator says of itself: one frozen value, declared at construction and combined by one function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Facts:
    """What is known of an operator G besides its products.

    Args:
        nats: Nats per example in one unit of d^T G d / 2, where the metric's loss is a mean over an example's entries.
        indefinite: True if G may have negative eigenvalues after all: a Hessian's products.
        inverse_kept: True if G^-1 is what is held, so that a product with G costs more than a solve. A solver then
            makes no product to check its solution.
        counts: What a structure counted on its way here: examples of this step and seen so far, updates refused.
        length_unit: What sqrt(d^T G d) is measured by in `ng.ang`. Nats have no scale to choose, so that this is a
            plain number; the score metric over data takes the length of their score instead, N / sqrt(tr Cov x): 4.85
            where the defaults come from.

    Example:
        >>> G = ng.operators.DenseOperator(torch.eye(2)).declare(nats=3.0)
        >>> (2 * G).nats
        3.0
    """

    nats: float = 1.0
    indefinite: bool = False
    inverse_kept: bool = False
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    length_unit: float = 5.0


NAMES = frozenset(field.name for field in fields(Facts))


def combine_facts(*facts: Facts) -> Facts:
    """The facts of an operator that is made of others.

    Args:
        facts: Of the parts, at least one.

    Returns:
        Indefinite if a part is; its inverse is kept if every part's is; all counts; the first part's unit of length.

    Raises:
        ValueError: If the parts disagree on `nats`.
    """
    units = {fact.nats for fact in facts}
    if len(units) > 1:
        raise ValueError(f"terms are in units of {sorted(units)} nats, expected operators of one unit; convert one")
    return Facts(
        nats=units.pop(),
        indefinite=any(fact.indefinite for fact in facts),
        inverse_kept=all(fact.inverse_kept for fact in facts),
        counts={key: count for fact in facts for key, count in fact.counts.items()},
        length_unit=facts[0].length_unit,
    )
