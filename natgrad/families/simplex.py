"""Logits over classes, overcomplete: what Categorical and Multinomial share."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families.exponential import ExponentialFamily, check_support
from natgrad.families.natural import check_count
from natgrad.lapack import concrete
from natgrad.operators import Operator

OUTCOMES = 2**20


@dataclass(frozen=True)
class Multinomial(ExponentialFamily):
    """Counts x (..., C) of n_trials draws of C classes: T = x, theta = logits, psi = n_trials logsumexp(theta).

    Adding a constant to all logits changes nothing: the Fisher matrix has rank C - 1, and `natural(eta)` gives the
    logits whose sum is zero. `SubModel(Multinomial(n, C), range(C - 1))` is the minimal family, the last logit at zero.
    """

    n_trials: int
    classes: int

    def __post_init__(self) -> None:
        check_count(self.n_trials, "n_trials", "draws")
        check_count(self.classes, "classes", "classes", 2)

    @property
    def size(self) -> int:  # type: ignore[override]
        """C."""
        return self.classes

    def statistics(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.classes,):
            came = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {type(x).__name__}"
            raise ValueError(f"x {came}, expected counts (..., {self.classes})")
        fits = (x >= 0) & (x == x.round()) & (x.sum(-1, keepdim=True) == self.n_trials)
        return check_support(x, fits, f"counts >= 0 with the sum {self.n_trials}")

    def log_partition(self, theta: Tensor) -> Tensor:
        return self.n_trials * self.check_shape(theta, "theta").logsumexp(-1)

    def log_base(self, x: Tensor) -> Tensor:
        return math.lgamma(self.n_trials + 1) - torch.lgamma(x + 1).sum(-1)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        """log n! - sum_i E[log x_i!], every x_i binomial."""
        counts = torch.arange(self.n_trials + 1, dtype=theta.dtype, device=theta.device)
        factorials = torch.lgamma(counts + 1)
        choose = math.lgamma(self.n_trials + 1) - factorials - factorials.flip(0)
        log_p = theta.log_softmax(-1).unsqueeze(-1)
        log_q = log_complement(theta).unsqueeze(-1)
        share = (choose + counts * log_p + counts.flip(0) * log_q).exp()
        return math.lgamma(self.n_trials + 1) - (share * factorials).sum((-1, -2))

    def expectation(self, theta: Tensor) -> Tensor:
        return self.n_trials * self.check(theta).softmax(-1)

    def natural(self, eta: Tensor) -> Tensor:
        return centred_logits(self.check_finite(eta, "eta"), self.n_trials)

    def covariance(self, theta: Tensor) -> Tensor:
        return self.n_trials * simplex_forms(self.check(theta))

    def fisher(self, theta: Tensor) -> Operator:
        return SimplexFisher(self.single(self.check(theta), "theta").detach().softmax(-1), self.n_trials)

    def fisher_expectation(self, eta: Tensor) -> Operator:
        """The pseudo-inverse of the Fisher matrix in theta: eta moves with its sum unchanged."""
        theta = self.natural(self.single(eta, "eta"))
        return SimplexFisher(theta.detach().softmax(-1), self.n_trials, dual=True)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        p = theta.softmax(-1).reshape(-1, self.classes)
        drawn = torch.multinomial(p, count * self.n_trials, replacement=True, generator=generator)
        drawn = drawn.view(len(p), count, self.n_trials)
        counts = theta.new_zeros(len(p), count, self.classes).scatter_add(-1, drawn, theta.new_ones(drawn.shape))
        return counts.transpose(0, 1).reshape(count, *theta.shape)

    def outcomes(self, theta: Tensor) -> Tensor:
        number = math.comb(self.n_trials + self.classes - 1, self.classes - 1)
        if number > OUTCOMES:
            raise ValueError(f"{self!r} has {number} outcomes, of which at most {OUTCOMES} are listed")
        bars = itertools.combinations(range(self.n_trials + self.classes - 1), self.classes - 1)
        places = torch.tensor(list(bars), dtype=theta.dtype, device=theta.device)
        last = places.new_full((len(places), 1), float(self.n_trials + self.classes - 1))
        return torch.cat([places, last], 1).diff(dim=1, prepend=-torch.ones_like(last)) - 1


class SimplexFisher(Operator):
    """n (diag(y) - y y^T), of rank C - 1, or its pseudo-inverse P diag(1 / y) P / n with P = I - 1 1^T / C (dual).

    y: probabilities (C,).   Products in O(C).
    """

    def __init__(self, y: Tensor, trials: int = 1, dual: bool = False) -> None:
        self.y, self.trials, self.dual = y, trials, dual
        self.size, self.dtype, self.device = len(y), y.dtype, y.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.mm(vector.unsqueeze(1)).squeeze(1)

    def mm(self, block: Tensor) -> Tensor:
        if self.dual:
            scaled = (block - block.mean(0)) / (self.trials * self.y).unsqueeze(1)
            return scaled - scaled.mean(0)
        weighted = self.y.unsqueeze(1) * block
        return self.trials * (weighted - self.y.unsqueeze(1) * weighted.sum(0))

    def root(self) -> Tensor | None:
        if self.dual:
            scaled = torch.diag((self.trials * self.y).rsqrt())
            return scaled - scaled.mean(0)
        s = self.y.sqrt()
        return self.trials**0.5 * (torch.diag(s) - self.y.unsqueeze(1) * s)

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """The pseudo-inverse; None with damping."""
        return None if damping else SimplexFisher(self.y, self.trials, not self.dual)


def simplex_forms(theta: Tensor) -> Tensor:
    """diag(y) - y y^T, y = softmax(theta), (..., C) -> (..., C, C)."""
    y = theta.softmax(-1)
    return torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)


def centred_logits(eta: Tensor, total: float = 1.0) -> Tensor:
    """The logits with sum zero of mean counts eta (..., C). ValueError unless they are positive with the given sum."""
    if concrete(eta):
        slack = 100 * torch.finfo(eta.dtype).eps * eta.shape[-1] * total
        if not bool((eta > 0).all()):
            raise ValueError("eta has entries <= 0, expected the means of all classes to be positive: no finite logit")
        if not bool(((eta.sum(-1) - total).abs() <= slack).all()):
            raise ValueError(f"eta has a sum other than {total:g}, expected means of counts of {total:g} in all")
    log = eta.log()
    return log - log.mean(-1, keepdim=True)


def log_complement(theta: Tensor) -> Tensor:
    """log(1 - softmax(theta)), each entry from the others: exact where a probability is nearly 1."""
    classes = theta.shape[-1]
    others = theta.unsqueeze(-2).expand(*theta.shape[:-1], classes, classes)
    itself = torch.eye(classes, dtype=torch.bool, device=theta.device)
    return others.masked_fill(itself, -torch.inf).logsumexp(-1) - theta.logsumexp(-1, keepdim=True)
