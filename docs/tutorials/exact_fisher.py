# %% [markdown]
# # The exact Fisher of a small model, drawn
#
# The Fisher metric says how far a step moves a model's predictions. For a small network it is a matrix that can be
# looked at: this page computes it, draws it, and checks what it promises.

# %% [markdown]
# ## The metric of a network
#
# `ng.fisher(model, family)` is the metric, and `.at(params, x)` the operator at these parameters. It multiplies
# vectors without ever forming the matrix, and `.dense()` forms it. The expectation over targets is exact: nothing is
# sampled.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
x = torch.randn(200, 2, dtype=torch.float64)
params = ng.trainable(model)
G = ng.fisher(model, ng.Categorical()).at(params, x)
matrix = G.dense()
print(G)
print("shape", tuple(matrix.shape), "rank", int(torch.linalg.matrix_rank(matrix)))

# %% [markdown]
# ## By definition
#
# $G = \mathbb{E}_x \mathbb{E}_{y \sim p(y|x)} [\, \nabla \log p(y|x)\, \nabla \log p(y|x)^\top ]$. With three classes
# the sum over $y$ has three terms, so the definition is some lines long.

# %%
space = ng.Space(params)


def log_p(vector: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, space.unflatten(vector), (example,)).log_softmax(-1)


theta = space.flatten(params)
scores = torch.func.vmap(torch.func.jacrev(log_p), in_dims=(None, 0))(theta, x)  # (examples, classes, parameters)
chances = model(x).softmax(-1).detach()
definition = torch.einsum("bc,bci,bcj->ij", chances, scores, scores) / len(x)
print(f"largest difference {(definition - matrix).abs().max():.1e}")
assert torch.allclose(definition, matrix, atol=1e-12)

# %% [markdown]
# ## What it looks like
#
# Lines mark the four parameters: the weight and bias of the first layer, and of the second.
# [K-FAC](../glossary.md#kronecker-factor) approximates the block of each layer and drops what lies between the two. The eigenvalues fall over many powers of ten, down to zeros: three
# outputs of a softmax only matter up to a constant.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
image = left.imshow(matrix.abs().clamp(min=1e-6).log10().numpy(), cmap="Greys")
figure.colorbar(image, ax=left, label="log10 of the absolute entry")
edge = 0
for part in params.values():
    edge += part.numel()
    left.axhline(edge - 0.5, linewidth=1, color="#1d4ed8")
    left.axvline(edge - 0.5, linewidth=1, color="#1d4ed8")
left.set(title="The Fisher matrix of a 2-6-3 network", xlabel="parameter", ylabel="parameter")
values = torch.linalg.eigvalsh(matrix).flip(0)
right.semilogy(values.clamp(min=1e-17), ".")
right.set(title="Its eigenvalues", xlabel="number", ylabel="eigenvalue, nats per squared unit")
plt.show()

# %% [markdown]
# ## What it promises
#
# A step $s\,d$ moves the predictions by $\tfrac12 s^2\, d^\top G\, d$ nats of KL divergence, up to an error of third
# order in $s$. On two logarithmic axes the error has slope 3.

# %%
d = torch.randn(len(theta), dtype=torch.float64)
d /= d.norm()
lengths = torch.logspace(-3, 0, 13, dtype=torch.float64)


@torch.no_grad()
def kl_of_step(s: torch.Tensor) -> torch.Tensor:
    old, new = (
        torch.func.functional_call(model, space.unflatten(v), (x,)).log_softmax(-1) for v in (theta, theta + s * d)
    )
    return (old.exp() * (old - new)).sum(1).mean()


measured = torch.stack([kl_of_step(s) for s in lengths])
promised = 0.5 * lengths.square() * (d @ (G @ d)).detach()
error = (measured - promised).abs()

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
axes.loglog(lengths, measured, "o-", label="KL divergence, measured")
axes.loglog(lengths, promised, "--", label="half d' G d, promised")
axes.loglog(lengths, error, "s:", label="difference")
axes.set(xlabel="length s of the step", ylabel="nats per example", title="How far a step moves a 2-6-3 network")
axes.legend()
plt.show()

slope = float((error[6] / error[2]).log() / (lengths[6] / lengths[2]).log())
print(f"slope of the error: {slope:.2f}")
assert abs(slope - 3) < 0.2

# %% [markdown]
# ## The natural gradient
#
# $(G + \lambda I)^{-1} g$ goes down the steepest way per nat. A small natural step moves the model the same way in
# whatever units a layer is written, and a gradient step does not.

# %%
y = torch.randint(3, (200,))
loss = nn.functional.cross_entropy(model(x), y)
g = space.flatten(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))
solution = ng.natural_gradient(G, g, solver=ng.CG(rtol=1e-10, max_steps=200), damping=1e-3)
print(f"{solution.status} after {solution.steps} products, residual {solution.residual:.1e}")
direct = torch.linalg.solve(matrix + 1e-3 * torch.eye(len(g), dtype=torch.float64), g)
assert torch.allclose(solution.value, direct, rtol=1e-5, atol=1e-8)
