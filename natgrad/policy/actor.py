"""A user's policy module as a map from states to rows of action parameters, and its critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.pure import check_followed, run_detached
from natgrad.policy.heads import GaussianHead, Head, MultiDiscreteHead

CLOSE = 1e-3
"""How far the rows of two calls may differ: above round-off in single precision."""


class Actor(nn.Module):
    """states (b, ...) -> rows (b, width) of action parameters, by a policy module."""

    # The policy returns the rows, or (rows, value) with value (b,) or (b, 1), None for none; rows may come in parts, a
    # tuple of logits or (mean, log_std). Where it returns the mean alone, `log_std` is a parameter of the actor.

    log_std: nn.Parameter | None

    def __init__(self, policy: nn.Module, head: Head, example: Tensor) -> None:
        super().__init__()
        self.policy, self.head = policy, head
        self.valued = False
        self.register_parameter("log_std", None)
        batch = choose_probe_size(head)
        states = example.expand(batch, *example.shape).contiguous()
        self.order = find_channel_order(policy, states)
        outputs = run_detached(lambda: call_module(policy, states.permute(self.order)))
        pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
        self.valued = pair and (outputs[1] is None or is_column(outputs[1], batch))
        rows = outputs[0] if self.valued else outputs
        if isinstance(head, GaussianHead) and isinstance(rows, Tensor) and rows.shape[1:] == (head.dimensions,):
            self.log_std = nn.Parameter(rows.new_full((head.dimensions,), head.log_std))
        wrong = ValueError(
            f"policy returned {describe_outputs(rows)}, expected rows ({batch}, {head.width}) for {batch} states, as "
            f"{type(head).__name__} on {head.space} needs"
        )
        try:
            rows = self.rows(rows)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise wrong from error
        if rows.shape != (batch, head.width) or not rows.is_floating_point():
            raise wrong
        if not torch.allclose(run_detached(lambda: self(states)), rows, rtol=CLOSE, atol=CLOSE, equal_nan=True):
            raise ValueError(
                "policy returned other rows for the same states when it was called again, expected rows that depend on "
                "the states alone: one that remembers or draws has no probability of an action in a state; in place of "
                "a memory give it past observations, gymnasium.wrappers.FrameStackObservation(env, 4)"
            )

    def forward(self, states: Tensor) -> Tensor:
        outputs = self.policy(states.permute(self.order))
        return self.rows(outputs[0] if self.valued else outputs)

    def value(self, states: Tensor) -> Tensor:
        """The value that the policy returns beside its rows, (b,)."""
        return self.policy(states.permute(self.order))[1].reshape(-1)

    def rows(self, outputs: Any) -> Tensor:
        """The policy's outputs, without a value, as rows."""
        if isinstance(outputs, Tensor):
            return outputs if self.log_std is None else join_gaussian(outputs, self.log_std)
        if isinstance(self.head, MultiDiscreteHead):
            return torch.cat(list(outputs), dim=1)
        mean, log_std = outputs
        return join_gaussian(mean, log_std)


def call_module(module: nn.Module, states: Tensor) -> Any:
    """The module on example states. ValueError if it cannot take them."""
    try:
        return module(states)
    except Exception as error:
        more = ", nor does it take images with their channels moved" if states.dim() == 4 else ""
        raise ValueError(
            f"the module {type(module).__name__} failed on states of shape {tuple(states.shape)}{more}: {error}"
        ) from error


def is_column(value: Any, batch: int) -> bool:
    """Whether it has one number per state."""
    return isinstance(value, Tensor) and tuple(value.shape) in ((batch,), (batch, 1))


def choose_probe_size(head: Head) -> int:
    """A number of example states that no other dimension has."""
    return next(size for size in range(3, 7) if size not in (head.width, head.width // 2))


def join_gaussian(mean: Tensor, log_std: Tensor) -> Tensor:
    """Means and log stds side by side."""
    return torch.cat([mean, log_std.expand_as(mean)], dim=1)


def describe_outputs(outputs: Any) -> str:
    """Shapes of what a module returned."""
    if isinstance(outputs, Tensor):
        return f"a tensor {tuple(outputs.shape)} of {outputs.dtype}"
    if isinstance(outputs, (tuple, list)):
        return f"({', '.join(describe_outputs(part) for part in outputs)})"
    return type(outputs).__name__


def find_acting(actor: Actor, example: Tensor) -> dict[str, Tensor]:
    """The trainable parameters that the rows of action parameters depend on, by name."""
    rows = actor(example.expand(2, *example.shape).contiguous())
    params = {name: p for name, p in actor.named_parameters() if p.requires_grad}
    if not rows.requires_grad or not params:
        raise ValueError("policy has no trainable parameter that its outputs depend on; unfreeze at least one")
    check_followed(rows, params)
    gradients = torch.autograd.grad(rows.sum(), list(params.values()), allow_unused=True)
    return {name: p for (name, p), g in zip(params.items(), gradients, strict=True) if g is not None}


# Images as states: their channels where a network wants them

CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def find_channel_order(module: nn.Module, states: Tensor) -> tuple[int, ...]:
    """The axes of states in the order in which a network takes them: as they come, or with the channels moved."""
    # Environments give (height, width, channels), convolutions take (channels, height, width). What is tried is whether
    # the network raises; one that moves the channels itself takes them as they come.
    plain = tuple(range(states.dim()))
    if states.dim() != 4 or takes_states(module, states):
        return plain
    smallest = min(states.shape[1:])
    others = [(CHANNELS_FIRST, states.shape[3]), (CHANNELS_LAST, states.shape[1])]
    orders = (order for order, channels in others if channels == smallest)
    return next((order for order in orders if takes_states(module, states.permute(order))), plain)


def takes_states(module: nn.Module, states: Tensor) -> bool:
    """Whether a network runs on these states."""
    try:
        run_detached(lambda: module(states))
    except Exception:  # noqa: BLE001 - whatever a network says of states that it cannot take
        return False
    return True
