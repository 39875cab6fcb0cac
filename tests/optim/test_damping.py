"""Lambda, constant, relative to the metric's scale, and adapted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import CASES, assert_close, draw, mlp
from torch import nn

import natgrad as ng

LM = ng.LevenbergMarquardt


def matrix(n: int = 4) -> torch.Tensor:
    """A positive definite matrix."""
    root = draw(n, n)
    return root @ root.T


def test_constant_damping_is_its_value_for_every_metric_and_ratio() -> None:
    damping = ng.Constant(0.3)
    assert damping.initial() == 0.3
    assert damping.amount(0.3, ng.operators.DenseOperator(matrix())) == 0.3
    assert [damping.update(0.3, ratio) for ratio in (-1.0, 0.5, 2.0, math.nan)] == [0.3] * 4
    assert not damping.needs_ratio


@pytest.mark.parametrize("name", ["mlp", "bits", "gaussian", "counts", "conv2d", "sequence"])
def test_relative_damping_is_factor_times_the_mean_eigenvalue(name: str) -> None:
    """Of a matrix, and of a network with few outputs."""
    for scale in (1e-3, 1.0, 1e4):
        dense = ng.operators.DenseOperator(scale * matrix())
        expected = 0.2 * float(torch.linalg.eigvalsh(dense.dense()).mean())
        assert ng.Relative(0.2).amount(ng.Relative(0.2).initial(), dense) == pytest.approx(expected, rel=1e-13)
    case = CASES[name]
    model, params = case.make()
    operator = ng.fisher(model, case.family).at(params, case.inputs)
    expected = 0.1 * float(operator.dense().trace()) / operator.size
    assert ng.Relative(0.1).amount(0.1, operator) == pytest.approx(expected, rel=1e-12)


def test_relative_damping_of_many_outputs_is_an_unbiased_estimate_within_its_standard_error() -> None:
    model = nn.Linear(5, 40).double()
    params = ng.trainable(model)
    estimates, truths = [], []
    for seed in range(40):  # the estimate's seed is fixed: what varies are the data
        operator = ng.fisher(model, ng.Categorical()).at(params, draw(6, 5, seed=seed))
        estimates.append(operator.mean_eigenvalue())
        truths.append(operator.dense().trace() / operator.size)
    error = torch.stack(estimates) / torch.stack(truths) - 1
    assert abs(error.mean()) < 4 * error.std() / len(error) ** 0.5
    assert error.std() < 0.5


def test_relative_damping_makes_the_step_covariant_with_the_loss_scale() -> None:
    """c times the loss: G -> c G, g -> c g, and (G + lambda I)^-1 g stays."""
    g, G = draw(4, seed=1), matrix()
    steps = [
        ng.natural_gradient(ng.operators.DenseOperator(c * G), c * g, damping=ng.Relative(0.05)).value
        for c in (1.0, 1e-4, 1e5)
    ]
    assert_close(steps[1], steps[0], 1e-11)
    assert_close(steps[2], steps[0], 1e-11)


RATIOS = {-5.0: 1.5, 0.0: 1.5, 0.2499: 1.5, 0.25: 1.0, 0.5: 1.0, 0.75: 1.0, 0.7501: 2 / 3, 3.0: 2 / 3}
RATIOS |= {math.nan: 1.5, math.inf: 2 / 3, -math.inf: 1.5}


@pytest.mark.parametrize(("ratio", "expected"), RATIOS.items())
def test_levenberg_marquardt_follows_the_reduction_ratio(ratio: float, expected: float) -> None:
    assert LM().update(1.0, ratio) == pytest.approx(expected, rel=1e-15)


def test_levenberg_marquardt_stays_between_floor_and_ceiling_and_leaves_zero() -> None:
    damping = LM(floor=0.1, ceiling=10.0)
    low = high = 1.0
    for _ in range(50):
        low, high = damping.update(low, 1.0), damping.update(high, -1.0)
    assert (low, high) == (0.1, 10.0)
    assert LM(start=0.0, floor=1e-3).update(0.0, -1.0) == 1e-3
    free = LM(start=0.0, floor=0.0)
    assert free.update(0.0, 1.0) == 0.0
    assert 0 < free.update(0.0, -1.0) <= free.ceiling


@pytest.mark.parametrize("floor", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("damping", [0.0, 1e-300, 1e-8, 1e-4, 0.5, 1.0, 1e8, 1e12])
def test_a_success_never_raises_the_damping_and_a_failure_never_lowers_it(damping: float, floor: float) -> None:
    strategy = LM(start=min(damping, 1e8), floor=floor)
    for ratio in (0.76, 1.0, 5.0, math.inf):
        assert strategy.update(damping, ratio) <= damping
    for ratio in (math.nan, -math.inf, -1.0, 0.0, 0.24):
        assert strategy.update(damping, ratio) >= damping
    assert strategy.update(damping, 0.5) == damping


def test_the_ratio_divides_by_the_quadratic_model_unless_asked_for_the_linear_one() -> None:
    assert LM().predict_change(change=-0.3, slope=-0.5) == -0.3
    assert LM(linear_model=True).predict_change(change=-0.3, slope=-0.5) == -0.5  # eq. 30
    assert LM().needs_ratio


WRONG: list[tuple[Any, dict[str, float], str]] = [
    (LM, {"start": 10.0, "ceiling": 1.0}, "start is 10.0, above the ceiling 1.0"),
    (LM, {"floor": 2.0, "ceiling": 1.0, "start": 0.5}, "floor is 2.0 and ceiling is 1.0"),
    (LM, {"ceiling": math.nan}, "ceiling is nan"),
    (LM, {"low": math.nan}, "low is nan"),
    (LM, {"low": 0.8}, "expected"),
    *[(LM, {name: value}, "expected") for name, value in (("raise_by", 1.0), ("lower_by", 1.0), ("lower_by", 0.0))],
    *[
        (kind, {name: value}, f"{name} is {value}, expected a finite number >= 0")
        for kind, name in ((ng.Constant, "value"), (ng.Relative, "factor"), (LM, "start"), (LM, "floor"))
        for value in (-1.0, math.nan, math.inf, -math.inf)
    ],
]


@pytest.mark.parametrize(("kind", "choices", "words"), WRONG)
def test_numbers_out_of_bounds_or_order_are_refused(kind: Any, choices: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**choices)


def test_damping_per_example_does_not_depend_on_the_number_of_outputs_in_a_mean():
    """The mean over m entries has 1/m of the metric of their sum per example, and must get 1/m of the damping."""
    model = mlp(3, 4, 2)
    per_entry = ng.gauss_newton(model, nn.MSELoss()).at(ng.trainable(model), (draw(6, 3), None))
    assert per_entry.nats == 2
    assert LM(start=0.3).amount(LM(start=0.3).initial(), per_entry) == 0.15
    assert ng.Constant(0.3).amount(0.3, per_entry) == 0.15
    assert LM(start=0.3, per="loss").amount(0.3, per_entry) == 0.3
