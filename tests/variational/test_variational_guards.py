"""Steps of a variational q that cannot run away, kinks that second derivatives miss, and when a fit has converged."""

from __future__ import annotations

import math

import pytest
import torch
from models import F64, draw
from torch import Tensor

from natgrad.variational import Projected, Sobol, variational

INPUTS, WEIGHTS = draw(60, 4, seed=1), torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64)
SIGNS = (INPUTS @ WEIGHTS + 0.5 * draw(60, seed=2)).sign()


@pytest.mark.parametrize("scale", [10.0, 0.1])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_laplace_density_gets_its_best_normal(scale, d, diagonal):
    """E|x| = s sqrt(2 / pi): the bound is largest at s = sqrt(pi / 2) / scale. Second derivatives are zero."""
    q = variational(lambda z: -scale * z.abs().sum(-1), d, diagonal=diagonal)
    assert q.fit(100).converged
    deviations = q.covariance.diagonal().sqrt()
    assert float((deviations * scale / math.sqrt(math.pi / 2) - 1).abs().max()) < 0.05
    assert float(q.mean.abs().max()) * scale < 0.1


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_projected_hinge_is_the_hinge_written_out(diagonal):
    precision = 0.01
    projected = Projected(INPUTS, lambda f: -torch.relu(1 - SIGNS * f), precision=precision, order=64)

    def write_log_joint(z: Tensor) -> Tensor:
        prior = 0.5 * (4 * math.log(precision / (2 * math.pi)) - precision * z.square().sum(-1))
        return -torch.relu(1 - SIGNS * (z @ INPUTS.mT)).sum(-1) + prior

    q = [
        variational(projected, 4, diagonal=diagonal),
        variational(write_log_joint, 4, diagonal=diagonal, points=Sobol(256)),
    ]
    bounds = [one.fit(40)[-1] for one in q]
    assert bounds[0] == pytest.approx(bounds[1], abs=0.1)
    assert float((q[0].covariance.diagonal() / q[1].covariance.diagonal()).log().abs().max()) < 0.2


def test_fit_takes_the_rate_back_up():
    """A bad start costs one halving each; the rate then rises, so that the end is as fast as from a good one."""
    q = variational(
        lambda z: -(0.5 * z).cosh().log().sum(-1) * 4 - 0.05 * z.square().sum(-1), [30.0, -40.0], covariance=1e-3
    )
    rates = []
    advance = q.advance

    def watch_rate(batch: tuple[()]) -> tuple[float, float]:
        rates.append(q.lr)
        return advance(batch)

    q.advance = watch_rate  # type: ignore[method-assign]
    assert q.fit(100).converged
    assert rates[-1] == q.lr == 1.0


def test_converged_says_whether_anything_was_left():
    hard = lambda z: -0.1 * z.square().square().sum(-1) - (z - 3).cosh().log().sum(-1)  # noqa: E731
    short = variational(hard, 2)
    bounds = short.fit(2)
    assert not bounds.converged
    assert bounds.gap > 1e-3
    bounds = short.fit(100)
    assert bounds.converged
    assert bounds.gap < 1e-6
    assert len(short.fit(100)) == 1  # nothing to do
    easy = variational(lambda z: -0.5 * z.square().sum(-1), 3, covariance=2.0)
    assert easy.fit(50).converged
