"""Operators: products, closed forms and errors against the matrix that the products make."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh
from natgrad.operators import Operator
from natgrad.testing.requirements import require, require_close, require_raises, tolerance


def check_operator(operator: Operator, *, rtol: float | None = None) -> None:
    """G is symmetric, positive semi-definite unless `indefinite`, and linear; closed forms agree with its products.

    Compares mm, @, dense, diagonal, trace, root, sample rows and inverse with the matrix of n products `mv`.

    Args:
        operator: G.
        rtol: Allowed error relative to the largest entry, default 1e4 eps of the operator's dtype.

    Raises:
        AssertionError: With a sentence, for a form that disagrees.

    Example:
        >>> from natgrad.testing import check_operator
        >>> check_operator(ng.operators.LowRankOperator(torch.randn(5, 2)))
    """
    rtol = tolerance(rtol, operator.dtype)
    matrix = _product_matrix(operator, rtol)
    _require_products(operator, matrix, rtol)
    scale = float(matrix.abs().max()) * len(matrix)
    for name, expected in (("dense", matrix), ("diagonal", matrix.diagonal()), ("trace", matrix.trace())):
        require_close(f"operator.{name}()", getattr(operator, name)(), expected, rtol, scale)
    mean = operator.mean_eigenvalue()
    fits = mean.shape == () and (operator.indefinite or bool(mean >= 0))
    require(fits, f"operator.mean_eigenvalue() is {mean}, expected a scalar >= 0")
    root = operator.root()
    if root is not None:
        require(root.shape[:1] == (operator.size,), f"operator.root() has shape {tuple(root.shape)}, expected (n, r)")
        require_close("root root^T of operator.root()", root @ root.mT, matrix, rtol)
    _require_rows(operator, matrix, rtol)
    _require_inverse(operator, matrix, rtol)


def _product_matrix(operator: Operator, rtol: float) -> Tensor:
    """The (n, n) matrix of the products with the unit vectors, symmetric and PSD."""
    unit = torch.eye(operator.size, dtype=operator.dtype, device=operator.device)
    columns = [operator.mv(column) for column in unit]
    for column in columns:
        kind, expected = (column.shape, column.dtype, column.device), (unit.shape[:1], unit.dtype, unit.device)
        require(kind == expected, f"operator.mv returned {kind}, expected {expected}")
        require(bool(column.isfinite().all()), "operator.mv returned a non-finite product with a unit vector")
    matrix = torch.stack(columns, dim=1)
    require_close("operator.mv is not symmetric: G^T", matrix.mT, matrix, rtol)
    values = eigh(matrix)[0]
    low, high = float(values[0]), float(values[-1])
    positive = operator.indefinite or low >= -rtol * abs(high)
    require(positive, f"operator.mv is not positive semi-definite: eigenvalues {low:.3g} to {high:.3g}")
    return matrix


def _require_products(operator: Operator, matrix: Tensor, rtol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(operator.size, 3, generator=generator, device=generator.device, dtype=operator.dtype).to(
        operator.device
    )
    copy, expected = block.clone(), matrix @ block
    scale = float(matrix.abs().max()) * operator.size**0.5
    require_close("operator.mm(block)", operator.mm(block), expected, rtol, scale)
    require_close("operator @ block", operator @ block, expected, rtol, scale)
    require_close("operator.mm of no columns", operator.mm(block[:, :0]), expected[:, :0], rtol)
    # a column of a block is strided: products must not rely on contiguous memory
    require_close("operator.mv of a sum", operator.mv(block[:, 1]), expected[:, 1], rtol, scale)
    require_close("operator @ vector", operator @ block[:, 2], expected[:, 2], rtol, scale)
    require(torch.equal(block, copy), "a product changed its argument in place")
    require_raises("operator @ a vector that is too long", lambda: operator @ torch.ones(len(matrix) + 1))


def _require_rows(operator: Operator, matrix: Tensor, rtol: float) -> None:
    rows = operator.sample_rows
    rank = None if rows is None else rows.rank
    require(
        operator.sample_rank == rank, f"operator.sample_rank is {operator.sample_rank}, its sample_rows have {rank}"
    )
    if rows is None:
        return
    columns, generator = rows.dense(), torch.Generator().manual_seed(1)
    shape = (operator.size, rows.rank)
    require(columns.shape == shape, f"sample_rows.dense() has shape {tuple(columns.shape)}, expected {shape}")
    require_close("U U^T of operator.sample_rows", columns @ columns.mT, matrix, rtol)
    v, w = (
        torch.randn(n, generator=generator, device=generator.device, dtype=operator.dtype).to(operator.device)
        for n in shape
    )
    size = float(columns.abs().max()) * max(shape) if columns.numel() else 1.0
    require_close("sample_rows.mv(weights)", rows.mv(w), columns @ w, rtol, size)
    require_close("sample_rows.rmv(vector)", rows.rmv(v), columns.mT @ v, rtol, size)
    require_close("sample_rows.gram()", rows.gram(), columns.mT @ columns, rtol)


def _require_inverse(operator: Operator, matrix: Tensor, rtol: float) -> None:
    damping = float(matrix.diagonal().abs().mean()) / 10 or 1.0
    inverse = operator.inverse(damping)
    known = inverse is not None or not operator.closed_form
    require(known, f"operator.closed_form is True, and operator.inverse({damping:.3g}) is None")
    if inverse is not None:
        unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        product = matrix @ inverse.dense() + damping * inverse.dense()
        require_close(f"(G + {damping:.3g} I) operator.inverse({damping:.3g})", product, unit, 10 * len(matrix) * rtol)
    pseudo = operator.inverse(0.0)
    if pseudo is not None:
        least, root = pseudo.dense(), torch.finfo(matrix.dtype).eps ** 0.5  # conditioning enters squared
        require_close("G operator.inverse(0) G", matrix @ least @ matrix, matrix, root)
        require_close("operator.inverse(0) G operator.inverse(0)", least @ matrix @ least, least, root)
