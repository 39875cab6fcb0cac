"""One face for every solver of (G + damping I) x = b."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from natgrad.ground.derivatives import apply_linear
from natgrad.ground.linalg import all_finite, symmetrise
from natgrad.ground.messages import Explained, show_shape, write_choices
from natgrad.ground.typed_torch import measure_norm
from natgrad.operators import Operator, SampleRows, WrittenColumns

Product = Callable[[Tensor], Tensor]


class Status(StrEnum):
    """Why a solver stopped."""

    CONVERGED = "converged"  # the residual met the tolerance
    STALLED = "stalled"  # progress on the quadratic model became too small (Martens' stop)
    MAX_STEPS = "max_steps"  # the budget ran out
    NEGATIVE_CURVATURE = "negative_curvature"  # d^T (G + damping I) d <= 0: the operator is not positive definite
    NON_FINITE = "non_finite"  # a product overflowed; the last finite vector is returned
    LEAST_SQUARES = "least_squares"  # |A r| is small, |r| is not: the minimum-length least-squares solution
    ROUND_OFF = "round_off"  # |r| is as small as the dtype allows, which is more than the tolerance
    ILL_CONDITIONED = "ill_conditioned"  # cond(A) was estimated above the limit; the direction that did it is left out
    NORM_LIMIT = "norm_limit"  # the next vector would have been longer than allowed; the last one that was not
    INDEFINITE_PRECONDITIONER = "indefinite_preconditioner"  # r^T P r < 0; the last vector before that
    INACCURATE = "inaccurate"  # a direct method's residual is larger than round-off explains


@dataclass(frozen=True)
class Subspace:
    """An orthonormal basis with its images under G.

    Args:
        vectors: V (k, n), rows v_i with v_i . v_j = delta_ij.
        images: Rows G v_i, shape (k, n).
    """

    vectors: Tensor
    images: Tensor

    def at(self, weights: Tensor) -> Tensor:
        """sum_i w_i v_i, shape (n,).

        Args:
            weights: w, shape (k,).
        """
        return self.vectors.mT @ weights

    def image_at(self, weights: Tensor) -> Tensor:
        """G sum_i w_i v_i, shape (n,), from the images.

        Args:
            weights: w, shape (k,).
        """
        return self.images.mT @ weights

    def project_operator(self) -> Tensor:
        """T (k, k), T_ij = v_i . G v_j, symmetrised."""
        return symmetrise(self.vectors @ self.images.mT)


@dataclass(frozen=True)
class Iterate:
    """A vector that a solver passed on its way: x and (G + damping I) x.

    Args:
        value: x, shape (n,).
        image: (G + damping I) x, shape (n,).
    """

    value: Tensor
    image: Tensor


@dataclass(frozen=True)
class Solution:
    """What a solver found. `value` is its best vector, whatever the status.

    Args:
        value: x, shape (n,), differentiable in b where that requires a gradient; what follows is not.
        residual: |b - (G + damping I) x|, a scalar tensor.
        steps: Number of products with G.
        status: Why the solver stopped.
        image: (G + damping I) x = b - r, shape (n,), so that nobody computes it again.
        extra: Estimates that a particular solver makes, by name.
        basis: The space that was searched, where the solver kept it.
        iterates: Earlier vectors, oldest first, where the solver kept them.
        bend: b, shape (n,), where the step to take is t x + t^2 b: its second-order correction.
    """

    value: Tensor
    residual: Tensor
    steps: int
    status: Status
    image: Tensor
    extra: dict[str, float] = field(default_factory=dict[str, float])
    basis: Subspace | None = None
    iterates: tuple[Iterate, ...] = ()
    bend: Tensor | None = None

    def __repr__(self) -> str:
        shape = f"a tensor of shape {tuple(self.value.shape)}"
        residual = float(self.residual.detach())
        return write_choices(self, value=shape, residual=residual, steps=self.steps, status=self.status.value)


class Solver(Explained):
    """Solves (G + damping I) x = b. Stops early with its best vector and says so; numerical trouble never raises."""

    @abstractmethod
    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        """x with (G + damping I) x = b.

        For a singular system it is the minimum-norm least-squares solution, where the solver's page says so.

        Args:
            operator: G, of size n.
            rhs: b, shape (n,).
            damping: In the operator's units, >= 0.
            guess: x_0, shape (n,): where an iterative method starts. None starts at zero.

        Returns:
            The best vector found, with its residual and the reason why the solver stopped.

        Raises:
            ValueError: For wrong shapes, a negative damping or a b that is not finite.
        """


class UnitSolver(Solver):
    """A solver that sees b with entries near 1: |b|^2 then neither overflows (float32: beyond 1e19) nor vanishes."""

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        check_system(operator, rhs, damping, guess)
        scale, b = find_power_of_two(rhs), rhs.detach()
        start = None if guess is None else guess.detach() / scale
        with torch.autocast(rhs.device.type, enabled=False):  # products of two operands would be rounded
            solution = self._solve(operator, b / scale, damping, start, scale)
            solution = restore_units(solution, scale, operator, b, damping)
        if not (rhs.requires_grad and torch.is_grad_enabled()):
            return solution

        def invert(vector: Tensor) -> Tensor:
            if vector is rhs:  # solved already
                return solution.value.clone()
            return self.solve(operator, vector, damping=damping).value

        # the inverse is symmetric, so that a backward pass is another solve
        return replace(solution, value=apply_linear(invert, invert, rhs))

    @abstractmethod
    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        """The solution for b / scale, from x_0 / scale."""


def check_system(operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None = None) -> None:
    """Check that (G + damping I) x = rhs, with rhs (n,) and a guess of its shape, is a well-formed system."""
    if not isinstance(operator, Operator):
        raise TypeError(
            f"operator is {type(operator).__name__}, expected a natgrad Operator: wrap a matrix with "
            "ng.operators.DenseOperator(matrix), or take a metric at a point with metric.at(params, inputs)"
        )
    for name, vector in (("rhs", rhs), ("guess", guess)):
        if vector is None:
            continue
        if not isinstance(vector, Tensor) or vector.shape != (operator.size,):
            raise ValueError(
                f"{name} has shape {show_shape(vector)}, expected ({operator.size},), the operator's size; "
                "flatten a dict of tensors with ng.Space(params).flatten(...)"
            )
        if vector.device != operator.device:
            raise ValueError(f"{name} is on {vector.device}, the operator on {operator.device}; move it there")
        if vector.dtype != operator.dtype:
            raise ValueError(f"{name} is {vector.dtype}, the operator {operator.dtype}; convert with {name}.to(...)")
        if not all_finite(vector):
            raise ValueError(f"{name} is not finite: look for a NaN or an overflow in the gradient; nothing was solved")
    if not 0 <= float(damping) < float("inf"):
        raise ValueError(f"damping is {damping}, expected a finite number >= 0")


def measure_solution(product: Product, rhs: Tensor, damping: float, value: Tensor, steps: int) -> Solution:
    """The solution of a direct method with its residual measured by one product v -> G v."""
    image = product(value) + damping * value
    if not (all_finite(value) and all_finite(image)):
        return return_zero(rhs, steps)
    residual = measure_norm(rhs - image)
    tolerance = torch.finfo(rhs.dtype).eps ** 0.5 * measure_norm(rhs)
    status = Status.CONVERGED if bool(residual <= tolerance) else Status.INACCURATE
    return Solution(value, residual, steps + 1, status, image)


def return_zero(rhs: Tensor, steps: int) -> Solution:
    """x = 0, where numbers overflow and nothing better is known."""
    zero = torch.zeros_like(rhs)
    return Solution(zero, measure_norm(rhs), steps, Status.NON_FINITE, zero)


def find_power_of_two(rhs: Tensor) -> float:
    """A power of two near the largest entry of b, a normal number of its dtype; 1 for b = 0."""
    largest = float(rhs.detach().abs().max()) if len(rhs) else 0.0
    if not largest:
        return 1.0
    kind = torch.finfo(rhs.dtype)
    least, most = math.frexp(kind.tiny)[1], math.frexp(kind.max)[1] - 1
    return 2.0 ** min(max(math.frexp(largest)[1], least), most)


def restore_units(solution: Solution, scale: float, operator: Operator, rhs: Tensor, damping: float) -> Solution:
    """The solution for b = rhs (n,), from that for b / scale, as its dtype can hold it."""
    value, image, kind = scale * solution.value, scale * solution.image, torch.finfo(rhs.dtype)
    if not (all_finite(value) and all_finite(image)):
        zero = return_zero(rhs / scale, solution.steps)
        return replace(zero, residual=scale * zero.residual, extra=solution.extra, basis=solution.basis)
    restored = replace(solution, value=value, image=image, residual=scale * solution.residual)
    largest = value.abs().max() if len(rhs) else 1.0
    if solution.status is Status.NON_FINITE or largest >= kind.tiny / kind.eps or not bool(rhs.any()):
        return restored
    # round-off of numbers so small is large: measured once more
    image = operator.mv(value).detach() + damping * value if largest > 0 else torch.zeros_like(rhs)
    relative = measure_norm((rhs - image) / scale)
    missed = solution.status is Status.CONVERGED and bool(relative > kind.eps**0.5 * measure_norm(rhs / scale))
    status = Status.INACCURATE if missed else solution.status
    return replace(restored, image=image, residual=scale * relative, steps=solution.steps + 1, status=status)


# b = U w, known by its weights w, as nonlinear least squares knows it


class FactorisedSystem(Protocol):
    """(U U^T + l I) x = U w, ready for several w."""

    def solve(self, weights: Tensor) -> Solution:
        """The solution for b = U w.

        Args:
            weights: w, shape (r,).
        """
        ...

    def find_value(self, weights: Tensor) -> Tensor:
        """The value of that solution alone, (n,), without the products that measure its residual.

        Args:
            weights: w, shape (r,).
        """
        ...

    def change_damping(self, damping: float) -> FactorisedSystem:
        """The same system with another l, for less than a new one where something can be kept.

        Args:
            damping: l >= 0.
        """
        ...


class RowSolver(Solver):
    """A solver of (U U^T + l I) x = U w as well, for G = U U^T with r columns: U (U^T U + l I)^-1 w.

    That subtracts no large numbers, however small the damping, and one factorisation serves several w.
    """

    @abstractmethod
    def factorise(self, operator: Operator, damping: float) -> FactorisedSystem:
        """What solves (U U^T + damping I) x = U w for any w.

        Args:
            operator: G, with `sample_rows`.
            damping: In the operator's units, >= 0.

        Raises:
            ValueError: For an operator without rows.
        """


def write_rows(operator: Operator) -> SampleRows:
    """U by its products, from the root where the operator has no rows. ValueError for one without a root."""
    if operator.sample_rows is not None:
        return operator.sample_rows
    root = operator.root()
    if root is None:
        raise ValueError(f"operator {operator!r} has no root U with G = U U^T: use ng.CG() or ng.Direct()")
    return WrittenColumns(root)


def require_rows(operator: Operator) -> SampleRows:
    """U by its products. ValueError for an operator without rows."""
    rows = operator.sample_rows
    if rows is None:
        raise ValueError(f"operator {operator!r} has no rows: use solve(operator, b) with ng.Direct() or ng.CG()")
    return rows
