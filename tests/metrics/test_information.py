"""The information in a log likelihood of one's own, against its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.testing import check_metric

Params = dict[str, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


X = draw(6, 2)


def params(**values: Any) -> Params:
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}


@contextmanager
def skip_validation() -> Iterator[None]:
    """Inside, distributions take what torch.func gives them."""
    distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distributions.Distribution.set_default_validate_args(True)


def link(p: Params, x: Tensor) -> Tensor:
    return 0.3 + x @ p["slopes"]


# a model, the names of its parameters, and nodes y that its expectation over y is summed on: all outcomes, or a grid
POINT = params(slopes=[0.4, -0.7], shape=0.5)
WIDE = torch.linspace(-40, 40, 80_001, dtype=torch.float64)
POSITIVE = torch.linspace(-40, 10, 40_001, dtype=torch.float64).exp()
COUNTS = torch.arange(400.0, dtype=torch.float64)
BOTH, SLOPES = ("slopes", "shape"), ("slopes",)

Case = tuple[Callable[..., distributions.Distribution], tuple[str, ...], Tensor]
CASES: dict[str, Case] = {
    "normal": (lambda p, x: distributions.Normal(link(p, x), p["shape"].exp()), BOTH, WIDE),
    "laplace": (lambda p, x: distributions.Laplace(link(p, x), p["shape"].exp()), BOTH, WIDE),
    "log_normal": (lambda p, x: distributions.LogNormal(link(p, x) / 3, p["shape"]), BOTH, POSITIVE),
    "bernoulli": (lambda p, x: distributions.Bernoulli(logits=link(p, x)), SLOPES, COUNTS[:2]),
    "bernoulli_probs": (lambda p, x: distributions.Bernoulli(probs=link(p, x).sigmoid()), SLOPES, COUNTS[:2]),
    "binomial": (lambda p, x: distributions.Binomial(5, logits=link(p, x)), SLOPES, COUNTS[:6]),
    "geometric": (lambda p, x: distributions.Geometric(logits=link(p, x)), SLOPES, COUNTS),
    "poisson": (lambda p, x: distributions.Poisson(link(p, x).exp()), SLOPES, COUNTS[:120]),
    "exponential": (lambda p, x: distributions.Exponential(link(p, x).exp()), SLOPES, POSITIVE),
    "gamma": (lambda p, x: distributions.Gamma(p["shape"].exp(), link(p, x).exp()), BOTH, POSITIVE),
    "categorical": (
        lambda p, x: distributions.Categorical(logits=torch.stack([link(p, x), p["shape"] * x[:, 0], x[:, 1]], 1)),
        BOTH,
        COUNTS[:3],
    ),
}


def expect_outer_products(model: Callable[..., distributions.Distribution], p: Params, nodes: Tensor) -> Tensor:
    """sum over y of p(y) s s^T by the definition, a mean over the rows of X."""
    widths = torch.ones_like(nodes) if len(nodes) <= len(COUNTS) else torch.gradient(nodes)[0]
    space, total = ng.Space(p), torch.zeros(())

    def log_p(theta: Tensor, x: Tensor) -> Tensor:
        return model(space.unflatten(theta), x.expand(len(nodes), 2)).log_prob(nodes)

    for x in X:
        weights = log_p(space.flatten(p), x).exp() * widths
        scores = torch.func.jacfwd(log_p)(space.flatten(p), x)
        total = total + scores.mT @ (weights.unsqueeze(1) * scores)
    return total / len(X)


@pytest.mark.parametrize("name", CASES)
def test_expected_information_is_the_mean_outer_product_of_scores(name: str) -> None:
    model, names, nodes = CASES[name]
    p, y = {key: POINT[key] for key in names}, torch.ones(len(X), dtype=torch.float64)
    with skip_validation():
        expected = expect_outer_products(model, p, nodes)
    bound = 1e-12 if len(nodes) <= len(COUNTS) else 1e-4  # a grid of .001, and Laplace's kink
    assert_close(ng.fisher(model, p).at(p, (X, y)).dense(), expected, rtol=bound, atol=bound)
    check_metric(ng.fisher(model, p), p, (X, y))


def without(x: Tensor, value: Tensor) -> Tensor:
    """-inf where the last column of x is zero."""
    return torch.where(x[:, -1] > 0, value, -torch.inf)


CERTAIN: dict[str, Callable[..., distributions.Distribution]] = {
    "poisson": lambda p, x: distributions.Poisson(x[:, -1] * link(p, x[:, :2]).exp()),
    "bernoulli": lambda p, x: distributions.Bernoulli(logits=without(x, link(p, x[:, :2]))),
    "categorical": lambda p, x: distributions.Categorical(logits=torch.stack([x[:, 0], without(x, x @ p["all"])], 1)),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_rows_with_a_certain_outcome_have_no_information(name: str) -> None:
    p, y = params(slopes=[0.4, -0.7]) if name != "categorical" else params(all=[0.4, -0.7, 0.2]), torch.zeros(len(X))
    rows = torch.cat([X, torch.tensor([1.0, 1, 0, 1, 0, 1]).double().unsqueeze(1)], 1)
    some = rows[:, -1] > 0
    metric = ng.fisher(CERTAIN[name], p)
    alone = metric.at(p, (rows[some], y[some])).dense()
    assert_close(metric.at(p, (rows, y)).dense(), alone * some.sum() / len(X))


@pytest.mark.parametrize("law", [distributions.Bernoulli, distributions.Geometric, partial(distributions.Binomial, 5)])
def test_outcomes_that_are_nearly_certain_keep_the_digits_of_their_information(law: Any) -> None:
    def measure(p: Params) -> Tensor:
        return ng.fisher(lambda p: law(logits=p["logits"]), p).at(p, torch.zeros(1)).diagonal().double()

    p = params(logits=[15.0, 20.0, -15.0])
    assert_close(measure({"logits": p["logits"].float()}), measure(p), rtol=1e-5, atol=0.0)


def test_information_of_dirichlet_beta_and_independent_entries() -> None:
    p = params(c=[0.7, 1.5, 2.0])
    simplex = draw(4, 3).softmax(1)

    def dirichlet(p: Params) -> distributions.Distribution:
        return distributions.Dirichlet(p["c"])

    expected = torch.diag(torch.polygamma(1, p["c"])) - torch.polygamma(1, p["c"].sum())
    assert_close(ng.fisher(dirichlet, p).at(p, simplex).dense(), expected)

    def beta(p: Params) -> distributions.Distribution:
        return distributions.Beta(p["c"][0], p["c"][1])

    pair = torch.diag(torch.polygamma(1, p["c"][:2])) - torch.polygamma(1, p["c"][:2].sum())
    assert_close(ng.fisher(beta, p).at(p, simplex[:, 0]).dense()[:2, :2], pair)

    def entries(p: Params) -> distributions.Distribution:
        return distributions.Independent(distributions.Exponential(p["c"]), 1)

    assert_close(ng.fisher(entries, p).at(p, simplex).dense(), torch.diag(p["c"] ** -2))


def logistic(p: Params, x: Tensor) -> distributions.Distribution:
    return distributions.Bernoulli(logits=x @ p["slopes"])


def logistic_log_p(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return y * (x @ p["slopes"]) - nn.functional.softplus(x @ p["slopes"])


BITS = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
WEIGHTS = params(slopes=[0.4, -0.7])


def test_observed_information_is_minus_the_second_derivative() -> None:
    share = (X @ WEIGHTS["slopes"]).sigmoid()
    expected = X.mT @ (X * (share * (1 - share)).unsqueeze(1)) / len(X)
    for function in (logistic, logistic_log_p):
        metric = ng.observed_fisher(function, WEIGHTS)
        assert_close(metric.at(WEIGHTS, (X, BITS)).dense(), expected)
        check_metric(metric, WEIGHTS, (X, BITS))


def test_empirical_information_is_the_moment_of_the_rows_scores() -> None:
    scores = X * (BITS - (X @ WEIGHTS["slopes"]).sigmoid()).unsqueeze(1)
    for function in (logistic, logistic_log_p):
        metric = ng.empirical_fisher(function, WEIGHTS)
        check_metric(metric, WEIGHTS, (X, BITS), reference=scores.mT @ scores / len(X))


def test_draws_give_the_expected_information_on_average() -> None:
    exact = ng.fisher(logistic, WEIGHTS).at(WEIGHTS, (X, BITS)).dense()
    draws, repeats = 50, 30
    metric = ng.sampled_fisher(logistic, WEIGHTS, samples=draws, generator=torch.Generator().manual_seed(3))
    found = torch.stack([metric.at(WEIGHTS, (X, BITS)).dense() for _ in range(repeats)])
    error = found.std(0) / repeats**0.5
    assert bool(((found.mean(0) - exact).abs() < 5 * error).all())
    check_metric(metric, WEIGHTS, (X, BITS), draws=True)


def test_draws_take_distributions_without_a_closed_form_and_without_inputs() -> None:
    p = params(logits=[0.1, -0.1], means=[-1.0, 1.0], scales=[1.0, 0.5])

    def mixture(p: Params) -> distributions.Distribution:
        parts = distributions.Normal(p["means"], p["scales"])
        return distributions.MixtureSameFamily(distributions.Categorical(logits=p["logits"]), parts)

    y = draw(7, 1).squeeze(1)
    with pytest.raises(NotImplementedError, match=r"MixtureSameFamily has no closed form here.*sampled_fisher"):
        ng.fisher(mixture, p).at(p, y)
    check_metric(ng.sampled_fisher(mixture, p, samples=3), p, y, draws=True)


DOORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no observations": (
        lambda: ng.fisher(logistic_log_p, WEIGHTS).at(WEIGHTS, (X, BITS)),
        NotImplementedError,
        r"takes all of the data.*ng\.observed_fisher",
    ),
    "no rows": (lambda: ng.fisher(logistic, WEIGHTS).at(WEIGHTS), TypeError, "'inputs' is missing.*tuple of tensors"),
    "unequal rows": (
        lambda: ng.fisher(logistic, WEIGHTS).at(WEIGHTS, (X, BITS[:2])),
        ValueError,
        "one number of rows",
    ),
    "too few tensors": (
        lambda: ng.observed_fisher(logistic_log_p, WEIGHTS).at(WEIGHTS, (X,)),
        ValueError,
        r"takes 2 argument\(s\) after params and the data are 1",
    ),
    "a list of rows": (lambda: ng.fisher(logistic, WEIGHTS).at(WEIGHTS, [1.0]), TypeError, "the data are"),
    "no scalar": (
        lambda: ng.observed_fisher(lambda p, x, y: x * y, WEIGHTS).at(WEIGHTS, (X, BITS)),
        ValueError,
        r"shape \(2,\) for one row, expected a scalar",
    ),
    "a branch": (
        lambda: ng.empirical_fisher(lambda p, x, y: p["slopes"][0] if y > 0 else p["slopes"][1], WEIGHTS).at(
            WEIGHTS, (X, BITS)
        ),
        ValueError,
        r"torch\.where",
    ),
    "outside of the support": (
        lambda: ng.fisher(logistic, WEIGHTS).at(WEIGHTS, (X, 2 * BITS)),
        ValueError,
        "outside of the support of Bernoulli",
    ),
    "shapes": (
        lambda: ng.empirical_fisher(lambda p, x: distributions.Normal(p["slopes"], 1.0), WEIGHTS).at(
            WEIGHTS, (X, BITS)
        ),
        ValueError,
        r"batch shape \(2,\)",
    ),
    "not a distribution": (
        lambda: ng.fisher(lambda p, x: x @ p["slopes"], WEIGHTS).at(WEIGHTS, (X, BITS)),
        TypeError,
        r"returned Tensor, expected a torch\.distributions\.Distribution",
    ),
    "a module": (lambda: ng.fisher(nn.Linear(2, 1), WEIGHTS), TypeError, "for a module give the likelihood"),
    "an option": (lambda: ng.fisher(logistic, WEIGHTS, chunk_size=2), TypeError, "chunk_size is for the outputs"),
    "a list of parameters": (lambda: ng.observed_fisher(logistic, [1.0]), TypeError, "params is list"),
    "integers": (lambda: ng.fisher(logistic, {"slopes": torch.ones(2).long()}).at(
        {"slopes": torch.ones(2).long()}, (X, BITS)), ValueError, "expected a real floating-point tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_doors_say_what_is_wrong(name: str) -> None:
    call, kind, words = DOORS[name]
    with pytest.raises(kind, match=words):
        call()


def test_a_distribution_that_closes_over_its_inputs_has_a_row_for_each_of_them() -> None:
    """n G is the information of n rows, whoever holds the inputs; independent entries of one row are summed."""

    def enclose(p: Params) -> distributions.Distribution:
        return logistic(p, X)

    expected = ng.fisher(logistic, WEIGHTS).at(WEIGHTS, (X, BITS)).dense()
    assert_close(ng.fisher(enclose, WEIGHTS).at(WEIGHTS, BITS).dense(), expected)
    assert_close(ng.observed_fisher(enclose, WEIGHTS).at(WEIGHTS, BITS).dense(), expected)
    sampled = [ng.sampled_fisher(model, WEIGHTS, samples=7) for model in (enclose, logistic)]
    assert_close(sampled[0].at(WEIGHTS, BITS).dense(), sampled[1].at(WEIGHTS, (X, BITS)).dense())
    fits = [ng.maximize_likelihood(enclose, WEIGHTS, BITS), ng.maximize_likelihood(logistic, WEIGHTS, (X, BITS))]
    assert_close(fits[0].standard_errors().covariance, fits[1].standard_errors().covariance)

    def entries(p: Params) -> distributions.Distribution:
        return distributions.Normal(p["slopes"], torch.ones(2, dtype=torch.float64))

    assert_close(ng.fisher(entries, WEIGHTS).at(WEIGHTS, draw(6, 2)).dense(), torch.eye(2, dtype=torch.float64))
    assert_close(ng.fisher(entries, WEIGHTS).at(WEIGHTS, draw(2, 2)).dense(), torch.eye(2, dtype=torch.float64))


def test_rows_of_a_distribution_s_inputs_are_told_apart():
    params, x = {"slope": torch.tensor(0.7, dtype=torch.float64)}, torch.arange(5.0, dtype=torch.float64)
    operator: Any = ng.fisher(lambda params, x: torch.distributions.Normal(params["slope"] * x, 1.0), params).at(
        params, (x, x)
    )
    assert operator.rows.separable
    assert operator.dense() == pytest.approx(6.0)
