"""Half precision has no linear algebra of its own: a field takes what is in it, or refuses it by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import draw
from policy_worlds import Walk
from torch import Tensor, nn
from torch.distributions import Normal

import natgrad as ng

NORMAL = ng.MultivariateNormal(2)


def regression(b: Tensor, x: Tensor) -> Normal:
    return Normal(x @ b, torch.ones((), dtype=x.dtype))


def solve_equation(dtype: torch.dtype) -> Any:
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return ng.residuals(net, {"inside": lambda u, x: u(x) - 1})


def lower_energy(dtype: torch.dtype) -> Tensor:
    h = ng.vmc.TransverseIsing(3, field=1.0)
    psi = ng.LogAmplitude(ng.vmc.RBM(3)).to(dtype)
    search = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), ng.stochastic_reconfiguration(psi, lr=0.05))
    return torch.tensor(search.step().mean)


def teach_machine(dtype: torch.dtype) -> Tensor:
    machine = ng.HelmholtzMachine([3, 2]).to(dtype)
    return torch.tensor(ng.NaturalWakeSleep(machine, samples=5, seed=0).step(torch.eye(3, dtype=dtype)))


def estimate(dtype: torch.dtype) -> Any:
    data = draw(20, 2).to(dtype), draw(20).to(dtype)
    return ng.maximize_likelihood(regression, torch.zeros(2, dtype=dtype), data)


def measure(dtype: torch.dtype) -> Any:
    b = torch.zeros(2, dtype=dtype)
    return ng.observed_fisher(regression, b).at(b, (draw(20, 2).to(dtype), draw(20).to(dtype)))


def train(dtype: torch.dtype) -> Tensor:
    net, x = nn.Linear(3, 2).to(dtype), draw(5, 3).to(dtype)
    opt = ng.kfac(net, nn.CrossEntropyLoss(), lr=0.1)
    opt.loss(net(x), torch.zeros(5).long()).backward()
    opt.step()
    return net.weight.detach()


def join_moments(dtype: torch.dtype) -> Tensor:
    return NORMAL.kl(*2 * [NORMAL.from_mean_covariance(torch.zeros(2, dtype=dtype), torch.eye(2, dtype=dtype))])


def follow_flow(dtype: torch.dtype) -> Any:
    family, start = ng.Normal(), torch.tensor([0.0, -0.5], dtype=dtype)
    return ng.flows.flow(lambda theta: family.expectation(theta)[..., 1], family, start, 0.5)


CALLS: dict[str, tuple[Callable[[torch.dtype], Any], str | None]] = {
    "policy": (lambda dtype: ng.TRPO(nn.Linear(2, 1).to(dtype), Walk()), "policy is torch.{}"),
    "policy by another rule": (
        lambda dtype: ng.NaturalPolicyGradient(nn.Linear(2, 1).to(dtype), Walk()),
        "policy is torch.{}",
    ),
    "critic": (lambda dtype: ng.TRPO(nn.Linear(2, 1), Walk(), critic=nn.Linear(2, 1).to(dtype)), "critic is torch.{}"),
    "residuals": (solve_equation, "net is torch.{}"),
    "wave function": (lower_energy, None),
    "machine": (teach_machine, None),
    "optimiser": (train, None),
    "posterior": (
        lambda dtype: ng.variational(lambda z: -z.square().sum(-1), torch.zeros(2, dtype=dtype)),
        "start is torch.{}",
    ),
    "posterior of a network": (
        lambda dtype: ng.variational(nn.Linear(2, 1).to(dtype), criterion=nn.MSELoss(), data_size=9),
        "target is torch.{}",
    ),
    "estimate": (estimate, "params is torch.{}"),
    "information": (measure, "params is torch.{}"),
    "flow": (follow_flow, "start is torch.{}"),
    "field": (lambda dtype: ng.Ising(3).fit(draw(50, 3).sign().to(dtype)), None),
    "moments": (join_moments, "a linear system is torch.{}"),
    "examples": (lambda dtype: NORMAL.mle(draw(20, 2).to(dtype)), "a linear system is torch.{}"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_half_precision_works_or_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    call, refusal = CALLS[name]
    if refusal is None:
        assert bool(call(dtype).isfinite().all())
        return
    words = refusal.format(str(dtype).removeprefix("torch."))
    with pytest.raises(ValueError, match=f"{words}.*expected double precision, or single"):
        call(dtype)
