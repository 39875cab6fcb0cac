"""Gaussian search: what holds for every update, the driver around it, and errors at the door."""

from __future__ import annotations

import math

import pytest
import torch
from black_boxes import MODELS, ellipsoid, rosenbrock, sphere
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import IPOP, XNES, LowRank, Ranking, SparsePrecision
from natgrad.search.cma import choose_constants
from natgrad.search.domain import fold, unfold
from natgrad.search.gaussian import draw_orthogonal_normals
from natgrad.search.sparse import eliminate_variables, group_by_neighbours
from natgrad.search.xnes import weigh_places


def generations(search: ng.GaussianSearch, f, count: int) -> None:
    for _ in range(count):
        X = search.ask()
        search.tell(X, f(X))


# The update.


def test_weights_are_those_of_the_tutorial():
    c = choose_constants(10, 10, 55)
    raw = [math.log(5.5) - math.log(i) for i in range(1, 11)]
    positive = [w / sum(w for w in raw if w > 0) for w in raw if w > 0]
    mueff = 1 / sum(w * w for w in positive)
    assert_close(c.recombination, torch.tensor(positive + [0.0] * 5, dtype=torch.float64))
    assert c.mueff == pytest.approx(mueff)
    assert c.c_1 == pytest.approx(1.3 * 2 / ((10 + 1.3) ** 2 + mueff))  # draws are orthogonal: faster by 1.3
    assert float(c.weights[c.weights < 0].sum()) < 0
    assert 1 - c.c_1 - c.c_mu * float(c.weights.sum()) > 0


def test_the_rank_mu_update_is_the_natural_gradient_in_mean_and_covariance():
    """F^-1 grad sum_i w_i log p(x_i) at (m, C), by autograd and the dense Fisher, is (sum w y, sum w (y y^T - C))."""
    torch.manual_seed(0)
    d, popsize = 2, 6
    A = torch.randn(d, d, dtype=torch.float64)
    m, C = torch.randn(d, dtype=torch.float64), A @ A.T + torch.eye(d, dtype=torch.float64)
    x = torch.randn(popsize, d, dtype=torch.float64)
    w = choose_constants(d, popsize, 3).weights
    lower = torch.tril_indices(d, d)

    def log_p(theta: Tensor, x: Tensor) -> Tensor:
        covariance = torch.zeros(d, d, dtype=torch.float64).index_put((lower[0], lower[1]), theta[d:])
        covariance = covariance + covariance.tril(-1).T
        return torch.distributions.MultivariateNormal(theta[:d], covariance).log_prob(x)

    theta = torch.cat([m, C[lower[0], lower[1]]])
    gradient = torch.func.grad(lambda t: (w * log_p(t, x)).sum())(theta)
    q = torch.distributions.MultivariateNormal(m, C)
    fisher = torch.func.hessian(
        lambda t: torch.distributions.kl_divergence(
            q, torch.distributions.MultivariateNormal(t[:d], symmetric(t[d:], d))
        )
    )(theta)
    found = torch.linalg.solve(fisher, gradient)
    y = x - m
    moment = (y.T * w) @ y - w.sum() * C
    assert_close(found[:d], w @ y)
    assert_close(found[d:], moment[lower[0], lower[1]])


def symmetric(entries: Tensor, d: int) -> Tensor:
    lower = torch.tril_indices(d, d)
    half = torch.zeros(d, d, dtype=torch.float64).index_put((lower[0], lower[1]), entries)
    return half + half.tril(-1).T


CYCLE = ((0, 1), (1, 2), (2, 3), (0, 3))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "low rank"])
def test_a_search_finds_the_minimum_and_stops(name: str):
    search = ng.GaussianSearch([3.0, 1.0, 4.0], 1.0, seed=0, model=MODELS[name])
    while not search.stop():
        X = search.ask()
        search.tell(X, ellipsoid(X))
    assert search.best.fun < 1e-10
    assert search.nfev < 4000


@pytest.mark.parametrize("name", MODELS)
def test_only_the_order_of_the_values_matters(name: str):
    one, other = (ng.GaussianSearch([3.0, 1.0], 1.0, seed=0, model=MODELS[name]) for _ in range(2))
    for _ in range(20):
        X, Y = one.ask(), other.ask()
        assert torch.equal(X, Y)
        one.tell(X, sphere(X))
        other.tell(Y, torch.log(sphere(Y)) - 7)


