# %% [markdown]
# # Reproducing a paper
#
# Take one figure of a paper, find its equations, write them in some lines, and check the numbers. The figure here is
# Malagò's (2023): gradient flows of two bits, natural and Euclidean, in two coordinates. SciPy integrates flows:
# `pip install scipy`.

# %% [markdown]
# ## From symbols to names
#
# Every paper that natgrad follows has [a page](../papers/index.md): the paper's symbol, our name, its file and
# function, and misprints. For this figure of [the lectures](../papers/malago_2023.md):
#
# | symbol | here |
# |---|---|
# | $p(x; \theta) \propto \exp(\theta \cdot x)$, $x \in \{-1, 1\}^2$ | `Ising(2, [(0,), (1,)])`, the independence model |
# | $\mu_i = P(x_i = 1)$ | `probability_coordinates(family)` |
# | $F = \mathbb{E}_p[f]$ | `expected_value(family, f)` |
# | $\dot\mu = -\nabla F(\mu)$, $\dot\mu = -I(\mu)^{-1} \nabla F(\mu)$ | `flow(F, family, start, times, coordinates, natural=...)` |

# %%
import matplotlib.pyplot as plt
import torch

from natgrad.families import Ising
from natgrad.flows import expected_value, flow, probability_coordinates

family = Ising(2, [(0,), (1,)])
mu = probability_coordinates(family)


def f(x: torch.Tensor) -> torch.Tensor:  # (states, 2) of -1 and 1
    return x[:, 0] + 2 * x[:, 1] + 3 * x[:, 0] * x[:, 1]


F = expected_value(family, f)

# %% [markdown]
# ## By hand first
#
# The bits are independent with means $2\mu - 1$, so $F = m_1 + 2 m_2 + 3 m_1 m_2$ with $m = 2\mu - 1$. Its saddle is
# where both slopes vanish: $m = (-2/3, -1/3)$, which is $\mu = (1/6, 1/3)$, as the lectures say. The lowest corner is
# $\mu = (1, 0)$ with $f = -4$; at $(0, 1)$ there is another minimum with $f = -2$.

# %%
point = torch.tensor([0.3, 0.8], dtype=torch.float64)
m = 2 * point - 1
assert torch.allclose(F(mu.theta(point)), m[0] + 2 * m[1] + 3 * m[0] * m[1])

saddle = torch.tensor([1 / 6, 1 / 3], dtype=torch.float64, requires_grad=True)
(slopes,) = torch.autograd.grad(F(mu.theta(saddle)), saddle)
print("slopes of F at (1/6, 1/3):", slopes.tolist())
assert slopes.abs().max() < 1e-12

# %% [markdown]
# ## The figure
#
# Both flows from four starts, with the level lines of F.

# %%
side = torch.tensor([0.3, 0.75], dtype=torch.float64)
starts = torch.cartesian_prod(side, side)
natural = [flow(F, family, start, torch.linspace(0, 2, 30).double(), mu) for start in starts]
euclidean = [flow(F, family, start, torch.linspace(0, 2, 30).double(), mu, natural=False) for start in starts]

axis = torch.linspace(0.001, 0.999, 80, dtype=torch.float64)
grid = 2 * torch.cartesian_prod(axis, axis) - 1
levels = (grid[:, 0] + 2 * grid[:, 1] + 3 * grid[:, 0] * grid[:, 1]).reshape(80, 80).T
figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained", sharey=True)
for ax, flows, title in zip(
    axes, (natural, euclidean), ("Natural gradient flow", "Euclidean gradient flow"), strict=True
):
    ax.contour(axis, axis, levels, 20, colors="0.75", linewidths=0.6)
    for path in flows:
        ax.plot(*path.points.T, "-", color="#c2410c")
        ax.plot(*path.points[-1], "s", color="#c2410c", markersize=5, clip_on=False)
    ax.plot(*starts.T, "o", color="#1b1f24", markersize=4)
    ax.set(title=title, xlabel="probability that the first bit is 1", xlim=(0, 1), ylim=(0, 1), aspect="equal")
axes[0].set(ylabel="probability that the second bit is 1")
plt.show()

# %% [markdown]
# ## The claims
#
# The lectures say: the natural flow ends in a corner, from everywhere; the Euclidean flow in these coordinates runs
# out of the square through an edge, where there is no distribution. `status` says why a flow has ended.

# %%
print("natural:  ", sorted({path.status for path in natural}))
print("Euclidean:", sorted({path.status for path in euclidean}))
ends = torch.stack([path.points[-1] for path in natural])
to_corner = torch.minimum((ends - torch.tensor([1.0, 0.0])).norm(dim=1), (ends - torch.tensor([0.0, 1.0])).norm(dim=1))
print(f"natural flows are within {to_corner.max():.1e} of a minimum")
assert to_corner.max() < 0.05
assert {path.status for path in euclidean} == {"edge"}

# %% [markdown]
# The natural flow is the same curve in all coordinates. Integrate it in $\theta$ instead, and map the points to
# $\mu$:

# %%
start = torch.tensor([0.5, 0.5], dtype=torch.float64)
times = [0.0, 0.25, 0.5]
in_mu = flow(F, family, start, times, mu)
in_theta = flow(F, family, mu.theta(start), times)
difference = (torch.sigmoid(2 * in_theta.points) - in_mu.points).abs().max()
print(f"largest difference {difference:.1e}")
assert difference < 1e-8

# %% [markdown]
# ## All of it by one command
#
# The experiments are in the repository, and each is a command that writes tables, pictures and a page with the
# paper's numbers beside ours:
#
# ```bash
# pip install -e . -e ./lab
# natgrad list
# natgrad run malago_2023_toy
# ```
#
# [Running the experiments](../guides/experiments.md) says how to change their settings, and how to write one for your
# own paper.
