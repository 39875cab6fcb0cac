"""Ground state of a transverse Ising chain: natural gradient steps on samples of a restricted Boltzmann machine."""

import torch

import natgrad as ng

h = ng.vmc.TransverseIsing(8, field=1.0)
psi = ng.LogAmplitude(ng.vmc.RBM(8, dtype=torch.float64))
sr = ng.stochastic_reconfiguration(psi, lr=0.1, damping=1e-3)
search = ng.vmc.GroundState(h, ng.vmc.Metropolis(h.space, samples=200), sr)

exact = ng.vmc.lowest_energy(h)
for done in (15, 30, 45):
    energy = search.run(15)[-1]
    print(f"step {done:3d}  energy {energy}  exact {exact:.4f}")
print(search.sampler.report())
assert abs(energy.mean - exact) < 4 * energy.error + 0.02
