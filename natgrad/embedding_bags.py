"""Bags of embeddings as look-ups and sums: torch's own kernel has a first derivative only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def look_up_bags(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`functional.embedding_bag`, by a look-up of every token and a sum, mean or maximum over each bag.

    The arguments are those of torch. The rows of `weight` are taken to keep `max_norm` already, as after a pass of the
    layer.
    """
    if scale_grad_by_freq:
        raise ValueError(
            "an EmbeddingBag has scale_grad_by_freq=True, which scales gradients apart from the function that it "
            "computes, so that no metric belongs to it; build it with scale_grad_by_freq=False"
        )
    tokens, bags, count = number_bags(input, offsets, include_last_offset)
    kept = torch.ones_like(tokens, dtype=torch.bool)
    if padding_idx is not None:
        kept = tokens != padding_idx % len(weight)
    rows = functional.embedding(tokens, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    shape = (count, weight.shape[1])
    place = bags.unsqueeze(1).expand_as(rows)
    if mode == "max":
        lowest = rows.new_full(shape, -torch.inf)
        filled = torch.where(kept.unsqueeze(1), rows, -torch.inf)
        found = lowest.scatter_reduce(0, place, filled, "amax")
        return torch.where(found == -torch.inf, 0, found)
    rows = torch.where(kept.unsqueeze(1), rows, 0)
    total = rows.new_zeros(shape).scatter_add(0, place, rows)
    if mode == "sum":
        return total
    sizes = rows.new_zeros(count).scatter_add(0, bags, kept.to(rows.dtype))
    return total / sizes.clamp(min=1).unsqueeze(1)


def number_bags(input: Tensor, offsets: Tensor | None, include_last: bool) -> tuple[Tensor, Tensor, int]:
    """Every token, the number of its bag, and how many bags there are."""
    if input.dim() == 2:
        count, size = input.shape
        return input.reshape(-1), torch.arange(count, device=input.device).repeat_interleave(size), count
    if offsets is None:
        raise ValueError("an EmbeddingBag got tokens of one dimension without offsets; give tokens (b, n), or offsets")
    starts = offsets[:-1] if include_last else offsets
    places = torch.arange(len(input), device=input.device)
    return input, torch.searchsorted(starts.contiguous(), places, right=True) - 1, len(starts)
