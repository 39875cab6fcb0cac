"""Covariance matrix adaptation: the natural gradient's rank-mu update, with evolution paths and step-size control.

Hansen 2016, *The CMA evolution strategy: a tutorial*. In the words of information-geometric optimisation (Ollivier et
al. 2017), the move of the mean at rate 1 and the rank-mu update at rate c_mu are one natural gradient step on the
expected weight of the rank, in the coordinates (mean, covariance). The rank-one update along the evolution path and
the control of sigma by the length of the other path are not: they add up what consecutive steps have in common.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.ground.checks import check_positive
from natgrad.ground.linalg import eigh, solve_psd, symmetrise
from natgrad.search.model import GaussianModel, State, build_identity
from natgrad.search.ranking import Ranking, count_effective, weigh_better_half, weigh_by_logarithm

FASTER = 1.3  # c_1 and c_mu beside the tutorial's: orthogonal draws know the covariance better than independent ones


@dataclass(frozen=True)
class Constants:
    """Rates and weights of covariance matrix adaptation: Hansen 2016, table 1."""

    recombination: Tensor  # weights of the mean, shape (popsize,): positive with sum 1, then zeros
    weights: Tensor  # weights of the covariance, shape (popsize,), with negative ones
    mueff: float  # how many equally weighted candidates the recombination is worth
    c_sigma: float  # rate of the path that controls sigma
    d_sigma: float  # damping of sigma
    c_c: float  # rate of the path of the covariance
    c_1: float  # rate of the rank-one update
    c_mu: float  # rate of the rank-mu update
    chi: float  # E |N(0, I)|


@lru_cache(maxsize=64)
def choose_constants(d: int, popsize: int, statistics: int, rate: float = 1.0) -> Constants:
    """The constants for d variables. Hansen 2016, table 1; Ros & Hansen 2008 for the diagonal."""
    # C_1 and c_mu are `FASTER` times as large as in the tutorial. With fewer than d (d + 1) / 2 learned entries they
    # grow further: by (d + 2) / 3 for the d entries of a diagonal, and in inverse proportion between the two.
    raw = weigh_by_logarithm(popsize)
    positive, mueff = weigh_better_half(popsize)
    faster = FASTER * rate * max(1.0, (d + 2) / 3 * d / statistics)
    c_1 = min(0.5, faster * 2 / ((d + 1.3) ** 2 + mueff))
    c_mu = min(1 - c_1, faster * 2 * (0.25 + mueff + 1 / mueff - 2) / ((d + 2) ** 2 + mueff))
    # the tutorial has d + mueff + 5. Hansen's own program has 3, which took 1-3 % fewer evaluations on the sphere,
    # Rosenbrock's function, f1 and f2 of BBOB (30 seeds each) and no more on f8 and f10
    c_sigma = min(0.5, (mueff + 2) / (d + mueff + 3))
    return Constants(
        recombination=positive,
        weights=torch.where(raw > 0, positive, bound_negative_weights(raw, d, mueff, c_1, c_mu)),
        mueff=mueff,
        c_sigma=c_sigma,
        d_sigma=1 + 2 * max(0.0, math.sqrt((mueff - 1) / (d + 1)) - 1) + c_sigma,
        c_c=(4 + mueff / d) / (d + 4 + 2 * mueff / d),
        c_1=c_1,
        c_mu=c_mu,
        chi=math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d**2)),
    )


def bound_negative_weights(raw: Tensor, d: int, mueff: float, c_1: float, c_mu: float) -> Tensor:
    """The weights of the worse half, as large as keeps the covariance positive. Hansen 2016, eq. 50-53."""
    negative = raw.clamp(max=0)
    bounds = (1 + c_1 / c_mu, 1 + 2 * count_effective(negative) / (mueff + 2), (1 - c_1 - c_mu) / (d * c_mu))
    return negative / negative.abs().sum() * min(bounds)


class Adaptation(GaussianModel):
    """Base of the models that CMA moves; they differ in which entries of the covariance they keep.

    Attributes:
        rate: Multiplies the learning rates of the covariance.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @abstractmethod
    def statistics(self, d: int) -> int:
        """How many entries of the covariance are learned.

        Args:
            d: Number of variables.
        """

    @abstractmethod
    def begin(self, mean: Tensor) -> State:
        """The part of the state that holds the covariance, at the identity.

        Args:
            mean: The starting point, shape (d,).
        """

    @abstractmethod
    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        """keep C + sum_i weights_i rows_i rows_i^T, as the parts of the state that change.

        Args:
            state: The present state.
            keep: Factor of the present covariance C.
            rows: Steps and the path, shape (k, d).
            weights: One per row, shape (k,).
        """

    def start(self, mean: Tensor, sigma: float, popsize: int) -> State:
        zeros = torch.zeros_like(mean)
        return {"mean": mean, "sigma": sigma, "sigma_path": zeros, "path": zeros, "age": 0, **self.begin(mean)}

    def advance(self, state: State, normals: Tensor, steps: Tensor, ranking: Ranking) -> State:
        popsize, d = steps.shape
        c = choose_constants(d, popsize, self.statistics(d), self.rate)
        age = state["age"] + 1
        # mean: the natural gradient sum_i w_i y_i at rate 1
        recombination = ranking.share(c.recombination.to(steps.device))
        step = recombination @ steps
        # sigma: the length of p_sigma <- (1 - c_sigma) p_sigma + sqrt(c_sigma (2 - c_sigma) mueff) sum_i w_i z_i
        # against chi, which it has where consecutive steps do not depend on one another
        gain = math.sqrt(c.c_sigma * (2 - c.c_sigma) * c.mueff)
        sigma_path = torch.add((1 - c.c_sigma) * state["sigma_path"], recombination @ normals, alpha=gain)
        length = float(sigma_path.norm())
        sigma = state["sigma"] * math.exp(min(1.0, c.c_sigma / c.d_sigma * (length / c.chi - 1)))
        # path: p_c likewise, of the steps. h_sigma: it is not fed while sigma is far too small, or the covariance would
        # learn that instead
        steady = length / math.sqrt(1 - (1 - c.c_sigma) ** (2 * age)) < (1.4 + 2 / (d + 1)) * c.chi
        path = (1 - c.c_c) * state["path"]
        if steady:
            path = torch.add(path, step, alpha=math.sqrt(c.c_c * (2 - c.c_c) * c.mueff))
        # covariance, Hansen 2016, eq. 47: C <- keep C + c_1 p_c p_c^T + c_mu sum_i w_i y_i y_i^T. Steps with negative
        # weights are scaled to |z|^2 = d: what they take away is bounded
        weights = ranking.share(c.weights.to(steps.device))
        total = float(weights.sum())
        lengths = normals.square().sum(1).clamp(min=1e-300)
        bounded = torch.where(weights < 0, weights * (d / lengths), weights)
        stale = 0.0 if steady else c.c_1 * c.c_c * (2 - c.c_c)  # in the place of what the path was not fed
        keep = 1 - c.c_1 - c.c_mu * total + stale
        rows = torch.cat([steps, path.unsqueeze(0)])
        row_weights = torch.cat([c.c_mu * bounded, bounded.new_full((1,), c.c_1)])
        mean = torch.add(state["mean"], step, alpha=state["sigma"])
        moved = {"mean": mean, "sigma": sigma, "sigma_path": sigma_path, "path": path, "age": age}
        return state | moved | self.reshape(state, keep, rows, row_weights)


