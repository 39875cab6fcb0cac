"""Maximum likelihood: the estimate, its standard errors against closed forms, and what has no maximum."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import F64, draw
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Exponential, MixtureSameFamily, Normal, Poisson
from torch.testing import assert_close

import natgrad as ng

Params = dict[str, Tensor]
X = torch.cat([torch.ones(200, 1, dtype=F64), draw(200, 2)], 1)
UNIFORM = torch.rand(200, dtype=F64, generator=torch.Generator().manual_seed(5))
BITS = ((X @ torch.tensor([0.3, -1.0, 0.5], dtype=F64)).sigmoid() > UNIFORM).to(F64)
START: Params = {"slopes": torch.zeros(3, dtype=F64)}
PAIR: Params = {"slopes": torch.zeros(2, dtype=F64)}


def logistic(p: Params, x: Tensor) -> Distribution:
    return Bernoulli(logits=x @ p["slopes"])


def logistic_log_p(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return y * (x @ p["slopes"]) - nn.functional.softplus(x @ p["slopes"])


def cox(p: Params, x: Tensor, seen: Tensor) -> Tensor:
    """Of all times together, the earliest first."""
    risk = x @ p["slopes"]
    return (seen * (risk - risk.flip(0).logcumsumexp(0).flip(0))).sum()


def mixture(p: Params) -> Distribution:
    share = torch.stack([p["logit"], -p["logit"]])
    return MixtureSameFamily(Categorical(logits=share), Normal(p["means"], p["log_scales"].exp()))


def weighted_gram(slopes: Tensor) -> Tensor:
    """X^T W X of logistic regression, W = p (1 - p)."""
    share = (X @ slopes).sigmoid()
    return X.mT @ (X * (share * (1 - share)).unsqueeze(1))


METRICS: dict[str, Callable[[], Any]] = {
    "expected": lambda: (logistic, ng.fisher(logistic, START)),
    "observed": lambda: (logistic_log_p, ng.observed_fisher(logistic_log_p, START)),
    "empirical": lambda: (logistic_log_p, ng.empirical_fisher(logistic_log_p, START)),
    "sampled": lambda: (logistic, ng.sampled_fisher(logistic, START, samples=20)),
    "default of a distribution": lambda: (logistic, None),
    "default of a log likelihood": lambda: (logistic_log_p, None),
}


@pytest.mark.parametrize("name", METRICS)
def test_every_information_leads_to_the_point_where_the_score_vanishes(name: str) -> None:
    function, metric = METRICS[name]()
    fit = ng.maximize_likelihood(function, START, (X, BITS), metric=metric)
    score = X.mT @ (BITS - (X @ fit.params["slopes"]).sigmoid())
    assert fit.status == "converged"
    # a step of 1e-6 standard errors away: the score in its own standard deviations
    assert float((score @ torch.linalg.solve(weighted_gram(fit.params["slopes"]), score)).sqrt()) < 1e-5
    assert bool((START["slopes"] == 0).all())


def test_standard_errors_of_a_regression_are_those_of_its_weighted_gram_matrix() -> None:
    fit = ng.maximize_likelihood(logistic, START, (X, BITS))
    expected = torch.linalg.inv(weighted_gram(fit.params["slopes"]))
    for metric in (None, ng.observed_fisher(logistic, START)):  # one and the same, for a canonical link
        errors = fit.standard_errors(metric)
        assert_close(errors.covariance, expected)
        assert_close(errors.values["slopes"], expected.diagonal().sqrt())
    log_p = (BITS * (X @ fit.params["slopes"]) - nn.functional.softplus(X @ fit.params["slopes"])).sum()
    assert math.isclose(fit.log_likelihood, float(log_p), rel_tol=1e-12)


def test_standard_errors_are_those_of_the_rows_of_the_fit() -> None:
    x, bits = X.clone(), BITS.clone()
    fit = ng.maximize_likelihood(logistic, START, (x, bits))
    x.zero_()
    assert_close(fit.standard_errors().covariance, torch.linalg.inv(weighted_gram(fit.params["slopes"])))


def test_the_robust_covariance_is_the_sandwich_and_knows_a_wrong_model() -> None:
    y = 2 * X[:, 1] + (1 + 3 * X[:, 2].abs()) * draw(200, seed=3)  # the noise grows, which the model does not know

    def regression(p: Params, x: Tensor) -> Distribution:
        return Normal(x @ p["slopes"], p["log_scale"].exp())

    start = START | {"log_scale": torch.zeros((), dtype=F64)}
    fit = ng.maximize_likelihood(regression, start, (X, y))
    errors = y - X @ fit.params["slopes"]
    inverse = torch.linalg.inv(X.mT @ X)
    expected = inverse @ X.mT @ (X * errors.square().unsqueeze(1)) @ inverse  # White 1980
    robust = fit.standard_errors(ng.observed_fisher(regression, start), robust=True)
    assert_close(robust.covariance[:3, :3], expected, rtol=1e-5, atol=1e-9)
    plain = fit.standard_errors().covariance[:3, :3]
    assert_close(plain, errors.square().mean() * inverse, rtol=1e-5, atol=1e-9)


def test_the_errors_of_two_samples_are_those_of_all_rows() -> None:
    params = {"slopes": torch.tensor([0.2, -0.5, 0.1], dtype=F64)}
    metric = ng.observed_fisher(logistic, params)
    parts = {"early": (X[:60], BITS[:60]), "late": (X[60:], BITS[60:])}
    errors = ng.standard_errors(ng.metrics.sum_metrics(dict.fromkeys(parts, metric)), params, parts)
    assert_close(errors.covariance, ng.standard_errors(metric, params, (X, BITS)).covariance)
    weighted = ng.metrics.sum_metrics(dict.fromkeys(parts, metric), {"late": 2.0})
    with pytest.raises(ValueError, match=r"weights is .* expected none"):
        ng.standard_errors(weighted, params, parts)


def two_logits(p: Params, x: Tensor) -> Tensor:
    logit = x @ p["slopes"]
    return torch.stack([torch.zeros_like(logit), logit], -1)


LABELS, RATES = BITS.long(), torch.tensor([3.0, 0.5], dtype=F64)
GAPS = LABELS.where(torch.arange(200) % 3 > 0, -100)
COUNTED: dict[str, tuple[Any, Tensor, Tensor | None]] = {
    "positions of sequences": (ng.Categorical(), LABELS.view(40, 5), None),
    "ignored targets": (nn.CrossEntropyLoss(), GAPS, None),
    "missing targets": (ng.Masked(ng.Categorical()), GAPS.view(40, 5), None),
    "weighted classes": (nn.CrossEntropyLoss(RATES), LABELS, RATES),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_errors_of_a_model_are_those_of_the_targets_that_it_counts(name: str) -> None:
    criterion, targets, weight = COUNTED[name]

    def loss(slopes: Tensor) -> Tensor:
        logits = two_logits({"slopes": slopes}, X)
        return nn.functional.cross_entropy(logits, targets.view(-1), weight, reduction="sum")

    params, data = {"slopes": torch.tensor([0.2, -0.5, 0.1], dtype=F64)}, (X.view(*targets.shape, 3), targets)
    expected = torch.linalg.inv(torch.func.hessian(loss)(params["slopes"]))
    for metric in (ng.gauss_newton(two_logits, criterion), ng.hessian(two_logits, criterion)):
        assert_close(ng.standard_errors(metric, params, data).covariance, expected)
    if name == "positions of sequences":
        assert_close(ng.standard_errors(ng.fisher(two_logits, criterion), params, data[0]).covariance, expected)


def test_intervals_and_ellipses_hold_their_share_of_the_normal() -> None:
    errors = ng.maximize_likelihood(logistic, START, (X, BITS)).standard_errors()
    ends = errors.intervals(0.95)["slopes"]
    assert_close((ends[:, 1] - ends[:, 0]) / 2, 1.959963984540054 * errors.values["slopes"])
    names = ("slopes[2]", "slopes[0]")
    points = errors.ellipse(names, 0.9) - errors.params["slopes"][[2, 0]]
    part = errors.covariance[[2, 0]][:, [2, 0]]
    reach = (points @ torch.linalg.inv(part) * points).sum(1)
    assert_close(reach, torch.full_like(reach, -2 * math.log(0.1)))  # chi^2 of two degrees: 1 - exp(-r / 2)
    assert "slopes[1]" in str(errors)
    assert "95 % interval" in errors._repr_html_()


def test_transformed_errors_are_those_of_the_other_parametrisation() -> None:
    def by_log(p: Params) -> Distribution:
        return Normal(p["mean"], p["log_scale"].exp())

    def directly(p: Params) -> Distribution:
        return Normal(p["mean"], p["scale"])

    y = draw(50) + 2
    fit = ng.maximize_likelihood(by_log, {name: torch.zeros((), dtype=F64) for name in ("mean", "log_scale")}, y)
    errors = fit.standard_errors().transform(lambda p: {"mean": p["mean"], "scale": p["log_scale"].exp()})
    expected = ng.standard_errors(ng.fisher(directly, errors.params), errors.params, y)
    assert_close(errors.covariance, expected.covariance)
    assert errors.names == ("mean", "scale")


def test_a_direction_that_is_not_identified_is_named_and_left_where_it_was() -> None:
    twice = torch.cat([X, X[:, 1:2]], 1)
    fit = ng.maximize_likelihood(logistic, {"slopes": torch.zeros(4, dtype=F64)}, (twice, BITS))
    plain = ng.maximize_likelihood(logistic, START, (X, BITS))
    assert_close(fit.params["slopes"][1] + fit.params["slopes"][3], plain.params["slopes"][1])
    assert_close(fit.params["slopes"][1], fit.params["slopes"][3])
    with pytest.raises(ValueError, match=r"do not identify 1 slopes\[[13]\] - 1 slopes\[[13]\]"):
        fit.standard_errors()


def test_what_has_no_maximum_is_said() -> None:
    line = (X[:, 1] > 0).to(F64)
    with pytest.warns(UserWarning, match="there is no maximum") as told:
        fit = ng.maximize_likelihood(logistic, START, (X, line))
    assert fit.status == "unbounded"
    assert told[0].filename == __file__
    y = torch.cat([draw(60) - 2, draw(90, seed=1) + 1])
    normal = {"means": y.mean(), "log_scales": y.std(correction=0).log()}  # from elsewhere round-off may part the two
    alike = {"logit": torch.tensor(0.0, dtype=F64)} | {name: value.repeat(2) for name, value in normal.items()}
    with pytest.warns(UserWarning, match="two components start alike"):
        fit = ng.maximize_likelihood(mixture, alike, y)
    assert fit.status == "saddle"
    with pytest.raises(ValueError, match="the information is indefinite"):
        fit.standard_errors()
    with pytest.warns(UserWarning, match="had not settled"):
        fit = ng.maximize_likelihood(mixture, alike | {"means": torch.tensor([-1.0, 1.0], dtype=F64)}, y, max_steps=1)
    assert fit.status == "max_steps"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = fit.params
        assert ng.maximize_likelihood(mixture, start, y).status == "converged"


EDGE = {"mean": torch.tensor(0.0, dtype=F64), "log_scale": torch.tensor(-400.0, dtype=F64)}
DOORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a tolerance that is no length": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS), tolerance=-1.0),
        ValueError,
        "tolerance is -1.0, expected a number >= 0 of standard errors",
    ),
    "a start that is not finite": (
        lambda: ng.maximize_likelihood(
            lambda p: Normal(p["mean"], p["scale"]),
            {"mean": torch.tensor(0.0), "scale": torch.tensor(-1.0)},
            torch.randn(5),
        ),
        ValueError,
        "nan at the start: look for a scale that is not positive",
    ),
    "a start where there is no derivative": (
        lambda: ng.maximize_likelihood(
            lambda p, x: Poisson(x[:, 1].relu() * p["rate"]),
            {"rate": torch.tensor(1.0, dtype=X.dtype)},
            (X, torch.zeros(len(X), dtype=X.dtype)),
        ),
        ValueError,
        "by rate is not finite at the start",
    ),
    "a metric of another function": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS), metric=ng.fisher(mixture, START)),
        ValueError,
        "expected one of the same function",
    ),
    "no metric": (lambda: ng.standard_errors(logistic, START, (X, BITS)), TypeError, "expected a metric such as"),  # type: ignore[arg-type]
    "counts below zero": (
        lambda: ng.maximize_likelihood(lambda p, x: Poisson((x @ p["slopes"]).exp()), START, (X, -BITS)),
        ValueError,
        "outside of the support of Poisson",
    ),
    "times below zero": (
        lambda: ng.maximize_likelihood(
            lambda p: Exponential(p["rate"]), {"rate": torch.tensor(1.0)}, torch.tensor([1.0, -2.0])
        ),
        ValueError,
        "outside of the support of Exponential",
    ),
    "observations in a column": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS.unsqueeze(1))),
        ValueError,
        r"observations have shape \(\d+, 1\): nothing is broadcast",
    ),
    "observations of whole numbers": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS.long())),
        ValueError,
        r"convert them with .double\(\)",
    ),
    "arrays": (
        lambda: ng.maximize_likelihood(logistic, START, (X.numpy(), BITS.numpy())),
        TypeError,
        "convert arrays with torch.as_tensor",
    ),
    "errors of an infinite information": (
        lambda: ng.standard_errors(
            ng.fisher(lambda p: Normal(p["mean"], p["log_scale"].exp()), EDGE), EDGE, torch.zeros(3, dtype=F64)
        ),
        ValueError,
        "the information is not finite: .* a variance of 0",
    ),
    "a spread of one row": (
        lambda: ng.maximize_likelihood(cox, PAIR, (X[None, :, 1:], BITS[None])).standard_errors(robust=True),
        ValueError,
        "the data are one row, whose score is 0",
    ),
    "rows that depend on each other": (
        lambda: ng.maximize_likelihood(cox, START, (X, BITS)),
        IndexError,
        r"called with one row of the data, of shapes \(3,\), \(\).* Derivatives inside .* by torch.func.grad",
    ),
    "params in another type than inputs": (
        lambda: ng.maximize_likelihood(logistic, {"slopes": torch.zeros(3)}, (X, BITS)),
        RuntimeError,
        "params are torch.float32, the data torch.float64",
    ),
    "a list of params": (
        lambda: ng.maximize_likelihood(logistic, [torch.zeros(3)], (X, BITS)),  # type: ignore[arg-type]
        TypeError,
        r"params is list, expected a tensor or a dict of tensors, \{'slopes': torch.zeros\(3\)\}",
    ),
    "inputs of whole numbers": (
        lambda: ng.maximize_likelihood(logistic, START, (X.long(), BITS)),
        RuntimeError,
        "params are torch.float64, the data torch.int64",
    ),
    "a number in another type than its data": (
        lambda: ng.maximize_likelihood(lambda p, y: -((p - y) ** 2), torch.tensor(0.0), BITS),
        ValueError,
        "the log likelihood is torch.float64 and params are torch.float32",
    ),
    "errors of a number": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS)).standard_errors().transform(lambda p: 3.0),  # type: ignore[arg-type, return-value]
        TypeError,
        "function returned float, expected a tensor or a dict",
    ),
    "an unknown entry": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS)).standard_errors().ellipse(["slopes", "slopes[1]"]),
        ValueError,
        r"expected two different ones of slopes\[0\], slopes\[1\], slopes\[2\]",
    ),
    "a level of 95": (
        lambda: ng.maximize_likelihood(logistic, START, (X, BITS)).standard_errors().intervals(95),
        ValueError,
        r"level is 95, expected a number in \(0, 1\)",
    ),
}


@pytest.mark.parametrize("name", DOORS)
def test_doors_say_what_is_wrong(name: str) -> None:
    call, kind, words = DOORS[name]
    with pytest.raises(kind) as caught:
        call()
    assert re.search(words, "".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
