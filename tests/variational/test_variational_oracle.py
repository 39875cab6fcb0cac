"""The bound of a sparse Gaussian process classifier beside gpytorch's, where both optimisers end."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close
from torch import Tensor

from natgrad.variational import Projected, inducing, variational

gpytorch = pytest.importorskip("gpytorch")

X = torch.linspace(0, 6, 50, dtype=F64)
LABELS = torch.where((2 * X).sin() > 0.2, 1.0, -1.0).to(F64)
PLACES = torch.linspace(0, 6, 8, dtype=F64)


def kernel(a: Tensor, b: Tensor) -> Tensor:
    return 2 * torch.exp(-0.5 * (a.unsqueeze(1) - b).square() / 0.7**2)


def ours() -> Projected:
    rows, variance = inducing(
        kernel(PLACES, PLACES) + 1e-4 * torch.eye(8, dtype=F64), kernel(PLACES, X), torch.full((50,), 2.0, dtype=F64)
    )
    return Projected(rows, lambda f: torch.special.log_ndtr(LABELS * f), variance)  # gpytorch's link is probit


def theirs():
    """A model whose q is set by hand, and its bound over the whole set."""

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(8)
            super().__init__(
                gpytorch.variational.VariationalStrategy(self, PLACES.unsqueeze(1), q, learn_inducing_locations=False)
            )
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.covar_module.outputscale, self.covar_module.base_kernel.lengthscale = 2.0, 0.7

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Process().double()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood().double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=50)
    return model, lambda: 50 * bound(model(X.unsqueeze(1)), (LABELS + 1) / 2)


def test_gpytorch_ends_at_our_optimum():
    q = variational(ours(), 8)
    q.fit(50, tolerance=1e-12)
    model, bound = theirs()
    optimizer = gpytorch.optim.NGD(model.variational_parameters(), num_data=50, lr=1.0)
    with gpytorch.settings.num_gauss_hermite_locs(32), gpytorch.settings.cholesky_jitter(double_value=1e-4):
        for _ in range(15):
            optimizer.zero_grad()
            loss = -bound() / 50
            loss.backward()
            optimizer.step()
        model.eval()
        found = model.variational_strategy.variational_distribution
        assert bound().item() == pytest.approx(q.elbo(), abs=1e-3)
        assert_close(found.mean.detach(), q.mean, rtol=1e-2)
        assert_close(found.covariance_matrix.detach(), q.covariance, rtol=1e-2)
