"""The losses that are understood as likelihoods: those of torch.nn, their functions, timm's and transformers'.

Losses of other libraries are known by the module and the name of their class or function, and nothing is imported. What
is not known can be wrapped: `natgrad.likelihood`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.families.base import Likelihood, LogDensity, differentiate_outputs, require_one_tensor
from natgrad.families.criteria import (
    Criterion,
    Entrywise,
    IgnoringCategorical,
    MeanNLL,
    gaussian_nll,
    kl_div,
    poisson_nll,
    read_bits,
    read_classes,
    read_errors,
    remake_with,
)
from natgrad.families.discrete import Bernoulli, Categorical, Poisson
from natgrad.families.gaussian import Gaussian, HeteroscedasticGaussian
from natgrad.ground.choices import Names, read_choice
from natgrad.ground.linalg import is_concrete
from natgrad.ground.messages import show_shape
from natgrad.ground.pure import leaves

KNOWN: dict[type[nn.Module], tuple[Any, Callable[[Any], Criterion]]] = {
    nn.CrossEntropyLoss: (functional.cross_entropy, read_classes),
    nn.NLLLoss: (functional.nll_loss, read_classes),
    nn.BCEWithLogitsLoss: (functional.binary_cross_entropy_with_logits, read_bits),
    nn.BCELoss: (functional.binary_cross_entropy, read_bits),
    nn.MSELoss: (functional.mse_loss, read_errors),
    nn.GaussianNLLLoss: (functional.gaussian_nll_loss, gaussian_nll),
    nn.PoissonNLLLoss: (functional.poisson_nll_loss, poisson_nll),
    nn.L1Loss: (functional.l1_loss, read_errors),
    nn.SmoothL1Loss: (functional.smooth_l1_loss, read_errors),
    nn.HuberLoss: (functional.huber_loss, read_errors),
    nn.KLDivLoss: (functional.kl_div, kl_div),
}
"""The losses of torch.nn, their functions, and what reads them."""


def as_criterion(criterion: Any) -> Criterion:
    """A loss or an `ng` likelihood as a `Criterion`.

    CrossEntropyLoss and NLLLoss -> Categorical, BCEWithLogitsLoss -> Bernoulli, BCELoss -> the same of probabilities,
    MSELoss -> Gaussian(sqrt(1/2)), GaussianNLLLoss -> HeteroscedasticGaussian on a tuple (mean, var), PoissonNLLLoss
    -> Poisson, L1Loss -> Laplace, HuberLoss and SmoothL1Loss -> Huber, KLDivLoss -> class probabilities as targets of
    log-probabilities; with weight, pos_weight, ignore_index, label_smoothing, reduction 'mean' or 'sum', and sequence
    dimensions. Their functions in `torch.nn.functional` are understood in the same way, also with options:
    `functools.partial(F.cross_entropy, label_smoothing=0.1)`. So are timm's LabelSmoothingCrossEntropy,
    SoftTargetCrossEntropy and BinaryCrossEntropy, and transformers' LabelSmoother and the `model.loss_function` of
    language models and classifiers.

    Args:
        criterion: A loss, an `ng` likelihood, or a `Criterion`; or its name, "cross_entropy" or
            "cross_entropy(label_smoothing=0.1)": `natgrad.optim.NAMES`.

    Raises:
        TypeError: For a loss that is not known, and for a subclass of one, which may compute anything. Wrap it with
            `ng.likelihood(loss, family)`.
        ValueError: For reduction='none', and for a name that is not known.

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
    if isinstance(criterion, str):
        return as_criterion(read_choice("criterion", criterion, LOSSES))
    return remake_with(read_criterion(criterion), as_criterion, criterion)


