"""Draws of a generation that do not repeat one another: normal vectors at right angles."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_orthogonal_normals(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors z_i of N(0, I) of which d at a time are orthogonal, shape (count, d).

    Each row by itself is a draw from N(0, I): its direction is uniform, and its length is the one that was drawn for
    it. Means over a generation of functions that are linear or quadratic in z vary less than with independent rows.

    Args:
        count: How many.
        like: A vector (d,) of the dtype and on the device that are wanted.
        generator: Of the draws.

    Reference:
        Wang, Emmerich & Baeck 2019, *Mirrored orthogonal sampling for covariance matrix adaptation evolution
        strategies*, of which only the orthogonality is taken.
    """
    d = len(like)
    normals = torch.randn(count, d, generator=generator, dtype=like.dtype, device=like.device)
    whole = count - count % d
    parts = [normals[:whole].view(-1, d, d), normals[whole:].unsqueeze(0)]
    return torch.cat([make_orthogonal(part).reshape(-1, d) for part in parts if part.numel()])


def make_orthogonal(rows: Tensor) -> Tensor:
    """Gram and Schmidt's rows, each with the length that it had.

    Args:
        rows: Shape (..., k, d) with k <= d.
    """
    q, r = torch.linalg.qr(rows.mT)
    signs = torch.copysign(torch.ones_like(r[..., 0]), r.diagonal(dim1=-2, dim2=-1))  # LAPACK leaves the sign open
    return q.mT * (signs * rows.norm(dim=-1)).unsqueeze(-1)
