"""Fields at several temperatures: parallel tempering for draws, annealed importance sampling for log Z."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import check_integer
from natgrad.families.discrete_tables import Tables
from natgrad.families.gibbs import Gibbs, build_sweep
from natgrad.families.gibbs_sweeps import fits_pairs, pair_energies


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
        found = [self._draw_one(tables, row, count, generator) for row in flat]
        empty = torch.empty(count, 0, len(tables.counts), dtype=torch.long, device=theta.device)
        return torch.stack(found, dim=1).view(count, *theta.shape[:-1], -1) if found else empty

    def _draw_one(self, tables: Tables, theta: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        chains = min(self.chains, count)
        ladder = Ladder(
            tables, theta, torch.linspace(0, 1, self.levels, dtype=theta.dtype, device=theta.device), chains
        )
        ladder.start(generator)
        for _ in range(self.burn_in):
            ladder.run(generator)
        found = [ladder.coldest()]
        while len(found) * chains < count:
            for _ in range(self.thinning):
                ladder.run(generator)
            found.append(ladder.coldest())
        return torch.cat(found)[:count]


class Ladder:
    """Chains of beta theta for several betas, which exchange states between neighbours.

    Args:
        tables: The field's functions.
        theta: Shape (m,).
        betas: Ascending, shape (L,).
        chains: How many of each.
    """

    def __init__(self, tables: Tables, theta: Tensor, betas: Tensor, chains: int) -> None:
        self.sweep = build_sweep(tables, betas.unsqueeze(1) * theta, chains)
        self.energy = Energies(tables, theta)
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

    def coldest(self) -> Tensor:
        """The states of the last beta, (chains, n)."""
        return self.sweep.states().view(self.chains, len(self.betas), -1)[:, -1]


class Energies:
    """theta . T(x) of states as positions of values.

    Args:
        tables: The field's functions.
        theta: Shape (m,).
    """

    def __init__(self, tables: Tables, theta: Tensor) -> None:
        self.tables, self.theta, self.width = tables, theta, max(tables.counts) - 1
        self.pairs = None
        if fits_pairs(tables):
            order = torch.arange(len(tables.counts), device=theta.device)
            constant, matrix = pair_energies(tables, order, theta.unsqueeze(0), self.width)
            first = tables.statistics(torch.zeros_like(order)).to(theta) @ theta
            self.pairs = (first, constant[0, :, 0], matrix[0])

    def __call__(self, places: Tensor) -> Tensor:
        """Shape (...) of states (..., n)."""
        if self.pairs is None:
            return self.tables.statistics(places).to(self.theta) @ self.theta
        first, constant, matrix = self.pairs
        values = torch.arange(1, self.width + 1, device=places.device)
        columns = (places.unsqueeze(-1) == values).flatten(-2).to(matrix)
        return first + columns @ constant + 0.5 * (columns @ matrix * columns).sum(-1)


@dataclass(frozen=True)
class LogPartitionEstimate:
    """log Z from draws.

    Args:
        value: In nats.
        error: Its standard error, by the spread of the weights.
        effective: How many equally weighted draws tell as much. With few, the error is not to be trusted: anneal more
            slowly.
    """

    value: Tensor
    error: Tensor
    effective: Tensor


def anneal(
    tables: Tables, theta: Tensor, steps: int, chains: int, generator: torch.Generator | None
) -> LogPartitionEstimate:
    """log Z by annealed importance sampling (Neal 2001) from independent uniform variables, beta = 0, to beta = 1.

    Args:
        tables: The field's functions.
        theta: Natural parameters, shape (m,).
        steps: Values of beta after zero, each with one sweep.
        chains: Independent runs.
        generator: Source of the draws.

    Returns:
        The logarithm of the mean weight, whose expectation is Z.
    """
    sweep, energy = build_sweep(tables, torch.zeros_like(theta).unsqueeze(0), chains), Energies(tables, theta)
    sweep.start(generator)
    log_weights = theta.new_full((chains,), sum(math.log(count) for count in tables.counts))
    for k in range(1, steps + 1):
        log_weights = log_weights + energy(sweep.states()) / steps
        if k < steps:
            sweep.replace_weights((k / steps * theta).unsqueeze(0))
            sweep.run(generator)
    value = log_weights.logsumexp(0) - math.log(chains)
    weights = (log_weights - value).exp()
    effective = weights.sum().square() / weights.square().sum()
    return LogPartitionEstimate(value, weights.std() / chains**0.5, effective)
