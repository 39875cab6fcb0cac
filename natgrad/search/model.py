"""A Gaussian search distribution N(mean, sigma^2 A A^T): what a way to store and move one must supply."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.search.ranking import Ranking

State = dict[str, Any]
"""What changes between generations: tensors and numbers, with `mean` (d,) and `sigma` among them."""


class GaussianModel(ABC):
    """How the distribution of a search is stored and moved: N(mean, sigma^2 A A^T).

    A model is a frozen choice; the state is passed in and returned.
    """

    @abstractmethod
    def start(self, mean: Tensor, sigma: float, popsize: int) -> State:
        """The state at N(mean, sigma^2 I).

        Args:
            mean: Shape (d,).
            sigma: A common standard deviation.
            popsize: Candidates per generation.
        """

    @abstractmethod
    def steps(self, state: State, normals: Tensor) -> Tensor:
        """A z for every row z; candidates are mean + sigma A z.

        Args:
            state: The present state.
            normals: z, draws from N(0, I), shape (popsize, d).
        """

    @abstractmethod
    def whiten(self, state: State, steps: Tensor) -> Tensor:
        """A^-1 y for every row y.

        Args:
            state: The present state.
            steps: y, shape (popsize, d).
        """

    @abstractmethod
    def advance(self, state: State, normals: Tensor, steps: Tensor, ranking: Ranking) -> State:
        """The state after one generation.

        Args:
            state: The present state.
            normals: z, shape (popsize, d), best first.
            steps: A z, shape (popsize, d), best first.
            ranking: Of the candidates' values.
        """

    def popsize(self, d: int) -> int:
        """Candidates per generation by default.

        Args:
            d: Number of variables.
        """
        return 4 + int(3 * math.log(d))  # Hansen's

    def variances(self, state: State) -> Tensor | None:
        """Diagonal of A A^T, shape (d,), or None if the model does not have it.

        Args:
            state: The present state.
        """
        return None

    def trouble(self, state: State) -> str | None:
        """Why the distribution cannot be used any longer, or None.

        Args:
            state: The present state.
        """
        return None

    def check(self, d: int) -> None:
        """Check that the model fits the problem.

        Args:
            d: Number of variables.

        Raises:
            ValueError: If it does not.
        """


def build_identity(mean: Tensor) -> Tensor:
    """The identity (d, d), in the dtype and on the device of a mean."""
    return torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
