"""Gibbs sweeps of fields of pairs: conditionals by definition, and a law that is the field's."""

from __future__ import annotations

import pytest
import torch
from models import draw

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
