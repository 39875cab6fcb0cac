"""A policy as a function of states: the module's own numbers, for plain perceptrons and for everything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("gymnasium")

from gymnasium import spaces

from natgrad.policy.actor import Actor
from natgrad.policy.heads import GaussianHead
from natgrad.policy.rollout import list_changes, prepare_acting


def perceptron(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 8), nn.Tanh(), *more, nn.Linear(8, 2, bias=False))


def act_of(policy: nn.Module) -> Actor:
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    return Actor(policy.eval(), GaussianHead().on(space), torch.zeros(3))


class Shifted(nn.Linear):
    """A linear layer that adds 1."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1.0


POLICIES = {
    "plain": (perceptron, True),
    "with ReLU": (lambda: perceptron(nn.ReLU(), nn.Identity()), True),
    "with another layer": (lambda: perceptron(nn.LayerNorm(8)), False),
    "with a subclass of a layer": (lambda: perceptron(Shifted(8, 8)), False),
    "not flattened": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh()), True),
    "one layer": (lambda: nn.Linear(3, 2), True),
}


@pytest.mark.parametrize("name", POLICIES)
def test_acting_gives_the_rows_of_the_module_to_the_last_bit(name: str):
    build, plain = POLICIES[name]
    actor = act_of(build())
    assert (list_changes(actor) is not None) == plain
    states = torch.randn(5, 3)
    found = prepare_acting(actor)(states)
    assert torch.equal(found, actor(states).detach())
    assert not found.requires_grad


def test_a_step_of_the_parameters_is_seen_by_the_next_function():
    policy = perceptron()
    actor, states = act_of(policy), torch.ones(1, 3)
    before = prepare_acting(actor)(states)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.5)
    assert not torch.allclose(prepare_acting(actor)(states), before, atol=0.1)
