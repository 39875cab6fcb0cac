"""Posteriors on tables of real data: CPU seconds of one thread until a normal q has the best bound but .01 nats.

Full normal distributions: logistic regression and sparse Gaussian processes, whose bound is known to the last digit by
one-dimensional quadrature. Independent entries: the weights of a small network, judged by held-out log-likelihood.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sklearn import datasets
from torch import Tensor
from torch.distributions import StudentT

import natgrad as ng
from natgrad.variational import GaussHermite, Projected, Sobol, inducing
from natgrad_lab.data import uci

NEAR = 0.01
"""Nats that a bound may lack."""
FREEDOM, NOISE = 4.0, 0.3
"""Degrees of freedom and scale of Student's t, for targets of unit variance."""
JITTER = 1e-6

Moments = tuple[Tensor, Tensor]
"""Mean (d,) and a root (d, d) of the covariance."""


@dataclass(frozen=True)
class Posterior:
    """sum_n E[log p(y_n | f_n)] + log N(z; 0, I) with f_n = (A z)_n + noise of a known variance.

    inputs, places: for a Gaussian process; its kernel is exp(-|x - x'|^2 / (2 d)), d the number of columns of x.
    likelihood: "logistic", "probit" (targets are signs) or "student".
    """

    name: str
    rows: Tensor
    variance: Tensor
    targets: Tensor
    likelihood: str
    inputs: Tensor | None = None
    places: Tensor | None = None

    def target(self, order: int = 20) -> Projected:
        """As our library takes it."""
        return Projected(self.rows, lambda f: log_likelihood(self.likelihood, self.targets, f), self.variance,
                         order=order)  # fmt: skip

    def measure_bound(self, moments: Moments) -> float:
        """The bound of a normal q in nats, in float64."""
        mean, root = (part.double() for part in moments)
        if not bool(torch.isfinite(root).all()):
            return -math.inf
        factor = torch.linalg.qr(root.mT).R
        entropy = factor.diagonal().abs().log().sum() + 0.5 * len(mean) * (1 + math.log(2 * math.pi))
        found = self.target(40).value(mean, root, 0, ()) + entropy
        return float(found) if math.isfinite(float(found)) else -math.inf

    def best(self) -> float:
        """Of all normal q: the bound is concave in the mean and the root."""
        q = ng.variational(self.target(40), self.rows.shape[1])
        found = q.fit(200, tolerance=1e-10)
        assert found.converged
        return self.measure_bound((q.mean, q.root()))


def log_likelihood(kind: str, y: Tensor, f: Tensor) -> Tensor:
    if kind == "logistic":
        return torch.nn.functional.logsigmoid(y * f)
    if kind == "probit":
        return torch.special.log_ndtr(y * f)
    return StudentT(FREEDOM, f, NOISE, validate_args=False).log_prob(y)


def standardise(x: Tensor) -> Tensor:
    spread = x.std(0)
    return (x - x.mean(0)) / torch.where(spread > 0, spread, 1)


def scikit(name: str) -> tuple[Tensor, Tensor]:
    """Inputs of unit variance and targets of a table that comes with scikit-learn."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return standardise(torch.from_numpy(x).double()), torch.from_numpy(y).double()


def table(name: str) -> tuple[Tensor, Tensor]:
    """All rows of a table of UCI."""
    found = uci(name)
    x, y = (
        torch.cat([one, two]).double() for one, two in ((found.train_x, found.test_x), (found.train_y, found.test_y))
    )
    return standardise(x), y.reshape(-1)


def regression(name: str, x: Tensor, signs: Tensor) -> Posterior:
    """Logistic regression with an intercept."""
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return Posterior(name, rows, rows.new_zeros(len(x)), signs, "logistic")


def process(name: str, x: Tensor, y: Tensor, likelihood: str, count: int) -> Posterior:
    """A Gaussian process with inducing points at examples."""
    places = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-0.5 * torch.cdist(a, b).square() / x.shape[1])

    own = kernel(places, places) + JITTER * torch.eye(count, dtype=x.dtype)
    rows, variance = inducing(own, kernel(places, x), x.new_ones(len(x)))
    return Posterior(name, rows, variance, y, likelihood, x, places)


def cancer() -> tuple[Tensor, Tensor]:
    x, y = scikit("breast_cancer")
    return x, 2 * y - 1


def wine() -> tuple[Tensor, Tensor]:
    x, y = table("wine_red")
    return x, torch.where(y > 5, 1.0, -1.0).double()


def concrete() -> tuple[Tensor, Tensor]:
    x, y = table("concrete")
    return x, standardise(y.unsqueeze(1)).squeeze(1)


def diabetes() -> tuple[Tensor, Tensor]:
    x, y = scikit("diabetes")
    return x, standardise(y.unsqueeze(1)).squeeze(1)


PROBLEMS: dict[str, Callable[[], Posterior]] = {
    "logistic, cancer (569 x 31)": lambda: regression("logistic, cancer (569 x 31)", *cancer()),
    "logistic, red wine (1599 x 12)": lambda: regression("logistic, red wine (1599 x 12)", *wine()),
    "process, cancer, 50 points": lambda: process("process, cancer, 50 points", *cancer(), "probit", 50),
    "process, Student's t, diabetes, 50 points": lambda: process("process, diabetes", *diabetes(), "student", 50),
    "process, Student's t, concrete, 100 points": lambda: process("process, concrete", *concrete(), "student", 100),
}
Steps = Iterator[Callable[[], Moments]]
"""One per step, or per few: how to read q, which is not timed."""


def reach(steps: Steps, problem: Posterior, best: float, limit: float) -> tuple[float, float]:
    """CPU seconds until the bound is near its best, infinite where the limit came first; the least that it lacked."""
    spent, looked, lack = 0.0, 0.0, math.inf
    while spent < limit:
        began = time.process_time()
        read = next(steps, None)
        spent += time.process_time() - began
        if read is None:
            break
        if spent < 1.03 * looked:
            continue
        looked, bound = spent, problem.measure_bound(read())
        lack = min(lack, best - bound)
        if lack <= NEAR:
            return spent, lack
        if bound == -math.inf:
            break
    return math.inf, lack


def by_projection(problem: Posterior, seed: int) -> Steps:
    """`ng.variational` as it comes, told that the data see linear functions of z."""
    q = ng.variational(problem.target(), problem.rows.shape[1])
    while True:
        q.step()
        yield lambda: (q.mean, q.root())


def by_log_joint(problem: Posterior, seed: int, count: int | None = None) -> Steps:
    """`ng.variational` as it comes, on a log joint density about which it knows nothing."""
    nodes, weights = quadrature(problem)
    spread = problem.variance.sqrt()

    def log_joint(z: Tensor) -> Tensor:
        f = z @ problem.rows.mT
        if len(nodes) == 1:
            found = log_likelihood(problem.likelihood, problem.targets, f).sum(-1)
        else:
            away = f.unsqueeze(-1) + spread.unsqueeze(-1) * nodes
            found = (log_likelihood(problem.likelihood, problem.targets.unsqueeze(-1), away) @ weights).sum(-1)
        return found - 0.5 * z.square().sum(-1)

    q = ng.variational(log_joint, problem.rows.shape[1], points=Sobol(count))
    while True:
        q.step()
        yield lambda: (q.mean, q.root())


def quadrature(problem: Posterior, order: int = 8) -> tuple[Tensor, Tensor]:
    """Nodes and weights over what a process leaves open at a row; one node where nothing is."""
    if not bool(problem.variance.any()):
        return torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    nodes, weights = GaussHermite(order).at(1, 0)
    return nodes.squeeze(1), weights