def read_criterion(criterion: Any) -> Criterion:
    """What a loss or a likelihood says. TypeError for a loss that is not known."""
    if isinstance(criterion, TokenCrossEntropy):
        return criterion.criterion()
    if isinstance(criterion, Likelihood):
        return Criterion(criterion, MeanNLL(criterion))
    function, options = split_partial(criterion)
    kind = next((kind for kind, (known, _) in KNOWN.items() if known is function), None)
    if kind is not None:
        try:
            criterion = kind(**options)
        except TypeError as error:
            raise TypeError(
                f"criterion is {function.__name__} with the options {sorted(options)}, expected those of "
                f"nn.{kind.__name__} ({error}); for others use ng.likelihood(loss, family)"
            ) from None
    named = function if hasattr(function, "__qualname__") else type(function)
    origin = (getattr(named, "__module__", None) or "", named.__qualname__)
    if origin in FOREIGN:
        known, build = FOREIGN[origin]
        if strange := sorted(set(options) - set(known)):
            raise TypeError(
                f"criterion is {describe(function)} with the options {strange}, expected none but {sorted(known)}; "
                "wrap your own function with ng.likelihood(loss, family)"
            )
        return build(function, options)
    if type(criterion) not in KNOWN:
        raise TypeError(describe_unknown(criterion))
    check_reduction(criterion)
    return KNOWN[type(criterion)][1](criterion)


def check_reduction(loss: Any) -> None:
    """ValueError unless the loss is one number."""
    known = ["'mean'", "'sum'", *(["'batchmean'"] if isinstance(loss, nn.KLDivLoss) else [])]
    if f"'{loss.reduction}'" not in known:
        raise ValueError(
            f"criterion has reduction={loss.reduction!r}, expected {' or '.join(known)}: the metric must be that of "
            "the number that is minimised; where your examples have weights, build the optimizer with an ng "
            "likelihood, and call opt.loss(outputs, targets, weight=w)"
        )


