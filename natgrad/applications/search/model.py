"""A Gaussian search distribution N(mean, sigma^2 A A^T): what a way to store and move one must supply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.ranking import Ranking, default_popsize

State = dict[str, Any]
"""What changes between generations: tensors and numbers, with `mean` (d,) and `sigma` among them."""


class GaussianModel(ABC):
    """How the distribution of a search is stored and moved. Choices are frozen; the state is passed in and returned."""

    @abstractmethod
    def start(self, mean: Tensor, sigma: float, popsize: int) -> State:
        """The state at N(mean, sigma^2 I)."""

    @abstractmethod
    def steps(self, state: State, normals: Tensor) -> Tensor:
        """A z for rows z of `normals` (popsize, d): candidates are mean + sigma A z."""

    @abstractmethod
    def whiten(self, state: State, steps: Tensor) -> Tensor:
        """A^-1 y for rows y of `steps` (popsize, d)."""

    @abstractmethod
    def advance(self, state: State, normals: Tensor, steps: Tensor, ranking: Ranking) -> State:
        """The state after one generation; normals and steps (popsize, d) come best first."""

    def popsize(self, d: int) -> int:
        """Candidates per generation by default."""
        return default_popsize(d)

    def variances(self, state: State) -> Tensor | None:
        """Diagonal of A A^T, (d,), or None where it is not at hand."""
        return None

    def trouble(self, state: State) -> str | None:
        """Why the distribution cannot be used any longer, or None."""
        return None

    def check(self, d: int) -> None:
        """ValueError if the model does not fit d variables."""


def eye_like(mean: Tensor) -> Tensor:
    """The identity (d, d) beside a mean (d,)."""
    return torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
