"""Gibbs sweeps of fields of pairs: one matrix product per group of variables, over all chains at once."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from natgrad.families.discrete_tables import Tables

SPARSE = 64
"""Columns of the matrix per entry that is not zero, beyond which a list of neighbours is shorter."""
SMALL = 512
"""Columns up to which the matrix is taken all the same."""


class PairSweep:
    """One draw of every variable given the others, where no clique has more than two; states are kept inside.

    A state is written as one 0 or 1 per value of a variable but its first (columns), so that the energies of a
    variable's values are a constant and one row of a matrix times the state.

    Args:
        tables: The field's functions.
        groups: Variables without a common clique, drawn at once. Columns lie in their order.
        theta: Natural parameters, shape (B, m).
        chains: Chains of each theta.
    """

    def __init__(self, tables: Tables, groups: list[list[int]], theta: Tensor, chains: int) -> None:
        self.tables = tables
        self.order = torch.tensor([i for group in groups for i in group], device=theta.device)
        self.width = max(tables.counts) - 1
        self.constant, self.matrix = pair_energies(tables, self.order, theta, self.width)
        columns = self.constant.shape[1]
        self.state = theta.new_zeros(len(theta), columns, chains)
        self.noise = torch.empty(len(theta), columns // self.width, chains, dtype=torch.float64, device=theta.device)
        self.counts = torch.tensor(tables.counts, device=theta.device)[self.order]
        self.base = torch.empty_like(self.state)
        ends = torch.tensor([0, *(len(group) for group in groups)]).cumsum(0).tolist()
        self.slices = [(slice(a, b), slice(a * self.width, b * self.width)) for a, b in itertools.pairwise(ends)]
        # made once: a sweep over 30 spins is 60 calls, and views would double them
        self.views = [(self.base[:, c], self.matrix[:, c], self.state[:, c]) for _, c in self.slices]
        self.flat_views = [(base[0], rows[0], mine[0]) for base, rows, mine in self.views] if len(theta) else []

    def start(self, generator: torch.Generator | None) -> None:
        """Independent uniform states."""
        uniform = self.noise.uniform_(generator=generator)
        self._write((uniform * self.counts.unsqueeze(-1)).long().minimum(self.counts.unsqueeze(-1) - 1), self.state)

    def run(self, generator: torch.Generator | None) -> None:
        """Every variable once."""
        if self.width == 1:
            self._run_bits(generator)
        else:
            self._run_values(generator)

    def states(self) -> Tensor:
        """The positions of the values, (chains * B, n)."""
        values = torch.arange(1, self.width + 1, device=self.state.device, dtype=self.state.dtype)
        places = (self.state.unflatten(1, (-1, self.width)) * values.view(-1, 1)).sum(2).long()  # (B, n, chains)
        found = torch.empty_like(places)
        found[:, self.order] = places
        return found.permute(2, 0, 1).reshape(-1, found.shape[1])

    def replace_states(self, places: Tensor) -> None:
        """Goes on from positions of values (chains * B, n)."""
        by_theta = places.view(-1, len(self.state), places.shape[1]).permute(1, 2, 0)
        self._write(by_theta[:, self.order], self.state)

    def replace_weights(self, theta: Tensor) -> None:
        """Goes on with other natural parameters (B, m)."""
        constant, matrix = pair_energies(self.tables, self.order, theta, self.width)
        self.constant.copy_(constant)
        self.matrix.copy_(matrix)

    def _run_bits(self, generator: torch.Generator | None) -> None:
        """The second value where its energy passes the logit of a uniform number."""
        torch.sub(self.constant, torch.logit(self.noise.uniform_(generator=generator)), out=self.base)
        if len(self.state) == 1:
            for base, rows, mine in self.flat_views:
                torch.ge(torch.addmm(base, rows, self.state[0]), 0, out=mine)
            return
        for base, rows, mine in self.views:
            torch.ge(torch.baddbmm(base, rows, self.state), 0, out=mine)

    def _run_values(self, generator: torch.Generator | None) -> None:
        """The largest of the energies perturbed by Gumbel's noise."""
        for (members, columns), (_, rows, mine) in zip(self.slices, self.views, strict=True):
            energy = torch.baddbmm(self.constant[:, columns], rows, self.state).unflatten(1, (-1, self.width))
            energy = torch.cat([torch.zeros_like(energy[:, :, :1]), energy], dim=2)  # (B, members, values, chains)
            energy = energy.masked_fill(self._missing(members), -torch.inf)
            uniform = torch.rand(energy.shape, generator=generator, dtype=torch.float64, device=energy.device)
            self._write((energy - torch.log(-torch.log(uniform.clamp(min=1e-300)))).argmax(2), mine)

    def _missing(self, members: slice) -> Tensor:
        values = torch.arange(self.width + 1, device=self.state.device)
        return (values >= self.counts[members].unsqueeze(1)).unsqueeze(-1)

    def _write(self, places: Tensor, columns: Tensor) -> None:
        """Positions (B, k, chains) into the columns (B, k * width, chains) of k variables."""
        values = torch.arange(1, self.width + 1, device=places.device)
        columns.copy_((places.unsqueeze(2) == values.view(-1, 1)).flatten(1, 2))


