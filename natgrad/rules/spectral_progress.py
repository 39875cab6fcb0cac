"""Spectral steps in shares of each layer, whose lengths follow the progress that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.ground.constants import (
    DIRECTIONS_PER_ROW,
    FARTHEST,
    FRESH,
    INPUTS_PER_DIRECTION,
    ITERATIONS,
    PROGRESS_FORGETS,
    TINY,
    WIDE,
)
from natgrad.ground.linalg import invert_factor_or_nan, symmetrise
from natgrad.ground.typed_torch import as_tensor_like, measure_norm, read_tensors, torch_linalg
from natgrad.rules.base import BlockPoint, BlockStack, Objective, Rule, ShapedStack
from natgrad.rules.quadratic import Memory, Quadratic, Step, inner_products
from natgrad.rules.spectral_descent import apply_root, polar, table_rows, whitener


class LengthMemory(NamedTuple):
    """What is remembered of a block's length."""

    slope: float  # n . d of the last step, the slope along it that was promised
    square: float  # running mean square of the progress r; 0 before the first
    scale: float  # exp of what the logarithm of the length has grown by


@dataclass(frozen=True)
class StackDirection:
    """The directions of blocks that are alike, and what sets their lengths."""

    directions: Tensor  # d, (k, groups, p, q)
    usual: Sequence[float]  # the blocks' usual lengths, in units of directions and sizes
    sizes: Tensor | None  # of the blocks, (k, groups, 1, 1); None: 1
    repeated: bool  # True if they are the last step's
    again: bool  # True if the next step takes them too
    asked: Sequence[Tensor]  # what is to be read of them


