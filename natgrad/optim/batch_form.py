"""d^T G d on a step's own batch, exact over labels, from the model's outputs at a point a little further along d."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Likelihood
from natgrad.optim.distributed import Ranks
from natgrad.optim.last_pass import Recall
from natgrad.optim.recorded_pass import RecordedLoss, RepeatError
from natgrad.optim.reduction_ratio import replaying
from natgrad.pure import map_tensors, pure_model, run_detached
from natgrad.rules import Parts
from natgrad.typed_torch import list_numbers, measure_norm
from natgrad.whole_tensors import any_split

# in float64, and in less
MOVED = {True: 1e-10, False: 3e-8}  # nats that the trial point lies away, as far as is known
LEAST = {True: 1e-7, False: 1e-5}  # share of the parameters that it moves at least
FAR, TRIALS = 10.0, 3  # times as far as was known: another trial, nearer; of so many
DRAWS = 32  # of labels, for a likelihood without a Fisher form


class BatchForm:
    """d -> d^T G d of the pass that a step's gradient came from, G exact over labels: one forward pass per question.

    J d = (f(theta + h d) - f(theta)) / h, on the pass's own inputs, dropout masks and batch statistics. Nothing of the
    model changes.

    Args:
        model: The network.
        criterion: Its loss.
        recall: What happened since the last step.
        named: The parameters.
        ranks: The processes that train the model.
        nats: Nats per example in one unit of d^T G d / 2.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        recall: Recall,
        named: Mapping[str, Tensor],
        ranks: Ranks,
        nats: Tensor | float,
    ) -> None:
        self.model, self.criterion, self.recall = model, criterion, recall
        self.named, self.ranks, self.nats = named, ranks, float(nats)

    def measure(self, vector: Parts, nats: float) -> float:
        """d^T G d, a mean over the rows of all processes; NaN where the pass cannot be done again.

        Args:
            vector: d.
            nats: How far d moves the model, as far as is known, in nats per example.
        """
        if any_split(self.named.values()):  # a pass at other parameters has no place in a model in parts
            return math.nan
        least, found = self._least_share(vector), math.nan
        share = self._share(vector, nats, least)
        for _ in range(TRIALS):
            found = self._pool_form(vector, share)
            moved = 0.5 * self.nats * found
            if not share**2 * moved > FAR * self._near(vector) or share <= least:
                break
            share = max(least, math.sqrt(self._near(vector) / moved))  # it went much farther than was known
        return found

    def _pool_form(self, vector: Parts, share: float) -> float:
        """The form over all processes' rows."""
        try:
            found, rows = self._own(vector, share)
        except RepeatError as error:
            warnings.warn(f"{error}. Steps are measured on averages instead of on their own batch", stacklevel=2)
            found, rows = math.nan, 1.0
        except (ValueError, NotImplementedError, RuntimeError):
            # written over since, no known function of the outputs, only one pass allowed: not known
            found, rows = math.nan, 1.0
        pair = torch.tensor([found * rows, rows], dtype=torch.float64, device=next(iter(self.named.values())).device)
        total, weight = list_numbers(self.ranks.sum(pair))
        return total / weight if weight else math.nan

    def _share(self, vector: Parts, nats: float, least: float) -> float:
        """h: so small that the outputs go straight, so large that they are told from rounding."""
        near = math.sqrt(self._near(vector) / nats) if nats > 0 else 1.0
        return min(1.0, max(least, near))

    def _near(self, vector: Parts) -> float:
        """How many nats the trial point lies away."""
        return MOVED[self._is_double(vector)]

    def _least_share(self, vector: Parts) -> float:
        """The least h: a shorter step would be lost in the parameters' own rounding."""
        if any(torch.finfo(self.named[name].dtype).bits < 32 for name in vector):
            return 1.0
        moved = float(vector.norm())
        size = math.sqrt(sum(float(measure_norm(self.named[name])) ** 2 for name in vector))
        return min(1.0, LEAST[self._is_double(vector)] * size / moved) if moved > 0 else 1.0

    def _is_double(self, vector: Parts) -> bool:
        return all(self.named[name].dtype == torch.float64 for name in vector)

    def _own(self, vector: Parts, share: float) -> tuple[float, float]:
        """The form on this process's rows, and their number."""
        forms, weights = list[float](), list[float]()
        moved = {
            name: p.detach() + share * vector[name].to(p.dtype) if name in vector.parts else p.detach()
            for name, p in self.named.items()
        }
        with replaying(self.model, self.recall):
            for told in self.recall.used_losses():
                if told.route.problem:
                    raise ValueError(told.route.problem)
                forms.append(self._form(told, moved, share))
                weights.append(float(told.rows) if math.isnan(told.count) else told.count)
        rows = sum(weights)
        if not rows:  # a batch without rows, beside those of other processes
            return 0.0, 0.0
        return sum(w * form for w, form in zip(weights, forms, strict=True)) / rows, rows

    def _form(self, told: RecordedLoss, moved: Mapping[str, Tensor], share: float) -> float:
        """Of one loss: sum_i w_i (J_i d)^T M_i (J_i d)."""
        select, data = told.settle(self.model, self.named, self.recall.outputs), told.data()
        pure = pure_model(self.model, data.inputs, data.random)

        def outputs_at(params: Mapping[str, Tensor]) -> Any:
            def choose_outputs() -> Any:
                found = pure({name: p.detach().requires_grad_() for name, p in params.items()})
                return found if select is None else select(found)

            return run_detached(choose_outputs)

        same = told.dtype == next(iter(self.named.values())).dtype  # under autocast the pass was rounded
        before = told.outputs if same else outputs_at(self.named)
        start, end = (map_tensors(tree, widen) for tree in (before, outputs_at(moved)))
        change = (self.criterion.family.rows(end) - self.criterion.family.rows(start)) / share
        return float(self.criterion.weights(start, data.targets) @ squares_of(self.criterion.family, start, change))


def squares_of(family: Likelihood, outputs: Any, change: Tensor) -> Tensor:
    """t_i^T M_i t_i of every row, shape (R,).

    Args:
        family: Whose Fisher form M is; of one without the exact form it is a mean over drawn labels.
        outputs: Where M is taken, as the model returns them.
        change: t, shape (R, m).
    """
    rows = family.rows(outputs)
    if type(family).fisher is not Likelihood.fisher or type(family).mv is not Likelihood.mv:
        return (change * family.mv(rows, change)).sum(-1)
    generator = torch.Generator(rows.device).manual_seed(0)
    scores = (family.score(outputs, family.sample(outputs, generator)) for _ in range(DRAWS))
    return torch.stack([(score * change).sum(-1).square() for score in scores]).mean(0)


def widen(outputs: Tensor) -> Tensor:
    """At least in float32."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32)) if outputs.is_floating_point() else outputs
