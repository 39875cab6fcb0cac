"""K-FAC and its family, ready to use: which block per layer, with the defaults that go with it.

Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Unpack, get_args

from torch import nn

from natgrad.damping import Damping, Relative
from natgrad.families import Likelihood
from natgrad.optim.recipe_options import BlockOptions, BlockSettings, with_options
from natgrad.optim.structured import StructuredNaturalGradient
from natgrad.rules import NoiseAware, SpectralDescent
from natgrad.structures import (
    Diagonal,
    EigenKronecker,
    Empirical,
    Estimate,
    ExactLabels,
    Kronecker,
    Layerwise,
    LowRankCovariance,
    OnlineLowRank,
    Sampled,
    UnitWise,
)

Criterion = nn.Module | Likelihood
LearningRate = Literal["constant", "auto"]


SAFE = Relative(0.03, per="block", whole=1.0)
"""Damping that does not vanish with a block that the loss hardly depends on."""
NEAR, FAR = Relative(0.1, per="block", whole=0.1), Relative(0.3, per="block", whole=0.1)
"""The same for structures without dense factors, and for few directions."""
NATURAL = NoiseAware(kl_share=0.05, noise=0.0)
"""Natural steps within a share of each layer, all along, and of less nats."""
FALLS_AFTER = 20.0
"""Spectral steps from which on the rate falls with `rate="auto"`."""
ROWS = 4
"""Rows of a pass that a factor is taken from, for each of its own."""


@with_options(BlockOptions, BlockSettings, damping=SAFE)
def kfac(
    model: nn.Module,
    criterion: Criterion,
    lr: float = 1.0,
    *,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    rate: LearningRate = "constant",
    **options: Unpack[BlockOptions],
) -> StructuredNaturalGradient:
    """The natural gradient with a Kronecker product per layer (K-FAC), of the true Fisher.

    It takes the optimizer's place in an ordinary loop, with `opt.loss` in the criterion's place, and its defaults need
    no tuning. While the gradient stands out from its noise, steps are natural ones that change a layer by a share of
    its size at most. When noise prevails, steps move all directions of a layer alike, which is called spectral here:
    `natgrad.rules.NoiseAware` explains both. K-FAC as in the papers has `rule=natgrad.rules.MeasuredLength()` and
    `damping=ng.Relative(0.03, per="block")`.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Factor on the length that the rule finds.
        decay: Of the statistics' running averages, per update, in [0, 1).
        estimate: How labels are drawn; `ng.Empirical()` takes the data's own. To save time the factors are computed
            from a part of the pass's rows: four for each row of the larger factor, and 1024 at least. With
            `ng.ExactLabels()` all rows count.
        rate: "constant" keeps the rate, which a scheduler may lower. "auto" is for training without a scheduler:
            spectral steps get shorter by themselves, by the root of their number from the 20th on.
        **options: What all recipes of this kind share: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.
        ValueError: For `rate="auto"` with a rule whose steps do not turn spectral.

    Reference:
        Martens & Grosse 2015.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss(), lr=1.0)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    rows = math.inf if isinstance(estimate, ExactLabels) else ROWS
    structure = Kronecker(decay, estimate, factored=True, rows=rows)
    return build(model, criterion, structure, lr, settle_rate(heed_noise(options), rate), damping=SAFE)


@with_options(BlockOptions, BlockSettings, damping=SAFE)
def ekfac(
    model: nn.Module,
    criterion: Criterion,
    lr: float = 1.0,
    *,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    rate: LearningRate = "constant",
    **options: Unpack[BlockOptions],
) -> StructuredNaturalGradient:
    """The natural gradient in K-FAC's eigenbases with the Fisher's own diagonal there (EKFAC).

    Closer to the Fisher than `kfac`, and dearer: every update of the statistics takes eigendecompositions.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Factor on the length that the rule finds.
        decay: Of the statistics' running averages, per update, in [0, 1).
        estimate: How labels are drawn; `ng.Empirical()` takes the data's own.
        rate: "auto" or "constant", as in `kfac`.
        **options: What all recipes of this kind share: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.
        ValueError: For `rate="auto"` with a rule whose steps do not turn spectral.

    Reference:
        George et al. 2018.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.ekfac(model, nn.CrossEntropyLoss(), lr=1.0)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    chosen = settle_rate(heed_noise(options), rate)
    return build(model, criterion, EigenKronecker(decay, estimate), lr, chosen, damping=SAFE)


@with_options(BlockOptions, BlockSettings, damping=NEAR)
def diagonal(
    model: nn.Module,
    criterion: Criterion,
    lr: float = 1.0,
    *,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    **options: Unpack[BlockOptions],
) -> StructuredNaturalGradient:
    """The natural gradient with the diagonal of the true Fisher: one number per parameter.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Factor on the length that the rule finds.
        decay: Of the statistics' running averages, per update, in [0, 1).
        estimate: How labels are drawn; `ng.Empirical()` takes the data's own.
        **options: What all recipes of this kind share: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.diagonal(model, nn.CrossEntropyLoss())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    return build(model, criterion, Diagonal(decay, estimate), lr, heed_noise(options, NATURAL), damping=NEAR)


