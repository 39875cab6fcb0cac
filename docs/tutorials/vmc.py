# %% [markdown]
# # The ground state of a spin chain
#
# A quantum state of ten spins has 1,024 amplitudes. A small network gives any one of them, samples say which ones
# matter, and natural gradient steps in the energy (stochastic reconfiguration) bring it to the ground state. Beside
# natgrad, `pip install -e .` in its folder, it needs matplotlib: `pip install matplotlib`.

# %% [markdown]
# ## The Hamiltonian
#
# Spins in a row prefer to agree with their neighbours, and a field across turns them over:
# $H = -\sum_i z_i z_{i+1} - h \sum_i x_i$. At $h = 1$ the two just balance. The chain is small enough for the exact
# energy, which the network never sees.

# %%
import matplotlib.pyplot as plt
import torch

import natgrad as ng

h = ng.vmc.TransverseIsing(10, field=1.0)
exact = ng.vmc.lowest_energy(h)
print(f"exact energy {exact:.6f}")

# %% [markdown]
# What a state is connected with: itself, and every state with one spin turned over.

# %%
state = torch.ones(1, 10, dtype=torch.float64)
others, elements = h.connected(state)
print(len(others[0]), "states, with elements", elements[0].tolist())

# %% [markdown]
# ## The wave function and its samples
#
# A restricted Boltzmann machine returns $\log\psi(s)$. Two hundred Markov chains flip one spin at a time and so draw
# states from $|\psi|^2$; they go on from step to step.

# %%
psi = ng.LogAmplitude(ng.vmc.RBM(10, dtype=torch.float64))
sampler = ng.vmc.Metropolis(h.space, samples=200)
print(psi(state).item(), tuple(sampler.draw(psi).states.shape), sampler.report())

# %% [markdown]
# ## Natural steps in the energy
#
# `step(states, local_energies)` takes samples of any origin. One step by hand:

# %%
sr = ng.stochastic_reconfiguration(psi, lr=0.1, damping=1e-3)
states = sampler.draw(psi).states
local_energies = ng.vmc.local_energies(psi, h, states)
print("energy at the start", sr.step(states, local_energies))
print(sr.state_report())

# %% [markdown]
# `GroundState` does the same in a loop. Every energy comes with its error.

# %%
search = ng.vmc.GroundState(h, sampler, sr)
energies = search.run(60)
mean = torch.tensor([one.mean for one in energies])
error = torch.tensor([one.error for one in energies])

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.plot(mean, color="#1d4ed8", label="sampled energy")
axes.fill_between(range(len(mean)), mean - 2 * error, mean + 2 * error, color="#1d4ed8", alpha=0.25)
axes.axhline(exact, color="black", linewidth=1, label="exact")
axes.set(xlabel="step", ylabel="energy", ylim=(exact - 0.1, exact + 0.6), title="Energy with two standard errors")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## How good is it?
#
# The energy's variance vanishes in an eigenstate, so it tells how near one is without knowing the exact energy. Here
# all states can be summed over, which leaves no noise.

# %%
final = search.measure(draws=10)
whole = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), sr).measure()
print("sampled", final, "variance", f"{final.variance:.4f}")
print(f"summed over all states {whole.mean:.6f}, relative error {(whole.mean - exact) / abs(exact):.1e}")
assert 0 < (whole.mean - exact) / abs(exact) < 2e-3
assert abs(final.mean - whole.mean) < 5 * final.error

# %% [markdown]
# [Variational Monte Carlo](../theory/vmc.md) has the equations, other lattices, molecules, and large networks.
