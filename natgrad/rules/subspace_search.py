"""A search for the step within the space that the solver searched: Krylov subspace descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh
from natgrad.ground.typed_torch import measure_norm
from natgrad.rules.base import Objective, Rule, require_loss
from natgrad.rules.quadratic import FlatStep, Memory, Quadratic, Step
from natgrad.solvers import Subspace


@runtime_checkable
class Differentiable(Protocol):
    """An objective that knows its gradient: `loss_at` as an optimizer passes it to a rule."""

    def __call__(self, vector: Tensor) -> float:
        """The loss at theta + d, NaN where it is not finite.

        Args:
            vector: d, shape (n,).
        """
        ...

    def gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        """The loss at theta + d and its gradient (n,) there.

        Args:
            vector: d, shape (n,).
        """
        ...


@dataclass(frozen=True)
class SubspaceSearch(Rule):
    """Minimises the loss itself over the space that the solver searched, by BFGS: Krylov subspace descent.

    Needs a solver that keeps its basis, `ng.KrylovSubspace(dimension=)`. Starts from the damped solution in the space,
    or from 0 where that raises the loss. A loss that is not finite is a rejection. The learning rate is the share of
    the step found that is taken, 1 for all of it. The loss should be on other data than the basis (`opt.search_on`,
    `search_batch=`): the few dimensions are fitted to it.

    Args:
        steps: Of BFGS, at most; each costs a gradient of the loss at a trial point, and a loss more per backtracking.
        progress: It stops when a step gains less than this share of what was gained so far.

    Raises:
        ValueError: For a solver without a basis, steps < 1 or progress < 0.

    Reference:
        Vinyals & Povey 2012.
    """

    needs_form = False
    steps: int = 10
    progress: float = 1e-3

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps}, expected an integer >= 1")
        if not self.progress >= 0:
            raise ValueError(f"progress is {self.progress}, expected a number >= 0")

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        require_loss(self, loss_at)
        basis = model.system.basis
        if basis is None:
            raise ValueError(f"{self} searches the solver's space: use solver=ng.KrylovSubspace(dimension=...)")
        if not isinstance(loss_at, Differentiable):
            raise ValueError(f"{self} needs the gradient of the loss at trial points, which {loss_at!r} does not give")
        if not len(basis.vectors):
            return model.nothing(), memory
        weights = _Bfgs(model, basis, loss_at, self).run()
        return model.system.rated(FlatStep(basis.at(weights), basis.image_at(weights))), memory


class _Bfgs:
    """BFGS over the weights a of d = V^T a, started with the inverse of the quadratic model's matrix."""

    def __init__(self, model: Quadratic, basis: Subspace, loss_at: Differentiable, choices: SubspaceSearch) -> None:
        self.basis, self.loss_at, self.choices = basis, loss_at, choices
        gradient, damping = model.gradient, model.damping
        assert isinstance(gradient, Tensor)
        values, vectors = eigh(basis.project_operator())
        values = values.abs() + (damping.mean() if isinstance(damping, Tensor) else damping)
        # a direction without curvature gets the smallest that the dtype resolves, not an infinite step
        values = values.clamp(min=float(values.max()) * torch.finfo(values.dtype).eps ** 0.5)
        self.inverse = (vectors / values) @ vectors.mT
        self.point, self.loss = torch.zeros_like(values), float(model.loss)
        self.first = self.loss
        start = -self.inverse @ (basis.vectors @ gradient)  # the damped solution in the space
        value, slope = self._at(start)
        if value < self.loss:
            self.point, self.loss, self.slope = start, value, slope
        else:
            self.slope = self._at(self.point)[1]

    def run(self) -> Tensor:
        """The weights of the lowest loss that was found."""
        for _ in range(self.choices.steps):
            before = self.loss
            if not self._advance():
                break
            if before - self.loss < self.choices.progress * (self.first - self.loss):
                break
        return self.point

    def _at(self, weights: Tensor) -> tuple[float, Tensor]:
        value, gradient = self.loss_at.gradient(self.basis.at(weights))
        return value, self.basis.vectors @ gradient

    def _advance(self) -> bool:
        """One step to a lower loss (Armijo, by halves), and the update of the inverse. False if there is none."""
        direction = -self.inverse @ self.slope
        promise = float(self.slope @ direction)
        if not -promise > 2 * self.choices.progress * (self.first - self.loss):  # -promise / 2 is the gain to expect
            return False
        rate = 1.0
        for trial in range(10):
            point = self.point + rate * direction
            value = self._at(point) if trial == 0 else (self.loss_at(self.basis.at(point)), None)
            if value[0] <= self.loss + 1e-4 * rate * promise:
                slope = self._at(point)[1] if value[1] is None else value[1]
                self._update(point - self.point, slope - self.slope)
                self.point, self.loss, self.slope = point, value[0], slope
                return True
            rate *= 0.5
        return False

    def _update(self, moved: Tensor, turned: Tensor) -> None:
        """B <- (I - s y^T / s.y) B (I - y s^T / s.y) + s s^T / s.y, where the curvature s.y is positive."""
        along = moved @ turned
        if not bool(along > torch.finfo(moved.dtype).eps * measure_norm(moved) * measure_norm(turned)):
            return
        left = torch.eye(len(moved), dtype=moved.dtype, device=moved.device) - torch.outer(moved, turned) / along
        self.inverse = left @ self.inverse @ left.mT + torch.outer(moved, moved) / along
