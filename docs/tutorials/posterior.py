# %% [markdown]
# # A posterior in a handful of steps
#
# `ng.variational` fits a normal distribution to a posterior by the natural gradient of the evidence lower bound.
# Where prior and likelihood are conjugate, one step is exact; where they are not, some steps are enough.

# %% [markdown]
# ## A conjugate problem: one step
#
# Bayesian linear regression with known noise. The posterior is normal, and its mean and covariance are known in
# closed form.

# %%
import matplotlib.pyplot as plt
import torch
from torch.nn import functional

import natgrad as ng

torch.manual_seed(0)
torch_options = {"dtype": torch.float64}
A, noise = torch.randn(30, 2, **torch_options), 0.5
y = A @ torch.tensor([1.0, -2.0], **torch_options) + noise * torch.randn(30, **torch_options)


def log_joint(z: torch.Tensor) -> torch.Tensor:  # (s, 2) -> (s,): log p(y, z) up to a constant
    return -0.5 * ((y - z @ A.mT) / noise).square().sum(-1) - 0.5 * z.square().sum(-1)


q = ng.variational(log_joint, 2)
q.step()
precision = A.mT @ A / noise**2 + torch.eye(2, **torch_options)
exact = torch.linalg.solve(precision, A.mT @ y / noise**2)
print("mean after one step", q.mean.tolist(), "exact", exact.tolist())
assert torch.allclose(q.mean.double(), exact, atol=1e-5)
assert torch.allclose(q.covariance.double(), torch.linalg.inv(precision), atol=1e-5)

# %% [markdown]
# ## Logistic regression: some steps
#
# Forty points with two labels. The posterior is not normal any more; the best normal distribution is found in some
# steps, and `fit` says when it has converged.

# %%
points = torch.randn(40, 2, **torch_options) + 1.0
labels = (
    (points @ torch.tensor([2.0, -1.5], **torch_options) + 0.5 * torch.randn(40, **torch_options)) > 0.5
).double() * 2 - 1


def log_posterior(w: torch.Tensor) -> torch.Tensor:  # (s, 2) -> (s,)
    return functional.logsigmoid(labels * (w @ points.mT)).sum(-1) - 0.5 * (w / 2).square().sum(-1)


q = ng.variational(log_posterior, 2)
start = q.elbo()
bounds = q.fit(30)
print(f"bound {start:.3f} at the start, then", [f"{b:.3f}" for b in bounds])
assert bounds.converged

# %% [markdown]
# ## Beside the true posterior
#
# With two parameters the posterior can be computed on a grid. Contours enclose a half and nine tenths of the
# probability: filled for the posterior, dashed for the normal distribution.

# %%
side = torch.linspace(-1, 6, 200, **torch_options), torch.linspace(-6, 1, 200, **torch_options)
grid = torch.cartesian_prod(*side)


def levels(log_density: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    p = (log_density - log_density.logsumexp(0)).exp()
    ordered = p.sort(descending=True).values
    inside = ordered.cumsum(0)
    return p.reshape(200, 200).T, [float(ordered[int((inside < share).sum())]) for share in (0.9, 0.5)]


posterior, posterior_levels = levels(log_posterior(grid))
normal = torch.distributions.MultivariateNormal(q.mean.double(), q.covariance.double())
fitted, fitted_levels = levels(normal.log_prob(grid))

figure, axes = plt.subplots(figsize=(6, 4.6), layout="constrained")
axes.contourf(*side, posterior, [*posterior_levels, float(posterior.max())], cmap="Greys", alpha=0.6)
axes.contour(*side, fitted, fitted_levels, colors="#1d4ed8", linestyles="--", linewidths=1.6)
axes.plot(*q.mean.tolist(), "x", color="#1d4ed8", markersize=9)
axes.set(xlabel="first weight", ylabel="second weight", title="Posterior (filled) and fitted normal (dashed)")
axes.set(xlim=(0.5, 5.5), ylim=(-5, 0))
plt.show()

weights = posterior.T.reshape(-1, 1)
mean = (weights * grid).sum(0)
print("posterior mean", [f"{m:.2f}" for m in mean.tolist()], "of q", [f"{m:.2f}" for m in q.mean.tolist()])
assert torch.allclose(mean, q.mean.double(), atol=0.2)

# %% [markdown]
# [Variational inference](../theory/variational.md) has diagonal distributions, Gaussian processes with inducing
# points, and the weights of a network.
