"""`ng.residuals`: its Jacobian is the derivative of what the terms say, its step the one of the equations."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from models import Assembled
from residual_nets import draw, perceptron
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

import natgrad as ng
from natgrad.residuals import Causal, HardConstraint, Periodic, WhereLarge
from natgrad.residuals.optimizer import DampedSystem
from natgrad.residuals.stacked_rows import StackedRows
from natgrad.testing import check_operator


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Gated(nn.Module):
    """No chain of layers: two of them, multiplied."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(inputs, 5), nn.Linear(inputs, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.one(x)) * torch.sigmoid(self.two(x)))


build_net = partial(perceptron, 2, 6, 5)


def burgers(u, x: Tensor) -> Tensor:
    slope = ng.grad(u, x)
    return slope[1] + u(x) * slope[0] - 0.1 * ng.laplacian(u, x, dims=[0])


TERMS = {
    "Poisson": lambda u, x: ng.laplacian(u, x) + torch.sin(math.pi * x).prod(),
    "value": lambda u, x: u(x) - x[0],
    "Burgers": burgers,
    "two Laplacians": lambda u, x: ng.laplacian(u, x, dims=[0]) - ng.laplacian(u, x, [1]) * u(x),
    "derivative in time": lambda u, x: ng.time_derivative(u, x) ** 2,
    "several residuals": lambda u, x: torch.stack([u(x)[0], ng.grad(u, x)[1], ng.laplacian(u, x)[0]]),
    "a tuple": lambda u, x: (u(x), ng.jacobian(u, x)),
    "another point": lambda u, x: u(x) - u(1 - x),
    "a flux": lambda u, x: ng.divergence_of(lambda y: y[0] * ng.grad(u, y), x),
    "biharmonic": lambda u, x: ng.biharmonic(u, x),
}
NETS = {
    "tanh": lambda: build_net(1),
    "softplus": lambda: build_net(1, activation=nn.Softplus),
    "one's own sine": lambda: build_net(1, activation=Sine),
    "no chain": lambda: Gated(2).double(),
    "constrained linear": lambda: HardConstraint(nn.Linear(2, 1).double(), lambda x: x[:, :1] * (1 - x[:, 1:])),
    "activations at both ends": lambda: nn.Sequential(
        nn.Tanh(), nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 1), nn.Tanh()
    ).double(),
    "constrained": lambda: HardConstraint(build_net(1), lambda x: x[:, :1] * (1 - x[:, 1:]), lambda x: x[:, 1:]),
    "periodic": lambda: nn.Sequential(Periodic({0: 1.0}, harmonics=2), *perceptron(5, 6, 5, 1)),
}


def residual_by_definition(term, net: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The term at one point, by torch.func alone."""
    found = term(lambda y: functional_call(net, params, (y.unsqueeze(0),)).squeeze(0), x)
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([part.reshape(-1) for part in parts])


def jacobian_by_definition(term, net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals (m, b) and their Jacobian (m, b, n), point by point."""
    params = {name: p.detach() for name, p in net.named_parameters()}
    values = torch.stack([residual_by_definition(term, net, params, point) for point in x], dim=1)
    rows = []
    for point in x:
        parts = jacrev(lambda chosen: residual_by_definition(term, net, chosen, point))(params)  # noqa: B023
        rows.append(torch.cat([part.flatten(1) for part in parts.values()], dim=1))
    return values, torch.stack(rows, dim=1)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, [*NETS][(i + k) % len(NETS)]) for i, name in enumerate(TERMS) for k in (0, 3)]
)
def test_residuals_and_jacobian_are_those_of_the_term(name: str, kind: str):
    net, x = NETS[kind](), draw(3)
    opt = ng.residuals(net, {"inside": TERMS[name]}, weights={"inside": 3.0})
    now = opt.system.linearise(ng.trainable(net), {"inside": (x,)})
    values, rows = jacobian_by_definition(TERMS[name], net, x)
    factor = (2 * 3.0 / 3) ** 0.5
    assert_close(now.residuals, factor * values.reshape(-1), rtol=1e-10, atol=1e-12)
    assert_close(now.operator.rows.matrix, factor * rows.flatten(0, 1), rtol=1e-9, atol=1e-10)
    assert_close(opt.evaluate(inside=x)["inside"], values.mT, rtol=1e-10, atol=1e-12)
    assert_close(now.losses["inside"], values.square().sum(0).mean())


