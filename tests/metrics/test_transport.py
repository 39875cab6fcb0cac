"""The Wasserstein metric of samples: against its definition, and where mass moves without cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import F64, assert_close
from torch import Tensor

import natgrad as ng
from natgrad.metrics import RBF
from natgrad.testing import check_metric, check_operator

Z = torch.randn(40, 2, dtype=F64, generator=torch.Generator().manual_seed(0))


def warp(params: Any, z: Tensor) -> Tensor:
    """A small map of the plane."""
    return torch.tanh(z @ params["A"]) + params["b"] * z.square()


def parameters() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {"A": torch.randn(2, 2, dtype=F64, generator=g), "b": torch.randn(2, dtype=F64, generator=g)}


def jacobian(model: Any, params: dict[str, Tensor], z: Tensor) -> Tensor:
    """d x / d theta, (N, d, n)."""
    parts = torch.func.jacrev(model)(params, z)
    return torch.cat([part.flatten(2) for part in parts.values()], dim=2)


def test_without_a_kernel_it_is_the_cost_of_moving_every_sample():
    found = ng.transport_metric(warp).at(parameters(), Z)
    rows = jacobian(warp, parameters(), Z)
    check_operator(found)
    assert_close(found.dense(), torch.einsum("ndi,ndj->ij", rows, rows) / len(Z))
    check_metric(ng.transport_metric(warp), parameters(), Z)


def test_the_kernelised_metric_is_its_definition():
    """T, C and K by autodiff from k alone."""
    bandwidth, lam, many = 0.8, 1e-3, 12
    kernel = RBF(bandwidth)
    metric = ng.transport_metric(
        warp, kernel=kernel, basis=many, regularization=lam, generator=torch.Generator().manual_seed(5)
    )
    found = metric.at(parameters(), Z)
    check_operator(found)
    samples = warp(parameters(), Z)
    pairs = torch.randperm(len(Z) * 2, generator=torch.Generator().manual_seed(5))[:many]
    points, axes = samples[pairs // 2], pairs % 2

    def h(x: Tensor) -> Tensor:  # (M,) at one x
        slopes = torch.func.vmap(torch.func.grad(kernel), (0, None))(points, x)
        return slopes[torch.arange(many), axes]

    c = torch.func.vmap(torch.func.jacrev(h))(samples)  # (N, M, d)
    k = torch.func.vmap(torch.func.jacrev(h))(points)[torch.arange(many), :, axes]
    t = torch.func.jacrev(lambda p: torch.func.vmap(h)(warp(p, Z)).mean(0))(parameters())
    t = torch.cat([part.flatten(1) for part in t.values()], dim=1)
    inner = torch.linalg.inv(lam * k + torch.einsum("nmd,nld->ml", c, c) / len(Z))
    assert_close(found.dense(), t.mT @ inner @ t, rtol=1e-7)


def test_the_usual_bandwidth_is_the_median_distance():
    bandwidth = float(torch.pdist(warp(parameters(), Z)).median())
    usual, told = (
        ng.transport_metric(warp, kernel=kernel, basis=12, generator=torch.Generator().manual_seed(5))
        for kernel in (RBF(), RBF(bandwidth))
    )
    assert_close(usual.at(parameters(), Z).dense(), told.at(parameters(), Z).dense())


def test_a_gaussian_s_mean_and_spread():
    """N(m, s^2) has the Wasserstein metric diag(1, 1) in (m, s)."""

    def scale_samples(params: Any, z: Tensor) -> Tensor:
        return params["m"] + params["s"] * z

    params = {"m": torch.tensor(0.5, dtype=F64), "s": torch.tensor(2.0, dtype=F64)}
    z = torch.randn(2000, dtype=F64, generator=torch.Generator().manual_seed(2))
    z = (z - z.mean()) / z.square().mean().sqrt()
    for kernel in (None, RBF(4.0)):
        found = ng.transport_metric(scale_samples, kernel=kernel, basis=50, regularization=1e-9).at(params, z).dense()
        assert_close(found, torch.eye(2, dtype=F64), rtol=0.02)


BAD = {
    "kernel": (lambda: ng.transport_metric(warp, kernel=3), TypeError),  # type: ignore[arg-type]
    "basis": (lambda: ng.transport_metric(warp, basis=0), ValueError),
    "regularization": (lambda: ng.transport_metric(warp, regularization=0.0), ValueError),
    "bandwidth": (lambda: RBF()(Z[0], Z[1]), ValueError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, error = BAD[name]
    with pytest.raises(error, match=f"^{name} is"):
        call()
