"""Operators of layers: Kronecker products and their damped inverses, blocks per unit, and parts put in their places."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw

from natgrad.ground.linalg import KroneckerEigen, inverse_psd, pseudo_inverse
from natgrad.ground.spaces import Space
from natgrad.operators import (
    Arranged,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    KroneckerSolve,
    Layout,
    QuasiDiagonal,
    SharedBasis,
    SharedRows,
    Spectral,
    Units,
    pack_operator,
    split_products,
    stack_products,
    unpack_operator,
)
from natgrad.testing import check_operator


def spd(*shape: int, seed: int = 0) -> torch.Tensor:
    """PSD matrices (..., n, n) with eigenvalues of at least 1/2."""
    factor = draw(*shape, shape[-1], seed=seed)
    return factor @ factor.mT + 0.5 * torch.eye(shape[-1], dtype=F64)


def units(d: int = 4, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores' second moments per unit: blocks (k, d + 1, d + 1) and what a quasi-diagonal keeps of them."""
    a, weights = torch.cat([draw(9, d), torch.ones(9, 1, dtype=F64)], dim=1), draw(9, k, seed=1).square()
    blocks = torch.einsum("bk,bd,be->kde", weights, a, a)
    return blocks, QuasiDiagonal(blocks.diagonal(dim1=1, dim2=2), blocks[:, :-1, -1]).dense()


def quasi() -> QuasiDiagonal:
    blocks, _ = units()
    return QuasiDiagonal(blocks.diagonal(dim1=1, dim2=2), blocks[:, :-1, -1])


def arrange_layers() -> Arranged:
    """Two layers whose parameters lie interleaved, one stored transposed, and a bare parameter."""
    shapes = {"bare": (2,), "a.bias": (2,), "t.weight": (4, 3, 2), "a.weight": (2, 3), "t.bias": (3,)}
    space = Space({name: torch.zeros(shape, dtype=F64) for name, shape in shapes.items()})
    first = Layout("a.weight", "a.bias", 1, 2, 3, (2, 3)), KroneckerOperator(spd(2), spd(4))
    turned = Layout("t.weight", "t.bias", 1, 3, 8, (4, 3, 2), transposed=True), KroneckerOperator(spd(3), spd(9))
    bare = Layout("bare", None, 1, 1, 2, (2,)), DiagonalOperator(torch.tensor([1.0, 2.0], dtype=F64))
    return Arranged(space, [turned, bare, first])


def in_basis(d: int, m: int) -> SharedBasis:
    """Three units with eigenvalues of at least 1/2."""
    basis = torch.linalg.qr(draw(d, d))[0][:, :m]
    return SharedBasis(basis, 0.5 + draw(3, m, seed=1).square(), 0.5 + draw(3, seed=2).square())


MASK = torch.ones(4, 4, dtype=F64).tril()
ALL = {
    "kronecker, blocks": lambda: KroneckerOperator(spd(2, 3), spd(2, 4, seed=1)),
    "kronecker, diagonal left": lambda: KroneckerOperator(draw(3).square(), spd(4)),
    "kronecker, diagonal right": lambda: KroneckerOperator(spd(3), draw(4).square()),
    "kronecker, both diagonal": lambda: KroneckerOperator(draw(3).square(), draw(4).square()),
    "kronecker, zero": lambda: KroneckerOperator(torch.zeros(2, 2, dtype=F64), spd(3)),
    "inverse of blocks": lambda: KroneckerOperator(spd(2, 3), spd(2, 4)).inverse(0.1),
    "solve of a large left factor": lambda: KroneckerSolve(torch.linalg.cholesky(spd(5)), spd(2)),
    "solve of a large right factor, blocks": lambda: KroneckerSolve(spd(3, 2), torch.linalg.cholesky(spd(3, 4))),
    "corrected": lambda: Spectral(KroneckerEigen.of(spd(3), spd(4)), draw(3, 4).square()),
    "corrected, diagonal left": lambda: Spectral(KroneckerEigen.of(draw(3).square(), spd(4)), draw(3, 4).square()),
    "units": lambda: Units(spd(3, 4)),
    "units, one of them zero": lambda: Units(torch.stack([spd(3), torch.zeros(3, 3, dtype=F64)])),
    "inverse of units": lambda: Units(spd(3, 4)).inverse(0.1),
    "quasi-diagonal": quasi,
    "quasi-diagonal, a dead unit": lambda: QuasiDiagonal(torch.zeros(2, 4, dtype=F64), torch.zeros(2, 3, dtype=F64)),
    "inverse of quasi-diagonal": lambda: quasi().inverse(0.1),
    "shared rows, few: dead directions": lambda: SharedRows(draw(3, 5), draw(4, 3, seed=1).square()),
    "shared rows, many": lambda: SharedRows(draw(7, 3), draw(4, 7, seed=1).square()),
    "shared rows, a dead unit": lambda: SharedRows(draw(3, 5), torch.eye(3, dtype=F64)[:2] * 0),
    "shared rows under a mask: dead columns": lambda: SharedRows(draw(3, 4), draw(4, 3, seed=1).square(), MASK),
    "inverse of few shared rows under a mask": lambda: SharedRows(draw(3, 4), draw(4, 3).square(), MASK).inverse(0.1),
    "inverse of few shared rows": lambda: SharedRows(draw(3, 5), draw(4, 3, seed=1).square()).inverse(0.1),
    "inverse of many shared rows": lambda: SharedRows(draw(7, 3), draw(4, 7, seed=1).square()).inverse(0.1),
    "shared basis": lambda: in_basis(4, 4),
    "shared basis of a few directions": lambda: in_basis(4, 2),
    "shared basis, dead directions": lambda: SharedRows(draw(3, 5), draw(4, 3, seed=1).square()).spectral(5),
    "shared basis, a dead unit": lambda: SharedRows(draw(3, 5), torch.eye(3, dtype=F64)[:2] * 0).spectral(2),
    "inverse of a shared basis": lambda: in_basis(4, 2).inverse(0.1),
    "arranged": arrange_layers,
    "inverse of arranged": lambda: arrange_layers().inverse(0.1),
}


