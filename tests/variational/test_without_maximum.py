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


def fit(kind: str, target: Callable[[Tensor], Tensor], steps: int = 150, **options: Any) -> str:
    """Errors and warnings of a fit over two variables."""
    q = KINDS[kind](target, 2, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            q.fit(steps)
        except ValueError as error:
            return str(error)
    assert all(one.filename == __file__ for one in told)
    return "\n".join(str(one.message) for one in told)


OTHERS = [("square", "mixture"), ("narrow", "diagonal"), ("logistic", "low rank")]


@pytest.mark.parametrize(("loss", "kind"), [("logistic", "full"), *OTHERS])
def test_a_loss_in_place_of_a_log_density_is_named(loss: str, kind: str) -> None:
    text = fit(kind, LOSSES[loss], lr=1.0)
    assert "log p has no maximum" in text
    assert "smaller lr" not in text


@pytest.mark.parametrize(("loss", "kind"), [*(("narrow", kind) for kind in KINDS), ("logistic", "full")])
def test_with_its_sign_changed_it_is_fitted(loss: str, kind: str) -> None:
    """Which is the advice."""
    assert "log p has no maximum" not in fit(kind, lambda z: -LOSSES[loss](z))


IMPROPER: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda z: 0 * z.sum(-1),
    "ridge": lambda z: -0.5 * z.sum(-1).square(),
    "a variable is left out": lambda z: -0.5 * z[..., 0].square(),
    "half": lambda z: torch.nn.functional.logsigmoid(z).sum(-1),
}


ENDLESS = [("a variable is left out", "full"), ("half", "diagonal"), ("ridge", "mixture"), ("flat", "low rank")]
"""Independent entries have an optimum on a ridge; flat components push one another away before they widen."""


@pytest.mark.parametrize(("name", "kind"), ENDLESS)
def test_a_density_of_nothing_is_named(name: str, kind: str) -> None:
    text = fit(kind, IMPROPER[name], 80)
    assert "log p does not fall in some direction" in text
    assert "smaller lr" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_posterior_is_not(kind: str) -> None:
    assert "log p does not fall" not in fit(kind, lambda z: -0.5 * (z / 1e3).square().sum(-1), 250)


def test_gradients_that_are_not_those_of_log_p_are_named() -> None:
    def turn(z: Tensor) -> Tensor:
        value = -0.5 * (z - 3).square().sum(-1)
        return 2 * value.detach() - value

    assert "its gradient is not that of its values" in fit("full", turn, 60)


OUTSIDE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "detach": (lambda z: -0.5 * (z.detach() - 3).square().sum(-1), "cut off, as by detach"),
    "steps": (lambda z: -(z.round() - 3).square().sum(-1), "cut off, as by detach"),
    "NumPy, rows": (lambda z: torch.as_tensor(-(z.detach().numpy() ** 2).sum(-1)), "log p leaves torch"),
    "NumPy": (lambda z: torch.as_tensor(-(z.numpy() ** 2).sum()), "log p leaves torch"),
    "numbers": (lambda z: torch.as_tensor(-(float(z[0]) ** 2)), "log p leaves torch"),
    "autograd": (lambda z: -torch.autograd.grad(z.square().sum(), z)[0].square().sum(), "by torch.func.grad"),
    "branch": (lambda z: -z.square().sum() if z[0] > 0 else -2 * z.square().sum(), "log p leaves torch"),
}


@pytest.mark.parametrize("kind", ["full", "diagonal", "low rank"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_log_density_without_derivatives_is_named(name: str, kind: str) -> None:
    target, words = OUTSIDE[name]
    with pytest.raises(ValueError, match=words):
        KINDS[kind](target, 2).fit(5)


def test_rows_of_another_width_than_z_are_refused() -> None:
    rows = torch.randn(30, 4, dtype=torch.float64)
    for wrong, start, words in ((rows.mT, 4, "pass rows.mT"), (rows, 3, r"expected A \(N, 3\)")):
        with pytest.raises(ValueError, match=words):
            ng.variational(ng.variational.Projected(wrong, lambda f: -f.square()), start)
