# %% [markdown]
# # Information geometry of the normal, in pictures
#
# The normal distributions of one variable form a curved surface whose distance is measured in nats. This page draws
# its shortest paths, its two kinds of straight lines, balls of constant KL divergence, and two gradient flows. SciPy
# integrates flows: `pip install scipy`.

# %% [markdown]
# ## Distance
#
# A point is (mean, standard deviation). `HalfPlane` is the manifold with the Fisher metric: the hyperbolic plane.
# Between wide distributions the same shift of the mean is a shorter way.

# %%
import matplotlib.pyplot as plt
import torch

from natgrad.families import Normal
from natgrad.flows import flow
from natgrad.geometry import HalfPlane, e_geodesic, kl_ball, m_geodesic

plane, normal = HalfPlane(), Normal()


def point(mean: float, deviation: float) -> torch.Tensor:
    return torch.tensor([mean, deviation], dtype=torch.float64)


for deviation in (1.0, 10.0, 1000.0):
    d = plane.distance(point(0, deviation), point(10, deviation))
    print(f"from N(0, {deviation:g}²) to N(10, {deviation:g}²): {float(d):.4f}")


# %% [markdown]
# ## Three ways from one normal to another
#
# The **geodesic** is the shortest way. The **e-geodesic** is a straight line in the natural parameters, and the
# **m-geodesic** one in the expectation parameters (mean of $x$ and of $x^2$). These two are the dual flat geometries
# of an exponential family.


# %%
def natural(p: torch.Tensor) -> torch.Tensor:  # (mean, deviation) -> natural parameters
    return normal.natural(torch.stack([p[..., 0], p[..., 0] ** 2 + p[..., 1] ** 2], -1))


def mean_and_deviation(theta: torch.Tensor) -> torch.Tensor:
    eta = normal.expectation(theta)
    return torch.stack([eta[..., 0], (eta[..., 1] - eta[..., 0] ** 2).sqrt()], -1)


a, b = point(-2.0, 0.6), point(2.0, 1.0)
times = torch.linspace(0, 1, 41, dtype=torch.float64)
shortest = plane.geodesic(a, b, times)
straight_e = mean_and_deviation(torch.stack([e_geodesic(normal, natural(a), natural(b), t) for t in times]))
straight_m = mean_and_deviation(torch.stack([m_geodesic(normal, natural(a), natural(b), t) for t in times]))


def length(path: torch.Tensor) -> float:
    return float(plane.distance(path[:-1], path[1:]).sum())


lengths = {"geodesic": length(shortest), "e-geodesic": length(straight_e), "m-geodesic": length(straight_m)}
for name, value in lengths.items():
    print(f"{name}: length {value:.3f}")
assert lengths["geodesic"] == min(lengths.values())
assert abs(lengths["geodesic"] - float(plane.distance(a, b))) < 5e-3

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
ways = ((shortest, "-", "geodesic"), (straight_e, "--", "e-geodesic"), (straight_m, ":", "m-geodesic"))
for path, style, name in ways:
    left.plot(path[:, 0], path[:, 1], style, label=f"{name}, length {lengths[name]:.2f}")
left.plot(*torch.stack([a, b]).T, "o")
left.set(title="Three ways between two normals", xlabel="mean", ylabel="standard deviation", ylim=(0, None))
left.legend()
grid = torch.linspace(-5, 5, 300, dtype=torch.float64)
for path, style, name in ways:
    mean, deviation = path[20]
    density = torch.exp(-0.5 * ((grid - mean) / deviation) ** 2) / (deviation * (2 * torch.pi) ** 0.5)
    right.plot(grid, density, style, label=name)
right.set(title="The distribution half way", xlabel="x", ylabel="density")
right.legend()
plt.show()

# %% [markdown]
# ## The generalised theorem of Pythagoras
#
# Where an m-geodesic from $p$ meets an e-geodesic to $q$ at a right angle, in $r$, $KL(p, q) = KL(p, r) + KL(r, q)$.
# Normals with deviation $\sqrt 5$ are an e-geodesic. The nearest of them to $p$ is $r$, which has $p$'s mean.

# %%
p, r, q = point(1.0, 2.0), point(1.0, 5.0**0.5), point(-1.5, 5.0**0.5)


