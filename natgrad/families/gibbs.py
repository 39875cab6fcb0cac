"""Gibbs sampling of fields: variables that share no clique are drawn at once, in many chains side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families.discrete_tables import Clique, Tables
from natgrad.families.gibbs_sweeps import PairSweep, fits_pairs
from natgrad.ground.checks import check_integer


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
        """States: draws from one chain are count / chains apart, and depend on one another.

        Args:
            tables: The field's functions.
            theta: Natural parameters, shape (..., m).
            count: How many for every theta.
            generator: Source of the draws. None: the global one.

        Returns:
            Positions of the values, shape (count, ..., n).
        """
        flat = theta.reshape(-1, theta.shape[-1])
        chains = min(self.chains, count)
        sweep = build_sweep(tables, flat, chains)
        sweep.start(generator)
        for _ in range(self.burn_in):
            sweep.run(generator)
        found = [sweep.states()]
        while len(found) * chains < count:
            for _ in range(self.thinning):
                sweep.run(generator)
            found.append(sweep.states())
        drawn = torch.stack(found).view(len(found) * chains, *theta.shape[:-1], -1)
        return drawn[:count]


def build_sweep(tables: Tables, theta: Tensor, chains: int) -> PairSweep | Sweep:
    """The quickest sweep for a field.

    theta: Natural parameters, (B, m).
    """
    groups = colour_variables(len(tables.counts), tables.cliques)
    return (PairSweep if fits_pairs(tables) else Sweep)(tables, groups, theta, chains)


class Sweep:
    """One draw of every variable given the others, by lists of neighbours; states are kept inside.

    Args:
        tables: The field's functions.
        groups: Variables without a common clique, drawn at once.
        theta: Natural parameters, shape (B, m).
        chains: Chains of each theta.
    """

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
    near: list[set[int]] = [set() for _ in range(n)]
    for clique in cliques:
        for i in clique:
            near[i].update(j for j in clique if j != i)
    colour: dict[int, int] = {}
    for i in sorted(range(n), key=lambda i: -len(near[i])):
        taken = {colour[j] for j in near[i] if j in colour}
        colour[i] = next(c for c in range(n) if c not in taken)
    groups: list[list[int]] = [[] for _ in range(max(colour.values()) + 1)]
    for i in range(n):
        groups[colour[i]].append(i)
    return groups
