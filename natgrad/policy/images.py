"""Images as states: their channels where a network wants them."""

from __future__ import annotations

from torch import Tensor, nn

from natgrad.ground.pure import run_detached

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
