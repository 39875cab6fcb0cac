"""The score metric of the two-layer model in a block per feature: a row of W with the column of V that it feeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import natgrad as ng
from natgrad.energies import TwoLayer

FEATURES = ({"W": 0, "V": 1},)
SHARES = (1.0, 0.5, 0.25, 0.0)
"""Of a step that are tried."""


@dataclass
class FeatureBlocks:
    """Natural steps with G_j = E[sum_i g_ij g_ij^T], g_ij the slope of d_i log p in (w_j, v_1j, ..., v_Hj).

    A feature's own row and its weights in all pools move together: `ng.Blocks` keeps that part of the metric whole, and
    leaves out what couples two features. A block has N + H rows, whatever the number of features. The blocks are means
    over some hundred steps, so that a step is tried on its own batch, and shortened where it would raise the loss.
    """

    params: dict[str, Tensor]  # {"W": (J, N), "V": (H, J)}, V before the link; changed in place
    model: TwoLayer  # the two-layer model, with its closed Jacobian
    lr: float  # learning rate
    damping: float  # of a block, in units of the mean of G's diagonal
    radius: float  # most root mean square change of the scores in one step, to first order
    every: int  # steps between two updates of the blocks
    examples: int  # of a batch, for an update
    decay: float = 0.95  # weight of the past in the blocks' averages at an update
    momentum: float = 0.9  # of the gradient's running mean
    count: int = 0
    memory: Any = None
    inverse: Any = None
    total: Any = None
    mean: Tensor = field(default_factory=lambda: torch.zeros(1))

    @torch.no_grad()
    def take_step(self, gradients: dict[str, Tensor], examples: Tensor) -> None:
        """Move W and V."""
        space = ng.Space(self.params)
        if self.count % self.every == 0:
            self._update_blocks(examples[: self.examples])
        self.count += 1
        flat = space.flatten(gradients)
        self.mean = torch.lerp(self.mean.to(flat), flat, 1 - self.momentum)
        direction = self.inverse.mv(self.mean / (1 - self.momentum**self.count))
        square = direction @ self.total.mv(direction) / examples.shape[1]
        move = self.lr * square.clamp(min=0).sqrt()
        self._move(space.unflatten(direction * (self.lr * (self.radius / move).clamp(max=1.0))), examples)

    def _move(self, step: dict[str, Tensor], examples: Tensor) -> None:
        """As much of the step, a half, a quarter or nothing, as does not raise the batch's loss."""
        loss, before = self.model.loss(self.params, examples), {name: p.clone() for name, p in self.params.items()}
        for share in SHARES:
            for name, p in self.params.items():
                p.copy_(before[name] - share * step[name])
            if share == 0 or bool(self.model.loss(self.params, examples) <= loss):  # False for a NaN
                return

    def _update_blocks(self, examples: Tensor) -> None:
        """The running averages and their damped inverse."""
        structure = ng.Blocks(self.decay, units=FEATURES)
        self.total, self.memory = structure.update(self.memory, ng.score_metric(self.model), self.params, examples)
        self.inverse = self.total.inverse(self.damping * float(self.total.trace()) / self.total.size)
