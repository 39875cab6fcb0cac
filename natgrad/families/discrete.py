"""Discrete outputs and counts in natural parameters: logits of bits and of classes, log rates."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.families.base import (
    Likelihood,
    SeparableLikelihood,
    check_range,
    check_same_shape,
    require_one_tensor,
    require_tensor_targets,
)
from natgrad.families.event_checks import check_support, check_width
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.special_functions import HALF_LOG_2PI, divergence_terms, exp_gap, in_double, stirling_rest
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import is_concrete
from natgrad.operators import DiagonalOperator, Operator

# Both faces at once: a likelihood of outputs whose rows are the natural parameters of an exponential family

ENUMERATED, OUTCOMES = 20, 2**20
"""Bits, and outcomes of counts, up to which all are listed."""


class NaturalLikelihood(Likelihood, ExponentialFamily):
    """A likelihood of outputs (R, m) and an exponential family of theta (..., m).

    Two methods of the two faces share a name, and the arguments tell them apart: `fisher(theta)` of one distribution,
    theta (m,), is an operator, and of rows (R, m) the matrices (R, m, m); `sample(theta, n, generator=)` gives n draws,
    `sample(outputs, generator)` one target per row. Rows are not checked, since they come out of a model; theta is.
    """

    @property
    @abstractmethod
    def _fixed_size(self) -> int | None:
        """n where the family has been told, else None: any."""

    @property
    def size(self) -> int:  # type: ignore[override]
        """n. AttributeError where the family takes any number of parameters."""
        if self._fixed_size is None:
            example = f"{type(self).__name__}(3)"
            raise AttributeError(f"{self!r} takes any number of parameters; say how many, as in {example}")
        return self._fixed_size

    def fisher(self, rows: Tensor) -> Any:
        """Of theta (n,): the Fisher operator. Of rows (R, n): matrices (R, n, n)."""
        rows = self.check_shape(rows, "theta")
        return ExponentialFamily.fisher(self, rows) if rows.dim() == 1 else self._forms(rows)

    @abstractmethod
    def _forms(self, rows: Tensor) -> Tensor:
        """Cov(T) of every row, unchecked, (..., n) -> (..., n, n)."""

    def covariance(self, theta: Tensor) -> Tensor:
        return self._forms(self.check(theta))

    def sample(self, outputs: Any, n: Any = None, generator: torch.Generator | None = None) -> Any:
        """n draws for every theta (..., size), (n, ..., event); without n one target for every row of outputs."""
        if n is None or isinstance(n, torch.Generator):
            return self._targets(outputs, generator if n is None else n)
        return ExponentialFamily.sample(self, outputs, n, generator=generator)

    def _targets(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """One draw for every row of a model's outputs, in their layout."""
        return self.draw(outputs.detach(), 1, generator)[0]


