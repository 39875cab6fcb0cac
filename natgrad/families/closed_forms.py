"""Operators in closed form: their products and those of their inverse as two functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.operators import Operator

Product = Callable[[Tensor], Tensor]


class Closed(Operator):
    """G given by its products, and G^-1 by its own where they are known.

    Args:
        like: A tensor (n,) of the same dtype and device.
        product: v -> G v, (..., n) -> (..., n), linear and symmetric.
        inverse_product: v -> G^-1 v, or None.
    """

    def __init__(self, like: Tensor, product: Product, inverse_product: Product | None = None) -> None:
        self.product, self.inverse_product = product, inverse_product
        self.size, self.dtype, self.device = len(like), like.dtype, like.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.product(vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.product(block.mT).mT  # leading dimensions are batches

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """The other product; None with damping, where no closed form is known."""
        if damping or self.inverse_product is None:
            return None
        return Closed(torch.empty(self.size, dtype=self.dtype, device=self.device), self.inverse_product, self.product)
