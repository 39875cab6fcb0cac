"""Norms whose positions are summed before anything is made of them: the scores are those of autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from natgrad.ground.spaces import Space
from natgrad.layers.hearing import hear_rows, record_pass

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 2)),
    "its shift alone": (lambda: freeze(nn.BatchNorm2d(3), "weight"), (4, 3, 5, 2)),
    "layer norm": (lambda: nn.LayerNorm(3), (4, 6, 3)),
    "root mean square": (lambda: nn.RMSNorm(3), (4, 6, 3)),
    "as many positions as cotangents": (lambda: nn.LayerNorm(3), (4, 2, 3)),
}


def freeze(norm: nn.Module, name: str) -> nn.Module:
    norm.get_parameter(name).requires_grad_(False)
    return norm


@pytest.mark.parametrize("case", NORMS)
def test_deltas_times_activations_are_the_scores_of_every_example(case: str) -> None:
    build, shape = NORMS[case]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    norm = build().double()
    params = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    cotangents = [torch.randn(shape, generator=generator, dtype=torch.float64).flatten(1) for _ in range(2)]

    def run() -> Tensor:
        return norm(inputs).tanh().flatten(1)

    (seen,) = hear_rows(record_pass(norm, Space(params), run), torch.float64, cotangents, shape[0])
    for deltas, cotangent in zip(seen.deltas, cotangents, strict=True):
        scores = torch.einsum("btgo,btgd->bgod", deltas, seen.activations)
        for i in range(shape[0]):
            own = torch.zeros_like(cotangent)
            own[i] = cotangent[i]
            slopes = torch.autograd.grad(run(), list(params.values()), own)
            assert_close(scores[i], seen.layer.layout.join(dict(zip(params, slopes, strict=True))))
