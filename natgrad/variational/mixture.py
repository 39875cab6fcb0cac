"""A mixture of Gaussians fitted to a log joint density: for posteriors with several modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_positive
from natgrad.ground.linalg import require_factor
from natgrad.ground.messages import explain_calls
from natgrad.variational.fitting import Fitted
from natgrad.variational.gaussian import Variational
from natgrad.variational.quadrature import Points
from natgrad.variational.start import meet_targets, read_density
from natgrad.variational.targets import LOG_2PI, DensityTarget, LogJoint, Target

LEAST = -50.0
"""Of the logarithm of a weight: a component that is worth nothing now can come back."""


@explain_calls
def variational_mixture(
    target: LogJoint,
    starts: Tensor | Sequence[Sequence[float]],
    *,
    covariance: Tensor | float = 1.0,
    diagonal: bool = False,
    lr: float = 0.5,
    points: Points | None = None,
    group: Any = None,
) -> VariationalMixture:
    """Natural-gradient variational inference by a mixture: q(z) = sum_c w_c N(z; m_c, P_c^-1), for several modes.

    The natural gradient of E_q[log p(z, data)] + entropy of q, in the metric of the mixture with its labels c. With
    r = log p - log q, where q on the right is that of the step before:
    P_c <- P_c - lr E_c[Hess r], then m_c <- m_c + lr P_c^-1 E_c[grad r], and log w_c <- log w_c + lr E_c[r], up to a
    constant. With one component these are the steps of `variational`. Components push one another away, so that
    each keeps a mode of its own; modes that no component starts near are not found.

    Args:
        target: A function z -> log p(z, data), of rows (s, d) to (s,) or of one z (d,) to a scalar.
        starts: The means of the components, shape (K, d): different ones, spread as widely as modes may lie.
        covariance: Of each component at the start: a number, (d,) or (d, d).
        diagonal: True for components with independent entries.
        lr: Rate in natural parameters. At 1 weights can go to a few components before these have found their places.
        points: How the expectations under each component are taken; default as in `variational`.
        group: The processes of `torch.distributed` that fit q together, each with its own terms of log p in its
            function and the prior in one of them.

    Returns:
        q, whose `fit()` or `step()` moves it.

    Raises:
        ValueError: If a number or a shape does not fit, two starts are equal, or the function fails at the start.
        TypeError: If the target is no function.

    Reference:
        Lin, Khan & Schmidt 2019.

    Example:
        >>> modes = torch.tensor([[-3.0, 0.0], [3.0, 0.0]])
        >>> log_p = lambda z: (-0.5 * (z.unsqueeze(-2) - modes).square().sum(-1)).logsumexp(-1)
        >>> q = ng.variational_mixture(log_p, [[-1.0, 0.2], [1.0, -0.2]])
        >>> q.fit().converged
        True
        >>> [round(float(m), 2) for m in q.means[:, 0]]
        [-3.0, 3.0]
    """
    check_positive("lr", lr)
    given = starts if isinstance(starts, Tensor) else torch.as_tensor(starts, dtype=torch.float64)
    if given.dim() != 2 or given.numel() == 0 or not given.is_floating_point():
        raise ValueError(
            f"starts is {given.dtype} {tuple(given.shape)}, expected the means of the components, floating-point (K, d)"
        )
    if len(given.unique(dim=0)) < len(given):
        raise ValueError("starts has a row twice: components that are equal move alike for ever; spread them")
    density, first = read_density(target, given[0] if isinstance(starts, Tensor) else given[0].tolist(), points)
    if not isinstance(density, DensityTarget):
        raise TypeError(f"target is {type(target).__name__}, expected a function z -> log p(z, data)")
    means = given.detach().to(first)
    processes = meet_targets(density, group, means, covariance, diagonal, lr, points)
    parts = [Variational(density, mean, covariance, diagonal, lr, processes) for mean in means]
    return VariationalMixture(density, parts, lr)


class VariationalMixture(Fitted):
    """q = sum_c w_c N(m_c, P_c^-1), and its steps; made by `variational_mixture`.

    Args:
        target: log p(z, data).
        components: One q for each.
        lr: Rate in natural parameters; it may be changed between steps.

    Attributes:
        components: The normals, each with `mean`, `precision` and `covariance`.
        log_weights: Logarithms of the weights, shape (K,).
        steps: Number of steps taken.
    """

    STATE = ("log_weights",)

    def __init__(self, target: Target, components: Sequence[Variational], lr: float) -> None:
        first = components[0]
        super().__init__(target, lr, first.processes)
        self.components = list(components)
        self.choices = {"components": len(self.components), "d": len(first.mean), "diagonal": first.diagonal}
        self.log_weights = first.mean.new_full((len(self.components),), -math.log(len(self.components)))

    @property
    def weights(self) -> Tensor:
        """Of the components, shape (K,), with the sum 1."""
        return self.log_weights.exp()

    @property
    def means(self) -> Tensor:
        """Of the components, shape (K, d)."""
        return torch.stack([part.mean for part in self.components])

    @property
    def mean(self) -> Tensor:
        """Of q, shape (d,)."""
        return self.weights @ self.means

    @property
    def covariance(self) -> Tensor:
        """Of q, shape (d, d): the mean of the components' own, and the covariance of their means."""
        gaps = self.means - self.mean
        own = sum(w * part.covariance for w, part in zip(self.weights, self.components, strict=True))
        return own + (gaps.mT * self.weights) @ gaps

    def advance(self, batch: tuple[Any, ...]) -> tuple[float, float]:
        before, frozen = self.snapshot(), FrozenMixture(self)
        steps = []
        try:
            for place, part in enumerate(self.components):
                part.lr, part.target = self.lr, frozen.without(self.target, place)
                steps.append(part.advance(batch))
        except ValueError:
            self.restore(before)
            raise
        worth, gaps = torch.tensor(steps, dtype=torch.float64).to(self.log_weights).unbind(1)
        weights = self.weights
        bound = weights @ worth
        # labels have a categorical's metric: half of the squared length of their part is Var_c(E_c[r]) / 2
        gap = weights @ gaps + (weights @ (worth - bound).square()) / 2
        moved = (self.log_weights + self.lr * worth).log_softmax(0).clamp(min=LEAST)
        self.log_weights, self.steps = moved.log_softmax(0), self.steps + 1
        return float(bound), float(gap)

    def measure_bound(self, target: Target, batch: tuple[Any, ...]) -> float:
        frozen = FrozenMixture(self)
        worth = [part.measure_bound(frozen.without(target, c), batch) for c, part in enumerate(self.components)]
        return float(self.weights @ torch.tensor(worth, dtype=torch.float64).to(self.weights))

    def log_density(self, z: Tensor) -> Tensor:
        """log q(z), shape (...).

        Args:
            z: Shape (..., d).
        """
        return FrozenMixture(self).log_density(z)

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        labels = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        drawn = self.means.new_empty(n, len(self.mean))
        for place, part in enumerate(self.components):
            chosen = labels == place
            if bool(chosen.any()):
                drawn[chosen] = part.draw(int(chosen.sum()), generator)
        return drawn

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "components": [part.state_dict() for part in self.components]}

    def restore(self, place: dict[str, Any]) -> None:
        super().restore(place)
        for part, before in zip(self.components, place["components"], strict=True):
            part.restore(before)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = state.get("components", ())
        if len(parts) != len(self.components):
            raise ValueError(f"state has {len(parts)} components, expected {len(self.components)} components")
        super().load_state_dict(state)
        for part, own in zip(self.components, parts, strict=True):
            part.load_state_dict(own)


