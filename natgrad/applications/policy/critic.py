"""The critic: a value of every state, fitted to the returns by Adam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.applications.policy.actor import Actor, call_module, describe_outputs, is_column
from natgrad.applications.policy.images import find_channel_order
from natgrad.applications.policy.joined_rollouts import BatchPart
from natgrad.applications.policy.rollout import Rollout
from natgrad.applications.policy.settings import CriticTraining
from natgrad.hidden_parameters import check_followed
from natgrad.linalg import all_finite
from natgrad.optim import guard_steps
from natgrad.pure import run_detached


class Critic:
    """V(states) -> (b,), and how it is trained: passes of Adam over minibatches, squared error.

    Only parameters that the policy's actions do not depend on are trained. A trunk that both share moves by the natural
    step alone, so that fitting values never changes the policy's KL.

    Args:
        module: One of its own, states -> (b,) or (b, 1); None for the value that the policy returns beside its rows.
        actor: The policy.
        reached: Names of the parameters that the actions depend on.
        training: Adam's rate, and how often it sees what.
        order: Of the states' axes, as the module takes them.

    Raises:
        ValueError: If there is no parameter to train.
    """

    def __init__(
        self,
        module: nn.Module | None,
        actor: Actor,
        reached: set[str],
        training: CriticTraining,
        order: tuple[int, ...],
    ) -> None:
        self.module, self.actor, self.training, self.order = module, actor, training, order
        acting = {id(p) for name, p in actor.named_parameters() if name in reached}
        own = (actor if module is None else module).named_parameters()
        self.named = {name: p for name, p in own if p.requires_grad and id(p) not in acting}
        self.params = list(self.named.values())
        if not self.params:
            raise ValueError("the critic has no trainable parameter of its own: every one also moves the actions")
        self.optimizer = torch.optim.Adam(self.params, training.lr, eps=1e-5, fused=can_fuse(self.params))
        self.loss = float("nan")

    def __call__(self, states: Tensor) -> Tensor:
        """(b, ...) -> (b,)."""
        if self.module is None:
            return self.actor.value(states)
        return self.module(states.permute(self.order)).reshape(-1)

    def fit(self, rollout: Rollout, part: BatchPart, generator: torch.Generator) -> tuple[float, bool]:
        """Train on a rollout's returns; all of it is taken back where a parameter would not be finite.

        Args:
            rollout: The batch.
            part: What of the batch of all processes it is.
            generator: Of the order of all their states, the same on all processes.

        Returns:
            The mean squared error over the last epoch, and whether all was finite.
        """
        loss, stands = guard_steps(self.optimizer, lambda: self._pass_through(rollout, part, generator))
        return loss, stands and math.isfinite(loss)

    def _pass_through(self, rollout: Rollout, part: BatchPart, generator: torch.Generator) -> float:
        last = 0.0
        for _ in range(self.training.epochs):
            order = torch.randperm(part.total, generator=generator).to(rollout.states.device)
            losses = [self._step(rollout, part, rows) for rows in order.split(self.training.batch)]
            last = float(torch.stack(losses).mean())
        return last

    def _step(self, rollout: Rollout, part: BatchPart, places: Tensor) -> Tensor:
        rows = places if part.processes.size == 1 else part.choose(places)
        loss, gradients = self._differentiate(rollout, rows)
        if part.processes.size > 1:
            loss, gradients = self._join(part, len(rows) / len(places), loss, gradients)
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = gradient
        if all_finite(loss):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _differentiate(self, rollout: Rollout, rows: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The mean squared error of some rows, and its gradient."""
        if not len(rows):
            return rollout.returns.new_zeros(()), [None] * len(self.params)
        loss = nn.functional.mse_loss(self(rollout.states[rows]), rollout.returns[rows])
        check_followed(loss, self.named)
        return loss, torch.autograd.grad(loss, self.params, allow_unused=True)

    def _join(
        self, part: BatchPart, share: float, loss: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Those of the rows of all processes, from a mean over this one's that weighs `share`."""
        parts = [
            (torch.zeros_like(p) if g is None else share * g).reshape(-1).double()
            for p, g in zip(self.params, gradients, strict=True)
        ]
        whole = part.sum(torch.cat([(share * loss.detach()).reshape(1).double(), *parts]))
        pieces = whole[1:].split([p.numel() for p in self.params])
        return whole[0].to(loss), [one.view_as(p).to(p) for one, p in zip(pieces, self.params, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The module, where it is one of its own, and the optimiser."""
        found: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.module is not None:
            found["module"] = self.module.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.module is not None:
            self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])


def check_values(module: nn.Module, example: Tensor, size: int) -> tuple[int, ...]:
    """The order of axes in which the module takes states. ValueError unless it gives one value per state."""
    states = example.expand(size, *example.shape).contiguous()
    order = find_channel_order(module, states)
    found = run_detached(lambda: call_module(module, states.permute(order)))
    if not is_column(found, size):
        raise ValueError(
            f"critic returned {describe_outputs(found)}, expected ({size},) or ({size}, 1) for {size} states"
        )
    return order


def can_fuse(params: list[nn.Parameter]) -> bool:
    """Whether Adam's fused kernel takes them: a third of the time on small networks."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
