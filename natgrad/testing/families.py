"""Likelihoods and exponential families: everything that one says is of one distribution."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, Likelihood
from natgrad.ground.pure import leaves, map_tensors
from natgrad.testing.operators import check_operator
from natgrad.testing.requirements import (
    DEVIATIONS,
    require,
    require_close,
    require_mean,
    require_raises,
    require_untouched,
    tolerance,
)


def check_family(family: Likelihood, outputs: Any, *, samples: int = 20_000, rtol: float | None = None) -> None:
    """nll, sample, score, fisher, mv, root and kl of a likelihood are of one distribution, at the given outputs.

    By sampling, within six standard errors: E[score] = 0, E[score score^T] = fisher, E[log p - log q] = KL(p, q).
    Exactly: mv and root agree with fisher, KL(p, p) = 0, and its second derivative is fisher. `fisher` and `kl` are
    checked where the family has them.

    Args:
        family: The likelihood.
        outputs: What a model returns, for a few examples. They are repeated along the batch, so targets must not be
            bounded by it.
        samples: Number of draws.
        rtol: Allowed relative error, default 1e4 eps of the outputs' dtype.

    Raises:
        AssertionError: With a sentence, for a property that does not hold.

    Example:
        >>> from natgrad.testing import check_family
        >>> check_family(ng.Categorical(), torch.tensor([[0.0, 1.0, -1.0]]), samples=2000)
    """
    rows = family.rows(outputs).detach()
    rtol = tolerance(rtol, rows.dtype)
    require(rows.dim() == 2, f"family.rows(outputs) has shape {tuple(rows.shape)}, expected (R, m)")
    with require_untouched({"outputs": rows}, None, "family"):
        targets, many = _draw_targets(family, outputs, samples)
        scores = family.score(many, targets).view(samples, *rows.shape)
        _require_score_is_derivative(family, outputs)
        require_mean("E[score]", scores, torch.zeros_like(rows))
        with suppress(NotImplementedError):
            fisher = family.fisher(rows)
            _require_form(family, rows, fisher, rtol)
            require_mean("E[score score^T]", scores.unsqueeze(-1) * scores.unsqueeze(-2), fisher)
        with suppress(NotImplementedError):
            _require_mean_kl(family, outputs, many, targets, samples)
            _require_kl(family, rows, rtol)


def _draw_targets(family: Likelihood, outputs: Any, samples: int) -> tuple[Any, Any]:
    many = map_tensors(outputs, lambda t: t.detach().repeat(samples, *[1] * (t.dim() - 1)))
    device = next(leaves(outputs)).device
    first, second = (family.sample(many, torch.Generator(device).manual_seed(0)) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))
    require(same, "family.sample draws differently from one generator state; draw from the generator only")
    family.check_targets(many, first)
    return first, many


def _require_score_is_derivative(family: Likelihood, outputs: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    targets = family.sample(outputs, torch.Generator(next(leaves(outputs)).device).manual_seed(1))
    direction = map_tensors(
        outputs,
        lambda t: torch.randn(t.shape, generator=generator, device=generator.device, dtype=t.dtype).to(t.device),
    )
    length = torch.finfo(family.rows(outputs).dtype).eps ** (1 / 3)

    def value(shift: float) -> Tensor:
        moves = iter(leaves(direction))
        return family.nll(map_tensors(outputs, lambda t: t.detach() + shift * next(moves)), targets)

    nll = value(0.0)
    count = len(family.rows(outputs))
    require(nll.shape == (count,), f"family.nll has shape {tuple(nll.shape)}, expected ({count},), one number per row")
    slope = (value(-length) - value(length)) / (2 * length)
    derivative = (family.score(outputs, targets) * family.rows(direction)).sum(1)
    require_close("family.score against differences of nll", derivative, slope, 1e3 * length**2, 1 + slope.abs().max())


def _require_form(family: Likelihood, rows: Tensor, fisher: Tensor, rtol: float) -> None:
    shape = (*rows.shape, rows.shape[1])
    require(fisher.shape == shape, f"family.fisher(rows) has shape {tuple(fisher.shape)}, expected {shape}")
    tangents = torch.randn(rows.shape, generator=torch.Generator().manual_seed(3), device="cpu", dtype=rows.dtype).to(
        rows.device
    )
    expected = torch.einsum("imn,in->im", fisher, tangents)
    require_close("family.mv(rows, tangents)", family.mv(rows, tangents), expected, rtol, fisher.abs().max())
    root = family.root(rows)
    require_close("root root^T of family.root(rows)", root @ root.mT, fisher, rtol)


def _require_kl(family: Likelihood, rows: Tensor, rtol: float) -> None:
    same = family.kl(rows, rows)
    require_close("family.kl(p, p)", same, torch.zeros(len(rows)).to(rows), rtol, 1.0)
    with torch.enable_grad():
        point = rows.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(family.kl(rows, point).sum(), point, create_graph=True)
        columns = [torch.autograd.grad(g, point, retain_graph=True)[0] for g in gradient.sum(0)]
    require_close("the derivative of family.kl(p, q) at q = p", gradient.detach(), torch.zeros_like(rows), rtol, 1.0)
    fisher = family.fisher(rows)
    require_close("the second derivative of family.kl", torch.stack(columns, 2), fisher, rtol, 1 + fisher.abs().max())


def _require_mean_kl(family: Likelihood, outputs: Any, many: Any, targets: Any, samples: int) -> None:
    moved, moved_many = (map_tensors(tree, lambda t: 0.9 * t.detach()) for tree in (outputs, many))
    ratio = (family.nll(moved_many, targets) - family.nll(many, targets)).view(samples, -1)
    require_mean("E[log p - log q] against family.kl", ratio, family.kl(family.rows(outputs), family.rows(moved)))


def check_exponential_family(
    family: ExponentialFamily, theta: Tensor, *, samples: int = 20_000, rtol: float | None = None
) -> None:
    """A family has the properties of exponential families at two natural parameters.

    Exactly: expectation = grad psi, covariance = Hess psi = fisher, natural undoes expectation, KL is the Bregman
    divergence of psi, the Fisher matrix in the expectation parameters is the inverse, batches are rows, gradients flow
    through `natural`. By draws, within six standard errors: E[T] = eta, Cov(T) = fisher, E[log p - log q] = KL, -E[log
    p] = entropy, and where x is one number how often it comes = p.

    Args:
        family: With n linearly independent statistics.
        theta: Two natural parameters inside the domain, shape (2, n).
        samples: Number of draws.
        rtol: Allowed relative error, default 1e4 eps of theta's dtype. `natural` may be off by its square root.

    Raises:
        AssertionError: With a sentence, for a property that does not hold.

    Example:
        >>> from natgrad.testing import check_exponential_family
        >>> theta = torch.tensor([[0.3, -1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> check_exponential_family(ng.Bernoulli(2), theta, samples=2000)
    """
    require(theta.dim() == 2 and len(theta) == 2, f"theta has shape {tuple(theta.shape)}, expected (2, n): two points")
    theta, rtol = theta.detach(), tolerance(rtol, theta.dtype)
    with require_untouched({"theta": theta}, None, "family"):
        _require_derivatives(family, theta, rtol)
        _require_coordinates(family, theta, rtol)
        _require_divergence(family, theta, rtol)
        _require_draws(family, theta, samples)
        require_raises("theta of integers", lambda: family.expectation(torch.ones_like(theta, dtype=torch.long)))


def _require_derivatives(family: ExponentialFamily, theta: Tensor, rtol: float) -> None:
    psi = family.log_partition(theta)
    require(psi.shape == (2,), f"family.log_partition(theta) has shape {tuple(psi.shape)}, expected (2,)")
    alone = torch.stack([family.log_partition(point) for point in theta])
    require_close("family.log_partition of a batch against one by one", psi, alone, rtol)
    with torch.enable_grad():
        slope = torch.func.vmap(torch.func.grad(family.log_partition))(theta)
        bend = torch.func.vmap(torch.func.jacrev(torch.func.grad(family.log_partition)))(theta)
    require_close("family.expectation(theta) against grad psi", family.expectation(theta), slope, rtol)
    require_close("family.covariance(theta) against Hess psi", family.covariance(theta), bend, rtol)
    for point, matrix in zip(theta, bend, strict=True):
        check_operator(family.fisher(point), rtol=rtol)
        require_close("family.fisher(theta) against Hess psi", family.fisher(point).dense(), matrix, rtol)


def _require_coordinates(family: ExponentialFamily, theta: Tensor, rtol: float) -> None:
    eta = family.expectation(theta)
    root = rtol**0.5
    require_close("family.natural(family.expectation(theta))", family.natural(eta), theta, root, 1 + theta.abs().max())
    legendre = family.conjugate(eta) + family.log_partition(theta) - (theta * eta).sum(-1)
    require_close("phi(eta) + psi(theta) - theta . eta", legendre, torch.zeros_like(legendre), root, 1.0)
    for point, mean in zip(theta, eta, strict=True):
        matrix = family.fisher(point).dense()
        unit = torch.eye(len(point), dtype=point.dtype, device=point.device)
        require_close("I_theta I_eta", matrix @ family.fisher_expectation(mean).dense(), unit, len(point) * root)
        with torch.enable_grad():
            moved = torch.func.jacrev(family.natural)(mean)
        require_close("I_theta d natural / d eta", matrix @ moved, unit, len(point) * root)


def _require_divergence(family: ExponentialFamily, theta: Tensor, rtol: float) -> None:
    p, q = theta
    expected = family.log_partition(q) - family.log_partition(p) - family.expectation(p) @ (q - p)
    require_close("family.kl(p, q) against psi", family.kl(p, q), expected, rtol, 1 + expected.abs())
    require_close("family.kl(p, p)", family.kl(p, p), torch.zeros_like(expected), rtol, 1.0)


def _require_draws(family: ExponentialFamily, theta: Tensor, samples: int) -> None:
    first, second = (
        family.sample(theta, samples, generator=torch.Generator(theta.device).manual_seed(0)) for _ in range(2)
    )
    require(torch.equal(first, second), "family.sample draws differently from one generator state")
    require(
        first.shape[:2] == (samples, 2), f"family.sample has shape {tuple(first.shape)}, expected ({samples}, 2, ...)"
    )
    statistics = family.statistics(first)
    require_mean("E[T] against family.expectation", statistics, family.expectation(theta))
    centred = statistics - family.expectation(theta)
    both = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    require_mean("Cov(T) against family.covariance", both, family.covariance(theta))
    log_p = family.log_prob(theta, first)
    require_mean("-E[log p] against family.entropy", -log_p, family.entropy(theta))
    ratio = log_p[:, 0] - family.log_prob(theta[1], first[:, 0])
    require_mean("E[log p - log q] against family.kl", ratio, family.kl(theta[0], theta[1]))
    if first[0, 0].numel() == 1:
        _require_density(family, theta[0], first[:, 0])


def _require_density(family: ExponentialFamily, theta: Tensor, draws: Tensor) -> None:
    """How often numbers come is p: those of the first half in the second, between quartiles where none comes twice."""
    values = draws.unique()
    if len(values) < 0.9 * len(draws):
        first, second = draws.tensor_split(2)
        seen = first.unique()
        hits, share = torch.isin(second, seen), family.log_prob(theta, seen.view(-1, *draws[0].shape)).exp().sum()
    else:
        low, high = (values[int(share * len(values))] for share in (0.25, 0.75))
        grid = low + (high - low) * torch.linspace(0, 1, 2001, dtype=theta.dtype, device=theta.device)
        hits = (low <= draws) & (draws <= high)
        share = torch.trapezoid(family.log_prob(theta, grid.view(-1, *draws[0].shape)).exp(), grid)
    rate, share, n = float(hits.to(theta.dtype).mean()), float(share), hits.numel()
    allowed = DEVIATIONS * (max(share * (1 - share), 0.0) / n) ** 0.5 + DEVIATIONS / n
    require(
        abs(rate - share) <= allowed,
        f"{rate:.4g} of the draws are where exp(family.log_prob) adds up to {share:.4g}: log_base(x) = log h(x) is "
        "missing, or a constant of log_partition",
    )
