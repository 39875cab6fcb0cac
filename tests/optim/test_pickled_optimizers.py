"""An optimizer that is pickled with the model that it listens to goes on there as it would have gone on here."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from optim_models import CE, X, Y, flat, iterate, net
from torch import nn
from torch.nn import functional

import natgrad as ng

WAYS = {
    "all": lambda part: None,
    "a generator": lambda part: part.parameters(),
    "groups": lambda part: [
        {"params": [p for p in part.parameters() if p.dim() > 1]},
        {"params": [p for p in part.parameters() if p.dim() == 1], "weight_decay": 0.1, "lr": 0.5},
    ],
}
KINDS = {
    **{recipe.__name__: recipe for recipe in (ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng, ng.tonga)},
    **{recipe.__name__: recipe for recipe in (ng.hessian_free, ng.natgrad_cg, ng.krylov_subspace)},
    "sampled": lambda model, loss, **options: ng.NaturalGradient(model, ng.sampled_fisher(model, loss), **options),
}


def train(model: nn.Module, opt: Any, steps: int = 3) -> None:
    for _ in range(steps):
        iterate(opt, model, X, Y)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_takes_the_same_steps_and_the_first_one_hears_nothing_of_it(kind: str, way: str) -> None:
    model = net()
    opt = KINDS[kind](model, CE, params=WAYS[way](model))
    train(model, opt)
    other, again = pickle.loads(pickle.dumps((model, opt)))
    assert again.model is other
    train(other, again)
    assert not torch.equal(flat(other), flat(model))
    train(model, opt)
    assert torch.equal(flat(other), flat(model))
    assert again.state_report() == opt.state_report()


LOSSES = {
    "module": nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"),
    "function": functional.cross_entropy,
    "partial": functools.partial(functional.cross_entropy, label_smoothing=0.1),
    "likelihood": ng.Categorical(),
    "wrapped": ng.likelihood(functional.cross_entropy, ng.Categorical()),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "travel", [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_criteria_travel(loss: str, travel: Any) -> None:
    outputs = net()(X).detach()
    made = ng.families.as_criterion(LOSSES[loss])
    other = travel(made)
    assert torch.equal(other.value(outputs, Y), made.value(outputs, Y))
    assert other.scale(outputs, Y) == made.scale(outputs, Y)
    assert other.family == made.family


def test_an_optimizer_is_not_copied_without_its_model() -> None:
    opt = ng.kfac(net(), CE)
    for action in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="state_dict"):
            action(opt)
