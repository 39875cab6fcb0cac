"""Symmetric matrices as the entries of a graph, and what their triangular factors tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.families.special_functions import ratio_gap
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import factor_or_nan, invert_lower, invert_or_nan, is_positive_definite, require_factor


class Pairs:
    """The entries (i, j), i <= j, of a symmetric matrix (d, d) on a graph: i = j, then the edges, by default all."""

    def __init__(self, d: int, edges: Iterable[Iterable[int]] | None = None) -> None:
        d = check_integer("d", d, of="the number of dimensions")
        listed = itertools.combinations(range(d), 2) if edges is None else (tuple(sorted(edge)) for edge in edges)
        self.d, self.edges = d, tuple(listed)
        wrong = [edge for edge in self.edges if len(edge) != 2 or not 0 <= edge[0] < edge[1] < d]
        if wrong or len(set(self.edges)) < len(self.edges):
            what = f"{wrong[0]}" if wrong else "a pair twice"
            raise ValueError(f"edges hold {what}, expected pairs of different variables from 0 to {d - 1}, each once")
        self.complete = len(self.edges) == d * (d - 1) // 2
        ends = torch.tensor([*((i, i) for i in range(d)), *self.edges], dtype=torch.long)
        self.first, self.second = ends.unbind(1)
        self.size = len(ends)
        places = torch.full((d, d), self.size)
        places[self.first, self.second] = places[self.second, self.first] = torch.arange(self.size)
        self._places = places.flatten()

    def pack(self, matrix: Tensor, factor: float = 1.0) -> Tensor:
        """Diagonal, then `factor` times the edges' entries: (..., d, d) -> (..., size)."""
        pairs = factor * matrix[..., self.first[self.d :], self.second[self.d :]]
        return torch.cat([matrix.diagonal(dim1=-2, dim2=-1), pairs], dim=-1)

    def unpack(self, entries: Tensor, factor: float = 1.0) -> Tensor:
        """The symmetric matrix of which `pack` made the entries, zero elsewhere."""
        if factor != 1.0:
            entries = torch.cat([entries[..., : self.d], entries[..., self.d :] / factor], dim=-1)
        if not self.complete:
            entries = torch.nn.functional.pad(entries, (0, 1))  # the zero that stands for every missing pair
        return entries.index_select(-1, self._places.to(entries.device)).unflatten(-1, (self.d, self.d))

    def weights(self, like: Tensor) -> Tensor:
        """1 for the diagonal, 2 for the edges: (size,)."""
        return torch.where(self.first == self.second, 1.0, 2.0).to(like)

    def products(self, x: Tensor) -> Tensor:
        """x_i^2, then 2 x_i x_j of the edges, (..., d) -> (..., size)."""
        return torch.cat([x.square(), 2 * x[..., self.first[self.d :]] * x[..., self.second[self.d :]]], dim=-1)

    def moments(self, mean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Cov(x, T) (..., d, size) and Cov(T, T) of T = `products` of a normal x (Malago 2023, mended)."""
        # c_kl (mu_k S_il + mu_l S_ik), and c_kl c_mn [S_km S_ln + S_kn S_lm + mu_k mu_m S_ln + mu_k mu_n S_lm +
        # mu_l mu_m S_kn + mu_l mu_n S_km], c = 1 on the diagonal and 2 beside it
        k, l = self.first, self.second  # noqa: E741
        c, first, second = self.weights(mean), mean[..., self.first], mean[..., self.second]
        cross = c * (first.unsqueeze(-2) * sigma[..., :, l] + second.unsqueeze(-2) * sigma[..., :, k])
        kk, kl, ll = (sigma[..., a, :][..., :, b] for a, b in ((k, k), (k, l), (l, l)))
        lk = kl.mT
        mk, ml = first.unsqueeze(-1), second.unsqueeze(-1)
        full = kk * (ll + ml * ml.mT) + kl * (lk + ml * mk.mT) + mk * mk.mT * ll + mk * ml.mT * lk
        return cross, c.unsqueeze(-1) * c * full


# Triangular factors of precisions and covariances: solves, inverses, determinants and divergences

SMALL = 8  # up to this dimension `inv` of a batch takes half the time of a triangular solve


def factor_covariance(matrix: Tensor, message: str | None = None) -> Tensor:
    """L with L L^T the matrix (..., d, d). ValueError unless it is positive definite (the lower triangle is read)."""
    return require_factor(
        matrix, message or "covariance is not positive definite, which a distribution with a density needs"
    )


def safe_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor, that of the identity where there is none, and whether there is."""
    fine = is_positive_definite(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return factor_or_nan(torch.where(fine[..., None, None], matrix, eye)), fine


def solve_factor(factor: Tensor, vector: Tensor) -> Tensor:
    """(L L^T)^-1 v, (..., d, d), (..., d) -> (..., d)."""
    half = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)


def precision_gap(factor: Tensor, goal: Tensor) -> Tensor:
    """1/2 [tr(M) - d - log det M] >= 0 for M = P^-1 Q, P = L L^T and Q = K K^T: KL of centred normals."""
    # C = L^-1 K is lower triangular, C C^T similar to M: 1/2 sum_i [c_ii^2 - 1 - log c_ii^2] + 1/2 sum_{i > j} c_ij^2
    both = torch.linalg.solve_triangular(factor, goal, upper=False).tril(-1)
    start, end = (each.diagonal(dim1=-2, dim2=-1) for each in (factor, goal))
    gaps = ratio_gap(end.square(), start.square(), (end - start) * (end + start))
    return 0.5 * (gaps.sum(-1) + both.square().sum((-2, -1)))


def half_log_det(factor: Tensor) -> Tensor:
    """1/2 log det(L L^T)."""
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def inverse_from(factor: Tensor) -> Tensor:
    """(L L^T)^-1 for L (..., d, d). The forward derivative of torch.cholesky_inverse is wrong (torch 2.13)."""
    half = invert_or_nan(factor) if factor.shape[-1] <= SMALL else invert_lower(factor)
    return half.mT @ half
