"""MINRES-QLP against the pseudo-inverse, against eigenvalues and against scipy's minres."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from models import CountedOperator
from torch import Tensor

from natgrad.operators import DiagonalOperator, Operator
from natgrad.solvers import MinresQLP, Status

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "minimum_length.json").read_text(encoding="utf-8"))
PHASES = {"both phases": None, "QLP from the start": 1.0, "MINRES only": math.inf}
N = 60


def spread(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


# Eigenvalues, and the error that is allowed: on inconsistent systems about cond(range of A) * sqrt(eps).
REGULAR = {
    "positive": spread(1, 10, N),
    "indefinite": torch.cat([spread(-5, -1, 20), spread(1, 10, N - 20)]),
    "negative": spread(-3, -1, N),
    "plus-minus": torch.cat([spread(-4, -1, N // 2), spread(1, 4, N // 2)]),
    "clustered": torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64).repeat(N // 3),
    "identity": torch.ones(N, dtype=torch.float64),
}
SINGULAR = {
    "semi-definite": torch.cat([torch.zeros(15, dtype=torch.float64), spread(1, 10, N - 15)]),
    "indefinite": torch.cat([torch.zeros(15, dtype=torch.float64), spread(-5, -1, 15), spread(1, 10, N - 30)]),
    "one zero": torch.cat([torch.zeros(1, dtype=torch.float64), spread(1, 10, N - 1)]),
    "rank one": torch.cat([torch.zeros(N - 1, dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)]),
    "clustered": torch.tensor([0.0, -3.0, 7.0], dtype=torch.float64).repeat(N // 3),
}


def matrix(values: Tensor) -> Tensor:
    """Q diag(values) Q^T with a random orthogonal Q."""
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    a = (q * values) @ q.mT
    return (a + a.mT) / 2


def pinv(a: Tensor) -> Tensor:
    return torch.linalg.pinv(a, hermitian=True, rtol=1e-12)


def error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def normal(count: int = N) -> Tensor:
    return torch.randn(count, dtype=torch.float64)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_singular_systems_get_the_minimum_length_solution(case: dict, phase: str) -> None:
    a, b, x = (torch.tensor(case[key], dtype=torch.float64) for key in ("A", "b", "x"))
    found = MinresQLP(rtol=1e-12, transfer=PHASES[phase]).solve(CountedOperator(a), b)
    consistent = case["residual"] < 1e-12
    assert found.status is (Status.CONVERGED if consistent else Status.LEAST_SQUARES)
    torch.testing.assert_close(found.value, x, rtol=1e-11, atol=1e-12)
    assert float(found.residual) == pytest.approx(case["residual"], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "values", [*REGULAR.values(), *SINGULAR.values()], ids=[*REGULAR, *map("{}, singular".format, SINGULAR)]
)
def test_consistent_systems(values: Tensor, phase: str) -> None:
    a = matrix(values)
    b = a @ normal()
    found = MinresQLP(rtol=1e-12, max_steps=400, transfer=PHASES[phase]).solve(CountedOperator(a), b)
    assert found.status is Status.CONVERGED
    assert float(found.residual) <= 1e-12 * float(b.norm())
    assert error(found.value, pinv(a) @ b) < 1e-10


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SINGULAR)
def test_inconsistent_systems(name: str, phase: str) -> None:
    a, b = matrix(SINGULAR[name]), normal()
    found = MinresQLP(rtol=1e-12, max_steps=400, transfer=PHASES[phase]).solve(CountedOperator(a), b)
    x = pinv(a) @ b
    assert found.status is Status.LEAST_SQUARES
    assert error(found.value, x) < 1e-5  # |A r| is known to sqrt(eps) of |A| |r|, and that times cond is what is left
    assert float(found.value.norm()) == pytest.approx(float(x.norm()), rel=1e-5)
    assert float(found.residual) == pytest.approx(float((b - a @ x).norm()), rel=1e-11)
    assert found.extra["normal_residual"] <= 1e-7 * float(a.norm() * found.residual)


@pytest.mark.parametrize("condition", [1e4, 1e6, 1e8])
def test_ill_conditioned_systems_end_at_round_off_or_better(condition: float) -> None:
    values = torch.logspace(-math.log10(condition), 0, 30, dtype=torch.float64)
    a, x = matrix(values), normal(30)
    b = a @ x
    found = MinresQLP(rtol=1e-14, max_steps=3000).solve(CountedOperator(a), b)
    assert found.status in (Status.ROUND_OFF, Status.CONVERGED)
    assert float((b - a @ found.value).norm()) < 1e-13 * float(x.norm())  # backward stable: |A| = 1
    assert error(found.value, x) < 1e-14 * condition


@pytest.mark.parametrize("smallest", [-4, -6, -8, -10])
def test_the_qlp_phase_keeps_what_the_recurrence_promises_and_refinement_makes_up_for_the_other(smallest: int) -> None:
    a, x = matrix(torch.logspace(smallest, 0, N, dtype=torch.float64)), normal()
    b = a @ x
    # the recurred residual is off by round-off: of |b| in the QLP phase, of |A| |x| cond(A) in the other
    for transfer, allowed in ((1.0, 1e-14), (math.inf, 1e-14 * 10.0**-smallest)):
        cut = MinresQLP(rtol=0, max_steps=500, transfer=transfer).solve(CountedOperator(a), b)
        assert abs(float(cut.residual) - cut.extra["residual_norm"]) < allowed * float(b.norm())
        rtol = 1e-10 if smallest >= -6 else 1e-7
        whole = MinresQLP(rtol=rtol, max_steps=2000, transfer=transfer).solve(CountedOperator(a), b)
        assert whole.status is Status.CONVERGED
        assert float((a @ whole.value - b).norm()) <= rtol * float(b.norm()) + 1e-14 * 10.0**-smallest * float(b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_hand_side_in_the_null_space_up_to_round_off(dtype: torch.dtype) -> None:
    values, vectors = torch.linalg.eigh(matrix(SINGULAR["indefinite"]))
    for column in (values.abs() < 1e-9).nonzero().flatten():
        b = 2 * vectors[:, column].to(dtype)
        found = MinresQLP().solve(CountedOperator(((vectors * values) @ vectors.mT).to(dtype)), b)
        assert found.status is Status.LEAST_SQUARES
        assert float(found.value.norm()) < 1e-5
        assert float(found.residual) == pytest.approx(2.0)


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("name", SINGULAR)
def test_damping_shifts_the_operator(name: str, damping: float) -> None:
    a, b = matrix(SINGULAR[name]), normal()
    shifted = a + damping * torch.eye(N, dtype=torch.float64)
    found = MinresQLP(rtol=1e-10, max_steps=400).solve(CountedOperator(a), b, damping=damping)
    assert found.status is Status.CONVERGED
    assert error(found.value, torch.linalg.solve(shifted, b)) < 1e-8
    torch.testing.assert_close(found.image, shifted @ found.value)
    torch.testing.assert_close(found.residual, (b - shifted @ found.value).norm())


def preconditioners(values: Tensor) -> dict[str, Operator]:
    return {
        "exact": DiagonalOperator(1 / values.abs()),
        "rough": DiagonalOperator((1 + torch.rand(len(values), dtype=torch.float64)) / values.abs()),
        "scaled identity": DiagonalOperator(torch.full_like(values, 1e3)),
    }


@pytest.mark.parametrize("name", ["exact", "rough", "scaled identity"])
@pytest.mark.parametrize("signs", ["positive", "indefinite"])
def test_preconditioner_changes_the_path_and_not_the_end(name: str, signs: str) -> None:
    values = torch.logspace(-3, 1, N, dtype=torch.float64)
    values[::3] *= -1 if signs == "indefinite" else 1
    b = normal()
    plain = MinresQLP(rtol=1e-9, max_steps=2000).solve(DiagonalOperator(values.abs()), b)
    solver = MinresQLP(rtol=1e-9, max_steps=2000, preconditioner=preconditioners(values)[name])
    found = solver.solve(CountedOperator(torch.diag(values)), b)
    assert found.status is Status.CONVERGED
    assert float(found.residual) <= 1e-9 * float(b.norm())
    assert error(found.value, b / values) < 1e-6
    if name == "exact":
        assert found.steps == (2 if signs == "positive" else 3)  # one step per distinct eigenvalue, one to measure
    if name != "scaled identity":
        assert found.steps < plain.steps / 2


def test_preconditioned_least_squares_is_that_of_the_scaled_problem() -> None:
    a, b, p = matrix(SINGULAR["indefinite"]), normal(), 0.5 + torch.rand(N, dtype=torch.float64)
    found = MinresQLP(rtol=1e-12, max_steps=400, preconditioner=DiagonalOperator(p)).solve(CountedOperator(a), b)
    half = p.sqrt()
    expected = half * (pinv(half.unsqueeze(1) * a * half) @ (half * b))
    assert found.status is Status.LEAST_SQUARES
    assert error(found.value, expected) < 1e-5


def test_indefinite_preconditioner_is_reported() -> None:
    a, b = matrix(REGULAR["positive"]), normal()
    wrong = CountedOperator(-torch.eye(N, dtype=torch.float64))
    found = MinresQLP(preconditioner=wrong).solve(CountedOperator(a), b)
    assert found.status is Status.INDEFINITE_PRECONDITIONER
    mixed = CountedOperator(matrix(REGULAR["indefinite"]))
    found = MinresQLP(preconditioner=mixed).solve(CountedOperator(a), b)
    assert found.status is Status.INDEFINITE_PRECONDITIONER
    assert float(found.residual) <= float(b.norm())


@pytest.mark.parametrize("name", REGULAR)
def test_warm_start_goes_on_from_where_it_is(name: str) -> None:
    a, b = matrix(REGULAR[name]), normal()
    part = MinresQLP(rtol=1e-14, max_steps=2).solve(CountedOperator(a), b)
    solver = MinresQLP(rtol=1e-10, max_steps=400)
    cold, warm = solver.solve(CountedOperator(a), b), solver.solve(CountedOperator(a), b, guess=part.value)
    assert warm.status is Status.CONVERGED
    assert float(warm.residual) <= 1e-10 * float(b.norm())
    assert error(warm.value, cold.value) < 1e-8
    there = solver.solve(CountedOperator(a), b, guess=cold.value)
    assert there.steps == 1  # the product that shows that nothing is left to do
    torch.testing.assert_close(there.value, cold.value, rtol=0, atol=0)


@pytest.mark.parametrize("budget", [1, 3, 8])
@pytest.mark.parametrize("name", [*REGULAR, "singular"])
def test_warm_start_never_ends_worse_than_it_began_nor_than_zero(name: str, budget: int) -> None:
    a, b = matrix((REGULAR | {"singular": SINGULAR["indefinite"]})[name]), normal()
    for scale in (1e-6, 1.0, 1e6, -1e3):
        guess = scale * normal()
        found = MinresQLP(rtol=1e-12, max_steps=budget).solve(CountedOperator(a), b, guess=guess)
        limit = min(float((b - a @ guess).norm()), float(b.norm()))
        assert float(found.residual) <= limit * (1 + 1e-12)
        torch.testing.assert_close(found.residual, (b - a @ found.value).norm(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*REGULAR, *(f"singular {name}" for name in SINGULAR)])
def test_cut_short_it_returns_the_best_vector_so_far(name: str) -> None:
    values = SINGULAR[name.removeprefix("singular ")] if name.startswith("singular") else REGULAR[name]
    a, b = matrix(values), normal()
    last = float(b.norm())
    for budget in (1, 2, 3, 5, 8, 12):
        found = MinresQLP(rtol=1e-13, max_steps=budget).solve(CountedOperator(a), b)
        krylov = torch.stack([v / v.norm() for v in powers(a, b, found.steps - 1)], dim=1)
        best = torch.linalg.lstsq(a @ krylov, b.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        least = float((b - a @ krylov @ best).norm())
        assert float(found.residual) <= last * (1 + 1e-12)
        if found.status is Status.MAX_STEPS:
            assert found.steps == budget + 1
            assert float(found.residual) == pytest.approx(least, rel=1e-6, abs=1e-10)  # the best in the Krylov space
        last = float(found.residual)


def powers(a: Tensor, b: Tensor, count: int) -> list[Tensor]:
    vectors = [b]
    for _ in range(count - 1):
        vectors.append(a @ vectors[-1] / vectors[-1].norm())
    return vectors


@pytest.mark.parametrize("name", [*REGULAR, *(f"singular {name}" for name in SINGULAR)])
def test_estimates_against_eigenvalues(name: str) -> None:
    values = SINGULAR[name.removeprefix("singular ")] if name.startswith("singular") else REGULAR[name]
    a = matrix(values)
    b = a @ normal() if name.startswith("singular") else normal()
    found = MinresQLP(rtol=1e-13, max_steps=400).solve(CountedOperator(a), b)
    sizes = values.abs()
    largest, smallest = float(sizes.max()), float(sizes[sizes > 0].min())
    assert 0.5 * largest <= found.extra["operator_norm"] <= largest * (1 + 1e-9)
    assert 1 <= found.extra["condition"] <= largest / smallest * (1 + 1e-9)
    assert found.extra["condition"] >= 0.1 * largest / smallest  # a lower bound, not a sharp one
    assert found.extra["value_norm"] == pytest.approx(float(found.value.norm()), rel=1e-8)
    assert found.extra["residual_norm"] == pytest.approx(float(found.residual), abs=1e-12 * float(b.norm()))


def test_norm_limit() -> None:
    a, b = matrix(REGULAR["positive"]), normal()
    full = float(MinresQLP(rtol=1e-10, max_steps=400).solve(CountedOperator(a), b).value.norm())
    early = float(MinresQLP(rtol=1e-10, max_steps=4).solve(CountedOperator(a), b).value.norm())
    for limit in (0.5 * full, (early + full) / 2):  # the first iterate may be longer than half of the last
        found = MinresQLP(rtol=1e-10, max_steps=400, max_norm=limit).solve(CountedOperator(a), b)
        assert found.status is Status.NORM_LIMIT
        assert float(found.value.norm()) <= limit
    assert float(found.value.norm()) > 0


def test_condition_limit_leaves_out_what_exceeds_it() -> None:
    values = torch.cat([spread(1, 2, N - 1), torch.full((1,), 1e-9, dtype=torch.float64)])
    b = normal()
    found = MinresQLP(rtol=1e-13, max_steps=400, max_condition=1e4, null_rtol=0).solve(DiagonalOperator(values), b)
    assert found.status is Status.ILL_CONDITIONED
    assert found.extra["condition"] <= 1e4
    assert float(found.residual) == pytest.approx(abs(float(b[-1])), rel=1e-6)
    assert error(found.value[:-1], b[:-1] / values[:-1]) < 1e-3
    assert abs(float(found.value[-1])) < 1e-2 * float(found.value.norm())


def test_float32_refines_what_the_recurrence_only_promised() -> None:
    a, b = matrix(torch.logspace(-4, 0, N, dtype=torch.float64)), normal()
    found = MinresQLP(rtol=1e-3, max_steps=5000, transfer=math.inf).solve(CountedOperator(a.float()), b.float())
    assert found.status is Status.CONVERGED
    assert float((b - a @ found.value.double()).norm()) <= 2e-3 * float(b.norm())


def test_round_off_is_reported_and_not_fought() -> None:
    a, b = matrix(REGULAR["positive"]), normal()
    found = MinresQLP(rtol=0, max_steps=400).solve(CountedOperator(a), b)
    assert found.status is Status.ROUND_OFF
    assert found.steps < 80
    assert float(found.residual) < 1e-14 * float(b.norm())


def test_overflow_returns_the_last_finite_vector() -> None:
    a = CountedOperator(matrix(REGULAR["positive"]))
    calls = 0

    def break_fourth(vector: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return a.matrix @ vector * (math.inf if calls == 4 else 1.0)

    a.mv = break_fourth  # type: ignore[method-assign]
    b = normal()
    found = MinresQLP().solve(a, b)
    assert found.status is Status.NON_FINITE
    assert bool(found.value.isfinite().all())
    assert float(found.residual) < float(b.norm())
    torch.testing.assert_close(found.residual, (b - a.matrix @ found.value).norm())
