"""What the search of bits takes from the regression form of the natural gradient, and how it reuses draws."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families import Slope as Slope
from natgrad.families import natural_slope as natural_slope

SEARCHED = tuple(
    10.0**k for k in (-13, -10, *range(-7, 3))
)  # small ones: coefficients of one f may lie ten orders of magnitude apart


def shrink_slope(slope: Slope, statistics: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """b_k t_k^2 / (1 + t_k^2) with t_k the coefficient b_k in units of its standard error, shape (K,).

    A coefficient that hardly differs from noise hardly moves; where f lies in the span of T, the errors are zero. The
    error is that of a regression whose statistics do not correlate: residual variance / (effective draws * Var T_k).

    Args:
        slope: b, with the share of f's variance that it explains.
        statistics: T of the draws, shape (N, K).
        values: f of the draws, shape (N,).
        weights: Of the draws, shape (N,).
    """
    share = weights / weights.sum()
    spread = share @ (statistics - share @ statistics).square()
    variance = float(share @ (values - share @ values).square())
    left = (1 - min(1.0, max(0.0, slope.explained))) * variance
    error = left * share.square().sum() / spread.clamp(min=1e-12)
    size = slope.value.square()
    return slope.value * (size / (size + error).clamp(min=1e-300))


def weigh_past_draws(log_ratios: Tensor, generation: Tensor) -> Tensor:
    """Weights (N,) of draws from earlier distributions q_g, for expectations under the present p.

    Within a generation they are normalised, so that no partition function is needed. A generation counts for its
    effective number of draws.

    Args:
        log_ratios: log p(x) - log q_g(x), up to a constant for each generation, shape (N,).
        generation: The number g of each draw's generation, in ascending order, shape (N,).
    """
    place, counts = torch.unique_consecutive(generation, return_inverse=True, return_counts=True)[1:]
    zeros = log_ratios.new_zeros(len(counts))
    largest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, place, log_ratios, "amax")
    odds = (log_ratios - largest[place]).exp()
    share = odds / zeros.index_add(0, place, odds)[place]
    concentration = zeros.index_add(0, place, share.square())
    return share / concentration[place] / concentration.reciprocal().sum()
