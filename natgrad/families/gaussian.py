"""Gaussian outputs: known standard deviation, or a spread that the model predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.families.base import DiagonalForm, SeparableLikelihood, check_same_shape, split_pair
from natgrad.families.special_functions import exp_gap, ratio_gap
from natgrad.ground.checks import check_positive


@dataclass(frozen=True)
class Gaussian(SeparableLikelihood):
    """N(outputs, std^2), independent entries. Fisher form I / std^2.

    Args:
        std: Standard deviation of every entry, positive; beta in the paper. A squared loss sum (r - t)^2 corresponds to
            std = sqrt(1/2).

    Raises:
        ValueError: Unless std > 0.

    Reference:
        Pascanu & Bengio 2013, eq. 9, mended: beta^-2.

    Example:
        >>> ng.Gaussian(2.0).fisher(torch.zeros(1, 2))
        tensor([[[0.2500, 0.0000],
                 [0.0000, 0.2500]]])
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        check_positive("std", self.std, hint=": the outputs' positive standard deviation")

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((targets - outputs) / self.std).square() / 2 + math.log(self.std) + 0.5 * math.log(2 * math.pi)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return outputs.detach() + self.std * draw_normal(outputs, generator)

    def curvature(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, self.std**-2)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return ((outputs - other) / self.std).square().sum(1) / 2

    def error_of(self, nats: float) -> float:
        """The size of an error in standard deviations, by what it adds to -log p.

        Args:
            nats: -log p less its least value.
        """
        return math.sqrt(2 * nats)


