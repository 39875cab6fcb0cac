"""Objectives for the tests of searches."""

from __future__ import annotations

import torch
from torch import Tensor


def sphere(X: Tensor) -> Tensor:
    return X.square().sum(-1)


def ellipsoid(X: Tensor) -> Tensor:
    d = X.shape[-1]
    return (X.square() * 1e6 ** (torch.arange(d, dtype=X.dtype) / (d - 1))).sum(-1)


def rosenbrock(X: Tensor) -> Tensor:
    return (100 * (X[..., 1:] - X[..., :-1].square()).square() + (1 - X[..., :-1]).square()).sum(-1)


def one_value(x: Tensor) -> float:
    """The sphere at one point, at module level so that processes can be sent it."""
    return float(x.square().sum())
