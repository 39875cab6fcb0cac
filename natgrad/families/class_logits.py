"""Logits over classes, overcomplete: what Categorical and Multinomial share."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families.cancellation import divergence_terms
from natgrad.families.event_checks import check_support, check_width
from natgrad.families.exponential import ExponentialFamily
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import is_concrete
from natgrad.operators import Operator

OUTCOMES = 2**20
LOGITS = "logits are finite numbers, or -inf for classes that cannot come; at least one must be finite"


@dataclass(frozen=True)
class Multinomial(ExponentialFamily):
    """Counts x of n_trials draws of C classes: T = x, theta = logits, psi = n_trials logsumexp(theta).

    A constant added to all logits changes nothing: the Fisher matrix has rank C - 1, and `natural(eta)` gives the
    logits whose sum is zero. `SubModel(Multinomial(n, C), range(C - 1))` is the minimal family, the last logit at zero.
    A logit of -inf rules its class out.

    Args:
        n_trials: How many draws are counted.
        classes: C.

    Example:
        >>> family = ng.Multinomial(10, 3)
        >>> family.expectation(torch.zeros(3))
        tensor([3.3333, 3.3333, 3.3333])
    """

    domain = LOGITS

    n_trials: int
    classes: int

    def __post_init__(self) -> None:
        check_integer("n_trials", self.n_trials, of="the number of draws")
        check_integer("classes", self.classes, 2, of="the number of classes")

    @property
    def size(self) -> int:  # type: ignore[override]
        """C."""
        return self.classes

    def statistics(self, x: Tensor) -> Tensor:
        check_width(x, self.classes, "counts")
        fits = (x >= 0) & (x == x.round()) & (x.sum(-1, keepdim=True) == self.n_trials)
        return check_support(x, fits, f"counts >= 0 with the sum {self.n_trials}")

    def log_partition(self, theta: Tensor) -> Tensor:
        return self.n_trials * self.check_shape(theta, "theta").logsumexp(-1)

    def inside(self, theta: Tensor) -> Tensor:
        return are_logits(theta)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        log_p = self.check(theta).log_softmax(-1)
        x = self.statistics(self.as_numbers(x, theta.dtype))
        return weigh_logs(x, log_p.expand(torch.broadcast_shapes(x.shape, log_p.shape))) + self.log_base(x)

    def entropy(self, theta: Tensor) -> Tensor:
        return self.n_trials * classes_entropy(self.check(theta)) - self.mean_log_base(theta)

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return self.n_trials * classes_kl(self.check(theta), self.check(other))

    def log_base(self, x: Tensor) -> Tensor:
        return math.lgamma(self.n_trials + 1) - torch.lgamma(x + 1).sum(-1)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        """log n! - sum_i E[log x_i!], every x_i binomial."""
        counts = torch.arange(self.n_trials + 1, dtype=theta.dtype, device=theta.device)
        factorials = torch.lgamma(counts + 1)
        choose = math.lgamma(self.n_trials + 1) - factorials - factorials.flip(0)
        log_p = theta.log_softmax(-1).unsqueeze(-1)
        log_q = log_complement(theta).unsqueeze(-1)
        none = counts == 0  # of an impossible class: 0 log 0 = 0
        seen = counts * log_p.masked_fill(none, 0.0) + counts.flip(0) * log_q.masked_fill(none.flip(0), 0.0)
        share = (choose + seen).exp()
        return math.lgamma(self.n_trials + 1) - (share * factorials).sum((-1, -2))

    def expectation(self, theta: Tensor) -> Tensor:
        return self.n_trials * self.check(theta).softmax(-1)

    def natural(self, eta: Tensor) -> Tensor:
        return centre_logits(self.check_finite(eta, "eta"), self.n_trials)

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
    """n (diag(y) - y y^T), or (dual) its pseudo-inverse P diag(1 / y) P / n with P = I - 1 1^T / C, in O(C)."""

    def __init__(self, y: Tensor, trials: int = 1, dual: bool = False) -> None:
        self.y, self.trials, self.dual = y, trials, dual
        # a class of probability 0 has rows of zeros in both, and P is that of the others
        self.possible = y >= torch.finfo(y.dtype).tiny
        self.size, self.dtype, self.device = len(y), y.dtype, y.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.mm(vector.unsqueeze(1)).squeeze(1)

    def mm(self, block: Tensor) -> Tensor:
        if self.dual:
            return self._centre(self._centre(block) / (self.trials * self._positive()).unsqueeze(1))
        weighted = self.y.unsqueeze(1) * block
        return self.trials * (weighted - self.y.unsqueeze(1) * weighted.sum(0))

    def root(self) -> Tensor | None:
        if self.dual:
            return self._centre(torch.diag((self.trials * self._positive()).rsqrt()))
        s = self.y.sqrt()
        return self.trials**0.5 * (torch.diag(s) - self.y.unsqueeze(1) * s)

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """The pseudo-inverse; None with damping."""
        return None if damping else SimplexFisher(self.y, self.trials, not self.dual)

    def _positive(self) -> Tensor:
        return torch.where(self.possible, self.y, 1.0)

    def _centre(self, block: Tensor) -> Tensor:
        """Columns (C, k) without their mean over the classes that can come, 0 at the others."""
        possible = torch.where(self.possible.unsqueeze(1), block, 0.0)
        return torch.where(self.possible.unsqueeze(1), possible - possible.sum(0) / self.possible.sum(), 0.0)


def are_logits(theta: Tensor) -> Tensor:
    """Whether every entry is finite or -inf, and one at least finite, (..., C) -> (...)."""
    finite = torch.isfinite(theta)
    return (finite | (theta == -torch.inf)).all(-1) & finite.any(-1)


def weigh_logs(share: Tensor, log_p: Tensor) -> Tensor:
    """sum share log p, (..., C) -> (...), where a share of 0 of an impossible class counts as 0."""
    return (share * log_p.masked_fill(share == 0, 0.0)).sum(-1)


def classes_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(logits), softmax(other)), (..., C) -> (...); infinite where `other` rules out what can come."""
    return divergence_terms(logits.log_softmax(-1), other.log_softmax(-1)).sum(-1)


def classes_entropy(logits: Tensor) -> Tensor:
    """-sum p log p of p = softmax(logits), (..., C) -> (...); to all digits where one class is nearly certain."""
    log_p = logits.log_softmax(-1)
    top = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, log_p.argmax(-1, keepdim=True), True)
    log_p = log_p.masked_fill(log_p == -torch.inf, -torch.finfo(log_p.dtype).max)
    p = log_p.exp().masked_fill(top, 0.0)
    rest = p.sum(-1)
    return -(p * log_p).sum(-1) - (1 - rest) * torch.log1p(-rest)


def simplex_forms(theta: Tensor) -> Tensor:
    """diag(y) - y y^T, y = softmax(theta), (..., C) -> (..., C, C)."""
    y = theta.softmax(-1)
    return torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)


def centre_logits(eta: Tensor, total: float = 1.0) -> Tensor:
    """The logits with sum zero of mean counts eta (..., C). ValueError unless they are positive with the given sum."""
    if is_concrete(eta):
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
    others = others.masked_fill(itself, -torch.inf)
    none = (others == -torch.inf).all(-1)  # of the only class that can come; logsumexp has no derivative there
    log_sum = others.masked_fill(none.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(none, -torch.inf)
    return log_sum - theta.logsumexp(-1, keepdim=True)
