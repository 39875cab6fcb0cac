"""The posterior of a latent variable as an output of the model: the KL term of a variational autoencoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.families.base import DiagonalForm
from natgrad.families.cancellation import exp_gap
from natgrad.families.gaussian import draw_normal
from natgrad.ground.checks import check_positive


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

    beta: float = 1.0

    def __post_init__(self) -> None:
        check_positive("beta", self.beta, hint=": the positive weight of the KL term")

    def rows(self, outputs: Any) -> Tensor:
        if not isinstance(outputs, Tensor):
            parts = list(outputs)
            if len(parts) != 2 or parts[0].shape != parts[1].shape or parts[0].dim() != 2:
                raise ValueError(
                    f"outputs has shapes {[tuple(part.shape) for part in parts]}, expected a tuple (mean, log "
                    "variance), each (b, d)"
                )
            return torch.cat(parts, dim=1)
        if outputs.dim() != 2 or outputs.shape[1] % 2:
            raise ValueError(
                f"outputs has shape {tuple(outputs.shape)}, expected (b, 2 d): the means and then the log variances, "
                "or a tuple (mean, log variance)"
            )
        return outputs

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
        (m, s), (n, t) = outputs.chunk(2, dim=1), other.chunk(2, dim=1)
        return self.beta / 2 * (exp_gap(s - t) + (m - n).square() * (-t).exp()).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        if targets is not None:
            raise ValueError(
                f"the target of GaussianPosterior is a {type(targets).__name__}, expected None: its loss is the KL to "
                "N(0, I), as in opt.loss((logits, posterior), (x, None))"
            )

    def curvature(self, outputs: Tensor) -> Tensor:
        log_variance = outputs.chunk(2, dim=1)[1]
        return self.beta * torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], dim=1)
