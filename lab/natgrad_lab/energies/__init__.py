"""Models without their constant: ratio matching of Boltzmann machines, denoising score matching of energy networks."""