def two_terms(net: nn.Module | None = None) -> tuple[ng.residuals.ResidualOptimizer, dict[str, Tensor]]:
    net = build_net(1) if net is None else net
    opt = ng.residuals(net, {"inside": burgers, "edge": TERMS["value"]}, weights={"edge": 10.0})
    return opt, {"inside": draw(4), "edge": draw(3, seed=2)}


def build_scaled() -> nn.Module:
    """A perceptron times a parameter that lies in no layer."""
    return Assembled(
        lambda m, x: m.net(x * m.scale), net=build_net(1), scale=nn.Parameter(torch.tensor([1.5, -0.5]).double())
    )


@pytest.mark.parametrize("build", [lambda: build_net(1), build_scaled], ids=["layers", "a parameter besides"])
def test_layer_by_layer_equals_the_jacobian_written_out(build, monkeypatch: pytest.MonkeyPatch):
    opt, points = two_terms(build())
    params = ng.trainable(opt.model)
    data = {name: (x,) for name, x in points.items()}
    matrix = opt.system.linearise(params, data).operator.rows.matrix
    monkeypatch.setattr(StackedRows, "WRITTEN", 0)
    space = ng.Space(params)
    scales = torch.cat([torch.full((b.size,), 0.5 + i) for i, b in enumerate(space.blocks.values())]).double()
    rows = opt.system.linearise(params, data).operator.rows
    for scaled, expected in ((rows, matrix), (rows.rescale(scales), matrix * scales)):
        w, v = torch.randn(scaled.rank).double(), torch.randn(space.size).double()
        assert_close(scaled.lower_gram().tril(), (expected @ expected.mT).tril())
        assert_close(scaled.moment(), expected.mT @ expected)
        assert_close(scaled.squares(), expected.square().sum(0))
        assert_close(scaled.mv(w), expected.mT @ w)
        assert_close(scaled.rmv(v), expected @ v)


def test_operator_passes_its_checks():
    opt, points = two_terms()
    check_operator(opt.metric.at(ng.trainable(opt.model), points))


def test_networks_and_coefficients_in_one_call():
    net, flow, k = (build_net(1), build_net(2), nn.Parameter(torch.tensor([0.3, 2.0], dtype=torch.float64)))
    term = lambda u, v, k, x: k[0] * ng.laplacian(u, x) + k[1] * ng.divergence_of(v, x) * u(x)  # noqa: E731
    opt = ng.residuals({"u": net, "v": flow, "k": k}, {"inside": term})
    x, params = draw(3), ng.trainable(opt.model)
    assert sorted({name.split(".")[0] for name in params}) == ["k", "u", "v"]

    def at(chosen: dict[str, Tensor], point: Tensor) -> Tensor:
        def call(start: str, module: nn.Module):
            own = {name.removeprefix(start): p for name, p in chosen.items() if name.startswith(start)}
            return lambda y: functional_call(module, own, (y.unsqueeze(0),)).squeeze(0)

        return term(call("u.", net), call("v.", flow), chosen["k"], point)

    start = {name: p.detach() for name, p in params.items()}
    jacobians = [jacrev(at)(start, point) for point in x]
    rows = torch.stack([torch.cat([part.reshape(-1) for part in one.values()]) for one in jacobians])
    assert_close(opt.system.linearise(params, {"inside": (x,)}).operator.rows.matrix, (2 / 3) ** 0.5 * rows)


