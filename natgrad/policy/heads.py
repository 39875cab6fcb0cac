"""Action heads: what a policy's outputs mean for a kind of action space."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from natgrad.families import Bernoulli, Categorical, DiagonalGaussian, Heads, Likelihood
from natgrad.policy.environments import Array, import_gymnasium


@dataclass(frozen=True)
class Head(ABC):
    """A distribution over the actions of a space: rows (b, width) of parameters, and draws that the rows give.

    A draw is what the family draws; `actions` turns it into what the environment takes. Log-probabilities, KL and
    Fisher are those of the draws.

    Args:
        space: Of one environment's actions; filled in by `on`.
    """

    kind: ClassVar[str] = ""  # the gymnasium space
    space: Any = None

    @property
    @abstractmethod
    def width(self) -> int:
        """Parameters per state."""

    @property
    @abstractmethod
    def family(self) -> Likelihood:
        """The distribution of a draw, one row per state."""

    @property
    def entries(self) -> int:
        """Real numbers of an action, and 1 for what is chosen: default radius and damping are counted by them."""
        return 1

    @abstractmethod
    def mode(self, rows: Tensor) -> Tensor:
        """The likeliest draw of every row.

        Args:
            rows: Parameters, shape (b, width).

        Returns:
            Draws, shape (b, ...).
        """

    @abstractmethod
    def entropy(self, rows: Tensor) -> Tensor:
        """The entropy of every row's distribution.

        Args:
            rows: Parameters, shape (b, width).

        Returns:
            Nats, shape (b,).
        """

    def actions(self, draws: Tensor) -> Array:
        """Draws as the environment takes them.

        Args:
            draws: What `draw` or `mode` gave, shape (b, ...).

        Returns:
            An array (b, ...) of the space's shape and dtype.
        """
        chosen = draws.cpu().numpy().reshape(-1, *self.space.shape) + getattr(self.space, "start", 0)
        return chosen.astype(self.space.dtype)

    def on(self, space: Any) -> Head:
        """This head for a space.

        Args:
            space: A gymnasium space, of one environment's actions.

        Returns:
            A copy that knows the space.

        Raises:
            ValueError: Unless the space is of the head's kind.
        """
        if type(space).__name__ != self.kind:
            raise ValueError(f"head is {type(self).__name__}(), which is for {self.kind} actions; the space is {space}")
        return replace(self, space=space)

    def draw(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """One draw per row.

        Args:
            rows: Parameters, shape (b, width).
            generator: The source of random numbers, on the device of the rows.

        Returns:
            Draws, shape (b, ...).
        """
        return self.family.sample(rows, generator)

    def log_prob(self, rows: Tensor, draws: Tensor) -> Tensor:
        """log p(draw) under every row.

        Args:
            rows: Parameters, shape (b, width).
            draws: One per row, shape (b, ...).

        Returns:
            Nats, shape (b,).
        """
        return -self.family.nll(rows, draws)

    def kl(self, rows: Tensor, other: Tensor) -> Tensor:
        """KL(p_rows, p_other) of every state.

        Args:
            rows: Parameters of the first distribution, shape (b, width).
            other: Parameters of the second one, shape (b, width).

        Returns:
            Nats, shape (b,).
        """
        return self.family.kl(rows, other)


@dataclass(frozen=True)
class DiscreteHead(Head):
    """One of n actions, by logits (b, n). A logit of -inf rules its action out in that state."""

    kind: ClassVar[str] = "Discrete"

    @property
    def width(self) -> int:
        return int(self.space.n)

    @property
    def family(self) -> Likelihood:
        return Categorical()

    def mode(self, rows: Tensor) -> Tensor:
        return rows.argmax(1)

    def entropy(self, rows: Tensor) -> Tensor:
        return measure_choice_entropy(rows)


@dataclass(frozen=True)
class MultiDiscreteHead(Head):
    """Several choices at once, independent given the state: their logits side by side, (b, sum of nvec)."""

    kind: ClassVar[str] = "MultiDiscrete"

    @property
    def sizes(self) -> list[int]:
        """Actions per choice."""
        return self.space.nvec.reshape(-1).tolist()

    @property
    def width(self) -> int:
        return sum(self.sizes)

    @property
    def family(self) -> Likelihood:
        return Heads(*((Categorical(), size) for size in self.sizes))

    def draw(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        return torch.stack(self.family.sample(rows, generator), dim=1)

    def log_prob(self, rows: Tensor, draws: Tensor) -> Tensor:
        return -self.family.nll(rows, draws.unbind(1))

    def mode(self, rows: Tensor) -> Tensor:
        return torch.stack([part.argmax(1) for part in rows.split(self.sizes, dim=1)], dim=1)

    def entropy(self, rows: Tensor) -> Tensor:
        return torch.stack([measure_choice_entropy(part) for part in rows.split(self.sizes, dim=1)]).sum(0)


@dataclass(frozen=True)
class MultiBinaryHead(Head):
    """Bits, independent given the state: logits (b, n)."""

    kind: ClassVar[str] = "MultiBinary"

    @property
    def width(self) -> int:
        return math.prod(self.space.shape)

    @property
    def family(self) -> Likelihood:
        return Bernoulli()

    def mode(self, rows: Tensor) -> Tensor:
        return (rows > 0).to(rows.dtype)

    def entropy(self, rows: Tensor) -> Tensor:
        return (functional.softplus(rows) - rows * rows.sigmoid()).sum(1)


@dataclass(frozen=True)
class GaussianHead(Head):
    """Real actions from N(mean, diag(std^2)), clipped to the space's bounds.

    Args:
        log_std: Where the standard deviation begins, for a policy that returns means (b, d) alone: then it does not
            depend on the state and is trained with the policy. A policy that returns (b, 2 d), or a tuple (mean,
            log_std), says it itself.
        scaled: True if a mean of -1 and 1 is the lower and the upper bound, where both are finite; False: draws are
            actions as they are.
        share: Of half the bounds, what one unit is instead.
    """

    kind: ClassVar[str] = "Box"
    log_std: float = 0.0
    scaled: bool = True
    share: float = 1.0

    def on(self, space: Any) -> Head:
        head = super().on(space)
        if not np.issubdtype(space.dtype, np.floating):
            raise ValueError(
                f"the action space {space} holds integers, expected real numbers: wrap it, or use Discrete"
            )
        return head

    @property
    def dimensions(self) -> int:
        """Entries of an action."""
        return math.prod(self.space.shape)

    @property
    def entries(self) -> int:
        return self.dimensions

    @property
    def width(self) -> int:
        return 2 * self.dimensions

    @property
    def family(self) -> Likelihood:
        return DiagonalGaussian()

    def mode(self, rows: Tensor) -> Tensor:
        return rows[:, : self.dimensions]

    def entropy(self, rows: Tensor) -> Tensor:
        return (rows[:, self.dimensions :] + 0.5 * math.log(2 * math.pi * math.e)).sum(1)

    def actions(self, draws: Tensor) -> Array:
        raw = draws.cpu().numpy().astype(np.float64).reshape(-1, *self.space.shape)
        centre, half = self._stretch
        raised = np.maximum(centre + half * raw, self.space.low)  # np.clip takes twice as long
        return np.minimum(raised, self.space.high).astype(self.space.dtype)

    @cached_property
    def _stretch(self) -> tuple[Array, Array]:
        """The action of a draw of 0, and what one unit is."""
        bounded = np.isfinite(self.space.low) & np.isfinite(self.space.high) & self.scaled
        low, high = (np.where(bounded, bound, sign) for bound, sign in ((self.space.low, -1.0), (self.space.high, 1.0)))
        return (high + low) / 2, np.where(bounded, self.share, 1.0) * (high - low) / 2

    @property
    def units(self) -> Array:
        """What one unit of a draw is in the environment's, entry by entry, of the space's shape."""
        return self._stretch[1]


@dataclass(frozen=True)
class SquashedGaussianHead(GaussianHead):
    """tanh of a Gaussian, stretched over the space's bounds: nothing is clipped.

    A bijection changes neither KL nor Fisher: both are those of the Gaussian below, as are entropy and log-probability
    (the Jacobian of tanh cancels in every ratio).

    Args:
        scaled: Without effect here: tanh's range is stretched over the bounds.
        share: Without effect here.

    Raises:
        ValueError: By `on`, for a space without finite bounds.
    """

    def on(self, space: Any) -> Head:
        head = super().on(space)
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ValueError(f"the action space {space} is not bounded, which tanh needs: use GaussianHead()")
        return head

    def actions(self, draws: Tensor) -> Array:
        share = (np.tanh(draws.cpu().numpy().astype(np.float64)) + 1) / 2
        low, high = self.space.low, self.space.high
        stretched = low + (high - low) * share.reshape(-1, *self.space.shape)
        return np.clip(stretched, low, high).astype(self.space.dtype)


HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (DiscreteHead, MultiDiscreteHead, MultiBinaryHead, GaussianHead)
}


def choose_head(space: Any, head: Head | None = None) -> Head:
    """The head of an action space, or the given one on it."""
    if not isinstance(space, import_gymnasium().Space):
        raise TypeError(f"the action space is {type(space).__name__}, expected a gymnasium space")
    if head is None:
        kind = HEADS.get(type(space).__name__)
        if kind is None:
            raise ValueError(
                f"the action space is {space}, expected one of {', '.join(HEADS)}; wrap the environment in gymnasium."
                "wrappers.TransformAction(env, function, space), which makes its actions of those of such a space"
            )
        head = kind()
    elif not isinstance(head, Head):
        hint = "; did you forget the parentheses?" if isinstance(head, type) else ""
        raise TypeError(f"head is {head!r}, expected a Head such as SquashedGaussianHead(){hint}")
    head = head.on(space)
    if not head.width:
        raise ValueError(f"the action space {space} holds no number, expected one at least: nothing is to choose")
    return head


def measure_choice_entropy(logits: Tensor) -> Tensor:
    """-sum p log p, (b, n) -> (b,), 0 log 0 = 0 for a logit of -inf."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(1)