def describe_unknown(criterion: Any) -> str:
    """What is wrong with a loss that is not known, and what to write instead."""
    wrap = "; to wrap any other function, say of which likelihood it is -log p: ng.likelihood(loss, ng.Categorical())"
    if type(criterion).__module__ == nn.MSELoss.__module__:  # torch's losses of margins, ranks, embeddings
        wrap = (
            "; a loss of margins, ranks or embeddings has no metric: build the optimizer with the likelihood that is "
            "closest, call opt.loss(outputs, targets), and backward() on your own loss"
        )
    return (
        f"criterion is {describe(criterion)}, which is not a likelihood known to natgrad; "
        f"expected one of {', '.join(kind.__name__ for kind in KNOWN)}, or an ng likelihood (ng.Categorical(), ..., or "
        f"your own: a class on ng.Likelihood, with nll and sample){wrap if callable(criterion) else ''}"
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


# timm


def class_bits(loss: Any, options: dict[str, Any]) -> Criterion:
    """timm's BinaryCrossEntropy: a bit per class, made of class numbers where the targets are some."""
    if not loss.sum_classes:
        check_reduction(loss)
    soft = getattr(loss, "smooth_dense", False) and loss.smoothing

    def bits(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != outputs.shape:
            off = loss.smoothing / outputs.shape[-1]
            smoothed = torch.full_like(outputs, off).detach()
            targets = smoothed.scatter(1, targets.long().reshape(-1, 1), 1 - loss.smoothing + off)
        elif soft:
            targets = targets * (1 - loss.smoothing) + 0.5 * loss.smoothing
        return targets if loss.target_threshold is None else targets.gt(loss.target_threshold).to(outputs.dtype)

    base = read_bits(nn.BCEWithLogitsLoss(weight=loss.weight, pos_weight=loss.pos_weight))
    if not loss.sum_classes:
        return Criterion(base.family, loss, base.weigh, loss.reduction == "sum", prepare=bits)
    weigh = base.weigh
    if weigh is None:
        return Criterion(Bernoulli(), loss, prepare=bits)
    return Criterion(base.family, loss, lambda r, t: (weigh(r, t)[0], r.new_tensor(float(len(r)))), prepare=bits)


# transformers


@dataclass(frozen=True)
class TokenCrossEntropy:
    """Mean cross-entropy of logits (b, ..., C) over the places whose label counts, as language models have it.

    By name "token_cross_entropy". `nn.CrossEntropyLoss()` has the classes on the second axis instead.

    Args:
        shift: True if place t predicts the label of place t + 1, as transformers' causal models shift them.
        ignore_index: The label that stands for none.
        smoothing: Of the labels, in [0, 1).

    Example:
        >>> loss = ng.families.TokenCrossEntropy()
        >>> loss(torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.long))
        tensor(1.0986)
    """

    shift: bool = False
    ignore_index: int = -100
    smoothing: float = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar tensor.

        Args:
            outputs: Logits, shape (b, ..., C).
            targets: Class numbers, shape (b, ...).
        """
        logits = require_one_tensor(outputs).movedim(-1, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return self.plain()(logits, self.events(outputs, targets))

    def plain(self) -> nn.CrossEntropyLoss:
        """The same on logits (b, C, ...) and labels that are not shifted."""
        return nn.CrossEntropyLoss(ignore_index=self.ignore_index, label_smoothing=self.smoothing)

    def events(self, outputs: Any, targets: Tensor) -> Tensor:
        """The label that each place predicts.

        Args:
            outputs: Logits, shape (b, ..., C).
            targets: Class numbers, shape (b, ...).
        """
        if not self.shift:
            return targets
        return functional.pad(targets, (0, 1), value=self.ignore_index)[..., 1:]

    def criterion(self) -> Criterion:
        """The loss as a likelihood."""
        weigh = read_classes(self.plain()).weigh
        assert weigh is not None
        family = IgnoringCategorical(dim=-1, ignore_index=self.ignore_index)
        return Criterion(
            family, self, lambda outputs, events: weigh(outputs.movedim(-1, 1), events), prepare=self.events
        )


def sequence_loss(function: Any, options: dict[str, Any]) -> Criterion:
    """ForSequenceClassificationLoss: what `config.problem_type` says."""
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


def token_loss(function: Any, options: dict[str, Any], shift: bool = False) -> Criterion:
    """The cross-entropy of language models; the number of classes is read off the logits."""
    return TokenCrossEntropy(shift, options.get("ignore_index", -100)).criterion()


TIMM, TRANSFORMERS, TOKENS = "timm.loss.", "transformers.loss.loss_utils", ("vocab_size", "config", "ignore_index")
FOREIGN: dict[tuple[str, str], tuple[tuple[str, ...], Callable[[Any, dict[str, Any]], Criterion]]] = {
    (TIMM + "cross_entropy", "LabelSmoothingCrossEntropy"): (
        (),
        lambda loss, _: read_classes(nn.CrossEntropyLoss(label_smoothing=loss.smoothing)),
    ),
    (TIMM + "cross_entropy", "SoftTargetCrossEntropy"): ((), lambda *_: read_classes(nn.CrossEntropyLoss())),
    (TIMM + "binary_cross_entropy", "BinaryCrossEntropy"): ((), class_bits),
    (TRANSFORMERS, "ForCausalLMLoss"): (TOKENS, partial(token_loss, shift=True)),
    **{
        (TRANSFORMERS, f): (TOKENS, token_loss)
        for f in ("ForMaskedLMLoss", "ForTokenClassification", "fixed_cross_entropy")
    },
    (TRANSFORMERS, "ForSequenceClassificationLoss"): (("config",), sequence_loss),
    ("transformers.trainer_pt_utils", "LabelSmoother"): (
        (),
        lambda loss, _: TokenCrossEntropy(False, loss.ignore_index, loss.epsilon).criterion(),
    ),
}
"""Losses of timm and transformers by module and name: the options that are understood, and what reads them."""
LOSSES: Names = {
    "cross_entropy": nn.CrossEntropyLoss,
    "token_cross_entropy": TokenCrossEntropy,
    "nll": nn.NLLLoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "bce": nn.BCELoss,
    "mse": nn.MSELoss,
    "gaussian_nll": nn.GaussianNLLLoss,
    "poisson_nll": nn.PoissonNLLLoss,
    "l1": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
    "kl_div": nn.KLDivLoss,
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic_gaussian": HeteroscedasticGaussian,
    "poisson": Poisson,
    "log_density": LogDensity,
}
"""The names of losses in a text, and what each builds."""


# Any function as the loss of a chosen likelihood, once it is seen to be one

Loss = Callable[[Any, Any], Any]


def likelihood(loss: Any, family: Any = None, *, probe: tuple[Any, Any] | None = None) -> Criterion:
    """A loss as the likelihood that it is -log p of, for `ng.kfac(model, ng.likelihood(loss, family))`.

    Losses of `torch.nn`, of `torch.nn.functional`, of timm and of transformers are recognised. Any other function
    loss(outputs, targets) -> scalar needs the likelihood: its gradient in the outputs is compared with that of -log p
    on a probe, and once more on the first batch, so that the metric belongs to the number that is minimised. The mean
    and the sum over rows, over entries, and the mean over examples of sums over their rows are told apart.

    Args:
        loss: What is minimised: loss(outputs, targets) -> scalar tensor.
        family: An `ng` likelihood, or a loss of `torch.nn` that has the same gradient, with its weights and ignored
            targets. Not needed for a loss that is recognised.
        probe: (outputs, targets), a small batch to compare on. None: drawn from the likelihood, as (b, C), (b, C, T).

    Returns:
        What an optimizer or a metric takes as its criterion.

    Raises:
        TypeError: For a loss that is not recognised, without a family.
        ValueError: If the loss is not the likelihood's, or if no probe can be drawn for it.

    Example:
        >>> def loss(outputs, targets):
        ...     return -outputs.log_softmax(1).gather(1, targets[:, None]).mean()
        >>> ng.likelihood(loss, ng.Categorical()).family
        Categorical()
    """
    if family is None:
        return as_criterion(loss)
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(f"loss is {loss!r}, expected a function loss(outputs, targets) -> scalar tensor")
    if isinstance(family, Likelihood) and family.masks:
        raise ValueError(
            f"family is {family}, whose targets may be missing, and a function's own way with those is not known: give "
            "the optimizer the likelihood itself as its criterion"
        )
    reading = choose_reading(loss, family, probe)
    return remake_with(
        replace(reading, loss=CheckedLoss(loss, reading)), partial(likelihood, probe=probe), loss, family
    )


def choose_reading(loss: Loss, family: Any, probe: tuple[Any, Any] | None) -> Criterion:
    """What a loss is a mean or a sum of, by its gradient on probes; a shape on which none agrees does not count."""
    candidates = list(readings(family))
    probes = [probe] if probe is not None else list(draw_probes(candidates[0].family))
    agreeing: list[Criterion] = []
    difference, trouble = "", ""
    for outputs, targets in probes:
        try:
            slope = slope_of(loss, outputs, targets)
        except Exception as error:
            if probe is not None:
                raise
            trouble = trouble or f" ({type(error).__name__}: {error})"
            continue
        fitting = [
            reading for reading in agreeing or candidates if agree(slope, slope_in_units(reading, outputs, targets))
        ]
        agreeing = fitting or agreeing
        difference = difference or describe_difference(loss, candidates[0], slope, outputs, targets)
    if agreeing:
        return agreeing[0]
    if difference:
        raise ValueError(difference)
    raise ValueError(
        f"no probe was drawn from {family} that {describe(loss)} takes{trouble}; give probe=(outputs, targets), a "
        "small batch of what the model returns and of its targets"
    )


class CheckedLoss:
    """A loss that is compared on the first batch with its likelihood's own loss, in the units that a probe gave."""

    def __init__(self, loss: Loss, reading: Criterion) -> None:
        self.loss, self.reading, self.checked = loss, reading, False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if not self.checked and all(is_concrete(t) for t in leaves(outputs)):
            slope = slope_of(self.loss, outputs, targets)
            if not agree(slope, slope_in_units(self.reading, outputs, targets)):
                difference = describe_difference(self.loss, self.reading, slope, outputs, targets)
                raise ValueError(f"{difference}; for another layout of the outputs give probe=(outputs, targets) in it")
            self.checked = True
        return self.loss(outputs, targets)

    def __repr__(self) -> str:
        return describe(self.loss)


def readings(family: Any) -> Iterator[Criterion]:
    """The losses that a likelihood may stand for: what they are a mean or a sum of."""
    base = as_criterion(family)
    yield base
    if not isinstance(family, Likelihood):
        return

    def total(outputs: Any, targets: Any) -> Tensor:
        return family.nll(outputs, targets).sum()

    def per_example(outputs: Any, targets: Any) -> Tensor:
        return total(outputs, targets) / len(next(leaves(outputs)))

    def weigh(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        rows = family.rows(outputs)
        return rows.new_ones(len(rows)), rows.new_tensor(float(len(next(leaves(outputs)))))

    yield Criterion(family, total, summed=True)
    yield Criterion(family, per_example, weigh)
    if hasattr(family, "entry_nll"):
        entries = Entrywise(family)
        yield Criterion(entries, lambda outputs, targets: family.nll(outputs, targets).sum() / outputs.numel())


def draw_probes(family: Likelihood) -> Iterator[tuple[Any, Any]]:
    """Outputs and targets that a likelihood takes, of several shapes, where it can draw some."""
    generator = torch.Generator().manual_seed(0)
    dim = family.dim if isinstance(family, Categorical) else -1
    for shape in ((3, 4), (3, 4, 2) if dim == 1 else (3, 2, 4)):
        outputs = torch.randn(shape, generator=generator, device=generator.device)
        try:
            targets = family.sample(outputs, generator)
            family.check_targets(outputs, targets)
        except Exception:  # noqa: BLE001 a likelihood of the user's, on a shape that it may not have
            continue
        yield outputs, targets


def slope_of(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """d loss / d outputs, all of it as one vector."""

    def evaluate(at: Any) -> Tensor:
        value = loss(at, targets)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ValueError(
                f"loss returned {show_shape(value)}, expected one number that depends on the outputs; reduce it"
            )
        return value.reshape(())

    return torch.cat([slope.reshape(-1) for slope in leaves(differentiate_outputs(evaluate, outputs))])


def slope_in_units(reading: Criterion, outputs: Any, targets: Any) -> Tensor:
    """What `slope_of` is for a likelihood's own loss, as a mean or as a sum."""
    slopes = [slope.reshape(-1) for slope in leaves(reading.slope(outputs, targets))]
    return torch.cat(slopes) * torch.as_tensor(reading.scale(outputs, targets)).detach()


def agree(slope: Tensor, expected: Tensor) -> bool:
    """Whether two gradients in the outputs are one, within the round-off of their dtype."""
    if slope.shape != expected.shape:
        return False
    bound = min(max(1e3 * torch.finfo(slope.dtype).eps, 1e-6), 0.05)
    size = torch.maximum(slope.abs().max(), expected.abs().max())
    error = (slope - expected).abs().max()
    return bool(error <= bound * size) or not bool(torch.isfinite(size))


def describe_difference(loss: Loss, reading: Criterion, slope: Tensor, outputs: Any, targets: Any) -> str:
    """What a loss is instead of -log p, and what to write."""
    expected = slope_in_units(reading, outputs, targets)
    square = float((expected * expected).sum())
    ratio = float((slope * expected).sum()) / square if square > 0 else 0.0
    name, family = describe(loss), reading.family
    if ratio > 0 and agree(slope, ratio * expected):
        return (
            f"{name} is {ratio:.4g} times the mean of -log p of {family} on this batch; give the likelihood of which "
            f"it is -log p (another sigma, another reduction), or multiply the loss by {1 / ratio:.4g}"
        )
    error = float((slope - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return (
        f"{name} is not -log p of {family}: their gradients in the outputs differ by {error:.2g} of the largest entry; "
        "choose another likelihood, or write your own: a class on ng.Likelihood with nll(outputs, targets) and "
        "sample(outputs, generator)"
    )