@pytest.mark.parametrize("name", ALL)
def test_every_operator_is_sound(name: str):
    check_operator(ALL[name]())


@pytest.mark.parametrize("left", [spd(3), spd(1, 3), draw(3).square()], ids=["matrix", "blocks", "diagonal"])
def test_the_factored_inverse_damps_both_factors(left: torch.Tensor):
    right = spd(1, 4) if left.dim() == 3 else spd(4)
    inverse = KroneckerOperator(left, right, factored=True).inverse(0.04)
    matrix = torch.diag(left) if left.dim() == 1 else left.reshape(3, 3)
    pi = (matrix.trace() / 3 / (right.reshape(4, 4).trace() / 4)).sqrt()
    first = torch.linalg.inv(matrix + 0.2 * pi * torch.eye(3, dtype=F64))
    second = torch.linalg.inv(right.reshape(4, 4) + 0.2 / pi * torch.eye(4, dtype=F64))
    assert_close(inverse.dense(), torch.kron(first, second), 1e-13)


@pytest.mark.parametrize("turned", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("rank", [600, 3], ids=["full rank", "of few examples"])
def test_a_factor_much_larger_than_the_other_is_solved_and_not_inverted(turned: bool, rank: int):
    rows = draw(rank, 520)
    small, large = spd(2, 3), torch.stack([rows.mT @ rows / rank, spd(520)])
    sides = (large, small) if turned else (small, large)
    damping = torch.tensor([1e-3, 0.5], dtype=F64)
    solve = KroneckerOperator(*sides, factored=True).factored_inverse(damping)
    assert isinstance(solve, KroneckerSolve)
    vector = draw(solve.size, seed=3)
    for i, (one, part, v) in enumerate(zip(split_products(solve), damping, vector.view(2, -1), strict=True)):
        a, b = (side[i] for side in sides)
        pi = (a.diagonal().mean() / b.diagonal().mean()).sqrt()
        damped = [m + s * torch.eye(len(m), dtype=F64) for m, s in ((a, part.sqrt() * pi), (b, part.sqrt() / pi))]
        back = damped[0] @ one.mv(v).view(len(a), len(b)) @ damped[1]
        assert_close(back.reshape(-1), v, 1e-9)
    again = stack_products([unpack_operator(pack_operator(one)) for one in split_products(solve)])
    assert again is not None
    assert_close(again.mv(vector), solve.mv(vector), 1e-12)


@pytest.mark.parametrize("damping", [0.0, 1e-40])
def test_a_large_factor_that_is_singular_is_inverted_by_the_ladder(damping: float):
    rows = draw(3, 520)
    operator = KroneckerOperator(spd(2), rows.mT @ rows, factored=True)
    inverse = operator.inverse(damping)
    vector = operator.mv(draw(operator.size, seed=5))
    assert isinstance(inverse, KroneckerOperator)
    assert_close(operator.mv(inverse.mv(vector)), vector, 1e-6)


def test_the_quasi_diagonal_keeps_the_diagonal_and_the_bias_row():
    blocks, dense = units()
    for i, block in enumerate(blocks):
        found = dense[5 * i : 5 * (i + 1), 5 * i : 5 * (i + 1)]
        assert_close(found.diagonal(), block.diagonal(), 1e-14)
        assert_close(found[-1], block[-1], 1e-14)


def test_the_undamped_quasi_diagonal_inverse_is_ollivier_s():
    blocks, _ = units()
    gradient = draw(15, seed=3).view(3, 5)
    found = quasi().inverse(0.0).mv(gradient.reshape(-1)).view(3, 5)
    for block, g, step in zip(blocks, gradient, found, strict=True):
        d, c, b = block.diagonal()[:-1], block[:-1, -1], block[-1, -1]
        weights = (g[:-1] - g[-1] * c / b) / (d - c.square() / b)
        assert_close(step[:-1], weights, 1e-12)
        assert_close(step[-1], g[-1] / b - (c / b) @ weights, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_matrices_among_others_climb_the_ladder_alone(dtype: torch.dtype):
    thin = draw(4, 2)
    matrices = torch.stack([spd(4), thin @ thin.mT, torch.zeros(4, 4, dtype=F64)]).to(dtype)
    found = inverse_psd(matrices, torch.tensor([0.0, 1e-30, 0.5], dtype=dtype))
    tolerance = 1e-3 if dtype == torch.float32 else 1e-8
    assert_close(found[0] @ matrices[0], torch.eye(4, dtype=dtype), tolerance)
    assert_close(found[1], torch.linalg.pinv(matrices[1], hermitian=True, rtol=1e-5), tolerance)
    assert_close(found[2], 2 * torch.eye(4, dtype=dtype), tolerance)
    assert_close(pseudo_inverse(matrices)[1], torch.linalg.pinv(matrices[1], hermitian=True, rtol=1e-5), tolerance)


def test_a_matrix_that_is_not_finite_gives_an_inverse_that_is_not_and_raises_nothing():
    matrices = torch.stack([spd(3), torch.full((3, 3), torch.nan, dtype=F64)])
    found = inverse_psd(matrices, 0.1)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


BAD = {
    "factors of two numbers of blocks": (lambda: KroneckerOperator(spd(2, 3), spd(3, 3)), "expected as many blocks"),
    "a number as factor": (lambda: KroneckerOperator(torch.tensor(1.0), spd(3)), "left has shape ()"),
    "units of one matrix": (lambda: Units(spd(3)), "matrices has shape (3, 3), expected (k, d, d)"),
    "shared rows with weights of other rows": (
        lambda: SharedRows(torch.ones(3, 2), torch.ones(4, 2)),
        "weights (4, 2)",
    ),
    "shared rows with a mask of other columns": (
        lambda: SharedRows(torch.ones(3, 2), torch.ones(4, 3), torch.ones(4, 3)),
        "mask",
    ),
    "a basis of more directions than there are": (
        lambda: SharedBasis(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)),
        "basis has shape (2, 3)",
    ),
    "a basis without a rest": (
        lambda: SharedBasis(torch.eye(2), torch.ones(4, 2), torch.ones(3)),
        "rest (3,)",
    ),
    "a basis for units that see different columns": (
        lambda: SharedRows(torch.ones(3, 2), torch.ones(4, 3), torch.ones(4, 2)).spectral(2),
        "mask",
    ),
    "a quasi-diagonal without cross terms": (lambda: QuasiDiagonal(torch.ones(2, 3), torch.ones(2, 3)), "cross (2, 3)"),
    "parts that leave a parameter out": (
        lambda: Arranged(arrange_layers().space, arrange_layers().parts[:2]),
        "parts cover",
    ),
    "an operator of another size": (
        lambda: Arranged(
            Space({"x": torch.zeros(2)}), [(Layout("x", None, 1, 1, 2, (2,)), DenseOperator(torch.eye(3)))]
        ),
        "expected size",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str):
    build, words = BAD[case]
    with pytest.raises(ValueError) as caught:
        build()
    assert words in str(caught.value)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [3, 7], ids=["fewer than columns", "more than columns"])
def test_shared_rows_are_the_units_blocks(rows, masked):
    activations, weights = draw(rows, 4), draw(4, rows, seed=1).square()
    mask = MASK if masked else torch.ones(4, 4, dtype=F64)
    each = activations * mask.unsqueeze(1)
    blocks = torch.einsum("ks,ksd,kse->kde", weights, each, each)
    operator = SharedRows(activations, weights, mask if masked else None)
    assert_close(operator.blocks(), blocks)
    vector = draw(16, seed=2)
    for damping in (1e-6, 0.1, 10.0):
        expected = torch.linalg.solve(torch.block_diag(*blocks) + damping * torch.eye(16, dtype=F64), vector)
        assert_close(operator.inverse(damping).mv(vector), expected, rtol=1e-7 if damping < 0.1 else 1e-11)


@pytest.mark.parametrize("rank", [1, 2, 4, 9])
def test_the_shared_basis_is_the_nearest_of_its_kind(rank):
    """In Frobenius norm no other eigenvalues are nearer to the blocks, and with the whole basis the mean is exact."""
    operator = SharedRows(draw(7, 4), draw(3, 7, seed=1).square())
    found, blocks = operator.spectral(rank), operator.blocks()
    basis, kept = found.basis, min(rank, 4)
    assert basis.shape == (4, kept)
    assert_close(basis.mT @ basis, torch.eye(kept, dtype=F64), 1e-12)
    assert_close(found.spectrum, torch.einsum("dm,kde,em->km", basis, blocks, basis), 1e-12)
    assert_close(found.trace(), operator.trace(), 1e-12)
    distance = (found.dense() - operator.dense()).norm()
    for seed in range(5):
        nearby = found.spectrum + 0.01 * draw(3, kept, seed=seed), found.rest + 0.01 * draw(3, seed=seed + 9)
        moved = SharedBasis(basis, *nearby)
        assert (moved.dense() - operator.dense()).norm() > distance
    if kept == 4:
        mean = (basis * found.spectrum.mean(0)) @ basis.mT
        assert_close(mean, blocks.mean(0), 1e-12)
