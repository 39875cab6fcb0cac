"""The options of the optimisers, stated once for each flow."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar

from natgrad.families import LOSSES
from natgrad.ground.choices import Names, read_choice
from natgrad.ground.pure import Select
from natgrad.ground.spaces import hint_at_parameters
from natgrad.optim.guard import OnTrouble
from natgrad.rules import (
    Constant,
    Damping,
    GridSearch,
    LevenbergMarquardt,
    LineSearch,
    MeasuredLength,
    MeasuredTrustRegion,
    Momentum,
    NoiseAware,
    NormalisedRate,
    OnlineRadius,
    Rate,
    Relative,
    Rule,
    SafeRate,
    SpectralDescent,
    SpectralProgress,
    SubspaceSearch,
    TrustRegion,
)
from natgrad.solvers import (
    CG,
    Auto,
    Direct,
    KrylovSubspace,
    LeastSquares,
    MinresQLP,
    Nystrom,
    PseudoInverse,
    SampleSpace,
    Solver,
    Spring,
)
from natgrad.structures import (
    AdaptiveInverse,
    Averaged,
    Blocks,
    Dense,
    Diagonal,
    DiagonalPreconditioner,
    EigenKronecker,
    Empirical,
    EmpiricalPreconditioner,
    Exact,
    ExactLabels,
    FirstOrder,
    Kronecker,
    LowRankCovariance,
    OnlineLowRank,
    Preconditioner,
    Sampled,
    Structure,
    UnitWise,
    Woodbury,
)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class SharedOptions(TypedDict, total=False):
    """What all optimizers of the engine have in common.

    Args:
        weight_decay: Decoupled: theta <- (1 - lr * weight_decay) theta.
        group: The processes of `torch.distributed` that train the model together: metric and losses are those of all
            their examples. Default those of the `DistributedDataParallel` around the model. For `ng.kfac` and its like
            you average the gradients yourself then; the others do that.
        train_in_eval: True counts passes in evaluation mode as training ones, with dropout off and batch norm frozen;
            evaluate under `torch.no_grad()` then.
        on_trouble: What a step does whose loss, gradient or metric is not finite, or whose loss is more than ten times
            the highest of the run: "skip" (default) leaves it out, counts it in `state_report().failures`, warns at the
            fifth in a row and raises RuntimeError at the 25th; "raise" raises ValueError.
        maximize: True raises the loss instead of lowering it, as in torch.optim: the step goes the other way, and rules
            and dampings that judge a step want a higher loss. The metric, weight_decay and l2 stay what they are. The
            reports are of what falls, minus the loss.
    """

    weight_decay: float
    group: Any
    train_in_eval: bool
    on_trouble: OnTrouble
    maximize: bool


@dataclass(frozen=True)
class SharedSettings:
    """`SharedOptions` with their defaults."""

    weight_decay: float = 0.0
    group: Any = None
    train_in_eval: bool = False
    on_trouble: OnTrouble = "skip"
    maximize: bool = False


class BlockOptions(SharedOptions, total=False):
    """What `ng.kfac` and its like have in common. An object may be given as text: `natgrad.optim.NAMES`.

    Args:
        rule: How a direction becomes a step; default
            `natgrad.rules.NoiseAware()` in `ng.kfac` and `ng.ekfac`, with noise=0 and kl_share=0.05 in the other
            recipes. Any rule but `ng.SubspaceSearch`.
        momentum: Decay of the gradient's running mean (bias-corrected), taken before the metric, so that the whole step
            is in today's metric; in [0, 1). Default 0.9, and 0 with `rule=ng.Momentum(...)`.
        damping: A strategy, which means what it means in `ng.NaturalGradient`. A number is short for
            `ng.Relative(number, per="block")`, a share of the mean eigenvalue of each block.
        max_kl: Most nats per example that a step moves, to second order on its own batch; default: no bound. Steps that
            may be near it cost a forward pass. A setting of `ng.MeasuredLength` and `natgrad.rules.NoiseAware`.
        kl_share: Most nats as a share of the loss; of one nat per entry for losses that can be negative. Default .1 in
            `ng.kfac` and `ng.ekfac`, .05 in the other recipes. A setting of the same rules.
        l2: Strength of a penalty l2 / 2 |theta|^2, which is a part of the loss, in the gradient and in the metric.
        update_every: Most steps between two updates of the statistics. A run begins with an update at every step, and
            the interval grows by a step after each five, twice as fast once steps are spectral.
        invert_every: Most steps between two inversions of the blocks. The interval grows in the same way.
        measure: True measures on the batch how far a step moves the model, which costs a part of a forward pass now
            and then. False computes it from the blocks.
        outputs: What the criterion is of, for a model that returns more: `outputs=lambda out: out.logits`.
        params: What to train, default all: parameters, (name, parameter) pairs, a module, or parameter groups. lr,
            momentum, damping, max_kl, kl_share, weight_decay and l2 are group keys; of max_kl and kl_share the least
            over the groups counts. The rest may have an optimizer of its own: call the `loss` of each.
        share: With several processes, how they share the blocks out. Only a block's owner inverts it. "speed": the
            inverses go to all, and nothing is sent between updates. "memory": statistics, inverses and mean gradients
            stay with their owners, who send the directions at every step. "auto": "speed" while the state takes less
            than 4 GiB; a number is another such bound, in bytes.
    """

    rule: Rule | str | None
    momentum: float | None
    damping: float | Damping | str
    max_kl: float | None
    kl_share: float | None
    l2: float
    update_every: int
    invert_every: int
    measure: bool
    outputs: Select | None
    params: Iterable[Any] | None
    share: str | int


@dataclass(frozen=True)
class BlockSettings(SharedSettings):
    """`BlockOptions` with their defaults."""

    rule: Rule | None = None
    momentum: float | None = None
    damping: float | Damping = 0.03
    max_kl: float | None = None
    kl_share: float | None = None
    l2: float = 0.0
    update_every: int = 20
    invert_every: int = 20
    measure: bool = True
    outputs: Select | None = None
    params: Iterable[Any] | None = None
    share: str | int = "auto"


class FlatOptions(SharedOptions, total=False):
    """What `ng.NaturalGradient` and the matrix-free recipes have in common. An object may be given as text.

    Args:
        structure: How G is stored; default `ng.Exact()`.
        solver: Of (G + damping I) x = g; default `ng.Auto()`, by shape and cost.
        damping: A strategy; a number is short for `ng.Constant(number)`, in nats per example.
        rule: How the solution becomes a step; default `natgrad.rules.SafeRate()`, the learning rate, halved where it
            would raise the loss of the step's own batch, as far as `opt.loss` or a closure tells it. Recipes have rules
            of their own.
        warm_start: The fraction of the last solution that an iterative solver starts from, in [0, 1].
        metric_batch: Take the metric on this many of the pass's examples, drawn anew at every step; default all.
            Products then cost that much less, while the gradient keeps every example.
        search_batch: Evaluate trial points on this many of the pass's examples, others than the metric's while there
            are enough; default all.
        preconditioner: For CG, MinresQLP and KrylovSubspace: `ng.DiagonalPreconditioner()` and others, or a structure
            with a closed-form inverse.
        params: Parameters, (name, parameter) pairs, a module, or groups as in torch.optim (keys lr, weight_decay);
            default all that are trainable.
    """

    structure: Structure | str | None
    solver: Solver | str | None
    damping: float | Damping | str
    rule: Rule | str | None
    warm_start: float
    metric_batch: int | None
    search_batch: int | None
    preconditioner: Preconditioner | Structure | str | None
    params: Iterable[Any] | None


@dataclass(frozen=True)
class FlatSettings(SharedSettings):
    """`FlatOptions` with their defaults."""

    structure: Structure | None = None
    solver: Solver | None = None
    damping: float | Damping = 1e-3
    rule: Rule | None = None
    warm_start: float = 0.0
    metric_batch: int | None = None
    search_batch: int | None = None
    preconditioner: Preconditioner | Structure | None = None
    params: Iterable[Any] | None = None


def with_options(options: Any, settings: type, *without: str, **own: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function that takes `**options`: they stand in its signature and docstring, and are checked."""
    own_first = sorted(fields(settings), key=lambda field: field.name in SharedOptions.__annotations__)
    defaults = {field.name: field.default for field in own_first} | own
    values = {key: value for key, value in defaults.items() if key not in without}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = inspect.signature(function)
        named = [p for p in plain.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        known = {p.name for p in named}
        notes = {key: getattr(note, "__forward_arg__", note) for key, note in options.__annotations__.items()}
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=notes[key])
            for key, value in values.items()
            if key not in known
        ]

        @wraps(function)
        def call_checked(*args: P.args, **kwargs: P.kwargs) -> R:
            name = function.__qualname__.removesuffix(".__init__")
            check_keywords(name, kwargs, [*known, *values])
            check_required(name, named, args, kwargs)
            return function(*args, **kwargs)

        call_checked.__signature__ = plain.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
        call_checked.__doc__ = join_arguments(function.__doc__ or "", list_texts(options), [p.name for p in shared])
        return call_checked

    return decorate


