"""A loss from torch.nn as a likelihood: its metric is the Hessian of the loss, in the units of its mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import F64, assert_close, draw, mlp
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import as_criterion
from natgrad.ground.spaces import trainable
from natgrad.metrics import gauss_newton

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=F64)
CLASSES = torch.tensor([0, 3, 1, 1, 2])
SOFT = draw(5, 4, seed=7).softmax(1)
POSITIONS = torch.tensor([[0, 3, 1], [2, 2, -100], [1, 0, 3]])
BITS = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0.0, 0, 0, 1], [1, 0, 1, 1], [0, 0, 0.3, 0.9]], dtype=F64)


@dataclass(frozen=True)
class Loss:
    """A criterion whose Hessian in the outputs is its metric, whatever the targets."""

    criterion: nn.Module
    outputs: Tensor
    targets: Tensor


CANONICAL = {
    "CE": Loss(nn.CrossEntropyLoss(), draw(5, 4), CLASSES),
    "CE, sum": Loss(nn.CrossEntropyLoss(reduction="sum"), draw(5, 4), CLASSES),
    "CE, weight": Loss(nn.CrossEntropyLoss(weight=WEIGHT), draw(5, 4), CLASSES),
    "CE, weight, sum": Loss(nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), draw(5, 4), CLASSES),
    "CE, ignored": Loss(nn.CrossEntropyLoss(ignore_index=1), draw(5, 4), CLASSES),
    "CE, ignored, weight, sum": Loss(
        nn.CrossEntropyLoss(ignore_index=-1, weight=WEIGHT, reduction="sum"),
        draw(5, 4),
        torch.tensor([0, -1, 3, -1, 2]),
    ),
    "CE, smoothing": Loss(nn.CrossEntropyLoss(label_smoothing=0.2), draw(5, 4), CLASSES),
    "CE, smoothing, weight, ignored": Loss(
        nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHT, ignore_index=3), draw(5, 4), CLASSES
    ),
    "CE, soft": Loss(nn.CrossEntropyLoss(), draw(5, 4), SOFT),
    "CE, soft, weight, smoothing": Loss(nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), draw(5, 4), SOFT),
    "CE, soft, sum": Loss(nn.CrossEntropyLoss(reduction="sum", weight=WEIGHT), draw(5, 4), SOFT),
    "CE, positions": Loss(nn.CrossEntropyLoss(), draw(3, 4, 3), POSITIONS),
    "CE, positions, weight, sum": Loss(nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), draw(3, 4, 3), POSITIONS),
    "CE, positions, soft": Loss(nn.CrossEntropyLoss(weight=WEIGHT), draw(3, 4, 3), draw(3, 4, 3, seed=1).softmax(1)),
    "CE, images": Loss(nn.CrossEntropyLoss(), draw(2, 4, 2, 2), torch.tensor([[[0, 1], [2, 3]], [[3, 3], [0, -100]]])),
    "BCE": Loss(nn.BCEWithLogitsLoss(), draw(5, 4), BITS),
    "BCE, sum": Loss(nn.BCEWithLogitsLoss(reduction="sum"), draw(5, 4), BITS),
    "BCE, one output": Loss(nn.BCEWithLogitsLoss(), draw(5), BITS[:, 0]),
    "BCE, weight": Loss(nn.BCEWithLogitsLoss(weight=WEIGHT), draw(5, 4), BITS),
    "BCE, weight per example": Loss(nn.BCEWithLogitsLoss(weight=draw(5, 1).abs()), draw(5, 4), BITS),
    "BCE, pos_weight": Loss(nn.BCEWithLogitsLoss(pos_weight=WEIGHT), draw(5, 4), BITS),
    "BCE, all, sum": Loss(nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT, reduction="sum"), draw(5, 4), BITS),
    "BCE, images": Loss(nn.BCEWithLogitsLoss(), draw(2, 3, 2), (draw(2, 3, 2, seed=1) > 0).double()),
    "MSE": Loss(nn.MSELoss(), draw(5, 4), draw(5, 4, seed=1)),
    "MSE, sum": Loss(nn.MSELoss(reduction="sum"), draw(5, 4), draw(5, 4, seed=1)),
    "MSE, images": Loss(nn.MSELoss(), draw(2, 3, 2), draw(2, 3, 2, seed=1)),
    "Poisson": Loss(nn.PoissonNLLLoss(), draw(5, 4), draw(5, 4, seed=1).exp().round()),
    "Poisson, full, sum": Loss(
        nn.PoissonNLLLoss(full=True, reduction="sum"), draw(5, 4), draw(5, 4, seed=1).exp().round()
    ),
}


def metric_in_outputs(criterion: Any, outputs: Any, targets: Any) -> Tensor:
    """sum_i w_i M_i of the criterion over rows of outputs, as a matrix on the model's outputs in their own order."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    params = {f"part{i}": part for i, part in enumerate(parts)}

    def identity(params: Any, _: Tensor) -> Any:
        return tuple(params.values()) if len(params) > 1 else params["part0"]

    return gauss_newton(identity, criterion).at(params, (torch.ones(len(parts[0])), targets)).dense()


@pytest.mark.parametrize("name", CANONICAL)
def test_the_metric_is_the_hessian_of_the_mean_loss(name):
    case = CANONICAL[name]
    understood = as_criterion(case.criterion)
    hessian = torch.autograd.functional.hessian(lambda r: case.criterion(r, case.targets), case.outputs)
    hessian = hessian.reshape(case.outputs.numel(), -1) / understood.scale(case.outputs, case.targets)
    assert_close(metric_in_outputs(case.criterion, case.outputs, case.targets), hessian, 1e-13)


