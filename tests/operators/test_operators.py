"""Operators: every product, closed form and combination agrees with the matrix it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import F64, X3, assert_close, draw, mlp

from natgrad.families import Categorical
from natgrad.ground.linalg import KroneckerEigen, inverse_psd, pseudo_inverse
from natgrad.ground.spaces import Space, trainable
from natgrad.metrics import fisher
from natgrad.operators import (
    Arranged,
    BlockOperator,
    Chunked,
    Curvature,
    DenseOperator,
    DiagonalOperator,
    Factored,
    KroneckerOperator,
    KroneckerSolve,
    Layout,
    LowRankOperator,
    Operator,
    Pullback,
    QuasiDiagonal,
    Scaled,
    SharedBasis,
    SharedRows,
    Spectral,
    Sum,
    Tiled,
    Units,
    WrittenColumns,
    pack_operator,
    split_operator,
    stack_operators,
    unpack_operator,
)
from natgrad.testing import check_operator


def spd(*shape: int, seed: int = 0) -> torch.Tensor:
    """PSD matrices (..., n, n) with eigenvalues of at least 1/2."""
    factor = draw(*shape, shape[-1], seed=seed)
    return factor @ factor.mT + 0.5 * torch.eye(shape[-1], dtype=F64)


def psd(n: int, rank: int) -> torch.Tensor:
    factor = draw(n, rank)
    return factor @ factor.mT


def pullback(chunk_size: int | None = None) -> Operator:
    model = mlp(3, 2, 2)
    return fisher(model, Categorical(), chunk_size=chunk_size).at(trainable(model), X3)


class Products(Operator):
    """An operator that gives `mv` alone: everything else comes from the base class."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix, self.size, self.dtype, self.device = matrix, len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: torch.Tensor) -> torch.Tensor:
        return self.matrix @ vector


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
    turned = Layout("t.weight", "t.bias", 1, 3, 8, (4, 3, 2), channels=4), KroneckerOperator(spd(3), spd(9))
    bare = Layout("bare", None, 1, 1, 2, (2,)), DiagonalOperator(torch.tensor([1.0, 2.0], dtype=F64))
    return Arranged(space, [turned, bare, first])


def in_basis(d: int, m: int) -> SharedBasis:
    """Three units with eigenvalues of at least 1/2."""
    basis = torch.linalg.qr(draw(d, d))[0][:, :m]
    return SharedBasis(basis, 0.5 + draw(3, m, seed=1).square(), 0.5 + draw(3, seed=2).square())


