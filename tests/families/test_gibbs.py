"""Gibbs sweeps of fields of pairs: conditionals by definition, and a law that is the field's."""

from __future__ import annotations

import pytest
import torch
from models import draw
from torch import Tensor
from torch.testing import assert_close

from natgrad.families import Ising, MarkovField
from natgrad.families.gibbs import PairSweep, Sweep, colour_variables

GENERATOR = torch.Generator().manual_seed(0)


def mixed_field() -> MarkovField:
    """Variables of two, three and four values, singles and pairs, one pair twice, one variable without any."""
    return MarkovField(
        [(0, 1), (-1, 0, 2), (0, 1, 2, 3), (5, 7), (0, 1)],
        [
            ((0,), lambda x: x[..., 0]),
            ((1,), lambda x: x[..., 0].square()),
            ((0, 1), lambda x: x[..., 0] * (x[..., 1] + 1)),
            ((1, 2), lambda x: (x[..., 0] == x[..., 1]).double()),
            ((2, 3), lambda x: (x[..., 0] - 2 * x[..., 1]).abs()),
            ((1, 2), lambda x: (x[..., 0] < x[..., 1]).double()),
        ],
    )


FIELDS = {
    "spins": lambda: Ising(5),
    "bits": lambda: Ising(4, values=(0, 1)),
    "a grid": lambda: Ising(6, [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)], values=(-2, 3)),
    "many values": mixed_field,
}


def sweep_of(family: MarkovField, theta: Tensor, chains: int) -> PairSweep:
    return PairSweep(family.tables, colour_variables(family.n, family.tables.cliques), theta, chains)


@pytest.mark.parametrize("name", FIELDS)
def test_energies_are_rows_of_a_matrix_times_the_state(name):
    family = FIELDS[name]()
    theta = 0.7 * draw(2, family.size)
    states = family.tables.every_state()
    energy = theta @ family.tables.statistics(states).mT  # (B, S)
    sweep = sweep_of(family, theta, len(states))
    sweep._write(states[:, sweep.order].mT.expand(2, -1, -1), sweep.state)
    assert torch.equal(sweep.states(), states.repeat_interleave(2, 0))
    rise = (sweep.constant + sweep.matrix @ sweep.state).unflatten(1, (family.n, sweep.width))
    place = {tuple(state): k for k, state in enumerate(states.tolist())}
    for k, state in enumerate(states.tolist()):
        for rank, variable in enumerate(sweep.order.tolist()):
            for value in range(1, family.tables.counts[variable]):
                there, zero = list(state), list(state)
                there[variable], zero[variable] = value, 0
                expected = energy[:, place[tuple(there)]] - energy[:, place[tuple(zero)]]
                assert_close(rise[:, rank, value - 1, k], expected)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("kind", [PairSweep, Sweep], ids=lambda k: k.__name__)
def test_a_sweep_leaves_the_field_s_law_as_it_is(name, kind):
    """Two thetas at once; both ways to sweep have the field's means after some sweeps from uniform states."""
    family = FIELDS[name]()
    theta, chains = (0.1 if name == "a grid" else 0.4) * draw(2, family.size, seed=3), 4000
    sweep = kind(family.tables, colour_variables(family.n, family.tables.cliques), theta, chains)
    sweep.start(GENERATOR)
    for _ in range(25):
        sweep.run(GENERATOR)
    found = family.tables.statistics(sweep.states()).view(chains, 2, -1)
    spread = (family.covariance(theta).diagonal(dim1=-2, dim2=-1) / chains).sqrt()
    assert float(((found.mean(0) - family.expectation(theta)).abs() / spread).max()) < 5
    assert not torch.equal(found[:, 0].mean(0), found[:, 1].mean(0))
