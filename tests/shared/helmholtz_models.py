"""Small Helmholtz machines and rows that several test files share."""

from __future__ import annotations

from typing import Any

import torch
from models import F64
from torch import Tensor

import natgrad as ng
from natgrad.helmholtz import Bidirectional, Classic, Reweighted
from natgrad.helmholtz.units import LogisticRows
from natgrad.operators import SharedRows

BITS = torch.tensor([[1.0, 0, 1], [1, 1, 0], [0, 0, 1], [0, 1, 1]])
ALGORITHMS = [Classic(), Reweighted(), Reweighted(wake_phi=1.0), Reweighted(wake_phi=0.0), Bidirectional()]


def machine(**options: Any) -> ng.HelmholtzMachine:
    torch.manual_seed(0)
    found = ng.HelmholtzMachine([3, 2, 2], **options).double()
    with torch.no_grad():
        for layer in (*found.generation, *found.recognition):
            layer.weight.add_(0.7 * torch.randn(layer.weight.shape, dtype=F64) * layer.mask)
    return found


KINDS: dict[str, dict[str, Any]] = {
    "bits": {},
    "signs": {"units": (-1, 1)},
    "autoregressive": {"autoregressive": True},
    "fixed prior": {"prior": 0.3},
}


def data(kind: str) -> Tensor:
    return (2 * BITS - 1 if kind == "signs" else BITS).to(F64)


def some_rows(count: int, columns: int) -> LogisticRows:
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(count, dtype=F64, generator=generator) ** 4
    inputs = torch.randn(count, columns, dtype=F64, generator=generator)
    slopes = torch.rand(count, 2, dtype=F64, generator=generator)
    return LogisticRows(inputs, slopes, slopes, weights / (2 * weights.sum()), None)


def fisher(rows: LogisticRows) -> SharedRows:
    return SharedRows(rows.inputs, (rows.slopes * rows.weights.unsqueeze(1)).mT, rows.mask)
