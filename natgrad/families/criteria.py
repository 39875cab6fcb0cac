"""A loss from `torch.nn` understood as the likelihood it stands for, in the units of its mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.families.base import (
    Likelihood,
    SeparableLikelihood,
    Wrapper,
    check_range,
    check_same_shape,
    differentiate_outputs,
    require_one_tensor,
    require_tensor_targets,
    split_pair,
)
from natgrad.families.discrete import Bernoulli, Categorical, Poisson
from natgrad.families.gaussian import Gaussian, HeteroscedasticGaussian
from natgrad.families.robust_errors import Huber, Laplace, find_temperature, sum_errors
from natgrad.families.special_functions import divergence_terms
from natgrad.ground.linalg import as_columns
from natgrad.ground.messages import write_choices
from natgrad.ground.pure import leaves, map_tensors

IGNORED = "targets: every one is ignored or has weight zero, so that the mean loss is 0 / 0"
CERTAIN = 1e-12
"""Least p (1 - p) that `BCELoss` divides by."""
ROUNDING = 0.1
"""Of the logarithm of a sum of probabilities; log-softmax in half precision is within .03."""


@dataclass(frozen=True)
class Weighed:
    """Targets without gaps, and what each counts in the mean over rows, as `Likelihood.weigh` gives them."""

    targets: Any
    by_example: Tensor  # (b, R / b, 1) or (b, R / b, m), so that examples can be picked

    @property
    def weights(self) -> Tensor:
        """Of the rows, (R, 1) or (R, m)."""
        return self.by_example.flatten(0, 1)


@dataclass(frozen=True)
class Tempered:
    """Targets, and the temperature of their loss over all processes' errors."""

    targets: Any
    temperature: float


