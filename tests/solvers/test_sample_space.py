"""The solve in the space of outputs, where its formula cancels digits."""

from __future__ import annotations

import pytest
import torch
from models import assert_close, draw, mlp

import natgrad as ng


def system(rows: int, dtype: torch.dtype = torch.float64) -> tuple[ng.Operator, torch.Tensor]:
    """A scalar net on more or fewer rows than its 36 parameters, and a gradient in the range of its metric."""
    model, x = mlp(4, 6, 1).to(dtype), draw(rows, 4).to(dtype)
    params = ng.trainable(model)
    gradients = torch.autograd.grad((model(x) - draw(rows, 1, seed=2).to(dtype)).square().mean(), list(params.values()))
    rhs = ng.Space(params).flatten(dict(zip(params, gradients, strict=True)))
    return ng.fisher(model, ng.Gaussian()).at(params, x), rhs


@pytest.mark.parametrize("rows", [12, 60])
@pytest.mark.parametrize("damping", [0.0, 1e-6, 1e-2])
def test_it_agrees_with_parameter_space_on_either_side(rows, damping):
    operator, rhs = system(rows)
    found = ng.natural_gradient(operator, rhs, solver=ng.SampleSpace(), damping=damping)
    expected = ng.natural_gradient(operator, rhs, solver=ng.Direct(), damping=damping)
    assert_close(found.value, expected.value, 1e-8)
    assert found.status is ng.Status.CONVERGED


@pytest.mark.parametrize("damping", [1e-10, 1e-8, 1e-6])
def test_single_precision_with_damping_below_round_off_stays_bounded(damping):
    operator, rhs = system(12, torch.float32)
    found = ng.natural_gradient(operator, rhs, solver=ng.SampleSpace(), damping=damping)
    assert found.residual <= rhs.norm()
    reference, exact = system(12)
    longest = ng.natural_gradient(reference, exact, solver=ng.Direct(), damping=damping).value.norm()
    assert found.value.norm() <= 2 * longest


def test_a_low_rank_pseudo_inverse_keeps_its_digits():
    root = draw(8, 3)
    rhs = root @ draw(3, seed=1)
    found = ng.operators.LowRankOperator(root).inverse(0.0).mv(rhs)
    assert_close(found, torch.linalg.pinv(root @ root.mT) @ rhs, 1e-11)
