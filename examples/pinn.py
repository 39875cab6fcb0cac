"""The heat equation by a network, and the diffusion in it found from forty measurements."""

import math

import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
k = nn.Parameter(torch.tensor(1.0))  # the diffusion: .25 in truth


def exact(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(math.pi**2) * x[..., 1] / 4) * torch.sin(math.pi * x[..., 0])


terms = {
    "inside": lambda u, k, x: ng.time_derivative(u, x) - k * ng.laplacian(u, x, dims=[0]),
    "conditions": lambda u, k, x: u(x) - exact(x),
    "data": lambda u, k, x, measured: u(x) - measured,
}
opt = ng.residuals({"u": net, "k": k}, terms)
inside, edge, sensors = torch.rand(200, 2), torch.rand(90, 2), torch.rand(40, 2)
edge[:30, 0], edge[30:60, 0], edge[60:, 1] = 0.0, 1.0, 0.0  # both ends, and the start
for _ in range(80):
    loss = opt.step(inside=inside, conditions=edge, data=(sensors, exact(sensors)))
print(f"loss {loss:.1e}, diffusion {k.item():.6f}, {opt.losses}")
