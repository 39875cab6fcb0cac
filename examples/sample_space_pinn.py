"""-u'' = pi^2 sin(pi x), u(0) = u(1) = 0, by least squares: 42 residuals, 193 parameters, solved among the former."""

import math

import torch
from torch import Tensor
from torch.func import grad, vmap

import natgrad as ng

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.linspace(0, 1, 42)
params = {"w": 4 * torch.randn(64), "b": 4 * torch.randn(64), "v": torch.randn(64) / 8, "c": torch.zeros(1)}


def u(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(p["w"] * x + p["b"]) @ p["v"] + p["c"]).squeeze()


def residuals(p: dict[str, Tensor], x: Tensor) -> Tensor:
    ends = vmap(lambda s: u(p, s))(x)
    inside = vmap(grad(grad(lambda s: u(p, s))))(x) / math.pi**2 + torch.sin(math.pi * x)
    return torch.where((x == 0) | (x == 1), ends, inside).unsqueeze(1)


def loss(p: dict[str, Tensor]) -> Tensor:
    return residuals(p, x).square().mean() / 2  # a Gaussian with standard deviation 1: the metric is mean J^T J


space, metric, damping = ng.Space(params), ng.fisher(residuals, ng.Gaussian()), 1e-2
for _ in range(30):
    g = space.flatten(grad(loss)(params))
    d = ng.natural_gradient(metric.at(params, x), g, solver=ng.SampleSpace(), damping=damping).value
    trial = space.unflatten(space.flatten(params) - d)
    better = loss(trial) < loss(params)
    params, damping = (trial, damping / 4) if better else (params, damping * 4)
error = (vmap(lambda s: u(params, s))(x) - torch.sin(math.pi * x)).abs().max()
print(f"residual {loss(params):.1e}, largest error of u {error:.1e} after 30 steps")
