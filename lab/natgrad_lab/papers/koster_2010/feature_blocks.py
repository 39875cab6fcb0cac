"""The score metric of the two-layer model in a block per feature: a row of W with the column of V that it feeds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.applications.two_layer import TwoLayer, jacobians
from natgrad.lapack import invert_or_nan


@dataclass
class FeatureBlocks:
    """Natural steps with G_j = E[sum_i g_ij g_ij^T], g_ij the slope of d_i log p in (w_j, v_1j, ..., v_Hj).

    A feature's own row and its weights in all pools move together: that part of the metric is kept whole, and what
    couples two features is left out. A block has N + H rows, whatever the number of features.

    Args:
        params: {"W": (J, N), "V": (H, J)}, V before the link; changed in place.
        model: The two-layer model.
        lr: Learning rate.
        damping: Of a block, in units of the mean of G's diagonal.
        radius: Most root mean square change of the scores in one step, to first order.
        every: Steps between two updates of the blocks.
        examples: Of a batch, for an update.
        decay: Weight of the past in the blocks' averages at an update.
        momentum: Of the gradient's running mean.
    """

    params: dict[str, Tensor]
    model: TwoLayer
    lr: float
    damping: float
    radius: float
    every: int
    examples: int
    decay: float = 0.95
    momentum: float = 0.9
    count: int = 0
    weight: float = 0.0
    total: Tensor = field(default_factory=lambda: torch.zeros(1))
    inverse: Tensor = field(default_factory=lambda: torch.zeros(1))
    mean: Tensor = field(default_factory=lambda: torch.zeros(1))

    @torch.no_grad()
    def take_step(self, gradients: dict[str, Tensor], examples: Tensor) -> None:
        """Move W and V.

        Args:
            gradients: Of the loss in W and V.
            examples: The batch, shape (b, N), of which the first ones update the blocks.
        """
        if self.count % self.every == 0:
            self._update_blocks(examples[: self.examples])
        self.count += 1
        self.mean = torch.lerp(self.mean, torch.cat([gradients["W"], gradients["V"].mT], 1), 1 - self.momentum)
        gradient = self.mean / (1 - self.momentum**self.count)
        direction = (self.inverse @ gradient.unsqueeze(-1)).squeeze(-1)
        form = (direction * (self.total @ direction.unsqueeze(-1)).squeeze(-1)).sum() / self.weight
        width = examples.shape[1]
        move = self.lr * (form / width).clamp(min=0).sqrt()
        step = direction * (self.lr * (self.radius / move).clamp(max=1.0))
        self.params["W"].sub_(step[:, :width])
        self.params["V"].sub_(step[:, width:].mT)

    def _update_blocks(self, examples: Tensor) -> None:
        """The running averages, and the damped inverses; the last ones where a block has none."""
        found = feature_blocks(self.model, self.params, examples)
        self.total = found if self.weight == 0 else self.decay * self.total + found
        self.weight = self.decay * self.weight + 1
        blocks = self.total / self.weight
        blocks.diagonal(dim1=1, dim2=2).add_(self.damping * blocks.diagonal(dim1=1, dim2=2).mean())
        inverse = invert_or_nan(blocks)
        self.inverse = torch.where(inverse.isnan(), self.inverse, inverse)


def feature_blocks(model: TwoLayer, params: dict[str, Tensor], examples: Tensor) -> Tensor:
    """G_j of each feature over these examples, (J, N + H, N + H).

    Args:
        model: The two-layer model.
        params: W and V before the link.
        examples: Shape (b, N).
    """
    by_W, by_V = jacobians(*model.matrices(params), examples)  # (b, N, J, N), (b, N, H, J)
    by_V = by_V * model.link.slope(params["V"])
    slopes = torch.cat([by_W, by_V.mT], -1).flatten(0, 1).transpose(0, 1)  # (J, b N, N + H)
    return slopes.mT @ slopes / len(examples)
