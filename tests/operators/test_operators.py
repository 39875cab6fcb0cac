"""Operators: every product, closed form and combination agrees with the matrix it stands for."""

from __future__ import annotations

import pytest
import torch
from models import F64, X3, assert_close, draw, mlp

from natgrad.families import Categorical
from natgrad.ground.spaces import trainable
from natgrad.metrics import fisher
from natgrad.operators import (
    BlockOperator,
    Chunked,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    LowRankOperator,
    Operator,
    Pullback,
    Scaled,
    Sum,
)
from natgrad.testing import check_operator


def spd(n: int, seed: int = 0) -> torch.Tensor:
    factor = draw(n, n, seed=seed)
    return factor @ factor.mT + 0.1 * torch.eye(n, dtype=F64)


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


ALL = {
    "products only": lambda: Products(spd(5)),
    "dense": lambda: DenseOperator(spd(5)),
    "dense, rank deficient": lambda: DenseOperator(psd(6, 2)),
    "dense, zero": lambda: DenseOperator(torch.zeros(3, 3, dtype=F64)),
    "diagonal": lambda: DiagonalOperator(draw(5).square()),
    "diagonal with zeros": lambda: DiagonalOperator(torch.tensor([1.0, 0.0, 2.0], dtype=F64)),
    "low rank": lambda: LowRankOperator(draw(7, 2)),
    "low rank, wide": lambda: LowRankOperator(draw(3, 8)),
    "low rank, of no column": lambda: LowRankOperator(draw(3, 0)),
    "kronecker": lambda: KroneckerOperator(spd(2), spd(3, 1)),
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
}


@pytest.mark.parametrize("name", ALL)
def test_every_operator_is_sound(name):
    check_operator(ALL[name]())


DENSE = {
    "sum": (
        lambda: DenseOperator(spd(3)) + DiagonalOperator(torch.ones(3, dtype=F64)),
        lambda: spd(3) + torch.eye(3, dtype=F64),
    ),
    "scaled": (lambda: 2 * DenseOperator(spd(3)), lambda: 2 * spd(3)),
    "shifted": (lambda: DenseOperator(spd(3)).shift(0.5), lambda: spd(3) + 0.5 * torch.eye(3, dtype=F64)),
    "kronecker": (lambda: KroneckerOperator(spd(2), spd(3, 1)), lambda: torch.kron(spd(2), spd(3, 1))),
    "block": (
        lambda: BlockOperator([DenseOperator(spd(2)), DenseOperator(spd(3, 1))]),
        lambda: torch.block_diag(spd(2), spd(3, 1)),
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
    "three dimensions": (lambda: DenseOperator(spd(2)) @ draw(2, 2, 2), "has shape (2, 2, 2)"),
    "no term": (lambda: Sum(()), "terms"),
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


def scaled_in_place(block: torch.Tensor) -> torch.Tensor:
    result = spd(3) @ block
    block.mul_(1 + 1e-15)
    return result


LIES = {
    "unsymmetric": (lambda: Products(draw(3, 3)), "not symmetric"),
    "negative": (lambda: Products(-spd(3)), "not positive semi-definite"),
    "diagonal": (lambda: Broken(spd(3), diagonal=lambda: torch.ones(3, dtype=F64)), "operator.diagonal() is off by"),
    "trace": (lambda: Broken(spd(3), trace=lambda: torch.tensor(1.0, dtype=F64)), "operator.trace() is off by"),
    "root": (lambda: Broken(spd(3), root=lambda: spd(3)), "root root^T of operator.root() is off by"),
    "root of another shape": (lambda: Broken(spd(3), root=lambda: draw(2, 3)), "operator.root() has shape (2, 3)"),
    "inverse": (lambda: Broken(spd(3), inverse=lambda damping: DenseOperator(spd(3))), "operator.inverse"),
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
