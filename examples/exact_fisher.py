"""The geometry itself: the Fisher metric of a network as an operator, and what it measures."""

import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
x, y = torch.randn(100, 5), torch.randint(3, (100,))

params = ng.trainable(model)
space = ng.Space(params)
G = ng.fisher(model, ng.Categorical()).at(params, x)

loss = nn.functional.cross_entropy(model(x), y)
g = space.flatten(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))

# One product costs about as much as a gradient; the matrix is there for those who want to look at it.
eigenvalues = torch.linalg.eigvalsh(G.dense())
print(f"n = {len(g)}, |G g| = {(G @ g).norm():.4f}, eigenvalues {eigenvalues[0]:.1e} to {eigenvalues[-1]:.1e}")

solution = ng.natural_gradient(G, g, solver=ng.CG(rtol=1e-10, max_steps=200), damping=1e-3)
print(f"natural gradient: {solution.status} after {solution.steps} products, residual {solution.residual:.1e}")

# A small step moves the model by d^T G d / 2 nats per example, whatever the parameters look like.
d = -0.001 * solution.value
with torch.no_grad():
    before = model(x).log_softmax(1)
    moved = space.unflatten(space.flatten(params) + d)
    after = torch.func.functional_call(model, moved, (x,)).log_softmax(1)
kl = (before.exp() * (before - after)).sum(1).mean()
print(f"KL moved {kl:.4e} nats, d^T G d / 2 = {d @ (G @ d) / 2:.4e}")
