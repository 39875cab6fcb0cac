"""How an objective takes points is found out by asking, and whatever it does is counted and survived."""

from __future__ import annotations

import fractions
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from black_boxes import sphere
from hypothesis import given
from hypothesis import strategies as st
from models import pair
from torch import Tensor

import natgrad as ng
from natgrad.search.black_box import ASKING, BlackBox


def rosen(x: Any) -> Any:
    """As SciPy has it: the coordinates lie along the first axis, whatever the others are."""
    x = np.asarray(x)
    return np.sum(100.0 * (x[1:] - x[:-1] ** 2.0) ** 2.0 + (1 - x[:-1]) ** 2.0, axis=0, dtype=x.dtype)


# Functions of one point, the coordinates of which lie along the first axis: a batch is another thing to them.
POINTS: dict[str, Callable[[Any], Any]] = {
    "rosen of scipy": rosen,
    "its first coordinates": lambda x: (x[0] - 1) ** 2 + (x[-1] + 2) ** 2,
    "one coordinate": lambda x: x[0] ** 2,
    "a sum of all entries": lambda x: (x**2).sum(),
    "a sum of all, a float": lambda x: float(np.sum(np.asarray(x) ** 2)),
    "a loop": lambda x: sum(v * v for v in x),
    "a norm": lambda x: np.linalg.norm(np.asarray(x)),
    "a norm in an array": lambda x: np.atleast_1d(np.linalg.norm(np.asarray(x))),
    "less the first": lambda x: ((x - x[0]) ** 2).sum(-1),
    "less the mean": lambda x: ((x - x.mean()) ** 2).sum(-1),
    "over the largest": lambda x: (x / x.abs().max()).sum(-1),
    "running sums": lambda x: (x.cumsum(0) ** 2).sum(-1),
    "neighbours": lambda x: (x * x.roll(1, 0)).sum(-1),
    "a softmax": lambda x: (torch.softmax(x, 0) * x).sum(-1),
    "a product with itself": lambda x: x @ x,
    "differences": lambda x: (x[1:] - x[:-1]).square().sum() + x[0] ** 2,
    "its largest": lambda x: max(x),
    "a fraction": lambda x: fractions.Fraction(float(x[0]) ** 2),
}

BATCHES: dict[str, Callable[[Any], Any]] = {
    "sums of rows": lambda X: X.square().sum(1),
    "columns": lambda X: X[:, 0] ** 2 + X[:, -1],
    "any last axis": lambda X: X.square().sum(-1),
    "in numpy": lambda X: (np.asarray(X) ** 2).sum(axis=1),
    "a column of values": lambda X: X.square().sum(1, keepdim=True),
    "squeezed": lambda X: X.square().sum(1).squeeze(),
    "a list": lambda X: [float(x.square().sum()) for x in X],
    "in float32": lambda X: X.float().square().sum(1) + 100.0,
    "whole numbers": lambda X: (10 * X.square().sum(1)).long(),
    "ranks in the batch": lambda X: X.square().sum(1).argsort().argsort(),
    "constant": lambda X: torch.zeros(len(X)),
    "one infinity": lambda X: torch.where(X[:, 0] > 0.3, math.inf, X.square().sum(1)),
}


def count_calls(f: Callable[[Any], Any]) -> tuple[Callable[[Tensor], Any], list[int]]:
    """f, and a list of how many points each of its calls was given: a batch of b is b, anything else is one."""
    calls: list[int] = []

    def count_call(x: Tensor) -> Any:
        calls.append(0)  # before f runs, which may raise
        calls[-1] = len(x) if x.dim() == 2 else 1
        return f(x)

    return count_call, calls


def ask_black_box(f: Callable[[Any], Any], b: int, d: int) -> tuple[BlackBox, Tensor, Tensor]:
    X = 0.5 * torch.randn(b, d, generator=torch.Generator().manual_seed(10 * b + d), dtype=torch.float64)
    objective = BlackBox(f)
    return objective, X, objective(X)


# Found out by asking.


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (10, 3), (3, 10), (4, 1)])
@pytest.mark.parametrize("name", POINTS)
def test_a_function_of_one_point_gets_points(name: str, shape: tuple[int, int]):
    """Squares included, where the shape tells nothing."""
    f = POINTS[name]
    objective, X, values = ask_black_box(f, *shape)
    expected = torch.tensor([float(np.ravel(f(x))[0]) for x in X], dtype=torch.float64)
    torch.testing.assert_close(values, expected)
    if shape[1] > 1:  # with one coordinate, most of them take batches as well
        assert objective.vectorized is False
    torch.testing.assert_close(objective(X), expected)
    assert objective.failures == 0


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (5, 5), (10, 10), (3, 10), (4, 1)])
@pytest.mark.parametrize("name", BATCHES)
def test_a_function_of_batches_gets_batches(name: str, shape: tuple[int, int]):
    f, calls = count_calls(BATCHES[name])
    objective, X, values = ask_black_box(f, *shape)
    assert objective.vectorized is True
    expected = torch.as_tensor(BATCHES[name](X), dtype=torch.float64).reshape(-1)
    torch.testing.assert_close(values, expected)
    assert len(X) in calls
    calls.clear()
    objective(X)
    assert calls == [len(X)]  # one call from then on


BATCHES_THAT_RAISE = {
    "always": lambda X: len(X) > 1,
    "with any row beyond 0": lambda X: bool((X[:, 0] > 0).any()),
    "with most rows beyond 0": lambda X: float((X[:, 0] > 0).double().mean()) > 0.2,
}


