"""The part of a gradient that did not come from `opt.loss`, and the damping that keeps steps along it bounded."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from natgrad.families import Criterion
from natgrad.layers import is_asking
from natgrad.optim.distributed import Ranks
from natgrad.pure import leaves, map_tensors
from natgrad.typed_torch import hook_gradient, list_numbers
from natgrad.whole_tensors import gather_whole

SHARE = 0.1  # of a block's gradient, that counts as a part: round-off in half precision stays below
ROUND = 1e-4  # of the whole gradient, below which a zero may be round-off
FADES = 0.9  # per measurement: an old curvature is forgotten in about ten


@dataclass(frozen=True)
class Outside:
    """What losses that the metric does not know of do to each block, and the curvature that was seen of them.

    The step (G + damping I)^-1 m is as long as 1 / damping along directions that only another loss depends on, where G
    is zero. A block that such a loss reaches gets an absolute damping besides: its own in units of the mean eigenvalue
    over all blocks, and the other loss's curvature along the way of the parameters between two measurements.

    Attributes:
        levels: The curvature by parameter of the blocks that another loss reaches; those of a block are equal.
        updates: Updates of the statistics so far; at some of them it is asked whether there is such a loss, and once
            there is, at all.
        last: The parameters and the other loss's gradient at the last measurement, by parameter.
        warned: True once the user was told.
    """

    levels: Mapping[str, float] = field(default_factory=dict[str, float])
    updates: int = 0
    last: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    warned: bool = False

    @property
    def asks(self) -> bool:
        """Whether the next update looks for other losses."""
        return bool(self.levels) or is_asking(self.updates)

    def damping(self, name: str, level: float) -> float:
        """What a parameter's block gets besides its own damping, whose group's is `level` over all blocks."""
        return level + self.levels[name] if name in self.levels else 0.0

    def change(self, name: str, p: Tensor, move: Tensor) -> float:
        """How the other losses change as a parameter moves, by what the last measurement told."""
        place, slope = self.last[name]
        level = self.levels[name]
        slope = slope.to(p) + level * (p - place.to(p))
        return float((slope * move).sum() + level / 2 * move.square().sum())

    def measure(
        self,
        own: OwnGradients,
        gradients: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        blocks: Sequence[Sequence[str]],
        losses: int,
        unit: float,
        ranks: Ranks,
        doubt: Callable[[], None],
    ) -> Outside:
        """The blocks that a loss besides `opt.loss` reaches, and its curvature there.

        own: what `opt.loss` put into the gradient. gradients: the whole one, in any unit: it may have been unscaled, or
        clipped by its norm. losses: how many went backward; nothing is known unless all of them were listened to. unit:
        what the gradients were divided by. doubt: called before the first warning of such a loss; raises where the
        gradient has another reason.
        """
        known, asks = own.counted == losses, self.asks
        asked, parts, updates = own.counted > 0 and known, own.sums, self.updates + 1
        if ranks.size > 1 and asks:  # as all of them listen or none
            flags = torch.tensor([float(asked), float(not known)], device=next(iter(gradients.values())).device)
            some, unknown = list_numbers(ranks.sum(flags))
            asked = some > 0 and not unknown
            if asked:
                parts = ranks.average(
                    {n: parts[n].to(g) if n in parts else torch.zeros_like(g) for n, g in gradients.items()}
                )
        if not asked:
            return replace(self, updates=updates)
        parts = {n: parts[n].to(g) / unit if n in parts else torch.zeros_like(g) for n, g in gradients.items()}
        held = find_held(parts, gradients)
        parts |= {n: torch.where(gradients[n] == 0, 0, parts[n]) for n in held}
        if held and not self.warned:
            warnings.warn(
                f"the gradient of {held} is zero in entries where that of optimizer.loss is not, as a mask makes it: "
                "the metric ties entries together, and the step moves these too. Write their values back after each "
                "optimizer.step(), or make them parameters of their own and give params= without them",
                stacklevel=2,
            )
        scale = fit_scale(parts, gradients)
        reached = find_outside_blocks(gradients, parts, scale, blocks)
        plain = find_outside_blocks(gradients, parts, 1.0, blocks) if reached else []
        if len(plain) < len(reached) or scale > 0.5:  # the other part leans on the fit: nothing was scaled
            scale, reached = 1.0, plain
        levels, last = dict[str, float](), dict[str, tuple[Tensor, Tensor]]()
        for names in reached:
            now = {n: (named[n].to(gradients[n], copy=True), gradients[n] - scale * parts[n]) for n in names}
            faded = FADES * max(self.levels.get(name, 0.0) for name in names)
            levels |= dict.fromkeys(names, max(curvature_between(self.last, now), faded))
            last |= now
        if reached and not (held or self.warned):
            doubt()
            warnings.warn(
                f"a large part of the gradient of {sorted(levels)} did not come from optimizer.loss: the metric "
                "does not know of it, and steps are damped more there. Give all of the loss to optimizer.loss: several "
                "outputs by ng.Heads (a KL term by ng.GaussianPosterior), a penalty on squares by l2=; or call "
                "ng.hessian_free and its like with all of it: optimizer.step(closure), whose closure returns the sum",
                stacklevel=2,
            )
        return Outside(levels, updates, last, self.warned or bool(held or reached))

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"levels": dict(self.levels), "last": {name: list(pair) for name, pair in self.last.items()}}

    @staticmethod
    def load(saved: Mapping[str, Any] | None, named: Mapping[str, Tensor], updates: int, warned: bool) -> Outside:
        """From `save()`, on the parameters' devices; None in older checkpoints."""
        if saved is None:
            return Outside(updates=updates, warned=warned)
        last = {
            name: (place.to(named[name].device, copy=True), slope.to(named[name].device, copy=True))
            for name, (place, slope) in saved["last"].items()
            if name in named
        }
        return Outside(dict(saved["levels"]), updates, last, warned)


