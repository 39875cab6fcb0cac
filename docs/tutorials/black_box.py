# %% [markdown]
# # A black box, with pycma beside it
#
# A black box is a function that can only be evaluated. `ng.minimize` follows the natural gradient of its expectation
# under a normal distribution, which is what CMA-ES does. Here it searches a curved valley, beside pycma where that is
# installed.

# %% [markdown]
# ## The function
#
# Rosenbrock's function has its minimum 0 at (1, ..., 1), at the end of a narrow bent valley. No derivative is used.

# %%
import matplotlib.pyplot as plt
import torch

import natgrad as ng


def rosenbrock(X: torch.Tensor) -> torch.Tensor:  # (points, d) -> (points,)
    return (100 * (X[:, 1:] - X[:, :-1] ** 2) ** 2 + (1 - X[:, :-1]) ** 2).sum(1)


# %% [markdown]
# ## One call

# %%
result = ng.minimize(rosenbrock, torch.zeros(6), sigma0=0.5, ftarget=1e-8, seed=1)
print(f"{result.fun:.1e} after {result.nfev} evaluations: {result.message}")
assert result.success

# %% [markdown]
# ## The same by ask and tell
#
# Where the evaluations are made elsewhere, ask for candidates and tell their values. In two dimensions the search
# distribution can be drawn: it stretches along the valley and follows it.

# %%
search = ng.GaussianSearch(torch.tensor([-1.0, 1.0]), sigma0=0.4, seed=3)
seen = []
while not search.stop() and search.best.fun > 1e-10:
    X = search.ask()
    seen.append(X.clone())
    search.tell(X, rosenbrock(X))
print(f"best {search.best.fun:.1e} after {search.nfev} evaluations")
assert search.best.fun < 1e-10

side = torch.linspace(-1.8, 1.8, 160), torch.linspace(-0.8, 2.2, 160)
values = rosenbrock(torch.cartesian_prod(*side)).reshape(160, 160).T
figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
axes.contour(*side, (values + 1e-3).log10(), 14, cmap="Greys", linewidths=0.7)
for generation, marker in ((0, "o"), (10, "s"), (25, "^"), (len(seen) - 1, "*")):
    X = seen[generation]
    axes.plot(X[:, 0], X[:, 1], marker, label=f"generation {generation}")
axes.set(
    xlabel="first variable", ylabel="second variable", title="Candidates of GaussianSearch on Rosenbrock's function"
)
axes.set(xlim=(-1.8, 1.8), ylim=(-0.8, 2.2))
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# ## Beside pycma
#
# pycma is the reference implementation of CMA-ES (`pip install cma`). The comparison is left out where it is not
# installed.

# %%
try:
    import cma
except ImportError:
    cma = None

ours, theirs = [], []
for seed in range(1, 4):
    ours.append(ng.minimize(rosenbrock, torch.zeros(6), 0.5, ftarget=1e-8, seed=seed, vectorized=True).nfev)
    if cma:
        options = {"seed": seed, "ftarget": 1e-8, "verbose": -9}
        es = cma.CMAEvolutionStrategy(6 * [0.0], 0.5, options)
        while not es.stop():
            X = es.ask()
            es.tell(X, rosenbrock(torch.tensor(X)).tolist())
        theirs.append(es.result.evaluations)
print("evaluations to 1e-8, three seeds")
print("ng.minimize", sorted(ours))
print("pycma      ", sorted(theirs) if cma else "not installed")

# %% [markdown]
# Both are CMA-ES; `ng.minimize` also makes its draws [orthogonal](../theory/search.md#orthogonal-draws). [The
# tables](../benchmarks/search_tables.md) compare them on more functions.
#
# ## What pycma does not have
#
# The natural gradient also moves distributions over bits and over categories. A Markov field that knows the blocks
# finds the six traps of five bits at once, where independent bits are led away from every one of them.


# %%
def traps(X: torch.Tensor) -> torch.Tensor:  # each block of five: best when all are one, else better with fewer ones
    ones = X.reshape(len(X), 6, 5).sum(2)
    return -torch.where(ones == 5, 5.0, 4 - ones).sum(1)


blocks = [range(5 * i, 5 * i + 5) for i in range(6)]
field = ng.minimize(traps, ng.MarkovSearch(30, cliques=blocks, seed=1), ftarget=-30, vectorized=True)
single = ng.minimize(traps, ng.BernoulliSearch(30, seed=1), maxfevals=1000, restarts=0, vectorized=True)
print(
    f"Markov field: {field.fun:g} after {field.nfev} evaluations; independent bits: {single.fun:g} after {single.nfev}"
)
assert field.fun == -30