def test_a_term_with_data_beside_its_points():
    net, x = build_net(1), draw(4)
    y = torch.arange(4.0).double()
    opt = ng.residuals(net, {"data": lambda u, x, y: u(x) - y})
    assert_close(opt.evaluate(data=(x, y))["data"], net(x).detach() - y[:, None])


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_system_is_that_of_its_equation(scaled: bool, momentum: float):
    """(G + level D) x = U w + level D x_0: in parameters and in points, by the default solver and by another."""
    for count in (2, 30):
        net = build_net(1)
        rows = ng.residuals(net, TERMS["Poisson"]).system.linearise(ng.trainable(net), {"residual": (draw(count),)})
        operator, w = rows.operator, torch.randn(count, dtype=torch.float64)
        n = operator.size
        units = torch.rand(n).double() + 0.5 if scaled else None
        before = momentum * torch.randn(n).double()
        metric = torch.diag(torch.ones(n).double() if units is None else units)
        matrix = operator.dense() + 0.1 * metric
        right = operator.rows.matrix.mT @ w + 0.1 * metric @ before
        for solver in (ng.LeastSquares(), ng.Direct()):
            found = DampedSystem(solver, operator, units, 0.1).solve(w, before)
            assert_close(matrix @ found.value, right)
            assert_close(found.image, right)


def test_acceleration_is_half_the_second_derivative_along_the_step():
    """a / 2 with (G + level) a = U r''."""
    opt, points = two_terms()
    operator = opt.metric.at(ng.trainable(opt.model), points)
    system = DampedSystem(ng.LeastSquares(), operator, None, 1e3)
    w, bend = torch.randn(operator.rows.rank).double(), 1e-3 * torch.randn(operator.rows.rank).double()
    plain = system.solve(w)
    found = system.accelerate(plain, bend, 1.0)
    assert found.bend is not None
    assert_close(found.bend, system.solve(bend).value / 2)
    assert_close(found.value, plain.value)
    assert system.accelerate(plain, 1e9 * bend, 1.0) is plain  # longer than the step


def test_the_loss_never_rises_on_the_same_points_and_falls_far():
    net = build_net(1)
    opt = ng.residuals(net, {"inside": TERMS["Poisson"], "edge": lambda u, x: u(x)}, weights={"edge": 10.0})
    inside, edge = draw(60), torch.cat([draw(20) * torch.tensor([1.0, 0.0]), draw(20) * torch.tensor([0.0, 1.0])])
    losses = [float(opt.step(inside=inside, edge=edge)) for _ in range(60)]
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[-1] < 1e-5 * losses[0]
    assert opt.losses.keys() == {"inside", "edge"}
    assert math.isclose(opt.losses["inside"] + 10 * opt.losses["edge"], losses[-1])
    assert opt.state_report().step == 60


def test_a_step_that_would_raise_the_loss_is_solved_again_with_more_damping(monkeypatch: pytest.MonkeyPatch):
    """One step, with one linear model: where a single solution is refused, more damping is tried at once."""

    def first_step(attempts: int) -> tuple[Tensor, ng.optim.StateReport, int]:
        monkeypatch.setattr("natgrad.residuals.optimizer.ATTEMPTS", attempts)
        net, models = build_net(1), []
        opt = ng.residuals(net, {"inside": TERMS["Poisson"], "edge": lambda u, x: u(x)}, weights={"edge": 10.0})
        linearise = opt.system.linearise
        monkeypatch.setattr(opt.system, "linearise", lambda *a: models.append(1) or linearise(*a))
        before = net[0].weight.detach().clone()
        opt.step(inside=draw(60), edge=draw(20) * torch.tensor([1.0, 0.0]))
        return net[0].weight.detach() - before, opt.state_report(), len(models)

    once, _, _ = first_step(1)
    again, report, models = first_step(5)
    assert not once.any()  # the start's damping is too small for it
    assert again.any()
    assert (report.step, models) == (1, 1)
    assert report.damping > 1e-3


