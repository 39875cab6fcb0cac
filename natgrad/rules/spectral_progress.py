"""Spectral steps in shares of each layer, whose lengths follow the progress that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from natgrad.ground.typed_torch import as_tensor_like, measure_norm, split_tensor, torch_linalg
from natgrad.rules.base import BlockPoint, BlockStack, Objective, Rule
from natgrad.rules.quadratic import Memory, Quadratic, Step
from natgrad.rules.spectral_descent import apply_root, polar, table_rows, whitener


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
    Kronecker product (norms, biases alone) move along n, by `vectors` in root mean square.

    Args:
        share: A layer's move, of its own size, at learning rate 1.
        floor: Least size of a layer per root of an output, for zero starts.
        damping: Added to A, in units of its mean eigenvalue.
        ahead: Weight of today's gradient in n besides its part in m.
        vectors: Root mean square of the move of entries without a Kronecker product.
        progress: Largest change of the logarithm of a length in one step; 0 for fixed lengths.
        fades: Steps after which progress counts half.
        few: Examples of a step with which a length is at most its usual one.
        kl_share: Most change that a step promises, as a share of a loss that is at least 0; math.inf for no bound.
        warm: Steps over which lengths grow to their whole size.
        falls_after: Steps from which on the learning rate falls by itself; math.inf for never.

    Raises:
        ValueError: Unless share, floor, damping, vectors, fades, few, kl_share and falls_after are > 0, progress >= 0,
            warm >= 1 and 0 <= ahead <= 1.

    Reference:
        Jordan et al. 2024 (Muon) is R = I with fixed lengths. Loizou et al. 2021: stochastic Polyak steps.
    """

    share: float = 0.075
    floor: float = 0.05
    damping: float = 0.3
    ahead: float = 0.2
    vectors: float = 0.003
    progress: float = 0.2
    fades: float = 20.0
    few: float = 32.0
    kl_share: float = 0.3
    warm: int = 5
    falls_after: float = math.inf

    needs_form = False

    def __post_init__(self) -> None:
        for name in ("share", "floor", "damping", "vectors", "fades", "few", "kl_share", "falls_after"):
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
        ((directions, memory),) = self.shape_stacks([BlockStack.of([block])])
        return directions[0], {name: tensor[0] for name, tensor in memory.items()}

    def shape_stacks(self, stacks: Sequence[BlockStack]) -> Sequence[tuple[Tensor, Mapping[str, Tensor]]]:
        if not stacks:
            return []
        ahead = [stack.mean.lerp(stack.gradient, self.ahead) for stack in stacks]
        directions = [
            stack.memory["direction"].to(n) if "again" in stack.memory else self._direct(stack, n)
            for stack, n in zip(stacks, ahead, strict=True)
        ]
        warm, moves = min(1.0, (stacks[0].steps + 1) / self.warm), list[tuple[Tensor, Mapping[str, Tensor]]]()
        scales = self._follow(stacks, ahead[0]) if self.progress else ()
        for i, (stack, n, d) in enumerate(zip(stacks, ahead, directions, strict=True)):
            factor, sizes = self._measure_lengths(stack, d)
            length, memory = warm * factor, dict[str, Tensor]()
            if sizes is not None:
                length, memory = length * sizes, {"size": sizes}
            if scales:
                now, scale, square = (parts[i] for parts in scales)
                slope = inner_products(n, d)
                if "again" in stack.memory:  # shorter by as much as the slope along it has fallen
                    left, slope = slope, stack.memory["slope"].to(slope)
                    length = length * torch.where(slope > 0, (left / slope).clamp(0, 1), 1.0).view(-1, 1, 1, 1)
                elif "cut" in stack.prepared and min(n.shape[-2:]) >= WIDE:
                    memory["again"] = slope  # dearer than its gradient
                memory |= {"direction": d, "slope": slope, "square": square, "scale": scale}
                length = length * now.to(d).view(-1, 1, 1, 1)
            moves.append((length * d, memory))
        return moves

    def _follow(self, stacks: Sequence[BlockStack], home: Tensor) -> tuple[Sequence[Tensor], ...]:
        """Today's scales of the blocks, those that are kept, and running mean squares of progress: (k,) by stack."""

        def gather(name: str, start: float) -> Tensor:
            parts = [
                stack.memory[name].to(home) if name in stack.memory else home.new_full((len(stack.mean),), start)
                for stack in stacks
            ]
            return torch.cat(parts)

        # today's slope along the last move over the slope that it had then
        now = [
            inner_products(stack.gradient, stack.memory["direction"].to(stack.mean)).to(home)
            if "direction" in stack.memory
            else home.new_zeros(len(stack.mean))
            for stack in stacks
        ]
        slope, past = gather("slope", 0.0), gather("square", 0.0)
        ratio = torch.where(slope > 0, (torch.cat(now) / slope).clamp(-FARTHEST, FARTHEST), 0.0)
        square = ratio.square()
        square = torch.where(past > 0, past.lerp(square, PROGRESS_FORGETS), square)
        sure = (ratio / square.sqrt().clamp(min=TINY)).clamp(-1, 1)
        most = ((stacks[0].examples or self.few) / self.few) ** 0.5
        growth = self.progress / (1 + ((stacks[0].steps + 1) / self.fades) ** 2)
        before = gather("scale", min(most, max(1.0, most / 2)) if math.isfinite(most) else 1.0)
        # one batch of a few examples, as at the end of an epoch, makes its own step shorter and no other
        scale = torch.minimum(before * torch.exp(growth * sure), before.clamp(min=most))
        counts = [len(stack.mean) for stack in stacks]
        return tuple(split_tensor(part, counts) for part in (scale.clamp(max=most), scale, square))

    def _direct(self, stack: BlockStack, n: Tensor) -> Tensor:
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

    def _measure_lengths(self, stack: BlockStack, d: Tensor) -> tuple[Tensor | float, Tensor | None]:
        """The blocks' usual lengths in units of their directions and sizes, and these where they are needed again."""
        alike = len(set(stack.units)) == 1
        unit = stack.units[0] if alike else as_tensor_like(stack.units, d).view(-1, 1, 1, 1)
        if (rows := table_rows(stack.shape)) is not None:
            values = stack.stack_values().reshape(len(d), 1, rows, -1)
            columns = values.shape[-1]
            length = self.share * (1 + self.damping) ** 0.5 / min(rows, columns) ** 0.5
            return length * self._size_of(values, columns, unit), None
        if "tokens" in stack.prepared:
            return self.share / 3 * unit, None
        if "inputs" not in stack.prepared:
            return self.vectors * unit, None
        if stack.renewed or "size" not in stack.memory:
            values, roots = align_roots(stack.stack_values(), {n: t.to(d) for n, t in stack.prepared.items()})
            size = self._size_of(unwhiten(values, roots).view(d.shape), d.shape[-2], unit)
        else:
            size = stack.memory["size"].to(d)
        return self.share / min(d.shape[-2:]) ** 0.5, size

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
        change, most = model.slope(proposal).abs(), self.kl_share * max(float(model.loss), 0.0)
        rate = torch.where(change > (math.inf if math.isnan(most) else most), most / change, 1.0)
        model.cuts["kl_share"] = partial(torch.reciprocal, rate)
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


def inner_products(first: Tensor, second: Tensor) -> Tensor:
    """The inner products of k pairs of matrices, (k, groups, p, q) -> (k,)."""
    return (first * second).sum((1, 2, 3))


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
