"""What the runs of Karakida, Okada & Amari 2016 start from: data of independent subspaces, initial conditions."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.ground.spaces import Positive, Square

SUBSPACES, WIDTH = 4, 2
N = SUBSPACES * WIDTH
PURE = 0.9
"""Share of what a unit pools above which it belongs to one subspace."""
LARGE = 0.1
"""Units that pool less than this share of the largest one's have vanished."""


def isa(seed: int, examples: int) -> Tensor:
    """x = A (s_1 .. s_4), s_i = u_i N(0, I_2), u_i uniform on (0, 1); (examples, 8) in float64.

    A is a random orthogonal matrix and there is no whitening: the paper says "random mixing matrix" only, and other
    mixings give test errors between -6 and -1190, none of them the paper's.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = draw_mixing(generator)
    scales = torch.rand(examples, SUBSPACES, 1, generator=generator, dtype=torch.float64)
    sources = torch.randn(examples, SUBSPACES, WIDTH, generator=generator, dtype=torch.float64)
    return (scales * sources).flatten(1) @ mixing.mT


def draw_mixing(generator: torch.Generator) -> Tensor:
    """A, a random orthogonal matrix, (8, 8)."""
    return torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64))[0]


def count_units(params: dict[str, Tensor], link: Positive | Square, seed: int) -> list[tuple[int, int]]:
    """For each model the subspaces that have a unit of their own, and the units that merge subspaces.

    A unit h pools sum_j V_hj |w_j|^2, which the rows w_j of W A split among the subspaces.
    """
    mixing = draw_mixing(torch.Generator().manual_seed(seed))
    W, V = params["W"].detach().cpu().double(), link(params["V"].detach().cpu().double())
    rows = (W @ mixing).square().unflatten(-1, (SUBSPACES, WIDTH)).sum(-1)  # (R, J, subspaces)
    pooled = V @ rows
    sizes = pooled.sum(-1)
    large = sizes > LARGE * sizes.amax(-1, keepdim=True)
    pure = pooled > PURE * sizes.unsqueeze(-1)
    own = (pure & large.unsqueeze(-1)).any(1).sum(-1)
    merged = (large & ~pure.any(-1)).sum(-1)
    return list(zip(own.tolist(), merged.tolist(), strict=True))


def starts(
    seed: int, runs: int, link: Positive | Square, spread: float = 0.3, pooling: float = 1.0
) -> dict[str, Tensor]:
    """W ~ spread N(0, 1) and V uniform on (0, pooling), whatever the link; {"W", "V"}, (runs, 8, 8) in float64.

    The paper says "randomly chosen initial conditions" only. From V = exp(.5 N(0, 1)) `ng.ang` reached -28 in 27 of 30
    runs, the paper's methods at its rate in 3 of 10 within 45,000 steps.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    W = spread * torch.randn(runs, N, N, generator=generator, dtype=torch.float64)
    V = torch.rand(runs, N, N, generator=generator, dtype=torch.float64).clamp(min=1e-3) * pooling
    return {"W": W, "V": link.inverse(V)}