# the names that stand for choices in a text: `rule="spectral"`, `damping="relative(0.1)"`


def name_kinds(*kinds: type, **others: type) -> Names:
    """Each class by its name in lower case, words apart; others by names of their own."""
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in kinds} | others


RULES = (
    *(NoiseAware, SpectralProgress, SpectralDescent, MeasuredLength, TrustRegion, MeasuredTrustRegion, LineSearch),
    *(GridSearch, SubspaceSearch, OnlineRadius, NormalisedRate, Momentum, SafeRate, Rate),
)
SOLVERS = (Auto, CG, MinresQLP, Direct, PseudoInverse, SampleSpace, LeastSquares, Nystrom, KrylovSubspace, Spring)
BLOCKS = (Exact, Dense, Blocks, Diagonal, Kronecker, EigenKronecker, OnlineLowRank, LowRankCovariance, AdaptiveInverse)
NAMES: Mapping[str, Names] = {
    "criterion": LOSSES,
    "rule": name_kinds(*RULES, spectral=SpectralProgress),
    "damping": name_kinds(Constant, Relative, LevenbergMarquardt),
    "solver": name_kinds(*SOLVERS),
    "structure": name_kinds(*BLOCKS, unitwise=UnitWise),
    "estimate": name_kinds(Sampled, ExactLabels, Empirical),
    "method": name_kinds(Averaged, FirstOrder, Woodbury),
    "preconditioner": name_kinds(diagonal=DiagonalPreconditioner, empirical=EmpiricalPreconditioner),
}
"""By argument, the names that it takes as text, and what each builds."""


