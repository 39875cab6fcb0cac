"""Errors at the door: a sentence that names the argument, what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import F64, X3, affine, build_seeded, draw, mlp
from torch import Tensor, nn

from natgrad.families import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heads,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    as_criterion,
)
from natgrad.ground.spaces import trainable
from natgrad.metrics import divergence, empirical_fisher, fisher, gauss_newton, kl, sampled_fisher
from natgrad.operators import DenseOperator, Pullback
from natgrad.solvers import CG, Auto, Direct, SampleSpace

MODEL = mlp(3, 2, 3)
PARAMS = dict(trainable(MODEL))
CLASSES = torch.tensor([0, 2, 1, 2])
DENSE = DenseOperator(torch.eye(3, dtype=F64))
ONES = torch.ones(3, dtype=F64)
NAN = float("nan")


def at(metric: Any, inputs: Any = X3, params: Any = PARAMS) -> Callable[[], Any]:
    return lambda: metric.at(params, inputs)


def diverging(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"]) / 0.0


def constant(params: Any, x: Tensor) -> Tensor:
    return x


W = {"w": draw(3, 2)}
RECURRENT = build_seeded(lambda: nn.RNN(3, 2))
NORM = build_seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))

# what is wrong: (call, kind of error, words that the message must hold: the argument, and what to do)
METRICS = {
    "empty batch": (at(fisher(MODEL, Categorical()), X3[:0]), ValueError, ("inputs", "empty", "at least one example")),
    "empty batch with targets": (
        at(gauss_newton(MODEL, nn.CrossEntropyLoss()), (X3[:0], CLASSES[:0])),
        ValueError,
        ("inputs", "empty"),
    ),
    "empty batch in chunks": (at(fisher(MODEL, Categorical(), chunk_size=2), X3[:0]), ValueError, ("inputs", "empty")),
    "NaN inputs": (at(fisher(MODEL, Categorical()), X3 * NAN), ValueError, ("outputs", "not finite", "inputs")),
    "diverging model": (at(fisher(diverging, Gaussian()), X3, W), ValueError, ("outputs", "not finite", "lower")),
    "outputs without parameters": (at(fisher(constant, Gaussian()), X3, W), ValueError, ("outputs", "do not depend")),
    "unknown parameter": (
        at(fisher(MODEL, Categorical()), X3, {"other": draw(2)}),
        ValueError,
        ("params", "other", "ng.trainable(model)"),
    ),
    "no parameter": (at(fisher(MODEL, Categorical()), X3, {}), ValueError, ("params is empty", "at least one")),
    "parameters as a list": (at(fisher(MODEL, Categorical()), X3, [draw(2)]), TypeError, ("params is list", "dict")),
    "integer parameters": (
        at(fisher(affine, Gaussian()), X3, {"w": torch.ones(3, 2, dtype=torch.long)}),
        ValueError,
        ("params['w']", "floating-point"),
    ),
    "inputs on another device": (
        at(fisher(affine, Gaussian()), X3.to("meta"), W),
        ValueError,
        ("inputs", "meta", "cpu", "move"),
    ),
    "parameters on two devices": (
        at(fisher(affine, Gaussian()), X3, {"w": draw(3, 2), "b": draw(2).to("meta")}),
        ValueError,
        ("params", "several devices", "model.to(device)"),
    ),
    "model that is none": (lambda: fisher(3, Categorical()), TypeError, ("model is int", "expected")),  # type: ignore[arg-type]
    "chunk size of zero": (lambda: fisher(MODEL, Categorical(), chunk_size=0), ValueError, ("chunk_size is 0", ">= 1")),
    "chunks of a batch norm": (
        at(fisher(NORM, Gaussian(), chunk_size=2), X3, dict(trainable(NORM))),
        ValueError,
        ("chunk_size=2", "batch norm", "model.eval()"),
    ),
    "chunks of time": (
        at(
            fisher(RECURRENT, Gaussian(), chunk_size=2, outputs=lambda out: out[0]), draw(4, 2, 3), trainable(RECURRENT)
        ),
        ValueError,
        ("chunk_size=2", "put the examples first"),
    ),
    "no sample": (lambda: sampled_fisher(MODEL, Categorical(), samples=0), ValueError, ("samples is 0", ">= 1")),
    "targets left out": (
        at(empirical_fisher(MODEL, Categorical()), X3),
        ValueError,
        ("inputs is Tensor", "(inputs, targets)"),
    ),
    "targets left out of gauss-newton": (at(gauss_newton(MODEL, nn.MSELoss()), X3), ValueError, ("(inputs, targets)",)),
    "targets of a metric without": (
        at(fisher(MODEL, Categorical()), (X3, X3)),
        TypeError,
        ("2 arguments came in order, and it takes 1", "a pair (inputs, targets) is for metrics that need targets"),
    ),
    "targets of a function's metric without": (
        at(fisher(affine, Gaussian()), (X3, X3), W),
        TypeError,
        ("affine(dict, Tensor, Tensor): 3 arguments came in order, and it takes 2",),
    ),
    "targets None": (
        at(empirical_fisher(MODEL, Categorical()), (X3, None)),
        ValueError,
        ("targets is None", "ng.fisher"),
    ),
    "likelihood without a form": (
        lambda: fisher(MODEL, SampleOnly()),
        NotImplementedError,
        ("SampleOnly", "fisher(rows)", "ng.sampled_fisher"),
    ),
    "no divergence": (
        at(divergence(lambda p, q, x: sum(t.square().sum() for t in q.values()) + 1)),
        ValueError,
        ("d(params, params)", "not a divergence"),
    ),
    "divergence that does not depend on its argument": (
        at(divergence(lambda p, q, x: torch.zeros((), dtype=F64))),
        ValueError,
        ("d(params", "depend"),
    ),
    "loss that is no scalar": (
        at(gauss_newton(MODEL, lambda r, t: (r - t).square()), (X3, X3)),
        ValueError,
        ("loss has shape (4, 3)", "scalar"),
    ),
    "weights of another length": (
        lambda: Pullback(fisher(MODEL, Categorical()).at(PARAMS, X3).linearization, Categorical(), torch.ones(3)),
        ValueError,
        ("weights has shape (3,)", "(4,)"),
    ),
    "product with a wrong shape": (
        lambda: fisher(MODEL, Categorical()).at(PARAMS, X3) @ draw(3),
        ValueError,
        ("has shape (3,)", "(17,)", "flatten"),
    ),
}


class SampleOnly(Likelihood):
    """A likelihood of the user's without its form."""

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        return (outputs - targets).square().sum(1)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Any:
        return outputs


