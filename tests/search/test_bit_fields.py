"""Random fields over bits: the regression form of the natural gradient, statistics, and draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from natgrad.search import natural_slope
from natgrad.search.markov import StructureLearner
from natgrad.search.monomials import Monomials, Sites, draw_signs, group_independent_sites
from natgrad.search.relaxation import weigh_past_draws


def list_signs(n: int) -> Tensor:
    """The 2^n states as signs, shape (2^n, n)."""
    return 2.0 * ((torch.arange(2**n).unsqueeze(1) >> torch.arange(n)) & 1).double() - 1


def field(n: int, seed: int = 0) -> tuple[Monomials, Tensor]:
    monomials = Monomials.within(n, [(0, 1, 2), (2, 3)])
    generator = torch.Generator().manual_seed(seed)
    return monomials, 0.4 * torch.randn(len(monomials), generator=generator, dtype=torch.float64)


# The natural gradient as a regression.


def test_the_slope_is_the_fisher_matrix_s_solution():
    """Over all states, weighted by p: Cov(T, T)^-1 Cov(T, f), the covariances being derivatives of psi and E_p[f]."""
    monomials, theta = field(4)
    states = list_signs(4)
    T = monomials.values(states)
    f = torch.randn(16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = torch.softmax(T @ theta, 0)
    fisher = torch.autograd.functional.hessian(lambda t: torch.logsumexp(T @ t, 0), theta)
    gradient = torch.autograd.functional.jacobian(lambda t: torch.softmax(T @ t, 0) @ f, theta)
    assert_close(natural_slope(T, f, p, ridges=(0.0,)).value, torch.linalg.solve(fisher, gradient))


def test_the_slope_is_exact_in_the_span_whatever_the_draws():
    monomials, theta = field(6)
    signs = 2.0 * torch.randint(0, 2, (40, 6), generator=torch.Generator().manual_seed(0)).double() - 1
    T = monomials.values(signs)
    found = natural_slope(T, T @ theta + 3)
    assert_close(found.value, theta, rtol=1e-5, atol=1e-5)
    assert found.explained == pytest.approx(1, abs=1e-6)
    integers = T.int(), T.int().sum(1), torch.arange(40)
    assert_close(natural_slope(*integers).value, natural_slope(*(each.float() for each in integers)).value)


@pytest.mark.parametrize("count", [12, 60])
@pytest.mark.parametrize("noise", [0.0, 0.3, 10.0])
def test_the_ridge_is_the_one_that_explains_most(count: int, noise: float):
    """All ridges are judged in two products: as each alone would be."""
    generator = torch.Generator().manual_seed(1)
    T = torch.randn(count, 20, generator=generator, dtype=torch.float64)
    f = T[:, 0] + noise * torch.randn(count, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    ridges = (1e-3, 1e-2, 0.1, 1.0, 10.0)
    alone = [natural_slope(T, f, weights, ridges=(ridge,)) for ridge in ridges]
    best = max(alone, key=lambda slope: slope.explained)
    found = natural_slope(T, f, weights, ridges=ridges)
    assert found.ridge == best.ridge
    assert found.explained == pytest.approx(best.explained, rel=1e-12)
    assert_close(found.value, best.value)


def test_reused_draws_have_the_means_of_the_present_distribution():
    monomials, theta = field(4)
    states = list_signs(4)
    T = monomials.values(states)
    generator = torch.Generator().manual_seed(0)
    start = torch.ones(40_000, 4, dtype=torch.float64)
    old = draw_signs(monomials, 0.3 * theta, start, 5, generator)
    older = draw_signs(monomials, -0.2 * theta, start, 5, generator)
    ratios = torch.cat([monomials.values(old) @ (0.7 * theta), monomials.values(older) @ (1.2 * theta)])
    weights = weigh_past_draws(ratios, torch.tensor([3, 5]).repeat_interleave(40_000))
    expected = torch.softmax(T @ theta, 0) @ T
    found = weights @ monomials.values(torch.cat([old, older]))
    assert_close(found, expected, atol=5 / 40_000**0.5, rtol=0)  # five standard errors of one generation


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_learned_structure_is_that_of_the_function_and_no_more(noise: float):
    """A lattice of spins with a product of three bits on one of its edges, from fewer draws than it has spare sets."""
    generator = torch.Generator().manual_seed(0)
    sites = torch.arange(25).reshape(5, 5)
    across, down = torch.stack([sites[:, :-1], sites[:, 1:]], 2), torch.stack([sites[:-1], sites[1:]], 2)
    edges = [tuple(edge) for edge in torch.cat([across.flatten(0, 1), down.flatten(0, 1)]).tolist()]
    structure = Monomials.of(25, [*edges, (0, 1, 24), (12,)])
    signs = 2 * torch.randint(0, 2, (1200, 25), generator=generator).to(torch.float64) - 1
    values = structure.values(signs) @ torch.where(torch.arange(len(structure)) % 3 == 0, 1.0, -1.0).double()
    values += noise * torch.randn(1200, generator=generator, dtype=torch.float64)
    monomials, slope = StructureLearner(signs.shape[1], 6).learn(signs, values)
    assert {s for s in monomials.sets if len(s) > 1} == {*edges, (0, 1, 24)}
    assert slope.explained == pytest.approx(1 - noise**2 / 42, abs=1e-3)


@pytest.mark.parametrize("listed", [12, 0])
def test_draws_have_the_model_s_means(listed: int, monkeypatch: pytest.MonkeyPatch):
    """By the list of states, and by Gibbs sampling, of which some signs are drawn at once."""
    monkeypatch.setattr("natgrad.search.monomials.ENUMERATED", listed)
    monomials, theta = field(5)
    T = monomials.values(list_signs(5))
    start = torch.ones(20_000, 5, dtype=torch.float64)
    signs = draw_signs(monomials, theta, start, 20, torch.Generator().manual_seed(0))
    assert_close(monomials.values(signs).mean(0), torch.softmax(T @ theta, 0) @ T, atol=5 / 20_000**0.5, rtol=0)


@pytest.mark.parametrize(
    "cliques", [[(0, 1), (1, 2), (3, 4)], [(0, 1, 2), (2, 3), (1, 3, 4)]], ids=["pairs", "triples"]
)
def test_the_fields_of_sites_are_the_differences_of_the_energy(cliques):
    """h_i = (theta T(s, s_i = 1) - theta T(s, s_i = -1)) / 2, for groups that share no set and hold every sign once."""
    monomials = Monomials.within(5, cliques)
    theta = torch.randn(len(monomials), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signs = list_signs(5)
    groups = [Sites.of(monomials, sites) for sites in group_independent_sites(monomials, list(range(5)))]
    assert sorted(torch.cat([group.sites for group in groups]).tolist()) == [0, 1, 2, 3, 4]
    for group in groups:
        found = group.field(torch.cat([signs, torch.ones(32, 1)], 1), group.read_weights(theta))
        for column, i in enumerate(group.sites.tolist()):
            up, down = signs.clone(), signs.clone()
            up[:, i], down[:, i] = 1, -1
            assert_close(found[:, column], (monomials.values(up) - monomials.values(down)) @ theta / 2)
        for s in monomials.sets:
            assert len(set(s) & set(group.sites.tolist())) <= 1
