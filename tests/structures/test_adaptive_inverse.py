"""G^-1 kept online: eq. 4, Woodbury, the average; each against the matrix inverse, alone and in an optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import F64, assert_close, draw
from optim_models import CE, X, Y, iterate, net
from torch import Tensor, nn

import natgrad as ng
from natgrad.structures.adaptive_inverse import (
    adapt_inverse,
    average_metric,
    compress_root,
    stays_positive,
    woodbury_inverse,
)
from natgrad.testing import check_structure

METHODS = [ng.Averaged(), ng.Averaged(every=3), ng.Woodbury(), ng.FirstOrder(), ng.FirstOrder(offset=0.5)]
BATCHES = [draw(5, 3, seed=seed) for seed in range(4)]


def inverse_of(operator: ng.Operator) -> ng.Operator:
    inverse = operator.inverse()
    assert inverse is not None
    return inverse


def positive(n: int, seed: int = 0, *batch: int) -> Tensor:
    root = draw(*batch, n, n, seed=seed)
    return root @ root.mT + 0.1 * torch.eye(n, dtype=F64)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("rank", [1, 2, 9])
def test_woodbury_is_the_inverse_of_the_average(rank: int, batch: tuple[int, ...]) -> None:
    metric, root = positive(6, 0, *batch), draw(*batch, 6, rank, seed=1)
    average = average_metric(metric, root, 0.2)
    assert_close(average, 0.8 * metric + 0.2 * root @ root.mT, 1e-14)
    inverse = torch.linalg.inv(metric)
    assert_close(woodbury_inverse(inverse, root, 0.2), torch.linalg.inv(average), 1e-10)
    assert_close(compress_root(root) @ compress_root(root).mT, root @ root.mT, 1e-13)
    assert compress_root(root).shape[-1] <= 6


def test_eq_4_is_the_exact_update_to_first_order() -> None:
    """The difference falls with the square of eps."""
    inverse, root = torch.linalg.inv(positive(6)), draw(6, 2, seed=1)
    rates = torch.tensor([1e-3, 1e-4, 1e-5], dtype=F64)
    gaps = [(adapt_inverse(inverse, root, r) - woodbury_inverse(inverse, root, r)).norm() for r in rates.tolist()]
    slopes = torch.stack(gaps).log().diff() / rates.log().diff()
    assert_close(slopes, torch.full_like(slopes, 2.0), 2e-2)


@pytest.mark.parametrize("side", [1 - 1e-9, 1 + 1e-9])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_the_positivity_test_is_exact(rank: int, side: float) -> None:
    """At rate (1 - 1e-9) times the critical one eq. 4 stays positive definite; at (1 + 1e-9) times, not."""
    inverse, root = torch.linalg.inv(positive(6)), draw(6, rank, seed=2)
    largest = torch.linalg.eigvalsh(root.mT @ inverse @ root)[-1]
    rate = float(side / (largest - 1))
    assert largest > 1
    lowest = torch.linalg.eigvalsh(adapt_inverse(inverse, root, rate))[0]
    assert bool(stays_positive(inverse, root, rate)) == bool(lowest > 0) == (side < 1)


def fix_case() -> tuple[nn.Module, ng.Metric]:
    model = net()
    return model, ng.fisher(model, ng.Categorical())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_passes_the_public_check(method: ng.Update) -> None:
    model, metric = fix_case()
    check_structure(ng.AdaptiveInverse(method), metric, ng.trainable(model), BATCHES[0])


@pytest.mark.parametrize("every", [1, 3])
def test_averaged_is_the_damped_mean_over_its_horizon(every: int) -> None:
    model, metric = fix_case()
    method = ng.Averaged(horizon=1.0, batches=1, damping=8e-4, decay=0.12, hold=20.0, late=40.0, every=every)
    params, memory, average, columns, seen = ng.trainable(model), None, 0.0, 0.0, 0
    expected = torch.zeros(31, 31, dtype=F64)
    for t in range(1, 8):
        x = draw(5, 3, seed=t)
        seen += 5
        columns = min(columns + 15, 31.0 * max(1.0, seen / 20))  # three logits of five examples
        average = (1 - 15 / columns) * average + 15 / columns * metric.at(params, x).dense()
        operator, memory = ng.AdaptiveInverse(method).update(memory, metric, params, x)
        if t == 1 or t % every == 0:
            amount = max(0.02, 3 / (1 + seen)) + max(0.0, (seen - 20) / 40) * average.trace() / 31
            expected = average + amount * torch.eye(31, dtype=F64)
        assert_close(operator.dense(), expected, 1e-12)


def test_eq_4_is_refused_where_it_would_lose_positivity_and_counted() -> None:
    model, metric = fix_case()
    memory, params, refused = None, ng.trainable(model), 0
    for t in range(1, 12):
        scale = 30.0 if t % 3 == 0 else 0.3
        operator, memory = ng.AdaptiveInverse(ng.FirstOrder(offset=3.0)).update(
            memory, metric, params, scale * BATCHES[0]
        )
        refused += t % 3 == 0
        assert torch.linalg.eigvalsh(inverse_of(operator).dense())[0] > 0
    assert 0 < operator.counts["refused"] <= refused


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_numbers_that_are_not_finite_leave_the_last_inverse_in_place(method: ng.Update) -> None:
    model, metric = fix_case()
    structure, params = ng.AdaptiveInverse(method), ng.trainable(model)
    before, memory = structure.update(None, metric, params, X)
    huge = dict(params) | {"2.weight": params["2.weight"] * 1e200}

    class Overflowing(ng.Metric):
        def at(self, params: Any, inputs: Any, *, random: Any = None) -> ng.Operator:
            return ng.operators.LowRankOperator(torch.full((31, 2), torch.inf, dtype=F64))

    kept, following = structure.update(memory, Overflowing(), huge, X)
    assert torch.equal(kept.dense(), before.dense())
    assert kept.counts["kept"] == 1
    assert (following["step"], following["seen"]) == (memory["step"], memory["seen"]) == (1, 8)
    with pytest.raises(ValueError, match="the metric is not finite"):
        structure.update(None, Overflowing(), params, X)


def test_a_metric_without_a_root_is_written_out() -> None:
    model, metric = fix_case()
    params = ng.trainable(model)

    class Rootless(ng.operators.DenseOperator):
        def root(self) -> None:
            return None

    class Written(ng.Metric):
        def at(self, params: Any, inputs: Any, *, random: Any = None) -> ng.Operator:
            return Rootless(metric.at(params, inputs).dense())

    for method in METHODS:
        expected, _ = ng.AdaptiveInverse(method).update(None, metric, params, X)
        found, _ = ng.AdaptiveInverse(method).update(None, Written(), params, X)
        if not isinstance(method, ng.Averaged):  # its horizon counts columns; the first step is the same
            assert_close(inverse_of(found).dense(), inverse_of(expected).dense(), 1e-8)
        else:
            assert_close(found.dense(), expected.dense(), 1e-10)


WRONG: list[tuple[Any, str]] = [
    (lambda: ng.AdaptiveInverse("woodbury"), "method is 'woodbury', expected ng.Averaged"),  # type: ignore[arg-type]
    (lambda: ng.AdaptiveInverse(ng.Woodbury), "did you forget the parentheses"),  # type: ignore[arg-type]
    (lambda: ng.Woodbury(offset=0.0), "offset is 0.0, expected a finite number > 0"),
    (lambda: ng.FirstOrder(floor=1.0), "floor is 1.0, expected a number in"),
    (lambda: ng.FirstOrder(start_at=-1.0), "start_at is -1.0"),
    (lambda: ng.Averaged(every=0), "every is 0, expected an integer >= 1"),
    (lambda: ng.Averaged(damping=0.0), "damping is 0.0"),
    (lambda: ng.Averaged(batches=0), "batches is 0, expected an integer >= 1"),
    (lambda: ng.Averaged(batches=2.5), "batches is 2.5, expected an integer >= 1"),
    (lambda: ng.Averaged(hold=0.0), "hold is 0.0"),
    (lambda: ng.Averaged(late=float("inf")), "late is inf"),
    (lambda: ng.Averaged(horizon=float("nan")), "horizon is nan"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_choices_are_told_at_the_door(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_an_indefinite_metric_is_refused() -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.hessian(model, CE), structure=ng.AdaptiveInverse(), damping=0.0)
    with pytest.raises(ValueError, match="may be indefinite"):
        iterate(opt, model, X, Y)
