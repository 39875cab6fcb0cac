"""Helmholtz machines: a directed model of binary units with a recognition network beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import all_finite
from natgrad.helmholtz.units import (
    Activations,
    Conditional,
    States,
    activate_generation,
    activate_recognition,
    each_layer,
    fisher_rows,
    generation_rows,
    recognition_rows,
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
        below, low = self.sizes[:-1], self.units[0]
        above = self.sizes[1:]
        pairs = list(zip(below, above, strict=True))
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
            states.insert(0, layer.sample(states[0] if states else None, (n,), generator)[0])
        return states

    def sample(self, n: int, generator: torch.Generator | None = None, *, means: bool = False) -> Tensor:
        """n visible states (n, size); means: the probabilities of being up instead, which look smoother.

        Args:
            n: Number of draws.
            generator: Of the draws; None for the global one.
            means: True for the probabilities of being up instead, which look smoother.
        """
        states = self.dream(check_integer("n", n), generator)
        if not means:
            return states[0]
        with torch.no_grad():
            return torch.sigmoid(next(each_layer(self.generation)).logits(states[1], states[0]))

    @torch.no_grad()
    def recognise(self, x: Any, samples: int = 1, generator: torch.Generator | None = None) -> States:
        """`samples` draws of h from q(h | x) per example: one tensor (samples, b, size) per layer, visible first.

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example; None, where it is allowed, for the exact sum over all states.
            generator: Of the draws; None for the global one.
        """
        return self.recognise_with_activations(x, samples, generator)[0]

    @torch.no_grad()
    def recognise_with_activations(
        self, x: Any, samples: int = 1, generator: torch.Generator | None = None
    ) -> tuple[States, list[Activations]]:
        """`recognise`, and what every layer of q saw.

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example.
            generator: Of the draws; None for the global one.
        """
        x, samples = self.check(x), check_integer("samples", samples)
        states, seen = [x.expand(samples, *x.shape)], list[Activations]()
        for layer in each_layer(self.recognition):
            drawn, activations = layer.sample(states[-1], (samples, len(x)), generator)
            states.append(drawn)
            seen.append(activations)
        return states, seen

    @torch.no_grad()
    def reconstruct(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """The visible units' probabilities of being up after one way up and down, (b, size).

        Args:
            x: Examples, shape (b, visible).
            generator: Of the draws; None for the global one.
        """
        states = self.recognise(x, 1, generator)
        return torch.sigmoid(next(each_layer(self.generation)).logits(states[1][0], states[0][0]))

    # likelihoods

    def log_joint(self, states: States) -> Tensor:
        """log p(x, h) of states, (...).

        Args:
            states: One tensor (..., size) per layer, visible first.
        """
        return sum_log_chances(activate_generation(self.generation, states), states)

    def log_posterior(self, states: States) -> Tensor:
        """log q(h | x) of states, (...).

        Args:
            states: One tensor (..., size) per layer, visible first.
        """
        return sum_log_chances(activate_recognition(self.recognition, states), states[1:])

    @torch.no_grad()
    def log_likelihood(self, x: Any, samples: int | None = 100, generator: torch.Generator | None = None) -> Tensor:
        """log p(x) of every example, (b,), in nats: log of the mean of p(x, h) / q(h | x) over `samples` draws from q.

        A lower bound in expectation that rises with samples (Burda et al. 2016). samples=None: exact, by summing over
        all states of the hidden units. ValueError for more than 20 hidden units then.

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example; None, where it is allowed, for the exact sum over all states.
            generator: Of the draws; None for the global one.
        """
        x = self.check(x)
        if samples is None:
            return self._enumerate_hidden(x)
        samples = as_samples(samples)
        logs = [self.weights_of(self.recognise(x, part, generator)) for part in split_samples(samples, x)]
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
        samples: draws of h per example, and as many dreams; None: exact, by summing over all states, for at most 20
        units in all (ValueError otherwise).

        Args:
            x: Examples, shape (b, visible).
            samples: Draws of h per example; None, where it is allowed, for the exact sum over all states.
            generator: Of the draws; None for the global one.
        """
        x = self.check(x)
        if samples is None:
            states, logs = self.joint()
            hidden = self.hidden()
            seen = [x.expand(len(hidden[0]), *x.shape), *(h.unsqueeze(1).expand(-1, len(x), -1) for h in hidden)]
            shares = logs.exp(), self.log_posterior(seen).exp() / len(x)
        else:
            samples = as_samples(samples)
            states, seen = self.dream(samples * len(x), generator), self.recognise(x, samples, generator)
            shares = tuple(s[0].new_full(s[0].shape[:-1], 1 / (samples * len(x))) for s in (states, seen))
        networks = {"generation": generation_rows(self.generation, states, shares[0])}
        networks["recognition"] = recognition_rows(self.recognition, seen, shares[1])
        return {f"{name}.{i}": fisher_rows(r).blocks() for name, rows in networks.items() for i, r in enumerate(rows)}

    @torch.no_grad()
    def joint(self) -> tuple[States, Tensor]:
        """Every state of the machine, (s, size) per layer, and log p of each (s,). For at most 20 units in all."""
        self._require_few(sum(self.sizes), "units")
        tops = list(each_layer(self.generation))
        table = torch.cartesian_prod(*[unit_values(tops[0])] * sum(self.sizes)).view(-1, sum(self.sizes))
        states = list(table.split(self.sizes, dim=1))
        return states, self.log_joint(states)

    def hidden(self) -> States:
        """Every state of the hidden units, (s, size) per hidden layer."""
        total = sum(self.sizes[1:])
        self._require_few(total, "hidden units")
        values = unit_values(next(each_layer(self.generation)))
        return list(torch.cartesian_prod(*[values] * total).view(-1, total).split(self.sizes[1:], dim=1))

    def _enumerate_hidden(self, x: Tensor) -> Tensor:
        hidden = self.hidden()
        tops = [h.unsqueeze(1) for h in hidden]
        logs = []
        for part in x.split(max(1, 2**22 // max(1, len(hidden[0]) * self.sizes[0]))):
            states = [part.expand(len(hidden[0]), *part.shape), *(t.expand(-1, len(part), -1) for t in tops)]
            logs.append(self.log_joint(states).logsumexp(0))
        return torch.cat(logs)

    def _require_few(self, units: int, kind: str) -> None:
        if units > ENUMERABLE:
            raise ValueError(
                f"the machine has {units} {kind}, too many to enumerate (at most {ENUMERABLE}); use samples"
            )

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
        if not all_finite(x) or not bool(((x == low) | (x == high)).all()):
            raise ValueError(
                f"x has entries other than {low} and {high}: binarise it, or build the machine with units={(-1, 1)!r} "
                "or (0, 1) as your data are"
            )
        return x.to(next(self.parameters()))


def split_samples(samples: int, x: Tensor) -> list[int]:
    """Samples at a time, so that few rows are in memory."""
    step = max(1, 2**15 // max(1, len(x)))
    return [min(step, samples - start) for start in range(0, samples, step)]


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


def unit_values(layer: Conditional) -> Tensor:
    """The two values of a layer's units, (2,)."""
    return torch.tensor([layer.low, 1], dtype=layer.weight.dtype, device=layer.weight.device)
