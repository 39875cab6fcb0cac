# %% [markdown]
# # When it does not learn: reading state_report
#
# `opt.state_report()` says in numbers how the last step went. This page shows a healthy run, breaks it in four ways,
# and shows by which number each fault is seen.

# %% [markdown]
# ## A healthy run
#
# A network learns a curve from noisy points.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from torch import nn

import natgrad as ng

torch.manual_seed(0)
x = torch.linspace(-2, 2, 256).unsqueeze(1)
y = torch.sin(3 * x) + 0.1 * torch.randn_like(x)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 40, scale: float = 1.0) -> list:
    reports = []
    for _ in range(steps):
        opt.zero_grad()
        loss = opt.loss(model(x), scale * y)
        loss.backward()
        opt.step()
        reports.append(opt.state_report())
    return reports


model = make_model()
healthy = train(model, ng.kfac(model, nn.MSELoss()))
print(healthy[-1])
assert healthy[-1].loss < 0.1 * healthy[0].loss

# %% [markdown]
# | number | what it says | healthy |
# |---|---|---|
# | `loss` | mean loss of the batch before the step | falls |
# | `kl` | how far the step moved the model, in nats per example | positive, and not always at its bound |
# | `rate` | length of the step, relative to the [proposed one](../glossary.md#proposed-step) | above zero |
# | `status` | `stepped`, `skipped` or `refused` | `stepped` |
# | `failures` | batches left out: a number was not finite, or the loss far above all others | 0 |
# | `refused` | steps that were not taken because they raised the loss | few |
# | `gradient` | norm of the gradient of the mean loss | falls at the end |

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
for ax, name, unit in zip(axes, ("loss", "kl", "rate"), ("squared units of y", "nats per example", ""), strict=True):
    ax.plot([getattr(r, name) for r in healthy])
    ax.set(xlabel="step", ylabel=unit, yscale="log", title=name)
plt.show()

# %% [markdown]
# ## Fault 1: the steps are too short
#
# Somebody set a bound on the KL divergence that is far too small. Every step has exactly that `kl`, and the loss
# hardly moves.

# %%
model = make_model()
bounded_opt = ng.kfac(model, nn.MSELoss(), max_kl=1e-7)
bounded = train(model, bounded_opt)
print(
    f"loss {bounded[0].loss:.3f} -> {bounded[-1].loss:.3f}, kl of the last steps", [f"{r.kl:.1e}" for r in bounded[-3:]]
)
assert bounded[-1].loss > 5 * healthy[-1].loss

# %% [markdown]
# Take `max_kl` away, or make it larger.
#
# ## Fault 2: a batch that is not finite
#
# One input is not a number. The step is left out and counted, and the parameters stay as they were. Training goes on
# with the next batch. (A target that is not finite is an error at once: `opt.loss` says so.)

# %%
model = make_model()
opt = ng.kfac(model, nn.MSELoss())
train(model, opt, steps=5)
before = model[0].weight.detach().clone()
broken = x.clone()
broken[7] = torch.nan
opt.zero_grad()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opt.loss(model(broken), y).backward()
    opt.step()
report = opt.state_report()
print(f"status {report.status}, failures {report.failures}")
assert report.failures == 1
assert torch.equal(before, model[0].weight)

# %% [markdown]
# If `failures` keeps growing, look at the data and the loss, not at the optimiser.
#
# ## Fault 3: targets in another unit
#
# With the mean squared error the metric is that of a Gaussian, and its scale cancels: targets a thousand times larger
# give a loss a million times larger, and the same relative progress. Adam needs another rate here.

# %%
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
model = make_model()
large = train(model, ng.kfac(model, nn.MSELoss()), scale=1000.0)
for scale, reports, style in ((1.0, healthy, "-"), (1000.0, large, "--")):
    relative = [r.loss / reports[0].loss for r in reports]
    axes.plot(relative, style, label=f"targets times {scale:g}")
axes.set(yscale="log", xlabel="step", ylabel="loss relative to the first", title="A curve from 256 points, ng.kfac")
axes.legend()
plt.show()

# %% [markdown]
# ## Fault 4: the metric does not see the gradient
#
# A matrix-free optimiser solves $(G + \lambda I)\, d = g$ and reports how: `solver_steps`, `residual`, and `outside`,
# the share of the gradient that the metric leaves to the damping. With far too much damping nearly everything is
# outside, and a natural gradient step is an ordinary gradient step of length $1/\lambda$.

# %%
for damping in (1e-2, 1e4):
    model = make_model()
    opt = ng.natgrad_cg(model, nn.MSELoss(), lr=1.0, damping=damping)
    last = train(model, opt, steps=15)[-1]
    print(f"damping {damping:g}: loss {last.loss:.3f}, outside {last.outside:.3f}, {last.solver_steps} products")

# %% [markdown]
# ## The same in sentences
#
# `opt.explain()` looks at the last 20 steps, and says what set their length and what to try. Here it is asked after the
# first fault, where `max_kl` is far too small.

# %%
print(bounded_opt.explain())
assert "Try: a larger max_kl (now 1e-07)" in bounded_opt.explain()

# %% [markdown]
# ## What to do when it does not learn
#
# | you see | look at |
# |---|---|
# | `kl` always the same small number | the bound: `max_kl`, `kl_share`, `radius` |
# | `kl` fine, loss flat | whether the model can fit the data at all; the data's order; the targets |
# | `failures` grows | targets, losses and inputs that are not finite |
# | `refused` grows, `rate` 0 | noise between batches: a larger batch, or no Levenberg-Marquardt damping |
# | `outside` near 1 | a damping that is too large, or a metric on other data than the gradient |
# | `status` "no step yet" | `opt.step()` is not called, or the model is in evaluation mode |
# | everything fine, the end not low enough | let the rate fall: `torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.02, steps)` |
