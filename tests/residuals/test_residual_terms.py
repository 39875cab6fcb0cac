"""`ng.residuals`: what a term may return and do, what is told of it, and where points are drawn."""

from __future__ import annotations

import math

import pytest
import torch
from residual_nets import draw, perceptron
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.residuals import Field, HardConstraint, Periodic, draw_where_large
from natgrad.residuals.stacked_rows import StackedRows
from natgrad.residuals.system import LinearisedTerms


def written_rows(now: LinearisedTerms) -> Tensor:
    rows = now.operator.rows
    assert isinstance(rows, StackedRows)
    return rows.matrix


def poisson(u: Field, x: Tensor) -> Tensor:
    return ng.laplacian(u, x) + torch.sin(math.pi * x).prod()


class Fourier(nn.Module):
    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 2.0]]).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x @ self.waves), torch.cos(x @ self.waves)], -1)


TANH = nn.Tanh()


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(2, 5), TANH, nn.Linear(5, 5), TANH, nn.Linear(5, 2)).double(),  # one module, used twice
        nn.Sequential(Fourier(), *perceptron(6, 5, 2)),
        HardConstraint(perceptron(2, 5, 2), lambda x: x[:, :1] * (1 - x[:, 1:]), lambda x: torch.sin(x)),
        HardConstraint(
            nn.Sequential(Periodic({0: 1.0}, harmonics=2), *perceptron(5, 4, 1)), lambda x: x[:, 1:].square()
        ),
    ],
)
def test_features_and_constraints_are_part_of_the_forward_pass(net: nn.Module, monkeypatch: pytest.MonkeyPatch):
    def term(u: Field, x: Tensor) -> Tensor:
        return torch.cat([u(x), ng.laplacian(u, x, [0]) - u(x) * ng.time_derivative(u, x), ng.laplacian(u, x)])

    opt, other = (ng.residuals(net, {"inside": term}) for _ in range(2))
    other.system.terms["inside"].is_plain = True  # torch.func alone
    params, points = ng.trainable(net), {"inside": (draw(4),)}
    found, expected = opt.system.linearise(params, points), other.system.linearise(params, points)
    assert opt.system.terms["inside"].networks is not None
    assert other.system.terms["inside"].networks is None
    assert_close(found.residuals, expected.residuals, rtol=1e-10, atol=1e-12)
    assert_close(written_rows(found), written_rows(expected), rtol=1e-9, atol=1e-10)
    assert_close(opt.system.residuals(params, found), found.residuals)


@pytest.mark.parametrize(
    ("returned", "same"),
    [
        (lambda u, x: {"a": u(x) - 1, "b": ng.grad(u, x)}, lambda u, x: torch.cat([u(x) - 1, ng.grad(u, x)])),
        (lambda u, x: [u(x)[0], 2.0], lambda u, x: torch.stack([u(x)[0], x[0] * 0 + 2])),
        (lambda u, x: torch.complex(u(x), x[:1] * u(x)), lambda u, x: torch.cat([u(x), x[:1] * u(x)])),
        (lambda u, x: u(x) - float(x[0]), lambda u, x: u(x) - x[0]),
        (lambda u, x: u(x) if x[0] > 0.5 else 2 * u(x), lambda u, x: torch.where(x[0] > 0.5, u(x), 2 * u(x))),
    ],
)
@pytest.mark.filterwarnings("ignore:natgrad. term:UserWarning")
def test_what_a_term_may_return_and_do(returned, same):
    net, x = perceptron(2, 6, 1), draw(4)
    found, expected = (
        ng.residuals(net, one).system.linearise(ng.trainable(net), {"residual": (x,)}) for one in (returned, same)
    )
    assert_close(found.residuals, expected.residuals)
    assert_close(written_rows(found), written_rows(expected))


def test_networks_that_share_parameters_have_one_derivative():
    trunk = nn.Linear(2, 5).double()
    one, two = (nn.Sequential(trunk, nn.Tanh(), nn.Linear(5, 1).double()) for _ in range(2))
    x = draw(4)
    opt = ng.residuals([one, two], {"inside": lambda u, v, x: u(x) * v(x) + ng.laplacian(v, x)})
    before = [p.detach().clone() for p in nn.ModuleList([one, two]).parameters()]
    residual = torch.stack([one(p[None])[0] * two(p[None])[0] + ng.laplacian(lambda y: two(y[None])[0], p) for p in x])
    parameters = list(nn.ModuleList([one, two]).parameters())
    assert len(parameters) == len(before) == 6
    gradients = torch.autograd.grad(residual.square().sum(1).mean(), parameters)
    named = dict(zip(("unknown0.0", "unknown0.2", "unknown1.2"), (trunk, one[2], two[2]), strict=True))
    params = {f"{name}.{key}": p for name, layer in named.items() for key, p in layer.named_parameters()}
    now = opt.system.linearise(params, {"inside": (x,)})
    assert_close(now.operator.rows.mv(now.residuals), torch.cat([g.reshape(-1) for g in gradients]))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (nn.BatchNorm1d(6), "net.1 is a BatchNorm1d with moments of the batch"),
        (nn.Dropout(0.5), "net.1 is a Dropout in training mode"),
        (Centred(), "for two points at once"),
    ],
)
def test_networks_that_need_a_batch_are_refused(part, words):
    net = nn.Sequential(nn.Linear(2, 6), part, nn.Tanh(), nn.Linear(6, 1)).double()
    with pytest.raises(ValueError, match=words):
        ng.residuals(net, poisson).step(residual=draw(3))
    if not isinstance(part, Centred):
        assert ng.residuals(net.eval(), poisson).step(residual=draw(3)) > 0


