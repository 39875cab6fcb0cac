"""The metric of ratio matching: score matching for binary variables, where flips take the place of derivatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.densities import (
    Density,
    LogP,
    as_density,
    check_binary,
    check_density,
    check_mask,
    check_weights,
)
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Call, RandomState, copy_tensors, unwrap_examples
from natgrad.ground.spaces import Params
from natgrad.metrics.base import check_chunks
from natgrad.metrics.score import DensityMetric, Diagonals, pull_back
from natgrad.operators import Operator


@explain_calls
def ratio_metric(
    log_p: LogP | nn.Module | Density,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
) -> RatioMetric:
    """G = 2 E_x sum_i [s_i (1 - s_i)]^2 grad r_i grad r_i^T, s_i = sigmoid(r_i).

    r_i = log p(x) - log p(x with bit i flipped). G is the Hessian of the mean of J (`ng.ratio_matching_loss`) where the
    data come from the model.

    Args:
        log_p: As in `score_metric`.
        mask: As in `score_metric`.
        weights: How often each example of X came, shape (b,), as for the loss. With the model's own probabilities of
            all states, the expectation is the model's. Not together with `chunk_size`.
        chunk_size: As in `score_metric`.

    Returns:
        A metric; `.at(params, X)`, X (b, N) of 0 and 1, gives the operator, a mean over the examples of X.

    Reference:
        The loss: Hyvarinen 2007.

    Example:
        >>> ising = ng.Boltzmann(3)
        >>> states = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
        >>> ng.ratio_metric(ising).at(ising.parameters(), states).dense().shape
        torch.Size([6, 6])
    """
    check_chunks(chunk_size)
    if weights is not None and chunk_size is not None:
        raise ValueError("weights and chunk_size do not go together: leave one of them out")
    return RatioMetric(as_density(log_p), log_p, mask, weights, chunk_size)


@dataclass(frozen=True, repr=False)
class RatioMetric(DensityMetric):
    """What `ratio_metric` gives: G = 2 E_x sum_i [s_i (1 - s_i)]^2 grad r_i grad r_i^T.

    Args:
        density: log p, as a density.
        log_p: What the user passed, by which an optimiser knows its losses.
        mask: True for the variables i that the sum runs over, shape (N,) or (b, N). None: all.
        weights: How often each example came, shape (b,).
        chunk_size: Examples per graph, to bound memory. None: all at once.
    """

    density: Density
    log_p: Any
    mask: Tensor | None = field(default=None, compare=False)
    weights: Tensor | None = field(default=None, compare=False)
    chunk_size: int | None = None

    def _read(self, params: Params, inputs: Any) -> Tensor:
        checked = copy_tensors(check_density(self.density, params, unwrap_examples(inputs)))
        return check_binary(checked, next(iter(params.values())).dtype)

    def _find_rows(self, params: Params, examples: Tensor) -> Tensor | None:
        jacobian = self.density.ratio_jacobian(params, examples)  # (b, N, K)
        if jacobian is None:
            return None
        entries = self.entries(examples, self.density.ratios(params, examples)) / len(examples)
        return entries.sqrt().unsqueeze(2) * jacobian

    def _pull_back(self, params: Params, random: RandomState | None, examples: Tensor) -> Operator:
        ratios = (self.density.ratios, params, Call((examples,)), random)
        return pull_back(*ratios, lambda ratios: Diagonals(self.entries(examples, ratios)))

    def entries(self, examples: Tensor, ratios: Tensor) -> Tensor:
        """What grad r_i grad r_i^T counts with, shape (b, N).

        Args:
            examples: X, shape (b, N).
            ratios: r, shape (b, N).
        """
        slopes = torch.sigmoid(ratios) * torch.sigmoid(-ratios)  # not s (1 - s), which rounds to 0
        entries = 2 * slopes.square()
        counted, shares = check_mask(self.mask, examples), check_weights(self.weights, examples)
        entries = entries if counted is None else entries * counted
        return entries if shares is None else entries * (len(examples) * shares.to(entries)).unsqueeze(1)