@with_options(BlockOptions, BlockSettings, damping=NEAR)
def unitwise(
    model: nn.Module,
    criterion: Criterion,
    lr: float = 1.0,
    *,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    **options: Unpack[BlockOptions],
) -> StructuredNaturalGradient:
    """The natural gradient with one block of the true Fisher per unit, whole or quasi-diagonal.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Factor on the length that the rule finds.
        decay: Of the statistics' running averages, per update, in [0, 1).
        estimate: How labels are drawn; `ng.Empirical()` takes the data's own.
        **options: What all recipes of this kind share: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.

    Reference:
        Le Roux et al. 2008; Ollivier 2015.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.unitwise(model, nn.CrossEntropyLoss())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    return build(model, criterion, UnitWise(decay, estimate), lr, heed_noise(options, NATURAL), damping=NEAR)


@with_options(BlockOptions, BlockSettings, damping=NEAR)
def online_ng(
    model: nn.Module,
    criterion: Criterion,
    lr: float = 1.0,
    *,
    decay: float = 0.95,
    gradient: bool = False,
    estimate: Estimate = Sampled(),
    **options: Unpack[BlockOptions],
) -> StructuredNaturalGradient:
    """The natural gradient with Kronecker factors tracked online as low rank plus scaled identity, as Kaldi does.

    No factor is formed and nothing is inverted: for layers too wide for `kfac`.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Factor on the length that the rule finds.
        decay: Of the statistics' running averages, per update, in [0, 1); Kaldi's is exp(-N / 2000) for N rows.
        gradient: True takes factors from the rows and columns of the gradient instead of from the examples.
        estimate: How labels are drawn; `ng.Empirical()` takes the data's own, as Kaldi does.
        **options: What all recipes of this kind share: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.

    Reference:
        Povey, Zhang & Khudanpur 2015.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.online_ng(model, nn.CrossEntropyLoss())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    structure = OnlineLowRank(decay, estimate, gradient=gradient, factored=True)
    return build(model, criterion, structure, lr, heed_noise(options, NATURAL), damping=NEAR)


@with_options(BlockOptions, BlockSettings, damping=FAR)
def tonga(
    model: nn.Module,
    criterion: Criterion,
    lr: float = 1.0,
    *,
    decay: float = 0.95,
    rank: int = 16,
    estimate: Estimate = Empirical(),
    **options: Unpack[BlockOptions],
) -> StructuredNaturalGradient:
    """The low-rank running covariance of the gradients per layer as metric (TONGA).

    Not the Fisher: it takes the data's targets, unless `estimate=ng.Sampled()`. The covariance of one batch, solved
    exactly, is `ng.NaturalGradient(model, ng.covariance(model, criterion), solver=ng.SampleSpace(), damping=0.1)`.

    Args:
        model: The network.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        lr: Factor on the length that the rule finds.
        decay: Of the running averages, per update, in [0, 1).
        rank: Directions per layer.
        estimate: How labels are drawn; the default takes the data's own.
        **options: What all recipes of this kind share: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood.

    Reference:
        Le Roux, Manzagol & Bengio 2008.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.tonga(model, nn.CrossEntropyLoss())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    return build(
        model, criterion, LowRankCovariance(decay, estimate, rank=rank), lr, heed_noise(options, NATURAL), damping=FAR
    )


def heed_noise(options: BlockOptions, usual: NoiseAware = NoiseAware()) -> BlockOptions:
    """The options with this rule, where the user gave none; max_kl and kl_share are its own then."""
    if options.get("rule") is not None:
        return options
    rest = BlockOptions(**options)
    max_kl, kl_share = rest.pop("max_kl", None), rest.pop("kl_share", None)
    rule = replace(
        usual,
        max_kl=usual.max_kl if max_kl is None else max_kl,
        kl_share=usual.kl_share if kl_share is None else kl_share,
    )
    return BlockOptions(rule=rule) | {key: value for key, value in rest.items() if key != "rule"}  # type: ignore[return-value]


def settle_rate(options: BlockOptions, rate: LearningRate) -> BlockOptions:
    """The options with a rule whose learning rate falls by itself, where that is asked for."""
    if rate not in get_args(LearningRate):
        raise ValueError(f'rate is {rate!r}, expected "constant" or "auto"; a number goes to lr=')
    rule = options.get("rule")
    if rate == "constant":
        return options
    if isinstance(rule, NoiseAware) and rule.noise > 0:
        rule = replace(rule, spectral=let_fall(rule.spectral))
    elif isinstance(rule, SpectralDescent):
        rule = let_fall(rule)
    else:
        raise ValueError(
            f'rate="auto" shortens spectral steps, and {rule} takes none: leave rule= out, or use a scheduler for lr'
        )
    chosen = BlockOptions(**options)
    chosen["rule"] = rule
    return chosen


def let_fall(rule: SpectralDescent) -> SpectralDescent:
    """The rule with the usual fall, where it has none."""
    return replace(rule, falls_after=FALLS_AFTER) if math.isinf(rule.falls_after) else rule


def build(
    model: nn.Module,
    criterion: Criterion,
    structure: Layerwise,
    lr: float,
    options: BlockOptions,
    *,
    damping: float | Damping = 0.03,
) -> StructuredNaturalGradient:
    """The optimizer with a recipe's structure, and its damping where the user gave none."""
    return StructuredNaturalGradient(model, criterion, structure, lr, **(BlockOptions(damping=damping) | options))
