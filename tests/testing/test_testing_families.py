"""The public check of exponential families passes honest ones and finds each lie."""

from __future__ import annotations

import pytest
import torch
from models import F64
from torch import Tensor

import natgrad as ng
from natgrad.testing import check_exponential_family


def points(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


class Counts(ng.ExponentialFamily):
    """Poisson in three lines; `lie` says what is wrong with it."""

    size = 1

    def __init__(self, lie: str = "") -> None:
        self.lie = lie

    def statistics(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1) if self.lie != "statistics" else 1 + x.unsqueeze(-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        return theta.exp().squeeze(-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        rate = theta.squeeze(-1).exp().expand(count, *theta.shape[:-1])
        return torch.poisson(rate, generator=None if self.lie == "draw" else generator)

    def log_base(self, x: Tensor) -> Tensor:
        return -torch.lgamma(x + 1) if self.lie != "base" else torch.zeros_like(x)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        k = torch.arange(200, dtype=theta.dtype)
        p = torch.exp(theta * k - theta.exp() - torch.lgamma(k + 1))
        return theta.new_zeros(theta.shape[:-1]) - (p * torch.lgamma(k + 1)).sum(-1) * (
            self.lie not in ("entropy", "base")
        )

    def expectation(self, theta: Tensor) -> Tensor:
        return super().expectation(theta) * (1.01 if self.lie == "expectation" else 1)

    def covariance(self, theta: Tensor) -> Tensor:
        return super().covariance(theta) * (1.01 if self.lie == "covariance" else 1)

    def natural(self, eta: Tensor) -> Tensor:
        found = eta.log()
        return found.detach() + 0 * eta if self.lie == "natural" else found

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return super().kl(theta, other) if self.lie != "kl" else super().kl(other, theta)


LIES = {
    "statistics": r"E\[T\]",
    "draw": "one generator state|global random state",
    "entropy": r"-E\[log p\]",
    "base": r"adds up to .*: log_base\(x\) = log h\(x\) is missing",
    "expectation": "grad psi",
    "covariance": "Hess psi",
    "natural": "d natural",
    "kl": r"family.kl\(p, q\)",
}


def test_a_family_of_one_s_own_passes():
    check_exponential_family(Counts(), points([0.3], [-0.5]), samples=4000)


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_is_found(lie):
    with pytest.raises(AssertionError, match=LIES[lie]):
        check_exponential_family(Counts(lie), points([0.3], [-0.5]), samples=4000)
