"""The losses that are understood as likelihoods: those of torch.nn, their functions, timm's and transformers'.

Losses of other libraries are known by the module and the name of their class or function, and nothing is imported. What
is not known can be wrapped: `natgrad.families.wrapped_losses`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.families.base import Likelihood, require_one_tensor
from natgrad.families.criteria import (
    Criterion,
    Entrywise,
    IgnoringCategorical,
    bce_with_logits,
    cross_entropy,
    gaussian_nll,
    huber,
    l1,
    mse,
    nll_loss,
    poisson_nll,
    remake_with,
    smooth_l1,
)
from natgrad.families.discrete import Bernoulli
from natgrad.families.soft_classes import kl_div

KNOWN: dict[type, Callable[[Any], Criterion]] = {
    nn.CrossEntropyLoss: cross_entropy,
    nn.NLLLoss: nll_loss,
    nn.BCEWithLogitsLoss: bce_with_logits,
    nn.MSELoss: mse,
    nn.GaussianNLLLoss: gaussian_nll,
    nn.PoissonNLLLoss: poisson_nll,
    nn.L1Loss: l1,
    nn.SmoothL1Loss: smooth_l1,
    nn.HuberLoss: huber,
    nn.KLDivLoss: kl_div,
}
FUNCTIONS: tuple[tuple[Any, type[nn.Module]], ...] = (
    (functional.cross_entropy, nn.CrossEntropyLoss),
    (functional.nll_loss, nn.NLLLoss),
    (functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
    (functional.mse_loss, nn.MSELoss),
    (functional.gaussian_nll_loss, nn.GaussianNLLLoss),
    (functional.poisson_nll_loss, nn.PoissonNLLLoss),
    (functional.l1_loss, nn.L1Loss),
    (functional.smooth_l1_loss, nn.SmoothL1Loss),
    (functional.huber_loss, nn.HuberLoss),
    (functional.kl_div, nn.KLDivLoss),
)


def as_criterion(criterion: Any) -> Criterion:
    """A loss or an `ng` likelihood as a `Criterion`.

    CrossEntropyLoss and NLLLoss -> Categorical, BCEWithLogitsLoss -> Bernoulli, MSELoss -> Gaussian(sqrt(1/2)),
    GaussianNLLLoss -> HeteroscedasticGaussian on a tuple (mean, var), PoissonNLLLoss -> Poisson, L1Loss -> Laplace,
    HuberLoss and SmoothL1Loss -> Huber, KLDivLoss -> class probabilities as targets of log-probabilities; with weight,
    pos_weight, ignore_index, label_smoothing, reduction 'mean' or 'sum', and sequence dimensions. Their functions in
    `torch.nn.functional` are understood in the same way, also with options: `functools.partial(F.cross_entropy,
    label_smoothing=0.1)`. So are timm's LabelSmoothingCrossEntropy, SoftTargetCrossEntropy and BinaryCrossEntropy, and
    transformers' LabelSmoother and the `model.loss_function` of language models and classifiers.

    Args:
        criterion: A loss, an `ng` likelihood, or a `Criterion`.

    Raises:
        TypeError: For a loss that is not known, and for a subclass of one, which may compute anything. Wrap it with
            `ng.likelihood(loss, family)`.
        ValueError: For reduction='none'.

    Example:
        >>> ng.families.as_criterion(nn.CrossEntropyLoss()).family
        IgnoringCategorical(classes=None, dim=1, ignore_index=-100)
    """
    if isinstance(criterion, type):
        raise TypeError(
            f"criterion is the class {criterion.__name__}, expected a loss or a likelihood; add the parentheses"
        )
    if isinstance(criterion, Criterion):
        return criterion
    return remake_with(read_criterion(criterion), as_criterion, criterion)


def read_criterion(criterion: Any) -> Criterion:
    """What a loss or a likelihood says. TypeError for a loss that is not known."""
    if isinstance(criterion, Likelihood):
        return Criterion(criterion, lambda outputs, targets: criterion.nll(outputs, targets).mean())
    function, options = split_partial(criterion)
    kind = next((kind for known, kind in FUNCTIONS if known is function), None)
    if kind is not None:
        criterion = build_module(kind, function, options)
    elif (build := FOREIGN.get(origin(function))) is not None:
        return build(function, options)
    build = KNOWN.get(type(criterion))
    if build is None:
        raise TypeError(describe_unknown(criterion))
    check_reduction(criterion)
    return build(criterion)


def check_reduction(loss: Any) -> None:
    """ValueError unless the loss is one number."""
    known = ["'mean'", "'sum'", *(["'batchmean'"] if isinstance(loss, nn.KLDivLoss) else [])]
    if f"'{loss.reduction}'" not in known:
        raise ValueError(
            f"criterion has reduction={loss.reduction!r}, expected {' or '.join(known)}: the metric must be that of "
            "the number that is minimised"
        )


def describe_unknown(criterion: Any) -> str:
    """What is wrong with a loss that is not known, and what to write instead."""
    names = ", ".join(kind.__name__ for kind in KNOWN)
    hint = ""
    if isinstance(criterion, nn.BCELoss) or split_partial(criterion)[0] is functional.binary_cross_entropy:
        hint = "; use BCEWithLogitsLoss on the logits"
    wrap = ""
    if callable(criterion):
        wrap = (
            "; to wrap any other function, say of which likelihood it is -log p: ng.likelihood(loss, ng.Categorical())"
        )
    return (
        f"criterion is {describe(criterion)}, which is not a likelihood known to natgrad{hint}; "
        f"expected one of {names}, or an ng likelihood (ng.Categorical(), ..., or your own with nll and sample){wrap}"
    )


def describe(thing: Any) -> str:
    """A function by its name, an instance by its type's."""
    function, _ = split_partial(thing)
    return getattr(function, "__name__", type(function).__name__)


