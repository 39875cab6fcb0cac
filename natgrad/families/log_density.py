"""Models that return log p(x) themselves: normalising flows, autoregressive models, mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.families.base import Likelihood, require_one_tensor


@dataclass(frozen=True)
class LogDensity(Likelihood):
    """The model's outputs are log p(x) of its inputs, one number per example; the loss is their mean, negated.

    No targets: `opt.loss(flow.log_prob(x))`. There are no labels to draw, so that the metric is the empirical Fisher
    E_x[s s^T] of the scores s = d log p(x) / d theta over the x that come: the Fisher where these are drawn from the
    model itself, and near it where the model fits its data. `opt.report()` says so. A model whose factors are
    classes, bits or normals with known parameters has the true Fisher with their likelihood instead, with x itself as
    targets: `nn.CrossEntropyLoss()` on the logits of an autoregressive model.

    Example:
        >>> class Normal(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.whiten = nn.Linear(3, 3)
        ...     def log_prob(self, x):
        ...         z, log_volume = self.whiten(x), torch.linalg.slogdet(self.whiten.weight)[1]
        ...         return log_volume - 0.5 * z.square().sum(1) - 2.7568
        >>> flow, x = Normal(), torch.randn(50, 3)
        >>> opt = ng.kfac(flow, ng.LogDensity())
        >>> opt.zero_grad()
        >>> opt.loss(flow.log_prob(x)).backward()
        >>> opt.step()
    """

    note: ClassVar[str] = "metric: the empirical Fisher, of log p(x) at the x that came, not over draws of the model"

    def rows(self, outputs: Any) -> Tensor:
        log_p = require_one_tensor(outputs)
        if log_p.dim() == 0 or log_p.numel() != len(log_p):
            raise ValueError(
                f"the model's outputs have shape {tuple(log_p.shape)}, expected log p(x) of every example, (b,) or "
                "(b, 1): sum the log probabilities of its variables or tokens, and take no mean over examples"
            )
        return log_p.reshape(-1, 1)

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        return -self.rows(outputs).squeeze(1)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> None:
        """Nothing: there are no targets."""

    def check_targets(self, outputs: Any, targets: Any) -> None:
        self.rows(outputs)
        if targets is not None:
            raise ValueError(
                "targets came with LogDensity, expected none: the outputs are log p(x) already, so that the loss is "
                "opt.loss(log_p)"
            )
