"""A target that is a loss, not minus it, is named in place of the rate; no fit of a density is told so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import natgrad as ng

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda z: 0.5 * z.square().sum(-1),
    "narrow": lambda z: 10 * (z - 1).square().sum(-1),
    "logistic": lambda z: torch.nn.functional.softplus(3 * z).sum(-1) + 0.5 * z.square().sum(-1),
}
KINDS: dict[str, Callable[..., Any]] = {
    "full": ng.variational,
    "diagonal": lambda target, d, **options: ng.variational(target, d, diagonal=True, **options),
    "low rank": lambda target, d, **options: ng.variational_low_rank(target, d, rank=1, **options),
    "mixture": lambda target, d, **options: ng.variational_mixture(target, torch.eye(2, d), **options),
}


def fit(kind: str, target: Callable[[Tensor], Tensor], start: Any = 2, **options: Any) -> str:
    """Errors and warnings of a fit."""
    q = KINDS[kind](target, start, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            q.fit(250)
        except ValueError as error:
            return str(error)
    return "\n".join(str(one.message) for one in told)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_place_of_a_log_density_is_named(loss: str, kind: str) -> None:
    text = fit(kind, LOSSES[loss], lr=1.0)
    assert "log p has no maximum" in text
    assert "smaller lr" not in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["narrow", "logistic"])
def test_with_its_sign_changed_it_is_fitted(loss: str, kind: str) -> None:
    """Which is the advice."""
    assert "log p has no maximum" not in fit(kind, lambda z: -LOSSES[loss](z))
