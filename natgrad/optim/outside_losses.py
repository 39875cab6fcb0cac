"""The part of a gradient that did not come from `opt.loss`, and the damping that keeps steps along it bounded."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
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
ALONE = Ranks()
FADES = 0.9  # per measurement: an old curvature is forgotten in about ten


class Outside:
    """What losses that the metric does not know of do to each block, and the curvature that was seen of them.

    The step (G + damping I)^-1 m is as long as 1 / damping along directions that only another loss depends on, where G
    is zero. A block that such a loss reaches gets an absolute damping besides: its own in units of the mean eigenvalue
    over all blocks, and the other loss's curvature along the way of the parameters between two measurements.

    Attributes:
        levels: The curvature by parameter of the blocks that another loss reaches; those of a block are equal.
        updates: Updates of the statistics so far; at some of them it is asked whether there is such a loss, and once
            there is, at all.
    """

    def __init__(self) -> None:
        self.levels: dict[str, float] = {}
        self.updates = 0
        self._last: dict[str, tuple[Tensor, Tensor]] = {}
        self._warned = False
        self.forget_batch()

    def save(self) -> dict[str, Any]:
        """What the next steps depend on besides `updates`, as plain values and tensors."""
        return {"levels": dict(self.levels), "last": {name: list(pair) for name, pair in self._last.items()}}

    @classmethod
    def load(cls, saved: Mapping[str, Any] | None, updates: int, named: Mapping[str, Tensor]) -> Outside:
        """From what `save` gave, on the parameters' devices; None: an older checkpoint has nothing of it."""
        outside = cls()
        if saved is not None:
            outside.updates, outside.levels = updates, dict(saved["levels"])
            for name, (place, slope) in saved["last"].items():
                if name in named:
                    device = named[name].device
                    outside._last[name] = place.to(device, copy=True), slope.to(device, copy=True)
        return outside

    def forget_batch(self) -> None:
        """Forget the losses of a step."""
        self._own: dict[str, Tensor] = {}
        self._counted = 0

    def listen(
        self, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, named: Mapping[str, Tensor]
    ) -> None:
        """Take the gradient of a loss apart, at one backward pass, and count it once the loss goes backward."""
        if not (self.levels or is_asking(self.updates)):
            return
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
            outside = me()
            if outside is not None:
                outside.add(known, cotangent.detach())

        hook_gradient(value, count)

    @torch.no_grad()
    def add(self, known: Mapping[str, Tensor], weight: Tensor) -> None:
        """Count a loss's gradient as part of the whole one."""
        own = self._own
        self._own = own | {n: weight * g + own[n] if n in own else weight * g for n, g in known.items()}
        self._counted += 1

    @torch.no_grad()
    def measure(
        self,
        gradients: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        blocks: Sequence[Sequence[str]],
        losses: int,
        unit: float,
        ranks: Ranks = ALONE,
        doubt: Callable[[], None] = lambda: None,
    ) -> None:
        """Find the blocks that a loss besides `opt.loss` reaches, and its curvature there.

        Args:
            gradients: The whole gradient, in any unit: it may have been unscaled, or clipped by its norm.
            named: The parameters.
            blocks: The names of each block's parameters.
            losses: The number of losses that went backward; nothing is known unless all of them were listened to.
            unit: What the gradients were divided by.
            ranks: The processes whose gradients were averaged.
            doubt: Called before the first warning of such a loss; raises where the gradient has another reason.
        """
        known = self._counted == losses
        asked, own, self.updates = self._counted > 0 and known, self._own, self.updates + 1
        if ranks.size > 1 and (self.levels or is_asking(self.updates - 1)):  # as all of them listen or none
            flags = torch.tensor([float(asked), float(not known)], device=next(iter(gradients.values())).device)
            some, unknown = list_numbers(ranks.sum(flags))
            asked = some > 0 and not unknown
            own = (
                ranks.average({n: own[n].to(g) if n in own else torch.zeros_like(g) for n, g in gradients.items()})
                if asked
                else own
            )
        self.forget_batch()
        if not asked:
            return
        own = {n: own[n].to(g) / unit if n in own else torch.zeros_like(g) for n, g in gradients.items()}
        scale = fit_scale(own, gradients)
        parts = find_outside_blocks(gradients, own, scale, blocks)
        plain = find_outside_blocks(gradients, own, 1.0, blocks) if parts else []
        if len(plain) < len(parts) or scale > 0.5:  # the other part leans on the fit: nothing was scaled
            scale, parts = 1.0, plain
        before, self.levels = self.levels, {}
        last, self._last = self._last, {}
        for names in parts:
            now = {n: (named[n].to(gradients[n], copy=True), gradients[n] - scale * own[n]) for n in names}
            faded = FADES * max(before.get(name, 0.0) for name in names)
            self.levels |= dict.fromkeys(names, max(curvature_between(last, now), faded))
            self._last |= now
        if parts and not self._warned:
            doubt()
            self._warned = True
            warnings.warn(
                f"a large part of the gradient of {sorted(self.levels)} did not come from optimizer.loss: the metric "
                "does not know of it, and steps are damped more there. Give all of the loss to optimizer.loss: several "
                "outputs by ng.Heads (a KL term by ng.GaussianPosterior), a penalty on squares by l2=",
                stacklevel=2,
            )

    def damping(self, name: str, level: float) -> float:
        """What a parameter's block gets besides its own damping.

        Args:
            name: The parameter's.
            level: Its group's damping in units of the mean eigenvalue over all blocks.
        """
        return level + self.levels[name] if name in self.levels else 0.0


def fit_scale(own: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
    """The s >= 0 that brings s own nearest to the gradients."""
    inner = sum(float((own[name] * g).sum()) for name, g in gradients.items())
    square = sum(float(k.square().sum()) for k in own.values())
    return max(inner / square, 0.0) if square > 0 else 0.0


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
