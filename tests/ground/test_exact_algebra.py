"""Norms, determinants and solutions: torch's values, and second derivatives in forward mode that are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import assert_close
from torch import Tensor
from torch.nn import functional

import natgrad as ng

F64 = torch.float64
SIDE = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
POINTS = torch.tensor([[0.3, 0.4], [1.1, -0.5], [-0.7, 0.9]], dtype=F64)


def matrix(x: Tensor) -> Tensor:
    return 2 * torch.eye(3, dtype=F64) + SIDE @ torch.stack([x[0].sin(), x[0] * x[1]])


def positive(x: Tensor) -> Tensor:
    return matrix(x) @ matrix(x).mT + torch.eye(3, dtype=F64)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "det": lambda x: torch.det(matrix(x)) + matrix(x).det() + torch.linalg.det(matrix(x)[None])[0],
    "slogdet": lambda x: torch.slogdet(matrix(x))[1] + matrix(x).slogdet()[1] + torch.linalg.slogdet(matrix(x))[1],
    "slogdet, exchanged rows": lambda x: torch.linalg.slogdet(matrix(x)[[1, 0, 2]] * x[1]).logabsdet,
    "logdet": lambda x: torch.logdet(positive(x)) + positive(x).logdet(),
    "solve": lambda x: torch.linalg.solve(matrix(x), matrix(x.flip(0)))[0, 1],
    "solve, a vector": lambda x: torch.linalg.solve(matrix(x), x.new_ones(3))[0],
    "solve, from the right": lambda x: torch.linalg.solve(matrix(x)[None], matrix(x.flip(0))[None], left=False)[
        0, 0, 1
    ],
    "cholesky_inverse": lambda x: (
        torch.cholesky_inverse(torch.linalg.cholesky(positive(x)))[0, 1]
        + torch.linalg.cholesky(positive(x)).mT.cholesky_inverse(upper=True)[2, 1]
    ),
    "norm": lambda x: torch.norm(matrix(x)) + matrix(x).norm() + matrix(x).norm(2, 1).prod(),
    "linalg.norm": lambda x: torch.linalg.norm(matrix(x), dim=0).prod() + torch.linalg.norm(matrix(x)[1]),
    "vector_norm": lambda x: torch.linalg.vector_norm(matrix(x), dim=(0, 1), keepdim=True).sum(),
    "complex norm": lambda x: torch.linalg.vector_norm(torch.complex(matrix(x)[0], matrix(x)[1])),
    "normalize": lambda x: functional.normalize(matrix(x), dim=0)[0].sum(),
    "cosine_similarity": lambda x: (
        functional.cosine_similarity(matrix(x), matrix(x)[:1], dim=1).prod()
        + torch.cosine_similarity(matrix(x)[0], matrix(x)[1], 0)
    ),
    "glu": lambda x: functional.glu(torch.cat([matrix(x)[0], matrix(x)[1, :1]])).sum(),
    "other norms": lambda x: (
        torch.linalg.vector_norm(matrix(x), 3) + torch.norm(matrix(x), 3, 1)[0] + torch.linalg.norm(matrix(x)[2], 1)
    ),
}


def trace_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Laplacian by two backward passes through torch's own operations."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.stack([torch.autograd.grad(slope[i], x, retain_graph=True)[0][i] for i in range(2)]).sum()


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_in_forward_mode_are_those_of_backward_passes(name):
    function = CASES[name]
    expected = torch.stack([trace_backward(function, x) for x in POINTS])
    assert_close(torch.func.vmap(lambda x: ng.laplacian(function, x))(POINTS), expected, 1e-9)
    assert_close(torch.stack([ng.laplacian(function, x) for x in POINTS]), expected, 1e-9)
    with ng.exact_derivatives():
        values = torch.stack([function(x) for x in POINTS])
    assert_close(values, torch.stack([function(x) for x in POINTS]), 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_backward_pass_behind_two_forward_derivatives(name):
    function, x = CASES[name], POINTS[0].clone().requires_grad_()
    with ng.exact_derivatives():
        (found,) = torch.autograd.grad(ng.laplacian(function, x), x)
    h = 1e-5
    sides = [
        (trace_backward(function, x + h * e) - trace_backward(function, x - h * e)) / (2 * h) for e in torch.eye(2)
    ]
    assert_close(found, torch.stack(sides).to(F64).detach(), 1e-5)


def test_torch_is_still_wrong():
    """Where this fails, the replacements are no longer needed."""

    def differentiate_twice(x: Tensor, unit: Tensor) -> Tensor:
        along = lambda y: torch.func.jvp(lambda z: torch.linalg.slogdet(matrix(z))[1], (y,), (unit,))[1]  # noqa: E731
        return torch.func.jvp(along, (x,), (unit,))[1]

    found = torch.stack([differentiate_twice(POINTS[0], unit) for unit in torch.eye(2, dtype=F64)]).sum()
    assert (found - trace_backward(CASES["slogdet"], POINTS[0]) / 3).abs() > 0.01


def test_signs_and_singular_matrices_are_torch_s():
    flipped = torch.stack([matrix(POINTS[0]), matrix(POINTS[0])[[1, 0, 2]], torch.zeros(3, 3, dtype=F64)])
    expected, complex_ones = torch.linalg.slogdet(flipped), torch.complex(flipped[:2], flipped[:2].sin())
    with ng.exact_derivatives():
        found, turned = torch.linalg.slogdet(flipped), torch.linalg.slogdet(complex_ones)
        assert torch.linalg.det(flipped)[2] == 0
        assert torch.logdet(flipped[:2]).isnan().tolist() == [False, True]
    assert found.sign.tolist() == expected.sign.tolist()
    assert_close(found.logabsdet[:2], expected.logabsdet[:2], 1e-12)
    assert found.logabsdet[2] == -torch.inf
    assert_close(turned.sign, torch.linalg.slogdet(complex_ones).sign, 1e-12)


def test_a_singular_system_is_nan_on_every_processor():
    with ng.exact_derivatives():
        assert torch.linalg.solve(torch.zeros(2, 2, dtype=F64), torch.ones(2, dtype=F64)).isnan().all()


@pytest.mark.parametrize(
    "call",
    [
        lambda **out: torch.linalg.solve(matrix(POINTS[0]), SIDE[..., 0], **out),
        lambda **out: torch.linalg.norm(SIDE[..., 0], **out),
        lambda **out: torch.linalg.vector_norm(SIDE[..., 0], **out),
        lambda **out: torch.norm(SIDE[..., 0], **out),
        lambda **out: functional.normalize(SIDE[..., 0], **out),
    ],
)
def test_a_result_is_written_where_it_is_asked_for(call):
    out = torch.empty(0, dtype=F64)
    with ng.exact_derivatives():
        assert call(out=out) is out
        assert_close(call(out=None), out, 1e-12)
