"""A black box of real, whole and categorical variables: tune a small regression by its validation error."""

import math

import torch

import natgrad as ng

search = ng.search

torch.manual_seed(0)
x = torch.rand(80, 1, dtype=torch.float64) * 6 - 3
y = torch.sin(2 * x).squeeze(1) + 0.1 * torch.randn(80, dtype=torch.float64)
BASES = {"powers": lambda x, k: (x / 3) ** k, "cosines": lambda x, k: torch.cos(k * math.pi * (x + 3) / 6)}


def validation_error(point: torch.Tensor) -> float:
    """Mean squared error on the last 30 of ridge regression on the first 50; point: log10 ridge, terms, which basis."""
    ridge, terms, basis = 10 ** float(point[0]), int(point[1]), list(BASES.values())[int(point[2])]
    features = basis(x, torch.arange(terms, dtype=torch.float64))
    gram = features[:50].T @ features[:50] + ridge * torch.eye(terms, dtype=torch.float64)
    weights = torch.linalg.solve(gram, features[:50].T @ y[:50])
    return float((features[50:] @ weights - y[50:]).square().mean())


numbers = ng.GaussianSearch([0.0, 5.0], [2.0, 5.0], 12, seed=0, bounds=([-8, 1], [3, 30]), integers=[1])
kinds = search.CategoricalSearch([len(BASES)], 12, seed=0, update=search.PBIL(0.1, best=3))
result = ng.minimize(validation_error, search.ProductSearch(numbers, kinds), maxfevals=600, vectorized=False)
name = list(BASES)[int(result.x[2])]
print(f"error {result.fun:.4f} with {int(result.x[1])} {name}, ridge {10 ** float(result.x[0]):.2g}: {result.message}")
assert result.fun < 0.02
