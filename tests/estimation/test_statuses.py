"""Steps of maximum likelihood that no units change, and statuses that say what is there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import F64, draw, pair
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Distribution, Gamma, Laplace, Normal, Poisson, VonMises
from torch.testing import assert_close

import natgrad as ng

Params = dict[str, Tensor]
ROWS = 300
X = torch.cat([torch.ones(ROWS, 1, dtype=F64), draw(ROWS, 2)], 1)
ETA = X @ torch.tensor([0.3, -1.0, 0.5], dtype=F64)
NOISE = draw(ROWS, seed=3)
BITS = (ETA + NOISE > 0).to(F64)
UNIFORM = torch.rand(ROWS, dtype=F64, generator=torch.Generator().manual_seed(5))
ZERO, BOTH = torch.zeros((), dtype=F64), ("mean", "log_scale")
START = {"slopes": torch.zeros(3, dtype=F64)}


def logistic(p: Params, x: Tensor) -> Distribution:
    return Bernoulli(logits=x @ p["slopes"])


def logistic_log_p(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return -nn.functional.binary_cross_entropy_with_logits(x @ p["slopes"], y)


def poisson(p: Params, x: Tensor) -> Distribution:
    return Poisson((x @ p["slopes"]).exp())


def regression(p: Params, x: Tensor) -> Distribution:
    return Normal(x @ p["slopes"], p["log_scale"].exp())


def normal(p: Params) -> Distribution:
    return Normal(p["mean"], p["log_scale"].exp())


def laplace(p: Params) -> Distribution:
    return Laplace(p["mean"], p["log_scale"].exp())


def fit_quietly(*args: Any, **kwargs: Any) -> ng.estimation.MaximumLikelihood:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ng.maximize_likelihood(*args, **kwargs)


MODELS: dict[str, tuple[Callable[..., Any], Params, tuple[Tensor, ...]]] = {
    "logistic": (logistic, START, (X, BITS)),
    "a log likelihood": (logistic_log_p, START, (X, BITS)),
    "regression": (regression, START | {"log_scale": ZERO}, (X, 3 + ETA + NOISE)),
}


@pytest.mark.parametrize(("name", "dtype"), pair(MODELS, [F64, F64, torch.float32]))
def test_the_path_is_the_same_in_all_units_of_the_parameters(name: str, dtype: torch.dtype) -> None:
    """theta_i -> c_i theta_i: the same points after each step, and the same end."""
    function, start, rows = MODELS[name]
    data = tuple(part.to(dtype) for part in rows)
    start = {key: value.to(dtype) for key, value in start.items()}
    units = {"slopes": torch.tensor([1e-6, 1.0, 1e6], dtype=dtype), "log_scale": torch.tensor(1e3, dtype=dtype)}

    def rescale(p: Params, x: Tensor, *y: Tensor) -> Any:
        return function({key: value / units[key] for key, value in p.items()}, x, *y)

    turned = rescale if name == "a log likelihood" else lambda p, x: rescale(p, x)
    for steps in (1, 3, 100):
        plain, other = (fit_quietly(f, start, data, max_steps=steps) for f in (function, turned))
        assert plain.status == other.status
        assert plain.steps == other.steps
        for key, value in plain.params.items():
            back = other.params[key] / units[key]
            assert_close(back, value, rtol=1e3 * torch.finfo(dtype).eps, atol=1e3 * torch.finfo(dtype).eps)
    assert plain.status == "converged"


@pytest.mark.parametrize(("function", "dtype"), pair([logistic, logistic_log_p], [torch.float32, F64]))
def test_columns_of_any_scale_give_the_same_estimate_and_errors(function: Any, dtype: torch.dtype) -> None:
    sizes = torch.tensor([1.0, 50.0, 1e8], dtype=dtype)
    data = X.to(dtype), BITS.to(dtype)
    start = {"slopes": torch.zeros(3, dtype=dtype)}
    plain = ng.maximize_likelihood(function, start, data)
    fit = ng.maximize_likelihood(function, start, (data[0] * sizes, data[1]))
    tolerance = 1e4 * torch.finfo(dtype).eps
    assert_close(fit.params["slopes"] * sizes, plain.params["slopes"], rtol=tolerance, atol=tolerance)
    errors = fit.standard_errors().values["slopes"] * sizes
    assert_close(errors, plain.standard_errors().values["slopes"], rtol=tolerance, atol=tolerance)


SECOND = (torch.arange(100) % 2).to(F64)  # of two groups
GROUPS = {
    "as a dummy": torch.stack([torch.ones(100, dtype=F64), SECOND, X[:100, 1]], 1),
    "as an effect": torch.stack([torch.ones(100, dtype=F64), 2 * SECOND - 1, X[:100, 1]], 1),
    "as a shifted number": torch.stack([torch.ones(100, dtype=F64), SECOND + 100, X[:100, 1]], 1),
}


def fit_groups(function: Any, columns: Tensor, metric: Any) -> Any:
    """Bits that are all 1 in one of two groups, which one direction separates and no column does by itself."""
    bits = torch.where(SECOND == 1, 1.0, BITS[:100]).to(F64)
    return fit_quietly(function, START, (columns, bits), metric=metric(function, START))


def fit_equal(kind: Callable[[Tensor, Tensor], Distribution]) -> ng.estimation.MaximumLikelihood:
    start, y = {"a": ZERO + 0.5, "b": ZERO + 0.5}, torch.full((20,), 0.3, dtype=F64)
    return fit_quietly(lambda p: kind(p["a"].exp(), p["b"].exp()), start, y)


NO_MAXIMUM: dict[str, tuple[Callable[[], Any], str]] = {
    "a variance that falls to 0": (
        lambda: fit_quietly(normal, dict.fromkeys(BOTH, ZERO), torch.ones(50, dtype=F64)),
        "unbounded",
    ),
    "a scale that falls to 0": (
        lambda: fit_quietly(
            lambda p: Normal(p["mean"], p["scale"]), {"mean": ZERO, "scale": ZERO + 1}, torch.ones(50, dtype=F64)
        ),
        "unbounded",
    ),
    "a loss in place of a log likelihood": (
        lambda: fit_quietly(lambda p, x, y: -logistic_log_p(p, x, y), START, (X, BITS)),
        "unbounded",
    ),
    "a Poisson loss": (
        lambda: fit_quietly(
            lambda p, x, y: -Poisson((x @ p["slopes"]).exp()).log_prob(y), START, (X, torch.floor(3 * UNIFORM))
        ),
        "unbounded",
    ),
    "a normal loss": (
        lambda: fit_quietly(lambda p, y: -normal(p).log_prob(y), dict.fromkeys(BOTH, ZERO), NOISE),
        "unbounded",
    ),
    **{f"equal rows of a {kind.__name__}": (partial(fit_equal, kind), "unbounded") for kind in (Gamma, Beta, VonMises)},
    "one that levels off": (
        lambda: fit_quietly(lambda p, y: -y.square() * (-p["mean"]).exp(), {"mean": ZERO}, NOISE),
        "unbounded",
    ),
    "a fit that starts far along a line that separates": (
        lambda: fit_quietly(logistic, {"slopes": torch.tensor([0.0, 3e3, 0.0], dtype=F64)}, (X, (X[:, 1] > 0).to(F64))),
        "unbounded",
    ),
    **{
        f"a group with ones alone, {code}, {kind}": (partial(fit_groups, function, columns, metric), "unbounded")
        for (code, columns), (kind, function, metric) in pair(
            GROUPS.items(),
            (
                ("expected", logistic, ng.fisher),
                ("observed", logistic_log_p, ng.observed_fisher),
                ("empirical", logistic_log_p, ng.empirical_fisher),
            ),
        )
    },
    "nothing": (lambda: fit_quietly(lambda p, x: (0 * p["slopes"]).sum() * x, START, (NOISE,)), "flat"),
    "a column that comes twice": (
        lambda: fit_quietly(logistic, START, (torch.stack([X[:, 0], X[:, 1], X[:, 1]], 1), BITS)),
        "flat",
    ),
}


@pytest.mark.parametrize("name", NO_MAXIMUM)
def test_without_a_maximum_nothing_has_converged(name: str) -> None:
    fit, status = NO_MAXIMUM[name]
    assert fit().status == status


@pytest.mark.parametrize(("name", "dtype"), pair(["bits", "bits one by one", "counts"], [torch.float32, F64]))
def test_a_plateau_is_left_for_the_maximum(name: str, dtype: torch.dtype) -> None:
    """Where all bits are certain, and where all counts are 0, the information is nothing and the score is not."""
    function: Callable[..., Any] = {"bits": logistic, "bits one by one": logistic_log_p, "counts": poisson}[name]
    data = X.to(dtype), (torch.floor(3 * UNIFORM) if name == "counts" else BITS).to(dtype)
    far = torch.tensor([-40.0 if name == "counts" else 60.0, 0.0, 0.0], dtype=dtype)
    fit = ng.maximize_likelihood(function, {"slopes": far}, data)
    near = ng.maximize_likelihood(function, {"slopes": torch.zeros(3, dtype=dtype)}, data)
    assert_close(fit.params["slopes"], near.params["slopes"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("metric", "mean"), pair([ng.fisher, ng.observed_fisher], [20.0, 1e4, 1e4, 20.0]))
def test_a_mean_far_from_the_start_is_reached(metric: Any, mean: float) -> None:
    start = dict.fromkeys(BOTH, ZERO)
    fit = ng.maximize_likelihood(normal, start, mean + NOISE, metric=metric(normal, start), max_steps=30)
    assert fit.status == "converged"
    assert_close(fit.params["mean"], (mean + NOISE).mean())
    assert_close(fit.params["log_scale"], NOISE.std(correction=0).log())


DOMAINS: dict[str, tuple[Callable[..., Any], Params]] = {
    "Beta": (lambda p: Beta(p["a"], p["b"]), {"a": ZERO + 1, "b": ZERO + 1}),
    "Beta of one row": (lambda p, y: Beta(p["a"], p["b"]).log_prob(y), {"a": ZERO + 1, "b": ZERO + 1}),
    "Dirichlet": (lambda p: Dirichlet(torch.stack([p["a"], p["b"]])), {"a": ZERO + 1, "b": ZERO + 1}),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_no_step_leaves_the_domain_of_a_distribution(name: str) -> None:
    function, start = DOMAINS[name]
    y = 0.05 * UNIFORM**2 + 1e-6
    rows = torch.stack([y, 1 - y], 1) if name == "Dirichlet" else y
    fit = ng.maximize_likelihood(function, start, rows)
    logs = ng.maximize_likelihood(lambda p: Beta(p["a"].exp(), p["b"].exp()), {"a": ZERO, "b": ZERO}, y)
    assert fit.status == "converged"
    assert_close(fit.params["a"], logs.params["a"].exp())
    assert_close(fit.params["b"], logs.params["b"].exp())


def test_a_distribution_outside_of_its_domain_is_refused_at_the_start() -> None:
    function = DOMAINS["Beta of one row"][0]
    with pytest.raises(ValueError, match="nan at the start"):
        ng.maximize_likelihood(function, {"a": ZERO - 0.5, "b": ZERO + 1}, UNIFORM)


def test_a_row_that_a_condition_leaves_out_may_lie_outside_of_the_support() -> None:
    def censor(p: Params, y: Tensor) -> Tensor:
        return torch.where(y > 0, Poisson(p["rate"]).log_prob(y), 0.0)

    y = torch.tensor([-1.0, 2.0, 3.0, 4.0], dtype=F64)
    fit = ng.maximize_likelihood(censor, {"rate": ZERO + 1}, y)
    assert_close(fit.params["rate"], torch.tensor(3.0, dtype=F64))


@pytest.mark.parametrize(("count", "digits"), [(299, 0), (21, 9)])
def test_laplace_ends_at_the_median_also_of_rounded_data(count: int, digits: int) -> None:
    """Where many observations tie, more than a row's share of the gradient is left at the median."""
    y = (3 + 2 * NOISE[:count]).round(decimals=digits)
    fit = ng.maximize_likelihood(laplace, dict.fromkeys(BOTH, ZERO), y)
    assert fit.status in ("kink", "converged")
    assert_close(fit.params["mean"], y.median(), rtol=1e-6, atol=1e-6)
    assert_close(fit.params["log_scale"], (y - y.median()).abs().mean().log(), rtol=0, atol=1e-5)


def test_rounding_that_hides_the_rest_ends_a_fit_without_a_warning() -> None:
    y = (3e5 + 3 * NOISE).float()
    start = {"mean": torch.tensor(3e5), "log_scale": torch.tensor(0.0)}
    assert ng.maximize_likelihood(normal, start, y).status in ("converged", "round_off")


def test_a_likelihood_cut_off_from_its_parameters_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"look for a detach\(\)"):
        ng.maximize_likelihood(lambda p, y: -((y - p["mean"].detach()) ** 2), {"mean": ZERO}, NOISE)


def test_a_weight_counts_rows() -> None:
    def weigh(p: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return weight * logistic_log_p(p, x, y)

    counts = 1 + torch.floor(3 * UNIFORM)
    fit = ng.maximize_likelihood(weigh, START, (X, BITS, counts))
    rows = X.repeat_interleave(counts.long(), 0), BITS.repeat_interleave(counts.long())
    plain = ng.maximize_likelihood(logistic, START, rows)
    assert_close(fit.params["slopes"], plain.params["slopes"])
    assert_close(fit.standard_errors().covariance, plain.standard_errors().covariance)
