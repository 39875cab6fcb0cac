"""Fields beyond exact sums: fits without the constant, log Z by annealing, draws by tempering; held to small ones."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import F64, draw, pair
from torch import Tensor
from torch.testing import assert_close

from natgrad.families import Ising, MarkovField, PseudoLikelihood, RatioMatching, StochasticLikelihood, Tempering


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def potts() -> MarkovField:
    """Variables of two, three and two values, pairs whose statistics are no products."""
    return MarkovField(
        [(0, 1), (-1, 0, 2), (5, 7)],
        [
            ((0, 1), lambda x: x.prod(-1)),
            ((1, 2), lambda x: (x[..., 0] + x[..., 1]).cos()),
            ((0, 2), lambda x: (x[..., 0] * (x[..., 1] - 6)).double()),
            ((1,), lambda x: x[..., 0] ** 2),
            ((2,), lambda x: x[..., 0] - 6),
        ],
    )


FIELDS = {"spins": (Ising(5), 0.4), "bits": (Ising(4, values=(0, 1)), 0.5), "several values": (potts(), 0.5)}
every = pytest.mark.parametrize("name", FIELDS)


def neighbours(field: MarkovField, x: Tensor, i: int) -> Tensor:
    """x with its i-th variable at each of its values, (values, b, n)."""
    found = []
    for value in field.tables.values[i].tolist():
        other = x.clone()
        other[:, i] = value
        found.append(other)
    return torch.stack(found)


def pseudo_likelihood(field: MarkovField, theta: Tensor, x: Tensor) -> Tensor:
    """By definition: log p(x) less log of the sum over one variable's values."""
    terms = [(neighbours(field, x, i)) for i in range(field.n)]
    own = field.statistics(x).to(theta) @ theta
    sums = [(field.statistics(each).to(theta) @ theta).logsumexp(0) for each in terms]
    return -(own.unsqueeze(0) - torch.stack(sums)).sum(0).mean()


def ratio_matching(field: MarkovField, theta: Tensor, x: Tensor) -> Tensor:
    """By definition: sigmoid of the log ratio to every state with one variable changed, squared."""
    own, total = field.statistics(x).to(theta) @ theta, torch.zeros((), dtype=F64)
    for i in range(field.n):
        for other in neighbours(field, x, i):
            ratio = (field.statistics(other).to(theta) @ theta - own).sigmoid()
            total = total + torch.where((other == x).all(1), 0.0, ratio.square()).mean()
    return total


DEFINITIONS = {PseudoLikelihood: pseudo_likelihood, RatioMatching: ratio_matching}


@pytest.mark.parametrize("kind", DEFINITIONS)
@every
def test_a_fit_is_a_minimum_of_its_definition(name, kind):
    ridge = 0.1 if name == "bits" else 0.0
    (field, scale), loss = FIELDS[name], DEFINITIONS[kind]
    x = field.sample(scale * draw(field.size), 300, generator=generator())
    found = field.fit(x, kind(ridge=ridge))
    slope = torch.func.grad(lambda t: loss(field, t, x) + 0.5 * ridge * t.square().sum())(found)
    assert_close(slope, torch.zeros_like(slope), rtol=0, atol=2e-6)
    assert float(loss(field, found, x)) <= float(loss(field, torch.zeros_like(found), x))


@pytest.mark.parametrize(
    ("name", "method"), pair(FIELDS, [PseudoLikelihood(), StochasticLikelihood(steps=60, chains=500), RatioMatching()])
)
def test_fits_approach_the_field_that_was_drawn(name, method):
    """KL to the truth is of the order of parameters over examples; maximum likelihood has half of that."""
    field, scale = FIELDS[name]
    theta = scale * draw(field.size)
    x = field.sample(theta, 4000, generator=generator())
    found = field.fit(x, method, generator=generator(1))
    assert float(field.kl(theta, found)) < 3 * field.size / 4000


def triple() -> MarkovField:
    return Ising(5, [(0,), (1, 2), (0, 1, 3), (2, 3, 4), (4,)])


@pytest.mark.parametrize("field", [Ising(6), potts(), triple()], ids=["pairs", "several values", "triples"])
def test_annealing_finds_the_constant(field):
    theta = 0.8 * draw(field.size)
    for steps in (5, 60):
        found = field.estimate_log_partition(theta, steps=steps, chains=400, generator=generator())
        assert abs(float(found.value - field.log_partition(theta))) < 4.5 * float(found.error)
        assert 1 <= float(found.effective) <= 400
    assert float(found.error) < 0.05


@pytest.mark.parametrize("field", [Ising(4), potts(), triple()], ids=["pairs", "several values", "triples"])
def test_tempered_draws_have_the_moments(field):
    theta = torch.stack([0.7 * draw(field.size), 0.4 * draw(field.size, seed=1)])
    count, sampler = 800, Tempering(burn_in=20, chains=800, levels=4)
    tempered = copy.copy(field)
    tempered.gibbs = sampler
    x = tempered.sample(theta, count, generator=generator())
    assert x.shape == (count, 2, field.n)
    spread = (field.covariance(theta).diagonal(dim1=-2, dim2=-1) / count).sqrt()
    assert bool(((field.statistics(x).mean(0) - field.expectation(theta)).abs() < 6 * spread).all())


def test_a_variable_that_never_changes_needs_a_ridge():
    field, x = Ising(3), torch.ones(50, 3, dtype=F64)
    x[::2, 1:] = -1
    x[::3, 2] = 1
    for method in (PseudoLikelihood(), RatioMatching()):
        with pytest.raises(ValueError, match=r"variable 0.*ridge"):
            field.fit(x, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(torch.isfinite(field.fit(x, PseudoLikelihood(ridge=0.1))).all())


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_variable_that_the_others_tell_in_all_examples_needs_a_ridge(kind):
    """Its theta is infinite: what a fit returns is where it stopped on the way."""
    x = Ising(3).sample(torch.zeros(6, dtype=F64), 100, generator=generator())
    told = torch.cat([x, x[:, :1]], 1)
    with pytest.warns(UserWarning, match="no finite fit.*ridge"):
        Ising(4).fit(told, kind())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ising(4).fit(told, kind(ridge=0.01))
        Ising(3).fit(x, kind())


def test_a_fit_that_does_not_arrive_warns():
    field = Ising(6)
    x = field.sample(0.5 * draw(field.size), 100, generator=generator())
    with pytest.warns(UserWarning, match="gradient of"):
        field.fit(x, PseudoLikelihood(steps=1))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: triple().fit(torch.ones(3, 5)), ValueError, "ridge"),
        (lambda: triple().fit(draw(9, 5).sign(), PseudoLikelihood()), ValueError, "singles and pairs"),
        (lambda: Ising(2).fit(torch.ones(0, 2)), ValueError, "empty"),
        (lambda: Ising(2).fit(torch.zeros(3, 2)), ValueError, "not among"),
        (lambda: Ising(2).fit(torch.ones(3, 2), "pl"), TypeError, "PseudoLikelihood"),
        (lambda: Ising(2).estimate_log_partition(torch.zeros(3), steps=0), ValueError, "steps is 0"),
        (lambda: Ising(2).estimate_log_partition(torch.zeros(3), chains=1), ValueError, "chains is 1"),
        (lambda: Tempering(levels=1), ValueError, "levels is 1"),
        (lambda: StochasticLikelihood(rate=0.0), ValueError, "rate"),
        (lambda: Ising(40).mle(torch.ones(4, 40)), ValueError, r"fit\(x\)"),
    ],
)
def test_errors_name_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
