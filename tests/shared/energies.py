"""Small densities for the tests: the two-layer model, a Gaussian with its sigma points, a table over two bits."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from models import F64, build_seeded, draw, tensor
from torch import Tensor, nn

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "scores.json").read_text(encoding="utf-8"))


def two_layers(params: Any, x: Tensor) -> Tensor:
    """Koster & Hyvarinen's model: log p = -sum_h sqrt(1 + v_h . (W x)^2)."""
    return -torch.sqrt(1 + params["V"] @ (params["W"] @ x).square()).sum()


def vector_case(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters and examples of a reference case of the two-layer model."""
    given = VECTORS[name]["inputs"]
    return {key: tensor(given[key]).requires_grad_() for key in ("W", "V")}, tensor(given["X"])


def gaussian(params: Any, x: Tensor) -> Tensor:
    """log p = -|A x|^2 / 2: precision A^T A."""
    return -0.5 * (params["A"] @ x).square().sum()


def gaussian_case() -> tuple[dict[str, Tensor], Tensor]:
    """Parameters, and points whose mean of any quadratic is its expectation under the model."""
    factor = torch.eye(3, dtype=F64) + 0.3 * draw(3, 3)
    columns = torch.linalg.inv(factor).mT * 3**0.5
    return {"A": factor.requires_grad_()}, torch.cat([columns, -columns])


COUNTS = (1, 4, 2, 3)


def table(params: Any, x: Tensor) -> Tensor:
    """Every pair interaction of two bits: log p = a x0 + b x1 + c x0 x1."""
    return params["t"] @ torch.stack([x[0], x[1], x[0] * x[1]])


def table_case() -> tuple[dict[str, Tensor], Tensor]:
    """Parameters, and states as often as the model has them: p is COUNTS / 10 over 00, 01, 10, 11."""
    states = [tensor(bits) for bits in itertools.product((0, 1), repeat=2)]
    zero, second, first, both = tensor(COUNTS).log()
    params = {"t": torch.stack([first - zero, second - zero, both - first - second + zero]).requires_grad_()}
    return params, torch.stack([s for s, count in zip(states, COUNTS, strict=True) for _ in range(count)])


def energy_net(inputs: int = 3) -> nn.Module:
    return build_seeded(
        lambda: nn.Sequential(nn.Linear(inputs, 5), nn.Softplus(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    )


RATIOS = VECTORS["ratio_matching"]


def boltzmann(params: Any, x: Tensor) -> Tensor:
    """The reference's machine over {-1, 1}, as a function of bits."""
    h, couplings = params["xi"][:3], params["xi"][3:]
    s = 2 * x - 1
    return h @ s + couplings @ torch.stack([s[0] * s[1], s[0] * s[2], s[1] * s[2]])


def weighted_states() -> Tensor:
    """The reference's states as bits, each as often as q has it in twentieths."""
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * 3)
    return states.repeat_interleave((20 * tensor(RATIOS["inputs"]["q"])).round().long(), dim=0)
