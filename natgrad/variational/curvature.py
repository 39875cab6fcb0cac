"""E_q of the Hessian of log p: from second derivatives, or by Stein's identity where these miss kinks."""

from __future__ import annotations

import torch
from torch import Tensor

CONSTANT = 1e-9
"""Spread, relative to the largest curvature, below which a curvature counts as the same everywhere."""
NOTABLE, LARGE, WHOLE = 0.02, 0.1, 0.5
"""Shares of the curvature by which the two forms differ: for a constant curvature, for quadrature or five standard
errors, for three."""


def expected_hessian(slopes: Tensor, curvatures: Tensor | None, z: Tensor, weights: Tensor, root: Tensor) -> Tensor:
    """E[Hess log p] (d, d), or its diagonal (d,) where q is diagonal.

    For x = m + L z, both E[Hess log p(x)] and E[grad log p(x) z^T] L^-1 are that matrix. The first lacks what a kink
    adds, all of it for log p = -|x|. The second is noisier for smooth log p, and is the exact gradient of the bound
    over the same points. It is taken where their diagonals differ by more than chance.

    Reference:
        Price 1958; Stein 1981.

    slopes: grad log p at every point, (s, d). curvatures: Hess log p there, (s, d, d); None where torch has no second
    derivatives. z: (s, d), a grid, or pairs whose second half is minus the first. root: L, or standard deviations (d,).
    """
    if curvatures is None:
        return stein_hessian(slopes, z, weights, root)
    mean = torch.einsum("s,sij->ij", weights, curvatures)
    offsets = z * root if root.dim() == 1 else z @ root.mT
    rest = slopes - offsets @ mean  # what a quadratic log p leaves: nothing, whatever the points
    diagonals = curvatures.diagonal(dim1=1, dim2=2)
    smooth = mean.diagonal() if root.dim() == 1 else mean
    if not misses_kinks(_stein_diagonals(rest, z, root), diagonals, weights):
        return smooth
    return smooth + stein_hessian(rest, z, weights, root)


def stein_hessian(slopes: Tensor, z: Tensor, weights: Tensor, root: Tensor) -> Tensor:
    """E[grad log p(m + L z) z^T] L^-1, symmetric (d, d); its diagonal (d,) where q is diagonal."""
    if root.dim() == 1:
        return weights @ _stein_diagonals(slopes, z, root)
    crossed = torch.einsum("s,si,sj->ij", weights, slopes, z)
    hessian = torch.linalg.solve_triangular(root, crossed, upper=False, left=False)
    return (hessian + hessian.mT) / 2


def misses_kinks(rest: Tensor, diagonals: Tensor, weights: Tensor) -> bool:
    """True if second derivatives `diagonals` (s, d) do not account for the change of the slopes, in some variable.

    rest: Stein's diagonal at every point, of the slopes less the mean curvature's share, (s, d).
    """
    mean, gap = weights @ diagonals, (weights @ rest).abs()
    share = gap / (mean + weights @ rest).abs().clamp(min=torch.finfo(gap.dtype).tiny)
    spread = diagonals.max(0).values - diagonals.min(0).values
    same = spread <= CONSTANT * diagonals.abs().max()
    missed = same & (share > NOTABLE)
    if bool(weights.max() > weights.min()):  # quadrature: no chance in it
        return bool((missed | (share > LARGE)).any())
    error = standard_error(rest - (diagonals - mean), weights)
    return bool((missed | ((share > LARGE) & (gap > 5 * error)) | ((share > WHOLE) & (gap > 3 * error))).any())


def standard_error(each: Tensor, weights: Tensor) -> Tensor:
    """Standard error (d,) of the weighted mean of rows (s, d), as of draws; a point and its negative are one."""
    half = len(each) // 2
    if len(each) % 2 == 0 and half > 1:
        each, weights = (each[:half] + each[half:]) / 2, weights[:half] + weights[half:]
    gap = each - weights @ each
    left = (1 - weights.square().sum()).clamp(min=torch.finfo(each.dtype).eps)
    return (weights.square() @ gap.square() / left).sqrt()


def _stein_diagonals(slopes: Tensor, z: Tensor, root: Tensor) -> Tensor:
    """The diagonal of grad z^T L^-1 at every point, (s, d)."""
    if root.dim() == 1:
        return slopes * z / root
    return slopes * torch.linalg.solve_triangular(root, z, upper=False, left=False)
