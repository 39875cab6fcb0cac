"""Who fits a normal q in the race of posteriors: ours, gpytorch's natural gradient and Adam, blackjax's Adam."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.posteriors import FREEDOM, JITTER, NOISE, Posterior, Steps, by_log_joint, by_projection, quadrature
from natgrad.ground.linalg import cholesky

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

NATURAL_RATES, ADAM_RATES = (0.03, 0.1, 0.3, 1.0), (0.003, 0.01, 0.03, 0.1)
RATES, DRAWS, LENGTHS = (0.03, 0.1), (16, 64), (300, 1000, 3000)
"""Of blackjax: Adam's rate, draws per step, and steps until the rate has fallen to zero."""
TOGETHER = 10
"""Steps that JAX takes in one call."""

Start = Callable[[Posterior, int], Steps]


def contestants(problem: Posterior) -> dict[str, dict[str, Start]]:
    """Name -> its settings."""
    found: dict[str, dict[str, Start]] = {
        "ng.variational, Projected": {"as it comes": by_projection},
        "ng.variational, log joint": {
            "128 points, as it comes": by_log_joint,
            "1024 points": partial(by_log_joint, count=1024),
        },
    }
    if problem.places is not None:
        found["gpytorch, natural gradient"] = {
            f"rate {rate}": partial(by_gpytorch, natural=True, rate=rate) for rate in reversed(NATURAL_RATES)
        }
        found["gpytorch, Adam"] = {
            f"rate {rate}": partial(by_gpytorch, natural=False, rate=rate) for rate in reversed(ADAM_RATES)
        }
    found["blackjax, fullrank_vi"] = {
        f"rate {rate}, {draws} draws, {length} steps": partial(by_blackjax, rate=rate, draws=draws, length=length)
        for length in LENGTHS
        for draws in DRAWS
        for rate in RATES
    }
    return found


def by_gpytorch(problem: Posterior, seed: int, *, natural: bool, rate: float) -> Steps:
    """The same process, kernel and places with all examples in each step; nothing but q is trained."""
    import gpytorch
    from linear_operator.utils.errors import NotPSDError

    torch.manual_seed(seed)
    assert problem.inputs is not None
    assert problem.places is not None
    inputs, places = problem.inputs, problem.places
    kind: Any = (
        gpytorch.variational.NaturalVariationalDistribution
        if natural
        else gpytorch.variational.CholeskyVariationalDistribution
    )

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = kind(len(places))
            strategy = gpytorch.variational.VariationalStrategy(
                self, places, q, learn_inducing_locations=False, jitter_val=JITTER
            )
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.RBFKernel()
            self.covar_module.lengthscale = inputs.shape[1] ** 0.5

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood: Any = gpytorch.likelihoods.BernoulliLikelihood()
    targets = (problem.targets + 1) / 2
    if problem.likelihood == "student":
        likelihood, targets = gpytorch.likelihoods.StudentTLikelihood(), problem.targets
        likelihood.deg_free, likelihood.noise = FREEDOM, NOISE**2
    process, likelihood = Process().double(), likelihood.double()
    process.covar_module.requires_grad_(False)
    likelihood.requires_grad_(False)
    process.train()
    likelihood.train()
    objective = gpytorch.mlls.VariationalELBO(likelihood, process, num_data=len(inputs))
    params = list(process.variational_parameters())
    opt: Any = (
        gpytorch.optim.NGD(params, num_data=len(inputs), lr=rate) if natural else torch.optim.Adam(params, lr=rate)
    )

    def read() -> Any:
        with torch.no_grad():
            q = process.variational_strategy.variational_distribution
            return q.mean.detach().clone(), cholesky(q.covariance_matrix.detach())

    with gpytorch.settings.num_gauss_hermite_locs(20):
        while True:
            opt.zero_grad()
            try:
                loss = -objective(process(inputs), targets)
            except NotPSDError:  # its precision has left the cone
                return
            loss.backward()
            opt.step()
            yield read


def by_blackjax(problem: Posterior, seed: int, *, rate: float, draws: int, length: int) -> Steps:
    """Its full-rank fit by Adam with a rate that falls to zero as a cosine, compiled, some steps a call."""
    import blackjax
    import jax
    import optax

    opt = optax.adam(optax.cosine_decay_schedule(rate, length))
    fit = blackjax.fullrank_vi(log_joint_of_jax(problem), opt, num_samples=draws)
    state = fit.init(jax.numpy.zeros(problem.rows.shape[1]))

    def one(carried: Any, key: Any) -> Any:
        return fit.step(key, carried)[0], None

    many = compile_once(problem, (rate, draws, length), lambda: jax.jit(lambda s, keys: jax.lax.scan(one, s, keys)[0]))
    key = jax.random.key(seed)
    for _ in range(length // TOGETHER):
        key, own = jax.random.split(key)
        state = many(state, jax.random.split(own, TOGETHER))
        jax.block_until_ready(state)
        yield lambda found=state: read_blackjax(found)


COMPILED: dict[Any, Any] = {}


def compile_once(problem: Posterior, settings: Any, make: Callable[[], Any]) -> Any:
    """A function that was compiled once, so that the time of compiling is in the first call alone."""
    key = (problem.name, settings)
    if key not in COMPILED:
        COMPILED.clear()
        COMPILED[key] = make()
    return COMPILED[key]


def read_blackjax(state: Any) -> Any:
    from blackjax.vi.fullrank_vi import _unflatten_cholesky  # the factor is nowhere public

    mean = torch.from_numpy(np.array(state.mu)).double()
    return mean, torch.from_numpy(np.array(_unflatten_cholesky(state.chol_params, len(mean)))).double()


def log_joint_of_jax(problem: Posterior) -> Callable[[Any], Any]:
    """The same log joint density in JAX."""
    import jax
    from jax import numpy as jnp
    from jax.scipy import stats

    rows, y, spread = (jnp.asarray(part.numpy()) for part in (problem.rows, problem.targets, problem.variance.sqrt()))
    nodes, weights = (jnp.asarray(part.numpy()) for part in quadrature(problem))

    def log_likelihood(f: Any, targets: Any) -> Any:
        if problem.likelihood == "logistic":
            return jax.nn.log_sigmoid(targets * f)
        if problem.likelihood == "probit":
            return stats.norm.logcdf(targets * f)
        return stats.t.logpdf(targets, FREEDOM, f, NOISE)

    def log_joint(z: Any) -> Any:
        f = rows @ z
        if len(nodes) == 1:
            found = log_likelihood(f, y).sum()
        else:
            found = (log_likelihood(f[:, None] + spread[:, None] * nodes, y[:, None]) @ weights).sum()
        return found - 0.5 * (z**2).sum()

    return log_joint
