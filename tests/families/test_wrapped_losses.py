"""Functions and other libraries' losses as likelihoods: the metric is the Hessian of the number that is minimised."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import assert_close, draw, mlp
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.families import Criterion, as_criterion

CLASSES = torch.tensor([0, 3, 1, 1, 2])
LABELS = torch.tensor([[0, 3, -100], [2, -100, 1]])
BITS = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0.0]]).double()


def hessian_and_metric(criterion: Criterion, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """d^2 loss / d outputs^2 by definition, and sum_i w_i M_i in the same order, in the units of the loss."""
    n = outputs.numel()
    found = torch.autograd.functional.hessian(lambda r: criterion.loss(r, targets), outputs).reshape(n, n)
    places = criterion.family.rows(torch.arange(n).view(outputs.shape))
    rows, weights = criterion.family.rows(outputs), criterion.weights(outputs, targets)
    total = torch.zeros(n, n, dtype=outputs.dtype)
    for place, weight, form in zip(places.long(), weights, criterion.family.fisher(rows), strict=True):
        total[place.unsqueeze(1), place] += weight * form
    return found, total * criterion.scale(outputs, targets)


def name_after(module: str, name: str, **fields: Any) -> Any:
    """An instance of a class that bears another library's name."""
    return type(name, (SimpleNamespace,), {"__module__": module, "__qualname__": name, "__call__": fields.pop("call")})(
        **fields
    )


