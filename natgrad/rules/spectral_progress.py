"""Spectral steps in shares of each layer, whose lengths follow the progress that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh, symmetrise
from natgrad.ground.typed_torch import as_tensor_like, measure_norm, torch_linalg
from natgrad.operators import Operator
from natgrad.rules.base import Objective, Rule
from natgrad.rules.block_point import BlockPoint
from natgrad.rules.parts import Memory, inner_product
from natgrad.rules.quadratic import Quadratic, Step
from natgrad.rules.spectral_descent import (
    apply_root,
    find_input_moment,
    polar,
    table_rows,
    whiten_inputs,
    whitener,
)

FRESH = 0.5  # size of a fresh layer per root of an output
FORGETS = 0.2  # of the mean square of a layer's progress, per step
FARTHEST = 1e6  # times its slope before that a slope after a step counts: squares stay finite
FEWER, TOP = 8, 2  # inputs per row from which on a whitener has few directions, and directions per row
LEAST = 1e-30  # stands for zero where something is divided by it
ITERATIONS = 5  # of the polar factor: singular values between .87 and 1.13


@dataclass(frozen=True)
class SpectralProgress(Rule):
    """d = -s polar(n R) R for each layer, R R^T = (A / mean A + damping I)^-1 of its inputs' second moment A.

    polar(X) = U V^T for X = U S V^T: all directions of a layer move alike, so that neither noise nor a few steep
    directions take the whole step. n = (1 - ahead) m + ahead g, of the running mean m and today's gradient g. A step
    moves what a layer puts out over whitened inputs by `share` of it: |d R^-1| = share * max(|theta R^-1|, floor
    sqrt(outputs)) in Frobenius norm. Three things change that length. (1) Progress: r = <g, d'> / <n', d'> of the last
    step d' and the mean n' that it was made of is 1 where the slope along d' is still what it was, and below 0 where
    the step went past the lowest point. The logarithm of the layer's length grows by progress * clip(r / rms r, -1, 1)
    / (1 + (k / fades)^2) at step k; to at most sqrt(examples / few), since noise falls by that. (2) The loss: together
    the steps promise no more than `kl_share` of a loss that is at least 0, as Polyak's step does. (3) Rows: inputs of
    little variance are scaled up only as far as the T rows of a step tell them from noise: inputs / T takes the place
    of the damping where that is more, and R is longer then, so that inputs of mean size move as before.

    An embedding moves along R n, by `share` / 3 of a unit in the root mean square of its outputs. A table that no layer
    reads (positions or queries that are parameters of the model) moves along polar(n). Other parameters without a
    Kronecker product (norms, biases alone) move along n / (F + damping mean F)^(1/2), F the metric's diagonal, by
    `vectors` in root mean square.

    Args:
        share: A layer's move, of its own size, at learning rate 1.
        floor: Least size of a layer per root of an output, for zero starts.
        damping: Added to A, in units of its mean eigenvalue.
        ahead: Weight of today's gradient in n besides its part in m.
        vectors: Root mean square of the move of entries without a Kronecker product.
        progress: Largest change of the logarithm of a length in one step; 0 for fixed lengths.
        fades: Steps after which progress counts half.
        few: Examples of a step up to which lengths do not grow.
        kl_share: Most decrease that a step promises, as a share of a loss that is at least 0; math.inf for no bound.
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
    few: float = 64.0
    kl_share: float = 0.3
    warm: int = 5
    falls_after: float = math.inf

    needs_inverse = False
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

    def prepare(self, metric: Operator, level: float) -> dict[str, Tensor]:
        return self.prepare_for(metric, level, math.inf)

    def prepare_for(self, metric: Operator, level: float, positions: float) -> dict[str, Tensor]:
        found = find_input_moment(metric)
        if found is None:
            return {"squares": metric.diagonal().clamp(min=0)}
        (moment, tokens), positions = found, max(positions, 1.0)
        least = self.damping if tokens else max(self.damping, moment.shape[-1] / positions)
        if not tokens and moment.dim() == 2 and FEWER * positions <= len(moment):
            return whitener_of_few(moment, least, math.ceil(TOP * positions), (1 + self.damping) ** -0.5)
        longer = ((1 + least) / (1 + self.damping)) ** 0.5  # directions of mean size move as before
        return {name: longer * root for name, root in whitener(moment, tokens, least).items()}

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        return self.shape_blocks([block])[0]

    def shape_blocks(self, blocks: Sequence[BlockPoint]) -> list[tuple[Tensor, dict[str, Tensor]]]:
        if not blocks:
            return []
        gradients = [block.gradient().to(block.mean) for block in blocks]
        ahead = [block.mean.lerp(g, self.ahead) for block, g in zip(blocks, gradients, strict=True)]
        found = self._directions(blocks, ahead)
        warm, shaped = min(1.0, (blocks[0].steps + 1) / self.warm), list[tuple[Tensor, dict[str, Tensor]]]()
        lengths = [self._length(block, unit) for block, unit in zip(blocks, found, strict=True)]
        if not self.progress:
            return [(d * (warm * length), dict(size)) for d, (length, size) in zip(found, lengths, strict=True)]
        scales, squares = self._follow(blocks, gradients)
        slopes = [inner_product(n, d) for n, d in zip(ahead, found, strict=True)]
        for i, (length, size) in enumerate(lengths):
            memory = {"direction": found[i], "slope": slopes[i], "square": squares[i], "scale": scales[i], **size}
            shaped.append((found[i] * (length * (warm * scales[i])), memory))
        return shaped

    def _follow(self, blocks: Sequence[BlockPoint], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The blocks' scales by their progress, and its running mean squares; of all blocks at once."""
        home, memories = gradients[0], [block.memory for block in blocks]

        def gather(name: str, start: float) -> Tensor:
            fresh = home.new_full((), start)
            return torch.stack([as_tensor_like(memory.get(name, fresh), home) for memory in memories])

        now = [
            inner_product(g, memory["direction"]) if "direction" in memory else g.new_zeros(())
            for g, memory in zip(gradients, memories, strict=True)
        ]
        slope, past = gather("slope", 0.0), gather("square", 0.0)
        ratio = torch.stack([as_tensor_like(one, home) for one in now]) / slope
        ratio = torch.where(slope > 0, ratio.clamp(-FARTHEST, FARTHEST), 0.0)
        square = ratio.square()
        square = torch.where(past > 0, past.lerp(square, FORGETS), square)
        sure = (ratio / square.sqrt().clamp(min=LEAST)).clamp(-1, 1)
        most = max(1.0, (blocks[0].examples / self.few) ** 0.5)
        growth = self.progress / (1 + ((blocks[0].steps + 1) / self.fades) ** 2)
        scale = (gather("scale", 1.0) * torch.exp(growth * sure)).clamp(max=most)

        def give_back(many: Tensor) -> list[Tensor]:
            return [as_tensor_like(one, g) for one, g in zip(many.unbind(), gradients, strict=True)]

        return give_back(scale), give_back(square)

    def _directions(self, blocks: Sequence[BlockPoint], ahead: Sequence[Tensor]) -> list[Tensor]:
        """The blocks' directions; those whose matrices are alike as one stack."""
        stacks: dict[Any, list[int]] = {}
        matrices, found = list[Tensor](ahead), list[Tensor](ahead)
        for i, block in enumerate(blocks):
            n, prepared = ahead[i], block.prepared
            if (rows := table_rows(block.shape)) is not None:
                kind, matrices[i] = "polar", n.reshape(rows, -1)
            elif "tokens" in prepared:
                kind = "rows"
            elif "inputs" in prepared:
                kind, matrices[i] = "polar", whiten(n, prepared)
            else:
                kind = "entries"
            key = kind, matrices[i].shape, n.dtype, n.device, "squares" in prepared
            stacks.setdefault(key, []).append(i)
        for (kind, *_), places in stacks.items():
            if kind == "rows":
                for i in places:
                    found[i] = self._scale_rows(ahead[i], blocks[i].prepared["tokens"].to(ahead[i]))
                continue
            stack = torch.stack([matrices[i] for i in places]) if len(places) > 1 else matrices[places[0]].unsqueeze(0)
            if kind == "entries":
                squares = [blocks[i].prepared["squares"] for i in places if "squares" in blocks[i].prepared]
                made = self._scale_entries(stack, torch.stack(squares).view(stack.shape).to(stack) if squares else None)
            else:
                made = polar(stack if len(places) > 1 else stack[0], ITERATIONS).reshape(stack.shape)
            for i, one in zip(places, made.unbind(), strict=True):
                prepared = blocks[i].prepared
                whole = whiten(one, prepared, last=True) if kind == "polar" and "inputs" in prepared else one
                found[i] = whole.reshape(ahead[i].shape)
        return found

    def _length(self, block: BlockPoint, found: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """A block's usual length in units of its direction, and its size where that is needed again."""
        if (rows := table_rows(block.shape)) is not None:
            columns = found.numel() // rows
            size = self._size_of(block.values().to(found).reshape(1, rows, columns), columns, block.unit).view(())
            return self.share * (1 + self.damping) ** 0.5 * size / min(rows, columns) ** 0.5, {}
        if "tokens" in block.prepared:
            return self.share / 3 * block.unit, {}
        if "inputs" not in block.prepared:
            return self.vectors * block.unit, {}
        size = block.memory.get("size")
        if block.renewed or size is None:
            values = unwhiten(block.values().to(found), block.prepared)
            size = self._size_of(values, found.shape[-2], block.unit)
        return size * (self.share / min(found.shape[-2:]) ** 0.5), {"size": size}

    def _size_of(self, values: Tensor, outputs: int, unit: float) -> Tensor:
        """max(|theta|, floor sqrt(outputs)) of each group, shape (groups, 1, 1)."""
        return measure_norm(values, (-2, -1), keepdim=True).clamp(min=least_size(self.floor, outputs, unit))

    def _scale_rows(self, n: Tensor, root: Tensor) -> Tensor:
        """R n for a table of tokens, whose outputs change by 1 in root mean square over the tokens.

        One token reads one row and mixes none, so that no combination of rows is a direction that could take the whole
        step: a polar factor would share it out over the vocabulary.
        """
        step = root.unsqueeze(-1) * n
        often = (root.square().reciprocal() - self.damping).clamp(min=0)  # frequencies over their mean
        size = (step.square().mean(-1) @ often / often.sum().clamp(min=LEAST)).sqrt()
        return torch.where(size > 0, step / size.clamp(min=LEAST), 0.0)

    def _scale_entries(self, n: Tensor, squares: Tensor | None) -> Tensor:
        """n / (F + damping mean F)^(1/2) at a root mean square of 1, for a stack of blocks."""
        entries = tuple(range(1, n.dim()))
        if squares is not None:
            n = n / (squares + self.damping * squares.mean(entries, keepdim=True)).clamp(min=LEAST).sqrt()
        size = n.square().mean(entries, keepdim=True).sqrt()
        return torch.where(size > 0, n / size.clamp(min=LEAST), 0.0)

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        proposal = model.proposal
        if not model.bounded or math.isinf(self.kl_share):
            return proposal, memory
        promise = -model.slope(proposal)
        loss = as_tensor_like(model.loss, promise).clamp(min=0)
        rate = torch.where(promise > 0, (self.kl_share * loss / promise.clamp(min=LEAST)).clamp(max=1), 1.0)
        rate = torch.where(loss.isnan(), 1.0, rate)
        model.cuts["kl_share"] = partial(torch.reciprocal, rate)
        return proposal.scale_by(rate), memory


def least_size(floor: float, outputs: int, unit: float) -> float:
    """What a layer counts as at least: `floor` per root of an output, and half of what its outputs must grow by.

    unit: `BlockPoint.unit`.
    """
    return (floor + FRESH * (unit - 1)) * outputs**0.5


def whitener_of_few(moment: Tensor, damping: float, rank: int, unit: float) -> dict[str, Tensor]:
    """R = s (I - V diag(c) V^T), R^2 = (1 + damping) unit^2 (A / mean A + damping I)^-1 on the largest directions V.

    A damping of n / T leaves of n directions no more than T that stand out: the others count as zero. V is (n, rank),
    by two steps of subspace iteration from the columns of the largest entries.

    moment: A, shape (n, n).
    """
    mean = moment.diagonal().mean()
    scaled = moment / mean if bool(mean > 0) else torch.eye(len(moment)).to(moment)
    basis = torch_linalg.qr(scaled[:, scaled.diagonal().topk(rank).indices]).Q
    basis = torch_linalg.qr(scaled @ basis).Q
    found = scaled @ basis
    values, turn = eigh(symmetrise(basis.mT @ found))
    cut = 1 - (1 + values.clamp(min=0) / damping).rsqrt()
    return {"inputs": basis @ turn, "cut": cut, "root": cut.new_tensor(((1 + damping) / damping) ** 0.5 * unit)}


def whiten(matrix: Tensor, prepared: Mapping[str, Tensor], last: bool = False) -> Tensor:
    """X W^T, or X W where it comes last, for X (..., p, q) and what `prepare_for` has made."""
    root = prepared["inputs"].to(matrix)
    if matrix.dim() == 3 and len(matrix) == 1 and root.dim() < 3:
        matrix = matrix.squeeze(0)
    if "cut" in prepared:
        return prepared["root"].to(matrix) * (matrix - (matrix @ root * prepared["cut"].to(matrix)) @ root.mT)
    return apply_root(matrix, root) if last else whiten_inputs(matrix, root)


def unwhiten(values: Tensor, prepared: Mapping[str, Tensor]) -> Tensor:
    """theta W^-1 for theta (groups, p, q)."""
    root = prepared["inputs"].to(values)
    if "cut" in prepared:
        part = 1 / (1 - prepared["cut"].to(values)) - 1
        return (values + (values @ root * part) @ root.mT) / prepared["root"].to(values)
    if root.dim() == 1:
        return values / root
    return torch_linalg.solve_triangular(root, values, upper=False, left=False)
