"""Natural steps within a share of each layer while a gradient shows, spectral ones once noise hides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.operators import Operator
from natgrad.rules.base import Objective, Rule
from natgrad.rules.block_point import BlockPoint
from natgrad.rules.parts import Memory, Parts
from natgrad.rules.quadratic import BlockStep, Quadratic, Step
from natgrad.rules.spectral_descent import SpectralDescent
from natgrad.rules.step_rules import MeasuredLength
from natgrad.typed_torch import measure_norm

UNIT = 0.5
"""Root mean square of a unit's weights times the root of their number, below which a block counts as this large."""


@dataclass(frozen=True)
class NoiseAware(Rule):
    """`MeasuredLength` with a bound on each layer's own move; then, once noise hides the gradient, `SpectralDescent`.

    The natural gradient is the best step along a gradient that can be seen. Of noise it makes long steps in just the
    directions that the loss hardly depends on: their sum is what a layer's weights become. Two bounds follow.

    A layer's step is at most `move` of the layer: |d| <= move * max(|theta|, .5 sqrt(outputs)) in Frobenius norm, times
    the learning rate where that is below 1. The second size is that of a fresh layer, for layers that start at zero.

    The signal is |m|^2 / E|g|^2 for the running mean m of the gradient g, less what pure noise has there:
    (1 - b) / (1 + b) for a momentum b. It is 1 where all gradients agree and 0 where they are noise; averaged over ten
    steps. From the step on at which it is below `noise`, all steps are `SpectralDescent`. That stays so.

    Args:
        max_kl: Most nats per example of a step, to second order on its own batch; math.inf for no bound.
        kl_share: Most nats per example as a share of the loss; of one nat per entry where the loss may be negative.
        warm: Steps over which these two bounds grow to their whole size.
        move: Most relative move of a layer in one natural step; math.inf for no bound.
        noise: Share of signal below which steps become spectral; 0 for never.
        spectral: The steps from there on.

    Raises:
        ValueError: Unless max_kl, kl_share, move > 0, warm >= 1 and 0 <= noise < 1.

    Example:
        >>> from natgrad.rules import NoiseAware
        >>> NoiseAware(move=0.05).noise
        0.26
    """

    max_kl: float = 10.0
    kl_share: float = 0.05
    warm: int = 5
    move: float = 0.1
    noise: float = 0.26
    spectral: SpectralDescent = SpectralDescent()

    steady = True

    def __post_init__(self) -> None:
        MeasuredLength(self.max_kl, self.kl_share, self.warm)
        if not self.move > 0:
            raise ValueError(f"move is {self.move}, expected a share of a layer > 0; math.inf for no bound")
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise is {self.noise}, expected a share in [0, 1); 0 for natural steps all along")

    @property
    def options(self) -> dict[str, float]:
        return {"max_kl": self.max_kl, "kl_share": self.kl_share}

    @property
    def turns_at(self) -> float:
        return self.noise

    def prepare(self, metric: Operator, level: float) -> dict[str, Tensor]:
        return self.spectral.prepare(metric, level)

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        return self.spectral.shape(block)

    def kl_bound(self, model: Quadratic) -> Tensor | float:
        if model.turned:
            return min(self.max_kl, float(self.spectral.kl_bound(model)))
        return MeasuredLength(self.max_kl, self.kl_share, self.warm).kl_bound(model)

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        natural = MeasuredLength(self.max_kl, self.kl_share, self.warm)
        if model.turned:
            step, memory = self.spectral.step(model, loss_at, memory)
        else:
            step = limit_moves(model, natural.find_length(model), self.move)
        return natural.hold(model, step), memory


def limit_moves(model: Quadratic, step: Step, most: float) -> Step:
    """The step with |d_l| <= most * max(|theta_l|, .5 sqrt(outputs)) for the parameters of each layer l together.

    Args:
        model: Tells the layers and their parameters; without any the step stays as it is.
        step: d.
        most: The share of a layer; a learning rate below 1 makes it smaller.
    """
    vector = step.vector
    if not isinstance(vector, Parts) or not model.layers or not math.isfinite(most):
        return step
    layers = [names for layer in model.layers if (names := [name for name in layer if name in vector.parts])]
    if not layers:
        return step
    factors = torch.stack([room(model, vector, names, most) for names in layers])
    if not bool((factors < 1).any()):
        return step
    shares = {name: factor for names, factor in zip(layers, factors, strict=True) for name in names}
    limited = step.scale_layers(shares) if isinstance(step, BlockStep) else None
    if limited is None:
        parts = {name: part * shares[name].to(part) for name, part in vector.parts.items()}
        limited = model.along(Parts(parts, vector.rates, vector.length))
        limited.form()  # so that it is reported
    return limited


def room(model: Quadratic, vector: Parts, names: Sequence[str], most: float) -> Tensor:
    """What part of a layer's step may be taken, at most 1, in double precision."""
    moved = torch.stack([vector.square(name).double() for name in names]).sum().sqrt()
    params = [model.params[name].detach() for name in names]
    size = torch.stack([measure_norm(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params])
    fresh = UNIT * max(math.sqrt(len(p)) if p.dim() else 1.0 for p in params)
    rate = min(1.0, max(abs(vector.rate(name)) for name in names))
    bound = most * rate * measure_norm(size.double()).clamp(min=fresh).to(moved.device)
    return torch.where(moved > bound, bound / moved, 1.0)
