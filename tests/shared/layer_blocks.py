"""Blocks of layers beside the dense matrix that they are parts of."""

from __future__ import annotations

from typing import Any

import torch
from models import CASES, assert_close, reference_metric
from torch import Tensor

import natgrad as ng
from natgrad.operators import Arranged, Units


def operator_of(structure: ng.Structure, name: str) -> tuple[Arranged, Tensor, ng.Operator]:
    """The structure's operator on a case, the dense Fisher at the same random state, and the exact operator."""
    case = CASES[name]
    model, params = case.make()
    random, metric = torch.get_rng_state(), ng.fisher(model, case.family)
    dense = reference_metric(case, model, params)
    operator, _ = structure.update(None, metric, params, case.inputs)
    torch.set_rng_state(random)
    assert isinstance(operator, Arranged)
    return operator, dense, metric.at(params, case.inputs)


def place(operator: Arranged, layout: Any) -> Tensor:
    """Where a layer's matrix lies in the vector."""
    entries = torch.arange(operator.size)
    views = {name: entries[b.start : b.stop].view(b.shape) for name, b in operator.space.blocks.items()}
    return layout.join(views).reshape(-1)


def assert_blocks(operator: Arranged, dense: Tensor) -> None:
    """Every layer's block is that of the dense matrix."""
    for layout, part in operator.parts:
        where = place(operator, layout)
        assert_close(part.dense(), dense[where][:, where], 1e-11, scale=dense.abs().max())


def assert_units(operator: Arranged, dense: Tensor, rtol: float) -> None:
    """Each unit's block is that of the dense metric, and of a parameter without a layer the diagonal is."""
    for layout, part in operator.parts:
        where = place(operator, layout)
        expected = dense[where][:, where]
        if isinstance(part, Units):
            for i, block in enumerate(part.matrices):
                own = slice(i * len(block), (i + 1) * len(block))
                assert_close(block, expected[own, own], rtol, scale=dense.abs().max())
        else:
            assert_close(part.diagonal(), expected.diagonal(), rtol)
