"""The posterior of a Gaussian process classifier, in a handful of natural gradient steps."""

import torch
from torch.nn import functional

import natgrad as ng

vi = ng.variational

torch.manual_seed(0)
x = 6 * torch.rand(200, dtype=torch.float64)
labels = ((2 * x).sin() + 0.3 * torch.randn(200)).sign()
places = torch.linspace(0, 6, 15, dtype=torch.float64)


def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared exponential, variance 2, length .7."""
    return 2 * torch.exp(-0.5 * (a.unsqueeze(1) - b).square() / 0.7**2)


kmm = kernel(places, places) + 1e-6 * torch.eye(15)
A, variance = vi.inducing(kmm, kernel(places, x), torch.full((200,), 2.0))
process = vi.Projected(A, lambda f: functional.logsigmoid(labels * f), variance)  # f = A z + noise, z whitened

q = ng.variational(process, 15)
for step in range(5):
    print(f"step {step}: bound {q.step():.4f} nats")

grid = torch.linspace(0, 6, 7, dtype=torch.float64)
B, spread = vi.inducing(kmm, kernel(places, grid), torch.full((7,), 2.0))
f = q.sample(2000) @ B.mT + spread.sqrt() * torch.randn(2000, 7)
for place, p in zip(grid.tolist(), f.sigmoid().mean(0).tolist(), strict=True):
    print(f"p(label is 1 | x = {place:.0f}) = {p:.2f}")
