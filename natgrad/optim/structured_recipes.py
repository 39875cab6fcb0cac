"""K-FAC and its family, ready to use: which block per layer, with the defaults that go with it."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from natgrad.damping import Damping
from natgrad.families import Likelihood
from natgrad.optim.structured import StructuredNaturalGradient
from natgrad.pure import Select
from natgrad.structures import (
    Diagonal,
    EigenKronecker,
    Empirical,
    Estimate,
    Kronecker,
    LowRankCovariance,
    OnlineLowRank,
    Sampled,
    UnitWise,
)


def kfac(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    momentum: float = 0.9,
    damping: float | Damping = 0.03,
    update_every: int = 20,
    invert_every: int = 20,
    max_kl: float = math.inf,
    kl_share: float = 0.05,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    measure: bool = True,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    outputs: Select | None = None,
    params: Any = None,
    group: Any = None,
    train_in_eval: bool = False,
) -> StructuredNaturalGradient:
    """The natural gradient with a Kronecker product per layer (K-FAC), of the true Fisher.

    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   decay: of the statistics'
    running averages, per update.   estimate: how labels are drawn; `ng.Empirical()` takes the data's own.   The rest:
    as in `StructuredNaturalGradient`.
    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
    Martens & Grosse 2015. TypeError for a criterion that is not a likelihood.
    """
    return StructuredNaturalGradient(
        model,
        criterion,
        Kronecker(decay, estimate, factored=True),
        lr,
        momentum=momentum,
        damping=damping,
        max_kl=max_kl,
        kl_share=kl_share,
        weight_decay=weight_decay,
        l2=l2,
        update_every=update_every,
        invert_every=invert_every,
        measure=measure,
        outputs=outputs,
        params=params,
        group=group,
        train_in_eval=train_in_eval,
    )


def ekfac(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    momentum: float = 0.9,
    damping: float | Damping = 0.03,
    update_every: int = 20,
    invert_every: int = 20,
    max_kl: float = math.inf,
    kl_share: float = 0.05,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    measure: bool = True,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    outputs: Select | None = None,
    params: Any = None,
    group: Any = None,
    train_in_eval: bool = False,
) -> StructuredNaturalGradient:
    """The natural gradient in K-FAC's eigenbases with the Fisher's own diagonal there (EKFAC).

    Closer to the Fisher than `kfac`, and dearer: every update of the statistics takes eigendecompositions.
    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   decay: of the statistics'
    running averages, per update.   estimate: how labels are drawn; `ng.Empirical()` takes the data's own.   The rest:
    as in `StructuredNaturalGradient`.
    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
    George et al. 2018. TypeError for a criterion that is not a likelihood.
    """
    return StructuredNaturalGradient(
        model,
        criterion,
        EigenKronecker(decay, estimate),
        lr,
        momentum=momentum,
        damping=damping,
        max_kl=max_kl,
        kl_share=kl_share,
        weight_decay=weight_decay,
        l2=l2,
        update_every=update_every,
        invert_every=invert_every,
        measure=measure,
        outputs=outputs,
        params=params,
        group=group,
        train_in_eval=train_in_eval,
    )


def diagonal(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    momentum: float = 0.9,
    damping: float | Damping = 0.1,
    update_every: int = 20,
    invert_every: int = 20,
    max_kl: float = math.inf,
    kl_share: float = 0.05,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    measure: bool = True,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    outputs: Select | None = None,
    params: Any = None,
    group: Any = None,
    train_in_eval: bool = False,
) -> StructuredNaturalGradient:
    """The natural gradient with the diagonal of the true Fisher: one number per parameter.

    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   decay: of the statistics'
    running averages, per update.   estimate: how labels are drawn; `ng.Empirical()` takes the data's own.   The rest:
    as in `StructuredNaturalGradient`.
    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
    TypeError for a criterion that is not a likelihood.
    """
    return StructuredNaturalGradient(
        model,
        criterion,
        Diagonal(decay, estimate),
        lr,
        momentum=momentum,
        damping=damping,
        max_kl=max_kl,
        kl_share=kl_share,
        weight_decay=weight_decay,
        l2=l2,
        update_every=update_every,
        invert_every=invert_every,
        measure=measure,
        outputs=outputs,
        params=params,
        group=group,
        train_in_eval=train_in_eval,
    )


def unitwise(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    momentum: float = 0.9,
    damping: float | Damping = 0.1,
    update_every: int = 20,
    invert_every: int = 20,
    max_kl: float = math.inf,
    kl_share: float = 0.05,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    measure: bool = True,
    decay: float = 0.95,
    estimate: Estimate = Sampled(),
    outputs: Select | None = None,
    params: Any = None,
    group: Any = None,
    train_in_eval: bool = False,
) -> StructuredNaturalGradient:
    """The natural gradient with one block of the true Fisher per unit, whole or quasi-diagonal.

    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   decay: of the statistics'
    running averages, per update.   estimate: how labels are drawn; `ng.Empirical()` takes the data's own.   The rest:
    as in `StructuredNaturalGradient`.
    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
    Le Roux et al. 2008; Ollivier 2015. TypeError for a criterion that is not a likelihood.
    """
    return StructuredNaturalGradient(
        model,
        criterion,
        UnitWise(decay, estimate),
        lr,
        momentum=momentum,
        damping=damping,
        max_kl=max_kl,
        kl_share=kl_share,
        weight_decay=weight_decay,
        l2=l2,
        update_every=update_every,
        invert_every=invert_every,
        measure=measure,
        outputs=outputs,
        params=params,
        group=group,
        train_in_eval=train_in_eval,
    )


def online_ng(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    momentum: float = 0.9,
    damping: float | Damping = 0.1,
    update_every: int = 20,
    invert_every: int = 20,
    max_kl: float = math.inf,
    kl_share: float = 0.05,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    measure: bool = True,
    decay: float = 0.95,
    gradient: bool = False,
    estimate: Estimate = Sampled(),
    outputs: Select | None = None,
    params: Any = None,
    group: Any = None,
    train_in_eval: bool = False,
) -> StructuredNaturalGradient:
    """The natural gradient with Kronecker factors tracked online as low rank plus scaled identity, as Kaldi does.

    No factor is formed and nothing is inverted: for layers too wide for `kfac`.
    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   gradient: factors from the rows
    and columns of the gradient instead of from the examples.   decay: of the statistics' running averages, per update;
    Kaldi's is exp(-N / 2000) for N rows.   estimate: how labels are drawn; `ng.Empirical()` takes the data's own, as
    Kaldi does.   The rest: as in `StructuredNaturalGradient`.
    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
    Povey, Zhang & Khudanpur 2015. TypeError for a criterion that is not a likelihood.
    """
    return StructuredNaturalGradient(
        model,
        criterion,
        OnlineLowRank(decay, estimate, gradient=gradient, factored=True),
        lr,
        momentum=momentum,
        damping=damping,
        max_kl=max_kl,
        kl_share=kl_share,
        weight_decay=weight_decay,
        l2=l2,
        update_every=update_every,
        invert_every=invert_every,
        measure=measure,
        outputs=outputs,
        params=params,
        group=group,
        train_in_eval=train_in_eval,
    )


def tonga(
    model: nn.Module,
    criterion: nn.Module | Likelihood,
    lr: float = 1.0,
    *,
    momentum: float = 0.9,
    damping: float | Damping = 0.3,
    update_every: int = 20,
    invert_every: int = 20,
    max_kl: float = math.inf,
    kl_share: float = 0.05,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    measure: bool = True,
    decay: float = 0.95,
    rank: int = 16,
    estimate: Estimate = Empirical(),
    outputs: Select | None = None,
    params: Any = None,
    group: Any = None,
    train_in_eval: bool = False,
) -> StructuredNaturalGradient:
    """The low-rank running covariance of the gradients per layer as metric (TONGA).

    Not the Fisher: it takes the data's targets, unless `estimate=ng.Sampled()`. The covariance of one batch, solved
    exactly, is `ng.NaturalGradient(model, ng.covariance(model, criterion), solver=ng.SampleSpace(), damping=0.1)`.
    model, criterion: the network, and its loss from `torch.nn` or an `ng` likelihood.   rank: directions per layer.
    decay: of the running averages, per update.   The rest: as in `StructuredNaturalGradient`.
    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`.
    Le Roux, Manzagol & Bengio 2008. TypeError for a criterion that is not a likelihood.
    """
    return StructuredNaturalGradient(
        model,
        criterion,
        LowRankCovariance(decay, estimate, rank=rank),
        lr,
        momentum=momentum,
        damping=damping,
        max_kl=max_kl,
        kl_share=kl_share,
        weight_decay=weight_decay,
        l2=l2,
        update_every=update_every,
        invert_every=invert_every,
        measure=measure,
        outputs=outputs,
        params=params,
        group=group,
        train_in_eval=train_in_eval,
    )
