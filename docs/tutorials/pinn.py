# %% [markdown]
# # An equation solved by a network
#
# Solve Poisson's equation on a square with a small network, to a relative error below a thousandth: a physics-informed
# network, trained by Gauss-Newton. Beside natgrad, `pip install -e .` in its folder, it needs matplotlib:
# `pip install matplotlib`.

# %% [markdown]
# ## The equation
#
# We look for u with -(u_xx + u_yy) = 2 pi^2 sin(pi x) sin(pi y) in the unit square and u = 0 on its edges. The solution
# is sin(pi x) sin(pi y), so we can look at the error.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # small errors need it


def solution(x):
    return torch.sin(math.pi * x).prod(-1)


# %% [markdown]
# ## A term for every condition
#
# A term is a function of the network `u` and of one point `x`. It returns what should be zero. `ng.laplacian(u, x)` is
# the sum of the second derivatives there.

# %%
terms = {
    "inside": lambda u, x: ng.laplacian(u, x) + 2 * math.pi**2 * solution(x),
    "boundary": lambda u, x: u(x),
}

inside = torch.rand(200, 2)
side, zero, one = torch.rand(20, 1), torch.zeros(20, 1), torch.ones(20, 1)
boundary = torch.cat([torch.cat(pair, 1) for pair in ((side, zero), (side, one), (zero, side), (one, side))])

# %% [markdown]
# ## Training
#
# The loss is the sum of the mean squares of the terms. `opt.step` takes the points of every term by its name; they may
# be others at every step. Nothing has to be tuned.

# %%
net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
opt = ng.residuals(net, terms)
losses = [float(opt.step(inside=inside, boundary=boundary)) for _ in range(80)]
print(opt.losses)
print(opt.state_report())

# %% [markdown]
# A step that would raise the loss is not taken, so that the curve only falls.

# %%
plt.semilogy(losses)
plt.xlabel("step")
plt.ylabel("loss")
plt.title("Loss against steps")
plt.show()

# %% [markdown]
# ## The error
#
# The network has 81 parameters.

# %%
ticks = torch.linspace(0, 1, 60)
grid = torch.cartesian_prod(ticks, ticks)
with torch.no_grad():
    gap = (net(grid).squeeze(1) - solution(grid)).reshape(60, 60)
error = float(gap.norm() / solution(grid).norm())
print(f"relative error {error:.1e}")
assert error < 1e-3

figure, axes = plt.subplots()
image = axes.imshow(gap.mT.numpy(), origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r")
figure.colorbar(image, ax=axes)
axes.set(xlabel="x", ylabel="y", title="Error of the solution")
plt.show()

# %% [markdown]
# ## A coefficient that is not known
#
# Several unknowns are the arguments of the terms, in their order. Here the equation is -k (u_xx + u_yy) = f with an
# unknown number k, which is 1 in truth, and u is measured at 50 points.

# %%
net, k = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)), nn.Parameter(torch.tensor(3.0))
terms = {
    "inside": lambda u, k, x: k * ng.laplacian(u, x) + 2 * math.pi**2 * solution(x),
    "data": lambda u, k, x, measured: u(x) - measured,
}
opt = ng.residuals({"u": net, "k": k}, terms)
sensors = torch.rand(50, 2)
for _ in range(80):
    opt.step(inside=inside, data=(sensors, solution(sensors)))
print(f"k = {k.item():.5f}")
assert abs(k.item() - 1) < 1e-2

# %% [markdown]
# The equations of the step, other methods and their names here: [physics-informed networks](../theory/residuals.md).