def test_a_term_without_derivative_is_told_and_changes_nothing():
    net = perceptron(2, 6, 1, activation=nn.ReLU)
    before = [p.clone() for p in net.parameters()]
    with pytest.warns(UserWarning, match="second derivatives of ReLU"):
        ng.residuals(net, poisson).step(residual=draw(3))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_derivative_that_is_not_finite_is_named():
    net, x = perceptron(2, 6, 1), draw(4)
    x[2] = 0
    opt = ng.residuals(net, {"root": lambda u, x: u(x) + (u(x) * x[0]).square().sqrt()})
    with pytest.raises(ValueError, match=r"derivative of term 'root'.*not finite at point 2, \(0, 0\)"):
        opt.step(root=x)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.rand(4), torch.rand(4), 2), "expected \\(b, d\\)"),
        ((torch.rand(4, 2), torch.rand(3), 2), "expected \\(b, d\\)"),
        ((torch.rand(4, 2), torch.rand(4), 5), "expected at least count, 5"),
        ((torch.rand(4, 2), torch.rand(4) / 0, 2), "NaN or an infinity"),
    ],
)
def test_pools_that_do_not_do_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        draw_where_large(*arguments)


def test_points_are_drawn_by_the_power_of_their_residual_over_its_mean():
    residuals, generator = torch.tensor([1.0, 2.0]).repeat(100_000), torch.Generator().manual_seed(0)
    pool = residuals.unsqueeze(1)
    drawn = draw_where_large(pool, residuals, 10_000, power=2.0, floor=1.0, generator=generator)
    assert float((drawn == 2).double().mean()) == pytest.approx((1.6 + 1) / (0.4 + 1 + 1.6 + 1), abs=0.02)  # 4 errors
    assert len(draw_where_large(pool, torch.zeros(len(pool)), 3)) == 3


class ComplexWave(nn.Module):
    """A complex network of real points."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = torch.complex128
        self.layers = nn.Sequential(nn.Linear(1, 4, dtype=kind), nn.Tanh(), nn.Linear(4, 1, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(torch.complex128))


def test_a_complex_network_takes_the_step_of_its_real_and_imaginary_parts():
    net, points = ComplexWave(), torch.linspace(0, 1, 15, dtype=torch.float64).unsqueeze(1)
    opt = ng.residuals(
        net,
        {"inside": lambda u, x: ng.jacobian(u, x)[:, 0] - 1j * u(x)},
        damping=ng.Constant(0.1),
        scaling=False,
        acceleration=False,
        rule=ng.Rate(),
    )
    parts = {name: p.detach().clone() for name, p in net.named_parameters()}
    assert sum(p.numel() for p in parts.values()) == 26
    assert all(p.dtype == torch.float64 for p in parts.values())

    def residuals(values: dict[str, Tensor]) -> Tensor:
        u = lambda x: torch.func.functional_call(net, values, (x.unsqueeze(0),))[0]  # noqa: E731
        slopes = torch.func.vmap(lambda x: torch.func.jvp(u, (x,), (torch.ones_like(x),))[1])(points)
        gaps = slopes - 1j * torch.func.vmap(u)(points)
        return torch.view_as_real(gaps).flatten() * (2 / len(points)) ** 0.5

    J = torch.cat([part.flatten(1) for part in torch.func.jacrev(residuals)(parts).values()], dim=1)
    r = residuals(parts)
    expected = torch.linalg.solve(J.mT @ J + 0.1 * torch.eye(26, dtype=torch.float64), J.mT @ r)
    loss = opt.step(inside=points)
    moved = torch.cat([(parts[name] - p.detach()).flatten() for name, p in net.named_parameters()])
    assert_close(loss, r.square().sum() / 2)
    assert_close(moved, expected, rtol=1e-9, atol=1e-12)


def test_a_complex_network_of_real_points_is_told_to_convert_them():
    opt = ng.residuals(ComplexWave().layers, {"inside": lambda u, x: u(x)})
    with pytest.raises(RuntimeError) as caught:
        opt.step(inside=draw(4, 1))
    assert any("x.to(torch.complex128)" in note for note in caught.value.__notes__)
