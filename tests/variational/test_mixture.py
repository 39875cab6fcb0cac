"""Mixtures: the natural gradient by definition, posteriors that are mixtures, and what is refused."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.variational import Draws

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
MODES = torch.tensor([[-4.0, 0.0], [0.0, 3.0], [4.0, -1.0]], dtype=torch.float64)
VARIANCES = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)


def three_modes(z: Tensor) -> Tensor:
    """log of a mixture of three round normals, times 2 pi."""
    squares = (z.unsqueeze(-2) - MODES).square().sum(-1)
    return (WEIGHTS.log() - VARIANCES.log() - squares / (2 * VARIANCES)).logsumexp(-1)


def quartic(z: Tensor) -> Tensor:
    """A density on the line that is no mixture."""
    z = z.squeeze(-1)
    return -0.1 * (z.square() - 4).square() + 0.3 * z


def integrate_bound(means: Tensor, variances: Tensor, logits: Tensor) -> Tensor:
    """E_q[log p - log q] on a fine grid of the line."""
    z = torch.linspace(-12, 12, 6001, dtype=torch.float64)
    own = -0.5 * ((z.unsqueeze(1) - means).square() / variances + (2 * math.pi * variances).log())
    log_q = (own + logits.log_softmax(0)).logsumexp(1)
    return torch.trapezoid(log_q.exp() * (quartic(z.unsqueeze(1)) - log_q), z)


def test_a_step_is_the_natural_gradient_in_the_metric_with_labels():
    """Means by w P, logits by the categorical's own matrix; precisions by -2 d bound / d variance over w."""
    q = ng.variational_mixture(quartic, [[-1.0], [0.7]], lr=1e-4, covariance=0.8)
    q.log_weights = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    parts = (q.means[:, 0].clone(), torch.full((2,), 0.8, dtype=torch.float64), q.log_weights.clone())
    leaves = [part.requires_grad_() for part in parts]
    bound = integrate_bound(*leaves)
    by_mean, by_variance, by_logit = torch.autograd.grad(bound, leaves)
    weights, precisions = q.weights, torch.cat([part.precision[0] for part in q.components])
    means, logits = q.means[:, 0], q.log_weights
    assert q.step() == pytest.approx(bound.item(), abs=1e-6)
    moved = (q.means[:, 0] - means) / 1e-4
    assert_close(moved, by_mean / (weights * precisions), rtol=1e-3, atol=1e-5)
    bent = (torch.cat([part.precision[0] for part in q.components]) - precisions) / 1e-4
    assert_close(bent, -2 * by_variance / weights, rtol=1e-3, atol=1e-5)
    change = (q.log_weights - logits) / 1e-4
    fisher = torch.diag(weights) - torch.outer(weights, weights)
    assert_close(fisher @ change, by_logit, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_posterior_that_is_a_mixture_is_found_to_the_last_digits(diagonal):
    starts = [[-2.0, -1.0], [1.0, 2.0], [2.0, -2.0]]
    q = ng.variational_mixture(three_modes, starts, covariance=2.0, diagonal=diagonal, lr=1.0)
    bounds = q.fit(60)
    assert bounds.converged
    assert bounds[-1] == pytest.approx(math.log(2 * math.pi), abs=1e-4)
    assert all(after > before - 1e-6 for before, after in pairwise(bounds))
    assert_close(q.weights, WEIGHTS, rtol=0, atol=1e-3)
    assert_close(q.means, MODES, rtol=0, atol=5e-3)
    mean = WEIGHTS @ MODES
    spread = (MODES.mT * WEIGHTS) @ MODES - torch.outer(mean, mean) + torch.eye(2) * (WEIGHTS @ VARIANCES)
    assert_close(q.covariance, spread, rtol=0, atol=2e-2)
    z = 3 * torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(q.log_density(z), three_modes(z) - math.log(2 * math.pi), rtol=0, atol=2e-2)


def test_loading_goes_on_as_if_never_stopped():
    def build():
        return ng.variational_mixture(three_modes, MODES + 0.5, points=Draws(8))

    q = build()
    q.step()
    other = build()
    other.load_state_dict(q.state_dict())
    copied = pickle.loads(pickle.dumps(q))
    assert q.step() == other.step() == copied.step()
    assert torch.equal(q.means, other.means)
    assert torch.equal(q.weights, other.weights)
    with pytest.raises(ValueError, match="2 components"):
        ng.variational_mixture(three_modes, MODES[:2]).load_state_dict(q.state_dict())


def test_a_step_that_fails_leaves_q_as_it_was():
    q = ng.variational_mixture(lambda z: torch.where(z[..., 0] > 9, math.nan, -z.square().sum(-1)), [[0.0], [8.0]])
    before, weights = q.means.clone(), q.weights.clone()
    with pytest.raises(ValueError, match="not finite"):
        q.step()
    assert torch.equal(q.means, before)
    assert torch.equal(q.weights, weights)
    assert q.steps == 0


@pytest.mark.parametrize(
    ("starts", "options", "words"),
    [
        ([[0.0, 1.0], [0.0, 1.0]], {}, "twice"),
        ([0.0, 1.0], {}, r"\(K, d\)"),
        (torch.zeros(2, 2, dtype=torch.int64), {}, "floating-point"),
        ([[0.0, 1.0]], {"lr": 0.0}, "lr is 0.0"),
        ([[0.0, math.inf]], {}, "not finite"),
    ],
)
def test_what_is_refused(starts, options, words):
    with pytest.raises(ValueError, match=words):
        ng.variational_mixture(three_modes, starts, **options)
