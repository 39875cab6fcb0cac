"""Discrete outputs in natural parameters: Bernoulli logits, class logits, Poisson log rates."""

from __future__ import annotations

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
from natgrad.families.cancellation import divergence_terms, exp_gap
from natgrad.families.class_logits import (
    LOGITS,
    SimplexFisher,
    are_logits,
    centre_logits,
    classes_entropy,
    classes_kl,
    simplex_forms,
    weigh_logs,
)
from natgrad.families.event_checks import check_support, check_width
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.log_gamma import HALF_LOG_2PI, stirling_rest
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import is_concrete
from natgrad.operators import DiagonalOperator, Operator

# Both faces at once: a likelihood of outputs whose rows are the natural parameters of an exponential family

ENUMERATED = 20
"""Bits up to which all outcomes are listed."""


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
        return self._operator(self.check(rows)) if rows.dim() == 1 else self._forms(rows)

    @abstractmethod
    def _forms(self, rows: Tensor) -> Tensor:
        """Cov(T) of every row, unchecked, (..., n) -> (..., n, n)."""

    @abstractmethod
    def _operator(self, theta: Tensor) -> Operator:
        """The Fisher matrix in the natural parameters theta (n,) of one distribution."""

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
        return DiagonalOperator(self.curvature(theta).detach())

    def fisher_expectation(self, eta: Tensor) -> Operator:
        theta = self.natural(self.single(eta, "eta"))
        return DiagonalOperator(1 / self.curvature(theta).detach())


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
        gap = self.check_shape(other, "other") - self.check_shape(outputs, "theta")
        return (outputs.exp() * exp_gap(gap)).sum(-1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        check_range(targets, 0, torch.inf, "counts >= 0")


@dataclass(frozen=True, repr=False)
class Categorical(NaturalLikelihood):
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

    domain = LOGITS

    def inside(self, theta: Tensor) -> Tensor:
        return are_logits(theta)

    def statistics(self, x: Tensor) -> Tensor:
        """Indicators (..., C) of class numbers (...,); indicators or class probabilities are taken as they are."""
        x = read_class_numbers(x, self.size)
        if x.is_floating_point():
            return x
        return functional.one_hot(x, self.size).to(torch.get_default_dtype())

    def as_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x

    def log_partition(self, theta: Tensor) -> Tensor:
        return self.check_shape(theta, "theta").logsumexp(-1)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        log_p = self.check(theta).log_softmax(-1)
        x = read_class_numbers(x, theta.shape[-1])
        if x.is_floating_point():
            return weigh_logs(x, log_p.expand(torch.broadcast_shapes(x.shape, log_p.shape)))
        log_p = log_p.expand(*torch.broadcast_shapes(log_p.shape[:-1], x.shape), theta.shape[-1])
        return log_p.gather(-1, x.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        return self.natural(statistics.to(torch.float64).mean(0).to(statistics.dtype))

    def expectation(self, theta: Tensor) -> Tensor:
        return self.check(theta).softmax(-1)

    def natural(self, eta: Tensor) -> Tensor:
        return centre_logits(self.check_finite(eta, "eta"))

    def _forms(self, rows: Tensor) -> Tensor:
        return simplex_forms(rows)

    def _operator(self, theta: Tensor) -> Operator:
        return SimplexFisher(theta.detach().softmax(-1))

    def fisher_expectation(self, eta: Tensor) -> Operator:
        """The pseudo-inverse of the Fisher matrix in theta: eta moves with its sum unchanged."""
        theta = self.natural(self.single(eta, "eta"))
        return SimplexFisher(theta.detach().softmax(-1), dual=True)

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
        y = outputs.softmax(-1)
        weighted = y * tangents
        return weighted - y * weighted.sum(-1, keepdim=True)

    def root(self, outputs: Tensor) -> Tensor:
        y = outputs.softmax(-1)
        s = y.sqrt()  # (diag s - y s^T)(diag s - y s^T)^T = diag y - y y^T, since s . s = 1
        return torch.diag_embed(s) - y.unsqueeze(-1) * s.unsqueeze(-2)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return classes_kl(self.check_shape(outputs, "theta"), self.check_shape(other, "other"))

    def entropy(self, theta: Tensor) -> Tensor:
        return classes_entropy(self.check(theta))

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


def softplus(theta: Tensor) -> Tensor:
    """log(1 + exp theta); torch's own is linear beyond 20, which costs digits."""
    return torch.logaddexp(theta, torch.zeros_like(theta))


LARGE_LOG = math.log(60.0)
SERIES = (-1 / 12, -1 / 24, -19 / 360, -9 / 80, -863 / 2520, -1375 / 1008, -33953 / 5040, -57281 / 1440)


def poisson_entropy(log_rate: Tensor) -> Tensor:
    """-E[log p] of Poisson counts, the same shape: a sum up to rates of 60, from there on a series in 1 / rate."""
    large = log_rate > LARGE_LOG
    small = torch.where(large, 0.0, log_rate)
    counts = torch.arange(160, dtype=log_rate.dtype, device=log_rate.device)
    log_p = counts * small.unsqueeze(-1) - small.exp().unsqueeze(-1) - torch.lgamma(counts + 1)
    far = torch.where(large, log_rate, LARGE_LOG)
    # by Stirling's formula and the central moments: 1/2 log(2 pi e rate) - ...; at 60 eight terms leave 1e-13
    entropy = 0.5 * (math.log(2 * math.pi * math.e) + far)
    for k, coefficient in enumerate(SERIES, 1):
        entropy = entropy + coefficient * (-k * far).exp()
    return torch.where(large, entropy, -(log_p.exp() * log_p).sum(-1))