@pytest.mark.parametrize("name", CANONICAL)
def test_the_value_is_the_users_loss(name):
    case = CANONICAL[name]
    understood = as_criterion(case.criterion)
    assert torch.equal(understood.value(case.outputs, case.targets), case.criterion(case.outputs, case.targets))


@pytest.mark.parametrize("repeats", [2, 5])
@pytest.mark.parametrize("name", [name for name in CANONICAL if "per example" not in name])
def test_the_metric_does_not_depend_on_the_size_of_the_batch(name, repeats):
    """Two parameters that move all outputs: their metric is a mean over examples."""
    case = CANONICAL[name]

    def shift_outputs(params: Any, outputs: Tensor) -> Tensor:
        return outputs * params["scale"] + params["shift"]

    params = {"scale": torch.ones((), dtype=F64), "shift": torch.zeros((), dtype=F64)}
    metric = gauss_newton(shift_outputs, case.criterion)
    many = [torch.cat([t] * repeats) for t in (case.outputs, case.targets)]
    assert_close(metric.at(params, tuple(many)).dense(), metric.at(params, (case.outputs, case.targets)).dense(), 1e-13)


def test_nll_of_log_softmax_is_cross_entropy():
    logits = mlp(3, 4, 4)
    x = draw(5, 3, seed=2)
    for options_ in ({}, {"weight": WEIGHT}, {"ignore_index": 1}, {"weight": WEIGHT, "reduction": "sum"}):
        model = nn.Sequential(logits, nn.LogSoftmax(dim=1))
        found = gauss_newton(model, nn.NLLLoss(**options_)).at(dict(trainable(model)), (x, CLASSES)).dense()
        expected = (
            gauss_newton(logits, nn.CrossEntropyLoss(**options_)).at(dict(trainable(logits)), (x, CLASSES)).dense()
        )
        assert_close(found, expected, 1e-13)


@pytest.mark.parametrize("options_", [{}, {"weight": WEIGHT}, {"reduction": "sum"}])
def test_bits_of_sigmoids_are_those_of_logits(options_):
    logits, x = mlp(3, 4, 4), draw(5, 3, seed=2)
    params = dict(trainable(logits))
    model = nn.Sequential(logits, nn.Sigmoid())
    found = gauss_newton(model, nn.BCELoss(**options_)).at(dict(trainable(model)), (x, BITS)).dense()
    assert_close(found, gauss_newton(logits, nn.BCEWithLogitsLoss(**options_)).at(params, (x, BITS)).dense(), 1e-13)


def test_saturated_sigmoids_have_finite_forms_and_losses():
    family, p = as_criterion(nn.BCELoss()).family, torch.tensor([[0.0], [1.0], [1e-30], [1 - 2**-24]])
    assert torch.isfinite(family.fisher(family.rows(p))).all()
    assert torch.isfinite(family.score(p, family.sample(p))).all()
    assert_close(family.kl(p, p), torch.zeros(4), 0)


def test_outputs_that_are_no_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"outputs range from -1 to 2, expected probabilities in \[0, 1\]"):
        as_criterion(nn.BCELoss()).value(torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 1.0]))


REJECTED = {
    "CosineEmbeddingLoss": nn.CosineEmbeddingLoss(),
    "MultiMarginLoss": nn.MultiMarginLoss(),
    "HingeEmbeddingLoss": nn.HingeEmbeddingLoss(),
    "a class instead of an instance": nn.CrossEntropyLoss,
    "a module": nn.Linear(2, 2),
    "None": None,
    "its methods alone": SimpleNamespace(nll=abs, sample=abs),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_no_likelihood_is_rejected_by_name(name):
    with pytest.raises(TypeError) as caught:
        as_criterion(REJECTED[name])
    message = str(caught.value)
    assert message.startswith("criterion is ")
    assert "CrossEntropyLoss" in message
    assert "expected" in message
    assert "your own: a class on ng.Likelihood" in message or isinstance(REJECTED[name], type)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.NLLLoss])
def test_an_unreduced_loss_is_rejected(kind):
    with pytest.raises(ValueError, match="reduction='none', expected 'mean' or 'sum'"):
        as_criterion(kind(reduction="none"))


@pytest.mark.parametrize("convert", [Tensor.numpy, Tensor.tolist])
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_targets_that_are_no_tensor_are_refused(criterion: nn.Module, convert):
    classes = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    targets = torch.tensor([0, 1]) if classes else torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"targets is (ndarray|list), expected a tensor: .*torch\.as_tensor"):
        as_criterion(criterion).value(torch.zeros(2, 3), convert(targets))


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([-1.0, 1, 1])),
        nn.NLLLoss(weight=torch.tensor([1.0, float("nan"), 1])),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, -0.1, 1])),
        nn.BCEWithLogitsLoss(weight=torch.tensor([1.0, -0.1, 1])),
        nn.BCELoss(weight=torch.tensor([1.0, -0.1, 1])),
    ],
)
@pytest.mark.parametrize("build", [ng.kfac, ng.hessian_free, ng.fisher, ng.gauss_newton])
def test_weights_below_zero_are_refused_by_name(criterion: nn.Module, build: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=f"weight of {type(criterion).__name__} has entries down to"):
        build(nn.Linear(4, 3), criterion)