@dataclass(frozen=True)
class SpectralProgress(Rule):
    """d = -s polar(n R) R for each layer, R = (A / mean(A) + damping I)^(-1/2) of its inputs' second moment A.

    polar(X) = U V^T for X = U S V^T: all directions of a layer move alike, so that neither noise nor a few steep
    directions take the whole step. n = (1 - ahead) m + ahead g, of the running mean m and today's gradient g. A step
    moves what a layer puts out over whitened inputs by `share` of it: |d R^-1| = share * max(|theta R^-1|, floor
    sqrt(outputs)) in Frobenius norm. Three things change that length. (1) Progress: r = <g, d'> / <n', d'> of the last
    step d' and the mean n' that it was made of is 1 where the slope along d' is still what it was, and below 0 where
    the step went past the lowest point. The logarithm of the layer's length grows by progress * clip(r / rms r, -1, 1)
    / (1 + (k / fades)^2) at step k, and it is at most sqrt(examples / few) of its usual one, since noise falls by that;
    it starts at the usual one, or at half of the most where that is longer. (2) The loss: together the steps change a
    loss that is at least 0 by no more than `kl_share` of it to first order, up or down, as Polyak's step lets it fall.
    (3) Rows: inputs of little variance are scaled up only as far as the T rows of a step tell them from noise: inputs /
    T takes the place of the damping where that is more, and R is longer then, so that inputs of mean size move as
    before.

    Where progress is followed, a layer of 256 outputs and inputs or more that sees fewer rows than inputs takes each
    direction twice, the second time by min(1, <n, d'> / <n', d'>) of its length: it costs more than the gradient there.

    An embedding moves along R n, by `share` / 3 of a unit in the root mean square of its outputs. A table that no layer
    reads (positions or queries that are parameters of the model) moves along polar(n). Other parameters without a
    Kronecker product (norms, biases alone) move along n, by `share` of `floor` in root mean square.

    Args:
        share: A layer's move, of its own size, at learning rate 1.
        floor: Least size of a layer per root of an output, for zero starts.
        damping: Added to A, in units of its mean eigenvalue.
        ahead: Weight of today's gradient in n besides its part in m.
        progress: Largest change of the logarithm of a length in one step; 0 for fixed lengths.
        fades: Steps after which progress counts half.
        few: Examples of a step with which a length is at most its usual one.
        kl_share: Most change that a step promises, as a share of a loss that is at least 0; math.inf for no bound.
        warm: Steps over which lengths grow to their whole size.
        falls_after: Steps from which on the learning rate falls by itself; math.inf for never.

    Raises:
        ValueError: Unless share, floor, damping, fades, few, kl_share and falls_after are > 0, progress >= 0,
            warm >= 1 and 0 <= ahead <= 1.

    Reference:
        Jordan et al. 2024 (Muon) is R = I with fixed lengths. Loizou et al. 2021: stochastic Polyak steps.
    """

    share: float = 0.075
    floor: float = 0.05
    damping: float = 0.3
    ahead: float = 0.2
    progress: float = 0.2
    fades: float = 20.0
    few: float = 32.0
    kl_share: float = 0.3
    warm: int = 5
    falls_after: float = math.inf

    needs_form = False

    def __post_init__(self) -> None:
        for name in ("share", "floor", "damping", "fades", "few", "kl_share", "falls_after"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number > 0")
        if not self.progress >= 0:
            raise ValueError(f"progress is {self.progress}, expected a number >= 0; 0 for fixed lengths")
        if not 0 <= self.ahead <= 1:
            raise ValueError(f"ahead is {self.ahead}, expected a weight in [0, 1]")
        if self.warm < 1:
            raise ValueError(f"warm is {self.warm}, expected a number of steps >= 1")

    def rate_after(self, steps: int) -> float:
        return min(1.0, math.sqrt(self.falls_after / max(steps, 1)))

    def prepare_inputs(self, moment: Tensor, tokens: bool, positions: float) -> dict[str, Tensor]:
        positions = max(positions, 1.0)
        least = self.damping if tokens else max(self.damping, moment.shape[-1] / positions)
        inputs = moment.shape[-1]
        if not tokens and moment.dim() > 1 and WIDE <= inputs > positions:
            rank = min(math.ceil(DIRECTIONS_PER_ROW * positions), inputs // INPUTS_PER_DIRECTION)
            roots = whitener_of_few(moment, least, rank)
        else:
            roots = whitener(moment, tokens, least)
        longer = ((1 + least) / (1 + self.damping)) ** 0.5  # directions of mean size move as before
        scaled = "root" if "root" in roots else next(iter(roots))
        return roots | {scaled: longer * roots[scaled]}

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        (shaped,) = self.shape_stacks([BlockStack.of([block])])
        assert isinstance(shaped.memory, Mapping)
        return shaped.lengths[0] * shaped.directions[0], {name: tensor[0] for name, tensor in shaped.memory.items()}

    def shape_stacks(self, stacks: Sequence[BlockStack]) -> Sequence[ShapedStack]:
        ways = [self._direct(stack) for stack in stacks]
        numbers = iter(read_tensors([tensor for way in ways for tensor in way.asked]))
        return [
            self._set_lengths(stack, way, *(next(numbers) for _ in way.asked))
            for stack, way in zip(stacks, ways, strict=True)
        ]

    def _direct(self, stack: BlockStack) -> StackDirection:
        """The directions of a stack, and what their lengths ask for."""
        n, memory = stack.mean.lerp(stack.gradient, self.ahead), stack.memory
        last = memory["direction"].to(n) if "direction" in memory else None
        repeated = last is not None and "again" in memory
        d = last if repeated and last is not None else self._turn(stack, n)
        usual, sizes = self._measure_lengths(stack, d)
        pairs = [(stack.gradient, d), (n, d), (stack.gradient, d if last is None else last)]
        known = [] if last is None else [memory[name] for name in LengthMemory._fields]
        # the second time a direction is shorter: it is dearer than its gradient
        again = self.progress > 0 and not repeated and "cut" in stack.prepared and min(n.shape[-2:]) >= WIDE
        products = inner_products([(x.flatten(0, 1), y.flatten(0, 1)) for x, y in pairs])
        asked = [products, *([] if sizes is None else [sizes]), *known]
        return StackDirection(d, usual, sizes, repeated, again, asked)

    def _set_lengths(
        self, stack: BlockStack, way: StackDirection, table: Sequence[float], *rest: Sequence[float]
    ) -> ShapedStack:
        """The steps of a stack, whose lengths are arithmetic on numbers.

        table: g . d, n . d and g . d' of each group of each block, for the last d'. rest: the sizes, where they are
        known, and the `LengthMemory` of the blocks, where they have one.
        """
        d, warm, most = way.directions, min(1.0, (stack.steps + 1) / self.warm), self._bound_scale(stack.examples)
        groups = d.shape[1]
        sizes, past = (rest[0], rest[1:]) if way.sizes is not None else ([1.0] * (len(d) * groups), rest)
        lengths, slopes, progress = list[float](), list[float](), list[LengthMemory]()
        for i, usual in enumerate(way.usual):
            length = warm * usual
            own = range(groups * i, groups * (i + 1))
            slope, now = (sum(table[3 * j + place] for j in own) for place in (1, 2))
            if self.progress:
                before = LengthMemory(*(numbers[i] for numbers in past)) if past else None
                after, scale = self._follow(before, slope, now, stack.steps, most)
                if way.repeated and before is not None:  # shorter by as much as the slope along it has fallen
                    length *= min(max(slope / before.slope, 0.0), 1.0) if before.slope > 0 else 1.0
                    after = after._replace(slope=before.slope)
                length *= scale
                progress.append(after)
            slopes.append(length * sum(sizes[j] * table[3 * j] for j in own))
            lengths.append(length * sizes[groups * i] if groups == 1 else length)
        memory = {} if way.sizes is None else {"size": way.sizes}
        if progress:
            parts = zip(LengthMemory._fields, as_tensor_like(progress, d).unbind(1), strict=True)
            memory |= {"direction": d, **dict(parts)}
            memory |= {"again": memory["slope"]} if way.again else {}
        if groups > 1 and way.sizes is not None:
            d = d * way.sizes
        return ShapedStack(d, memory, lengths, slopes)

    def _bound_scale(self, examples: float) -> float:
        """How many times its usual length a block's may be."""
        return math.sqrt((examples or self.few) / self.few)

    def _follow(
        self, before: LengthMemory | None, slope: float, now: float, steps: int, most: float
    ) -> tuple[LengthMemory, float]:
        """A block's progress with this step, and the scale of its length today.

        slope: n . d. now: today's slope along the last direction.
        """
        if before is None:
            before, now = LengthMemory(0.0, 0.0, min(most, max(1.0, most / 2)) if math.isfinite(most) else 1.0), 0.0
        ratio = min(max(now / before.slope, -FARTHEST), FARTHEST) if before.slope > 0 else 0.0
        square = before.square
        square = square + PROGRESS_FORGETS * (ratio * ratio - square) if square > 0 else ratio * ratio
        sure = min(max(ratio / max(math.sqrt(square), TINY), -1.0), 1.0)
        growth = self.progress / (1 + ((steps + 1) / self.fades) ** 2)
        # one batch of a few examples, as at the end of an epoch, makes its own step shorter and no other
        scale = min(before.scale * math.exp(growth * sure), max(before.scale, most))
        return LengthMemory(slope, square, scale), min(scale, most)

    def _turn(self, stack: BlockStack, n: Tensor) -> Tensor:
        """The directions of blocks that are alike, (k, groups, p, q)."""
        prepared = {name: tensor.to(n) for name, tensor in stack.prepared.items()}
        if (rows := table_rows(stack.shape)) is not None:
            tables = n.reshape(len(n), rows, -1)
            turned = polar(tables if len(n) > 1 else tables[0], ITERATIONS).reshape(n.shape)
            return torch.where(n == 0, n, turned)  # what a mask cuts has no gradient, and stays
        if "tokens" in prepared:
            return self._scale_rows(n, prepared["tokens"])
        if "inputs" in prepared:
            matrices, roots = align_roots(n, prepared)
            return whiten(polar(whiten(matrices, roots), ITERATIONS), roots, last=True).reshape(n.shape)
        return self._scale_entries(n)

    def _measure_lengths(self, stack: BlockStack, d: Tensor) -> tuple[list[float], Tensor | None]:
        """The blocks' usual lengths in units of their directions and sizes, and these, (k, groups, 1, 1); None: 1."""
        units = stack.units
        if "tokens" in stack.prepared:
            return [self.share / 3 * unit for unit in units], None
        if (rows := table_rows(stack.shape)) is None and "inputs" not in stack.prepared:
            return [self.share * self.floor * unit for unit in units], None
        unit = units[0] if len(set(units)) == 1 else as_tensor_like(units, d).view(-1, 1, 1, 1)
        if rows is not None:
            values = stack.stack_values().reshape(len(d), 1, rows, -1)
            columns = values.shape[-1]
            length = self.share * (1 + self.damping) ** 0.5 / min(rows, columns) ** 0.5
            return [length] * len(d), self._size_of(values, columns, unit)
        if stack.renewed or "size" not in stack.memory:
            values, roots = align_roots(stack.stack_values(), {n: t.to(d) for n, t in stack.prepared.items()})
            size = self._size_of(unwhiten(values, roots).view(d.shape), d.shape[-2], unit)
        else:
            size = stack.memory["size"].to(d)
        return [self.share / min(d.shape[-2:]) ** 0.5] * len(d), size

    def _size_of(self, values: Tensor, outputs: int, unit: Tensor | float) -> Tensor:
        """max(|theta|, floor sqrt(outputs)) of each group, shape (k, groups, 1, 1)."""
        return measure_norm(values, (-2, -1), keepdim=True).clamp(min=least_size(self.floor, outputs, unit))

    def _scale_rows(self, n: Tensor, root: Tensor) -> Tensor:
        """R n for tables of tokens, whose outputs change by 1 in root mean square over the tokens.

        One token reads one row and mixes none, so that no combination of rows is a direction that could take the whole
        step: a polar factor would share it out over the vocabulary.
        """
        root = root.view(len(n), 1, -1, 1)
        step = root * n
        often = (root.square().reciprocal() - self.damping).clamp(min=0)  # frequencies over their mean
        mean = (step.square().mean(-1, keepdim=True) * often).sum(-2, keepdim=True)
        size = (mean / often.sum(-2, keepdim=True).clamp(min=TINY)).sqrt()
        return torch.where(size > 0, step / size.clamp(min=TINY), 0.0)

    def _scale_entries(self, n: Tensor) -> Tensor:
        """n at a root mean square of 1, for each of several blocks."""
        size = n.square().mean(tuple(range(1, n.dim())), keepdim=True).sqrt()
        return torch.where(size > 0, n / size.clamp(min=TINY), 0.0)

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        proposal = model.proposal
        if not model.run.bounded or math.isinf(self.kl_share):
            return proposal, memory
        # the mean of other batches may lead uphill on today's, where a loss near 0 would set no length
        slope = proposal.known_slope()
        change = abs(float(model.slope(proposal) if slope is None else slope))
        most = self.kl_share * max(float(model.loss), 0.0)
        rate = most / change if change > most else 1.0  # where the loss is no number, nor is this a bound
        model.cuts["kl_share"] = 1 / rate if rate else math.inf
        return proposal.scale_by(rate), memory


def least_size(floor: float, outputs: int, unit: Tensor | float) -> Any:
    """What a layer counts as at least: `floor` per root of an output, and half of what its outputs must grow by.

    unit: `BlockPoint.unit`.
    """
    return (floor + FRESH * (unit - 1)) * outputs**0.5


def whitener_of_few(moment: Tensor, damping: float, rank: int) -> dict[str, Tensor]:
    """W = s (I - V C V^T), W^T W = (A / mean A + damping I)^-1 on the largest directions V of A, C triangular.

    The others count as equal, of their mean size: with fewer rows T than inputs the damping n / T is at least 1, and
    few of them stand out (on MNIST the 65th of 785 directions has .95). A is (..., n, n) and V (..., n, rank), by two
    steps of subspace iteration from the columns of the largest entries, a third of the time of a Cholesky factor for
    n = 785.
    """
    sizes, identity, inputs = moment.diagonal(dim1=-2, dim2=-1), torch.eye(rank).to(moment), moment.shape[-1]
    basis = torch_linalg.qr(moment.take_along_dim(sizes.topk(rank).indices[..., None], -2).mT).Q
    basis = torch_linalg.qr(moment @ basis).Q
    inner, mean = symmetrise(basis.mT @ (moment @ basis)), sizes.mean(-1)[..., None, None]
    inner = torch.where(mean > 0, inner / torch.where(mean > 0, mean, 1.0), identity)
    trace = inner.diagonal(dim1=-2, dim2=-1).sum(-1)
    rest = ((inputs - trace) / (inputs - rank)).clamp(min=0) + damping
    cut = identity - invert_factor_or_nan(inner + damping * identity) * rest.sqrt()[..., None, None]
    return {"inputs": basis, "cut": cut, "root": rest.rsqrt()}


def align_roots(matrices: Tensor, prepared: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """X (k, groups, p, q) and what `prepare_inputs` made of the blocks, with as few leading axes as they need.

    Roots are (q, q), or (q,) of a diagonal, with the same leading axes as X, which is (p, q) for a single matrix.
    """
    roots = dict(prepared)
    inputs = roots["inputs"]
    if matrices.shape[1] > 1:
        shared = inputs.dim() == 3  # by the groups of a block
        return matrices, roots | ({"inputs": inputs.unsqueeze(1)} if shared else {})
    if inputs.dim() == 4:
        roots["inputs"] = inputs.squeeze(1)
    matrices = matrices.squeeze(1)
    if len(matrices) > 1:
        return matrices, roots
    return matrices.squeeze(0), {name: root.squeeze(0) for name, root in roots.items()}


def spread(values: Tensor, matrices: Tensor, axes: int) -> Tensor:
    """Values of each matrix, with `axes` axes of their own besides the leading ones, to be multiplied with matrices."""
    lead = values.dim() - axes
    ones = (1,) * (matrices.dim() - values.dim())
    return values.view(values.shape[:lead] + ones + values.shape[lead:])


def whiten(matrices: Tensor, roots: Mapping[str, Tensor], last: bool = False) -> Tensor:
    """X W^T, or X W where it comes last, for X (..., p, q) and what `align_roots` gives."""
    inputs = roots["inputs"]
    if "cut" in roots:
        cut = spread(roots["cut"], matrices, 2)
        part = matrices @ inputs @ (cut if last else cut.mT)
        return spread(roots["root"], matrices, 0) * (matrices - part @ inputs.mT)
    if inputs.dim() < matrices.dim():
        return matrices * spread(inputs, matrices, 1)
    return apply_root(matrices, inputs, transposed=not last)


def unwhiten(matrices: Tensor, roots: Mapping[str, Tensor]) -> Tensor:
    """theta W^-1 for theta (..., p, q), likewise."""
    inputs = roots["inputs"]
    if "cut" in roots:
        part, cut = matrices @ inputs, spread(roots["cut"], matrices, 2)
        solution = torch_linalg.solve_triangular(torch.eye(cut.shape[-1]).to(cut) - cut, part, upper=False, left=False)
        return (matrices + (solution - part) @ inputs.mT) / spread(roots["root"], matrices, 0)
    if inputs.dim() < matrices.dim():
        return matrices / spread(inputs, matrices, 1)
    return torch_linalg.solve_triangular(inputs, matrices, upper=False, left=False)
