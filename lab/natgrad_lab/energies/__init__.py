"""Unnormalised densities: ratio matching of Boltzmann machines, denoising score matching of energy networks."""
