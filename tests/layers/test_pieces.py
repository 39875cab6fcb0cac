"""Large dimensions: block-diagonal factors, each against the whole factor with zeros beside its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, F64, assert_close, draw
from optim_models import CE, deep, flat, iterate, net, pass_through_file, same
from torch import Tensor

import natgrad as ng
from natgrad.ground.linalg import KroneckerEigen
from natgrad.layers.moments import Room
from natgrad.operators import KroneckerOperator, Spectral, Tiled
from natgrad.testing import check_operator

EXACT = ng.ExactLabels()


def spd(*shape: int, seed: int = 0) -> Tensor:
    """Positive definite (..., n, n)."""
    root = draw(*shape, shape[-1] + 2, seed=seed)
    return root @ root.mT


def mask_blocks(matrix: Tensor, rows: int) -> Tensor:
    """Blocks of `rows` on the diagonal, zeros elsewhere."""
    place = torch.arange(len(matrix)) // rows
    return matrix * (place[:, None] == place)


# the operator


def pad_pieces(matrix: Tensor, pieces: int, axis: int) -> Tensor:
    """The blocks of a matrix as a factor."""
    rows = -(-len(matrix) // pieces)
    filled = torch.zeros(pieces * rows, pieces * rows, dtype=F64)
    filled[: len(matrix), : len(matrix)] = matrix
    return torch.stack([filled[i : i + rows, i : i + rows] for i in range(0, len(filled), rows)]).unsqueeze(axis)


CUTS = {"left": (3, 1), "right": (1, 2), "both": (2, 3), "filled up": (2, 2)}


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("case", CUTS)
def test_tiles_are_the_kronecker_product_of_block_diagonal_factors(case: str, factored: bool):
    (k, m), p, q = CUTS[case], 7 if case == "filled up" else 6, 6
    left, right = spd(p), spd(q, seed=1)
    dense = [mask_blocks(left, -(-p // k)), mask_blocks(right, -(-q // m))]
    factors = [left if k == 1 else pad_pieces(left, k, 1), right if m == 1 else pad_pieces(right, m, 0)]
    found = Tiled.kronecker(*factors, (p, q), factored=factored)
    whole = KroneckerOperator(*dense, factored=factored)
    if not factored:  # whose inverse is another one
        check_operator(found, rtol=1e-9)
    for mine, theirs in ((found, whole), (found.inverse(0.1), whole.inverse(0.1))):
        assert mine is not None
        assert_close(mine.dense(), theirs.dense(), 1e-10)
        assert_close(mine.diagonal(), theirs.dense().diagonal(), 1e-10)
        vector = draw(p * q, seed=2)
        assert_close(mine.mv(vector), theirs.mv(vector), 1e-10)
    assert_close(found.mean_eigenvalue(), whole.mean_eigenvalue(), 1e-12)


def test_tiles_that_do_not_cover_the_matrix_are_refused():
    with pytest.raises(ValueError, match="do not cover"):
        Tiled(KroneckerOperator(spd(2), spd(3)), (1, 1, 2, 3), (4, 3))


# how much room


DEFAULTS = (8192, 2**28)


@pytest.mark.parametrize(
    ("room", "size", "pieces"),
    [
        (DEFAULTS, 8192, 1),
        (DEFAULTS, 8193, 2),
        (DEFAULTS, 50257, 38),
        (DEFAULTS, 18433, 6),
        ((4, 2**20), 5, 2),
        ((1, 2**20), 5, 5),
    ],
)
def test_blocks_are_as_few_as_fit(room: tuple[int, int], size: int, pieces: int):
    (largest, budget), found = room, Room(*room).pieces(size, 4, size)
    rows = -(-size // found)
    assert found == pieces
    assert rows <= largest
    assert found * rows**2 * 4 <= budget * (1 + 2 * found / size)  # but for the rows that fill up the last block
    assert (found - 1) * rows < size


@pytest.mark.parametrize("room", [{"largest": 0}, {"largest": 0.5}, {"budget": 0}])
@pytest.mark.parametrize("structure", [ng.Kronecker, ng.EigenKronecker])
def test_no_room_is_refused(structure: Callable[..., Any], room: dict[str, Any]):
    with pytest.raises(ValueError, match="expected a number of"):
        structure(**room)


# the structures


def parts(structure: ng.Structure, name: str) -> dict[str, Any]:
    """The operators of a case's layers."""
    case = CASES[name]
    model, params = case.make()
    operator, _ = structure.update(None, ng.fisher(model, case.family), params, case.inputs)
    return {" ".join(layout.names): part for layout, part in operator.parts}  # type: ignore[attr-defined]


