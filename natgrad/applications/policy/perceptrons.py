"""The networks of an agent that was given none: tanh perceptrons."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from natgrad.applications.policy.sb3_settings import Translation
from natgrad.optim import refuse_processes

HIDDEN = ((64, 64), (64, 64))


@dataclass(frozen=True)
class Defaults:
    """What networks that were not given look like.

    Args:
        hidden: Sizes of the policy's layers and of the critic's.
        activation: Between them.
        device: Where they are.
    """

    hidden: tuple[tuple[int, ...], tuple[int, ...]] = HIDDEN
    activation: type[nn.Module] = nn.Tanh
    device: Any = None

    @staticmethod
    def read(choices: Translation, policy: nn.Module | None) -> Defaults:
        """As the keywords say. TypeError where they came beside a policy, which is as it is."""
        if policy is not None and choices.device is not None:
            raise TypeError("device is of the default network, but a policy was given: write policy.to(device) before")
        if policy is not None and (choices.hidden or choices.activation):
            raise TypeError("policy_kwargs is of the default network, but a policy was given: build it as it shall be")
        return Defaults(choices.hidden or HIDDEN, choices.activation or nn.Tanh, choices.device)

    def build_policy(self, inputs: int, outputs: int, generator: torch.Generator, like: Tensor) -> nn.Sequential:
        """From observations to action parameters, near zero at first."""
        return build_perceptron([inputs, *self.hidden[0], outputs], 0.01, self.activation, generator, like)

    def build_critic(self, inputs: int, generator: torch.Generator, like: Tensor) -> nn.Sequential:
        """From observations to a value."""
        return build_perceptron([inputs, *self.hidden[1], 1], 1.0, self.activation, generator, like)


def check_network(name: str, module: Any) -> None:
    """TypeError unless it is a module that stands alone, or None."""
    if not isinstance(module, (nn.Module, type(None))):
        raise TypeError(f"{name} is {type(module).__name__}, expected a torch.nn.Module or None")
    refuse_processes(module, name)


def build_perceptron(
    sizes: list[int], gain: float, activation: type[nn.Module], generator: torch.Generator, like: Tensor
) -> nn.Sequential:
    """Linear layers with orthogonal weights and zero biases; flattens its inputs.

    Args:
        sizes: Of inputs, hidden layers and outputs.
        gain: Of the last layer's weights.
        activation: Between the layers.
        generator: What the weights are drawn from: the global one is not touched.
        like: A tensor of the dtype and on the device that the layers have.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (before, after) in enumerate(pairwise(sizes)):
        layer: Any = skip_init(nn.Linear, before, after, dtype=like.dtype)
        nn.init.orthogonal_(layer.weight, 2**0.5 if i < len(sizes) - 2 else gain, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]).to(like.device)
