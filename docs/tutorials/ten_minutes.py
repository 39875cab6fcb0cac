# %% [markdown]
# # Ten minutes with ng.kfac
#
# Train a classifier with Adam, change two lines, and train it with the natural gradient. Then look at what the
# optimiser did. The tutorials draw with matplotlib, and this one takes its data from scikit-learn:
# `pip install matplotlib scikit-learn`.

# %% [markdown]
# ## The data
#
# Scikit-learn brings 1797 images of handwritten digits, 8 by 8 pixels each. The first 1400 are for training, the
# others for testing.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import natgrad as ng

images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
train, test = slice(0, 1400), slice(1400, None)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def draw_batches(steps: int, size: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1400, (size,), generator=generator) for _ in range(steps)]


# %% [markdown]
# ## A training loop with Adam
#
# Of the rates .01, .03, .1 and .3, a rate of .03 gives the lowest training loss here.

# %%
criterion = nn.CrossEntropyLoss()
model = make_model()
opt = torch.optim.Adam(model.parameters(), lr=0.03)

adam_losses = []
for batch in draw_batches(100):
    opt.zero_grad()
    loss = criterion(model(images[batch]), labels[batch])
    loss.backward()
    opt.step()
    adam_losses.append(float(loss.detach()))
adam = model

# %% [markdown]
# ## The same loop with `ng.kfac`
#
# Two lines change. The optimiser gets the model and the criterion, because the metric is that of the model's outputs.
# The loss comes from `opt.loss`, which returns the criterion's value and on some steps also reads the layers'
# statistics. Nothing has to be tuned: the length of a step is found.

# %%
model = make_model()
opt = ng.kfac(model, criterion)  # was: torch.optim.Adam(model.parameters(), lr=0.03)

kfac_losses = []
for batch in draw_batches(100):
    opt.zero_grad()
    loss = opt.loss(model(images[batch]), labels[batch])  # was: criterion(model(images[batch]), labels[batch])
    loss.backward()
    opt.step()
    kfac_losses.append(float(loss.detach()))
kfac = model

# %% [markdown]
# Schedulers, gradient clipping, mixed precision, accumulation and checkpoints work as with every other optimiser of
# torch.
#
# ## What came out


# %%
@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    return float((model(images[test]).argmax(1) == labels[test]).float().mean())


@torch.no_grad()
def test_loss(model: nn.Module) -> float:
    return float(criterion(model(images[test]), labels[test]))


print("             test accuracy   test loss in nats")
print(f"Adam, .03    {accuracy(adam):.3f}           {test_loss(adam):.3f}")
print(f"ng.kfac      {accuracy(kfac):.3f}           {test_loss(kfac):.3f}")
assert accuracy(kfac) > 0.9

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.plot(adam_losses, "--", label="Adam, rate .03")
axes.plot(kfac_losses, "-", label="ng.kfac, defaults")
axes.set(yscale="log", xlabel="step", ylabel="training loss of the batch, nats", title="Digits, batches of 128")
axes.legend()
plt.show()

# %% [markdown]
# A race with one seed and one rate for Adam proves nothing. [Benchmarks](../benchmarks/index.md) has races in which
# every contestant is tuned, and says where natgrad loses.
#
# ## What the optimiser tells
#
# `opt.report()` has a row per parameter: which structure holds its part of the metric, and how many numbers are
# remembered for it.

# %%
print(opt.report())

# %% [markdown]
# `opt.state_report()` tells how the last step went. `kl` is how far the step moved the model, in nats per example.
# The [next tutorial](state_report.md) reads the other numbers.

# %%
print(opt.state_report())

# %% [markdown]
# ## Where to go on
#
# - The step by itself: [the step of kfac](../theory/step.md).
# - Another metric, structure or rule: [how to choose](../choose.md).
# - The metric as an object to look at: [the exact Fisher of a small model](exact_fisher.md).
