"""Inverse, solution, factor and eigenvectors do not depend on whether LAPACK raises for a bad matrix or returns inf."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw
from processors import both_processors, pretend
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

from natgrad.ground.linalg import (
    eigh,
    factor_or_nan,
    invert_or_nan,
    is_positive_definite,
    require_factor,
    require_inverse,
    require_solution,
    solve_or_nan,
)

SOUND = torch.stack([a @ a.mT + torch.eye(3, dtype=F64) for a in draw(2, 3, 3)])
BAD = {
    "singular": torch.ones(3, 3, dtype=F64),
    "zero": torch.zeros(3, 3, dtype=F64),
    "underflown": torch.eye(3, dtype=F64) * 1e-310,
    "infinite": torch.diag(torch.tensor([torch.inf, 1.0, 1.0], dtype=F64)),
    "not a number": torch.full((3, 3), torch.nan, dtype=F64),
}
RIGHT = draw(3, 2, seed=1)
CALLS = {
    "inverse": (invert_or_nan, require_inverse, lambda a: torch.linalg.inv_ex(a)[0]),
    "solution": (
        lambda a: solve_or_nan(a, RIGHT),
        lambda a, message: require_solution(a, RIGHT, message),
        lambda a: torch.linalg.solve_ex(a, RIGHT.expand(*a.shape[:-2], 3, 2))[0],
    ),
    "solution from the right": (
        lambda a: solve_or_nan(a, RIGHT.mT, left=False),
        None,
        lambda a: torch.linalg.solve_ex(a.mT, RIGHT)[0].mT,
    ),
    "factor": (factor_or_nan, require_factor, lambda a: torch.linalg.cholesky_ex(a)[0]),
}
every_call = pytest.mark.parametrize("call", CALLS)
every_bad_matrix = pytest.mark.parametrize("case", BAD)


def batch(case: str) -> Tensor:
    return torch.stack([SOUND[0], BAD[case], SOUND[1]])


@every_call
def test_half_precision_is_refused(call):
    with pytest.raises(ValueError, match=r"is torch.float16, expected double precision"):
        CALLS[call][0](SOUND.half())


@both_processors
@every_bad_matrix
@every_call
def test_a_bad_matrix_is_nan_alone_in_its_batch(call, case, kind, monkeypatch):
    tolerant, _, plain = CALLS[call]
    expected = plain(SOUND)
    pretend(kind, monkeypatch)
    found = tolerant(batch(case))
    if (call, case) == ("factor", "underflown"):  # a square root does not overflow
        found[1] = torch.nan
    assert_close(found[[0, 2]], expected)
    assert bool(found[1].isnan().all())
    assert_close(tolerant(SOUND[0]), expected[0])


@both_processors
@every_bad_matrix
@pytest.mark.parametrize("call", [name for name, (_, strict, _) in CALLS.items() if strict])
def test_at_the_door_a_bad_matrix_raises_the_callers_sentence(call, case, kind, monkeypatch):
    _, strict, plain = CALLS[call]
    expected = plain(SOUND)
    pretend(kind, monkeypatch)
    assert_close(strict(SOUND, "a sentence"), expected)
    if (call, case) == ("factor", "underflown"):
        return
    for matrix in (batch(case), BAD[case]):
        with pytest.raises(ValueError, match="a sentence"):
            strict(matrix, "a sentence")


@every_call
def test_gradients_are_those_of_torch_and_a_bad_matrix_spoils_its_own_alone(call):
    tolerant, _, plain = CALLS[call]
    for weigh in (torch.square, torch.sin):
        stack, clean = batch("singular").requires_grad_(), SOUND.clone().requires_grad_()
        (found,) = torch.autograd.grad(weigh(tolerant(stack)).sum(), stack)
        (expected,) = torch.autograd.grad(weigh(plain(clean)).sum(), clean)
        assert_close(found[[0, 2]], expected)


@every_call
def test_transforms_of_torch_func_go_through(call):
    tolerant, plain = (lambda a, f=f: f((a + a.mT) / 2) for f in CALLS[call][::2])  # a factor is that of such matrices
    assert_close(vmap(tolerant)(SOUND), plain(SOUND))
    each = torch.stack([torch.autograd.functional.hessian(lambda a: plain(a).sum(), a) for a in SOUND])
    for second in (lambda f: jacrev(jacrev(f)), hessian, lambda f: jacfwd(jacfwd(f))):
        assert_close(vmap(second(lambda a: tolerant(a).sum()))(SOUND), each)
    assert_close(vmap(jacfwd(tolerant))(SOUND), torch.stack([jacrev(plain)(a) for a in SOUND]))
    assert_close(jvp(tolerant, (SOUND,), (SOUND,))[1], jvp(plain, (SOUND,), (SOUND,))[1])
    assert bool(vmap(tolerant)(batch("singular"))[1].isnan().all())


@both_processors
@pytest.mark.parametrize("case", ["infinite", "not a number"])
def test_eigenvectors_of_a_matrix_that_is_not_finite_are_nan_alone_in_their_batch(case, kind, monkeypatch):
    expected = torch.linalg.eigh(SOUND)
    pretend(kind, monkeypatch)
    values, vectors = eigh(batch(case))
    assert_close(values[[0, 2]], expected[0])
    assert_close(vectors[[0, 2]], expected[1])
    assert bool(values[1].isnan().all())
    assert bool(vectors[1].isnan().all())


def test_eigenvectors_that_lapack_does_not_find_are_nan_alone_in_their_batch(monkeypatch):
    real = torch.linalg.eigh
    stubborn = torch.full((3, 3), 7.0, dtype=F64)

    def fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if bool((matrix == 7.0).all(-1).all(-1).any()):
            raise torch.linalg.LinAlgError("failed to converge")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = eigh(torch.stack([SOUND[0], stubborn, SOUND[1]]).view(1, 3, 3, 3))
    assert_close(values[0, [0, 2]], real(SOUND)[0])
    assert bool(values[0, 1].isnan().all())
    assert bool(vectors[0, 1].isnan().all())


def test_eigenvectors_go_through_vmap():
    values, _ = vmap(eigh)(batch("not a number"))
    assert_close(values[[0, 2]], torch.linalg.eigh(SOUND)[0])
    assert bool(values[1].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [2, 3, 8])
def test_no_matrix_of_lower_rank_has_a_factor(d, dtype):
    """Round-off leaves a pivot of either sign; 15 in 100 were above n eps of their diagonal entry."""
    free = draw(200, d, 4 * d, seed=1)
    dependent = torch.cat([free[:, :-1], (free[:, :-1] * draw(200, d - 1, 1, seed=2)).sum(1, keepdim=True)], 1)
    units = (3 * draw(200, d, 1)).exp()
    for rows, positive in ((dependent, False), (free, True)):
        scaled = (units * rows).to(dtype)
        assert is_positive_definite(scaled @ scaled.mT).tolist() == [positive] * 200
