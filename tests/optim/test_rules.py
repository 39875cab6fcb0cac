"""From a proposal to a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, replace

import pytest
import torch
from models import F64, assert_close, cross, draw, mlp
from optim_models import CE, flat, iterate, net, train
from torch import Tensor, nn

import natgrad as ng
from natgrad import rules
from natgrad.rules import FlatStep, GridSearch, MeasuredTrustRegion, NormalisedRate, Quadratic, inner_products

G = torch.diag(torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64))
GRADIENT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
DAMPING = 0.5


def model(rate: float = 1.0, nats: float = 1.0, loss: float = 3.0) -> Quadratic:
    """The quadratic model of a loss with its damped natural step as the proposal."""
    d = -rate * torch.linalg.solve(G + DAMPING * torch.eye(3).to(G), GRADIENT)
    return Quadratic(GRADIENT, ng.operators.DenseOperator(G), DAMPING, FlatStep(d, G @ d), nats, loss)


def true_loss(d: Tensor) -> float:
    """A loss whose quadratic model (without damping) is exact."""
    return 3.0 + float(GRADIENT @ d + 0.5 * d @ G @ d)


class Recorder:
    """loss_at that notes where it was asked."""

    def __init__(self, loss) -> None:
        self.loss, self.asked = loss, []

    def __call__(self, vector: Tensor) -> float:
        self.asked.append(vector.clone())
        return self.loss(vector)


def test_the_quadratic_model_is_what_it_says() -> None:
    m, d = model(), draw(3, seed=1)
    step = FlatStep(d, G @ d)
    assert m.change(step) == pytest.approx(float(GRADIENT @ d + 0.5 * d @ (G + DAMPING * torch.eye(3)) @ d), rel=1e-14)
    assert m.slope(step) == pytest.approx(float(GRADIENT @ d), rel=1e-14)
    assert replace(m, nats=3.0).kl(step) == pytest.approx(float(1.5 * d @ G @ d), rel=1e-14)
    assert not m.nothing().vector.any()


def test_parts_have_the_inner_products_of_the_flat_vector() -> None:
    matrix, other = draw(4, 3), draw(4, 2)
    vector = rules.Parts({"weight": matrix[:, :2], "bias": matrix[:, 2]}, {"weight": 2.0, "bias": -3.0}, 0.5)
    whole = torch.cat([matrix[:, :2].flatten(), -1.5 * matrix[:, 2]])
    assert_close(vector @ vector, whole @ whole)
    assert_close(vector.norm(), whole.norm())
    assert_close(vector.squares(), torch.stack([matrix[:, :2].square().sum(), 2.25 * matrix[:, 2].square().sum()]))
    assert_close(vector["bias"], -1.5 * matrix[:, 2])
    assert_close(vector @ rules.Parts({"weight": other}), (matrix[:, :2] * other).sum())


def test_momentum_is_the_decayed_sum_of_proposals_with_its_image() -> None:
    rule, memory, expected = ng.Momentum(0.8), {}, torch.zeros(3).to(G)
    for rate in (0.1, 0.5, -0.2):
        m = model(rate)
        expected = 0.8 * expected + m.proposal.vector
        kept = {name: v.clone() for name, v in memory.items()}
        step, new = rule.step(m, None, memory)
        assert_close(step.vector, expected, 1e-15)
        assert_close(step.image, G @ expected, 1e-14)
        assert all(torch.equal(memory[name], kept[name]) for name in kept)  # the memory passed in is not changed
        memory = new


@pytest.mark.parametrize("nats", [1.0, 7.0])
@pytest.mark.parametrize("radius", [1e-6, 1e-3, 0.1])
def test_a_trust_region_moves_its_radius_and_lengthens_nothing(radius: float, nats: float) -> None:
    m = model(nats=nats)
    step, _ = ng.TrustRegion(radius).step(m, None, {})
    assert m.kl(step) == pytest.approx(radius, rel=1e-13)
    cosine = step.vector @ m.proposal.vector / (step.vector.norm() * m.proposal.vector.norm())
    assert cosine == pytest.approx(1.0, abs=1e-14)
    assert_close(step.image, G @ step.vector, 1e-14)
    for rule in (ng.TrustRegion(10 * nats), ng.Rate()):  # a proposal inside it, and one of any length
        inside = model(0.1, nats=nats)
        assert torch.equal(rule.step(inside, None, {})[0].vector, inside.proposal.vector)
    zero = FlatStep(torch.zeros(3).to(G), torch.zeros(3).to(G))
    assert not ng.TrustRegion(radius).step(replace(m, proposal=zero), None, {})[0].vector.any()


def test_backtracking_trust_region_takes_the_first_trial_that_does_not_raise_the_loss() -> None:
    m = model()
    full = ng.TrustRegion(0.5).step(m, None, {})[0].vector

    def loss(d: Tensor) -> float:  # good only below a third of the full step
        return 2.9 if d.norm() < full.norm() / 3 else 3.1

    loss_at = Recorder(loss)
    step, _ = ng.TrustRegion(0.5, backtracks=5).step(m, loss_at, {})
    assert_close(step.vector, full / 4, 1e-14)
    assert len(loss_at.asked) == 3


@pytest.mark.parametrize("rule", [ng.LineSearch(backtracks=4), ng.TrustRegion(0.5, backtracks=4)], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.0 + 1e-9])
def test_no_trial_accepted_means_no_step(rule: ng.Rule, bad: float) -> None:
    loss_at = Recorder(lambda d: bad)
    step, _ = rule.step(model(), loss_at, {})
    assert not step.vector.any()
    assert not step.image.any()
    assert len(loss_at.asked) == 4
    unknown, _ = ng.LineSearch().step(model(loss=math.nan), true_loss, {})  # before the step
    assert not unknown.vector.any()


def test_a_loss_that_is_not_a_number_is_a_rejection() -> None:
    loss_at = Recorder(lambda d: math.nan if d.norm() > 0.2 else true_loss(d))
    step, _ = ng.LineSearch().step(model(), loss_at, {})
    assert 0 < step.vector.norm() <= 0.2
    assert true_loss(step.vector) < 3.0


@pytest.mark.parametrize("rate", [0.1, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("sufficient", [0.0, 1e-4, 0.3])
def test_a_line_search_keeps_armijos_promise(rate: float, sufficient: float) -> None:
    m = model(rate)
    step, _ = ng.LineSearch(sufficient=sufficient).step(m, true_loss, {})
    assert step.vector.any()
    assert true_loss(step.vector) <= 3.0 + sufficient * m.slope(step)
    halvings = math.log2(m.proposal.vector.norm() / step.vector.norm())
    assert halvings == pytest.approx(round(halvings), abs=1e-12)
    if round(halvings) > 0:  # the trial before it was refused
        assert true_loss(2 * step.vector) > 3.0 + 2 * sufficient * m.slope(step)


@pytest.mark.parametrize("rule", [ng.TrustRegion(1.0, backtracks=5), ng.LineSearch()], ids=repr)
def test_rules_say_whether_they_need_the_loss(rule: ng.Rule) -> None:
    assert rule.needs_loss
    name = type(rule).__name__
    with pytest.raises(ValueError, match=rf"{name}\(.*re-evaluates the loss: call optimizer.step\(closure\)"):
        rule.step(model(), None, {})
    for other in (ng.Rate(), ng.Momentum(), ng.TrustRegion(1.0)):
        assert not other.needs_loss


WRONG = [(lambda value=value: ng.Momentum(value), f"decay is {value}") for value in (1.0, -0.1, math.nan)]
WRONG += [
    (lambda rule=rule, value=value: rule(value), f"radius is {value}")
    for rule in (ng.TrustRegion, MeasuredTrustRegion, NormalisedRate)
    for value in (0.0, -1.0, math.inf, math.nan)
]
WRONG += [
    (lambda: ng.TrustRegion(1.0, backtracks=-1), "backtracks is -1"),
    (lambda: ng.TrustRegion(1.0, backtracks=2, shrink=1.0), "shrink is 1.0"),
    (lambda: ng.LineSearch(backtracks=0), "backtracks is 0"),
    (lambda: ng.LineSearch(shrink=0.0), "shrink is 0.0"),
    (lambda: GridSearch(trials=0), "trials is 0"),
    (lambda: GridSearch(shrink=1.0), "shrink is 1.0"),
    (lambda: MeasuredTrustRegion(0.1, backtracks=0), "backtracks is 0"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_rules_are_checked_at_the_door(build, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}, expected"):
        build()


RULES = [
    rule(*((0.1,) if "radius" in names and names["radius"].default is MISSING else ()))
    for rule in vars(rules).values()
    if isinstance(rule, type) and issubclass(rule, ng.Rule) and rule is not ng.Rule
    for names in [rule.__dataclass_fields__]
] + [ng.LineSearch(iterates=True), ng.TrustRegion(0.1, backtracks=3)]
"""Each rule that there is."""


def solve_by(solver: ng.Solver) -> Callable[..., ng.NaturalGradient]:
    return lambda m, loss, rule: ng.NaturalGradient(m, ng.fisher(m, loss), rule=rule, solver=solver, damping=0.1)


OPTIMIZERS = {recipe.__name__: recipe for recipe in (ng.kfac, ng.unitwise, ng.hessian_free)} | {
    type(solver).__name__: solve_by(solver)
    for solver in (
        ng.KrylovSubspace(dimension=3),
        ng.Direct(),
        ng.SampleSpace(),
        ng.MinresQLP(),
        ng.Auto(),
        ng.CG(keep=1.3),
    )
}


REST = [name for name in OPTIMIZERS if name not in ("kfac", "KrylovSubspace")]


@pytest.mark.parametrize(("name", "rule"), cross(["kfac", "KrylovSubspace"], REST, RULES), ids=str)
def test_a_rule_that_an_optimizer_cannot_serve_is_refused_when_it_is_built(rule: ng.Rule, name: str):
    model = net()
    try:
        opt = OPTIMIZERS[name](model, CE, rule=rule)
    except ValueError as error:
        assert repr(rule) in str(error)  # noqa: PT017
        return
    before = flat(model)
    train(opt, model, 3)
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize("build", [ng.kfac, ng.ekfac, ng.hessian_free, ng.natgrad_cg], ids=lambda build: build.__name__)
def test_a_measured_kl_is_for_policies(build):
    with pytest.raises(ValueError, match="which only policies give"):
        build(net(), CE, rule=rules.MeasuredTrustRegion(0.1))


# the best length of a step on a logarithmic grid


POINTS, VALUES = draw(8, 2), draw(8, 1, seed=1)


def step_at(lr: float, rule: ng.Rule) -> tuple[Tensor, Tensor]:
    """Parameters before, and the step."""
    model = mlp(2, 4, 1)
    before = flat(model)
    opt = ng.NaturalGradient(model, ng.gauss_newton(model, nn.MSELoss()), lr=lr, damping=1e-3, rule=rule)
    iterate(opt, model, POINTS, VALUES)
    return before, flat(model) - before


def loss_along(before: Tensor, direction: Tensor, length: float) -> float:
    model = mlp(2, 4, 1)
    nn.utils.vector_to_parameters(before + length * direction, model.parameters())
    return float((model(POINTS) - VALUES).square().mean().detach())


@pytest.mark.parametrize("lr", [1.0, 30.0])
def test_the_step_has_the_lowest_loss_on_the_grid(lr: float):
    before, full = step_at(lr, ng.Rate())
    losses = {k: loss_along(before, full, 0.5**k) for k in range(8)}
    best = min(losses, key=losses.__getitem__)
    assert_close(step_at(lr, GridSearch(trials=8))[1], 0.5**best * full, 1e-12)
    assert best > 0 or lr == 1.0
    assert not step_at(1e8, GridSearch(trials=2))[1].any()  # no length lowers the loss


# steps of a given length in nats: a bound on the KL that is measured, and one on the damped form


RADIUS = 0.01


class Bowl:
    """A loss -g . d + bend |d|^4 whose step moves a KL of 1/2 d^T G d + bend |d|^4; counts its trials."""

    def __init__(self, model: Quadratic, bend: float) -> None:
        self.model, self.bend, self.trials = model, bend, 0

    def __call__(self, vector: Tensor) -> float:
        return self.measure(vector)[0]

    def measure(self, vector: Tensor) -> tuple[float, float]:
        self.trials += 1
        more = self.bend * float(vector @ vector) ** 2
        kl = 0.5 * float(vector @ self.model.operator.mv(vector))
        return float(self.model.gradient @ vector) + more, kl + more


def quadratic(damping: float = 0.1, seed: int = 0) -> Quadratic:
    root = draw(5, 7, seed=seed)
    metric, gradient = ng.operators.DenseOperator(root @ root.mT / 7), draw(5, seed=seed + 1)
    found = ng.natural_gradient(metric, gradient, solver=ng.Direct(), damping=damping).value
    return Quadratic(gradient, metric, damping, FlatStep(-found, -metric.mv(found)), loss=0.0)


@pytest.mark.parametrize("bend", [0.0, 1.0, 1e3, 1e8])
def test_a_measured_bound_holds_whatever_the_model_says(bend: float):
    model = quadratic()
    loss_at = Bowl(model, bend)
    step, memory = MeasuredTrustRegion(RADIUS, backtracks=30).step(model, loss_at, {})
    loss, kl = loss_at.measure(step.vector)
    assert memory == {}
    assert 0 < kl <= RADIUS
    assert loss < 0
    torch.testing.assert_close(step.image, model.operator.mv(step.vector))
    if not bend:
        assert kl > 0.6 * RADIUS  # the first trial is a hair beyond the radius, the second one is taken


def test_the_measured_rule_stays_where_nothing_is_gained():
    model = quadratic()
    for broken in (lambda d: (1.0, 0.0), lambda d: (-1.0, math.nan), lambda d: (math.nan, 0.0), lambda d: (-1, 1.0)):
        loss_at = Bowl(model, 0.0)
        loss_at.measure = broken  # type: ignore[method-assign]
        step, _ = MeasuredTrustRegion(RADIUS, backtracks=4).step(model, loss_at, {})
        assert not step.vector.any()


def test_the_measured_rule_asks_for_the_kl():
    with pytest.raises(ValueError, match="measures the KL at trial points"):
        MeasuredTrustRegion(RADIUS).step(quadratic(), lambda d: 0.0, {})


@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_a_normalised_step_has_the_radius_in_its_damped_form(damping: float):
    model = quadratic(damping)
    step, _ = NormalisedRate(RADIUS).step(model, None, {})
    form = step.vector @ (step.image + damping * step.vector)
    torch.testing.assert_close(0.5 * form, torch.tensor(RADIUS, dtype=F64))
    assert model.kl(step) < RADIUS


def test_no_rule_goes_uphill():
    model = quadratic()
    uphill = Quadratic(model.gradient, model.operator, 0.1, model.proposal.scale_by(-1.0), loss=0.0)
    for rule in (MeasuredTrustRegion(RADIUS), NormalisedRate(RADIUS)):
        assert not rule.step(uphill, Bowl(uphill, 0.0), {})[0].vector.any()


@pytest.mark.parametrize("size", [(3, 2, 4, 5), (1, 2, 4, 5), (1,)])
def test_inner_products_are_those_of_every_pair(size: tuple[int, ...]) -> None:
    a, b, c = (draw(*size, seed=seed) for seed in range(3))
    expected = [(x * y).reshape(size[0], -1).sum(1) for x, y in ((a, b), (b, b), (c, a))]
    assert_close(inner_products([(a, b), (b, b), (c, a)]), torch.stack(expected, 1))


@pytest.mark.parametrize("rule", [GridSearch(), NormalisedRate(0.1)])
def test_a_rule_takes_no_step_along_a_gradient_that_is_zero(rule: rules.Rule) -> None:
    model, x = nn.Linear(3, 1).double(), draw(8, 3)
    opt = ng.kfac(model, nn.MSELoss(), rule=rule, momentum=0.0)
    targets = draw(8, 1, seed=1)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = opt.loss(model(x), targets)
        loss.backward()
        return loss

    opt.step(closure)
    before, targets = flat(model), model(x).detach()
    opt.step(closure)
    assert torch.equal(flat(model), before)
    assert opt.state_report().failures == 0
