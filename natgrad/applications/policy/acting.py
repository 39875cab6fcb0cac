"""A policy as a function of states alone, for the thousands of calls in which its parameters stand still."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.applications.policy.actor import Actor
from natgrad.pure import run_detached

Change = Callable[[Tensor], Tensor]

ELEMENTWISE: dict[type[nn.Module], Change] = {nn.Tanh: torch.tanh, nn.ReLU: torch.relu, nn.Identity: lambda x: x}


def prepare_acting(actor: Actor) -> Change:
    """states (b, ...) -> rows (b, width), without a graph, by the actor's parameters of now.

    A plain perceptron of few units spends two thirds of its time in the calls around its products: they are made
    directly, with the same numbers to the last bit. Every other network is called as it is.

    Args:
        actor: The policy. Its parameters must not be replaced as long as the function is used.
    """
    changes = list_changes(actor)
    if changes is None:
        return lambda states: run_detached(partial(actor, states))

    def act(states: Tensor) -> Tensor:
        found = states.permute(actor.order).flatten(1)
        for change in changes:
            found = change(found)
        return actor.rows(found).detach()

    return torch.no_grad()(act)


def list_changes(actor: Actor) -> list[Change] | None:
    """The layers of a plain perceptron as functions; None for another network, or where somebody listens to it."""
    policy = actor.policy
    if type(policy) is not nn.Sequential or actor.valued or any(map(has_hooks, actor.modules())):
        return None
    parts = list(policy)
    if not parts or type(parts[0]) is not nn.Flatten or (parts[0].start_dim, parts[0].end_dim) != (1, -1):
        return None
    changes: list[Change] = []
    for part in parts[1:]:
        if type(part) is nn.Linear:
            bias = None if part.bias is None else part.bias.detach()
            changes.append(partial(functional.linear, weight=part.weight.detach(), bias=bias))
        elif type(part) in ELEMENTWISE:
            changes.append(ELEMENTWISE[type(part)])
        else:
            return None
    return changes


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward pass of the module runs functions that were registered on it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