def expect_refusal(call: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert len(str(caught.value).split()) >= 6  # a sentence


@pytest.mark.parametrize("case", METRICS)
def test_metrics_refuse_bad_input(case):
    expect_refusal(*METRICS[case])


FAMILIES = {
    "Categorical": Categorical(),
    "Bernoulli": Bernoulli(),
    "Gaussian": Gaussian(),
    "Poisson": Poisson(),
    "HeteroscedasticGaussian": HeteroscedasticGaussian(),
    "Heads": Heads((Gaussian(), 1)),
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "MSELoss": nn.MSELoss(),
    "GaussianNLLLoss": nn.GaussianNLLLoss(),
}
NO_OUTPUTS = {
    "None": lambda y: None,
    "an empty tuple": lambda y: (),
    "a scalar": lambda y: y.sum(),
    "a number": lambda y: 3.0,
}


@pytest.mark.parametrize("outputs", NO_OUTPUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_outputs_is_refused(family, outputs):
    model = lambda params, x: NO_OUTPUTS[outputs](x @ params["w"])  # noqa: E731
    expect_refusal(at(fisher(model, FAMILIES[family]), X3, W), ValueError, ("output",))


@pytest.mark.parametrize("family", ["Categorical", "CrossEntropyLoss"])
def test_a_tuple_of_outputs_needs_heads(family):
    expect_refusal(at(fisher(lambda p, x: (x @ p["w"], x), FAMILIES[family]), X3, W), ValueError, ("output", "tuple"))


def targets_of(loss: Any, targets: Any, outputs: int = 3) -> Callable[[], Any]:
    model = mlp(3, 2, outputs)
    return lambda: gauss_newton(model, loss).at(dict(trainable(model)), (X3, targets))


BITS = torch.ones(4, 3, dtype=F64)
TARGETS = {
    "class too large": (
        nn.CrossEntropyLoss(),
        torch.tensor([0, 1, 2, 3]),
        ("targets range from 0 to 3", "from 0 to 2"),
    ),
    "class negative": (nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, -1]), ("targets range from -1", "from 0 to 2")),
    "class of an ng likelihood": (Categorical(), torch.tensor([0, 1, 2, 7]), ("targets range from 0 to 7",)),
    "too few classes": (nn.CrossEntropyLoss(), CLASSES[:3], ("targets has shape (3,)", "expected (4,)")),
    "classes as a column": (nn.CrossEntropyLoss(), CLASSES.unsqueeze(1), ("targets has shape (4, 1)",)),
    "classes as numbers with a point": (
        nn.CrossEntropyLoss(),
        CLASSES.double(),
        ("targets are torch.float64 of shape (4,)", "targets.long()"),
    ),
    "probabilities above one": (
        nn.CrossEntropyLoss(),
        2 * BITS,
        ("targets range from 2 to 2", "probabilities in [0, 1]"),
    ),
    "bits above one": (nn.BCEWithLogitsLoss(), 2 * BITS, ("targets range from 2 to 2", "[0, 1]")),
    "bits below zero": (Bernoulli(), -BITS, ("targets range from -1", "[0, 1]")),
    "bits that are not finite": (nn.BCEWithLogitsLoss(), BITS * NAN, ("targets", "finite")),
    "negative counts": (nn.PoissonNLLLoss(), -BITS, ("targets range from -1", "counts >= 0")),
    "broadcast targets": (nn.MSELoss(), BITS[:, :1], ("targets has shape (4, 1)", "(4, 3)", "reshape")),
    "targets of another batch": (Gaussian(), BITS[:2], ("targets has shape (2, 3)", "(4, 3)")),
    "values that are not finite": (nn.MSELoss(), BITS * NAN, ("targets", "finite")),
    "infinite values": (Gaussian(), BITS / 0.0, ("targets", "finite")),
    "all ignored": (nn.CrossEntropyLoss(), torch.full((4,), -100), ("targets", "ignore")),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_out_of_range_are_refused(case):
    loss, targets, words = TARGETS[case]
    expect_refusal(targets_of(loss, targets), ValueError, words)


@pytest.mark.parametrize("case", [case for case in TARGETS if case != "all ignored"])
def test_the_empirical_fisher_refuses_them_too(case):
    loss, targets, words = TARGETS[case]
    expect_refusal(lambda: empirical_fisher(MODEL, loss).at(PARAMS, (X3, targets)), ValueError, words)


HEADS = Heads((Categorical(), 3), (HeteroscedasticGaussian(), 2))
CRITERIA = {
    "a name of none": (lambda: fisher(MODEL, "means"), ValueError, ("criterion is 'means'", "expected one of")),
    "no loss": (lambda: gauss_newton(MODEL, 3), TypeError, ("criterion is int",)),  # type: ignore[arg-type]
    "negative std": (lambda: Gaussian(-1.0), ValueError, ("std is -1.0", "positive")),
    "infinite std": (lambda: Gaussian(float("inf")), ValueError, ("std is inf", "positive")),
    "no head": (lambda: Heads(), ValueError, ("heads is empty",)),
    "heads of another width": (
        lambda: Heads((Categorical(), 4)).rows((X3,)),
        ValueError,
        ("widths [3]", "expected [4]"),
    ),
    "heads of other numbers": (
        lambda: Heads((Categorical(), 3), (Gaussian(), 3)).rows((X3, X3[:2])),
        ValueError,
        ("[4, 2] rows", "one per example"),
    ),
    "complex outputs": (lambda: Gaussian().rows(X3 + 1j), ValueError, ("complex128", "torch.view_as_real")),
    "heads of other numbers beside targets": (
        lambda: as_criterion(HEADS).check((X3, (X3, X3)), (CLASSES, X3)),
        ValueError,
        ("[4, 12] rows", "one per example"),
    ),
    "heads of other numbers beside weights": (
        lambda: as_criterion(HEADS).weigh_targets((X3, (X3, X3)), (CLASSES, X3), torch.ones(4)),
        ValueError,
        ("[4, 12] rows", "one per example"),
    ),
    "one head too many": (lambda: Heads((Categorical(), 3)).rows((X3, X3)), ValueError, ("2 parts", "1 heads")),
    "odd mean and spread": (lambda: HeteroscedasticGaussian().rows(X3), ValueError, ("outputs", "(mean, spread)")),
    "logits without a class axis": (
        lambda: Categorical().rows(X3[:, 0]),
        ValueError,
        ("outputs has shape (4,)", "logits"),
    ),
    "no kl": (
        lambda: kl(MODEL, SampleOnly())(PARAMS, PARAMS, X3),
        NotImplementedError,
        ("SampleOnly", "kl(outputs, other)"),
    ),
}


@pytest.mark.parametrize("case", CRITERIA)
def test_what_is_no_likelihood_is_refused(case):
    expect_refusal(*CRITERIA[case])


SOLVERS = {"Direct": Direct(), "CG": CG(), "SampleSpace": SampleSpace(), "Auto": Auto()}
SYSTEMS = {
    "NaN gradient": (DENSE, ONES * NAN, {}, ValueError, ("rhs is not finite", "gradient", "nothing was solved")),
    "infinite gradient": (DENSE, ONES / 0.0, {}, ValueError, ("rhs is not finite",)),
    "too long": (DENSE, torch.ones(4, dtype=F64), {}, ValueError, ("rhs has shape (4,)", "(3,)", "flatten")),
    "a column": (DENSE, ONES.unsqueeze(1), {}, ValueError, ("rhs has shape (3, 1)",)),
    "a list": (DENSE, [1.0, 1.0, 1.0], {}, ValueError, ("rhs has shape list",)),
    "negative damping": (DENSE, ONES, {"damping": -1e-3}, ValueError, ("damping is -0.001", ">= 0")),
    "damping NaN": (DENSE, ONES, {"damping": NAN}, ValueError, ("damping is nan", "finite")),
    "infinite damping": (DENSE, ONES, {"damping": float("inf")}, ValueError, ("damping is inf", "finite")),
    "guess too short": (DENSE, ONES, {"guess": ONES[:2]}, ValueError, ("guess has shape (2,)", "(3,)")),
    "guess NaN": (DENSE, ONES, {"guess": ONES * NAN}, ValueError, ("guess is not finite",)),
    "a matrix": (
        torch.eye(3, dtype=F64),
        ONES,
        {},
        TypeError,
        ("operator is Tensor", "ng.operators.DenseOperator(matrix)"),
    ),
    "a metric": (
        fisher(MODEL, Categorical()),
        ONES,
        {},
        TypeError,
        ("operator is Fisher", "metric.at(params, inputs)"),
    ),
    "another device": (DENSE, ONES.to("meta"), {}, ValueError, ("rhs is on meta", "operator on cpu")),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", SYSTEMS)
def test_solvers_refuse_bad_input(case, solver):
    operator, rhs, options, kind, words = SYSTEMS[case]
    expect_refusal(lambda: SOLVERS[solver].solve(operator, rhs, **options), kind, words)


def test_nothing_has_changed_after_an_error():
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)))
    params = dict(trainable(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for inputs in (X3 * NAN, X3[:0]):
        with pytest.raises(ValueError):
            fisher(model, Categorical()).at(params, inputs)
    with pytest.raises(ValueError):
        gauss_newton(model, nn.CrossEntropyLoss()).at(params, (X3, torch.tensor([0, 1, 2, 9])))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in params.values())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
