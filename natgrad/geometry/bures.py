"""The Wasserstein metric of normals (Bures): what it costs to move their mass."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from natgrad.geometry.normal_manifold import NormalPoints
from natgrad.geometry.stable_functions import matrix_sqrt, safe_sqrt
from natgrad.ground.linalg import eigh, has_derivatives, require_factor, require_inverse, symmetrise
from natgrad.ground.pure import compute_exactly
from natgrad.operators import Closed, Operator


@compute_exactly
class Wasserstein(NormalPoints):
    """Normals in d dimensions under W2; points (mean_i; Sigma_ii; Sigma_ij for i < j row by row): `join`, `split`.

    W2^2 = |m - m'|^2 + tr(S + S' - 2 (S^1/2 S' S^1/2)^1/2). The metric is half its second derivative, d mean^2 + 1/2
    tr(L dSigma) with S L + L S = dSigma; lengths are in the units of x. Matter moves along straight lines under the
    linear map I + L, so that geodesics are closed; they reach singular covariances at finite distances, from which
    `exp` comes back; `retract` never gets there. `log` goes the shortest way.

    Args:
        d: Number of variables.

    Example:
        >>> manifold = ng.geometry.Wasserstein(2)
        >>> a = manifold.join(torch.zeros(2), torch.eye(2))
        >>> b = manifold.join(torch.tensor([3.0, 4.0]), torch.eye(2))
        >>> manifold.distance(a, b)
        tensor(5.)
    """

    def metric(self, point: Tensor) -> Operator:
        """The metric at one point as an operator; its inverse is closed.

        Args:
            point: Shape (n,).
        """
        if point.shape != (self.size,):
            raise ValueError(f"point has shape {tuple(point.shape)}, expected ({self.size},): one distribution")
        at = self.check(point).detach().clone()
        return Closed(at, partial(self.lower, at), partial(self.natural, at))

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        sigma = self.split(point)[1]
        (u, v), (w, z) = self.split(first), self.split(second)
        return (u * w).sum(-1) + (lyapunov(sigma, v) * z).sum((-2, -1)) / 2

    def lower(self, point: Tensor, tangent: Tensor) -> Tensor:
        """G v, as partial derivatives in these coordinates.

        Args:
            point: Shape (..., n).
            tangent: v, shape (..., n).
        """
        u, v = self.split(tangent)
        form = lyapunov(self.split(point)[1], v) / 2
        return self.join(u, 2 * form - torch.diag_embed(form.diagonal(dim1=-2, dim2=-1)))

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        """(g; 2 (S G + G S)), where G has the partial derivatives, those off the diagonal halved."""
        sigma = self.split(point)[1]
        slope, curve = self._covector(gradient)
        return self.join(slope, 2 * (sigma @ curve + curve @ sigma))

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        mean, sigma = self.split(point)
        u, v = self.split(tangent)
        factor = torch.eye(self.d).to(point) + lyapunov(sigma, v)
        return self.join(mean + u, symmetrise(factor @ sigma @ factor))

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        (mean, sigma), (end, goal) = self.split(point), self.split(other)
        pull = self.plan(sigma, goal) - torch.eye(self.d).to(point)
        return self.join(end - mean, pull @ sigma + sigma @ pull)

    def plan(self, covariance: Tensor, other: Tensor) -> Tensor:
        """A (..., d, d), symmetric, with A S A = S': x -> m' + A (x - m) moves the one to the other at least cost.

        Args:
            covariance: S, shape (..., d, d).
            other: S', shape (..., d, d).
        """
        factor = require_factor(covariance, f"covariance of shape {tuple(covariance.shape)} is not positive definite")
        require_factor(other, f"the other covariance, of shape {tuple(other.shape)}, is not positive definite")
        root = matrix_sqrt(factor.mT @ other @ factor)
        left = torch.linalg.solve_triangular(factor.mT, root, upper=True)
        return symmetrise(torch.linalg.solve_triangular(factor.mT, left.mT, upper=True))

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        (mean, sigma), (end, goal) = self.split(point), self.split(other)
        factor = require_factor(sigma, self._refusal(point))
        pull = self.plan(sigma, goal) - torch.eye(self.d).to(point)
        spread = (pull @ factor).square().sum((-2, -1))  # tr((A - I) S (A - I))
        return safe_sqrt((end - mean).square().sum(-1) + spread)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        """By the projection onto the gradients at the other point of the field of velocities carried along by matter.

        Not Levi-Civita's, which has no closed form; lengths may shrink. `translate` restores them.
        """
        (_, sigma), (_, goal) = self.split(point), self.split(other)
        u, v = self.split(vector)
        back = require_inverse(self.plan(sigma, goal), self._refusal(other))
        moved = lyapunov(sigma, v) @ back  # the velocity at x' = A x is L A^-1 x'
        return self.join(u, moved @ goal + goal @ moved.mT)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        """Sigma moved by exp(L) on both sides: never singular."""
        mean, sigma = self.split(point)
        u, v = self.split(tangent)
        factor = torch.linalg.matrix_exp(lyapunov(sigma, v))
        return self.join(mean + u, symmetrise(factor @ sigma @ factor.mT))


def lyapunov(matrix: Tensor, right: Tensor) -> Tensor:
    """L with S L + L S = R; gradients flow to both."""
    values, vectors = eigh(matrix.detach())
    sums = values.unsqueeze(-1) + values.unsqueeze(-2)

    def solve(r: Tensor) -> Tensor:
        return vectors @ ((vectors.mT @ r @ vectors) / sums) @ vectors.mT

    solution = solve(right)
    if not has_derivatives(matrix):
        return solution
    moved, fixed = matrix - matrix.detach(), solution.detach()
    return solution - solve(moved @ fixed + fixed @ moved)  # dL solves S dL + dL S = -(dS L + L dS)
