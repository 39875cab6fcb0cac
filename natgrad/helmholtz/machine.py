"""Helmholtz machines: a directed model of binary units with a recognition network beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer
from natgrad.helmholtz.units import (
    Conditional,
    States,
    activate_generation,
    activate_recognition,
    each_layer,
    sample_recognition,
    sum_log_chances,
)

ENUMERABLE = 20
"""Hidden units up to which sums over all states are taken: 2^20 of them."""


class HelmholtzMachine(nn.Module):
    """p(x, h) from the top layer down, q(h | x) from the data up: sigmoid belief networks (Dayan et al. 1995).

    generation[l] is p(h_l | h_{l+1}), the last one the prior; recognition[l] is q(h_{l+1} | h_l). Each unit is a
    logistic regression on its parents, with a bias.

    Args:
        sizes: Units per layer, visible first, such as [784, 200, 10].
        prior: The top layer's probabilities of being up, a number or (n,), fixed; None: learned, starting at 1/2.
        units: The two values, {0, 1} or {-1, 1}.
        autoregressive: True if every unit also sees the units before it in its own layer (in both networks).

    Raises:
        ValueError: For fewer than two layers, a size < 1, other units.

    Example:
        >>> machine = ng.HelmholtzMachine([4, 3, 2])
        >>> machine.sample(5).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        prior: float | Tensor | Sequence[float] | None = None,
        units: Iterable[int] = (0, 1),
        autoregressive: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = check_sizes(sizes)
        self.units, self.autoregressive = check_units(units), autoregressive
        low, pairs = self.units[0], list(pairwise(self.sizes))
        top = Conditional(0, self.sizes[-1], low, autoregressive and prior is None)
        self.generation = nn.ModuleList([*(Conditional(m, n, low, autoregressive) for n, m in pairs), top])
        self.recognition = nn.ModuleList([Conditional(n, m, low, autoregressive) for n, m in pairs])
        if prior is not None:
            with torch.no_grad():
                top.weight.copy_(check_prior(prior, self.sizes[-1]).logit().unsqueeze(1))
            top.weight.requires_grad_(False)

    def extra_repr(self) -> str:
        return f"sizes={self.sizes}, units={self.units}, autoregressive={self.autoregressive}"

    def find_layer(self, name: str) -> Conditional:
        """A layer by its name, such as "generation.0".

        Args:
            name: Of the module.
        """
        layer = self.get_submodule(name)
        assert isinstance(layer, Conditional)
        return layer

    # sampling

    @torch.no_grad()
    def dream(self, n: int, generator: torch.Generator | None = None) -> States:
        """n draws from p(x, h): one tensor (n, size) per layer, visible first.

        Args:
            n: Number of draws.
            generator: Of the draws; None for the global one.
        """
        states: States = []
        for layer in reversed(list(each_layer(self.generation))):
            states.insert(0, layer.sample(states[0] if states else None, (n,), generator).own)
        return states

    def sample(self, n: int, generator: torch.Generator | None = None, *, means: bool = False) -> Tensor:
        """n visible states, (n, size).

        Args:
            n: Number of draws.
            generator: Of the draws; None for the global one.
            means: True for the probabilities of being up instead, which look smoother.
        """
        states = self.dream(check_integer("n", n), generator)
        return self._visible_means(states) if means else states[0]

    @torch.no_grad()
    def recognise(self, x: Any, samples: int = 1, generator: torch.Generator | None = None) -> States:
        """`samples` draws of h from q(h | x) per example: one tensor (samples, b, size) per layer, visible first.

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example.
            generator: Of the draws; None for the global one.
        """
        x, samples = self.check(x), check_integer("samples", samples)
        return sample_recognition(self.recognition, x.expand(samples, *x.shape), generator)[0]

    @torch.no_grad()
    def reconstruct(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """The visible units' probabilities of being up after one way up and down, (b, size).

        Args:
            x: Examples, shape (b, visible).
            generator: Of the draws; None for the global one.
        """
        return self._visible_means([state[0] for state in self.recognise(x, 1, generator)])

    @torch.no_grad()
    def _visible_means(self, states: States) -> Tensor:
        return torch.sigmoid(next(each_layer(self.generation)).activate(states[1], states[0]).logits)

    # likelihoods

    def log_joint(self, states: States) -> Tensor:
        """log p(x, h) of states, (...).

        Args:
            states: One tensor (..., size) per layer, visible first.
        """
        return sum_log_chances(activate_generation(self.generation, states))

    def log_posterior(self, states: States) -> Tensor:
        """log q(h | x) of states, (...).

        Args:
            states: One tensor (..., size) per layer, visible first.
        """
        return sum_log_chances(activate_recognition(self.recognition, states))

    @torch.no_grad()
    def log_likelihood(self, x: Any, samples: int | None = 100, generator: torch.Generator | None = None) -> Tensor:
        """log p(x) of every example, (b,), in nats: log of the mean of p(x, h) / q(h | x) over `samples` draws from q.

        A lower bound in expectation that rises with samples (Burda et al. 2016).

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example; None for the exact sum over all states of at most 20 hidden units.
            generator: Of the draws; None for the global one.
        """
        x = self.check(x)
        if samples is None:
            parts = x.split(max(1, 2**22 // (2 ** sum(self.sizes[1:]) * self.sizes[0])))
            return torch.cat([self.log_joint(self._pair_with_hidden(part)).logsumexp(0) for part in parts])
        samples = as_samples(samples)
        size = max(1, 2**15 // len(x))  # samples at a time, so that few rows are in memory
        parts = [min(size, samples - start) for start in range(0, samples, size)]
        logs = [self.weights_of(self.recognise(x, part, generator)) for part in parts]
        return torch.cat(logs).logsumexp(0) - math.log(samples)

    def weights_of(self, states: States) -> Tensor:
        """log p(x, h) - log q(h | x): the logs of the importance weights, (samples, b).

        Args:
            states: One tensor (..., size) per layer, visible first.
        """
        return self.log_joint(states) - self.log_posterior(states)

    @torch.no_grad()
    def fisher_blocks(
        self, x: Any, samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The Fisher matrix, block-diagonal with one block per unit (Ay 2002; Varady, Volpi, Malago & Ay 2022).

        By layer ("generation.0", ..., "recognition.0", ...): (size, columns, columns), F_j = E[s' (W_j a) a a^T], a the
        unit's inputs with a 1 as last; of p over its own draws, of q over the examples x and q's draws given them.

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example, and as many dreams; None for the exact sum over all states, of at most 20
                units in all.
            generator: Of the draws; None for the global one.
        """
        x = self.check(x)
        if samples is None:
            states, logs = self.joint()
            seen = self._pair_with_hidden(x)
            shares = logs.exp(), self.log_posterior(seen).exp() / len(x)
        else:
            samples = as_samples(samples)
            states, seen = self.dream(samples * len(x), generator), self.recognise(x, samples, generator)
            shares = tuple(s[0].new_full(s[0].shape[:-1], 1 / (samples * len(x))) for s in (states, seen))
        networks = {
            "generation": activate_generation(self.generation, states),
            "recognition": activate_recognition(self.recognition, seen),
        }
        return {
            f"{name}.{i}": layer.teach(weights).fisher().blocks()
            for (name, layers), weights in zip(networks.items(), shares, strict=True)
            for i, layer in enumerate(layers)
        }

    @torch.no_grad()
    def joint(self) -> tuple[States, Tensor]:
        """Every state of the machine, (s, size) per layer, and log p of each (s,). For at most 20 units in all."""
        states = self._list_states(self.sizes, "units")
        return states, self.log_joint(states)

    def hidden(self) -> States:
        """Every state of the hidden units, (s, size) per hidden layer."""
        return self._list_states(self.sizes[1:], "hidden units")

    def _list_states(self, sizes: list[int], kind: str) -> States:
        """Every state of some layers. ValueError for more than 20 units."""
        layer, units = next(each_layer(self.generation)), sum(sizes)
        if units > ENUMERABLE:
            raise ValueError(
                f"the machine has {units} {kind}, too many to enumerate (at most {ENUMERABLE}); use samples"
            )
        values = torch.tensor([layer.low, 1], dtype=layer.weight.dtype, device=layer.weight.device)
        return list(torch.cartesian_prod(*[values] * units).view(-1, units).split(sizes, dim=1))

    def _pair_with_hidden(self, x: Tensor) -> States:
        """Every example with every state of the hidden units, (s, b, size) per layer."""
        hidden = self.hidden()
        return [x.expand(len(hidden[0]), *x.shape), *(h.unsqueeze(1).expand(-1, len(x), -1) for h in hidden)]

    def check(self, x: Any) -> Tensor:
        """x, a tensor or an array, as the machine's parameters are. ValueError for another shape, or other entries.

        Args:
            x: Examples, shape (b, visible).
        """
        width, given = self.sizes[0], x
        try:
            x = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"x is {type(given).__name__}, expected a tensor or an array (b, {width})") from error
        if x.dim() != 2 or x.shape[1] != width or len(x) == 0:
            raise ValueError(f"x is {tuple(x.shape)}, expected examples (b, {width}), b >= 1: flatten images first")
        low, high = self.units
        if not bool(((x == low) | (x == high)).all()):  # a NaN is neither
            raise ValueError(
                f"x has entries other than {low} and {high}: binarise it, or build the machine with units={(-1, 1)!r} "
                "or (0, 1) as your data are"
            )
        return x.to(next(self.parameters()))


def as_samples(samples: Any) -> int:
    """Draws per example. ValueError unless an integer >= 1."""
    return check_integer("samples", samples, hint=", or None for the exact sum over all states")


def check_sizes(sizes: Any) -> list[int]:
    """A list of at least two positive integers. ValueError otherwise."""
    try:
        numbers = [check_integer("size", n) for n in sizes]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) < 2:
        raise ValueError(f"sizes is {sizes!r}, expected at least two integers >= 1, visible first: [784, 200, 10]")
    return numbers


def check_units(units: Any) -> tuple[int, int]:
    """The lower and the upper value. ValueError for others."""
    try:
        values = sorted(units)
    except TypeError:
        values = []
    if values not in ([0, 1], [-1, 1]):
        raise ValueError(f"units is {units!r}, expected (0, 1) or (-1, 1)")
    return int(values[0]), 1


def check_prior(prior: Any, size: int) -> Tensor:
    """Probabilities (size,). ValueError outside (0, 1) or for another shape."""
    try:
        chances = torch.as_tensor(prior, dtype=torch.get_default_dtype()).expand(size)
    except (TypeError, ValueError, RuntimeError):
        chances = torch.zeros(size)
    if not bool(((chances > 0) & (chances < 1)).all()):
        raise ValueError(f"prior is {prior!r}, expected probabilities between 0 and 1: a number or a tensor ({size},)")
    return chances
