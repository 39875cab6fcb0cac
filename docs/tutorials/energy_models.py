# %% [markdown]
# # Energy models by score matching
#
# An energy model gives the density of data up to a constant that nobody can compute. Score matching fits it without
# that constant. Here a network learns the density of points on two moons, by the natural gradient of its score.

# %% [markdown]
# ## The data
#
# Two half circles with noise, as points in the plane.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)


def draw_moons(count: int) -> torch.Tensor:
    angle = torch.pi * torch.rand(count)
    upper = torch.rand(count) < 0.5
    moon = torch.stack([angle.cos(), angle.sin()], 1)
    moon = torch.where(upper.unsqueeze(1), moon, torch.tensor([1.0, 0.5]) - moon)
    return moon + 0.12 * torch.randn(count, 2)


data = draw_moons(1000)

# %% [markdown]
# ## The model
#
# The energy is a small network plus a bowl, so that the density falls off far away: $\log p(x) = -E(x) +
# \text{const}$. The score $\nabla_x \log p(x)$ does not contain the constant.


# %%
class EnergyOfPoints(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).squeeze(-1) + 0.1 * x.square().sum(-1)


energy = EnergyOfPoints()
score = ng.Score(energy)  # the module x -> d log p / dx

# %% [markdown]
# ## Denoising score matching
#
# Add noise $\sigma z$ to the data. The best predictor of $-z / \sigma$ from the noisy point is the score of the
# blurred data (Vincent 2011), so fitting a score is a regression, and every drop-in optimiser of natgrad can do it.

# %%
sigma = 0.15
opt = ng.kfac(score, nn.MSELoss())
losses = []
for _ in range(160):
    z = torch.randn(256, 2)
    batch = data[torch.randint(len(data), (256,))]
    opt.zero_grad()
    loss = opt.loss(score(batch + sigma * z), -z / sigma)
    loss.backward()
    opt.step()
    losses.append(float(loss.detach()))

# %% [markdown]
# The loss has a floor: even the true score cannot predict the noise. What counts is the density.

# %%
side = torch.linspace(-1.8, 2.8, 120)
plane = torch.cartesian_prod(side, side)
with torch.no_grad():
    log_density = -energy(plane).reshape(120, 120).T
density = (log_density - log_density.max()).exp()

figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
axes[0].plot(data[:, 0], data[:, 1], ".", markersize=2)
axes[0].set(title="1000 points", xlabel="first coordinate", ylabel="second coordinate", aspect="equal")
axes[0].set(xlim=(-1.8, 2.8), ylim=(-1.4, 1.8))
axes[1].contourf(side, side, density, 20, cmap="Greys")
axes[1].set(title="Density of the model", xlabel="first coordinate", aspect="equal", xlim=(-1.8, 2.8), ylim=(-1.4, 1.8))
smooth = torch.tensor(losses).unfold(0, 10, 10).mean(1)
axes[2].plot(torch.arange(len(smooth)) * 10, smooth)
axes[2].set(title="Denoising loss, means of ten steps", xlabel="step", ylabel="loss")
plt.show()

with torch.no_grad():
    near, far = (
        float(-energy(points).mean())
        for points in (draw_moons(500), torch.tensor([[0.5, 1.6], [0.5, -1.2], [2.6, 1.5]]))
    )
print(f"mean log density on new points {near:.1f}, away from the moons {far:.1f}, up to the same constant")
assert near > far + 2

# %% [markdown]
# ## Exact score matching, and a metric of its own
#
# Where the energy is small, `ng.score_matching_loss` takes second derivatives in x and needs no noise, and
# `ng.score_metric` is the metric of the score: the adaptive natural gradient of Karakida, Okada and Amari (2016). For
# a model that is linear in its parameters, such as a Gaussian Markov field, the loss is a quadratic and the metric
# its Hessian: one step ends at the optimum.

# %%
precision = torch.tensor([[2.0, -0.8, 0.0], [-0.8, 1.5, 0.4], [0.0, 0.4, 1.0]], dtype=torch.float64)
points = torch.distributions.MultivariateNormal(torch.zeros(3).double(), precision_matrix=precision).sample((20_000,))
field = ng.GaussMarkov(3, [(0, 1), (1, 2)])  # the entry between 0 and 2 is zero
params = field.parameters(torch.eye(3, dtype=torch.float64))
opt = ng.NaturalGradient(params, ng.score_metric(field), lr=1.0, damping=0.0)
for step in range(2):
    opt.zero_grad()
    loss = ng.score_matching_loss(field, params, points)
    loss.backward()
    print(f"step {step}: loss {float(loss.detach()):.6f}")
    opt.step()
found = field.precision(params).detach()
print(found)
assert torch.allclose(found, precision, atol=0.1)

# %% [markdown]
# [Unnormalised densities](../theory/energies.md) lists the objectives, what they need and
# what they cost.
