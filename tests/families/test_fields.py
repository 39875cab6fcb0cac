"""Markov random fields: the same sums by listing, by elimination and by draws, and sweeps that keep their law."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import F64, draw, tensor
from torch.testing import assert_close

from natgrad.families import Gibbs, Ising, MarkovField
from natgrad.families.gibbs import PairSweep, Sweep, colour_variables
from natgrad.testing import check_operator

GENERATOR = torch.Generator().manual_seed(0)


def chain(n: int) -> list[tuple[int, ...]]:
    return [*((i,) for i in range(n)), *((i, i + 1) for i in range(n - 1))]


def grid(rows: int, columns: int) -> list[tuple[int, ...]]:
    places = [(i, j) for i in range(rows) for j in range(columns)]
    number = {place: k for k, place in enumerate(places)}
    right = [(number[i, j], number[i, j + 1]) for i, j in places if j + 1 < columns]
    down = [(number[i, j], number[i + 1, j]) for i, j in places if i + 1 < rows]
    return [*((k,) for k in range(len(places))), *right, *down]


def potts() -> MarkovField:
    """Variables of two, three and four values on a cycle, statistics that are no products, a variable of no clique."""
    return MarkovField(
        [(0, 1), (-1, 0, 2), (0, 1, 2, 3), (0, 1), (5, 7)],
        [
            ((0,), lambda x: x[..., 0]),
            ((1,), lambda x: x[..., 0].square()),
            ((1, 0), lambda x: x[..., 0] * (x[..., 1] + 1)),
            ((1, 2), lambda x: (x[..., 0] == x[..., 1]).double()),
            ((2, 3), lambda x: (x[..., 0] - 2 * x[..., 1]).abs()),
            ((0, 2, 3), lambda x: x.amax(-1)),
        ],
    )


def by_elimination(family: MarkovField) -> MarkovField:
    """The same field without its list of states."""
    family._table = None
    return family


PAIRS = {
    "chain": (Ising(6, chain(6)), by_elimination(Ising(6, chain(6)))),
    "bits": (Ising(4, values=(0, 1)), by_elimination(Ising(4, values=(0, 1)))),
    "triples": (
        Ising(6, [(0, 2, 5), (1, 3), (4,), (2, 3, 4)]),
        by_elimination(Ising(6, [(0, 2, 5), (1, 3), (4,), (2, 3, 4)])),
    ),
    "potts": (potts(), by_elimination(potts())),
}


@pytest.mark.parametrize("name", PAIRS)
def test_elimination_gives_the_sums_over_all_states(name):
    listed, other = PAIRS[name]
    theta = 0.7 * draw(2, listed.size)
    assert_close(other.log_partition(theta), listed.log_partition(theta))
    assert_close(other.log_partition(theta[0]), listed.log_partition(theta)[0])
    assert_close(other.expectation(theta), listed.expectation(theta))
    assert_close(other.covariance(theta), listed.covariance(theta), rtol=1e-9, atol=1e-11)
    assert_close(other.fisher(theta[0]).dense(), listed.covariance(theta)[0], rtol=1e-9, atol=1e-11)
    assert_close(other.probabilities(theta), listed.probabilities(theta))
    assert_close(other.entropy(theta), listed.entropy(theta))
    log_p = listed.log_prob(theta[0], listed.states)
    assert_close(log_p.exp(), listed.probabilities(theta[0]))


def test_a_field_of_one_s_own_by_definition():
    family, theta = potts(), 0.5 * draw(6)
    total, mean = torch.zeros((), dtype=F64), torch.zeros(6, dtype=F64)
    for x in itertools.product((0, 1), (-1, 0, 2), (0, 1, 2, 3), (0, 1), (5, 7)):
        t = [x[0], x[1] ** 2, x[0] * (x[1] + 1), float(x[1] == x[2]), abs(x[2] - 2 * x[3]), max(x[0], x[2], x[3])]
        weight = (theta @ tensor(t)).exp()
        total, mean = total + weight, mean + weight * tensor(t)
    assert_close(family.log_partition(theta), total.log())
    assert_close(family.expectation(theta), mean / total)


@pytest.mark.parametrize("name", PAIRS)
def test_draws_by_every_road_have_the_right_means(name):
    listed, other = PAIRS[name]
    theta, count = 0.5 * draw(listed.size), 4_000
    gibbs = Gibbs(burn_in=60, chains=2_000, thinning=10)
    places = gibbs.draw(listed.tables, theta, count, GENERATOR)
    found = [listed.sample(theta, count, generator=GENERATOR), other.sample(theta, count, generator=GENERATOR)]
    found.append(listed.tables.points(places, theta))
    spread = (listed.covariance(theta).diagonal() / count).sqrt()
    for x in found:
        assert x.shape == (count, listed.n)
        gap = (listed.statistics(x).mean(0) - listed.expectation(theta)).abs()
        assert float((gap / spread).max()) < 5


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
    theta, chains = (0.1 if name == "a grid" else 0.4) * draw(2, family.size, seed=3), 2000
    sweep = kind(family.tables, colour_variables(family.n, family.tables.cliques), theta, chains)
    sweep.start(GENERATOR)
    for _ in range(25):
        sweep.run(GENERATOR)
    found = family.tables.statistics(sweep.states()).view(chains, 2, -1)
    spread = (family.covariance(theta).diagonal(dim1=-2, dim2=-1) / chains).sqrt()
    assert float(((found.mean(0) - family.expectation(theta)).abs() / spread).max()) < 5
    assert not torch.equal(found[:, 0].mean(0), found[:, 1].mean(0))
    states = sweep.states().flip(0)
    sweep.replace_states(states)
    assert torch.equal(sweep.states(), states)


def test_a_narrow_grid_is_exact_and_its_gradients_flow():
    family = Ising(30, grid(5, 6))
    assert family.exact
    theta = (0.2 * draw(family.size)).requires_grad_()
    (slope,) = torch.autograd.grad(family.log_partition(theta), theta)
    assert_close(slope, family.expectation(theta.detach()))
    check_operator(family.fisher(theta.detach()))


def test_beyond_exact_sums_there_are_draws_with_errors():
    family = Ising(25, gibbs=Gibbs(burn_in=15, thinning=3))  # all pairs
    assert not family.exact
    theta = torch.cat([0.4 * draw(25), torch.zeros(300, dtype=F64)])  # independent, though it does not know
    found = family.estimate(theta, 500, generator=GENERATOR)
    gap = (found.mean[:25] - theta[:25].tanh()).abs() / found.error[:25]
    assert float(gap.max()) < 5
    assert float(gap.square().mean()) < 2.5  # the errors are neither too small
    assert float(gap.square().mean()) > 0.4  # nor too large
    assert found.fisher().size == family.size
    for call in (family.log_partition, family.expectation, family.covariance, family.fisher, family.entropy):
        with pytest.raises(ValueError, match=r"estimate\(theta, n\)"):
            call(theta)
    with pytest.raises(ValueError, match="listed"):
        family.probabilities(theta)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MarkovField([(0, 1), (2,)], [((0,), torch.Tensor.sum)]), ("variable 1", "at least two")),
        (lambda: MarkovField([(0, 1)], [((1,), lambda x: x[..., 0])]), ("(1,)", "0 to 0")),
        (lambda: MarkovField([(0, 1)], []), ("at least one",)),
        (lambda: MarkovField([(0, 1)], [((0,), lambda x: x)]), ("clique (0,)", "(2,)")),
        (lambda: MarkovField([(0, 1)], [((0,), lambda x: x[..., 0].log())]), ("clique (0,)", "finite")),
        (lambda: potts().statistics(tensor([0.0, 1, 0, 0, 5])), ("variable 1", "[-1.0, 0.0, 2.0]")),
        (lambda: potts().statistics(tensor([0.0, 1])), ("(2,)", "(..., 5)")),
        (lambda: Ising(3).statistics(tensor([1.0, -1.0])), ("(2,)", "(..., 3)")),
        (lambda: Ising(3).log_prob(draw(6), tensor([1.0, torch.nan, 1.0])), ("variable 1", "[-1.0, 1.0]")),
        (lambda: Gibbs(burn_in=-1), ("burn_in is -1",)),
        (lambda: Gibbs(chains=0), ("chains is 0",)),
        (lambda: Ising(3).estimate(draw(6), 2), ("n is 2", "at least 4")),
        (lambda: Ising(40).outcomes(draw(820)), ("states", "listed")),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
