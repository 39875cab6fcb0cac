"""Natural gradient descent, 2022: a derivation without an experiment, drawn on a model of two parameters."""