@pytest.mark.parametrize("name", MODELS)
def test_lists_and_rows_in_another_order_say_the_same(name: str):
    given, lists, turned = (ng.GaussianSearch([3.0, 1.0], 1.0, seed=0, model=MODELS[name]) for _ in range(3))
    for _ in range(10):
        X = given.ask()
        assert torch.equal(lists.ask(), X)
        Y = turned.ask().flip(0)
        assert_close(Y.flip(0), X)
        given.tell(X, sphere(X))
        lists.tell(X.tolist(), sphere(X).tolist())
        turned.tell(Y, sphere(Y))
    assert lists.best.fun == given.best.fun


def draw_integers() -> ng.GaussianSearch:
    return ng.GaussianSearch([0.0, 0.0], 2.0, popsize=12, seed=0, integers=[0, 1])


def draw_both() -> ng.search.ProductSearch:
    return ng.search.ProductSearch(draw_integers(), ng.GaussianSearch([0.0], 1.0, popsize=12, seed=1))


@pytest.mark.parametrize("build", [draw_integers, draw_both])
def test_points_that_share_integers_may_come_back_in_another_order(build):
    given, turned = build(), build()
    for _ in range(10):
        X, Y = given.ask(), turned.ask().flip(0)
        assert torch.equal(Y.flip(0), X)
        given.tell(X, sphere(X - 1.3))
        turned.tell(Y, sphere(Y - 1.3))


@pytest.mark.parametrize("name", MODELS)
def test_steps_and_whiten_are_inverse(name: str):
    search = ng.GaussianSearch(torch.ones(5), 1.0, seed=0, model=MODELS[name])
    generations(search, ellipsoid, 15)
    z = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(search.model.whiten(search.state, search.model.steps(search.state, z)), z)


def test_draws_are_orthogonal_d_at_a_time():
    rows = draw_orthogonal_normals(8, torch.zeros(3, dtype=torch.float64), torch.Generator().manual_seed(0))
    for block in rows.split(3):
        products = block @ block.mT
        assert_close(products, torch.diag(products.diagonal()), atol=1e-12, rtol=0)
    assert float((rows[2] @ rows[3]).abs()) > 1e-3  # of different blocks


# Bounds.


@pytest.mark.parametrize(
    "limits", [(-1.0, 2.0), (-math.inf, 2.0), (0.5, math.inf), (1e6, 1e6 + 1), (-math.inf, math.inf)]
)
def test_the_fold_stays_in_the_box_and_unfolds(limits: tuple[float, float]):
    lower, upper = (torch.tensor([v], dtype=torch.float64) for v in limits)
    anywhere = torch.linspace(-50, 50, 4001, dtype=torch.float64).unsqueeze(1) + (lower if limits[0] == 1e6 else 0)
    x = fold(anywhere, lower, upper)
    assert bool(((x >= lower - 1e-9) & (x <= upper + 1e-9)).all())
    assert_close(fold(unfold(x, lower, upper), lower, upper), x, atol=1e-9, rtol=1e-12)


def test_candidates_stay_in_bounds_and_the_minimum_on_the_boundary_is_found():
    lower = torch.tensor([1.0, -3.0, 0.5], dtype=torch.float64)
    search = ng.GaussianSearch([2.0, 0.0, 0.5], 5.0, seed=0, bounds=(lower, 4.0))
    while not search.stop():
        X = search.ask()
        assert bool(((lower <= X) & (X <= 4)).all())
        search.tell(X, sphere(X))
    assert_close(search.best.x, torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), atol=1e-5, rtol=0)


# The driver.


def test_minimize_reaches_the_target():
    result = ng.minimize(rosenbrock, torch.zeros(4), 0.5, ftarget=1e-10, seed=2)
    assert result.success
    assert result.fun <= 1e-10
    assert result.message.startswith("ftarget")
    assert_close(result.x, torch.ones(4, dtype=torch.float64), atol=1e-4, rtol=0)
    assert result.history["nfev"][-1] == result.nfev
    assert result.history["best"][-1] == result.fun
    assert len(result.history) == result.nit


def test_a_callback_sees_the_search_and_may_stop_it():
    result = ng.minimize(sphere, torch.ones(3), 1.0, callback=lambda search: search.nit == 4, seed=0)
    assert result.nit == 4
    assert result.message.startswith("callback")


