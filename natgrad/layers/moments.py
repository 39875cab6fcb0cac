"""Second moments of a layer's scores, from activations a (b, t, G, d) and deltas (b, t, G, o).

Deltas carry the weights of the loss: the metric is sum over examples of E[g g^T] with g = sum_t delta_t a_t^T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.linalg import KroneckerEigen, gram
from natgrad.ground.typed_torch import measure_norm
from natgrad.layers.kinds import Layer
from natgrad.layers.pieces import cut
from natgrad.layers.spread_rows import pick_rows, spread_rows

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

    def count_times(self, share: float, weight: float = 1.0) -> Seen:
        """The same pass, counting `share` times. Scaled before squaring, tiny derivatives stay above the denormals.

        Args:
            share: A number >= 0.
            weight: Of its derivatives besides.
        """
        factor = (share * weight) ** 0.5
        return replace(self, deltas=[factor * deltas for deltas in self.deltas], share=share * self.share)

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
        activations = pick_rows(self.activations, places)
        return replace(self, activations=activations, deltas=[factor * pick_rows(d, places) for d in self.deltas])

    def only(self, which: slice) -> Seen:
        """The same pass with some of its cotangents.

        Args:
            which: A slice of cotangents.
        """
        if self.cotangents == 1:
            return replace(self, deltas=self.deltas[which])
        start, stop, _ = which.indices(self.cotangents)
        rows = slice(start * len(self.activations) // self.cotangents, stop * len(self.activations) // self.cotangents)
        parts = {"activations": self.activations[rows], "deltas": [deltas[rows] for deltas in self.deltas]}
        return replace(self, **parts, cotangents=stop - start)

    @property
    def positions(self) -> float:
        """Examples times positions that the layer saw: the mean over groups that see some each."""
        if self.counts is not None:
            return float(self.counts.mean())
        return self.activations.shape[0] * self.activations.shape[1] / self.cotangents

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
        return measure_norm(self.activations)

    def take(self, kept: slice, factor: float) -> Seen:
        """The same pass with copies of some of its examples alone.

        Args:
            kept: Which.
            factor: On their derivatives.
        """
        activations = self.activations[kept].clone()
        return replace(self, activations=activations, deltas=[factor * deltas[kept] for deltas in self.deltas])

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

    def gradient(self) -> Tensor:
        """The layer's matrix in J^T c for the first cotangent c, (groups, outputs, columns)."""
        if not self.by_token:
            first = len(self.activations) // self.cotangents
            return torch.einsum("btgo,btgd->god", self.deltas[0][:first], self.activations[:first])
        tokens, rows = token_rows(self.activations, self.deltas[0], self.padding)
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

    def __init__(self, layer: Layer, parts: Sequence[Seen], share: float = 1.0) -> None:
        self.layer, self.parts, self.share = layer, list(parts), share
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

    def count_times(self, share: float, weight: float = 1.0) -> Mixed:
        return Mixed(self.layer, [part.count_times(share, weight) for part in self.parts], share * self.share)

    def thin(self, rows: float) -> Mixed:
        return self

    def only(self, which: slice) -> Mixed:
        return Mixed(self.layer, [part.only(which) for part in self.parts], self.share)

    def split_parts(self) -> list[Seen]:
        return self.parts

    def gradient(self) -> Tensor:
        return torch.stack([part.gradient() for part in self.parts]).sum(0)


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


def input_moment(a: Tensor, share: float = 1.0) -> Tensor:
    """A = share * mean over examples and positions of a a^T, (G, d, d); (d, d) for one group."""
    if a.shape[2] > 1 and a.stride(2) == 0:  # the same for all groups
        return input_moment(a[:, :, :1], share).repeat(a.shape[2], 1, 1)
    return output_moment(a, share / (a.shape[0] * a.shape[1]))


def output_moment(deltas: Tensor, scale: float = 1.0) -> Tensor:
    """S = scale * sum over examples and positions of delta delta^T, (G, o, o); (o, o) for one group."""
    flat = deltas.flatten(0, 1).transpose(0, 1)  # (G, b t, o)
    return gram(flat[0], scale) if len(flat) == 1 else scale * (flat.mT @ flat)


def diagonal_moment(deltas: Tensor) -> Tensor:
    """The diagonal of S for one group, (o,)."""
    return deltas.square().sum((0, 1, 2))


def token_moment(
    tokens: Tensor, size: int, padding: int | None, dtype: torch.dtype, weights: Tensor | None = None
) -> Tensor:
    """The diagonal of A for unit vectors: every token's frequency, (size,); the padding token is never trained."""
    each = None if weights is None else weights.repeat_interleave(tokens[0].numel())
    counts = torch.bincount(tokens.reshape(-1), each, minlength=size).to(dtype)
    if padding is not None:
        counts[padding] = 0
    return counts / tokens.numel()


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
    """The tensor in the basis of the vectors.

    tensor: (b, t, G, d). vectors: (d, d) or (G, d, d); for a cut factor's blocks (..., s, s), with four
    dimensions. None: the tensor as it is.
    """
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
