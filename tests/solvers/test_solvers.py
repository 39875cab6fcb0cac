"""Solvers of (G + damping I) x = b: every one against every operator, and what each promises."""

from __future__ import annotations

import pytest
import torch
from models import CASES, F64, X3, assert_close, draw, mlp
from torch import Tensor

from natgrad.families import Gaussian
from natgrad.ground.spaces import trainable
from natgrad.metrics import fisher, gauss_newton
from natgrad.operators import (
    BlockOperator,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    LowRankOperator,
    Operator,
)
from natgrad.solvers import (
    CG,
    Auto,
    Direct,
    KrylovSubspace,
    MinresQLP,
    Nystrom,
    PseudoInverse,
    SampleSpace,
    Spring,
    Status,
)
from natgrad.structures import DiagonalPreconditioner, EmpiricalPreconditioner
from natgrad.testing import check_solver

SOLVERS = {
    "Direct": Direct(),
    "CG": CG(rtol=1e-11, max_steps=300),
    "SampleSpace": SampleSpace(),
    "Auto": Auto(iterative=CG(rtol=1e-11, max_steps=300)),
}


def spd(n: int, seed: int = 0) -> Tensor:
    factor = draw(n, n, seed=seed)
    return factor @ factor.mT + 0.1 * torch.eye(n, dtype=F64)


def psd(n: int, rank: int) -> Tensor:
    factor = draw(n, rank)
    return factor @ factor.mT


def metric_of(name: str, chunk_size: int | None = None) -> Operator:
    case = CASES[name]
    model, params = case.make()
    return fisher(model, case.family, chunk_size=chunk_size).at(params, case.inputs)


@pytest.mark.parametrize("solver", ["Direct", "SampleSpace", "Auto"])
def test_an_inconsistent_system_gets_the_least_squares_solution_and_says_so(solver):
    """The residual is the part of b outside the range of G."""
    matrix, rhs = psd(7, 3), draw(7, seed=4)
    solution = SOLVERS[solver].solve(DenseOperator(matrix), rhs)
    pseudo = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12)
    assert_close(solution.value, pseudo @ rhs, 1e-10)
    assert_close(solution.residual, (rhs - matrix @ (pseudo @ rhs)).norm(), 1e-10)
    assert solution.status is Status.INACCURATE


def test_sample_space_needs_a_root():
    with pytest.raises(ValueError, match="no root U with G = U U\\^T"):
        SampleSpace().solve(DenseOperator(spd(3)).shift(0.1), draw(3))


SOUND = {
    "KrylovSubspace": (KrylovSubspace(dimension=200), 1e-8, False),
    "Spring": (Spring(), 1e-9, True),
    "PseudoInverse": (PseudoInverse(cut=0.0), 1e-9, True),
    "Nystrom": (Nystrom(rank=2, rtol=1e-12), 1e-8, False),
    "MinresQLP": (MinresQLP(rtol=1e-10, max_steps=500), 1e-6, True),
    "MinresQLP, over orthonormal directions": (MinresQLP(rtol=1e-10, max_steps=500, transfer=1.0), 1e-6, True),
}


@pytest.mark.parametrize("name", SOUND)
def test_every_solver_keeps_its_promises(name):
    solver, rtol, minimum_norm = SOUND[name]
    check_solver(solver, rtol=rtol, minimum_norm=minimum_norm)


EVERY = SOLVERS | {name: solver for name, (solver, _, _) in SOUND.items()}


