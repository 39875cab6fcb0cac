"""The posterior of a latent variable as an output: its loss, its metric, and autoencoders trained with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import natgrad as ng
from natgrad.ground.spaces import Space, trainable
from natgrad.testing import check_family

D, K = 6, 2
OUTPUTS = (draw(3, K), draw(3, K, seed=1))


def family(beta: float = 1.0) -> ng.Heads:
    return ng.Heads((ng.Bernoulli(), D), (ng.GaussianPosterior(beta), 2 * K))


class Density(ng.GaussianPosterior):
    """The same with -log q in place of the KL term."""

    def nll(self, outputs: Any, targets: Any = None) -> Tensor:
        mean, log_variance = self.rows(outputs).chunk(2, dim=1)
        return -Normal(mean, (log_variance / 2).exp()).log_prob(targets).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None: ...


class VAE(nn.Module):
    def __init__(self, noise: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 2 * K))
        self.decoder = nn.Sequential(nn.Linear(K, 5), nn.Tanh(), nn.Linear(5, D))
        self.noise = noise

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        e = torch.randn_like(mean) if self.noise else 1.0
        return self.decoder(mean + (log_variance / 2).exp() * e), (mean, log_variance)


@pytest.mark.parametrize("outputs", [OUTPUTS, torch.cat(OUTPUTS, 1), (0 * OUTPUTS[0], OUTPUTS[1] - 8)])
def test_the_metric_is_that_of_the_density(outputs):
    check_family(Density(), outputs)


@pytest.mark.parametrize("beta", [0.25, 1.0, 4.0])
def test_the_loss_is_the_divergence_from_the_standard_normal(beta):
    posterior = ng.GaussianPosterior(beta)
    mean, log_variance = OUTPUTS
    q = Normal(mean, (log_variance / 2).exp())
    expected = beta * kl_divergence(q, Normal(torch.zeros_like(mean), 1.0)).sum(1)
    assert_close(posterior.nll(OUTPUTS), expected, 1e-12)
    z = posterior.sample(torch.cat(OUTPUTS, 1).repeat(40_000, 1), torch.Generator().manual_seed(0))
    scores = posterior.score(torch.cat(OUTPUTS, 1).repeat(40_000, 1), z).view(40_000, 3, 2 * K)
    assert_close(torch.einsum("sim,sin->imn", scores, scores) / 40_000, posterior.fisher(posterior.rows(OUTPUTS)), 0.1)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_the_metric_of_both_heads_is_the_dense_definition(beta):
    torch.manual_seed(0)
    model, x = VAE(noise=False).double(), (draw(7, D) > 0).double()
    params = dict(trainable(model))
    space = Space(params)

    def rows(vector: Tensor) -> Tensor:
        logits, (mean, log_variance) = torch.func.functional_call(model, space.unflatten(vector), (x,))
        return torch.cat([logits, mean, log_variance], 1)

    at = space.flatten(params).detach()
    jacobian = torch.autograd.functional.jacobian(rows, at)
    logits, _, log_variance = rows(at).split([D, K, K], dim=1)
    y = logits.sigmoid()
    form = torch.cat([y * (1 - y), beta * (-log_variance).exp(), torch.full_like(log_variance, beta / 2)], 1)
    expected = torch.einsum("imn,im,imk->nk", jacobian, form, jacobian) / 7
    assert_close(ng.fisher(model, family(beta)).at(params, x).dense(), expected, 1e-10)
    sampled = ng.sampled_fisher(model, family(beta), samples=400).at(params, x).dense()
    assert (sampled - expected).norm() < 0.3 * expected.norm()


@pytest.mark.parametrize("estimate", [ng.ExactLabels(), ng.Sampled(400)], ids=["exact", "sampled"])
def test_what_kfac_reads_is_the_metric_of_both_heads(estimate):
    """For a layer with one constant input the Kronecker factors are exact."""
    torch.manual_seed(0)
    layer = nn.Linear(1, D + 2 * K, bias=False).double()
    x, y = torch.ones(500, 1, dtype=F64), (draw(500, D) > 0).double()
    opt = ng.kfac(layer, family(), estimate=estimate, damping=1e-12, momentum=0.0, kl_share=1e9, measure=False)
    opt.loss(layer(x), (y, None)).backward()
    assert layer.weight.grad is not None
    row, gradient, before = layer(x[:1]).detach(), layer.weight.grad.clone(), layer.weight.detach().clone()
    opt.step()
    step = before - layer.weight.detach()
    metric = family().fisher(row)[0]
    factor = step.flatten() @ metric @ gradient.flatten() / (gradient.norm() ** 2)
    assert_close(metric @ step.flatten(), factor * gradient.flatten(), 1e-6 if estimate == ng.ExactLabels() else 0.1)


def test_shapes_and_targets_are_checked():
    posterior = ng.GaussianPosterior()
    for outputs in (torch.zeros(3, 5), torch.zeros(4), (torch.zeros(3, 2), torch.zeros(3, 1)), (torch.zeros(3, 2),)):
        with pytest.raises(ValueError, match=r"\(mean, log variance\)|\(mean, log variance\), each|log variance"):
            posterior.rows(outputs)
    with pytest.raises(ValueError, match="expected None"):
        ng.kfac(VAE(), family()).loss(VAE()(torch.zeros(3, D)), (torch.zeros(3, D), torch.zeros(3, K)))