@dataclass(frozen=True, repr=False)
class Entries(NaturalLikelihood, SeparableLikelihood):
    """Independent entries with one natural parameter each: diagonal Fisher."""

    n: int | None = None  # how many. None takes what theta has
    shown = ("n",)
    of: ClassVar[str] = "entries"
    """What n counts, in words."""

    def __post_init__(self) -> None:
        if self.n is not None:
            check_integer("n", self.n, of=f"the number of {self.of}")

    @property
    def _fixed_size(self) -> int | None:
        return self.n

    def _forms(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(self.curvature(rows))

    def _operator(self, theta: Tensor) -> Operator:
        return DiagonalOperator(self.curvature(theta))


@dataclass(frozen=True, repr=False)
class Bernoulli(Entries):
    """Independent bits with logits r: Fisher form diag(y (1 - y)), y = sigmoid(r).

    As an exponential family T = x in {0, 1}^n, theta = r, psi = sum softplus(theta), eta = y.

    Args:
        n: How many bits. None takes what theta has.

    Reference:
        Pascanu & Bengio 2013, eq. 10, in the logits.

    Example:
        >>> ng.Bernoulli(2).expectation(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    of = "bits"

    def statistics(self, x: Tensor) -> Tensor:
        return check_support(check_width(x, self.n, "bits"), (x >= 0) & (x <= 1), "bits, 0 or 1")

    def log_partition(self, theta: Tensor) -> Tensor:
        return softplus(self.check_shape(theta, "theta")).sum(-1)

    def expectation(self, theta: Tensor) -> Tensor:
        return self.check(theta).sigmoid()

    def natural(self, eta: Tensor) -> Tensor:
        if is_concrete(self.check_finite(eta, "eta")) and not bool(((eta > 0) & (eta < 1)).all()):
            raise ValueError(
                "eta has entries outside of 0 < eta < 1, expected means of bits: on the edge no logit is finite"
            )
        return eta.log() - torch.log1p(-eta)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        x = self.statistics(self.as_numbers(x, self.check(theta).dtype))
        return -(x * softplus(-theta) + (1 - x) * softplus(theta)).sum(-1)

    def entropy(self, theta: Tensor) -> Tensor:
        size = self.check(theta).abs()  # psi - theta eta would lose all digits where a bit is nearly certain
        return (softplus(-size) + size * (-size).sigmoid()).sum(-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(theta.sigmoid().expand(count, *theta.shape), generator=generator)

    def outcomes(self, theta: Tensor) -> Tensor:
        n = theta.shape[-1]
        if n > ENUMERATED:
            raise ValueError(f"theta has {n} bits, of which all 2^n outcomes are listed up to {ENUMERATED}")
        axis = torch.arange(2, dtype=theta.dtype, device=theta.device)
        return torch.cartesian_prod(*[axis] * n).view(-1, n)

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")

    def curvature(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()  # not y (1 - y): 1 - y rounds to 0 in float32 beyond r = 17

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        self.check_shape(outputs, "theta")
        self.check_shape(other, "other")
        ones = divergence_terms(-softplus(-outputs), -softplus(-other))
        zeros = divergence_terms(-softplus(outputs), -softplus(other))
        return (ones + zeros).sum(-1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        check_range(targets, 0, 1, "bits or probabilities in [0, 1]")


@dataclass(frozen=True, repr=False)
class Poisson(Entries):
    """Independent counts with log rates r: Fisher form diag(exp r).

    As an exponential family T = x, theta = r, psi = sum exp(theta), h = 1 / x!, eta = exp(theta).

    Args:
        n: How many counts. None takes what theta has.

    Example:
        >>> ng.Poisson(2).expectation(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.7183])
    """

    of = "counts"

    def statistics(self, x: Tensor) -> Tensor:
        x = check_width(x, self.n, "counts")
        return check_support(x, (x >= 0) & (x == x.round()), "counts 0, 1, 2, ...")

    def log_partition(self, theta: Tensor) -> Tensor:
        return self.check_shape(theta, "theta").exp().sum(-1)

    def log_base(self, x: Tensor) -> Tensor:
        return -torch.lgamma(x + 1).sum(-1)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return (theta.exp() * (1 - theta) - poisson_entropy(theta)).sum(-1)

    def entropy(self, theta: Tensor) -> Tensor:
        return poisson_entropy(self.check(theta)).sum(-1)

    def expectation(self, theta: Tensor) -> Tensor:
        return self.check(theta).exp()

    def natural(self, eta: Tensor) -> Tensor:
        if is_concrete(self.check_finite(eta, "eta")) and not bool((eta > 0).all()):
            raise ValueError("eta has entries <= 0, expected positive means of counts: at 0 no log rate is finite")
        return eta.log()

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(theta.exp().expand(count, *theta.shape).contiguous(), generator=generator)

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p of counts t: t (exp(g) - 1 - g) + 1/2 log(2 pi t) + ..., g = r - log t; exp(r) where t = 0.

        In exp(r) - t r + log t! nothing but round-off is left in float32 from rates of 1e6 on.
        """
        targets = targets.to(outputs.dtype)
        none = targets == 0
        counts = targets.masked_fill(none, 1.0)
        main = counts * exp_gap(outputs - counts.log())
        rest = stirling_rest(counts, torch.lgamma)
        return torch.where(none, outputs.exp(), main + 0.5 * counts.log() + HALF_LOG_2PI + rest)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        x = self.statistics(self.as_numbers(x, self.check(theta).dtype))
        return -self.entry_nll(*torch.broadcast_tensors(theta, x)).sum(-1)

    def curvature(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return divergence_terms(self.check_shape(outputs, "theta"), self.check_shape(other, "other")).sum(-1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        check_range(targets, 0, torch.inf, "counts >= 0")


class LogitFamily(ExponentialFamily):
    """Classes by their logits theta, overcomplete: what Categorical and Multinomial share.

    `fisher_expectation` is the pseudo-inverse of the Fisher matrix in theta: eta moves with its sum unchanged.
    """

    domain = "logits are finite numbers, or -inf for classes that cannot come; at least one must be finite"

    @property
    def _trials(self) -> int:
        """How many draws eta counts."""
        return 1

    def inside(self, theta: Tensor) -> Tensor:
        finite = torch.isfinite(theta)
        return (finite | (theta == -torch.inf)).all(-1) & finite.any(-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        return self._trials * self.check_shape(theta, "theta").logsumexp(-1)

    def entropy(self, theta: Tensor) -> Tensor:
        return self._trials * classes_entropy(self.check(theta)) - self.mean_log_base(theta)

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return self._trials * classes_kl(self.check(theta), self.check(other))

    def expectation(self, theta: Tensor) -> Tensor:
        return self._trials * self.check(theta).softmax(-1)

    def natural(self, eta: Tensor) -> Tensor:
        return centre_logits(self.check_finite(eta, "eta"), self._trials)

    def covariance(self, theta: Tensor) -> Tensor:
        return self._trials * simplex_forms(self.check(theta))

    def _operator(self, theta: Tensor) -> Operator:
        return SimplexFisher(theta.softmax(-1), self._trials)


@dataclass(frozen=True, repr=False)
class Categorical(LogitFamily, NaturalLikelihood):
    """One of C classes with logits r: Fisher form diag(y) - y y^T, y = softmax(r).

    A row is one position. Targets are class numbers, shaped like the outputs without the class axis, or class
    probabilities shaped like the outputs. The root is F = diag(sqrt y) - y sqrt(y)^T, (C x C), of rank C - 1.

    As an exponential family x is a class number (...,), T its indicator (..., C), theta = r (..., C), psi = logsumexp,
    eta = y. A constant added to all logits changes nothing: the Fisher matrix has rank C - 1, and `natural(eta)` gives
    the logits whose sum is zero. `SubModel(Categorical(C), range(C - 1))` is the minimal family, with the last logit at
    zero. A logit of -inf rules its class out (a mask): it is never drawn, has log p = -inf, and neither gradients nor
    the Fisher form see it.

    Args:
        classes: C, which `statistics` needs. None takes what the logits have.
        dim: The class axis of the outputs: -1 for (b, ..., C), 1 for torch's (b, C, ...).

    Reference:
        Pascanu & Bengio 2013, eq. 11, in the logits.

    Example:
        >>> ng.Categorical().nll(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([0.6931])
    """

    classes: int | None = None
    dim: int = -1

    def __post_init__(self) -> None:
        if self.classes is not None:
            check_integer("classes", self.classes, 2, of="the number of classes (the axis of the classes is dim=)")

    @property
    def _fixed_size(self) -> int | None:
        return self.classes

    def statistics(self, x: Tensor) -> Tensor:
        """Indicators (..., C) of class numbers (...,); indicators or class probabilities are taken as they are."""
        x = read_class_numbers(x, self.size)
        if x.is_floating_point():
            return x
        return functional.one_hot(x, self.size).to(torch.get_default_dtype())

    def as_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        log_p = self.check(theta).log_softmax(-1)
        x = read_class_numbers(x, theta.shape[-1])
        if x.is_floating_point():
            return weigh_logs(x, log_p.expand(torch.broadcast_shapes(x.shape, log_p.shape)))
        log_p = log_p.expand(*torch.broadcast_shapes(log_p.shape[:-1], x.shape), theta.shape[-1])
        return log_p.gather(-1, x.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        return self.natural(statistics.to(torch.float64).mean(0).to(statistics.dtype))

    def _forms(self, rows: Tensor) -> Tensor:
        return simplex_forms(rows)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        p = theta.softmax(-1).reshape(-1, theta.shape[-1])
        drawn = torch.multinomial(p, count, replacement=True, generator=generator)
        return drawn.mT.reshape(count, *theta.shape[:-1])

    def outcomes(self, theta: Tensor) -> Tensor:
        return torch.arange(theta.shape[-1], device=theta.device)

    def rows(self, outputs: Tensor) -> Tensor:
        outputs = require_one_tensor(outputs)
        if outputs.dim() < 2:
            raise ValueError(f"outputs has shape {tuple(outputs.shape)}, expected logits (b, C) or with positions")
        return outputs.movedim(self.dim, -1).flatten(0, -2)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.rows(outputs)
        if targets.is_floating_point():
            check_same_shape(outputs, targets)
            return -weigh_logs(self.rows(targets), logits.log_softmax(-1))
        return functional.cross_entropy(logits, targets.reshape(-1), reduction="none")

    def _targets(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        moved = outputs.detach().movedim(self.dim, -1)
        drawn = torch.multinomial(moved.flatten(0, -2).softmax(-1), 1, generator=generator)
        return drawn.view(moved.shape[:-1])

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return multiply_simplex(outputs.softmax(-1), tangents)

    def root(self, outputs: Tensor) -> Tensor:
        y = outputs.softmax(-1)
        s = y.sqrt()  # (diag s - y s^T)(diag s - y s^T)^T = diag y - y y^T, since s . s = 1
        return torch.diag_embed(s) - y.unsqueeze(-1) * s.unsqueeze(-2)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return classes_kl(self.check_shape(outputs, "theta"), self.check_shape(other, "other"))

    def check_targets(self, outputs: Any, targets: Any) -> None:
        outputs = require_one_tensor(outputs)
        if outputs.dim() == 0:
            raise ValueError(
                "outputs is a single number, expected the logits of every class: give what the model returned, and not "
                "a loss of it"
            )
        if outputs.dim() <= self.dim:
            raise ValueError(
                f"outputs has shape {tuple(outputs.shape)}, expected the logits of every class, (examples, classes): "
                "give them before an argmax; one score per example is a criterion of bits, nn.BCEWithLogitsLoss()"
            )
        if require_tensor_targets(targets).is_floating_point():
            if targets.dim() < outputs.dim():
                raise ValueError(
                    f"targets are {targets.dtype} of shape {tuple(targets.shape)}, expected class numbers as integers; "
                    "convert them with targets.long()"
                )
            check_same_shape(outputs, targets)
            check_range(targets, 0, 1, "class numbers (integers), or class probabilities in [0, 1]")
            return
        if targets.dtype not in (torch.int64, torch.uint8):
            raise ValueError(f"targets are {targets.dtype}, expected torch.int64; convert them with targets.long()")
        classes = outputs.shape[self.dim]
        positions = outputs.movedim(self.dim, -1).shape[:-1]
        if targets.shape != positions:
            last = self.dim == 1 and targets.shape == outputs.shape[:-1]
            raise ValueError(
                f"targets has shape {tuple(targets.shape)}, expected {tuple(positions)}, one class each; "
                + 'the classes are the last axis: take "token_cross_entropy", or ng.Categorical()' * last
                + "reshape them, or say with Categorical(dim=...) where the classes are" * (not last)
            )
        check_range(targets, 0, classes - 1, f"class numbers from 0 to {classes - 1}")

    def __repr__(self) -> str:
        parts = [] if self.classes is None else [str(self.classes)]
        return f"Categorical({', '.join(parts if self.dim == -1 else [*parts, f'dim={self.dim}'])})"


def read_class_numbers(x: Tensor, classes: int) -> Tensor:
    """Class numbers as long integers, indicators as they are. ValueError where they are neither."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {type(x).__name__}, expected a tensor of class numbers")
    if x.is_floating_point():
        if x.dim() == 0 or x.shape[-1] != classes:
            raise ValueError(
                f"x is {x.dtype} of shape {tuple(x.shape)}, expected class numbers as integers (x.long()), or "
                f"indicators (..., {classes})"
            )
        return check_support(x, (x >= 0) & (x <= 1), "indicators or class probabilities")
    return check_support(x.long(), (x >= 0) & (x < classes), f"class numbers from 0 to {classes - 1}")


@dataclass(frozen=True)
class Multinomial(LogitFamily):
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

    n_trials: int
    classes: int

    def __post_init__(self) -> None:
        check_integer("n_trials", self.n_trials, of="the number of draws")
        check_integer("classes", self.classes, 2, of="the number of classes")

    @property
    def size(self) -> int:  # type: ignore[override]
        """C."""
        return self.classes

    @property
    def _trials(self) -> int:
        return self.n_trials

    def statistics(self, x: Tensor) -> Tensor:
        check_width(x, self.classes, "counts")
        fits = (x >= 0) & (x == x.round()) & (x.sum(-1, keepdim=True) == self.n_trials)
        return check_support(x, fits, f"counts >= 0 with the sum {self.n_trials}")

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        log_p = self.check(theta).log_softmax(-1)
        x = self.statistics(self.as_numbers(x, theta.dtype))
        return weigh_logs(x, log_p.expand(torch.broadcast_shapes(x.shape, log_p.shape))) + self.log_base(x)

    def log_base(self, x: Tensor) -> Tensor:
        return math.lgamma(self.n_trials + 1) - torch.lgamma(x + 1).sum(-1)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        return super().entropy(theta)

    @in_double
    def mean_log_base(self, theta: Tensor) -> Tensor:
        """log n! - sum_i E[log x_i!], every x_i binomial, over the counts within 6 sqrt(n) of its mean."""
        n, log_p, log_q = self.n_trials, theta.log_softmax(-1).unsqueeze(-1), log_complement(theta).unsqueeze(-1)
        reach = math.ceil(6 * math.sqrt(n))  # beyond it lies less than exp(-72), by Hoeffding's inequality
        width, mean = min(n, 2 * reach), n * log_p.detach().exp()
        first = (mean.round() - reach).clamp(0, n - width)
        counts = first + torch.arange(width + 1, dtype=theta.dtype, device=theta.device)
        others, factorials, centre = n - counts, torch.lgamma(counts + 1), torch.lgamma(mean + 1)
        choose = math.lgamma(n + 1) - factorials - torch.lgamma(others + 1)
        # of an impossible class: 0 log 0 = 0
        seen = counts * log_p.masked_fill(counts == 0, 0.0) + others * log_q.masked_fill(others == 0, 0.0)
        share = (choose + seen).exp()
        # from the centre: of 1e9 trials chances sum to one but for 1e-6, and the largest logarithm is 2e10
        return math.lgamma(n + 1) - (centre.squeeze(-1) + (share * (factorials - centre)).sum(-1)).sum(-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Class by class, a binomial number of those that are left: a billion trials cost no more than one."""
        p = theta.softmax(-1)
        rest = p.flip(-1).cumsum(-1).flip(-1)  # p_i + ... + p_C, exactly p_i at the last class that can come
        share = torch.where(p < rest, p / rest.clamp(min=torch.finfo(p.dtype).tiny), (p > 0).to(p)).clamp(max=1)
        left, counts = p.new_full((count, *p.shape[:-1]), self.n_trials), list[Tensor]()
        for each in share.unbind(-1):
            counts.append(torch.binomial(left, each.expand_as(left).contiguous(), generator=generator))
            left = left - counts[-1]
        return torch.stack(counts, -1)

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
        return self.trials * multiply_simplex(self.y.expand_as(block.mT), block.mT).mT

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
    products = y.unsqueeze(-1) * y.unsqueeze(-2)
    others = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(others.sum(-1)) - others  # not y - y^2, which keeps no digit of a class that is certain


def multiply_simplex(y: Tensor, tangents: Tensor) -> Tensor:
    """(diag(y) - y y^T) t for probabilities y and tangents t, both (..., C)."""
    # constants in t do not count: without the likeliest class's entry nothing cancels where 1 - y is next to nothing
    moved = tangents - torch.take_along_dim(tangents, y.argmax(-1, keepdim=True), -1)
    return y * (moved - (y * moved).sum(-1, keepdim=True))


def centre_logits(eta: Tensor, total: int) -> Tensor:
    """The logits with sum zero of mean counts eta (..., C). ValueError unless they are positive with the given sum."""
    if is_concrete(eta):
        slack = 100 * torch.finfo(eta.dtype).eps * eta.shape[-1] * total
        if not bool((eta > 0).all()):
            raise ValueError("eta has entries <= 0, expected the means of all classes to be positive: no finite logit")
        if not bool(((eta.sum(-1) - total).abs() <= slack).all()):
            raise ValueError(f"eta has a sum other than {total}, expected means of counts of {total} in all")
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


def softplus(theta: Tensor) -> Tensor:
    """log(1 + exp theta); torch's own is linear beyond 20, which costs digits."""
    return torch.logaddexp(theta, torch.zeros_like(theta))


LARGE_LOG = math.log(60.0)
ENTROPY_SERIES = (-1 / 12, -1 / 24, -19 / 360, -9 / 80, -863 / 2520, -1375 / 1008, -33953 / 5040, -57281 / 1440)


def poisson_entropy(log_rate: Tensor) -> Tensor:
    """-E[log p] of Poisson counts, the same shape: a sum up to rates of 60, from there on a series in 1 / rate."""
    large = log_rate > LARGE_LOG
    small = torch.where(large, 0.0, log_rate)
    counts = torch.arange(160, dtype=log_rate.dtype, device=log_rate.device)
    log_p = counts * small.unsqueeze(-1) - small.exp().unsqueeze(-1) - torch.lgamma(counts + 1)
    far = torch.where(large, log_rate, LARGE_LOG)
    # by Stirling's formula and the central moments: 1/2 log(2 pi e rate) - ...; at 60 eight terms leave 1e-13
    entropy = 0.5 * (math.log(2 * math.pi * math.e) + far)
    for k, coefficient in enumerate(ENTROPY_SERIES, 1):
        entropy = entropy + coefficient * (-k * far).exp()
    return torch.where(large, entropy, -(log_p.exp() * log_p).sum(-1))