def fits_pairs(tables: Tables) -> bool:
    """Whether no clique has more than two variables, and the matrix of pairs is small or not nearly empty."""
    columns = len(tables.counts) * (max(tables.counts) - 1)
    pairs = sum(2 * (max(tables.counts) - 1) ** 2 for clique in tables.cliques if len(clique) == 2)
    return max(map(len, tables.cliques)) <= 2 and (columns <= SMALL or columns**2 <= SPARSE * pairs)


def pair_energies(tables: Tables, order: Tensor, theta: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Constants (B, N, 1) and a symmetric matrix (B, N, N): energies of values, less those of the first value.

    The table T of a pair gives T_vw - T_v0 - T_0w + T_00 to the matrix, and T_v0 - T_00 and T_0w - T_00 to the
    constants.

    theta: Natural parameters, (B, m).
    """
    n, values = len(tables.counts), torch.arange(width + 1)
    rank = torch.empty(n, dtype=torch.long)
    rank[order.cpu()] = torch.arange(n)
    members, steps = (torch.nn.functional.pad(each, (0, 1))[:, :2] for each in (tables.members, tables.steps))
    last = torch.tensor(tables.counts)[members] - 1  # a missing value reads the last one, and is never taken
    first, second = (torch.minimum(values, last[:, k : k + 1]) * steps[:, k : k + 1] for k in (0, 1))
    table = tables.flat[tables.offset.view(-1, 1, 1) + first.unsqueeze(2) + second.unsqueeze(1)]  # (m, values, values)
    rows = rank[members].unsqueeze(2) * width + torch.arange(width)  # (m, 2, width)
    rises = torch.stack([table[:, 1:, 0] - table[:, :1, 0], table[:, 0, 1:] - table[:, 0, :1]], dim=1)
    both = table[:, 1:, 1:] - table[:, 1:, :1] - table[:, :1, 1:] + table[:, :1, :1]  # zero for single variables
    wide = n * width + 1  # the constants are one more column
    here, there = rows[:, 0].unsqueeze(2), rows[:, 1].unsqueeze(1)
    places = [rows * wide + n * width, here * wide + there, there * wide + here]
    entries = [each.to(theta).flatten(1) for each in (rises, both, both)]
    flat = theta.new_zeros(len(theta), n * width * wide)
    for place, entry in zip(places, entries, strict=True):
        weighted = (theta.unsqueeze(2) * entry).flatten(1)
        flat.index_add_(1, place.flatten().to(theta.device), weighted)
    found = flat.view(len(theta), n * width, wide)
    return found[..., -1:].contiguous(), found[..., :-1].contiguous()