def check_layout(family: Likelihood, outputs: Any, targets: Any) -> None:
    """ValueError for (b,) targets of (b, 1) outputs and the like, unless the likelihood draws such: they broadcast."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.shape == targets.shape:
        return
    if outputs.numel() != targets.numel():  # as class numbers
        return
    with torch.no_grad():
        drawn = family.sample(outputs[:1].detach(), torch.Generator(outputs.device).manual_seed(0))
    if isinstance(drawn, Tensor) and drawn.shape[1:] != targets.shape[1:]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, expected {(len(outputs), *drawn.shape[1:])} as "
            f"{type(family).__name__} draws them; reshape one of them, nothing is broadcast"
        )


@dataclass(frozen=True)
class MeanNLL:
    """The mean over rows of a likelihood's -log p, with what its targets count."""

    family: Likelihood

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss, a scalar tensor."""
        targets = self.weigh(outputs, targets)
        if isinstance(targets, Weighed):
            weights = targets.weights
            known = weights.masked_fill(weights.isnan(), 0)  # none counts: the loss is NaN, and its gradient zero
            return self.family.weighted_nll(outputs, targets.targets, known).mean() + (0 * weights).sum()
        return self.family.nll(outputs, targets).mean()

    def weigh(
        self, outputs: Any, targets: Any, weight: Any = None, add: Callable[[Tensor], Tensor] | None = None
    ) -> Any:
        """The targets with what they count, where they do not all count alike; arguments as `Likelihood.weigh` has."""
        if isinstance(targets, Weighed) or (weight is None and not (self.family.masks and targets is not None)):
            return targets
        filled, weights = self.family.weigh(outputs, targets, weight, add)
        examples = len(next(leaves(outputs)))
        return Weighed(filled, weights.reshape(examples, len(weights) // max(examples, 1), weights.shape[1]))


@dataclass(frozen=True)
class Criterion:
    """A loss, its likelihood, and how the one's units follow from the other's.

    The loss's mean form is sum_i w_i nll_i over rows, sum_i w_i = 1 up to the criterion's own conventions; the metric
    of the mean loss is sum_i w_i J_i^T M_i J_i. The value that the user sees is `scale` times the mean form.

    Args:
        family: The likelihood that the loss stands for.
        loss: The mean loss, (outputs, targets) -> scalar tensor.
        weigh: (outputs, events) -> unnormalised row weights (R,) and the normaliser of the mean, a scalar tensor.
            None: equal weights.
        summed: True under reduction='sum'.
        entrywise: The mean runs over single entries.
        prepare: (outputs, targets) -> the targets as the likelihood takes them, where the loss takes others. None:
            they are the same.
        over_classes: The mean runs over the entries of a row too.
        tempered: The density at tau = 1, if the loss of a row is tau times -log p of one as wide as the batch's errors.
        maximize: True if the loss is to rise: what is minimised, and the mean form is of, is minus it.
    """

    family: Likelihood
    loss: Callable[[Any, Any], Tensor]
    weigh: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None
    summed: bool = False
    entrywise: bool = False
    prepare: Callable[[Any, Any], Any] | None = None
    over_classes: bool = False
    tempered: Laplace | Huber | None = None
    maximize: bool = False
    recipe: tuple[Callable[..., Criterion], tuple[Any, ...]] | None = field(
        default=None, init=False, repr=False, compare=False
    )  # what it is made of anew where it travels: the functions above are closures

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return super().__reduce_ex__(protocol) if self.recipe is None else self.recipe

    def __repr__(self) -> str:
        kinds = {name: getattr(self, name) or None for name in ("summed", "entrywise", "maximize")}
        return write_choices(self, family=self.family, **kinds)

    @property
    def bare(self) -> Likelihood:
        """The likelihood without what is around it."""
        return self.family.family if isinstance(self.family, Wrapper) else self.family

    @property
    def errors(self) -> Gaussian | Laplace | Huber | None:
        """The density of errors of a fixed width that the loss stands for, None for other losses."""
        family = self.bare
        return family if isinstance(family, (Gaussian, Laplace, Huber)) and not self.maximize else None

    def pick_logits(self, outputs: Any) -> tuple[Any, Tensor | None]:
        """The logits of a record or a pair that a model returned, where the likelihood is of one tensor.

        Args:
            outputs: What the model returned.

        Returns:
            The logits, or the outputs as they are, and the loss that the model computed itself, None without one.
        """
        of_one = isinstance(self.family, Entrywise) or isinstance(self.bare, (SeparableLikelihood, Categorical))
        if isinstance(outputs, Tensor) or not of_one:
            return outputs, None

        def may_be_loss(part: Any) -> bool:
            return part is None or (isinstance(part, Tensor) and part.dim() == 0)

        if type(outputs) in (tuple, list):
            pair = sorted(outputs[:2], key=may_be_loss)
            if len(pair) == 2 and isinstance(pair[0], Tensor) and pair[0].dim() > 0 and may_be_loss(pair[1]):
                return pair[0], pair[1]
            return outputs, None
        logits, loss = getattr(outputs, "logits", None), getattr(outputs, "loss", None)
        if not isinstance(logits, Tensor):
            return outputs, None
        return logits, loss if isinstance(loss, Tensor) and loss.dim() == 0 else None

    def value(self, outputs: Any, targets: Any) -> Tensor:
        """The loss as the user wrote it, a scalar tensor.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.

        Raises:
            ValueError: For targets that the likelihood cannot produce, of a dtype that the loss does not take, or that
                are given in place of the outputs.
        """
        required = [any(leaf.requires_grad for leaf in leaves(tree)) for tree in (outputs, targets)]
        if required == [False, True]:
            raise ValueError(
                "the targets require a gradient and the outputs do not, expected the model's outputs first: call "
                "optimizer.loss(outputs, targets)"
            )
        self.check(outputs, targets)
        return self.evaluate(outputs, targets)

    def evaluate(self, outputs: Any, targets: Any) -> Tensor:
        """The same of targets that were looked at already.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.

        Raises:
            ValueError: For targets of a dtype that the loss does not take.
        """
        if isinstance(targets, Tempered):
            targets = targets.targets
        if isinstance(self.loss, (nn.HuberLoss, nn.SmoothL1Loss)):  # torch's derivatives of these take one dtype alone
            dtype = torch.promote_types(outputs.dtype, targets.dtype)
            outputs, targets = outputs.to(dtype), targets.to(dtype)
        try:
            return self.loss(outputs, targets)
        except RuntimeError as error:
            if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
                raise
            alike = outputs.shape == targets.shape  # else class numbers
            if targets.dtype == (outputs.dtype if alike else torch.int64):
                raise
            raise ValueError(
                f"targets are {targets.dtype}, the outputs {outputs.dtype}, and torch's loss does not take them so: "
                f"convert them with {'targets.to(outputs.dtype)' if alike else 'targets.long()'}"
            ) from error

    def events(self, outputs: Any, targets: Any) -> Any:
        """The targets as the likelihood takes them: labels moved to the places that predict them, bits of a class.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.
        """
        if isinstance(targets, (Weighed, Tempered)):
            return targets.targets
        return targets if self.prepare is None else self.prepare(outputs, targets)

    def weigh_targets(
        self, outputs: Any, targets: Any, weight: Any = None, add: Callable[[Tensor], Tensor] | None = None
    ) -> Any:
        """The targets with what each counts in the loss, where some are missing or examples have weights.

        Of a tempered loss with the temperature of all processes' errors.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.
            weight: Of the examples. None: equal weights.
            add: Sums over processes. None: there is one.

        Raises:
            ValueError: For weights of a loss that is no `ng` likelihood's own.
        """
        if isinstance(self.loss, MeanNLL):
            return self.loss.weigh(outputs, targets, weight, add)
        if weight is not None:
            raise ValueError(
                f"weight is for ng likelihoods, and this criterion is {self!r}: build the optimizer with the "
                "likelihood itself, ng.Categorical() for nn.CrossEntropyLoss(), ng.Gaussian(0.5**0.5) for nn.MSELoss()"
            )
        if self.tempered and add is not None and outputs.shape == targets.shape:  # others are refused later
            return Tempered(targets, float(find_temperature(add(sum_errors(self.tempered, outputs, targets)))))
        return targets

    def temperature(self, outputs: Tensor, targets: Any) -> Tensor:
        """tau of a tempered loss, a scalar tensor.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them, or as `weigh_targets` returned them.
        """
        if isinstance(targets, Tempered):
            return outputs.new_tensor(targets.temperature)
        assert self.tempered is not None
        return find_temperature(sum_errors(self.tempered, outputs, targets)).to(outputs.dtype)

    def check(self, outputs: Any, targets: Any) -> None:
        """Check that targets can have come from the likelihood.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.

        Raises:
            ValueError: If they cannot.
        """
        events = self.events(outputs, targets)
        self.family.check_targets(outputs, events)
        check_layout(self.family, outputs, events)

    def slope(self, outputs: Any, targets: Any) -> Any:
        """Gradient of the mean loss in the outputs, in the outputs' own layout.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.
        """
        return differentiate_outputs(lambda at: self.value(at, targets) / self.scale(outputs, targets), outputs)

    def scores(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """sqrt(v_i) s_i: s_i the score of row i, and v_i what -log p of the row is multiplied by in the mean loss.

        Their second moments sum_i v_i s_i s_i^T are on average those of the Fisher, where targets are drawn from the
        likelihood, whatever the loss is a mean over: a slope of the mean loss is v_i s_i.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.

        Returns:
            Shapes (R, m), and (R,) or as `weights`. Rows whose targets do not count have zeros.
        """
        slopes = self.family.rows(self.slope(self.family.write_out(outputs), targets))
        if self.tempered is None:
            shares = self.weights(outputs, targets).to(slopes)
        else:
            shares = self.temperature(outputs, targets).to(slopes).expand(len(slopes)) / len(slopes)
        known = shares > 0
        roots = torch.where(known, torch.where(known, shares, 1).rsqrt(), 0)
        return slopes * as_columns(roots), shares

    def weights(self, outputs: Any, targets: Any = None) -> Tensor:
        """Row weights w (R,) of the mean loss; equal where targets are unknown (a metric on unlabelled data).

        Where targets are missing, or examples have weights, (R, 1), or (R, m) of the entries of rows.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them, or None.
        """
        targets = self.weigh_targets(outputs, targets)
        if isinstance(targets, Weighed):
            if bool(targets.weights.isnan().any()):
                raise ValueError(IGNORED)
            rows = self.family.rows(outputs)
            return targets.weights.to(rows) / max(len(rows), 1)
        weights, total = self._weigh_rows(outputs, targets)
        if isinstance(total, Tensor) and not bool(total > 0):
            raise ValueError(IGNORED)
        if self.tempered and targets is not None:
            weights = weights * self.tempered.cool(self.temperature(outputs, targets))
        return weights / total

    def _weigh_rows(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | int]:
        """Row weights (R,) and what the mean divides their sum by."""
        if targets is not None and self.weigh is not None:
            return self.weigh(outputs, self.events(outputs, targets))
        rows = self.family.rows(outputs)
        return rows.new_ones(len(rows)), len(rows)

    def scale(self, outputs: Any, targets: Any) -> Tensor | float:
        """Loss as the user wrote it over its mean form: 1, or the normaliser under reduction='sum'; minus it, to rise.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.
        """
        sign = -1.0 if self.maximize else 1.0
        return sign * self._weigh_rows(outputs, targets)[1] if self.summed else sign

    def count(self, outputs: Any, targets: Any = None) -> float:
        """What the mean runs over: the rows, or the sum of their weights where targets are ignored or weighted.

        Means over parts of a batch, weighted by this, make the mean over all of it.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them, or None.
        """
        if targets is not None:
            targets = self.weigh_targets(outputs, targets)
        if isinstance(targets, Weighed) and not bool(targets.weights.sum() > 0):  # NaN where no target counts
            return 0.0
        return float(self._weigh_rows(outputs, targets)[1])

    def count_part(self, outputs: Any, targets: Any) -> float:
        """What the mean over one process's part of a batch weighs: `count`, or rows where weights are shares of all.

        Args:
            outputs: What the model returns for the part.
            targets: Of the part, as `weigh_targets` returned them with the sums of all processes.
        """
        if isinstance(targets, Weighed) and not bool(targets.weights.isnan().any()):
            return float(len(self.family.rows(outputs)))
        return self.count(outputs, targets)

    def cut(self, outputs: Sequence[Any], targets: Any) -> list[tuple[Any, float]]:
        """The targets of each part of a batch, and the share that the part's mean has in the mean over all of it.

        Args:
            outputs: What the model returns for each part, in the order of the examples.
            targets: Of all examples, as the loss takes them, or as `weigh_targets` returned them.

        Raises:
            ValueError: For targets that do not have the examples first, or of which none counts.
        """
        sizes = [len(next(leaves(each))) for each in outputs]
        parts = cut_targets(targets, sizes)
        if self.tempered and not isinstance(targets, Tempered):
            sums = [sum_errors(self.tempered, *pair) for pair in zip(outputs, parts, strict=True)]
            parts = [Tempered(part, float(find_temperature(torch.stack(sums).sum(0)))) for part in parts]
        if isinstance(targets, Weighed):  # a weight is a share of all of the batch already
            counts = [float(size) for size in sizes]
        else:
            counts = [self.count(*pair) for pair in zip(outputs, parts, strict=True)]
        if not sum(counts):
            raise ValueError(IGNORED)
        return [(part, count / sum(counts)) for part, count in zip(parts, counts, strict=True)]

    def add_up(self, outputs: Any, targets: Any) -> tuple[Tensor, Any, float]:
        """-log p of all targets together: sum_i w_i nll_i over rows, with the weights before they are normalised.

        Args:
            outputs: What the model returns.
            targets: As the loss takes them.

        Returns:
            The sum, a scalar tensor; the targets by which `weights` gives w / c, None where all rows weigh the same; c.

        Raises:
            ValueError: For outputs or targets that the likelihood does not take.
        """
        self.check(outputs, targets)
        counted = self.weigh_targets(outputs, targets)
        if isinstance(counted, Weighed):  # what is there counts once, and not for what is missing
            counted = Weighed(counted.targets, (counted.by_example > 0).to(counted.by_example))
        elif self.weigh is None:
            rows = self.family.nll(outputs, self.events(outputs, targets))
            return rows.sum(), None, float(len(rows))
        count = self.count(outputs, counted)
        if not count:
            return 0 * self.family.rows(outputs).sum(), None, 0.0
        return self.evaluate(outputs, counted) / self.scale(outputs, counted) * count, counted, count

    def nats(self, outputs: Any) -> float:
        """Nats per example in one unit of the mean loss.

        It is the number of entries of one example for losses that average over entries. It is 1 for classes, whose
        event is a position (a token), and for `ng` likelihoods, whose mean is over rows. Where a mean over positions is
        one over classes too, it is the number of classes.

        Args:
            outputs: What the model returns.
        """
        if self.over_classes:
            return float(self.family.rows(outputs).shape[1])
        if not (isinstance(self.family, Entrywise) or self.entrywise):
            return 1.0
        return len(self.family.rows(outputs)) / max(len(next(leaves(outputs))), 1)


def cut_targets(targets: Any, sizes: Sequence[int]) -> list[Any]:
    """Targets with the examples first, in parts of these sizes."""
    if isinstance(targets, Weighed):
        pairs = zip(cut_targets(targets.targets, sizes), targets.by_example.split(list(sizes)), strict=True)
        return [Weighed(*pair) for pair in pairs]
    if isinstance(targets, Tempered):
        return [replace(targets, targets=part) for part in cut_targets(targets.targets, sizes)]
    unlike = [tuple(t.shape) for t in leaves(targets) if t.shape[:1] != (sum(sizes),)]
    if unlike:
        raise ValueError(
            f"targets have shape {unlike[0]}, expected ({sum(sizes)}, ...): they are cut along the first dimension, as "
            "the inputs are; leave chunk_size out"
        )
    ends = list(itertools.accumulate(sizes))
    return [map_tensors(targets, lambda t, i=i: t[ends[i] - sizes[i] : ends[i]]) for i in range(len(sizes))]


def remake_with(criterion: Criterion, make: Callable[..., Criterion], *args: Any) -> Criterion:
    """The same criterion; where it is pickled or copied, make(*args) takes its place."""
    object.__setattr__(criterion, "recipe", (make, args))
    return criterion


@dataclass(frozen=True)
class Entrywise(Wrapper):
    """A separable likelihood with every entry as a row of its own, so that each can carry a weight.

    Args:
        family: The separable likelihood.
    """

    family: Likelihood

    def rows(self, outputs: Any) -> Tensor:
        return self.family.rows(outputs).reshape(-1, 1)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.family.nll(outputs.reshape(-1, 1), targets.reshape(-1, 1))


@dataclass(frozen=True)
class PoissonRate(SeparableLikelihood):
    """Poisson counts with the rate as output, as `PoissonNLLLoss(log_input=False)` has it: form 1 / (rate + eps)."""

    eps: float = 1e-8

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - targets * (outputs + self.eps).log() + torch.lgamma(targets.to(outputs.dtype) + 1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(outputs.detach(), generator=generator)

    def curvature(self, outputs: Tensor) -> Tensor:
        return 1 / (outputs + self.eps)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return divergence_terms((outputs + self.eps).log(), (other + self.eps).log()).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        Poisson().check_targets(outputs, targets)


@dataclass(frozen=True)
class BitProbability(SeparableLikelihood):
    """Bits with their probabilities p as outputs, as `BCELoss` has them: form 1 / (p (1 - p)).

    Behind a sigmoid its pullback is p (1 - p) in the logits, the form of `Bernoulli`.
    """

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy(outputs, targets.to(outputs.dtype), reduction="none")

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(outputs.detach(), generator=generator)

    def curvature(self, outputs: Tensor) -> Tensor:
        return 1 / (outputs * (1 - outputs)).clamp(min=CERTAIN)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        ones = divergence_terms(outputs.log(), other.log())
        zeros = divergence_terms(torch.log1p(-outputs), torch.log1p(-other))
        return (ones + zeros).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        check_range(targets, 0, 1, "bits or probabilities in [0, 1]")
        if bool(((outputs < 0) | (outputs > 1)).any()):
            raise ValueError(
                f"outputs range from {float(outputs.min()):.4g} to {float(outputs.max()):.4g}, expected probabilities "
                "in [0, 1], as BCELoss takes them: end the model with torch.sigmoid, or take BCEWithLogitsLoss"
            )


def read_classes(criterion: nn.CrossEntropyLoss | nn.NLLLoss) -> Criterion:
    """Class logits or log-probabilities l (b, C, ...), targets as class numbers or, for logits, class probabilities.

    As softmax(l) = exp(l), the form on log-softmax outputs is the logits' one.
    """
    refuse_negative_weights(criterion)
    plain = isinstance(criterion, nn.NLLLoss)
    smoothing = 0.0 if plain else criterion.label_smoothing

    def weigh(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        classes = outputs.shape[1]
        weight = outputs.new_ones(classes) if criterion.weight is None else criterion.weight.to(outputs)
        if targets.is_floating_point():  # sum_c w_c q_c (-log p_c): curvature (sum_c w_c q_c)(diag p - p p^T)
            smoothed = (1 - smoothing) * targets + smoothing / classes
            rows = Categorical(dim=1).rows(smoothed.to(outputs.dtype)) @ weight
            return rows, rows.new_tensor(float(len(rows)))
        flat = targets.reshape(-1).long()  # eight bits would be a mask
        valid = flat != criterion.ignore_index
        chosen = weight[flat.masked_fill(~valid, 0)] * valid
        return valid * ((1 - smoothing) * chosen + smoothing / classes * weight.sum()), chosen.sum()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if criterion.weight is None or criterion.reduction == "sum" or targets.dtype not in (torch.int64, torch.uint8):
            return criterion(outputs, targets)
        # where all targets have weight zero, torch's gradient is 0 / 0, and zero where all are ignored
        labels = targets.long()
        ignored = labels == criterion.ignore_index
        weightless = criterion.weight[labels.masked_fill(ignored, 0)] == 0
        none = weightless.logical_or(ignored).all()  # beside others, those of weight zero still count as smoothed ones
        return criterion(outputs, labels.masked_fill(weightless & none, criterion.ignore_index))

    family = (LogProbabilities if plain else IgnoringCategorical)(dim=1, ignore_index=criterion.ignore_index)
    return Criterion(family, loss, weigh, criterion.reduction == "sum")


@dataclass(frozen=True)
class IgnoringCategorical(Categorical):
    """Class logits whose targets may carry an `ignore_index`, which stands for none."""

    ignore_index: int = -100

    def check_targets(self, outputs: Any, targets: Any) -> None:
        if not require_tensor_targets(targets).is_floating_point():
            targets = targets.masked_fill(targets == self.ignore_index, 0)
        super().check_targets(outputs, targets)


@dataclass(frozen=True)
class LogProbabilities(IgnoringCategorical):
    """Logarithms of class probabilities, whose exponentials sum to one."""

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        if not sums_to_one(require_one_tensor(outputs), self.dim):
            raise ValueError(
                "outputs are not log-probabilities, as NLLLoss expects: exp(outputs) does not sum to 1 over the "
                "classes. Take CrossEntropyLoss on logits, or end the model with torch.nn.LogSoftmax(dim=1)"
            )


def refuse_negative_weights(criterion: nn.Module) -> None:
    """ValueError for weights below zero: the loss falls without end along their targets, and has no metric."""
    for name in ("weight", "pos_weight"):
        weight: Tensor | None = getattr(criterion, name, None)
        if weight is not None and not bool((weight >= 0).all()):
            raise ValueError(
                f"{name} of {type(criterion).__name__} has entries down to {float(weight.min()):.4g}, expected numbers "
                ">= 0: with others the loss is no likelihood's, and has no metric"
            )


def read_bits(criterion: nn.BCEWithLogitsLoss | nn.BCELoss) -> Criterion:
    """Bits, each entry a row: mean over all entries, `weight` and `pos_weight` broadcast."""
    refuse_negative_weights(criterion)
    weight, pos_weight = criterion.weight, getattr(criterion, "pos_weight", None)

    def weigh(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.ones_like(outputs)
        if weight is not None:
            weights = weights * weight
        if pos_weight is not None:  # -(p t log y + (1 - t) log(1 - y)) has curvature (1 + (p - 1) t) y (1 - y)
            weights = weights * (1 + (pos_weight - 1) * targets)
        return weights.reshape(-1), outputs.new_tensor(float(outputs.numel()))

    family = BitProbability() if isinstance(criterion, nn.BCELoss) else Bernoulli()
    plain = weight is None and pos_weight is None
    return Criterion(Entrywise(family), criterion, None if plain else weigh, criterion.reduction == "sum")


def read_errors(criterion: nn.MSELoss | nn.L1Loss | nn.HuberLoss | nn.SmoothL1Loss) -> Criterion:
    """Errors r - t of a density of a fixed width, entry by entry, but for squares at the temperature of the batch."""
    if isinstance(criterion, nn.MSELoss):
        # (r - t)^2 = -log N(t; r, 1/2) + const: curvature 2 (mends Pascanu & Bengio eq. 15, 16)
        return Criterion(Entrywise(Gaussian(math.sqrt(0.5))), criterion, None, criterion.reduction == "sum")
    family: Laplace | Huber = Laplace()
    if isinstance(criterion, nn.HuberLoss):
        family = Huber(criterion.delta)
    elif isinstance(criterion, nn.SmoothL1Loss) and criterion.beta > 0:
        # (r - t)^2 / (2 beta) up to beta is z^2 / 2 up to sqrt(beta), z = (r - t) / sqrt(beta)
        family = Huber(math.sqrt(criterion.beta), math.sqrt(criterion.beta))
    return Criterion(Entrywise(family), criterion, None, criterion.reduction == "sum", tempered=family)


@dataclass(frozen=True)
class PredictedVariance(HeteroscedasticGaussian):
    """Outputs (mean, var) as `GaussianNLLLoss` takes them: var may lack the last axis, and counts as eps at least."""

    log_variance: bool = False
    eps: float = 1e-6

    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().nll(self._clamp(outputs), targets)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Tensor:
        return super().sample(self._clamp(outputs), generator)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return super().kl(self.rows(self._clamp(outputs)), self.rows(self._clamp(other)))

    def curvature(self, outputs: Tensor) -> Tensor:
        return super().curvature(self.rows(self._clamp(outputs)))

    def _clamp(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """The outputs with no variance below eps; the slope in one that was is that at eps, as in torch."""
        mean, variance = self._split(outputs)
        return mean, variance + (variance.clamp(min=self.eps) - variance).detach()

    def _split(self, outputs: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(outputs, Tensor):
            mean, variance = split_pair(outputs, "variance")
            outputs = mean, variance.unsqueeze(-1) if variance.shape == mean.shape[:-1] else variance
        return super()._split(outputs)


def gaussian_nll(criterion: nn.GaussianNLLLoss) -> Criterion:
    """Outputs are a tuple (mean, var), or one tensor with both along its last axis."""

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        mean, variance = outputs.chunk(2, dim=-1) if isinstance(outputs, Tensor) else split_pair(outputs, "variance")
        return criterion(mean, targets, variance)

    family = PredictedVariance(eps=criterion.eps)
    return Criterion(family, loss, None, criterion.reduction == "sum", entrywise=True)


def poisson_nll(criterion: nn.PoissonNLLLoss) -> Criterion:
    """Log rates, or rates with log_input=False."""
    family = Poisson() if criterion.log_input else PoissonRate(criterion.eps)
    return Criterion(Entrywise(family), criterion, None, criterion.reduction == "sum")


@dataclass(frozen=True, repr=False)
class SoftClasses(Categorical):
    """Logarithms of class probabilities (b, ..., C), with class probabilities as targets.

    The form in the log-probabilities l is diag(y) - y y^T with y = exp(l), as it is in logits: behind a log-softmax
    l = r - logsumexp(r) its pullback is diag(y) - y y^T in the logits r.
    """

    def check_targets(self, outputs: Any, targets: Any) -> None:
        outputs = require_one_tensor(outputs)
        if outputs.dim() < 2:
            raise ValueError(f"outputs has shape {tuple(outputs.shape)}, expected log-probabilities (b, ..., C)")
        if not require_tensor_targets(targets).is_floating_point():
            raise ValueError(
                f"targets are {targets.dtype}, expected class probabilities in the shape of the outputs, as KLDivLoss "
                "takes them; for class numbers take CrossEntropyLoss on logits, or NLLLoss"
            )
        check_same_shape(outputs, targets)
        check_range(targets, 0, 1 + ROUNDING, "class probabilities in [0, 1], or their logarithms with log_target=True")
        if not sums_to_one(outputs, -1):
            second = outputs.dim() > 2 and sums_to_one(outputs, 1)
            raise ValueError(
                "outputs are not log-probabilities over the last axis, as KLDivLoss is understood: exp(outputs) does "
                + (
                    "not sum to 1 there, and does over the second. Move the classes of outputs and targets to the end, "
                    "with .movedim(1, -1)"
                    if second
                    else "not sum to 1. End the model with torch.nn.LogSoftmax(dim=-1)"
                )
            )


def sums_to_one(outputs: Tensor, axis: int) -> bool:
    """Whether the exponentials add up to one along an axis, wherever that is a number."""
    total = outputs.detach().logsumexp(axis)
    return not bool(((total.abs() > ROUNDING) & total.isfinite()).any())


def kl_div(criterion: nn.KLDivLoss) -> Criterion:
    """sum t (log t - l) over the classes: the cross-entropy of soft targets less their entropy, a constant."""

    def weigh(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = targets.to(outputs.dtype).flatten(0, -2).sum(1)  # less than 1 where a row is masked
        count = {"sum": len(rows), "batchmean": len(outputs), "mean": outputs.numel()}[criterion.reduction]
        return rows, rows.new_tensor(float(count))

    def exponentiate(outputs: Tensor, targets: Any) -> Any:
        return targets.exp() if isinstance(targets, Tensor) and targets.is_floating_point() else targets

    return Criterion(
        SoftClasses(),
        criterion,
        weigh,
        criterion.reduction == "sum",
        prepare=exponentiate if criterion.log_target else None,
        over_classes=criterion.reduction == "mean",
    )
