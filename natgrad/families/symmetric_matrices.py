"""Symmetric matrices as the entries of a graph: the diagonal, then the edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer


class Pairs:
    """Which entries (i, j), i <= j, of a symmetric matrix (d, d) are kept: all i = j, then the edges in their order.

    Args:
        d: Size of the matrix.
        edges: Pairs of different variables. None: all, row by row.

    Raises:
        ValueError: For an edge that is no such pair.
    """

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
        """Cov(x, T) (..., d, size) and Cov(T, T) (..., size, size) of T = `products` of a normal x.

        c_kl (mu_k S_il + mu_l S_ik), and c_kl c_mn [S_km S_ln + S_kn S_lm + mu_k mu_m S_ln + mu_k mu_n S_lm +
        mu_l mu_m S_kn + mu_l mu_n S_km], c = 1 on the diagonal and 2 beside it (Malago 2023, mended).
        """
        k, l = self.first, self.second  # noqa: E741
        c, first, second = self.weights(mean), mean[..., self.first], mean[..., self.second]
        cross = c * (first.unsqueeze(-2) * sigma[..., :, l] + second.unsqueeze(-2) * sigma[..., :, k])
        kk, kl, ll = (sigma[..., a, :][..., :, b] for a, b in ((k, k), (k, l), (l, l)))
        lk = kl.mT
        mk, ml = first.unsqueeze(-1), second.unsqueeze(-1)
        full = kk * (ll + ml * ml.mT) + kl * (lk + ml * mk.mT) + mk * mk.mT * ll + mk * ml.mT * lk
        return cross, c.unsqueeze(-1) * c * full
