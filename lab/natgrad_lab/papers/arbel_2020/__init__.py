"""Arbel, Gretton, Li & Montufar 2020: the Wasserstein metric of a model that is known by its samples alone."""