def test_a_run_goes_on_bit_for_bit():
    def train(opt, steps: range) -> None:
        for i in steps:
            opt.step(inside=draw(8, seed=i), edge=draw(4, seed=100 + i))

    def fresh():
        unknowns = {"u": build_net(1), "k": nn.Parameter(torch.ones((), dtype=torch.float64))}
        terms = {"inside": lambda u, k, x: k * burgers(u, x) - 1, "edge": lambda u, k, x: TERMS["value"](u, x)}
        return ng.residuals(unknowns, terms, momentum=0.5)

    whole = fresh()
    train(whole, range(6))
    first = fresh()
    train(first, range(3))
    saved, weights = first.state_dict(), {k: v.clone() for k, v in first.model.state_dict().items()}
    second = fresh()
    second.model.load_state_dict(weights)
    second.load_state_dict(saved)
    train(second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))
    assert second.model.k.item() != 1.0


def test_a_residual_that_is_not_finite_is_named():
    net = build_net(1)
    x = draw(4)
    x[2, 0] = 0.0
    opt = ng.residuals(net, {"root": lambda u, x: u(x) / x[0]})
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"term 'root' is not finite at 1 of 4 points.*at point 2, \(0, "):
        opt.step(root=x)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    skipping = ng.residuals(net, {"root": lambda u, x: u(x) / x[0]}, on_trouble="skip")
    assert torch.isnan(skipping.step(root=x))
    assert skipping.state_report().failures == 1


@pytest.mark.parametrize(
    ("points", "error", "words"),
    [
        ({}, ValueError, "no points for \\['inside'\\]"),
        ({"inside": draw(3), "edge": draw(3)}, ValueError, "which is no term: call step\\(inside=...\\)"),
        ({"inside": draw(3).numpy()}, TypeError, "convert with torch.as_tensor"),
        ({"inside": draw(3)[:, 0]}, ValueError, "expected points \\(b, d\\)"),
        ({"inside": draw(3).float()}, ValueError, "convert with"),
        ({"inside": (draw(3), draw(3).float())}, ValueError, r"convert with inside\[1\]\.to\(torch\.float64\)$"),
        ({"inside": draw(3)[:0]}, ValueError, "at least one"),
        ({"inside": draw(3) / 0}, ValueError, "NaN or an infinity"),
        ({"inside": 3.0}, TypeError, "expected points"),
        ({"inside": (draw(3), draw(2))}, ValueError, "the same number of points"),
    ],
)
def test_unusable_points_are_refused(points, error, words):
    opt = ng.residuals(build_net(1), {"inside": TERMS["Poisson"]})
    with pytest.raises(error, match=words):
        opt.step(**points)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, TERMS), TypeError, "net is int"),
        (({"u": 3.0}, TERMS), TypeError, "wrap a number"),
        (({"u": build_net(1), "k": 3.0}, TERMS), TypeError, r"tensor\(1\.0, dtype=torch\.float64\)"),
        (({"k": nn.Parameter(torch.ones(2)), "u": build_net(1)}, TERMS), ValueError, r"net\['k'\] is torch\.float32"),
        (({"u": build_net(1), "v": nn.Linear(2, 1)}, TERMS), ValueError, r"v\.to\(torch\.float64\)"),
        (({}, TERMS), ValueError, "net is empty"),
        ((build_net(1), {}), TypeError, "expected a dict of functions"),
        ((build_net(1), {"inside": 3}), TypeError, "expected a function"),
        ((build_net(1), TERMS, {"outside": 1.0}), ValueError, "which is no term"),
        ((build_net(1), TERMS, [1, 10]), TypeError, "weights is list, expected a dict from names of terms"),
        ((build_net(1), TERMS, {"value": -1.0}), ValueError, "expected a finite number > 0"),
        ((build_net(1), TERMS, {"value": torch.ones(3)}), ValueError, "data of the term"),
    ],
)
def test_unusable_systems_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        ng.residuals(*arguments)


def test_evaluate_is_told_the_terms_that_there_are():
    opt = ng.residuals(build_net(1), {"inside": TERMS["Poisson"], "edge": TERMS["value"]})
    assert list(opt.evaluate(edge=draw(3))) == ["edge"]
    for points in ({}, {"other": draw(3)}):
        with pytest.raises(ValueError, match=r"evaluate got .*: call evaluate\(inside=\.\.\., edge=\.\.\.\)"):
            opt.evaluate(**points)


