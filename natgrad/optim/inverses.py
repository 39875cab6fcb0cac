"""Damped inverses between steps: made with a ladder, kept as plain tensors in a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from natgrad.linalg import KroneckerEigen
from natgrad.operators import Diagonal, Kronecker, Operator, QuasiDiagonal, Spectral, Spiked, Tiled, Units
from natgrad.operators.unitwise import QuasiDiagonalInverse
from natgrad.pure import leaves

Packed = dict[str, Any]


def packed(inverse: Operator) -> Packed:
    """A damped inverse as plain tensors and values, which `torch.load(weights_only=True)` reads."""
    if isinstance(inverse, Kronecker):
        return {"kind": "kronecker", "left": inverse.left, "right": inverse.right}
    if isinstance(inverse, Spectral):
        vectors = {"left": inverse.eigen.left_vectors, "right": inverse.eigen.right_vectors}
        return {"kind": "spectral", "spectrum": inverse.spectrum} | vectors
    if isinstance(inverse, Spiked):
        return {"kind": "spiked", "spectrum": inverse.spectrum, "left": inverse.left, "right": inverse.right}
    if isinstance(inverse, Tiled):
        grid, shape = list(inverse.grid), list(inverse.matrix_shape)
        return {"kind": "tiled", "grid": grid, "shape": shape, "tiles": packed(inverse.tiles)}
    if isinstance(inverse, Units):
        return {"kind": "units", "matrices": inverse.matrices}
    if isinstance(inverse, QuasiDiagonalInverse):
        operator = inverse.operator
        return {"kind": "quasi", "squares": operator.squares, "cross": operator.cross, "damping": inverse.damping}
    if isinstance(inverse, Diagonal):
        return {"kind": "diagonal", "values": inverse.values}
    raise TypeError(f"{inverse!r} is no inverse that an optimizer keeps; use a structure of natgrad's own")


def unpacked(found: Packed) -> Operator:
    """The inverse that `packed` took apart."""
    kind = found["kind"]
    if kind == "kronecker":
        return Kronecker(found["left"], found["right"])
    if kind == "spectral":
        spectrum = found["spectrum"]
        # eigenvalues are in the spectrum already: only their shapes count
        eigen = KroneckerEigen(spectrum[..., 0], found["left"], spectrum[..., 0, :], found["right"])
        return Spectral(eigen, spectrum)
    if kind == "spiked":
        return Spiked(found["left"], found["right"], found["spectrum"])
    if kind == "tiled":
        return Tiled(unpacked(found["tiles"]), tuple(found["grid"]), tuple(found["shape"]))
    if kind == "units":
        return Units(found["matrices"])
    if kind == "quasi":
        return QuasiDiagonal(found["squares"], found["cross"]).inverse(found["damping"])
    return Diagonal(found["values"])


def finite(inverse: Operator) -> bool:
    """Whether every number of a packed inverse is finite."""
    return all(bool(torch.isfinite(t.sum())) for t in leaves(packed(inverse)))


def robust_inverse(operator: Operator, damping: float) -> Operator | None:
    """(G + damping I)^-1, or with more damping where that is not finite, up to 1e4 times; None if nothing helps."""
    for raise_by in (1.0, 1e2, 1e4):
        try:
            inverse = operator.inverse(damping * raise_by)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if inverse is not None and finite(inverse):
            return inverse
    return None
