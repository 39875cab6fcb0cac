"""Second moments of a layer's scores, from activations a (b, t, G, d) and deltas (b, t, G, o).

Deltas carry the weights of the loss: the metric is sum over examples of E[g g^T] with g = sum_t delta_t a_t^T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.linalg import KroneckerEigen, gram
from natgrad.structures.layers import Layer

NUMBERS = 2**24
"""Entries of per-example gradients that are held at a time, 64 MiB in float32."""


@dataclass(frozen=True)
class Seen:
    """A layer's pass: activations, and the deltas of every cotangent, scaled so that the pass counts `share` times."""

    layer: Layer
    activations: Tensor
    deltas: list[Tensor]
    share: float = 1.0

    def counted(self, share: float) -> Seen:
        """The same pass, counting `share` times. Scaled before squaring, tiny derivatives stay above the denormals."""
        return Seen(self.layer, self.activations, [share**0.5 * deltas for deltas in self.deltas], share * self.share)

    @property
    def key(self) -> str:
        """The layer's parameters, as one string."""
        return self.layer.key

    @property
    def by_token(self) -> bool:
        """Whether the activations are tokens, standing for unit vectors."""
        return not self.activations.is_floating_point()

    @property
    def single(self) -> bool:
        """Whether every group has one output (norms, depthwise convolutions): its block is exact at a factor's cost."""
        groups, outputs, _ = self.layer.layout.matrix_shape
        return groups > 1 and outputs == 1

    @property
    def padding(self) -> int | None:
        """The token that is never trained."""
        return getattr(self.layer.module, "padding_idx", None)

    def gradient(self) -> Tensor:
        """The layer's matrix in J^T c for the first cotangent c, (groups, outputs, columns)."""
        if not self.by_token:
            return torch.einsum("btgo,btgd->god", self.deltas[0], self.activations)
        tokens, rows = token_rows(self.activations, self.deltas[0], self.padding)
        shape = self.layer.layout.matrix_shape
        return rows.new_zeros(shape[1:]).index_add_(0, tokens, rows).unsqueeze(0)


def total(parts: list[Tensor]) -> Tensor:
    """The sum over cotangents; no copy for one."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def input_moment(a: Tensor, share: float = 1.0) -> Tensor:
    """A = share * mean over examples and positions of a a^T, (G, d, d); (d, d) for one group."""
    return output_moment(a, share / (a.shape[0] * a.shape[1]))


def output_moment(deltas: Tensor, scale: float = 1.0) -> Tensor:
    """S = scale * sum over examples and positions of delta delta^T, (G, o, o); (o, o) for one group."""
    flat = deltas.flatten(0, 1).transpose(0, 1)  # (G, b t, o)
    return gram(flat[0], scale) if len(flat) == 1 else scale * (flat.mT @ flat)


def diagonal_moment(deltas: Tensor) -> Tensor:
    """The diagonal of S for one group, (o,)."""
    return deltas.square().sum((0, 1, 2))


def token_moment(tokens: Tensor, size: int, padding: int | None, dtype: torch.dtype) -> Tensor:
    """The diagonal of A for unit vectors: every token's frequency, (size,); the padding token is never trained."""
    counts = torch.bincount(tokens.reshape(-1), minlength=size).to(dtype)
    if padding is not None:
        counts[padding] = 0
    return counts / tokens.numel()


def reduced(a: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Positions taken together: mean of a and sum of deltas, (b, 1, G, d) and (b, 1, G, o).

    K-FAC-reduce of Eschenhagen et al. 2023: exact for a deep linear network whose loss sees the mean over positions.
    """
    return a.mean(1, keepdim=True), deltas.sum(1, keepdim=True)


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
    return squares(turned(a, eigen.right_vectors), turned(deltas, eigen.left_vectors))


def turned(tensor: Tensor, vectors: Tensor | None) -> Tensor:
    """(b, t, G, d) in the basis of vectors (d, d) or (G, d, d); None: as it is."""
    if vectors is None:
        return tensor
    return tensor @ vectors if vectors.dim() == 2 else (tensor.unsqueeze(-2) @ vectors).squeeze(-2)


def unit_blocks(a: Tensor, deltas: Tensor) -> Tensor:
    """Every output's own block, sum over examples of g_o g_o^T, (G o, d, d)."""
    if a.shape[1] == 1:
        right, weights = a.squeeze(1), deltas.squeeze(1).square()  # (b, G, d), (b, G, o)
        return torch.einsum("bgo,bgd,bge->gode", weights, right, right).flatten(0, 1)
    found = [torch.einsum("bgod,bgoe->gode", g, g) for g in gradients(a, deltas)]
    return torch.stack(found).sum(0).flatten(0, 1)


def bias_rows(a: Tensor, deltas: Tensor) -> Tensor:
    """The bias's row of every output's block, sum over examples of g_o g_o,bias, (G, o, d); the bias is last in a."""
    if a.shape[1] == 1:
        left, right = deltas.squeeze(1).transpose(0, 1).square(), a.squeeze(1).transpose(0, 1)
        return left.mT @ right
    return torch.stack([(g * g[..., -1:]).sum(0) for g in gradients(a, deltas)]).sum(0)


def token_rows(tokens: Tensor, deltas: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
    """Per-example gradients of an embedding, only the rows that occur: rows' tokens (k,) and gradients (k, e)."""
    b, t = tokens.shape
    kept = torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding
    size = int(tokens.max()) + 1 if tokens.numel() else 1
    pairs = tokens + size * torch.arange(b, device=tokens.device).unsqueeze(1)  # one key per example and token
    keys, place = pairs[kept].unique(return_inverse=True)
    rows = deltas.new_zeros(len(keys), deltas.shape[-1]).index_add_(0, place, deltas.reshape(b, t, -1)[kept])
    return keys % size, rows


def token_squares(tokens: Tensor, deltas: Tensor, size: int, padding: int | None) -> Tensor:
    """sum over examples of g o g for an embedding, (size, e)."""
    found, rows = token_rows(tokens, deltas, padding)
    return deltas.new_zeros(size, deltas.shape[-1]).index_add_(0, found, rows.square())


def token_blocks(tokens: Tensor, deltas: Tensor, size: int, padding: int | None) -> Tensor:
    """sum over examples of g_v g_v^T for every token v, (size, e, e)."""
    found, rows = token_rows(tokens, deltas, padding)
    outer = rows.unsqueeze(2) * rows.unsqueeze(1)
    return deltas.new_zeros(size, rows.shape[1], rows.shape[1]).index_add_(0, found, outer)
