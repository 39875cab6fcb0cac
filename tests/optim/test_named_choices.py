"""Choices as text: a name stands for the object, and what an object prints as can be read back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_models import flat, net, train
from torch import nn

import natgrad as ng
from natgrad.ground.choices import Names
from natgrad.optim import NAMES
from natgrad.optim.options import replace_name
from natgrad.rules import SpectralProgress

ARGUMENTS = {
    "trust_region": (0.1,),
    "measured_trust_region": (0.1,),
    "normalised_rate": (0.1,),
    "constant": (0.1,),
    "relative": (0.1, "block"),
}
"""Of what has no defaults."""


CHOICES = [(argument, name) for argument, names in NAMES.items() if argument != "criterion" for name in names]


@pytest.mark.parametrize(("argument", "name"), CHOICES)
def test_what_a_choice_prints_as_is_read_back(argument: str, name: str):
    choice = NAMES[argument][name](*ARGUMENTS.get(name, ()))
    assert replace_name(argument, repr(choice)) == choice


@pytest.mark.parametrize("name", NAMES["criterion"])
def test_a_loss_s_name_is_the_loss(name: str):
    criterion = ng.families.as_criterion(name)
    assert criterion.family == ng.families.as_criterion(NAMES["criterion"][name]()).family


@pytest.mark.parametrize("text", ["mse", "MSELoss", "mse_loss", "mse()", " MSELoss() "])
def test_a_loss_is_known_by_torch_s_own_words(text: str):
    assert isinstance(replace_name("criterion", text), nn.MSELoss)


def take_steps(criterion: Any, recipe: Any, **options: Any) -> torch.Tensor:
    model = net()
    train(recipe(model, criterion, **options), model, 3)
    return flat(model)


SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1)
CALLS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (ng.kfac, {"rule": "spectral"}, {"rule": SpectralProgress()}),
    (
        ng.kfac,
        {"rule": "trust_region(0.1)", "damping": "relative(.1, per='block')"},
        {"rule": ng.TrustRegion(0.1), "damping": ng.Relative(0.1, per="block")},
    ),
    (ng.kfac, {"estimate": "exact_labels"}, {"estimate": ng.structures.ExactLabels()}),
    (ng.kfac, {"rule": "spectral", "rate": "auto"}, {"rule": SpectralProgress(), "rate": "auto"}),
    (ng.hessian_free, {"solver": "cg(max_steps=3)"}, {"solver": ng.CG(max_steps=3)}),
    (ng.hessian_free, {"preconditioner": "diagonal"}, {"preconditioner": ng.structures.DiagonalPreconditioner()}),
    (ng.natgrad_cg, {"damping": "levenberg_marquardt"}, {"damping": ng.LevenbergMarquardt()}),
]


@pytest.mark.parametrize(("recipe", "texts", "objects"), CALLS, ids=[str(texts)[:60] for _, texts, _ in CALLS])
def test_a_text_takes_the_steps_of_its_object(recipe: Any, texts: dict[str, Any], objects: dict[str, Any]):
    named = take_steps("cross_entropy(label_smoothing=0.1)", recipe, **texts)
    assert torch.equal(named, take_steps(SMOOTH, recipe, **objects))


def test_a_metric_takes_a_loss_by_name_and_a_system_its_solver():
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    G = ng.fisher(model, "mse").at(ng.trainable(model), x)
    gradient = torch.ones(8, dtype=torch.float64)
    named = ng.natural_gradient(G, gradient, solver="direct", damping="constant(0.5)").value
    assert torch.equal(named, ng.natural_gradient(G, gradient, solver=ng.Direct(), damping=ng.Constant(0.5)).value)


def test_an_unknown_name_lists_all_that_are_known():
    names: Names = NAMES["rule"]
    with pytest.raises(ValueError, match="did you mean 'spectral'") as raised:
        ng.kfac(nn.Linear(2, 2), "mse", rule="spectrall")
    assert all(repr(name) in str(raised.value) for name in names)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("trust_region", TypeError, "'radius' is missing"),
        ("trust_region(size=1)", TypeError, "has no argument 'size'"),
        ("trust_region(1 + x)", ValueError, r"'1 \+ x' in it, expected numbers"),
        ("trust_region(open('file'))", ValueError, "rule is 'open', expected one of"),
        ("print('hello')", ValueError, "rule is 'print', expected one of"),
        ("0.1", ValueError, "rule is '0.1', expected one of"),
        ("spectral(", ValueError, "expected one of"),
        ("", ValueError, "expected one of"),
    ],
)
def test_a_text_that_is_no_choice_is_refused(text: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        ng.kfac(nn.Linear(2, 2), "mse", rule=text)
