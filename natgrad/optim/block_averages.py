"""A metric in blocks between steps: running averages, damped inverses, and the direction that they give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.layers.kinds import Layer
from natgrad.layers.moments import Seen
from natgrad.operators import Diagonal, Layout, Operator, pack_operator, unpack_operator
from natgrad.optim.inverses import robust_inverse
from natgrad.optim.pass_statistics import Reading
from natgrad.pure import map_tensors
from natgrad.structures import Layerwise
from natgrad.structures.layerwise import Statistics, accumulate_statistics
from natgrad.structures.process_sums import exchanging

ENTRIES = ("totals", "weight", "inverse", "level")
MISFIT = "the statistics in state_dict do not fit the block of {}"
HEADROOM = 1e-6  # of the largest number: running averages add up


@dataclass
class Block:
    """One layer, or one parameter without a layer: its matrix, and its damped inverse once there is one."""

    layout: Layout
    layer: Layer | None
    inverse: Operator | None = None


@dataclass(frozen=True)
class Inverted:
    """A new damped inverse of a block that is not written yet: as an operator, as tensors, and its damping."""

    operator: Operator
    packed: dict[str, Any]
    level: float


class Blocks:
    """The blocks of a structure. Their numbers live in an optimizer's state, under each block's first parameter.

    There: `totals` and `weight` of the running averages, the packed `inverse`, and the damping `level` it is made with.
    """

    def __init__(
        self, structure: Layerwise, named: Mapping[str, Tensor], state: MutableMapping[Tensor, dict[str, Any]]
    ) -> None:
        self.structure, self.named, self.state = structure, named, state
        self.all: dict[str, Block] = {}
        self._changes: list[Tensor] = []
        self._kinds: dict[str, tuple[torch.dtype, torch.device]] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter(self.all.values())

    def of(self, block: Block) -> dict[str, Any]:
        """The block's numbers."""
        return self.state[self.named[block.layout.names[0]]]

    def follow_parameters(self) -> None:
        """Bring what is remembered to the dtypes and devices of the parameters, after `model.double()` and the like.

        Of half-precision parameters it is float32.
        """
        before, self._kinds = self._kinds, {name: (p.dtype, p.device) for name, p in self.named.items()}
        changed = [name for name, kind in before.items() if self._kinds.get(name, kind) != kind]
        for p in (self.named[name] for name in changed):
            dtype = torch.promote_types(p.dtype, torch.float32)
            moved = map_tensors(
                self.state.get(p, {}),
                lambda t, p=p, dtype=dtype: t.to(p.device, dtype if t.is_floating_point() else t.dtype),
            )
            self.state[p].update(moved)
        for block in self if changed else ():
            if "inverse" in self.of(block):
                block.inverse = unpack_operator(self.of(block)["inverse"])

    def take(self, reading: Reading, decay: float) -> bool:
        """A reading into the averages, weighted by its rows; where it is not finite or near overflow, nothing of it.

        Layer after layer, so that the old and the new averages are never all there at once; the reading is emptied on
        the way, from its end, as the first layers of a network tend to be the largest.
        """
        if not agreed(sound(reading), reading):
            return False
        share, taken = float(reading.rows), True
        with exchanging(reading.exchange):
            while reading.layers:
                seen = reading.layers.pop().counted(share)
                taken &= self._take_layer(seen, decay, float(reading.weights.get(seen.key, share)))
            for name, squares in reading.squares.items():
                total = accumulate_statistics(self._totals(name, layered=False), {"squares": share * squares}, decay)
                rows = float(reading.weights.get(name, share))
                taken &= self._average(name, Block(single(name, self.named[name]), None), total, decay, rows)
        return taken

    def _take_layer(self, seen: Seen, decay: float, rows: float) -> bool:
        totals = self.structure.statistics(seen, self._totals(seen.key), decay)
        return self._average(seen.key, Block(seen.layer.layout, seen.layer), totals, decay, rows)

    def _average(self, key: str, block: Block, totals: Statistics, decay: float, rows: float) -> bool:
        """One block's new totals, unless something in them is not finite: an eigendecomposition may have failed."""
        if not all(bool(torch.isfinite(t.sum())) for t in totals.values()):
            return False
        numbers = self.of(self._known(key, block))
        weight = decay * numbers["weight"] + rows if "totals" in numbers else rows
        if "totals" in numbers:
            self._changes.append(change(numbers["totals"], totals, numbers["weight"] / weight))
        numbers.update(totals=renewed(numbers, "totals", totals), weight=weight)
        return True

    def drift(self) -> float | None:
        """How much the updates since `settle` changed the averages, the mean over blocks; None if there was none.

        Of structures whose statistics are no sums nothing is said: their numbers do not compare entry by entry.
        """
        if not self._changes or not self.structure.sums:
            return None
        return float(torch.stack(self._changes).nan_to_num(nan=1.0).clamp(max=1).mean())

    def settle(self) -> None:
        """Forget the changes that `drift` told."""
        self._changes = []

    def mean_eigenvalue(self) -> float:
        """Over all blocks, of today's averages."""
        operators = [self.operator(block) for block in self]
        return sum(float(one.mean_eigenvalue()) * one.size for one in operators) / sum(one.size for one in operators)

    def invert(self, levels: Mapping[str, tuple[float, float]]) -> tuple[dict[str, Inverted], int]:
        """Damped inverses from today's averages by key, and the number of those that failed. Nothing is written.

        levels: by parameter, damping in units of the block's mean eigenvalue, and damping as it is.
        """
        found, failures = dict[str, Inverted](), 0
        for key, block in self.all.items():
            operator = self.operator(block)
            relative, absolute = levels[block.layout.names[0]]
            level = relative * float(operator.mean_eigenvalue()) + absolute
            if not level > 0:  # nothing was seen of this block yet: no derivative reached it
                continue
            inverse = robust_inverse(operator, level)
            if inverse is None:
                failures += 1
                continue
            tensors = pack_operator(inverse)
            found[key] = Inverted(unpack_operator(tensors), tensors, level)
        return found, failures

    def keep(self, inverses: Mapping[str, Inverted]) -> None:
        """Write new inverses; blocks without one keep their last good one. A second time changes nothing."""
        for key, found in inverses.items():
            block = self.all[key]
            numbers = self.of(block)
            numbers.update(inverse=renewed(numbers, "inverse", found.packed), level=found.level)
            block.inverse = unpack_operator(numbers["inverse"])

    def operator(self, block: Block) -> Operator:
        """The block of the metric, on the layer's matrix flattened row-major."""
        numbers = self.of(block)
        if block.layer is None:
            return Diagonal((numbers["totals"]["squares"] / numbers["weight"]).reshape(-1))
        return self.structure.operator(block.layer, numbers["totals"], numbers["weight"])

    def direction(
        self, block: Block, inverse: Operator, means: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d = (G + damping I)^-1 m by name, and d^T m by name, under the first for all parameters that share a rate.

        A parameter without a gradient counts as one whose gradient is zero, and does not move.
        """
        names = block.layout.names
        whole = {n: means[n] if n in means else torch.zeros_like(self.named[n], dtype=inverse.dtype) for n in names}
        matrix = block.layout.join(whole).to(inverse.dtype)
        solved = inverse.mv(matrix.reshape(-1)).view(block.layout.matrix_shape)
        found = {name: part for name, part in block.layout.split(solved).items() if name in means}
        if len(found) == len(names) and len({rates[n] for n in names}) == 1:  # the usual case, without copies
            return found, {names[0]: dot(matrix, solved)}
        return found, {name: dot(means[name], part) for name, part in found.items()}

    def saved(self) -> dict[str, list[str]]:
        """Key -> names: what `rebuild` needs besides the optimizer's state."""
        return {key: list(block.layout.names) for key, block in self.all.items()}

    def rebuild(self, saved: Mapping[str, list[str]], layers: Mapping[tuple[str, ...], Layer]) -> None:
        """The blocks of a checkpoint. layers: the trusted ones, by their names.

        Raises:
            ValueError: If a block's numbers are missing, or are not those of such a block.
        """
        self.all = {}
        for key, names in saved.items():
            if self._frozen(names):  # torch.distributed.checkpoint leaves their state behind
                continue
            try:
                block = self.all[key] = Block(self._layout(names, layer := layers.get(tuple(names))), layer)
                block.inverse = unpack_operator(self.of(block)["inverse"]) if "inverse" in self.of(block) else None
                sizes = {one.size for one in (self.operator(block), block.inverse) if one is not None}
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(f"{MISFIT.format(names)}: {type(error).__name__}, {error}") from error
            if sizes != {math.prod(block.layout.matrix_shape)}:
                raise ValueError(f"{MISFIT.format(names)}, of {math.prod(block.layout.matrix_shape)} entries: {sizes}")

    def _layout(self, names: Sequence[str], layer: Layer | None) -> Layout:
        return single(names[0], self.named[names[0]]) if layer is None else layer.layout

    def _frozen(self, names: Sequence[str]) -> bool:
        """Whether what a block's numbers lay under is not trained any more, and has none."""
        first = self.named.get(names[0])
        return first is not None and not first.requires_grad and "totals" not in self.state.get(first, {})

    def _totals(self, key: str, layered: bool = True) -> Statistics | None:
        return self.of(self.all[key]).get("totals") if self._holds(key, layered) else None

    def _holds(self, key: str, layered: bool) -> bool:
        """Whether there is a block under this key, of a layer or of a parameter without one."""
        return key in self.all and (self.all[key].layer is not None) == layered

    def _known(self, key: str, block: Block) -> Block:
        """The block under this key, made if it is new; blocks that shared a parameter with it are forgotten.

        One that was a layer's, and is a parameter's of the same name now, is new too.
        """
        if not self._holds(key, block.layer is not None):
            others = [k for k, b in self.all.items() if set(b.layout.names) & set(block.layout.names)]
            for other in others:
                numbers = self.of(self.all.pop(other))
                for entry in ENTRIES:
                    numbers.pop(entry, None)
            self.all[key] = block
        return self.all[key]


def sound(reading: Reading) -> bool:
    """Whether no second moment of the reading can overflow, sums of many such readings included.

    Every entry of a factor is at most the squared norm of its side, every entry of a block the product of both.
    """
    norms = [squares.sum().sqrt() for squares in reading.squares.values()]
    for seen in reading.layers:
        for part in getattr(seen, "parts", (seen,)):
            sides = [norm(deltas) for deltas in part.deltas]
            sides = [torch.stack(sides).norm()] + ([] if part.by_token else [norm(part.activations)])
            norms += [*sides, torch.stack(sides).prod()]
    if not norms:
        return True
    largest = min(torch.finfo(n.dtype).max for n in norms)
    # in one synchronisation; comparisons with a NaN are false
    return bool((torch.stack([n.double() for n in norms]).square() <= HEADROOM * largest).all())


def agreed(fine: bool, reading: Reading) -> bool:
    """Whether all processes find their parts of a reading fine."""
    if reading.exchange is None:
        return fine
    like = next(iter(reading.squares.values()), None)
    like = reading.layers[0].activations if like is None else like
    return not bool(reading.exchange({"bad": torch.tensor(float(not fine), device=like.device)})["bad"])


def change(old: Statistics, new: Statistics, share: float) -> Tensor:
    """|M' - M| / |M| in Frobenius norm, the largest over a block's moments; by inner products, without a copy.

    share: the old totals' weight over the new ones', so that M' - M is new - old / share, up to a factor.
    """
    found = [torch.zeros((), dtype=torch.float64)]
    for key in {"left", "right", "squares", "blocks"} & old.keys() & new.keys():
        if old[key].shape == new[key].shape:
            before = dot(old[key], old[key]).double()
            moved = share**2 * dot(new[key], new[key]).double() - 2 * share * dot(new[key], old[key]).double() + before
            found.append(torch.where(before > 0, moved.clamp(min=0) / before, 0).sqrt().to(found[0].device))
    return torch.stack(found).max()


def renewed(numbers: Mapping[str, Any], entry: str, new: dict[str, Any]) -> dict[str, Any]:
    """The new values of `totals` or `inverse`, in the old ones' storage where they fit and nobody else uses it.

    What lives from step to step then stays where it is, and what is freed leaves no holes between: the heap of a
    classifier 784-1000-500-250-10 grew to 94 MiB without this, of which 49 were in use between steps.
    """
    old, other = (numbers.get(key, {}) for key in (entry, "inverse" if entry == "totals" else "totals"))
    used = {t.data_ptr() for t in other.values() if isinstance(t, Tensor)}  # EKFAC's inverse lies in its totals' basis
    return {key: written(old.get(key), value, used) for key, value in new.items()}


def written(old: Any, new: Any, used: set[int]) -> Any:
    """`new`, in old's storage if it is a tensor of old's kind; new itself otherwise."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or {old.data_ptr(), new.data_ptr()} & used:
        return new
    alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return old.copy_(new) if alike else new


def norm(tensor: Tensor) -> Tensor:
    """Root of the sum of squares, a scalar tensor."""
    return torch.linalg.vector_norm(tensor)


def dense(p: Tensor) -> Tensor:
    """p.grad, dense, at least in float32."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def penalised(gradient: Tensor, p: Tensor, l2: float) -> Tensor:
    """The gradient of loss + l2 / 2 |theta|^2."""
    return torch.add(gradient, p, alpha=l2) if l2 else gradient


def running_mean(state: Mapping[str, Any], gradient: Tensor, decay: float) -> tuple[Tensor, dict[str, Any]]:
    """The gradient's running mean, corrected for its start, and what to keep of it in the parameter's state."""
    if decay == 0:
        return gradient, {}
    count = state.get("count", 0) + 1
    mean = state["mean"].lerp(gradient, 1 - decay) if "mean" in state else (1 - decay) * gradient
    return mean / (1 - decay**count), {"count": count, "mean": mean}


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner product of two tensors, without a copy where they lie in one piece."""
    return torch.dot(first.reshape(-1).to(second.dtype), second.reshape(-1))


def single(name: str, p: Tensor) -> Layout:
    """The layout of a parameter without a layer."""
    return Layout(name, None, 1, 1, p.numel(), tuple(p.shape))
