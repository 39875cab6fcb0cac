"""The residuals of a term at its points, with the rows of their Jacobian in the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.ground.jets import LayerRows


@dataclass(frozen=True, eq=False)
class TermJacobian:
    """Residuals of a term with the rows of their Jacobian, each times its factor.

    Args:
        values: Shape (b, m), without the factors.
        factor: Of each row, shape (m, b).
        layers: Of affine layers: row (j, x), component first.
        explicit: Name -> rows (m, b, size) of other parameters.
    """

    values: Tensor
    factor: Tensor
    layers: list[LayerRows] = field(default_factory=list)
    explicit: dict[str, Tensor] = field(default_factory=dict)

    def find_broken_point(self) -> int | None:
        """The first point whose rows are not finite; None where all are."""
        bad = [~one.deltas.isfinite().all(3).all(1).all(0) for one in self.layers]
        bad += [~one.inputs.isfinite().all(2).all(0) for one in self.layers]
        bad += [~rows.isfinite().all(2).all(0) for rows in self.explicit.values()]
        if not bad or not bool((places := torch.stack(bad).any(0)).any()):
            return None
        return int(places.nonzero()[0])


def differentiate_columns(values: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """d values[:, j] / d leaf, summed over the rows of values (b, m), (m, *shape of the leaf) each."""
    if not values.requires_grad:
        return [leaf.new_zeros(values.shape[1], *leaf.shape) for leaf in leaves]
    columns = [
        torch.autograd.grad(values[:, j].sum(), leaves, retain_graph=j + 1 < values.shape[1], materialize_grads=True)
        for j in range(values.shape[1])
    ]
    return [torch.stack(parts) for parts in zip(*columns, strict=True)]