def test_ctrl_c_leaves_a_result():
    calls = []

    def interrupt_at_five(X: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return sphere(X)

    result = ng.minimize(interrupt_at_five, torch.ones(3), 1.0, seed=0, vectorized=True)
    assert result.nit == 4
    assert result.message.startswith("interrupted")
    assert result.fun == float(sphere(result.x))


@pytest.mark.parametrize("vectorized", [True, False])
def test_a_raising_objective_is_a_worst_value(vectorized: bool):
    def angry(x: Tensor) -> Tensor:
        if bool((x[..., 0] < 0.1).any()):
            raise ArithmeticError("no logarithm")
        return sphere(x)

    with pytest.warns(RuntimeWarning, match="no logarithm") as caught:
        result = ng.minimize(angry, [1.0, 1.0], 0.5, seed=0, maxfevals=600, vectorized=vectorized)
    assert len(caught) == 1
    assert 0.01 <= result.fun < 0.0101


def test_restarts_find_what_one_run_misses():
    def rastrigin(X: Tensor) -> Tensor:
        return (X.square() + 10 * (1 - torch.cos(2 * math.pi * X))).sum(1)

    settings = {"bounds": (-5.0, 5.0), "ftarget": 1e-8, "seed": 1}
    once = ng.minimize(rastrigin, [3.2, 3.2], 1.0, **settings)
    often = ng.minimize(rastrigin, [3.2, 3.2], 1.0, restarts=IPOP(7), **settings)
    assert not once.success
    assert often.success
    assert max(often.history["run"]) >= 1


# Models of the covariance.


def test_xnes_is_the_natural_gradient_to_first_order():
    """At a small rate it moves mean and covariance as the expected weight's natural gradient says."""
    rate, popsize = 1e-5, 6
    model = XNES(rate_mean=rate, rate=rate)
    search = ng.GaussianSearch([1.0, -1.0], 0.5, popsize, seed=0, model=model)
    generator = torch.Generator().manual_seed(0)
    shape = torch.eye(2, dtype=torch.float64) + torch.randn(2, 2, generator=generator, dtype=torch.float64)
    shape = shape / shape.det().abs().sqrt()
    search.state["shape"] = shape
    X = search.ask()
    F = ellipsoid(X)
    search.tell(X, F)
    C = 0.25 * shape @ shape.T
    y = X[F.argsort()] - torch.tensor([1.0, -1.0], dtype=torch.float64)
    u = weigh_places(popsize)
    assert_close((search.mean - torch.tensor([1.0, -1.0])) / rate, u @ y, rtol=1e-6, atol=1e-6)
    moved = search.sigma**2 * search.state["shape"] @ search.state["shape"].T
    assert_close((moved - C) / rate, (y.T * u) @ y - u.sum() * C, rtol=1e-3, atol=1e-3)


def test_the_precision_of_a_chain_is_banded_and_keeps_its_moments():
    d = 6
    search = ng.GaussianSearch(torch.ones(d), 1.0, seed=0, model=SparsePrecision([(i, i + 1) for i in range(d - 1)]))
    generations(search, rosenbrock, 40)
    precision = search.model.precision(search.state)
    far = (torch.arange(d).unsqueeze(0) - torch.arange(d).unsqueeze(1)).abs() > 1
    assert float(precision[far].abs().max()) < 1e-9 * float(precision.abs().max())
    covariance = torch.linalg.inv(precision)
    assert_close(covariance.diagonal(), search.model.variances(search.state), rtol=1e-6, atol=0)
    for rows, blocks in zip(group_by_neighbours(search.model.edges, d), search.state["blocks"], strict=True):
        for row, block in zip(rows, blocks, strict=True):
            assert_close(covariance[row][:, row], block, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("d", [10, 200])
def test_paths_of_a_low_rank_model_forget_at_the_published_rates(d: int):
    """c_sigma = 2 popsize / d and c_j = popsize / (4^j d), at most a half (Loshchilov et al. 2017)."""
    model, popsize, still = LowRank(3), 10, torch.zeros(10, d, dtype=torch.float64)
    state = model.start(still[0], 1.0, popsize)
    state |= {"sigma_path": still[0] + 1, "paths": still[:3] + 1}
    state = model.advance(state, still, still, Ranking.of(torch.arange(10.0)))
    rates = (popsize / d / 4.0 ** torch.arange(3, dtype=torch.float64)).clamp(max=0.5)
    assert_close(state["sigma_path"], still[0] + 1 - min(0.5, 2 * popsize / d))
    assert_close(state["paths"], (1 - rates).unsqueeze(1).expand(3, d))


def test_elimination_makes_a_cycle_chordal():
    order = eliminate_variables(CYCLE, 4)
    assert sum(len(later) for _, later in order) == 5  # four edges and one diagonal
