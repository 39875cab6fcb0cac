"""KLDivLoss: a categorical distribution in log-probabilities, with soft targets."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import assert_close, draw, mlp, reference_jacobian
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.families import as_criterion
from natgrad.ground.spaces import trainable
from natgrad.metrics import fisher, gauss_newton

X, TARGETS = draw(5, 3, seed=2), draw(5, 4, seed=7).softmax(1)
REDUCTIONS = ["batchmean", "sum", "mean"]


def soft_model() -> tuple[nn.Module, nn.Module]:
    """A network of logits, and the same with a log-softmax behind it."""
    logits = mlp(3, 4, 4)
    return logits, nn.Sequential(logits, nn.LogSoftmax(dim=-1))


def enumerate_classes(logits: nn.Module) -> Tensor:
    """sum_c p_c grad log p_c grad log p_c^T, a mean over examples, in the network's parameters."""
    params = dict(trainable(logits))
    jacobian = reference_jacobian(logits, params, X, lambda r: r.log_softmax(1))  # (b, C, n)
    return torch.einsum("bc,bcm,bcn->mn", logits(X).detach().softmax(1), jacobian, jacobian) / len(X)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_the_metric_is_the_expected_outer_product_in_units_of_the_mean_loss(reduction: str, log_target: bool):
    logits, model = soft_model()
    criterion: Any = nn.KLDivLoss(reduction=reduction, log_target=log_target)
    targets = TARGETS.log() if log_target else TARGETS
    unit = 1 / 4 if reduction == "mean" else 1.0  # a mean over the classes too
    expected = unit * enumerate_classes(logits)
    found = gauss_newton(model, criterion).at(dict(trainable(model)), (X, targets)).dense()
    assert_close(found, expected, 1e-12)
    assert_close(fisher(model, criterion).at(dict(trainable(model)), X).dense(), expected / unit, 1e-12)
    understood = as_criterion(criterion)
    outputs = model(X)
    assert torch.equal(understood.value(outputs, targets), criterion(outputs, targets))
    assert float(understood.scale(outputs, targets)) == (5.0 if reduction == "sum" else 1.0)
    assert understood.nats(outputs) == 1 / unit


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_and_metric_are_those_of_soft_cross_entropy(reduction: str):
    """Behind a log-softmax the two losses differ by the entropy of the targets: the same gradient, the same metric."""
    logits, model = soft_model()
    soft, cross = as_criterion(nn.KLDivLoss(reduction=reduction)), as_criterion(nn.CrossEntropyLoss())
    value = soft.value(model(X), TARGETS) / soft.scale(model(X), TARGETS)
    unit = 4.0 if reduction == "mean" else 1.0
    params = list(logits.parameters())
    found = torch.autograd.grad(value * unit, params)
    expected = torch.autograd.grad(cross.value(logits(X), TARGETS), params)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-12)


@pytest.mark.parametrize("reduction", ["batchmean", "sum"])
def test_positions_and_rows_without_targets(reduction: str):
    """(b, T, C): batchmean divides by b alone, and a row of zeros adds nothing to the metric."""
    outputs, targets = draw(2, 3, 4).log_softmax(-1), draw(2, 3, 4, seed=1).softmax(-1)
    targets[1, 2:] = 0
    criterion: Any = nn.KLDivLoss(reduction=reduction)
    scale = as_criterion(criterion).scale(outputs, targets)

    def from_logits(flat: Tensor) -> Tensor:
        return criterion(flat.view(2, 3, 4).log_softmax(-1), targets) / scale

    hessian = torch.autograd.functional.hessian(from_logits, outputs.reshape(-1))
    params = {"r": outputs}
    found = gauss_newton(lambda p, _: p["r"].log_softmax(-1), criterion).at(params, (torch.ones(2), targets)).dense()
    assert_close(found, hessian, 1e-12)


@pytest.mark.parametrize("kind", [nn.KLDivLoss(reduction="batchmean", log_target=True), "function"])
def test_functions_and_options_are_understood(kind: Any):
    if kind == "function":
        kind = functools.partial(F.kl_div, reduction="batchmean", log_target=True)
    criterion, outputs = as_criterion(kind), draw(5, 4).log_softmax(1)
    expected = F.kl_div(outputs, TARGETS.log(), reduction="batchmean", log_target=True)
    assert_close(criterion.value(outputs, TARGETS.log()), expected, 0.0)
    assert_close(criterion.events(outputs, TARGETS.log()), TARGETS, 1e-15)


REFUSED = {
    "logits": (draw(5, 4), TARGETS, "not sum to 1. End the model with torch.nn.LogSoftmax"),
    "classes second": (draw(2, 4, 3).log_softmax(1), draw(2, 4, 3).softmax(1), "movedim"),
    "class numbers": (draw(5, 4).log_softmax(1), torch.zeros(5, dtype=torch.long), "CrossEntropyLoss on logits"),
    "log targets": (draw(5, 4).log_softmax(1), TARGETS.log(), "log_target=True"),
    "another shape": (draw(5, 4).log_softmax(1), TARGETS[:, :3], "nothing is broadcast"),
    "one axis": (draw(4).log_softmax(0), TARGETS[0], "log-probabilities"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_divergence_is_refused(name: str):
    outputs, targets, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        as_criterion(nn.KLDivLoss(reduction="batchmean")).value(outputs, targets)


def test_an_unreduced_loss_is_refused():
    with pytest.raises(ValueError, match="'mean' or 'sum' or 'batchmean'"):
        as_criterion(nn.KLDivLoss(reduction="none"))