def mean_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Class logits (b, C), as a user writes it."""
    return -outputs.log_softmax(1).gather(1, targets.unsqueeze(1)).mean()


FUNCTIONS = {
    "cross_entropy": (functional.cross_entropy, draw(5, 4), CLASSES),
    "cross_entropy, options": (
        functools.partial(functional.cross_entropy, label_smoothing=0.1, reduction="sum", ignore_index=1),
        draw(5, 4),
        CLASSES,
    ),
    "nll_loss": (functional.nll_loss, draw(5, 4).log_softmax(1), CLASSES),
    "bce": (functional.binary_cross_entropy_with_logits, draw(2, 4), BITS),
    "mse": (functional.mse_loss, draw(2, 4), BITS),
    "poisson": (functional.poisson_nll_loss, draw(2, 4), BITS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_torch_are_what_their_modules_are(name: str):
    function, outputs, targets = FUNCTIONS[name]
    criterion = as_criterion(function)
    assert_close(criterion.value(outputs, targets), function(outputs, targets))
    if name != "nll_loss":  # curved by its log-softmax alone, which lies before it
        found, metric = hessian_and_metric(criterion, outputs, targets)
        assert_close(metric, found)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_tokens_has_its_hessian_as_metric(shift: bool, smoothing: float):
    from natgrad.families.known_losses import TokenCrossEntropy

    criterion, outputs = TokenCrossEntropy(shift, -100, smoothing).criterion(), draw(2, 3, 4)
    found, metric = hessian_and_metric(criterion, outputs, LABELS)
    assert_close(metric, found)
    rest = (outputs[:, :-1], LABELS[:, 1:]) if shift else (outputs, LABELS)
    flat = functional.cross_entropy(rest[0].flatten(0, 1), rest[1].flatten(), label_smoothing=smoothing)
    assert_close(criterion.value(outputs, LABELS), flat)


def test_language_models_train_on_labels_as_they_are():
    causal = name_after("transformers.loss.loss_utils", "ForCausalLMLoss", call=None)
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 5))
    opt = ng.kfac(model, causal)
    tokens = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    before = float(opt.criterion.value(model(tokens), tokens).detach())
    for _ in range(5):
        opt.zero_grad()
        opt.loss(model(tokens), tokens).backward()
        opt.step()
    assert opt.state_report().loss < 0.8 * before


def test_the_metric_of_the_batch_s_own_labels_sees_those_labels():
    """The empirical Fisher of a shifted loss: the outer products of the gradients of its tokens."""
    causal = as_criterion(name_after("transformers.loss.loss_utils", "ForCausalLMLoss", call=None))
    model, tokens = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4)).double(), torch.tensor([[0, 1, 3], [2, 2, 1]])
    params = ng.trainable(model)
    G = ng.empirical_fisher(model, causal).at(params, (tokens, tokens)).dense()
    expected = torch.zeros_like(G)
    for b in range(2):
        for t in range(2):
            model.zero_grad()
            functional.cross_entropy(model(tokens[b : b + 1])[0, t : t + 1], tokens[b, t + 1 : t + 2]).backward()
            g = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            expected += g.outer(g) / 4
    assert_close(G, expected)


@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_bit_per_class_is_made_of_class_numbers(sum_classes: bool, weighted: bool):
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double() if weighted else None

    def call(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        bits = torch.full_like(outputs, 0.05).scatter(1, targets.unsqueeze(1), 0.85)
        loss = functional.binary_cross_entropy_with_logits(outputs, bits, weight=weight, reduction="none")
        return loss.sum(-1).mean() if sum_classes else loss.mean()

    fields = {"smoothing": 0.2, "target_threshold": None, "weight": weight, "pos_weight": None}
    loss = name_after(
        "timm.loss.binary_cross_entropy",
        "BinaryCrossEntropy",
        call=call,
        reduction="mean",
        sum_classes=sum_classes,
        **fields,
    )
    outputs = draw(5, 4)
    found, metric = hessian_and_metric(as_criterion(loss), outputs, CLASSES)
    assert_close(metric, found)
    model = mlp(3, 4)
    opt = ng.kfac(model, loss)
    opt.loss(model(draw(5, 3)), CLASSES).backward()
    opt.step()
    assert opt.state_report().status == "stepped"


WRAPPED = {
    "mean over rows": (lambda r, t: mean_nll(r, t), ng.Categorical(), CLASSES, draw(5, 4)),
    "sum over rows": (lambda r, t: 5 * mean_nll(r, t) * len(r) / 5, ng.Categorical(), CLASSES, draw(5, 4)),
    "mean over entries": (lambda r, t: 0.5 * (r - t).square().mean(), ng.Gaussian(1.0), BITS, draw(2, 4)),
    "mean over rows of bits": (
        lambda r, t: functional.binary_cross_entropy_with_logits(r, t, reduction="none").sum(-1).mean(),
        ng.Bernoulli(),
        BITS,
        draw(2, 4),
    ),
    "mean over examples of sums over tokens": (
        lambda r, t: functional.cross_entropy(r.movedim(-1, 1) if r.dim() > 2 else r, t, reduction="sum") / len(r),
        ng.Categorical(),
        LABELS.clamp(min=0),
        draw(2, 3, 4),
    ),
    "another loss's": (
        lambda r, t: nn.CrossEntropyLoss(ignore_index=1)(r, t),
        nn.CrossEntropyLoss(ignore_index=1),
        CLASSES,
        draw(5, 4),
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_function_has_its_hessian_as_metric(name: str):
    function, family, targets, outputs = WRAPPED[name]
    criterion = ng.likelihood(function, family)
    assert_close(criterion.value(outputs, targets), function(outputs, targets))
    found, metric = hessian_and_metric(criterion, outputs, targets)
    assert_close(metric, found)


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "half": (
        lambda r, t: 0.5 * functional.cross_entropy(r, t),
        ng.Categorical(),
        ValueError,
        "is 0.5 times .* multiply the loss by 2",
    ),
    "focal": (
        lambda r, t: ((1 - r.softmax(1)) ** 2 * -r.log_softmax(1)).gather(1, t.unsqueeze(1)).mean(),
        ng.Categorical(dim=1),
        ValueError,
        "is not -log p of .* write your own: a class on ng.Likelihood",
    ),
    "no family": (lambda r, t: r.sum(), None, TypeError, r"ng.likelihood\(loss, ng.Categorical\(\)\)"),
    "not reduced": (
        lambda r, t: functional.cross_entropy(r, t, reduction="none"),
        ng.Categorical(),
        ValueError,
        "no probe was drawn .* expected one number",
    ),
    "other shapes": (lambda r, t: r.view(7, 7).sum(), ng.Categorical(), ValueError, r"give probe=\(outputs, targets\)"),
    "a number": (3, ng.Categorical(), TypeError, "loss is 3, expected a function"),
    "option": (functools.partial(functional.mse_loss, weight=torch.ones(3)), None, TypeError, "nn.MSELoss"),
    "positional": (functools.partial(functional.mse_loss, torch.ones(3)), None, TypeError, "options by name"),
    "not one number": (functools.partial(functional.mse_loss, reduction="none"), None, ValueError, "reduction='none'"),
    "what problem": (
        name_after("transformers.loss.loss_utils", "ForSequenceClassificationLoss", call=None),
        None,
        TypeError,
        "problem_type=None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_a_likelihood_is_refused_in_a_sentence(name: str):
    loss, family, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        ng.likelihood(loss, family)


@pytest.mark.parametrize(
    ("problem", "outputs", "targets"),
    [
        ("regression", draw(5, 1), draw(5)),
        ("single_label_classification", draw(5, 4), CLASSES),
        ("multi_label_classification", draw(2, 4), BITS),
    ],
)
def test_sequence_classifiers_follow_their_problem(problem: str, outputs: Tensor, targets: Tensor):
    loss = name_after("transformers.loss.loss_utils", "ForSequenceClassificationLoss", call=None)
    criterion = as_criterion(functools.partial(loss, config=SimpleNamespace(problem_type=problem, num_labels=4)))
    found, metric = hessian_and_metric(criterion, outputs, targets)
    assert_close(metric, found)