class FrozenMixture:
    """q as it is before a step."""

    def __init__(self, q: VariationalMixture) -> None:
        self.parts = q.processes.size
        self.log_weights, self.means = q.log_weights, q.means
        self.precisions = torch.stack([part.precision for part in q.components])
        if q.components[0].diagonal:
            self.halves = self.precisions.log().sum(1) / 2  # of the logarithms of determinants, (K,)
        else:
            message = "a component's precision has become singular: take a smaller lr, or fewer components"
            self.halves = require_factor(self.precisions, message).diagonal(dim1=1, dim2=2).log().sum(1)

    def log_components(self, z: Tensor) -> Tensor:
        """log N(z; m_c, P_c^-1), shape (..., K). z: (..., d)."""
        gaps = z.unsqueeze(-2) - self.means
        diagonal = self.precisions.dim() == 2
        turned = gaps * self.precisions if diagonal else torch.einsum("...ki,kij->...kj", gaps, self.precisions)
        return self.halves - 0.5 * ((turned * gaps).sum(-1) + z.shape[-1] * LOG_2PI)

    def log_density(self, z: Tensor) -> Tensor:
        """log q(z), shape (...). z: (..., d)."""
        return (self.log_weights + self.log_components(z)).logsumexp(-1)

    def without(self, target: Target, place: int) -> Target:
        """log p - log q + log q_c: what a Gaussian's own step takes for its target, of each process its part.

        Its expected Hessian is E_c[Hess r] - P_c, its expected gradient E_c[grad r], and its bound E_c[r].
        """
        assert isinstance(target, DensityTarget)
        return replace(target, log_joint=partial(self.log_rest, target.log_joint, place))  # a local function: no pickle

    def log_rest(self, log_joint: LogJoint, place: int, z: Tensor) -> Tensor:
        """log p - log q + log q_c, shape (...). z: (..., d)."""
        own = self.log_components(z)
        rest = own[..., place] - (self.log_weights + own).logsumexp(-1)
        return log_joint(z).reshape(rest.shape) + rest / self.parts