def check_rate(rate: float) -> None:
    """Check that a rate is a positive number."""
    check_positive("rate", rate, hint=": it multiplies the learning rates, 1 leaves them")


# The whole covariance matrix

CONDITION = 1e14


@dataclass(frozen=True)
class Full(Adaptation):
    """Covariance matrix adaptation with d (d + 1) / 2 entries: the default, up to some hundreds of variables.

    Invariant under rotations of the space.

    Args:
        rate: Multiplies the learning rates of the covariance, which stays positive definite for any.
    """

    rate: float = 1.0

    def statistics(self, d: int) -> int:
        return d * (d + 1) // 2

    def begin(self, mean: Tensor) -> State:
        eye = build_identity(mean)
        return {"covariance": eye, "root": eye, "condition": 1.0, "rooted": 0}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        return normals @ state["root"]

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        return solve_psd(state["root"], steps.mT).mT  # no way along a direction without spread

    def variances(self, state: State) -> Tensor:
        return state["covariance"].diagonal()

    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        covariance = torch.addmm(state["covariance"], rows.mT * weights, rows, beta=keep)
        d, age = rows.shape[1], state["age"] + 1
        c = choose_constants(d, len(rows) - 1, self.statistics(d), self.rate)
        # the root is made anew once the covariance has moved by about a tenth of 1 / d: Hansen 2016, B.2
        if age - state["rooted"] <= FASTER / (10 * d * (c.c_1 + c.c_mu)):  # as seldom as with the tutorial's rates
            return {"covariance": covariance}
        return {**take_root(symmetrise(covariance)), "rooted": age}

    def trouble(self, state: State) -> str | None:
        if state["condition"] > CONDITION:
            return f"condition: the covariance's condition number is above {CONDITION:g}"
        return None


def take_root(covariance: Tensor) -> State:
    """C and its symmetric root C^1/2, with eigenvalues of at least lambda_max / 1e15."""
    values, vectors = eigh(covariance)
    smallest, largest = float(values[0]), float(values[-1])
    floor = largest / (10 * CONDITION)
    if smallest < floor:  # round-off
        values = values.clamp(min=floor)
        covariance = symmetrise((vectors * values) @ vectors.mT)
    root = symmetrise((vectors * values.sqrt()) @ vectors.mT)
    return {"covariance": covariance, "root": root, "condition": largest / max(smallest, floor)}


# Variables of different scales that do not depend on one another: the diagonal


@dataclass(frozen=True)
class Separable(Adaptation):
    """Covariance matrix adaptation of d variances: time and memory linear in d.

    It learns (d + 2) / 3 times as fast as `Full`, and does not see that variables depend on one another.

    Args:
        rate: Multiplies the learning rates; variances stay positive for any.

    Reference:
        Ros & Hansen 2008.
    """

    rate: float = 1.0

    def statistics(self, d: int) -> int:
        return d

    def begin(self, mean: Tensor) -> State:
        return {"variances": torch.ones_like(mean)}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        return normals * state["variances"].sqrt()

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        return steps / state["variances"].sqrt()

    def variances(self, state: State) -> Tensor:
        return state["variances"]

    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        moved = keep * state["variances"] + weights @ rows.square()
        return {"variances": moved.clamp(min=1e-30 * float(moved.max()))}  # round-off
