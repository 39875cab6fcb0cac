"""Second moments of a layer's scores, from activations a (b, t, G, d) and deltas (b, t, G, o), and Kronecker factors.

Deltas carry the weights of the loss: the metric is sum over examples of E[g g^T] with g = sum_t delta_t a_t^T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.exchanges import ALONE, Sums
from natgrad.ground.linalg import KroneckerEigen, gram
from natgrad.ground.typed_torch import measure_norm
from natgrad.layers.kinds import Layer

NUMBERS = 2**24
"""Entries of per-example gradients that are held at a time, 64 MiB in float32."""


@dataclass(eq=False)
class Seen:
    """A layer's pass: activations, and the deltas of every cotangent, scaled so that the pass counts `share` times.

    Args:
        layer: The layer.
        activations: a, shape (b, t, G, d); tokens (b, t) for an embedding.
        deltas: Per cotangent, shape (b, t, G, o); (b, t, e) for an embedding.
        share: How many times the pass counts.
        counts: How many positions each group has, shape (G,), where they differ; the others' activations are zeros.
        pooled: True if examples could not be told apart: all positions are one example's.
        cotangents: How many of them the first list of deltas holds, as more examples.
        skip: A token that is never trained.
        weights: How many times each example counts in the inputs' own moment, shape (b,), with mean one; None: once.
            Deltas carry their weights already.
        times: How many times each position counts in the inputs' own moment, besides.
        sums: How what the pass gives becomes that of all processes.
    """

    layer: Layer
    activations: Tensor
    deltas: list[Tensor]
    share: float = 1.0
    counts: Tensor | None = None
    pooled: bool = False
    cotangents: int = 1
    skip: int | None = None
    weights: Tensor | None = None
    times: float = 1.0
    sums: Sums = ALONE

    def add_by(self, sums: Sums) -> Seen:
        """The same pass, one of those of several processes.

        Args:
            sums: How what they give is added up.
        """
        return replace(self, sums=sums)

    def count_times(self, share: float, weight: float = 1.0, times: float = 1.0) -> Seen:
        """The same pass, counting `share` times. Scaled before squaring, tiny derivatives stay above the denormals.

        Args:
            share: A number >= 0.
            weight: Of its derivatives besides.
            times: Of its positions.
        """
        factor = (share * weight) ** 0.5
        deltas = [factor * deltas for deltas in self.deltas]
        return replace(self, deltas=deltas, share=share * self.share, times=times * self.times)

    @property
    def key(self) -> str:
        """The layer's parameters, as one string."""
        return self.layer.key

    def thin(self, rows: float) -> Seen:
        """The same pass with some of its rows, evenly over examples and positions, which weigh as much as all.

        Right for sums over rows alone: rows of an example are no longer together.

        Args:
            rows: About how many; passes with less than one and a half times as many stay as they are.
        """
        if self.by_token or self.single or self.counts is not None or self.cotangents > 1 or self.weights is not None:
            return self
        count = self.activations.shape[0] * self.activations.shape[1]
        if count < 1.5 * rows:
            return self
        places = spread_rows(count, rows, self.activations.device)
        factor = (count / len(places)) ** 0.5
        activations, times = pick_rows(self.activations, places), self.times * factor**2
        deltas = [factor * pick_rows(d, places) for d in self.deltas]
        return replace(self, activations=activations, deltas=deltas, times=times)

    def weigh(self, weights: Tensor) -> Seen:
        """The same pass, whose inputs count by these weights; as it is where its examples are others or not told apart.

        An example of weight two is then two, for the factor of the inputs as it is for that of the derivatives.

        Args:
            weights: Of the examples, (b,).
        """
        if self.pooled or len(self.activations) != len(weights) * self.cotangents:
            return self
        return replace(self, weights=weights.repeat(self.cotangents))

    def only(self, which: slice) -> Seen:
        """The same pass with some of its cotangents.

        Args:
            which: A slice of cotangents.
        """
        if self.cotangents == 1:
            return replace(self, deltas=self.deltas[which])
        start, stop, _ = which.indices(self.cotangents)
        rows = slice(start * len(self.activations) // self.cotangents, stop * len(self.activations) // self.cotangents)
        weights = None if self.weights is None else self.weights[rows]
        deltas = [deltas[rows] for deltas in self.deltas]
        activations = self.activations[rows]
        return replace(self, activations=activations, deltas=deltas, cotangents=stop - start, weights=weights)

    def weigh_inputs(self, a: Tensor) -> Tensor:
        """Inputs times roots of the examples' weights: A is their second moment.

        Args:
            a: Inputs that are no tokens, (b, ...).
        """
        if self.weights is None:
            return a
        return a * self.weights.to(a).sqrt().view(-1, *[1] * (a.dim() - 1))

    @property
    def positions(self) -> float:
        """Examples that count times positions that the layer saw: the mean over groups that see some each."""
        if self.counts is not None:
            return float(self.counts.mean())
        examples = len(self.activations) if self.weights is None else int(self.weights.count_nonzero())
        return examples * self.activations.shape[1] / self.cotangents

    @property
    def by_token(self) -> bool:
        """True if the activations are tokens, standing for unit vectors."""
        return not self.activations.is_floating_point()

    @property
    def single(self) -> bool:
        """True if every group has one output (norms, depthwise convolutions): its block is exact at a factor's cost."""
        groups, outputs, _ = self.layer.layout.matrix_shape
        return groups > 1 and outputs == 1

    @property
    def padding(self) -> int | None:
        """The token that is never trained."""
        return getattr(self.layer.module, "padding_idx", self.skip)

    def split_parts(self) -> list[Seen]:
        """The parts of a pass, whose gradients add up example by example."""
        return [self]

    @property
    def examples(self) -> int:
        """How many examples there are, or of them times cotangents."""
        return len(self.activations)

    def bound_inputs(self) -> Tensor:
        """No less than the Frobenius norm of the activations, which are no tokens: a scalar tensor."""
        return measure_norm(self.weigh_inputs(self.activations))

    def take(self, kept: slice, factor: float) -> Seen:
        """The same pass with copies of some of its examples alone.

        Args:
            kept: Which.
            factor: On their derivatives.
        """
        weights = None if self.weights is None else self.weights[kept]
        deltas = [factor * deltas[kept] for deltas in self.deltas]
        return replace(self, activations=self.activations[kept].clone(), deltas=deltas, weights=weights)

    def slopes(self, matrix: Tensor, examples: int) -> Tensor:
        """score_i^T step of every example, (cotangents, examples).

        Args:
            matrix: The step as the layer's matrix, (G, o, d).
            examples: Their number; an example may have several rows, side by side.
        """
        if self.by_token:
            image = matrix[0][self.activations]
            if self.padding is not None:
                image = image * (self.activations != self.padding).unsqueeze(-1)
        elif len(matrix) == 1:
            image = self.activations @ matrix[0].mT
        elif matrix.shape[1] == 1:  # norms, depthwise convolutions
            image = (self.activations * matrix[:, 0]).sum(-1, keepdim=True)
        else:
            image = torch.einsum("btgd,god->btgo", self.activations, matrix)
        return torch.stack([(image * deltas).reshape(examples, -1).sum(1) for deltas in self.deltas])

    def gradient(self, count: int = 1) -> Tensor:
        """The layer's matrix in J^T c for c = `combine` of the first cotangents, (groups, outputs, columns).

        Args:
            count: Of how many.
        """
        if self.cotangents > 1:
            return combine([replace(self.only(slice(i, i + 1)), cotangents=1).gradient() for i in range(count)])
        deltas = combine(self.deltas[:count])
        if not self.by_token:
            return torch.einsum("btgo,btgd->god", deltas, self.activations)
        tokens, rows = token_rows(self.activations, deltas, self.padding)
        shape = self.layer.layout.matrix_shape
        return rows.new_zeros(shape[1:]).index_add_(0, tokens, rows).unsqueeze(0)


class Mixed(Seen):
    """A matrix's pass in several parts: y = W x in one, y = x W or a table of rows in another (a tied embedding).

    The activations and deltas are all parts' positions side by side, made when they are asked for: tokens as unit
    vectors, cotangents as more examples.

    Args:
        layer: The layer.
        parts: The passes.
        share: How many times the pass counts.
    """

    parts: list[Seen]

    def __init__(self, layer: Layer, parts: Sequence[Seen], share: float = 1.0, sums: Sums = ALONE) -> None:
        self.layer, self.parts, self.share, self.sums = layer, list(parts), share, sums
        self.counts, self.skip, self.cotangents = None, None, 1
        self.pooled = any(part.pooled for part in parts)

    @cached_property
    def activations(self) -> Tensor:  # type: ignore[override]
        return torch.cat([side_by_side(part)[0] for part in self.parts], dim=1)

    @cached_property
    def deltas(self) -> list[Tensor]:  # type: ignore[override]
        return [torch.cat([side_by_side(part)[1] for part in self.parts], dim=1)]

    @property
    def positions(self) -> float:
        return sum(part.positions for part in self.parts)

    @property
    def by_token(self) -> bool:
        return False

    def add_by(self, sums: Sums) -> Mixed:
        return Mixed(self.layer, self.parts, self.share, sums)

    def count_times(self, share: float, weight: float = 1.0, times: float = 1.0) -> Mixed:
        parts = [part.count_times(share, weight, times) for part in self.parts]
        return Mixed(self.layer, parts, share * self.share)

    def thin(self, rows: float) -> Mixed:
        return self

    def weigh(self, weights: Tensor) -> Mixed:
        return Mixed(self.layer, [part.weigh(weights) for part in self.parts], self.share, self.sums)

    def only(self, which: slice) -> Mixed:
        return Mixed(self.layer, [part.only(which) for part in self.parts], self.share)

    def split_parts(self) -> list[Seen]:
        return self.parts

    def gradient(self, count: int = 1) -> Tensor:
        return torch.stack([part.gradient(count) for part in self.parts]).sum(0)


def combine(parts: Sequence[Tensor]) -> Tensor:
    """The sum of cotangents, or of what comes of them, with numbers with which none cancels another; no copy for one.

    Args:
        parts: Tensors of one shape.
    """
    if len(parts) == 1:
        return parts[0]
    factors = 1 + torch.rand(len(parts), generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float64)
    return total([factor * part for factor, part in zip(factors.tolist(), parts, strict=True)])


def side_by_side(seen: Seen) -> tuple[Tensor, Tensor]:
    """Activations and deltas with every cotangent's examples as examples of their own, tokens as unit vectors."""
    deltas = torch.cat(seen.deltas)
    if not seen.by_token:
        return seen.activations.repeat(len(seen.deltas), 1, 1, 1), deltas
    unit = functional.one_hot(seen.activations, seen.layer.layout.outputs).to(deltas.dtype)
    if seen.padding is not None:
        unit[..., seen.padding] = 0
    return deltas.unsqueeze(2), unit.repeat(len(seen.deltas), 1, 1).unsqueeze(2)


def layer_squares(seen: Seen) -> Tensor:
    """The diagonal of a layer's metric, shape (groups, outputs, columns).

    Args:
        seen: What a pass recorded of the layer.
    """
    if seen.by_token:
        size = seen.layer.layout.outputs
        terms = [token_squares(seen.activations, deltas, size, seen.padding).unsqueeze(0) for deltas in seen.deltas]
    else:
        terms = [squares(seen.activations, deltas) for deltas in seen.deltas]
    return total(terms)


def layer_units(seen: Seen) -> Tensor:
    """The blocks of a layer's units, shape (groups * outputs, columns, columns).

    Args:
        seen: What a pass recorded of the layer.
    """
    if seen.by_token:
        size = seen.layer.layout.outputs
        return total([token_blocks(seen.activations, deltas, size, seen.padding) for deltas in seen.deltas])
    return total([unit_blocks(seen.activations, deltas) for deltas in seen.deltas])


def layer_bias_rows(seen: Seen) -> Tensor:
    """The bias's row of every unit's block, shape (groups, outputs, columns).

    Args:
        seen: What a pass recorded of the layer.
    """
    return total([bias_rows(seen.activations, deltas) for deltas in seen.deltas])


def total(parts: list[Tensor]) -> Tensor:
    """The sum over cotangents; no copy for one."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def input_moment(a: Tensor, scale: float = 1.0) -> Tensor:
    """scale * sum over examples and positions of a a^T, (G, d, d); (d, d) for one group."""
    if a.shape[2] > 1 and a.stride(2) == 0:  # the same for all groups
        return output_moment(a[:, :, :1], scale).repeat(a.shape[2], 1, 1)
    return output_moment(a, scale)


def output_moment(deltas: Tensor, scale: float = 1.0) -> Tensor:
    """S = scale * sum over examples and positions of delta delta^T, (G, o, o); (o, o) for one group."""
    flat = deltas.flatten(0, 1).transpose(0, 1)  # (G, b t, o)
    return gram(flat[0], scale) if len(flat) == 1 else scale * (flat.mT @ flat)


def token_moment(
    tokens: Tensor, size: int, padding: int | None, dtype: torch.dtype, weights: Tensor | None = None
) -> Tensor:
    """The sum of unit vectors: how often every token comes, (size,); the padding token is never trained."""
    each = None if weights is None else weights.repeat_interleave(tokens[0].numel())
    counts = torch.bincount(tokens.reshape(-1), each, minlength=size).to(dtype)
    if padding is not None:
        counts[padding] = 0
    return counts


def gradients(a: Tensor, deltas: Tensor) -> Iterator[Tensor]:
    """Per-example gradients (b', G, o, d), some examples at a time."""
    size = deltas.shape[2] * deltas.shape[3] * a.shape[3]
    step = max(1, NUMBERS // size)
    for left, right in zip(deltas.split(step), a.split(step), strict=True):
        yield left.permute(0, 2, 3, 1) @ right.transpose(1, 2)


def squares(a: Tensor, deltas: Tensor) -> Tensor:
    """sum over examples of g o g, (G, o, d)."""
    if a.shape[1] == 1:
        left, right = (part.squeeze(1).transpose(0, 1).square() for part in (deltas, a))
        return left.mT @ right
    return total([g.square().sum(0) for g in gradients(a, deltas)])


def rotated_squares(a: Tensor, deltas: Tensor, eigen: KroneckerEigen) -> Tensor:
    """The metric's diagonal in a Kronecker eigenbasis, (G, o, d): EKFAC's corrected eigenvalues."""
    return squares(turn_into_basis(a, eigen.right_vectors), turn_into_basis(deltas, eigen.left_vectors))


def turn_into_basis(tensor: Tensor, vectors: Tensor | None) -> Tensor:
    """The tensor (b, t, G, d) in the basis (d, d), (G, d, d) or, of a cut factor, (k, m, s, s); None: as it is."""
    if vectors is None:
        return tensor
    if vectors.dim() == 4:
        blocks = vectors.flatten(0, 1)
        return torch.einsum("btgd,gde->btge", cut(tensor, len(blocks)), blocks).flatten(2).unsqueeze(2)
    return tensor @ vectors if vectors.dim() == 2 else torch.einsum("btgd,gde->btge", tensor, vectors)


def unit_blocks(a: Tensor, deltas: Tensor) -> Tensor:
    """Every output's own block, sum over examples of g_o g_o^T, (G o, d, d)."""
    if a.shape[1] == 1:
        right, weights = a.squeeze(1), deltas.squeeze(1).square()  # (b, G, d), (b, G, o)
        return torch.einsum("bgo,bgd,bge->gode", weights, right, right).flatten(0, 1)
    blocks = [torch.einsum("bgod,bgoe->gode", g, g) for g in gradients(a, deltas)]
    return torch.stack(blocks).sum(0).flatten(0, 1)


def bias_rows(a: Tensor, deltas: Tensor) -> Tensor:
    """The bias's row of every output's block, sum over examples of g_o g_o,bias, (G, o, d); the bias is last in a."""
    if a.shape[1] == 1:
        left, right = deltas.squeeze(1).transpose(0, 1).square(), a.squeeze(1).transpose(0, 1)
        return left.mT @ right
    return torch.stack([(g * g[..., -1:]).sum(0) for g in gradients(a, deltas)]).sum(0)


def token_rows(tokens: Tensor, deltas: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
    """Per-example gradients of an embedding, only the rows that occur: rows' tokens (k,) and gradients (k, e)."""
    b, t = tokens.shape
    mask = torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding
    size = int(tokens.max()) + 1 if tokens.numel() else 1
    pairs = tokens + size * torch.arange(b, device=tokens.device).unsqueeze(1)  # one key per example and token
    keys, place = pairs[mask].unique(return_inverse=True)
    rows = deltas.new_zeros(len(keys), deltas.shape[-1]).index_add_(0, place, deltas.reshape(b, t, -1)[mask])
    return keys % size, rows


def token_squares(tokens: Tensor, deltas: Tensor, size: int, padding: int | None) -> Tensor:
    """sum over examples of g o g for an embedding, (size, e)."""
    row_tokens, rows = token_rows(tokens, deltas, padding)
    return deltas.new_zeros(size, deltas.shape[-1]).index_add_(0, row_tokens, rows.square())


def token_blocks(tokens: Tensor, deltas: Tensor, size: int, padding: int | None) -> Tensor:
    """sum over examples of g_v g_v^T for every token v, (size, e, e)."""
    row_tokens, rows = token_rows(tokens, deltas, padding)
    outer = rows.unsqueeze(2) * rows.unsqueeze(1)
    return deltas.new_zeros(size, rows.shape[1], rows.shape[1]).index_add_(0, row_tokens, outer)


# some rows of many, spread so that no period in their order (pairs, classes in turn) is met at one phase alone

PRIME = 7919


def spread_rows(count: int, some: float, device: torch.device) -> Tensor:
    """About `some` of `count` rows, one from each stretch of equal length, at another place in every stretch."""
    stretch = max(1, round(count / some))
    starts = torch.arange(count // stretch, device=device)
    return starts * stretch + starts * PRIME % stretch


def pick_rows(tensor: Tensor, numbers: Tensor) -> Tensor:
    """Rows of (b, t, ...) as examples of one position, (r, 1, ...), by their numbers (r,) in b t."""
    t = tensor.shape[1]
    if t == 1:
        return tensor[numbers]
    return tensor[numbers // t, numbers % t].unsqueeze(1)


# dimensions that are too large for one factor, cut into equal pieces: a factor becomes block-diagonal


LONG, SLENDER, NARROW = 2048, 10, 256
"""Rows, and times the other factor's, above which blocks of a factor have at most the last number of rows."""


@dataclass(frozen=True)
class Room:
    """How much memory one factor may take.

    Args:
        largest: Rows of a block, >= 1.
        budget: Bytes of all its blocks, >= 1024.

    Raises:
        ValueError: For smaller numbers, or numbers that are no integers.
    """

    largest: int
    budget: int

    def __post_init__(self) -> None:
        for name, least, unit in (("largest", 1, "rows"), ("budget", 2**10, "bytes")):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, expected a number of {unit}, an integer >= {least}")

    def pieces(self, size: int, itemsize: int, other: int) -> int:
        """How many blocks, as few as fit: k blocks of n / k rows take n^2 / k numbers. n of them are a diagonal.

        The inverse of a factor takes n^3 operations, and a pass of its layer n m for each row of a batch: of a factor
        that is long and much longer than m, as that of a head of 4000 words on 64 features, only narrow blocks cost
        less than the pass.

        Args:
            size: n, the factor's rows.
            itemsize: Bytes of one number.
            other: m, the rows of the layer's other factor.
        """
        most = min(self.largest, NARROW) if size > max(LONG, SLENDER * other) else self.largest
        fitting = max(math.ceil(size / most), math.ceil(size * size * itemsize / self.budget))
        each = math.ceil(size / min(max(fitting, 1), max(size, 1)))
        return math.ceil(size / max(each, 1))


def cut(tensor: Tensor, pieces: int) -> Tensor:
    """(b, t, 1, n) -> (b, t, k, s) with k s >= n, the last piece filled up with zeros."""
    size = tensor.shape[-1]
    each = math.ceil(size / pieces)
    return functional.pad(tensor, (0, each * pieces - size)).unflatten(-1, (pieces, each)).squeeze(2)


def diagonal_like(diagonal: Tensor, factor: Tensor) -> Tensor:
    """diag(n) in the shape of a factor (n, n), or of its blocks (..., s, s)."""
    filled = functional.pad(diagonal, (0, factor.shape[:-1].numel() - len(diagonal)))
    return torch.diag_embed(filled.view(factor.shape[:-1]))


# kronecker factors of one pass of a layer: S of the derivatives on the left, A of the inputs on the right


def layer_factors(seen: Seen, reduce: bool, room: Room) -> dict[str, Tensor]:
    """K-FAC's factors of one pass, S = E[delta delta^T] on the left and A = E[a a^T] on the right; or exact blocks.

    Args:
        seen: What the pass recorded of the layer.
        reduce: True to take positions together: means of inputs, sums of derivatives.
        room: How large a factor may be; a larger one is cut into blocks.

    Returns:
        "left" and "right", shape (G, n, n); for one group (n, n), its diagonal (n,), or its blocks: (k, 1, s, s) on the
        left, (1, m, t, t) on the right. That of the inputs, which stands on the left for tokens, is a sum over
        positions: "counts", shape (G,), is their number. "blocks", shape (G, d, d), of a layer with one output per
        group.
    """
    if isinstance(seen, Mixed):
        parts = [average_of_part(part, layer_factors(part, reduce, room)) for part in seen.parts]
        return mixed_factors(parts, seen.share, seen.sums)
    if seen.single:
        return {"blocks": layer_units(seen)}
    if seen.by_token:
        rows = seen.layer.layout.outputs
        right = total([factor(deltas.unsqueeze(2), room, 0, rows) for deltas in seen.deltas])
        return layer_inputs(seen, reduce, room, right.dtype) | {"right": right}
    columns = seen.layer.layout.matrix_shape[2]
    # K-FAC-reduce of Eschenhagen et al. 2023: exact for a deep linear network whose loss sees the mean over positions
    deltas = [d.sum(1, keepdim=True) if reduce and not seen.pooled else d for d in seen.deltas]
    return {"left": total([factor(d, room, 1, columns) for d in deltas])} | layer_inputs(seen, reduce, room)


def layer_inputs(seen: Seen, reduce: bool, room: Room, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The part of `layer_factors` that takes no derivatives: sums for A = E[a a^T] on the right, of tokens on the left.

    Passes have other numbers of positions each where rows of a batch do: experts, sequences without their padding.

    Args:
        seen: What the pass recorded of the layer, which has more than one output per group and is not `Mixed`.
        reduce: As for `layer_factors`.
        room: As for `layer_factors`.
        dtype: Of the frequencies of tokens.
    """
    a, reduce = seen.activations, reduce and not seen.pooled
    if seen.by_token:  # the table's rows are tokens: how often they come stands on the left
        tokens = token_moment(a, seen.layer.layout.outputs, seen.padding, dtype, seen.weights)
        return {"left": seen.times * tokens, "counts": count_positions(seen, False, tokens)}
    if reduce:  # over a group's own positions alone
        each = a.shape[1] if seen.counts is None else seen.counts.clamp(min=1).view(-1, 1)
        a = a.sum(1, keepdim=True) / each
    a, outputs = seen.weigh_inputs(a), seen.layer.layout.matrix_shape[1]
    if a.shape[2] == 1 and room.pieces(a.shape[3], a.element_size(), outputs) > 1:
        right = seen.times * factor(a, room, 0, outputs)
    else:
        right = input_moment(a, seen.times)
    return {"right": right, "counts": count_positions(seen, reduce, right)}


def count_positions(seen: Seen, reduce: bool, like: Tensor) -> Tensor:
    """What a pass's sums of inputs are to be divided by, (G,)."""
    examples, t = seen.activations.shape[:2]
    each = like.new_full(seen.layer.layout.matrix_shape[:1], 1 if reduce else t)
    each = each if seen.counts is None or reduce else seen.counts.to(like)
    return seen.times * (examples if seen.weights is None else seen.weights.sum().to(like)) * each


def average_of_part(seen: Seen, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factors of one pass, that of the inputs as `share` times its mean."""
    side, counts = "left" if seen.by_token else "right", factors["counts"]
    mean = seen.share / torch.where(counts > 0, counts, 1)
    return {**factors, side: factors[side] * (mean if factors[side].dim() != 3 else mean.view(-1, 1, 1))}


def mixed_factors(parts: list[dict[str, Tensor]], share: float, sums: Sums) -> dict[str, Tensor]:
    """One Kronecker product for a sum of several: the one with the same partial traces.

    L = sum_p L_p tr R_p and R = sum_p R_p tr L_p, over the sum's trace: exact where all parts agree in one factor. The
    traces are those of all processes, so that their sums of L and R are those of one process.
    """
    own = torch.stack([torch.stack([trace(part["left"]), trace(part["right"])]) for part in parts])
    totals = sums.total_few({"traces": own, "share": own.new_tensor(share)})
    lefts, rights = totals["traces"].unbind(1)
    left = add_factors([part["left"] * rights[i] for i, part in enumerate(parts)])
    right = add_factors([part["right"] * lefts[i] for i, part in enumerate(parts)])
    total_trace = lefts @ rights
    count = totals["share"]
    right = right * count / torch.where(total_trace > 0, total_trace, 1)
    return {"left": left / count, "right": right, "counts": own.new_full((1,), share)}


def add_factors(parts: list[Tensor]) -> Tensor:
    """The sum of factors, some of which may be diagonals (n,)."""
    matrix = next((part for part in parts if part.dim() > 1), None)
    if matrix is None:
        return total(parts)
    return total([diagonal_like(part, matrix) if part.dim() == 1 else part for part in parts])


def trace(factor: Tensor) -> Tensor:
    """tr of (n, n), of its blocks, or of the diagonal (n,)."""
    return factor.sum() if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1).sum()


def factor(deltas: Tensor, room: Room, axis: int, other: int) -> Tensor:
    """The deltas' second moment, or its diagonal, or blocks (k, 1, s, s) for axis 1, (1, m, t, t) for axis 0."""
    size = deltas.shape[3]
    pieces = room.pieces(size, deltas.element_size(), other) if deltas.shape[2] == 1 else 1
    if pieces == 1:
        return output_moment(deltas)
    if pieces == size:  # its diagonal
        return deltas.square().sum((0, 1, 2))
    return output_moment(cut(deltas, pieces)).unsqueeze(axis)


def layer_spectrum(seen: Seen, eigen: KroneckerEigen) -> Tensor:
    """The pass's diagonal in a Kronecker eigenbasis: EKFAC's corrected eigenvalues.

    Args:
        seen: What the pass recorded of the layer.
        eigen: The basis.

    Returns:
        Shape (G, o, d), or (rows, e) for a table by token.
    """
    if seen.by_token:
        rows = seen.layer.layout.outputs
        turns = [turn_into_basis(deltas.unsqueeze(2), eigen.right_vectors).squeeze(2) for deltas in seen.deltas]
        return total([token_squares(seen.activations, deltas, rows, seen.padding) for deltas in turns])
    return total([rotated_squares(seen.activations, deltas, eigen) for deltas in seen.deltas])


def factor_sizes(layer: Layer, room: Room) -> list[tuple[int, int]]:
    """(count, n) of the (n, n) matrices that are inverted: factors, pieces of factors, or exact blocks.

    Args:
        layer: The layer.
        room: How large a factor may be.
    """
    groups, outputs, columns = layer.layout.matrix_shape
    if groups > 1 and outputs == 1:
        return [(groups, columns)]
    sizes = []
    for size in (columns,) if layer.by_token else (outputs, columns):
        pieces = room.pieces(size, 4, outputs + columns - size) if groups == 1 else 1
        sizes.append((groups * pieces, -(-size // pieces)))
    return sizes