MASK = torch.ones(4, 4, dtype=F64).tril()
ALL = {
    "products only": lambda: Products(spd(5)),
    "dense": lambda: DenseOperator(spd(5)),
    "dense, rank deficient": lambda: DenseOperator(psd(6, 2)),
    "dense, zero": lambda: DenseOperator(torch.zeros(3, 3, dtype=F64)),
    "dense, indefinite": lambda: DenseOperator(spd(4) - 2 * torch.eye(4, dtype=F64), indefinite=True),
    "diagonal": lambda: DiagonalOperator(draw(5).square()),
    "diagonal with zeros": lambda: DiagonalOperator(torch.tensor([1.0, 0.0, 2.0], dtype=F64)),
    "Cholesky factor": lambda: Factored(torch.linalg.cholesky(spd(5))),
    "inverse of a Cholesky factor": lambda: Factored(torch.linalg.cholesky(spd(5))).inverse(0.0),
    "low rank": lambda: LowRankOperator(draw(7, 2)),
    "low rank, wide": lambda: LowRankOperator(draw(3, 8)),
    "low rank, of no column": lambda: LowRankOperator(draw(3, 0)),
    "kronecker": lambda: KroneckerOperator(spd(2), spd(3, seed=1)),
    "kronecker, rank deficient": lambda: KroneckerOperator(psd(3, 1), psd(4, 2)),
    "block": lambda: BlockOperator(
        [
            DenseOperator(spd(2)),
            DiagonalOperator(draw(3).square()),
            LowRankOperator(draw(4, 1)),
            KroneckerOperator(spd(2), spd(2)),
        ]
    ),
    "block without inverse": lambda: BlockOperator([DenseOperator(spd(2)), Products(spd(3))]),
    "sum": lambda: DenseOperator(spd(4)) + LowRankOperator(draw(4, 2)),
    "scaled": lambda: 0.3 * LowRankOperator(draw(5, 2)),
    "scaled by zero": lambda: DenseOperator(spd(3)) * 0.0,
    "shifted": lambda: LowRankOperator(draw(5, 2)).shift(0.2),
    "shifted, scaled sum": lambda: (0.5 * (DenseOperator(spd(4)) + DiagonalOperator(draw(4).square()))).shift(0.1),
    "inverse of low rank": lambda: LowRankOperator(draw(5, 2)).inverse(0.3),
    "pseudo-inverse of low rank": lambda: LowRankOperator(draw(5, 2)).inverse(0.0),
    "inverse of kronecker": lambda: KroneckerOperator(spd(2), spd(3)).inverse(0.3),
    "pullback": pullback,
    "chunked": lambda: pullback(3),
    "float32": lambda: DenseOperator(spd(4).float()),
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
    "tiles, the last one ends in a zero": lambda: tiles(),
    "inverse of tiles": lambda: tiles().inverse(0.1),
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


def tiles() -> Tiled:
    """A (x) B on a matrix (3, 3), with A cut into pieces of two rows."""
    left = torch.stack([spd(2), torch.diag(torch.tensor([2.0, 0.0], dtype=F64))]).unsqueeze(1)
    return Tiled.kronecker(left, spd(3), (3, 3))


@pytest.mark.parametrize("name", ALL)
def test_every_operator_is_sound(name):
    check_operator(ALL[name]())


@pytest.mark.parametrize("name", [*ALL, "curvature"])
def test_products_are_differentiable_in_the_vector(name):
    """v^T G v has the gradient 2 G v, also where a product is a backward pass, whose graph ends at v."""
    operator = ALL[name]() if name in ALL else Curvature(lambda p: p["w"].square().sum().square(), {"w": draw(3)})
    matrix, point = operator.dense(), draw(operator.size).to(operator.dtype)
    tolerance = 1e-12 if operator.dtype == F64 else 1e-5

    def measure(vector: torch.Tensor) -> torch.Tensor:
        return vector @ (operator @ vector)

    v = point.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(measure(v), v, create_graph=True)
    assert_close(gradient.detach(), 2 * matrix @ point, tolerance)
    (second,) = torch.autograd.grad(gradient.square().sum() / 2, v)
    assert_close(second, 4 * matrix @ matrix @ point, tolerance)
    if name != "chunked":  # whose graphs are built anew at each product
        assert_close(torch.func.grad(measure)(point), 2 * matrix @ point, tolerance)
        assert_close(torch.func.hessian(measure)(point), 2 * matrix, tolerance)


DENSE = {
    "sum": (
        lambda: DenseOperator(spd(3)) + DiagonalOperator(torch.ones(3, dtype=F64)),
        lambda: spd(3) + torch.eye(3, dtype=F64),
    ),
    "scaled": (lambda: 2 * DenseOperator(spd(3)), lambda: 2 * spd(3)),
    "shifted": (lambda: DenseOperator(spd(3)).shift(0.5), lambda: spd(3) + 0.5 * torch.eye(3, dtype=F64)),
    "kronecker": (lambda: KroneckerOperator(spd(2), spd(3, seed=1)), lambda: torch.kron(spd(2), spd(3, seed=1))),
    "block": (
        lambda: BlockOperator([DenseOperator(spd(2)), DenseOperator(spd(3, seed=1))]),
        lambda: torch.block_diag(spd(2), spd(3, seed=1)),
    ),
    "low rank": (lambda: LowRankOperator(draw(4, 2)), lambda: psd(4, 2)),
    "diagonal": (lambda: DiagonalOperator(draw(4).abs()), lambda: torch.diag(draw(4).abs())),
}


@pytest.mark.parametrize("name", DENSE)
def test_combinations_are_those_of_the_matrices(name):
    operator, matrix = (build() for build in DENSE[name])
    assert_close(operator.dense(), matrix, 1e-14)


def test_the_estimated_mean_eigenvalue_is_unbiased():
    operator = pullback()
    assert isinstance(operator, Pullback)
    exact = operator.mean_eigenvalue()
    assert_close(exact, operator.trace() / operator.size, 1e-14)
    operator.EXACT_TRACE_COLUMNS = 0  # the way of wide outputs
    operator.PROBES = 1000
    # sd of one probe is at most sqrt(2) |G|_F / n, so 1000 of them are within 6 sd / sqrt(1000)
    spread = 2**0.5 * operator.dense().norm() / operator.size
    assert abs(operator.mean_eigenvalue() - exact) <= 6 * spread / 1000**0.5


def test_a_chunked_operator_is_the_whole():
    whole, parts = pullback(), pullback(3)
    assert isinstance(parts, Chunked)
    for found, expected in ((parts.dense(), whole.dense()), (parts.diagonal(), whole.diagonal())):
        assert_close(found, expected, 1e-14)
    assert_close(parts.root() @ parts.root().mT, whole.dense(), 1e-14)
    assert_close(parts.mean_eigenvalue(), whole.mean_eigenvalue(), 1e-14)


BAD = {
    "not square": (lambda: DenseOperator(draw(2, 3)), "matrix has shape (2, 3), expected (n, n)"),
    "a vector": (lambda: DenseOperator(draw(3)), "matrix has shape (3,)"),
    "not symmetric": (lambda: DenseOperator(draw(3, 3)), "matrix is not symmetric"),
    "integers": (lambda: DenseOperator(torch.eye(2, dtype=torch.long)), "matrix has dtype torch.int64"),
    "negative diagonal": (lambda: DiagonalOperator(-torch.ones(2)), "values has negative entries"),
    "a matrix as diagonal": (lambda: DiagonalOperator(torch.eye(2)), "values has shape (2, 2)"),
    "a vector as factor": (lambda: LowRankOperator(draw(3)), "factor has shape (3,)"),
    "a wide Kronecker factor": (lambda: KroneckerOperator(spd(2), draw(2, 3)), "right has shape (2, 3)"),
    "no block": (lambda: BlockOperator([]), "blocks is empty"),
    "blocks of two dtypes": (
        lambda: BlockOperator([DenseOperator(spd(2)), DenseOperator(spd(2).float())]),
        "expected one dtype",
    ),
    "sum of two sizes": (lambda: DenseOperator(spd(2)) + DenseOperator(spd(3)), "terms have sizes [2, 3]"),
    "negative factor": (lambda: -1.0 * DenseOperator(spd(2)), "factor is -1.0"),
    "factor that is no number": (lambda: Scaled(DenseOperator(spd(2)), float("nan")), "factor is nan"),
    "negative shift": (lambda: DenseOperator(spd(2)).shift(-0.1), "damping is -0.1"),
    "a vector too long": (
        lambda: DenseOperator(spd(2)) @ draw(3),
        "the right-hand side of @ has shape (3,), expected (2,)",
    ),
    "a complex vector": (
        lambda: pullback() @ draw(pullback().size).to(torch.complex128),
        "complex128, expected real numbers",
    ),
    "three dimensions": (lambda: DenseOperator(spd(2)) @ draw(2, 2, 2), "has shape (2, 2, 2)"),
    "no term": (lambda: Sum(()), "terms"),
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
    "a basis without a rest": (lambda: SharedBasis(torch.eye(2), torch.ones(4, 2), torch.ones(3)), "rest (3,)"),
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
def test_what_is_no_metric_is_refused(case):
    build, words = BAD[case]
    with pytest.raises(ValueError) as caught:
        build()
    assert words in str(caught.value)


class Broken(Products):
    """A product that lies in one way."""

    def __init__(self, matrix: torch.Tensor, **lies) -> None:
        super().__init__(matrix)
        for name, lie in lies.items():
            setattr(self, name, lie)


class Closing(Products):
    has_closed_form = True


class Rowed(Products):
    @property
    def sample_rows(self) -> WrittenColumns:
        return WrittenColumns(self.matrix)


def scaled_in_place(block: torch.Tensor) -> torch.Tensor:
    result = spd(3) @ block
    block.mul_(1 + 1e-15)
    return result


ONES, DEAD = (DiagonalOperator(torch.tensor([1.0, each], dtype=F64)) for each in (1.0, 0.0))
LIES = {
    "unsymmetric": (lambda: Products(draw(3, 3)), "not symmetric"),
    "negative": (lambda: Products(-spd(3)), "not positive semi-definite"),
    "diagonal": (lambda: Broken(spd(3), diagonal=lambda: torch.ones(3, dtype=F64)), "operator.diagonal() is off by"),
    "trace": (lambda: Broken(spd(3), trace=lambda: torch.tensor(1.0, dtype=F64)), "operator.trace() is off by"),
    "root": (lambda: Broken(spd(3), root=lambda: spd(3)), "root root^T of operator.root() is off by"),
    "root of another shape": (lambda: Broken(spd(3), root=lambda: draw(2, 3)), "operator.root() has shape (2, 3)"),
    "inverse": (lambda: Broken(spd(3), inverse=lambda damping: DenseOperator(spd(3))), "operator.inverse"),
    "not the least inverse": (
        lambda: Broken(DEAD.dense(), inverse=lambda damping: DEAD.inverse(damping) if damping else ONES),
        "operator.inverse(0) G operator.inverse(0)",
    ),
    "closed form": (lambda: Closing(spd(3)), "closed_form is True"),
    "sample rows": (lambda: Rowed(spd(3)), "U U^T of operator.sample_rows is off by"),
    "mm": (lambda: Broken(spd(3), mm=lambda block: spd(3).mT @ block * 2), "operator.mm(block) is off by"),
    "mm of another shape": (lambda: Broken(spd(3), mm=lambda block: block[1:]), "operator.mm(block) has shape"),
    "dtype": (lambda: Broken(spd(3), mv=lambda vector: (spd(3) @ vector).float()), "operator.mv returned"),
    "NaN": (lambda: Products(spd(3) * torch.nan), "non-finite"),
    "in place": (lambda: Broken(spd(3), mm=scaled_in_place), "changed its argument in place"),
}


@pytest.mark.parametrize("case", LIES)
def test_check_operator_finds_each_lie(case):
    build, words = LIES[case]
    with pytest.raises(AssertionError) as caught:
        check_operator(build())
    assert words in str(caught.value)


# operators of layers: Kronecker products and their damped inverses, blocks per unit


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
    for i, (one, part, v) in enumerate(zip(split_operator(solve, 2), damping, vector.view(2, -1), strict=True)):
        a, b = (side[i] for side in sides)
        pi = (a.diagonal().mean() / b.diagonal().mean()).sqrt()
        damped = [m + s * torch.eye(len(m), dtype=F64) for m, s in ((a, part.sqrt() * pi), (b, part.sqrt() / pi))]
        back = damped[0] @ one.mv(v).view(len(a), len(b)) @ damped[1]
        assert_close(back.reshape(-1), v, 1e-9)
    again = stack_operators([unpack_operator(pack_operator(one)) for one in split_operator(solve, 2)])
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


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: KroneckerOperator(spd(3, seed=seed), spd(4, seed=seed), factored=True),
        lambda seed: KroneckerOperator(spd(2, 3), seed * spd(2, 4), factored=True),
        lambda seed: KroneckerOperator(spd(1, 3), seed * spd(1, 4), factored=True),
        lambda seed: Units(seed * spd(5, 2)),
        lambda seed: Units(seed * spd(1, 2)),
    ],
    ids=["product", "groups", "one group", "units", "one unit"],
)
def test_blocks_that_are_alike_are_inverted_as_one(build: Callable[[int], Operator]):
    operators, damping = [build(1), build(2), build(5)], torch.tensor([0.3, 1.0, 2.0], dtype=F64)
    stack = stack_operators(operators)
    assert stack is not None
    vectors = draw(3, operators[0].size, seed=7)
    assert_close(stack.mv(vectors.reshape(-1)), torch.cat([op.mv(v) for op, v in zip(operators, vectors, strict=True)]))
    inverse = stack.invert_each(damping)
    assert inverse is not None
    for own, each, part in zip(split_operator(inverse, 3), operators, damping, strict=True):
        alone = each.inverse(float(part))
        assert alone is not None
        assert type(own) is type(alone)
        assert_close(own.dense(), alone.dense(), 1e-13)


@pytest.mark.parametrize(
    "operators",
    [
        [Units(spd(5, 2)), Units(spd(4, 2))],
        [Units(spd(5, 2), indefinite=True), Units(spd(5, 2), indefinite=True)],
        [DiagonalOperator(torch.ones(3)), DiagonalOperator(torch.ones(3))],
        [KroneckerOperator(spd(3), spd(4)), Units(spd(3, 4))],
        [KroneckerOperator(spd(3), torch.ones(4, dtype=F64)), KroneckerOperator(spd(3), torch.ones(4, dtype=F64))],
    ],
    ids=["sizes", "indefinite", "diagonals", "kinds", "a diagonal factor"],
)
def test_blocks_that_are_not_alike_are_no_stack(operators: list[Operator]):
    assert stack_operators(operators) is None