@pytest.mark.parametrize("name", EVERY)
def test_the_solution_is_differentiable_in_the_right_hand_side(name):
    """x = A^-1 b, so that |x|^2 / 2 has the gradient A^-1 x, whatever route the solver took to x."""
    operator, point = LowRankOperator(draw(5, 5)), draw(5, seed=4)
    inverse = torch.linalg.inv(operator.dense() + 0.3 * torch.eye(5, dtype=F64))

    def halve_square(rhs: Tensor) -> Tensor:
        return EVERY[name].solve(operator, rhs, damping=0.3).value.square().sum() / 2

    rhs = point.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(halve_square(rhs), rhs, create_graph=True)
    assert_close(gradient.detach(), inverse @ inverse @ point, 1e-6)
    (second,) = torch.autograd.grad(gradient.square().sum() / 2, rhs)
    assert_close(second, inverse @ inverse @ inverse @ inverse @ point, 1e-6)
    assert_close(torch.func.grad(halve_square)(point), inverse @ inverse @ point, 1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_a_solve_under_autocast_is_that_without(name):
    operator, rhs = LowRankOperator(draw(5, 5).float()), draw(5, seed=4).float()
    expected = EVERY[name].solve(operator, rhs, damping=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = EVERY[name].solve(operator, rhs, damping=0.3)
    assert torch.equal(solution.value, expected.value)
    assert solution.status is expected.status


OPERATORS = {
    "dense, zero": lambda: DenseOperator(torch.zeros(3, 3, dtype=F64)),
    "diagonal with zeros": lambda: DiagonalOperator(torch.tensor([1.0, 0.0, 2.0], dtype=F64)),
    "kronecker": lambda: KroneckerOperator(psd(3, 1), psd(4, 2)),
    "block": lambda: BlockOperator(
        [DiagonalOperator(torch.tensor([0.0, 2.0], dtype=F64)), LowRankOperator(draw(4, 1))]
    ),
    "pullback, fewer rows than parameters": lambda: metric_of("mlp"),
    "pullback, tied": lambda: metric_of("sequence, tied"),
    "chunked": lambda: metric_of("mlp", 3),
}


@pytest.mark.parametrize("damping", [1e-3, 10.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_is_sound_on_every_operator(solver, damping):
    check_solver(SOLVERS[solver], damping=damping, rtol=1e-9, minimum_norm=True)
    operators = {name: build() for name, build in OPERATORS.items()}
    check_solver(SOLVERS[solver], operators=operators, damping=damping, rtol=1e-9, minimum_norm=True)
    for operator in operators.values():
        rhs = draw(operator.size, seed=4)
        assert SOLVERS[solver].solve(operator, rhs, damping=damping).status is Status.CONVERGED


# Conjugate gradients.


def test_cg_ends_after_as_many_steps_as_there_are_eigenvalues():
    values = torch.tensor([1.0, 1, 1, 2, 2, 5, 5, 5, 9], dtype=F64)
    q, _ = torch.linalg.qr(draw(9, 9))
    matrix = q @ torch.diag(values) @ q.mT
    solution = CG(rtol=1e-12).solve(DenseOperator((matrix + matrix.mT) / 2), draw(9, seed=1))
    assert solution.status is Status.CONVERGED
    assert len(steps_of(CG(rtol=1e-12), DenseOperator((matrix + matrix.mT) / 2), draw(9, seed=1))) == 4


def steps_of(choices: CG, operator: Operator, rhs: Tensor, damping: float = 0.0) -> list[tuple[int, Tensor, float]]:
    """What the callback saw."""
    seen: list[tuple[int, Tensor, float]] = []
    options = {name: getattr(choices, name) for name in ("rtol", "max_steps", "progress", "preconditioner", "refresh")}
    CG(**options, callback=lambda step, x, residual: seen.append((step, x.clone(), residual))).solve(
        operator, rhs, damping=damping
    )
    return seen


def test_the_callback_sees_every_iterate_with_its_residual():
    operator, rhs = DenseOperator(spd(8)), draw(8, seed=1)
    seen = steps_of(CG(rtol=1e-8), operator, rhs)
    assert [step for step, _, _ in seen] == list(range(1, len(seen) + 1))
    for _, x, residual in seen:
        assert_close(torch.tensor(residual, dtype=F64), (rhs - operator @ x).norm(), 1e-9, rhs.norm())
    solution = CG(rtol=1e-8).solve(operator, rhs)
    assert_close(solution.value, seen[-1][1], 1e-9)


def test_martens_stop_ends_where_the_model_falls_no_more():
    """Checked over the last max(10, step / 10) steps: relative progress below k times the setting."""
    operator, rhs = DenseOperator(hilbert(30)), draw(30, seed=1)
    choices = CG(rtol=0.0, max_steps=500, progress=5e-4)
    assert choices.solve(operator, rhs, damping=1e-4).status is Status.STALLED
    models = [0.0] + [
        float(x @ (operator @ x + 1e-4 * x) / 2 - rhs @ x) for _, x, _ in steps_of(choices, operator, rhs, 1e-4)
    ]
    k = len(models) - 1

    def progress(step: int) -> float:
        window = max(10, step // 10)
        return (models[step] - models[step - window]) / models[step] / window

    assert progress(k) < 5e-4
    assert all(progress(step) >= 5e-4 for step in range(11, k))


def hilbert(n: int, dtype: torch.dtype = F64) -> Tensor:
    """Entries 1 / (i + j + 1)."""
    index = torch.arange(n, dtype=F64)
    return (1 / (index.unsqueeze(0) + index.unsqueeze(1) + 1)).to(dtype)


def test_the_inverse_as_preconditioner_needs_one_step():
    operator, rhs = DenseOperator(spd(9)), draw(9, seed=1)
    assert len(steps_of(CG(rtol=1e-9, preconditioner=operator.inverse(0.3)), operator, rhs, 0.3)) == 1


def test_a_diagonal_preconditioner_helps_a_badly_scaled_metric():
    scales = torch.logspace(-3, 3, 20, dtype=F64)
    matrix = scales.unsqueeze(1) * (torch.eye(20, dtype=F64) + 0.02 * spd(20)) * scales
    operator, rhs = DenseOperator(matrix), draw(20, seed=1)
    plain = CG(rtol=1e-8, max_steps=1000).solve(operator, rhs)
    jacobi = CG(rtol=1e-8, max_steps=1000, preconditioner=DiagonalOperator(operator.diagonal()).inverse()).solve(
        operator, rhs
    )
    assert jacobi.status is Status.CONVERGED
    assert jacobi.steps < plain.steps / 2


def test_a_guess_is_a_start():
    operator, rhs = DenseOperator(spd(9)), draw(9, seed=1)
    exact = Direct().solve(operator, rhs, damping=0.1).value
    guess = exact.clone()
    started = CG(rtol=1e-8).solve(operator, rhs, damping=0.1, guess=guess)
    assert started.status is Status.CONVERGED
    assert started.steps <= 1  # the product that tells so
    assert torch.equal(guess, exact)
    far = CG(rtol=1e-10).solve(operator, rhs, damping=0.1, guess=draw(9, seed=2))
    assert_close(far.value, exact, 1e-8)


class Passing(Operator):
    """The identity, whose product is its argument and no copy."""

    def __init__(self, size: int) -> None:
        self.size, self.dtype, self.device = size, F64, torch.device("cpu")

    def mv(self, vector: Tensor) -> Tensor:
        return vector


def test_cg_writes_over_its_own_vectors_only():
    """Not over the right-hand side, the guess, or a product that the operator still holds."""
    rhs, guess = draw(9, seed=1), draw(9, seed=2)
    kept = rhs.clone(), guess.clone()
    for operator in (Passing(9), DenseOperator(spd(9))):
        solution = CG(rtol=1e-12).solve(operator, rhs, damping=0.5, guess=guess)
        assert_close(solution.value, Direct().solve(operator, rhs, damping=0.5).value, 1e-9)
        assert torch.equal(rhs, kept[0])
        assert torch.equal(guess, kept[1])


def test_after_a_breakdown_the_iterate_of_smallest_residual_is_kept():
    operator, rhs = (
        DiagonalOperator(torch.tensor([1e-3, 1.0, 0.0], dtype=F64)),
        torch.tensor([1e-2, 1.0, 1.0], dtype=F64),
    )
    seen = steps_of(CG(rtol=1e-12), operator, rhs)
    solution = CG(rtol=1e-12).solve(operator, rhs)
    assert solution.status is Status.NEGATIVE_CURVATURE  # b lies partly outside the range
    assert solution.residual <= min([residual for _, _, residual in seen] + [float(rhs.norm())]) + 1e-12


class Overflowing(Operator):
    """Right for the first products, then infinite."""

    def __init__(self, matrix: Tensor, good: int) -> None:
        self.matrix, self.left = matrix, good
        self.size, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: Tensor) -> Tensor:
        self.left -= 1
        return self.matrix @ vector if self.left >= 0 else torch.full_like(vector, torch.inf)


@pytest.mark.parametrize("good", [0, 1, 3])
def test_an_overflow_ends_the_run_with_the_last_finite_vector(good):
    rhs = draw(9, seed=1)
    solution = CG(rtol=1e-12).solve(Overflowing(spd(9), good), rhs)
    assert solution.status is Status.NON_FINITE
    assert torch.isfinite(solution.value).all()
    assert_close(solution.residual, (rhs - spd(9) @ solution.value).norm(), 1e-10)
    assert (good > 0) == bool(solution.value.any())


NON_FINITE = {
    "dense": lambda: DenseOperator(torch.full((3, 3), torch.nan, dtype=F64)),
    "diagonal": lambda: DiagonalOperator(torch.tensor([1.0, torch.inf, torch.nan], dtype=F64)),
    "low rank": lambda: LowRankOperator(torch.full((3, 1), torch.nan, dtype=F64)),
    "low rank, infinite": lambda: LowRankOperator(torch.full((3, 2), torch.inf, dtype=F64)),
    "kronecker": lambda: KroneckerOperator(torch.full((1, 1), torch.nan, dtype=F64), spd(3)),
}


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("operator", NON_FINITE)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_metric_that_is_not_finite_never_raises(solver, operator, damping):
    solution = SOLVERS[solver].solve(NON_FINITE[operator](), torch.ones(3, dtype=F64), damping=damping)
    assert solution.status is not Status.CONVERGED
    assert torch.isfinite(solution.value).all()


def test_cg_residual_is_what_it_says_in_float32():
    """The recurred residual drifts from b - A x; what is reported must not."""
    matrix, rhs = hilbert(12, torch.float32), torch.ones(12)
    solution = CG(rtol=1e-5, max_steps=49).solve(DenseOperator(matrix), rhs, damping=1e-6)
    exact = (rhs.double() - matrix.double() @ solution.value.double() - 1e-6 * solution.value.double()).norm()
    # one product in float32 is off by up to n eps |A| |x|
    allowed = 12 * torch.finfo(torch.float32).eps * float(matrix.norm() * solution.value.norm())
    assert abs(float(solution.residual) - float(exact)) <= allowed / 10
    if solution.status is Status.CONVERGED:
        assert exact <= 1.5e-5 * rhs.norm()


# The automatic choice.

CHOICES = {
    "a closed form": (lambda: LowRankOperator(draw(8, 2)), Direct),
    "a small matrix": (lambda: DenseOperator(spd(5)), Direct),
    "fewer rows than parameters": (lambda: metric_of("mlp"), SampleSpace),
    "more rows than parameters": (lambda: gaussian_fit(60), Direct),
    "no closed form, small": (lambda: DenseOperator(spd(4)) + LowRankOperator(draw(4, 2)), Direct),
    "chunked, small": (lambda: metric_of("mlp", 2), Direct),
    "no root": (lambda: plain_loss(), Direct),
}


def gaussian_fit(examples: int) -> Operator:
    model = mlp(2, 3, 1)
    return fisher(model, Gaussian()).at(trainable(model), draw(examples, 2))


def plain_loss() -> Operator:
    model = mlp(3, 2, 2)
    return gauss_newton(model, lambda r, t: (r - t).cosh().mean()).at(trainable(model), (X3, draw(4, 2)))


@pytest.mark.parametrize("name", CHOICES)
def test_auto_chooses_by_shape(name):
    build, kind = CHOICES[name]
    assert isinstance(Auto().choose(build()), kind)


def test_auto_iterates_where_every_matrix_is_too_large():
    assert Auto(dense=3).choose(gaussian_fit(60)) == CG()
    assert isinstance(Auto(gram=3).choose(metric_of("mlp")), Direct)
    own = CG(rtol=1e-3)
    assert Auto(dense=3, gram=3, iterative=own).choose(metric_of("mlp")) is own


@pytest.mark.parametrize("solver", [CG(rtol=1e-6, max_steps=200), KrylovSubspace(dimension=30, rtol=1e-6)], ids=repr)
def test_a_warm_start_never_ends_worse_than_a_cold_one_at_equal_residual(solver):
    matrix, b = spd(30), draw(30, seed=4)

    def phi(x: Tensor) -> float:
        return float(0.5 * x @ matrix @ x - b @ x)

    answer = torch.linalg.solve(matrix, b)
    cold = solver.solve(DenseOperator(matrix), b)
    for size, scale in ((1e-3, 1.0), (0.3, 0.95), (30.0, 1.0), (1e6, 1.0)):
        guess = scale * answer + size * draw(30, seed=5)
        warm = solver.solve(DenseOperator(matrix), b, guess=guess)
        assert float(warm.residual) <= 1e-6 * float(b.norm())
        assert phi(warm.value) - phi(answer) <= phi(cold.value) - phi(answer) + 1e-9 * abs(phi(answer))
        if phi(guess) >= 0 and isinstance(solver, CG):
            assert torch.equal(warm.value, cold.value)  # zero was the closer start


@pytest.mark.parametrize("budget", [3, 8])
def test_a_warm_start_within_a_budget_ends_no_higher_than_its_guess(budget):
    matrix, b = spd(30), draw(30, seed=4)
    guess = torch.linalg.solve(matrix, b) + 0.05 * draw(30, seed=6)
    for solver in (CG(rtol=0, max_steps=budget), KrylovSubspace(dimension=budget)):
        warm = solver.solve(DenseOperator(matrix), b, guess=guess).value
        start, end = (float(0.5 * x @ matrix @ x - b @ x) for x in (guess, warm))
        assert end <= start


def test_an_indefinite_matrix_that_is_not_announced_is_solved_all_the_same():
    values = torch.tensor([-2.0, 1.0, 3.0], dtype=F64)
    solution = Direct().solve(DenseOperator(torch.diag(values)), torch.ones(3, dtype=F64))
    assert_close(solution.value, 1 / values, 1e-13)
    assert solution.status is Status.CONVERGED


ROWLESS = DenseOperator(torch.eye(2))
ROWS = LowRankOperator(draw(4, 2))
BAD = [
    (lambda: CG(rtol=-1.0), "rtol is -1.0"),
    (lambda: CG(max_steps=0), "max_steps is 0"),
    (lambda: CG(refresh=0), "refresh is 0"),
    (lambda: MinresQLP(rtol=-1), "rtol"),
    (lambda: MinresQLP(max_steps=0), "max_steps"),
    (lambda: MinresQLP(max_norm=0), "max_norm"),
    (lambda: MinresQLP(transfer=0.5), "transfer"),
    (lambda: MinresQLP(max_condition=0), "max_condition"),
    (lambda: MinresQLP(null_rtol=-1e-3), "null_rtol"),
    (lambda: KrylovSubspace(dimension=0), "dimension is 0"),
    (lambda: KrylovSubspace(dimension=2.5), "dimension is 2.5"),
    (lambda: KrylovSubspace(rtol=-1.0), "rtol is -1.0"),
    (lambda: PseudoInverse(-1.0), "cut is -1.0"),
    (lambda: PseudoInverse(1.0), "nothing would be left"),
    (lambda: PseudoInverse().factorise(ROWLESS, 1.0), "has no rows"),
    (lambda: Nystrom(0), "rank is 0"),
    (lambda: Nystrom(rtol=0.0), "rtol is 0.0"),
    (lambda: Nystrom(max_steps=-1), "max_steps is -1"),
    (lambda: Nystrom().factorise(ROWS, 0.0), "damping is 0.0"),
    (lambda: Nystrom().factorise(ROWLESS, 1.0), "has no rows"),
    (lambda: DiagonalPreconditioner(power=0), "power is 0"),
    (lambda: DiagonalPreconditioner(samples=0), "samples is 0"),
    (lambda: DiagonalPreconditioner(samples=1.5), "samples is 1.5"),
    (lambda: EmpiricalPreconditioner(0), "examples is 0"),
    (lambda: EmpiricalPreconditioner(2.5), "examples is 2.5"),
]


@pytest.mark.parametrize(("build", "words"), BAD)
def test_bad_choices_are_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()
