"""The Krylov subspace itself: an orthonormal basis, its images, and the solution within it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_number
from natgrad.ground.linalg import all_finite, eigh, safe_cutoff, take_absolute
from natgrad.ground.typed_torch import measure_norm
from natgrad.operators import Operator
from natgrad.solvers.base import Solution, Status, Subspace, UnitSolver


@dataclass(frozen=True)
class KrylovSubspace(UnitSolver):
    """The solution within span{b, G b, ..., G^(K-1) b}, from an orthonormal basis that comes with it.

    The result is CG's K-th iterate. `Solution.basis` holds the basis and its images for rules that search in it
    (`ng.SubspaceSearch`). A guess joins the basis (one more product), as the last step does in Vinyals & Povey. Then no
    vector of the space, the guess included, has a smaller phi(x) = x^T A x / 2 - b^T x.

    Lanczos with every vector orthogonalised twice against all others: without that they lose their independence within
    some ten steps in float32. Memory: 2 K vectors. Where G + damping I is singular on the space, the result is the
    solution of minimum length. Where it has a negative eigenvalue there, that direction is left out and the status says
    so.

    Args:
        dimension: K. Each dimension costs one product with G.
        rtol: The status is CONVERGED if |r| <= rtol |b|. The space is filled whatever the residual.
        preconditioner: P ~ (G + damping I)^-1. The space is then that of P (G + damping I) and P b.
        absolute: Take |T| for T = V^T G V, so that saddle points do not attract the step. Residual and image are those
            of V |T| V^T + damping I, which stands for |G| + damping I.

    Raises:
        ValueError: For a number out of range.

    Reference:
        Vinyals & Povey 2012; Saad 2003, section 6. `absolute`: Dauphin et al. 2014.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> fisher = ng.fisher(model, nn.CrossEntropyLoss())
        >>> opt = ng.NaturalGradient(model, fisher, solver=ng.KrylovSubspace(dimension=5), rule=ng.SubspaceSearch())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    dimension: int = 20
    rtol: float = 1e-5
    preconditioner: Operator | None = None
    absolute: bool = False

    def __post_init__(self) -> None:
        check_integer("dimension", self.dimension)
        check_number("rtol", self.rtol)

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        """Galerkin: x = V y with V^T (b - A x) = 0."""
        basis = _Basis(self, operator, damping)
        basis.fill(rhs, guess)
        space = Subspace(basis.vectors[: basis.count], basis.images[: basis.count])
        if not len(space.vectors):
            zero = torch.zeros_like(rhs)
            status = Status.NON_FINITE if basis.broken else Status.CONVERGED
            return Solution(zero, measure_norm(rhs), basis.products, status, zero, basis=space)
        matrix = space.project_operator()
        values, turn = eigh(matrix)
        values = (values.abs() if self.absolute else values) + damping
        cutoff = safe_cutoff(len(values), values.dtype) * values.abs().max()
        keep = values > cutoff
        weights = turn @ torch.where(keep, turn.mT @ (space.vectors @ rhs) / torch.where(keep, values, 1), 0)
        value = space.at(weights)
        inner = space.at(take_absolute(matrix) @ weights) if self.absolute else space.image_at(weights)
        image = torch.add(inner, value, alpha=damping)
        residual = measure_norm(rhs - image)
        if basis.broken:
            status = Status.NON_FINITE
        elif bool((values < -10 * cutoff).any()):
            status = Status.NEGATIVE_CURVATURE
        elif not basis.complete and self.absolute:  # |T| stands for |G| on an invariant space alone
            status = Status.MAX_STEPS
        elif bool(residual <= self.rtol * measure_norm(rhs)):
            status = Status.CONVERGED
        else:
            status = Status.LEAST_SQUARES if basis.complete and not self.absolute else Status.MAX_STEPS
        return Solution(value, residual, basis.products, status, image, basis=space)


class _Basis:
    """Orthonormal rows V (k, n) and G V, grown one product at a time."""

    def __init__(self, choices: KrylovSubspace, operator: Operator, damping: float) -> None:
        self.choices, self.operator, self.damping = choices, operator, damping
        most = min(choices.dimension, operator.size) + 1
        self.vectors = torch.empty(most, operator.size, dtype=operator.dtype, device=operator.device)
        self.images = torch.empty_like(self.vectors)
        self.count = self.products = 0
        self.complete = self.broken = False

    def fill(self, rhs: Tensor, guess: Tensor | None) -> None:
        """The Krylov vectors, then the guess."""
        added = self._add(self._precondition(rhs))
        while added and self.count < self.choices.dimension:
            image = self.images[self.count - 1]
            if self.choices.preconditioner is not None:  # P (G + damping I) spans another space than P G
                image = torch.add(image, self.vectors[self.count - 1], alpha=self.damping)
            added = self._add(self._precondition(image))
        self.complete = not (added or self.broken)  # nothing new: the space is invariant
        if guess is not None and not self.broken:
            self._add(guess)
        self.complete = self.complete or self.count == self.operator.size

    def _precondition(self, vector: Tensor) -> Tensor:
        return vector if self.choices.preconditioner is None else self.choices.preconditioner.mv(vector)

    def _add(self, candidate: Tensor) -> bool:
        """Orthonormalise and multiply; False where nothing new is left of the candidate, or the product overflows."""
        largest = candidate.abs().max()
        self.broken = not bool(torch.isfinite(largest))
        if self.broken or not bool(largest > 0) or self.count == self.operator.size:
            return False
        unit = candidate / largest  # |v|^2 overflows float32 where an entry is beyond 1e19
        unit = unit / measure_norm(unit)
        known = self.vectors[: self.count]
        for _ in range(2):  # twice is enough (Kahan, Parlett)
            unit = unit - known.mT @ (known @ unit)
        left = measure_norm(unit)
        if not bool(left > 10 * safe_cutoff(max(self.count, 1), unit.dtype)):
            return False
        unit = unit / left
        image = self.operator.mv(unit)
        self.products += 1
        self.broken = not all_finite(image)
        if self.broken:
            return False
        self.vectors[self.count], self.images[self.count] = unit, image
        self.count += 1
        return True