def split_partial(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function of a `functools.partial` and its options; anything else as it is, without options."""
    if not isinstance(loss, functools.partial):
        return loss, {}
    if loss.args:
        raise TypeError(
            f"criterion is a partial of {describe(loss.func)} with {len(loss.args)} positional arguments, expected "
            "options by name: outputs and targets come first"
        )
    return loss.func, dict(loss.keywords)


def build_module(kind: type[nn.Module], function: Any, options: dict[str, Any]) -> nn.Module:
    """The loss of `torch.nn` that a function with these options stands for."""
    try:
        return kind(**options)
    except TypeError as error:
        raise TypeError(
            f"criterion is {function.__name__} with the options {sorted(options)}, expected those of "
            f"nn.{kind.__name__} ({error}); for others use ng.likelihood(loss, family)"
        ) from None


def origin(function: Any) -> tuple[str, str]:
    """The module and the name of a function, or of the class of an instance."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return getattr(named, "__module__", None) or "", named.__qualname__


def refuse_options(function: Any, options: Mapping[str, Any], *known: str) -> None:
    """TypeError for options that change a loss in a way that is not understood."""
    strange = sorted(set(options) - set(known))
    if strange:
        raise TypeError(
            f"criterion is {describe(function)} with the options {strange}, expected none but {sorted(known)}; wrap "
            "your own function with ng.likelihood(loss, family)"
        )


# timm


def smoothing_cross_entropy(loss: Any, options: dict[str, Any]) -> Criterion:
    """timm's LabelSmoothingCrossEntropy: torch's own with `label_smoothing`."""
    refuse_options(loss, options)
    return cross_entropy(nn.CrossEntropyLoss(label_smoothing=loss.smoothing))


def soft_cross_entropy(loss: Any, options: dict[str, Any]) -> Criterion:
    """timm's SoftTargetCrossEntropy: torch's own on class probabilities."""
    refuse_options(loss, options)
    return cross_entropy(nn.CrossEntropyLoss())


def class_bits(loss: Any, options: dict[str, Any]) -> Criterion:
    """timm's BinaryCrossEntropy: a bit per class, made of class numbers where the targets are some."""
    refuse_options(loss, options)
    if not loss.sum_classes:
        check_reduction(loss)
    soft = getattr(loss, "smooth_dense", False) and loss.smoothing

    def bits(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != outputs.shape:
            off = loss.smoothing / outputs.shape[-1]
            made = torch.full_like(outputs, off).detach()
            targets = made.scatter(1, targets.long().reshape(-1, 1), 1 - loss.smoothing + off)
        elif soft:
            targets = targets * (1 - loss.smoothing) + 0.5 * loss.smoothing
        return targets if loss.target_threshold is None else targets.gt(loss.target_threshold).to(outputs.dtype)

    base = bce_with_logits(nn.BCEWithLogitsLoss(weight=loss.weight, pos_weight=loss.pos_weight))
    if not loss.sum_classes:
        return Criterion(base.family, loss, base.weigh, loss.reduction == "sum", prepare=bits)
    if base.weigh is None:
        return Criterion(Bernoulli(), loss, prepare=bits)
    weigh = base.weigh

    def per_example(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return weigh(outputs, targets)[0], outputs.new_tensor(float(len(outputs)))

    return Criterion(Entrywise(Bernoulli()), loss, per_example, prepare=bits)


# transformers


@dataclass(frozen=True)
class TokenCrossEntropy:
    """Mean cross-entropy of logits (b, ..., C) over the places whose label counts, as transformers' losses have it.

    Args:
        shift: True if place t predicts the label of place t + 1, as in causal language models.
        ignore_index: The label that stands for none.
        smoothing: Of the labels, in [0, 1).
    """

    shift: bool = False
    ignore_index: int = -100
    smoothing: float = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = require_one_tensor(outputs).movedim(-1, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return self.plain()(logits, self.events(outputs, targets))

    def plain(self) -> nn.CrossEntropyLoss:
        """The same on logits (b, C, ...) and labels that are not shifted."""
        return nn.CrossEntropyLoss(ignore_index=self.ignore_index, label_smoothing=self.smoothing)

    def events(self, outputs: Any, targets: Tensor) -> Tensor:
        """The label that each place predicts."""
        if not self.shift:
            return targets
        return functional.pad(targets, (0, 1), value=self.ignore_index)[..., 1:]

    def criterion(self) -> Criterion:
        """The loss as a likelihood."""
        weigh = cross_entropy(self.plain()).weigh
        assert weigh is not None
        family = IgnoringCategorical(dim=-1, ignore_index=self.ignore_index)
        return Criterion(
            family, self, lambda outputs, events: weigh(outputs.movedim(-1, 1), events), prepare=self.events
        )


def token_loss(function: Any, options: dict[str, Any], shift: bool = False) -> Criterion:
    """The cross-entropy of language models; the number of classes is read off the logits."""
    refuse_options(function, options, "vocab_size", "config", "ignore_index")
    return TokenCrossEntropy(shift, options.get("ignore_index", -100)).criterion()


def label_smoother(smoother: Any, options: dict[str, Any]) -> Criterion:
    """The Trainer's LabelSmoother, on the logits."""
    refuse_options(smoother, options)
    return TokenCrossEntropy(False, smoother.ignore_index, smoother.epsilon).criterion()


def sequence_loss(function: Any, options: dict[str, Any]) -> Criterion:
    """ForSequenceClassificationLoss: what `config.problem_type` says."""
    refuse_options(function, options, "config")
    config = options.get("config")
    kinds = {
        "regression": nn.MSELoss,
        "single_label_classification": nn.CrossEntropyLoss,
        "multi_label_classification": nn.BCEWithLogitsLoss,
    }
    problem = getattr(config, "problem_type", None)
    if problem is None and getattr(config, "num_labels", 0) == 1:
        problem = "regression"
    if problem not in kinds:
        raise TypeError(
            f"criterion is ForSequenceClassificationLoss with problem_type={problem!r}, and the loss depends on it: "
            "give nn.CrossEntropyLoss() for one class each, nn.BCEWithLogitsLoss() for several, nn.MSELoss() for "
            "numbers, or functools.partial(model.loss_function, config=model.config) with config.problem_type set"
        )
    base = as_criterion(kinds[problem]())
    if problem != "regression":
        return base

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return base.loss(outputs, targets.reshape(outputs.shape))

    return Criterion(base.family, loss, prepare=lambda outputs, targets: targets.reshape(outputs.shape))


TIMM = "timm.loss."
TRANSFORMERS = "transformers.loss.loss_utils"
FOREIGN: dict[tuple[str, str], Callable[[Any, dict[str, Any]], Criterion]] = {
    (TIMM + "cross_entropy", "LabelSmoothingCrossEntropy"): smoothing_cross_entropy,
    (TIMM + "cross_entropy", "SoftTargetCrossEntropy"): soft_cross_entropy,
    (TIMM + "binary_cross_entropy", "BinaryCrossEntropy"): class_bits,
    (TRANSFORMERS, "ForCausalLMLoss"): functools.partial(token_loss, shift=True),
    (TRANSFORMERS, "ForMaskedLMLoss"): token_loss,
    (TRANSFORMERS, "ForTokenClassification"): token_loss,
    (TRANSFORMERS, "fixed_cross_entropy"): token_loss,
    (TRANSFORMERS, "ForSequenceClassificationLoss"): sequence_loss,
    ("transformers.trainer_pt_utils", "LabelSmoother"): label_smoother,
}