def blocks(matrix: Tensor, largest: int) -> Tensor:
    """What is left of a factor, (n, n) or its diagonal, where blocks have at most so many rows."""
    if matrix.dim() == 1:
        return torch.diag(matrix)
    n = len(matrix)
    return mask_blocks(matrix, -(-n // -(-n // largest)))


SEEN = ["mlp", "sequence", "sequence, tied", "conv2d", "odd convolutions"]


@pytest.mark.parametrize("largest", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SEEN)
def test_a_large_factor_keeps_the_blocks_of_its_diagonal(name: str, largest: int):
    small, whole = (parts(ng.Kronecker(estimate=EXACT, largest=n), name) for n in (largest, 8192))
    assert small.keys() == whole.keys()
    for key, part in whole.items():
        if isinstance(part, KroneckerOperator) and part.left.dim() < 3:
            expected = torch.kron(blocks(part.left, largest), blocks(part.right, largest))
            assert_close(small[key].dense(), expected, 1e-12)
        else:  # groups, norms and parameters without a layer stay whole
            assert_close(small[key].dense(), part.dense(), 1e-12)


@pytest.mark.parametrize("largest", [1, 2, 3])
@pytest.mark.parametrize("name", SEEN)
def test_corrected_eigenvalues_are_those_in_the_cut_basis(name: str, largest: int):
    # by definition: the diagonal of the metric's block in the eigenbasis of the block-diagonal factors
    model, params = CASES[name].make()
    metric = ng.fisher(model, CASES[name].family)
    dense = metric.at(params, CASES[name].inputs).dense()
    structure = ng.EigenKronecker(decay=0.5, estimate=EXACT, largest=largest)
    operator, _ = structure.update(None, metric, params, CASES[name].inputs)
    entries = torch.arange(operator.size)
    views = {name: entries[b.start : b.stop].view(b.shape) for name, b in operator.space.blocks.items()}
    for layout, part in operator.parts:
        if isinstance(part, Tiled):
            place = layout.join(views).reshape(-1)
            assert isinstance(part.tiles, Spectral)
            basis = basis_of(part)
            expected = basis @ torch.diag(torch.einsum("ni,nm,mi->i", basis, dense[place][:, place], basis)) @ basis.mT
            assert_close(part.dense(), expected, 1e-9)


def basis_of(part: Tiled) -> Tensor:
    """The eigenvectors (p q, k m s t) of the tiles, as columns on the matrix."""
    eigen: KroneckerEigen = part.tiles.eigen  # type: ignore[attr-defined]
    columns = []
    for entry in range(part.tiles.size):
        unit = torch.zeros(part.tiles.size, dtype=F64)
        unit[entry] = 1
        tiles = eigen.unrotate(unit.view(part.grid))
        k, m, s, t = part.grid
        whole = tiles.transpose(1, 2).reshape(k * s, m * t)
        columns.append(whole[: part.matrix_shape[0], : part.matrix_shape[1]].reshape(-1))
    return torch.stack(columns, dim=1)


# the optimizer


STRUCTURES = [ng.Kronecker(0.9, largest=2, factored=True), ng.EigenKronecker(0.9, largest=2, stale=0.5)]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_an_optimizer_trains_reports_and_resumes_with_cut_factors(structure: Any):
    model, twin = net(), net()
    opt, other = (ng.StructuredNaturalGradient(m, CE, structure) for m in (model, twin))
    losses = [iterate(opt, model) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    assert opt.state_report().failures == 0
    kinds = {row.parameter: row.structure for row in opt.report()}
    assert "left in 2 blocks, right in 2 blocks" in kinds["0.weight"]
    saved = pass_through_file({"model": model.state_dict(), "opt": opt.state_dict()})
    twin.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    for _ in range(4):
        iterate(opt, model)
        iterate(other, twin)
    assert torch.equal(flat(model), flat(twin))
    assert same(deep(opt.state_dict()), deep(other.state_dict()))
