# %% [markdown]
# # A Helmholtz machine that dreams
#
# A Helmholtz machine learns to generate images of bits, and a second network beside it learns to recognise them.
# Natural wake-sleep trains both. Here the machine sees small images of bars, and in the end it dreams bars of its
# own.

# %% [markdown]
# ## The data
#
# Images of 4 by 4 pixels: first vertical or horizontal, with the same chance, then every bar in that direction is lit
# with chance .4.

# %%
import matplotlib.pyplot as plt
import torch

import natgrad as ng

torch.manual_seed(0)


def draw_bars(count: int) -> torch.Tensor:
    lit = (torch.rand(count, 4) < 0.4).float().unsqueeze(2).expand(-1, 4, 4)
    vertical = torch.rand(count, 1, 1) < 0.5
    return torch.where(vertical, lit.mT, lit).reshape(count, 16)


data = draw_bars(2000)

# %% [markdown]
# ## The machine
#
# 16 visible units, below 10 and 4 hidden ones. Every unit is a logistic regression on its parents, so the Fisher
# matrix of each network has one block per unit, and the natural gradient is exact and cheap.

# %%
bars_machine = ng.HelmholtzMachine([16, 10, 4])
before = float(bars_machine.log_likelihood(data[:300], samples=200).mean())
trainer = ng.NaturalWakeSleep(bars_machine, lr=0.2, samples=5)
generator = torch.Generator().manual_seed(1)
bounds = []
for _ in range(400):
    batch = data[torch.randint(len(data), (100,), generator=generator)]
    bounds.append(float(trainer.step(batch)))
p = data.mean()
independent = float(16 * (p * p.log() + (1 - p) * (1 - p).log()))
after = float(bars_machine.log_likelihood(data[:300], samples=200).mean())
print(
    f"mean log likelihood {before:.2f} nats before, {after:.2f} after; independent pixels would have {independent:.2f}"
)
assert after > before + 3

# %% [markdown]
# ## Dreams
#
# A dream is a draw from the generating network, from the top layer down. Nothing of the data is used.

# %%
dreams = bars_machine.sample(60)


def is_bars(images: torch.Tensor) -> torch.Tensor:
    squares = images.reshape(-1, 4, 4)
    return (squares == squares[:, :1]).flatten(1).all(1) | (squares == squares[:, :, :1]).flatten(1).all(1)


share = float(is_bars(bars_machine.sample(2000)).float().mean())
chance = float(is_bars((torch.rand(20_000, 16) < data.mean()).float()).float().mean())
print(f"{share:.0%} of the dreams are images of bars; of independent pixels {chance:.2%}")
assert share > 10 * chance


def lay_out(images: torch.Tensor, columns: int = 12) -> torch.Tensor:
    tiles = torch.nn.functional.pad(images.reshape(-1, 4, 4), (1, 1, 1, 1), value=0.5)
    return tiles.reshape(-1, columns, 6, 6).transpose(1, 2).reshape(-1, columns * 6)


figure, axes = plt.subplots(1, 3, figsize=(13, 2.6), layout="constrained", width_ratios=[1, 1, 0.8])
for ax, images, title in zip(axes, (data[:60], dreams), ("Sixty images of the data", "Sixty dreams"), strict=False):
    ax.imshow(lay_out(images).numpy(), cmap="Greys", vmin=0, vmax=1)
    ax.set(title=title, xticks=[], yticks=[])
smooth = torch.tensor(bounds).unfold(0, 20, 20).mean(1)
axes[2].plot(20 * torch.arange(len(smooth)), smooth)
axes[2].set(title="Bound on the log likelihood", xlabel="step", ylabel="nats per image")
plt.show()

# %% [markdown]
# [Várady, Volpi, Malagò and Ay 2022](../papers/varady_2022.md) has this on photographs of faces, clothes and MNIST's
# digits, with three layers of 200 units.