@pytest.mark.parametrize("vectorized", [None, True])
@pytest.mark.parametrize("name", BATCHES_THAT_RAISE)
def test_rows_of_batches_that_raise_are_counted_and_have_their_values(name: str, vectorized: bool | None):
    """f takes batches, and one row spoils them: each row that f got is an evaluation, and the others have values."""
    rows: list[int] = []

    def f(X: Tensor) -> Tensor:
        if X.dim() != 2:
            raise IndexError("a batch is expected")
        rows.append(len(X))
        if BATCHES_THAT_RAISE[name](X):
            raise ArithmeticError("a row is infeasible")
        return (X + 1).square().sum(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ng.minimize(f, [1.0] * 6, 1.0, popsize=12, seed=0, maxfevals=1500, vectorized=vectorized)
    asked = result.nfev - sum(rows)  # points that were tried alone, to find out: at most one of them for two batches
    assert 0 <= asked <= (0 if vectorized else ASKING)
    assert result.nfev <= 1500
    assert result.fun < 0.1


# What fails is counted and ranked last.

NOTHING: dict[str, Any] = {
    "None": None,
    "a tuple": (1.0, {}),
    "a pair": (1.0, 2.0),
    "a word": "a",
    "a number in words": "1.5",
    "bytes": b"1.5",
    "a dictionary": {"loss": 1.0},
    "complex": 1j,
    "three numbers": [1.0, 2.0, 3.0],
    "a matrix": torch.zeros(2, 2),
    "an empty array": np.zeros(0),
    "objects": np.array([None, "a"], dtype=object),
    "an integer beyond floats": 10**400,
    "a function": print,
    "NaN": math.nan,
}


@pytest.mark.parametrize(("name", "vectorized"), pair(NOTHING, [None, False]))
def test_what_is_no_number_at_some_points_is_a_failed_evaluation(name: str, vectorized: bool | None):
    def f(x: Tensor) -> Any:
        return NOTHING[name] if float(x[0]) < 0.5 else float(x[0] ** 2 + x[1] ** 2)

    counted, calls = count_calls(f)
    with pytest.warns(RuntimeWarning, match="infinitely bad") as caught:
        result = ng.minimize(counted, [2.0, 2.0], 1.0, seed=0, maxfevals=300, vectorized=vectorized)
    assert len(caught) == 1
    assert 0.25 <= result.fun < 0.26
    assert result.nfev == len(calls)
    assert 0 < result.failures < result.nfev


@pytest.mark.parametrize("name", NOTHING)
def test_an_objective_without_any_value_is_a_clear_end(name: str):
    with pytest.warns(RuntimeWarning):
        result = ng.minimize(lambda x: NOTHING[name], [2.0, 2.0, 1.0, 0.0], 1.0, seed=0, restarts=3)
    assert not result.success
    assert result.message.startswith("failed: no evaluation")
    assert result.fun == math.inf
    assert result.failures > 0
    assert result.nit == 20  # and no restart


# Objectives that misbehave, drawn.

ODD = [None, (1.0, {}), "1", math.nan, math.inf, -math.inf, [1.0, 2.0], torch.zeros(3, 2), 1j, ValueError("no")]


@given(
    seed=st.integers(0, 10**6),
    d=st.integers(1, 8),
    popsize=st.integers(2, 9),
    batches=st.booleans(),
    odd=st.lists(st.sampled_from(ODD), max_size=3),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["sphere", "constant", "noise", "linear", "float32", "long", "numpy"]),
    said=st.booleans(),
    noise=st.booleans(),
)
def test_fuzz_any_objective_ends_with_a_result_and_honest_counts(
    seed, d, popsize, batches, odd, share, kind, said, noise
):
    generator = torch.Generator().manual_seed(seed)
    calls: list[Tensor] = []
    values = {
        "sphere": lambda X: sphere(X),
        "constant": lambda X: X.sum(-1) * 0,
        "noise": lambda X: torch.randn(X.shape[:-1], generator=generator, dtype=torch.float64),
        "linear": lambda X: X.sum(-1),
        "float32": lambda X: sphere(X.float()),
        "long": lambda X: (10 * sphere(X)).long(),
        "numpy": lambda X: np.asarray(sphere(X)),
    }[kind]

    def f(x: Tensor) -> Any:
        calls.append(x.clone())
        x[..., :1] = x[..., :1].clone()
        if (x.dim() == 2) is not batches:
            raise IndexError("another number of axes")
        if odd and float(torch.rand((), generator=generator)) < share:
            found = odd[int(torch.randint(len(odd), (), generator=generator))]
            if isinstance(found, Exception):
                raise found
            return found
        return values(x)

    budget = 60
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ng.minimize(
            f,
            torch.zeros(d),
            1.0,
            popsize=popsize,
            seed=seed,
            maxfevals=budget,
            noise=noise,
            vectorized=batches if said else None,
        )
    assert result.x.shape == (d,)
    assert bool(torch.isfinite(result.x).all())
    rows = sum(len(x) if batches and x.dim() == 2 else 1 for x in calls)
    assert result.nfev == rows
    assert result.nfev <= budget
    assert 0 <= result.failures <= result.nfev + popsize
    assert result.message
    if not odd or share == 0:
        assert result.failures == 0
        assert math.isfinite(result.fun)
    if share == 1 and odd and not any(isinstance(v, float) and math.isinf(v) for v in odd):
        assert result.fun == math.inf
        assert not result.success
