"""What a sampler gives, and samplers that need no Markov chain: enumeration, exact draws, autoregressive networks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.messages import Explained, write_choices
from natgrad.ground.states import Stateful
from natgrad.vmc.amplitude import LogAmplitude, evaluate
from natgrad.vmc.configurations import Configurations

SHOWN = ("space", "samples", "chains", "sweep", "burn_in", "move", "width")


@dataclass(frozen=True)
class Samples:
    """States at which energies are taken.

    Args:
        states: Shape (chains, length, n); chains of length one are independent draws. All states are (b, n).
        weights: With sum one, shape (b,); None: equal ones.
        enumerated: True if these are all states, with their probabilities.
    """

    states: Tensor
    weights: Tensor | None = None
    enumerated: bool = False


class Sampler(Stateful, Explained):
    """Draws states from |psi|^2. What it remembers between draws is in its `state_dict`."""

    STATE = ("generator",)
    generator: Any = None
    """Source of the draws, a `torch.Generator`."""
    continues: ClassVar[bool] = False
    """True if a draw goes on from where the chains of the last one ended."""

    @abstractmethod
    def draw(self, psi: LogAmplitude) -> Samples:
        """States from |psi|^2.

        Args:
            psi: The wave function.
        """

    def __repr__(self) -> str:
        own = vars(self)
        return write_choices(self, **{name: own[name] for name in SHOWN if name in own})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Args:
            state_dict: What that returned.
        """
        super().load_state_dict({"generator": None, **state_dict})  # which older states of none lack

    def report(self) -> str:
        """How the last draw went, in one line."""
        return type(self).__name__


class Enumerated(Sampler):
    """All states with their probabilities: expectations without noise, for small systems.

    States at which psi is exactly zero are left out: their probability is zero, and log psi has no derivative there.

    Args:
        space: The states, such as `hamiltonian.space`.

    Example:
        >>> psi = ng.LogAmplitude(ng.vmc.RBM(4))
        >>> ng.vmc.Enumerated(ng.vmc.Spins(4)).draw(psi).states.shape
        torch.Size([16, 4])
    """

    def __init__(self, space: Configurations) -> None:
        self.space = space
        self.states: Tensor | None = None

    def draw(self, psi: LogAmplitude) -> Samples:
        if self.states is None or (self.states.dtype, self.states.device) != (psi.dtype, psi.device):
            self.states = self.space.all_states(psi.dtype, psi.device)
        logs = evaluate(psi, self.states).real
        nodes = logs == -torch.inf
        states, logs = (self.states[~nodes], logs[~nodes]) if bool(nodes.any()) else (self.states, logs)
        if not len(states):
            raise ValueError(f"psi is zero at every state of {self.space}: it has no probabilities")
        return Samples(states, torch.softmax(2 * logs, 0), enumerated=True)


class ExactSampler(Sampler):
    """Independent draws from |psi|^2 over all states, for small systems.

    Args:
        space: The states, such as `hamiltonian.space`.
        samples: How many.
        seed: Of the draws.

    Example:
        >>> psi = ng.LogAmplitude(ng.vmc.RBM(4))
        >>> ng.vmc.ExactSampler(ng.vmc.Spins(4), samples=100).draw(psi).states.shape
        torch.Size([100, 1, 4])
    """

    def __init__(self, space: Configurations, samples: int = 1000, seed: int = 0) -> None:
        self.space, self.all, self.samples = space, Enumerated(space), check_integer("samples", samples)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, psi: LogAmplitude) -> Samples:
        every = self.all.draw(psi)
        assert every.weights is not None
        points = torch.rand(self.samples, generator=self.generator, device=self.generator.device, dtype=torch.float64)
        sums = every.weights.cpu().double().cumsum(0)
        chosen = torch.searchsorted(sums, points * sums[-1], right=True).clamp(max=len(sums) - 1)
        return Samples(every.states[chosen.to(psi.device)].unsqueeze(1))


class AncestralSampler(Sampler):
    """Independent draws of a network that draws by itself, such as `ng.vmc.AutoregressiveNet`.

    Args:
        samples: How many.
        seed: Of the draws.

    Example:
        >>> psi = ng.LogAmplitude(ng.vmc.AutoregressiveNet(5))
        >>> ng.vmc.AncestralSampler(samples=100).draw(psi).states.shape
        torch.Size([100, 1, 5])
    """

    def __init__(self, samples: int = 1000, seed: int = 0) -> None:
        self.samples, self.generator = check_integer("samples", samples), torch.Generator().manual_seed(seed)

    def draw(self, psi: LogAmplitude) -> Samples:
        if not callable(getattr(psi.net, "draw", None)):
            raise TypeError(
                f"psi's network is {type(psi.net).__name__}, expected one with draw(count, generator) such as "
                "ng.vmc.AutoregressiveNet; other networks are sampled by ng.vmc.Metropolis"
            )
        return Samples(psi.net.draw(self.samples, self.generator).unsqueeze(1))  # type: ignore[operator]
