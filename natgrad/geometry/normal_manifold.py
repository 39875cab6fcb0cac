"""All normals in d dimensions, mean and covariance: closed exponential map (Eriksen 1987, Calvo & Oller 1991)."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families import MultivariateNormal
from natgrad.geometry.base import Manifold
from natgrad.geometry.boundary_mesh import Shooting, descend
from natgrad.geometry.ode import integrate_wide
from natgrad.geometry.positive_definite import whiten
from natgrad.geometry.stable_functions import matrix_log, safe_sqrt
from natgrad.ground.linalg import (
    factor_or_nan,
    invert_or_nan,
    is_positive_definite,
    require_factor,
    solve_or_nan,
    symmetrise,
)
from natgrad.ground.pure import compute_exactly

SHORTEST, ROUNDS = 2.0**-12, 60
"""The part of a way that must be within reach of a next one, and parts that are tried at most."""
ARRIVED = 1e-11
"""Misfit at which shooting has arrived."""
TAME = 300.0
"""Entries of a velocity beyond which the exponential of its matrix overflows."""


@compute_exactly
class NormalPoints(Manifold):
    """Points (mean_i; Sigma_ii; Sigma_ij for i < j row by row), (..., d + d (d + 1) / 2), under any metric.

    Args:
        d: Number of variables.
    """

    domain = "(mean; Sigma_ii; Sigma_ij) with a positive definite Sigma"

    def __init__(self, d: int) -> None:
        self.family = MultivariateNormal(d)
        self.d, self.size = self.family.d, self.family.size

    def join(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The point (..., d + d (d + 1) / 2) of a mean and a symmetric matrix; of a tangent too.

        Args:
            mean: Shape (..., d).
            covariance: Shape (..., d, d).
        """
        entries = self.family.pack(covariance)
        batch = torch.broadcast_shapes(mean.shape[:-1], entries.shape[:-1])
        return torch.cat([x.expand(*batch, x.shape[-1]) for x in (mean, entries)], dim=-1)

    def split(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., d) and covariance (..., d, d) of a point; of a tangent too.

        Args:
            point: Shape (..., d + d (d + 1) / 2).
        """
        return point[..., : self.d], self.family.unpack(point[..., self.d :])

    def _covector(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """(g, G) with dF = g . d mean + tr(G dSigma), from partial derivatives (..., n)."""
        slope, curve = self.split(gradient)
        return slope, (curve + torch.diag_embed(curve.diagonal(dim1=-2, dim2=-1))) / 2

    def inside(self, point: Tensor) -> Tensor:
        return torch.isfinite(point).all(-1) & is_positive_definite(self.split(point)[1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.d})"


@compute_exactly
class Normals(NormalPoints, Shooting):
    """Points (mean_i; Sigma_ii; Sigma_ij for i < j row by row), (..., d + d (d + 1) / 2): see `join` and `split`.

    Metric d mean^T P d mean + 1/2 tr(P dSigma P dSigma), P = Sigma^-1. The exponential map is the exponential of a
    matrix of size 2 d + 1, defined for tangents of any length; `log` and `distance` shoot with it; transport is an
    ordinary differential equation. `retract` moves P + P' + (P' Sigma P' + (P u) (P u)^T) / 2, right to second order
    and positive definite for every step. For d = 1 see `HalfPlane`, which is closed throughout.

    Args:
        d: Number of variables.
    """

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        factor = self._factor(point)
        (u, v), (w, z) = self._whiten(factor, first), self._whiten(factor, second)
        return (u * w).sum(-1) + (v * z).sum((-2, -1)) / 2

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        """(Sigma g; 2 Sigma G Sigma), where G has the partial derivatives, those off the diagonal halved."""
        _, sigma = self.split(point)
        slope, curve = self._covector(gradient)
        return self.join((sigma @ slope.unsqueeze(-1)).squeeze(-1), 2 * sigma @ curve @ sigma)

    def _arrive(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        mean, factor = self.split(point)[0], self._factor(point)
        end, spread, speed, growth = self._from_standard(*self._whiten(factor, tangent))
        return (
            self.join(mean + _times(factor, end), symmetrise(factor @ spread @ factor.mT)),
            self.join(_times(factor, speed), symmetrise(factor @ growth @ factor.mT)),
        )

    def _aim(self, point: Tensor, other: Tensor) -> Tensor:
        """In the coordinates where the start is N(0, I), along N(s m, I + s (S - I))."""
        mean, factor = self.split(point)[0], self._factor(point)
        away, spread = self.split(other)
        away, spread = _solve(factor, away - mean), whiten(factor, spread)

        velocity, reached = torch.zeros_like(point), point.new_zeros(len(point))
        part = torch.ones_like(reached)  # by halves of the way, and halves of these, where the whole is too long
        for _ in range(ROUNDS):
            rows = ((reached < 1) & (part >= SHORTEST)).nonzero().squeeze(1)
            if not len(rows):
                break
            begun, goal = reached[rows], (reached + part)[rows].clamp(max=1.0)
            way = FromStandard(self, away[rows], spread[rows], goal)
            grown = velocity[rows] * (goal / begun.clamp(min=SHORTEST / 2)).unsqueeze(1)
            tried = descend(
                way.measure, way.find_step, torch.where((begun == 0).unsqueeze(1), way.guess(), grown), ARRIVED, ARRIVED
            )
            arrived = ~torch.isnan(tried).any(1)
            reached[rows], part[rows] = torch.where(arrived, goal, begun), part[rows] * torch.where(arrived, 2.0, 0.5)
            velocity[rows] = torch.where(arrived.unsqueeze(1), tried, velocity[rows])
        velocity = torch.where((reached >= 1).unsqueeze(1), velocity, torch.nan)
        slope, curve = self.split(velocity)
        return self.join(_times(factor, slope), symmetrise(factor @ curve @ factor.mT))

    def carry(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        n = self.size
        point, tangent, vector = torch.broadcast_tensors(point, tangent, vector)

        def field(state: Tensor) -> Tensor:
            at, speed, carried = state.split(n, dim=-1)
            return torch.cat([speed, self._bend(at, speed, speed), self._bend(at, speed, carried)], dim=-1)

        end = integrate_wide(field, torch.cat([point, tangent, vector], dim=-1))
        return self.exp(point, tangent), end[..., 2 * n :]

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        mean, sigma = self.split(point)
        factor = factor_or_nan(sigma)
        u, v = self._whiten(factor, tangent)
        eye = torch.eye(self.d, dtype=point.dtype, device=point.device)
        precision = eye - v + (v @ v + u.unsqueeze(-1) * u.unsqueeze(-2)) / 2  # P' = -v where Sigma = I
        sound = is_positive_definite(symmetrise(precision))
        safe = torch.where(sound[..., None, None], symmetrise(precision), eye)
        half = factor @ invert_or_nan(factor_or_nan(safe)).mT
        end = self.join(mean + _times(factor, u + _times(v, u) / 2), half @ half.mT)
        return torch.where(sound.unsqueeze(-1), end, torch.nan)

    def _factor(self, point: Tensor) -> Tensor:
        """L with L L^T the covariance of a point that a user gave."""
        return require_factor(self.split(point)[1], self._refusal(point))

    def _whiten(self, factor: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """(L^-1 u, L^-1 V L^-T) of a tangent (u, V), L L^T = Sigma."""
        u, v = self.split(tangent)
        return _solve(factor, u), whiten(factor, v)

    def _from_standard(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The geodesic from N(0, I) with velocity (u, V) at time 1: mean, covariance, and their velocities."""
        d = self.d
        side, corner = u.unsqueeze(-1), torch.zeros_like(v)
        middle = torch.zeros_like(side[..., :1, :])
        matrix = torch.cat(
            [
                torch.cat([-v, side, corner], dim=-1),
                torch.cat([side.mT, middle, -side.mT], dim=-1),
                torch.cat([corner, -side, v], dim=-1),
            ],
            dim=-2,
        )
        grown = torch.linalg.matrix_exp(matrix)  # with P and P mean in its first rows
        moved = matrix @ grown
        precision, linear = symmetrise(grown[..., :d, :d]), grown[..., :d, d]
        covariance = invert_or_nan(precision)
        mean = _times(covariance, linear)
        growth = -covariance @ symmetrise(moved[..., :d, :d]) @ covariance
        speed = _times(covariance, moved[..., :d, d]) + _times(growth, linear)
        return mean, symmetrise(covariance), speed, growth

    def _bend(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """d/dt of a vector carried along: mean (V P w + W P u) / 2, Sigma (V P W + W P V - u w^T - w u^T) / 2."""
        sigma = self.split(point)[1]
        safe = torch.where(self.inside(point)[..., None, None], sigma, torch.eye(self.d).to(sigma))
        factor = factor_or_nan(safe)
        (u, v), (w, z) = self.split(first), self.split(second)
        solved = torch.cholesky_solve(torch.cat([u.unsqueeze(-1), w.unsqueeze(-1), z], dim=-1), factor)
        mean = (_times(v, solved[..., 1]) + _times(z, solved[..., 0])) / 2
        outer = u.unsqueeze(-1) * w.unsqueeze(-2)
        bend = self.join(mean, symmetrise(v @ solved[..., 2:] - outer))
        return torch.where(self.inside(point).unsqueeze(-1), bend, torch.nan)


class FromStandard:
    """The ways from N(0, I) to N(t m_i, I + t (S_i - I)), 0 <= t <= 1 (k,), known by their velocities (k, n)."""

    def __init__(self, normals: Normals, away: Tensor, spread: Tensor, part: Tensor) -> None:
        eye, share = torch.eye(normals.d, dtype=away.dtype, device=away.device), part.view(-1, 1, 1)
        self.normals, self.end = normals, normals.join(away, spread)
        self.away, self.spread = share[..., 0] * away, eye + share * (spread - eye)
        self.target = normals.join(self.away, self.spread)

    def guess(self) -> Tensor:
        """First velocities."""
        slope = (self.away + solve_or_nan(self.spread, self.away.unsqueeze(-1)).squeeze(-1)) / 2
        return self.normals.join(slope, matrix_log(self.spread))

    def reach(self, velocity: Tensor) -> Tensor:
        """Where the geodesics with these velocities are at time 1; NaN where that is nowhere."""
        tame = velocity.abs().amax(-1, keepdim=True) < TAME
        mean, spread, _, _ = self.normals._from_standard(*self.normals.split(torch.where(tame, velocity, 0.0)))
        return torch.where(tame, self.normals.join(mean, spread), torch.nan)

    def measure(self, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """The misfit at the end, and its length."""
        misfit = self.target - self.reach(velocity)
        return misfit, safe_sqrt(self.normals.inner(self.end, misfit, misfit))

    def find_step(self, velocity: Tensor, misfit: Tensor) -> Tensor:
        """Newton's, no longer than the velocity; the Jacobian by central differences, all in one batch."""
        n, width = velocity.shape[-1], 1e-5 * (1 + velocity.norm(dim=-1, keepdim=True))
        moves = width * torch.eye(n, dtype=velocity.dtype, device=velocity.device).unsqueeze(1)  # (n, k, n)
        ends = self.reach(torch.stack([velocity + moves, velocity - moves]))
        jacobian = ((ends[0] - ends[1]) / (2 * width)).movedim(0, -1)
        step = solve_or_nan(jacobian, misfit.unsqueeze(-1)).squeeze(-1)
        rate = velocity.norm(dim=-1) / step.norm(dim=-1).clamp_min(1e-300)
        return rate.clamp(max=1.0).unsqueeze(-1) * step


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _solve(factor: Tensor, vector: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False).squeeze(-1)
