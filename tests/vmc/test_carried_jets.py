"""The forward Laplacian: every operation beside two double backward passes, and what happens where one is not known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from models import Assembled
from torch import Tensor, nn
from torch.nn import functional
from wave_functions import Formula

import natgrad as ng
from natgrad import vmc
from natgrad.ground.jets import NotCarriedError
from natgrad.vmc import continuous

F64 = torch.float64
WEIGHT = torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=F64)
PLACES = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(4), dtype=F64)


def draw(count: int = 7) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1), dtype=F64)


def spread(x: Tensor) -> Tensor:
    """Six numbers above one, each of all coordinates."""
    return 1.5 + (x @ WEIGHT[0].expand(6, 6) + x).square()


def pick(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    c, d = a[:, 0], x[..., 3]
    e, f, *_ = x.unbind(1)
    g, h = x.split(3, dim=1)
    return (a * b).sum(1) + c * d + e / (2 + f.square()) + (g * h.flip(1)).select(1, 2)


def reshape(x: Tensor) -> Tensor:
    y = x.unflatten(1, (2, 3)).sin()
    z = y.mT.transpose(1, 2).movedim(2, 1).permute(0, 2, 1).swapaxes(1, 2).reshape(len(x), 2, 3)
    t = z.unsqueeze(1).expand(-1, 2, -1, -1).flatten(1).view(x.shape[0], -1).repeat(1, 2).contiguous().clone()
    u = t.roll(1, 1).narrow(1, 0, 4) * torch.diff(t, dim=1).index_select(1, torch.tensor([0, 3, 5, 2]))
    v = y.squeeze(0).tile(1, 1, 1).repeat_interleave(2, 1).cumsum(1).triu().tril(1).to(F64).double()
    return u.sum(1) + (v.positive() * y[:, :1]).mean((1, 2)) + (-y).neg().negative().diagonal(dim1=1, dim2=2).sum(1)


def multiply(x: Tensor) -> Tensor:
    y = torch.tanh(nn.functional.linear(x, WEIGHT, torch.ones(5, dtype=F64)))
    z = y.unsqueeze(2) @ y.unsqueeze(1) + torch.einsum("bi,bj->bij", y, y.cos())
    z = torch.bmm(z, WEIGHT[:, :5].expand(len(x), 5, 5)) + torch.matmul(WEIGHT[:, 1:], z)
    w = torch.mm(x, WEIGHT.mT) * (1 - y) + 2 * y - 3 + 1 / (2 + y) + y / 3 + y * WEIGHT[0, :5] - x[:, :1]
    return z.sum((1, 2)) + w.sum(1) + torch.einsum("bij,ij->b", z, WEIGHT[:, :5]) + WEIGHT[0] @ x.T.sin()


def combine(x: Tensor) -> Tensor:
    y = torch.cat([x, torch.ones(len(x), 1, dtype=F64), x.sin()], 1)
    z = torch.stack([x.exp().log1p(), x, torch.zeros_like(x)], 2)
    where = torch.where(x > 0, x**3, x.square()) + torch.where(x > 0, x, 0.5) + x.sign() * x
    return y.square().sum(1) * z.mean((1, 2)) + where.sum(1) + x.expand_as(x)[:, 0].detach().new_zeros(len(x))


def measure(x: Tensor) -> Tensor:
    apart = x.view(-1, 2, 1, 3) - PLACES[0]
    far = apart.norm(dim=3) + torch.linalg.norm(apart, dim=-1, keepdim=True).squeeze(-1)
    far = far + torch.linalg.vector_norm(apart, dim=3) + apart.pow(2).sum(3).sqrt() + spread(x)[:, :1, None] ** 1.5
    return -far.log().sum((1, 2)) + torch.logsumexp(x, 1) + torch.logsumexp(x, dim=1, keepdim=True).squeeze(1)


def activate(x: Tensor) -> Tensor:
    y = sum(function(x) for function in (functional.silu, torch.sigmoid, functional.gelu, functional.softplus))
    z = sum(function(spread(x)) for function in (torch.rsqrt, torch.log2, torch.log10, torch.abs, torch.reciprocal))
    w = sum(function(x) for function in (functional.mish, functional.elu, functional.selu, functional.celu))
    v = sum(function(x) for function in (torch.relu, functional.leaky_relu, functional.hardtanh, functional.softsign))
    u = sum(function(x) for function in (torch.erf, torch.atan, torch.asinh, torch.cosh, torch.sinh, torch.expm1))
    t = torch.atanh(x.tanh() / 2) + torch.tan(x.tanh() / 2) + torch.sinc(x) + functional.logsigmoid(x)
    s = x.clamp(min=-0.5) * x.clamp_min(-0.3) * x.clamp_max(0.9) + functional.tanhshrink(x)
    return (y + z + w + v + u + t + s).sum(1)


def share_out(x: Tensor) -> Tensor:
    y = torch.softmax(x, 1) * functional.softmax(x.sin(), dim=-1) + x.log_softmax(1) * nn.LayerNorm(6).double()(x)
    z = functional.layer_norm(x.view(-1, 2, 3) * 2, (2, 3), WEIGHT[1].view(2, 3), WEIGHT[2].view(2, 3))
    return y.sum(1) + functional.layer_norm(z.square(), (3,), eps=0.1).sin().sum((1, 2))


def determine(x: Tensor) -> Tensor:
    matrix = torch.tanh(x.unsqueeze(2) * WEIGHT[0] + torch.arange(6) * x.cos().unsqueeze(1)) + torch.eye(6)
    return torch.linalg.slogdet(matrix)[1] + torch.slogdet(matrix).logabsdet


def rename(x: Tensor) -> Tensor:
    y = torch.concat([x, torch.concatenate([x, torch.arctan(x)], 1)], 1).view_as(torch.ones(len(x), 18, dtype=F64))
    z = torch.divide(torch.multiply(x, x), 2 + torch.true_divide(x.square(), 3)).reshape_as(x).type_as(x)
    w = torch.complex(x, x.sin()) * torch.complex(torch.ones_like(WEIGHT[0]), WEIGHT[0])
    return y.square().sum(1) + torch.subtract(z, 2).sum(1) + w.exp().imag.sum(1) + w.square().real.sum(1)


CASES = {f.__name__: f for f in (pick, reshape, multiply, combine, measure, activate, share_out, determine, rename)}


def compare(psi: ng.LogAmplitude, x: Tensor) -> None:
    with torch.no_grad():
        found, expected = continuous.carry_log(psi, x), continuous.differentiate_twice(psi, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_that_are_carried_are_those_of_nested_derivatives(name):
    compare(ng.LogAmplitude(Formula(lambda _, x: CASES[name](x))), draw())


def build_complex_net() -> nn.Module:
    """Complex log psi from complex parameters."""
    return Assembled(
        lambda m, x: m.last(torch.tanh(m.first(x.to(torch.complex128)))),
        first=nn.Linear(6, 5, dtype=torch.complex128),
        last=nn.Linear(5, 1, dtype=torch.complex128),
    )


class Determinants(nn.Module):
    """(sign, log |psi|) from a determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8, dtype=F64), nn.GELU(), nn.Linear(8, 9, dtype=F64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sign, log = torch.linalg.slogdet(self.net(x).unflatten(1, (3, 3)))
        return sign, log - x.square().sum(1)


def build_perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, dtype=F64), nn.Softplus(), nn.Linear(8, outputs, dtype=F64))