@dataclass(frozen=True)
class HeteroscedasticGaussian(DiagonalForm):
    """N(mean, variance) with both predicted: outputs are a tuple (mean, spread), each (b, ...).

    Fisher form diag(1 / v, 1/2), or diag(1 / v, 1 / (2 v^2)) in the variance. A row is one entry: (mean, spread).

    Args:
        log_variance: True: spread is log sigma^2 (no positivity to enforce). False: spread is sigma^2 itself.

    Example:
        >>> family = ng.HeteroscedasticGaussian()
        >>> outputs = torch.tensor([[1.0, 0.0]])  # mean 1, variance exp(0)
        >>> family.fisher(outputs).diagonal(dim1=-2, dim2=-1)
        tensor([[1.0000, 0.5000]])
    """

    log_variance: bool = True

    def rows(self, outputs: Any) -> Tensor:
        if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] == 2:
            return outputs  # rows already
        mean, spread = self._split(outputs)
        return torch.stack([mean.reshape(-1), spread.reshape(-1)], dim=1)

    def write_out(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return outputs
        mean, spread = self._split(outputs)
        return mean, spread.contiguous()

    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        mean, spread = self._split(outputs)
        check_same_shape(mean, targets)
        log_v, v = (spread, spread.exp()) if self.log_variance else (spread.log(), spread)
        return ((targets - mean).square() / v + log_v + math.log(2 * math.pi)).reshape(-1) / 2

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Tensor:
        mean, spread = self._split(outputs)
        std = (spread / 2).exp() if self.log_variance else spread.sqrt()
        return (mean + std * draw_normal(mean, generator)).detach()

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        if self.log_variance:
            return log_variance_kl(outputs, other).sum(1)
        (m, s), (n, t) = outputs.unbind(1), other.unbind(1)
        return (ratio_gap(s, t, s - t) + (m - n).square() / t) / 2

    def check_targets(self, outputs: Any, targets: Any) -> None:
        Gaussian().check_targets(self._split(outputs)[0], targets)

    def curvature(self, outputs: Tensor) -> Tensor:
        spread = outputs[:, 1]
        if self.log_variance:
            return torch.stack([(-spread).exp(), torch.full_like(spread, 0.5)], dim=1)
        return torch.stack([1 / spread, 0.5 / spread.square()], dim=1)

    def _split(self, outputs: Any) -> tuple[Tensor, Tensor]:
        if isinstance(outputs, Tensor):
            if outputs.dim() < 2 or outputs.shape[-1] % 2:
                raise ValueError(
                    f"outputs has shape {tuple(outputs.shape)}, expected a tuple (mean, spread), or one tensor with "
                    "the means and then the spreads along its last axis"
                )
            mean, spread = outputs.chunk(2, dim=-1)
            return mean, spread
        mean, spread = split_pair(outputs, "log variance" if self.log_variance else "variance")
        return mean, spread.expand_as(mean)


@dataclass(frozen=True)
class DiagonalGaussian(DiagonalForm):
    """N(mean, diag(std^2)) in d dimensions, one row per example: outputs (b, 2 d), the means and then the log stds.

    Fisher form diag(1 / std^2, 2). A tuple (mean, log_std) is taken too, log_std (b, d), or (d,) for all examples.
    `HeteroscedasticGaussian` is the same distribution with a row per entry, for losses that are means over entries.
    """

    def rows(self, outputs: Any) -> Tensor:
        if isinstance(outputs, Tensor):
            return check_halves(outputs, "log stds, or a tuple (mean, log_std)")
        mean, log_std = split_pair(outputs, "log_std")
        return torch.cat([mean, log_std.expand_as(mean)], dim=1)

    def write_out(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return outputs
        mean, log_std = split_pair(outputs, "log_std")
        return mean, log_std.expand_as(mean).contiguous()

    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        mean, log_std = self.rows(outputs).chunk(2, dim=1)
        check_same_shape(mean, targets)
        squares = ((targets - mean) * (-log_std).exp()).square()
        return (squares / 2 + log_std + 0.5 * math.log(2 * math.pi)).sum(1)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Tensor:
        mean, log_std = self.rows(outputs).detach().chunk(2, dim=1)
        return mean + log_std.exp() * draw_normal(mean, generator)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        (m, s), (n, t) = outputs.chunk(2, dim=1), other.chunk(2, dim=1)
        return ((exp_gap(2 * (s - t)) + ((m - n) * (-t).exp()).square()) / 2).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        Gaussian().check_targets(self.rows(outputs).chunk(2, dim=1)[0], targets)

    def curvature(self, outputs: Tensor) -> Tensor:
        log_std = outputs.chunk(2, dim=1)[1]
        return torch.cat([(-2 * log_std).exp(), torch.full_like(log_std, 2.0)], dim=1)


@dataclass(frozen=True)
class GaussianPosterior(DiagonalForm):
    """q(z | x) = N(mean, diag(exp(log variance))): its loss is beta KL(q || N(0, I)), its metric beta times q's own.

    It is no likelihood of targets: `nll` is the KL term, so that a variational autoencoder's whole loss goes through
    `opt.loss`, and `sample` draws z. The Fisher form of q in (mean, log variance) is diag(1 / variance, 1/2). Outputs
    are a tuple (mean, log variance), each (b, d), or one tensor (b, 2 d). The target is None: there is none.

    Args:
        beta: Weight of the KL term, 1 for the evidence lower bound.

    Raises:
        ValueError: If beta is not positive and finite.

    Example:
        >>> family = ng.Heads((ng.Bernoulli(), 6), (ng.GaussianPosterior(), 2 * 2))
        >>> encode, decode = nn.Linear(6, 4), nn.Linear(2, 6)
        >>> opt = ng.kfac(nn.ModuleList([encode, decode]), family)
        >>> x = torch.randint(2, (5, 6)).float()
        >>> mean, log_variance = encode(x).chunk(2, dim=1)
        >>> logits = decode(mean + (log_variance / 2).exp() * torch.randn(5, 2))
        >>> opt.loss((logits, (mean, log_variance)), (x, None)).backward()
        >>> opt.step()
    """

    needs_targets: ClassVar[bool] = False
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_positive("beta", self.beta, hint=": the positive weight of the KL term")

    def rows(self, outputs: Any) -> Tensor:
        if not isinstance(outputs, Tensor):
            parts = split_pair(outputs, "log variance")
            if parts[0].shape != parts[1].shape or parts[0].dim() != 2:
                raise ValueError(
                    f"outputs has shapes {[tuple(part.shape) for part in parts]}, expected a tuple (mean, log "
                    "variance), each (b, d)"
                )
            return torch.cat(parts, dim=1)
        return check_halves(outputs, "log variances, or a tuple (mean, log variance)")

    def nll(self, outputs: Any, targets: Any = None) -> Tensor:
        """beta KL(q || N(0, I)) = beta/2 sum(mean^2 + variance - 1 - log variance), one number per example."""
        mean, log_variance = self.rows(outputs).chunk(2, dim=1)
        return self.beta / 2 * (mean.square() + exp_gap(log_variance)).sum(1)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Tensor:
        mean, log_variance = self.rows(outputs).detach().chunk(2, dim=1)
        return mean + (log_variance / 2).exp() * draw_normal(mean, generator)

    def score(self, outputs: Any, targets: Any) -> Tensor:
        """d log q(z) / d (mean, log variance) times sqrt(beta), (b, 2 d); `nll` is not -log q."""
        mean, log_variance = self.rows(outputs).detach().chunk(2, dim=1)
        scaled = (targets - mean) * (-log_variance / 2).exp()
        parts = (scaled * (-log_variance / 2).exp(), (scaled.square() - 1) / 2)
        return math.sqrt(self.beta) * torch.cat(parts, dim=1)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        """beta KL(q(. | outputs), q(. | other)) for every row."""
        return self.beta * log_variance_kl(outputs, other).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        if targets is not None:
            raise ValueError(
                f"the target of GaussianPosterior is a {type(targets).__name__}, expected None: its loss is the KL to "
                "N(0, I), as in opt.loss((logits, posterior), (x, None))"
            )

    def curvature(self, outputs: Tensor) -> Tensor:
        log_variance = outputs.chunk(2, dim=1)[1]
        return self.beta * torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], dim=1)


def check_halves(outputs: Tensor, second: str) -> Tensor:
    """Outputs (b, 2 d) as they are. ValueError for another shape; `second` says what comes behind the means."""
    if outputs.dim() != 2 or outputs.shape[1] % 2:
        raise ValueError(
            f"outputs has shape {tuple(outputs.shape)}, expected (b, 2 d): the means and then the {second}"
        )
    return outputs


def log_variance_kl(outputs: Tensor, other: Tensor) -> Tensor:
    """KL of the normals of means and log variances (b, 2 d), entry by entry, (b, d)."""
    (m, s), (n, t) = outputs.chunk(2, dim=1), other.chunk(2, dim=1)
    return (exp_gap(s - t) + (m - n).square() * (-t).exp()) / 2


def draw_normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal draws in the shape of `like`."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
