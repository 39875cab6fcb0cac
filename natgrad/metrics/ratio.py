"""The metric of ratio matching: score matching for binary variables, where flips take the place of derivatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.densities import Density, LogP, as_density, check_binary, check_density, check_mask, guarded
from natgrad.metrics.base import Metric
from natgrad.metrics.score import Diagonals, check_chunks, chunked, examples_of, pulled
from natgrad.operators import Form, Operator
from natgrad.pure import RandomState
from natgrad.spaces import Params


def ratio_metric(
    log_p: LogP | nn.Module | Density, *, mask: Tensor | None = None, chunk_size: int | None = None
) -> RatioMetric:
    """G = 2 E_x sum_i [s_i (1 - s_i)]^2 grad r_i grad r_i^T, s_i = sigmoid(r_i).

    r_i = log p(x) - log p(x with bit i flipped). `.at(params, X)`, X (b, N) of 0 and 1: the mean over its examples. It
    is the Hessian of the mean of J (`ng.ratio_matching_loss`; Hyvarinen 2007) where the data come from the model.
    log_p, mask, chunk_size: as in `score_metric`.
    """
    check_chunks(chunk_size)
    return RatioMetric(as_density(log_p), log_p, mask, chunk_size)


@dataclass(frozen=True)
class RatioMetric(Metric):
    """See `ratio_metric`."""

    density: Density
    log_p: Any
    mask: Tensor | None = field(default=None, compare=False)
    chunk_size: int | None = None

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        checked = check_density(self.density, params, examples_of(inputs)).detach()
        examples = check_binary(checked, next(iter(params.values())).dtype)
        with guarded(self.density, params, examples):
            return chunked(examples, self.chunk_size, partial(self._term, params, random))

    def _term(self, params: Params, random: RandomState | None, examples: Tensor) -> Operator:
        return pulled(self.density.ratios, params, examples, random, partial(self._form, examples))

    def _form(self, examples: Tensor, ratios: Tensor) -> Form:
        slopes = torch.sigmoid(ratios) * torch.sigmoid(-ratios)  # not s (1 - s), which rounds to 0
        entries = 2 * slopes.square()
        weights = check_mask(self.mask, examples)
        return Diagonals(entries if weights is None else entries * weights)