WAVES: dict[str, Callable[[], ng.LogAmplitude]] = {
    "real": lambda: ng.LogAmplitude(build_perceptron(1)),
    "phase": lambda: ng.LogAmplitude(build_perceptron(2), head=vmc.read_phase),
    "amplitude": lambda: ng.LogAmplitude(build_perceptron(1), head=vmc.read_amplitude),
    "determinant": lambda: ng.LogAmplitude(Determinants(), head=vmc.read_sign),
    "complex parameters": lambda: ng.LogAmplitude(build_complex_net()),
    "helium": lambda: ng.LogAmplitude(vmc.AntisymmetricNet(vmc.Molecule.helium(), dtype=F64), head=vmc.read_sign),
}


@pytest.mark.parametrize("name", WAVES)
def test_heads_and_networks_are_carried(name):
    psi = WAVES[name]()
    compare(psi, draw())
    with torch.no_grad():
        assert continuous.agrees(psi, draw()[:2])
        slopes, laplacian = continuous.differentiate_twice(psi, draw())
        found = vmc.kinetic_energies(psi, draw())
    torch.testing.assert_close(found, -(laplacian + slopes.square().sum(0)) / 2, rtol=1e-9, atol=1e-9)


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "no rule": lambda x: x.square().prod(1),
    "derivatives lost": lambda x: torch.func.vmap(lambda one: one.square().sum())(x) + x[:, 0],
    "in place": lambda x: x.clone().mul_(x).sum(1),
    "branch": lambda x: x.sum(1) if x.abs().max() > 0 else x.prod(1),
    "complex": lambda x: torch.complex(x, x.sin()).sinh().imag.sum(1),
    "weight of a jet": lambda x: functional.linear(torch.ones(1, 6, dtype=F64), x.sin()).squeeze(0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_carried_is_differentiated(name):
    psi = ng.LogAmplitude(Formula(lambda _, x: UNKNOWN[name](x)))
    with torch.no_grad():
        assert not continuous.agrees(psi, draw()[:2])
        with nullcontext() if name == "derivatives lost" else pytest.raises(NotCarriedError):
            continuous.carry_log(psi, draw())
        slopes, laplacian = continuous.differentiate_twice(psi, draw())
        torch.testing.assert_close(vmc.kinetic_energies(psi, draw()), -(laplacian + slopes.square().sum(0)) / 2)


def test_kinetic_energies_keep_their_graph_where_one_is_wanted():
    psi, x = WAVES["real"](), draw()
    total = vmc.kinetic_energies(psi, x).sum()
    gradients = torch.autograd.grad(total, [p for p in psi.parameters() if p.dim() == 2])
    with torch.no_grad():
        psi.net[0].weight[0, 0] += 1e-6  # type: ignore[index]
        up = vmc.kinetic_energies(psi, x).sum()
        psi.net[0].weight[0, 0] -= 2e-6  # type: ignore[index]
        down = vmc.kinetic_energies(psi, x).sum()
    torch.testing.assert_close(gradients[0][0, 0], (up - down) / 2e-6, rtol=1e-6, atol=1e-6)