class OwnGradients:
    """The gradients of the losses that `opt.loss` computed, counted as they go backward: all else is outside.

    Attributes:
        sums: By parameter.
        counted: Losses in them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the losses of a step."""
        self.sums: dict[str, Tensor] = {}
        self.counted = 0

    def listen(
        self, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, named: Mapping[str, Tensor]
    ) -> None:
        """Take the gradient of a loss apart, at one backward pass, and count it once the loss goes backward."""
        wanted = {name: p for name, p in named.items() if p.requires_grad}
        scale = criterion.scale(map_tensors(outputs, torch.detach), targets)
        tensors = list(leaves(outputs))
        pairs = zip(tensors, leaves(criterion.slope(outputs, targets)), strict=True)
        reached = [(out, scale * slope) for out, slope in pairs if out.requires_grad]
        heads, cotangents = [out for out, _ in reached], [slope for _, slope in reached]
        if not heads or not wanted:
            return
        try:  # from the outputs: the loss itself would take this for the user's backward pass
            slopes = torch.autograd.grad(heads, list(wanted.values()), cotangents, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a graph that goes backward once only: nothing is asked then
            return
        known = {
            name: gather_whole(slope).to_dense()
            for name, slope in zip(wanted, slopes, strict=True)
            if slope is not None
        }
        me = weakref.ref(self)

        def count(cotangent: Tensor) -> None:
            own = me()
            if own is not None:
                own.add(known, cotangent.detach())

        hook_gradient(value, count)

    @torch.no_grad()
    def add(self, known: Mapping[str, Tensor], weight: Tensor) -> None:
        """Count a loss's gradient as part of the whole one."""
        own = self.sums
        self.sums = own | {n: weight * g + own[n] if n in own else weight * g for n, g in known.items()}
        self.counted += 1


def fit_scale(own: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
    """The s >= 0 that brings s own nearest to the gradients."""
    inner = sum(float((own[name] * g).sum()) for name, g in gradients.items())
    square = sum(float(k.square().sum()) for k in own.values())
    return max(inner / square, 0.0) if square > 0 else 0.0


def find_held(own: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> list[str]:
    """The parameters of whose own gradients a part was set to zero."""
    squares = {name: float(own[name].square().sum()) for name in gradients}
    lost = {name: float(own[name][g == 0].square().sum()) for name, g in gradients.items()}
    least = ROUND**2 * sum(squares.values())
    return [name for name, part in lost.items() if part > max(SHARE**2 * squares[name], least)]


def find_outside_blocks(
    gradients: Mapping[str, Tensor], own: Mapping[str, Tensor], scale: float, blocks: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The blocks of whose gradients a part is left when scale * own is taken away."""
    found = list[list[str]]()
    for block in blocks:
        names = [name for name in block if name in gradients]
        rest = sum(float((gradients[n] - scale * own[n]).square().sum()) for n in names)
        whole = sum(float(gradients[n].square().sum()) for n in names)
        if rest > SHARE**2 * whole:
            found.append(names)
    return found


def curvature_between(last: Mapping[str, tuple[Tensor, Tensor]], now: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Curvature along the way between two (parameters, gradient) of a block: move^T (change of gradient) / |move|^2.

    At the first measurement that from the origin, as if the gradient were in proportion to the parameters: right for a
    penalty on their squares.
    """
    if not all(name in last for name in now):
        rest = sum(float(gradient.square().sum()) for _, gradient in now.values())
        size = sum(float(place.square().sum()) for place, _ in now.values())
        return (rest / size) ** 0.5 if size > 0 else 0.0
    rise = length = 0.0
    for name, (place, gradient) in now.items():
        move = place - last[name][0].to(place)
        rise += float((move * (gradient - last[name][1].to(gradient))).sum())
        length += float(move.square().sum())
    return max(rise / length, 0.0) if length > 0 else 0.0
