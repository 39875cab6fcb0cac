"""Natural steps within a share of each layer, spectral ones once mini-batch noise exceeds the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from natgrad.ground.constants import FRESH
from natgrad.ground.typed_torch import measure_norms, read_scalars
from natgrad.operators import Operator
from natgrad.rules.base import BlockPoint, BlockStack, Objective, Rule, ShapedStack
from natgrad.rules.quadratic import BlockStep, Memory, Parts, Quadratic, Step, read_cut
from natgrad.rules.spectral_descent import SpectralDescent
from natgrad.rules.spectral_progress import SpectralProgress, least_size
from natgrad.rules.step_rules import MeasuredLength


@dataclass(frozen=True)
class NoiseAware(Rule):
    """`MeasuredLength` with a bound on each layer's move; `SpectralProgress` once mini-batch noise is larger.

    The natural gradient is the best step along a gradient that can be seen. Of noise it makes long steps in just the
    directions that the loss hardly depends on: their sum is what a layer's weights become. Two bounds follow.

    A layer's step is at most `move` of the layer: |d| <= move * max(|theta|, floor sqrt(outputs)) in Frobenius norm,
    times the learning rate where that is below 1. Scales and shifts count as at least .5 per root of an entry.

    The signal is (|m|^2 - z |g|^2) / (|g|^2 - z |g|^2) for the running mean m of the gradient g, with the z = E|m|^2 /
    E|g|^2 of pure noise: (1 - b) / (1 + b) for a momentum b. It is 1 where all gradients agree and 0 where they are
    noise; its norms are averaged over ten steps. Once it is below `noise`, steps are spectral ones from there on. So
    they are once a whole natural step would move the layers that `move` shortens by more than `far` of their size,
    since what is left of it says little: inputs that hardly vary, as the borders of images, ask for such steps. Where a
    regression's targets lie far away, `far` counts in their unit.

    Args:
        max_kl: Most nats per example of a step, to second order on its own batch; math.inf for no bound.
        kl_share: Most nats per example of a natural step as a share of the loss; of one nat per entry where the loss
            may be negative. Of a cross-entropy near zero a whole natural step is half of it, so that .1 lets .45 of one
            through.
        warm: Steps over which these two bounds grow to their whole size: a first step is not told from one that is far
            too long.
        move: Most relative move of a layer in one natural step; math.inf for no bound.
        floor: Least size of a layer per root of an output, for layers that start at zero.
        noise: Share of signal below which steps become spectral; 0 for natural steps all along.
        far: Relative move, in a whole natural step, of the layers that `move` shortens, above which the next steps are
            spectral; math.inf for no such turn.
        spectral: The steps from there on.

    Raises:
        ValueError: Unless max_kl, kl_share, move, floor > 0, warm >= 1, far > 0 and 0 <= noise < 1.

    Example:
        >>> from natgrad.rules import NoiseAware
        >>> NoiseAware(move=0.05).noise
        0.4
    """

    max_kl: float = math.inf
    kl_share: float = 0.1
    warm: int = 5
    move: float = 0.12
    floor: float = 0.05
    noise: float = 0.4
    far: float = 2.5
    spectral: SpectralProgress | SpectralDescent = SpectralProgress()

    def __post_init__(self) -> None:
        _ = self.natural  # checks its numbers
        if not self.move > 0:
            raise ValueError(f"move is {self.move}, expected a share of a layer > 0; math.inf for no bound")
        if not self.floor > 0:
            raise ValueError(f"floor is {self.floor}, expected a size > 0 per root of an output")
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise is {self.noise}, expected a share in [0, 1); 0 for natural steps all along")
        if not self.far > 0:
            raise ValueError(f"far is {self.far}, expected a relative move > 0; math.inf for no bound")

    @property
    def natural(self) -> MeasuredLength:
        """The length of natural steps before that of each layer is bounded."""
        return MeasuredLength(self.max_kl, self.kl_share, self.warm)

    @property
    def options(self) -> dict[str, float]:
        return {"max_kl": self.max_kl, "kl_share": self.kl_share}

    @property
    def turns_at(self) -> float:
        return self.noise

    def turns_after(self, model: Quadratic) -> bool:
        # layers may have as far to go as a regression's targets lie away
        return self.noise > 0 and self.move * read_cut(model.cuts.get("move", 0.0)) > self.far * model.run.errors.size

    def rate_after(self, steps: int) -> float:
        return self.spectral.rate_after(steps)

    def measures(self, turned: bool) -> bool:
        return not turned or self.spectral.needs_form or self.max_kl < math.inf

    def prepare(self, metric: Operator, level: float) -> dict[str, Tensor]:
        return self.spectral.prepare(metric, level)

    def prepare_inputs(self, moment: Tensor, tokens: bool, positions: float) -> dict[str, Tensor] | None:
        return self.spectral.prepare_inputs(moment, tokens, positions)

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        return self.spectral.shape(block)

    def shape_stacks(self, stacks: Sequence[BlockStack]) -> Sequence[ShapedStack]:
        return self.spectral.shape_stacks(stacks)

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        if not model.run.turned:
            natural = self.natural
            return natural.hold(model, limit_moves(model, natural.find_length(model), self.move, self.floor)), memory
        step, memory = self.spectral.step(model, loss_at, memory)
        if "kl_share" in model.cuts:
            model.cuts["spectral.kl_share"] = model.cuts.pop("kl_share")
        return self.natural.hold(model, step), memory


def limit_moves(model: Quadratic, step: Step, most: float, floor: float) -> Step:
    """The step with |d_l| <= most * max(|theta_l|, floor sqrt(outputs)) for the parameters of each layer l together."""
    if not isinstance(step, BlockStep) or not math.isfinite(most):
        return step
    blocks = zip(model.layers.names, model.layers.outputs, strict=True)
    moving = (([name for name in names if name in step.vector.parts], outputs) for names, outputs in blocks)
    layers = [(names, outputs) for names, outputs in moving if names]
    if not layers:
        return step
    squares, bounds = step.list_squares(), bound_moves(model, step.vector, layers, most, floor)
    moved = [math.sqrt(sum(squares.get(name, 0.0) for name in names)) for names, _ in layers]
    length = bounded_norm(moved, bounds) or math.nan
    for name, longer in model.cuts.items():  # without another bound this one still holds
        if name != "lr":
            model.cuts[name] = bounded_norm(moved, bounds, read_cut(longer)) / length
    longer = model.cuts["move"] = math.hypot(*moved) / length
    if not longer > 1:
        return step
    factors = dict.fromkeys(step.vector, 1.0)  # parameters without a layer keep their part
    for (names, _), size, bound in zip(layers, moved, bounds, strict=True):
        factors |= dict.fromkeys(names, bound / size if size > bound else 1.0)
    limited = step.scale_layers(factors)
    if limited is None:
        limited = model.along(step.vector.scale_each(factors))
        limited.form()  # so that it is reported
    return limited


def bounded_norm(moved: Sequence[float], bounds: Sequence[float], longer: float = 1.0) -> float:
    """|d| within bounds on its layers, were it `longer` times as long before these."""
    return math.hypot(*(min(longer * size, bound) for size, bound in zip(moved, bounds, strict=True) if size))


def bound_moves(
    model: Quadratic, vector: Parts, layers: Sequence[tuple[Sequence[str], int]], most: float, floor: float
) -> list[float]:
    """How far each layer, its names and outputs, may move."""
    params = [[model.layers.params[name].detach() for name in names] for names, _ in layers]
    # squares of half precision overflow
    sizes = iter(read_scalars(measure_norms([p.float() if p.element_size() < 4 else p for own in params for p in own])))
    bounds = list[float]()
    for (names, outputs), own in zip(layers, params, strict=True):
        least = floor if max(p.dim() for p in own) > 1 else FRESH  # scales and shifts start at 0 or 1
        fresh = least_size(least, outputs, max(map(model.run.errors.of, names)))
        rate = most * min(1.0, max(abs(vector.rate(name)) for name in names))
        bounds.append(rate * max(math.hypot(*islice(sizes, len(own))), fresh))
    return bounds
