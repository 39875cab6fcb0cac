"""Gibbs sampling of fields: variables that share no clique are drawn at once, in many chains side by side."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families.discrete_tables import Clique, Tables, list_neighbours
from natgrad.ground.checks import check_integer
from natgrad.ground.typed_torch import Map


@dataclass(frozen=True)
class Gibbs:
    """How a field is drawn where its sums are too large.

    Args:
        burn_in: Sweeps over all variables before the first draw, from independent uniform starts.
        chains: Chains, at most. With fewer draws than that every draw has a chain of its own.
        thinning: Sweeps between draws of one chain.
    """

    burn_in: int = 200
    chains: int = 100
    thinning: int = 10

    def __post_init__(self) -> None:
        check_integer("burn_in", self.burn_in, 0, of="the number of sweeps")
        check_integer("chains", self.chains, of="the number of chains")
        check_integer("thinning", self.thinning, of="the number of sweeps")

    def draw(self, tables: Tables, theta: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """States (count, ..., n): draws from one chain are count / chains apart, and depend on one another.

        Args:
            tables: The field's functions.
            theta: Natural parameters, shape (..., m).
            count: How many for every theta.
            generator: Source of the draws. None: the global one.
        """
        flat = theta.reshape(-1, theta.shape[-1])
        chains = min(self.chains, count)
        states = self._collect_states(build_sweep(tables, flat, chains), -(-count // chains), generator)
        return torch.stack(states).view(len(states) * chains, *theta.shape[:-1], -1)[:count]

    def _collect_states(
        self, sweep: PairSweep | Sweep | Ladder, times: int, generator: torch.Generator | None
    ) -> list[Tensor]:
        """States after the burn-in, and `times` less one after some more sweeps."""
        sweep.start(generator)
        states: list[Tensor] = []
        for time in range(times):
            for _ in range(self.thinning if time else self.burn_in):
                sweep.run(generator)
            states.append(sweep.states())
        return states


def build_sweep(tables: Tables, theta: Tensor, chains: int) -> PairSweep | Sweep:
    """The quickest sweep for a field at natural parameters (B, m)."""
    groups = colour_variables(len(tables.counts), tables.cliques)
    return (PairSweep if fits_pairs(tables) else Sweep)(tables, groups, theta, chains)


class Sweep:
    """One draw of every variable given the others, by lists of neighbours, in chains of each theta (B, m)."""

    def __init__(self, tables: Tables, groups: list[list[int]], theta: Tensor, chains: int) -> None:
        rows = theta.expand(chains, *theta.shape).reshape(-1, theta.shape[-1])
        self.tables, self.rows, self.device, self.chains = tables, len(rows), theta.device, chains
        self.colours = [Colour(tables, members, rows) for members in groups]
        self.state = torch.empty(0)

    def start(self, generator: torch.Generator | None) -> None:
        """Independent uniform states."""
        counts = torch.tensor(self.tables.counts, device=self.device)
        uniform = torch.rand(self.rows, len(counts), generator=generator, device=self.device, dtype=torch.float64)
        self.state = (uniform * counts).long().minimum(counts - 1)

    def run(self, generator: torch.Generator | None) -> None:
        """Every variable once."""
        for colour in self.colours:
            colour.run(self.state, generator)

    def states(self) -> Tensor:
        """The positions of the values, (chains * B, n)."""
        return self.state.clone()

    def replace_states(self, places: Tensor) -> None:
        """Goes on from positions of values (chains * B, n)."""
        self.state = places.clone()

    def replace_weights(self, theta: Tensor) -> None:
        """Goes on with other natural parameters (B, m)."""
        rows = theta.expand(self.chains, *theta.shape).reshape(-1, theta.shape[-1])
        for colour in self.colours:
            colour.weights = rows[:, colour.terms]


class Colour:
    """Variables that share no clique: given the others they are independent."""

    def __init__(self, tables: Tables, members: list[int], theta: Tensor) -> None:
        self.members, device = torch.tensor(members, device=theta.device), theta.device
        place = {variable: k for k, variable in enumerate(members)}
        pairs = [(c, i) for c, clique in enumerate(tables.cliques) for i in clique if i in place]
        terms = torch.tensor([c for c, _ in pairs], dtype=torch.long, device=device)
        self.owner = torch.tensor([place[i] for _, i in pairs], dtype=torch.long, device=device)
        itself = tables.members.to(device)[terms] == self.members[self.owner].unsqueeze(1)
        steps = tables.steps.to(device)[terms]
        self.others, self.steps = tables.members.to(device)[terms], steps.masked_fill(itself, 0)
        self.own = (steps * itself).amax(1) if len(pairs) else self.owner
        self.terms, self.offset, self.weights = terms, tables.offset.to(device)[terms], theta[:, terms]
        self.flat = tables.flat.to(theta)
        counts = torch.tensor([tables.counts[i] for i in members], device=device)
        self.values = torch.arange(int(counts.max()), device=device)
        self.missing = self.values >= counts.unsqueeze(1)
        self.limits = counts[self.owner].unsqueeze(1)

    def run(self, state: Tensor, generator: torch.Generator | None) -> None:
        """Draws the members of `state` (R, n) in place, by the largest of perturbed energies (Gumbel)."""
        base = self.offset + (state[:, self.others] * self.steps).sum(-1)  # (R, E)
        values = torch.minimum(self.values, self.limits - 1)  # (E, k): no entry of the next table
        energy = self.flat[base.unsqueeze(-1) + values * self.own.unsqueeze(1)] * self.weights.unsqueeze(-1)
        total = energy.new_zeros(len(state), len(self.members), len(self.values)).index_add(1, self.owner, energy)
        uniform = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=total.device)
        noise = -torch.log(-torch.log(uniform.clamp(min=1e-300)))
        state[:, self.members] = (total + noise).masked_fill(self.missing, -torch.inf).argmax(-1)


def colour_variables(n: int, cliques: list[Clique]) -> list[list[int]]:
    """Variables in groups without a common clique, greedily, those with most neighbours first."""
    near = list_neighbours(n, cliques)
    colour: dict[int, int] = {}
    for i in sorted(range(n), key=lambda i: -len(near[i])):
        taken = {colour[j] for j in near[i] if j in colour}
        colour[i] = next(c for c in range(n) if c not in taken)
    groups: list[list[int]] = [[] for _ in range(max(colour.values()) + 1)]
    for i in range(n):
        groups[colour[i]].append(i)
    return groups


# Sweeps of fields of pairs: one matrix product per group of variables, over all chains at once

SPARSE = 64
"""Columns of the matrix per entry that is not zero, beyond which a list of neighbours is shorter."""
SMALL = 512
"""Columns up to which the matrix is taken all the same."""


class PairSweep:
    """One draw of every variable given the others where no clique has more than two: a matrix times the state."""

    def __init__(self, tables: Tables, groups: list[list[int]], theta: Tensor, chains: int) -> None:
        self.tables = tables
        # a state is a 0 or 1 for every value of a variable but its first (columns, in the order of the groups)
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

    def start(self, generator: torch.Generator | None) -> None:
        """Independent uniform states."""
        uniform = self.noise.uniform_(generator=generator)
        self._write((uniform * self.counts.unsqueeze(-1)).long().minimum(self.counts.unsqueeze(-1) - 1), self.state)

    def run(self, generator: torch.Generator | None) -> None:
        """Every variable once."""
        if self.width == 1:  # the second value where its energy passes the logit of a uniform number
            torch.sub(self.constant, torch.logit(self.noise.uniform_(generator=generator)), out=self.base)
            for base, rows, mine in self.views:
                torch.ge(torch.baddbmm(base, rows, self.state), 0, out=mine)
            return
        # the largest of the energies perturbed by Gumbel's noise
        values = torch.arange(self.width + 1, device=self.state.device)
        for (members, columns), (_, rows, mine) in zip(self.slices, self.views, strict=True):
            energy = torch.baddbmm(self.constant[:, columns], rows, self.state).unflatten(1, (-1, self.width))
            energy = torch.cat([torch.zeros_like(energy[:, :, :1]), energy], dim=2)  # (B, members, values, chains)
            energy = energy.masked_fill((values >= self.counts[members].unsqueeze(1)).unsqueeze(-1), -torch.inf)
            uniform = torch.rand(energy.shape, generator=generator, dtype=torch.float64, device=energy.device)
            self._write((energy - torch.log(-torch.log(uniform.clamp(min=1e-300)))).argmax(2), mine)

    def states(self) -> Tensor:
        """The positions of the values, (chains * B, n)."""
        values = torch.arange(1, self.width + 1, device=self.state.device, dtype=self.state.dtype)
        places = (self.state.unflatten(1, (-1, self.width)) * values.view(-1, 1)).sum(2).long()  # (B, n, chains)
        ordered = torch.empty_like(places)
        ordered[:, self.order] = places
        return ordered.permute(2, 0, 1).reshape(-1, ordered.shape[1])

    def replace_states(self, places: Tensor) -> None:
        """Goes on from positions of values (chains * B, n)."""
        by_theta = places.view(-1, len(self.state), places.shape[1]).permute(1, 2, 0)
        self._write(by_theta[:, self.order], self.state)

    def replace_weights(self, theta: Tensor) -> None:
        """Goes on with other natural parameters (B, m)."""
        constant, matrix = pair_energies(self.tables, self.order, theta, self.width)
        self.constant.copy_(constant)
        self.matrix.copy_(matrix)

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
    """Constants (B, N, 1) and a symmetric matrix (B, N, N): energies of values, less those of the first value."""
    n, values = len(tables.counts), torch.arange(width + 1)
    rank = torch.empty(n, dtype=torch.long)
    rank[order.cpu()] = torch.arange(n)
    members, steps = (torch.nn.functional.pad(each, (0, 1))[:, :2] for each in (tables.members, tables.steps))
    last = torch.tensor(tables.counts)[members] - 1  # a missing value reads the last one, and is never taken
    first, second = (torch.minimum(values, last[:, k : k + 1]) * steps[:, k : k + 1] for k in (0, 1))
    table = tables.flat[tables.offset.view(-1, 1, 1) + first.unsqueeze(2) + second.unsqueeze(1)]  # (m, values, values)
    rows = rank[members].unsqueeze(2) * width + torch.arange(width)  # (m, 2, width)
    # T_v0 - T_00 and T_0w - T_00 go to the constants, T_vw - T_v0 - T_0w + T_00 to the matrix
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
    joined = flat.view(len(theta), n * width, wide)
    return joined[..., -1:].contiguous(), joined[..., :-1].contiguous()


# Draws of fields with several modes


@dataclass(frozen=True)
class Tempering(Gibbs):
    """Gibbs sampling of a field and of copies with smaller theta side by side, which exchange their states.

    The copies have the parameters beta theta with beta = 0, ..., 1 at equal distances. The first has independent
    variables, so that chains reach modes which a plain sweep never finds. Draws come from the last.

    Args:
        burn_in: Sweeps over all variables before the first draw, each followed by exchanges.
        chains: Ladders of copies, at most.
        thinning: Sweeps between draws of one ladder.
        levels: How many betas. Exchanges get rare where there are too few: about as many as the root of the number of
            variables times the strength of their couplings.

    Example:
        >>> field = ng.Ising(40, gibbs=ng.families.Tempering(burn_in=20, chains=20, levels=6))
        >>> field.sample(torch.zeros(820), 20).shape
        torch.Size([20, 40])
    """

    levels: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("levels", self.levels, 2, of="the number of temperatures")

    def draw(self, tables: Tables, theta: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        flat = theta.reshape(-1, theta.shape[-1])
        if not len(flat):
            return torch.empty(count, 0, len(tables.counts), dtype=torch.long, device=theta.device)
        chains, betas = (
            min(self.chains, count),
            torch.linspace(0, 1, self.levels, dtype=theta.dtype, device=theta.device),
        )
        ladders = [Ladder(tables, row, betas, chains) for row in flat]
        states = [torch.cat(self._collect_states(each, -(-count // chains), generator))[:count] for each in ladders]
        return torch.stack(states, dim=1).view(count, *theta.shape[:-1], -1)


class Ladder:
    """Chains of beta theta, theta (m,), for ascending betas (L,), which exchange states between neighbours."""

    def __init__(self, tables: Tables, theta: Tensor, betas: Tensor, chains: int) -> None:
        self.sweep = build_sweep(tables, betas.unsqueeze(1) * theta, chains)
        self.energy = build_energy(tables, theta)
        self.betas, self.chains, self.odd = betas, chains, 0

    def start(self, generator: torch.Generator | None) -> None:
        """Independent uniform states."""
        self.sweep.start(generator)

    def run(self, generator: torch.Generator | None) -> None:
        """A sweep, then exchanges of every second pair of neighbours, the others the next time."""
        self.sweep.run(generator)
        states = self.sweep.states().view(self.chains, len(self.betas), -1)
        energies = self.energy(states)
        low = torch.arange(self.odd, len(self.betas) - 1, 2, device=states.device)
        gain = (self.betas[low + 1] - self.betas[low]) * (energies[:, low] - energies[:, low + 1])
        uniform = torch.rand(gain.shape, generator=generator, dtype=gain.dtype, device=gain.device)
        order = torch.arange(len(self.betas), device=states.device).repeat(self.chains, 1)
        chosen = uniform.log() < gain
        order[:, low] += chosen.long()
        order[:, low + 1] -= chosen.long()
        self.sweep.replace_states(states.gather(1, order.unsqueeze(-1).expand_as(states)).flatten(0, 1))
        self.odd = 1 - self.odd

    def states(self) -> Tensor:
        """The states of the last beta, (chains, n)."""
        return self.sweep.states().view(self.chains, len(self.betas), -1)[:, -1]


def build_energy(tables: Tables, theta: Tensor) -> Map:
    """theta . T(x), theta (m,), of states as positions of values, (..., n) -> (...)."""
    if not fits_pairs(tables):
        return lambda places: tables.statistics(places).to(theta) @ theta
    width, order = max(tables.counts) - 1, torch.arange(len(tables.counts), device=theta.device)
    constant, matrix = (each[0] for each in pair_energies(tables, order, theta.unsqueeze(0), width))
    first = tables.statistics(torch.zeros_like(order)).to(theta) @ theta

    def measure(places: Tensor) -> Tensor:
        values = torch.arange(1, width + 1, device=places.device)
        columns = (places.unsqueeze(-1) == values).flatten(-2).to(matrix)
        return first + columns @ constant[:, 0] + 0.5 * (columns @ matrix * columns).sum(-1)

    return measure