def kl(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(normal.kl(natural(first), natural(second)))


def fixed_deviation_projection(first: torch.Tensor) -> torch.Tensor:
    """The nearest normal of deviation sqrt(5) in KL(first, .): the same mean."""
    return torch.stack([first[0], torch.tensor(5.0**0.5, dtype=torch.float64)])


assert torch.allclose(fixed_deviation_projection(p), r)
print(f"KL(p, q) = {kl(p, q):.6f}, KL(p, r) + KL(r, q) = {kl(p, r) + kl(r, q):.6f}")
assert abs(kl(p, q) - kl(p, r) - kl(r, q)) < 1e-10

# %% [markdown]
# ## Balls of constant divergence
#
# Around each centre, all normals at KL = .05 nats. They are of one size in standard deviations: small where the
# deviation is small.

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for deviation in (0.4, 1.0, 2.0):
    for mean in (-3.0, 0.0, 3.0):
        ball = mean_and_deviation(kl_ball(normal, natural(point(mean, deviation)), 0.05, 60))
        axes.plot(*torch.cat([ball, ball[:1]]).T, "-", color="#1d4ed8")
        axes.plot(mean, deviation, ".", color="#1b1f24")
axes.set(
    title="Normals at KL = .05 nats around nine centres", xlabel="mean", ylabel="standard deviation", ylim=(0, None)
)
plt.show()

# %% [markdown]
# ## Two flows
#
# Minimise $F = \mathbb{E}[x^4 / 4 - 2 x^2 - x]$ over normals. The natural gradient flow is the same curve whatever
# the coordinates; the Euclidean one depends on them. Both are integrated from the same four starts, the Euclidean one
# in (mean, deviation).


# %%
def objective(p: torch.Tensor) -> torch.Tensor:  # closed form of E[f] in (mean, deviation)
    m, s = p[..., 0], p[..., 1]
    return (m**4 + 6 * m**2 * s**2 + 3 * s**4) / 4 - 2 * (m**2 + s**2) - m


def descend(start: torch.Tensor, natural_gradient: bool, steps: int = 100, rate: float = 0.04) -> torch.Tensor:
    path = [start]
    for _ in range(steps):
        at = path[-1].clone().requires_grad_()
        (g,) = torch.autograd.grad(objective(at).sum(), at)
        direction = plane.natural(path[-1], g) if natural_gradient else g
        path.append(plane.retract(path[-1], -rate * direction))
    return torch.stack(path)


starts = torch.stack([point(-2.5, 1.2), point(-0.5, 2.0), point(0.5, 0.5), point(2.5, 1.5)])
m, s = torch.linspace(-3, 3, 120).double(), torch.linspace(0.02, 2.4, 120).double()
values = objective(torch.cartesian_prod(m, s)).reshape(120, 120).T
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
for ax, is_natural in zip(axes, (True, False), strict=True):
    ax.contour(m, s, values, torch.linspace(-6, 20, 27).tolist(), colors="0.75", linewidths=0.6)
    for path in descend(starts, is_natural).unbind(1):
        ax.plot(*path.T, "-", color="#1d4ed8")
        ax.plot(*path[0], "o", color="#1b1f24")
    ax.set(title="Natural gradient" if is_natural else "Euclidean gradient", xlabel="mean", xlim=(-3, 3), ylim=(0, 2.4))
axes[0].set(ylabel="standard deviation")
plt.show()

# %% [markdown]
# The flow is available by itself too, integrated adaptively and in coordinates of your choice: here in the natural
# parameters, where it has to end at the same distribution.

# %%
end = flow(lambda theta: objective(mean_and_deviation(theta)), normal, natural(starts[3]), [0.0, 4.0])
by_hand = descend(starts[3], True)[-1]
print("flow in natural parameters:", mean_and_deviation(end.points[-1]).tolist())
print("small steps in (mean, deviation):", by_hand.tolist())
assert torch.allclose(mean_and_deviation(end.points[-1])[0], by_hand[0], atol=0.02)

# %% [markdown]
# [Geometry](../theory/geometry.md) has the other manifolds, and [Malagò 2023](../papers/malago_2023.md) the figures
# of the lectures that these follow.