def test_a_weight_may_be_a_scalar_tensor():
    opt = ng.residuals(build_net(1), {"inside": TERMS["Poisson"]}, {"inside": torch.tensor(3.0)})
    assert opt.system.weights == {"inside": 3.0}


def test_a_term_of_deepxde_s_order_is_told_the_order():
    opt = ng.residuals(build_net(1), {"inside": lambda x, u: ng.laplacian(u, x)})
    with pytest.raises(TypeError, match="called as term\\(u, x\\): first its unknowns"):
        opt.step(inside=draw(3))


def test_a_wrong_argument_of_fit_is_told_the_right_ones():
    opt = ng.residuals(build_net(1), {"inside": TERMS["Poisson"]})
    with pytest.raises(TypeError, match="it has no argument 'iterations'; expected fit\\(steps, sample"):
        opt.fit(iterations=5, sample={"inside": draw(3)})
    with pytest.raises(TypeError, match="sample is called with a"):
        opt.fit(5, lambda: {"inside": draw(3)})


def test_an_error_in_a_term_names_the_term():
    opt = ng.residuals(build_net(1), {"inside": lambda u, x: x[5]})
    with pytest.raises(IndexError) as caught:
        opt.step(inside=draw(3))
    assert any("the term 'inside'" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="term 'residual' returned float"):
        ng.residuals(build_net(1), lambda u, x: 1.0).step(residual=draw(3))
    with pytest.raises(ValueError, match=r"ng\.jacobian"):
        ng.residuals(build_net(2), ng.grad).step(residual=draw(3))
    with pytest.raises(ValueError, match="one component per coordinate"):
        ng.residuals(build_net(1), ng.divergence_of).step(residual=draw(3))


def test_constraints_and_periods_hold_for_any_weights():
    net = NETS["constrained"]()
    edge = torch.stack([torch.zeros(4), torch.arange(4.0)], 1).double()
    assert_close(net(edge), edge[:, 1:])
    periodic = NETS["periodic"]()
    x = draw(5)
    assert_close(periodic(x), periodic(x + torch.tensor([3.0, 0.0]).double()))
    with pytest.raises(ValueError, match="expected one number for each"):
        HardConstraint(build_net(1), lambda x: x)(x)
    with pytest.raises(ValueError, match="a period > 0"):
        Periodic({0: 0.0})
    with pytest.raises(ValueError, match="names coordinate 7"):
        Periodic({7: 1.0})(x)


def test_weights_of_points_are_those_of_their_equations():
    net, x = build_net(1), draw(5)
    x[3, 1] = x[1, 1]  # two points of one time
    term = TERMS["Poisson"]
    values = ng.residuals(net, term).evaluate(residual=x)["residual"][:, 0]
    earlier = torch.stack([values[x[:, 1] < t].square().sum() for t in x[:, 1]])
    sizes = values.abs() / values.abs().mean()
    for weights, expected in ((Causal(0.3), torch.exp(-0.3 * earlier)), (WhereLarge(share=0.4), 0.4 * sizes + 0.6)):
        opt = ng.residuals(net, {"inside": term}, point_weights={"inside": weights})
        now = opt.system.linearise(ng.trainable(net), {"inside": (x,)})
        assert_close(now.loss, (expected * values.square()).mean())
        assert_close(now.losses["inside"], values.square().mean())
    with pytest.raises(ValueError, match="which is no term"):
        ng.residuals(net, {"inside": term}, point_weights={"outside": Causal(1.0)})
    with pytest.raises(TypeError, match="another PointWeights"):
        ng.residuals(net, {"inside": term}, point_weights={"inside": 1.0})
    with pytest.raises(ValueError, match="epsilon"):
        Causal(-1.0)
    with pytest.raises(ValueError, match="share"):
        WhereLarge(share=2.0)