def replace_name(argument: str, value: Any) -> Any:
    """The choice that a text names; anything else as it is."""
    if not isinstance(value, str):
        return value
    return read_choice(argument, value, NAMES[argument], {**NAMES["estimate"], **NAMES["method"]})


def read_settings(settings: type[S], options: Mapping[str, Any]) -> S:
    """The options with their defaults, and with objects where they have texts."""
    return settings(**{key: replace_name(key, value) if key in NAMES else value for key, value in options.items()})


TORCH = {
    "betas": "betas[0] is momentum=; leave out betas[1], in whose place decay= averages the statistics",
    "eps": "leave it out; damping= takes its place, a share of each block's mean eigenvalue",
    **dict.fromkeys(
        ("amsgrad", "nesterov", "dampening", "foreach", "fused", "capturable", "differentiable"),
        "leave it out: there is no such choice here",
    ),
}
"""Keywords of torch's optimizers, by what to write instead."""


def check_keywords(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for a keyword that is not known, with the nearest one that is."""
    names = sorted(set(known) - {"self"})
    for key in given:
        if key not in names:
            near = get_close_matches(key, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(names)}"
            hint = f"; {TORCH[key]}" if key in TORCH else hint
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}{hint}")


def check_required(name: str, named: Sequence[inspect.Parameter], args: Sequence[Any], given: Collection[str]) -> None:
    """TypeError that shows a whole call, if an argument without a default is missing."""
    wanted = [p.name for p in named if p.default is p.empty]
    missing = [p.name for p in named[len(args) :] if p.name in wanted and p.name not in given]
    if missing:
        example = " with criterion=torch.nn.CrossEntropyLoss(), or the loss that you minimise"
        raise TypeError(
            f"{name}() lacks {' and '.join(map(repr, missing))}, expected {name}({', '.join(wanted)})"
            + example * ("criterion" in missing)
            + "".join(hint_at_parameters(arg) for arg in args[:1])
        )


def list_texts(options: Any) -> list[str]:
    """The docstrings of a table of options, and of those that it shares."""
    shares = SharedOptions.__annotations__.keys() <= options.__annotations__.keys()
    return [options.__doc__ or "", *([SharedOptions.__doc__ or ""] if shares else [])]


def join_arguments(own: str, shared: Iterable[str], names: Iterable[str]) -> str:
    """A docstring whose `Args` section also has the shared arguments."""
    entries, wanted, keep = list[str](), set(names), False
    texts = [inspect.cleandoc(text).splitlines() for text in shared]
    for line in [line for lines in texts for line in lines[lines.index("Args:") + 1 :]]:
        if line.startswith("    ") and not line.startswith("     "):
            keep = line.strip().partition(":")[0] in wanted
        if keep:
            entries.append(line)
    head, args, tail = inspect.cleandoc(own).partition("\n\nArgs:\n")
    if not args:
        return f"{head}\n\nArgs:\n" + "\n".join(entries)
    mine, gap, rest = tail.partition("\n\n")
    mine = "\n".join(line for line in mine.splitlines() if not line.strip().startswith("**options:"))
    return f"{head}\n\nArgs:\n{mine}\n" + "\n".join(entries) + gap + rest
