"""What a state has: a batch that is accumulated, failures, and trees of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Assembled, assert_close, draw, mlp
from optim_models import CE, net, same, snapshot, train_numbered
from saved_runs import load, run_build, save
from torch import nn

import natgrad as ng
from natgrad.optim.checkpoint import pack_tree, unpack_tree

PARTS = [(draw(8, 3, seed=i), torch.arange(8) % 3) for i in range(3)]


def go_backward(model: nn.Module, opt: Any, parts: int) -> None:
    """The first parts of a batch that is accumulated."""
    opt.zero_grad()
    for x, y in PARTS[:parts]:
        opt.loss(model(x), y).backward()


@pytest.mark.parametrize("build", ["kfac", "online_ng", "kfac, judged", "hessian_free", "averaged", "sampled"])
def test_a_state_between_micro_batches_is_the_last_steps_and_says_so(build: str) -> None:
    model, opt = run_build(build, 3)
    last = save(model, opt)
    go_backward(model, opt, 2)
    with pytest.warns(UserWarning, match="begin this batch again, from its first micro-batch"):
        between = save(model, opt)
    assert same(between, last)
    go_backward(model, opt, 3)  # the whole batch
    opt.step()
    resumed, other = run_build(build, 1)
    load(resumed, other, between)
    go_backward(resumed, other, 3)
    other.step()
    assert same(save(resumed, other), save(model, opt))


CLEARED: dict[str, Callable[[nn.Module, Any], None]] = {
    "by the optimizer": lambda _, opt: opt.zero_grad(),
    "by the model": lambda model, _: model.zero_grad(),
    "in place": lambda model, _: model.zero_grad(set_to_none=False),
    "by a step": lambda _, opt: opt.step(),
}


@pytest.mark.parametrize("clear", CLEARED)
def test_no_gradient_is_missed_where_none_is_left(clear: str) -> None:
    """Warnings are errors here."""
    model, opt = run_build("kfac", 1)
    go_backward(model, opt, 2)
    CLEARED[clear](model, opt)
    opt.state_dict()


@pytest.mark.parametrize("build", ["kfac", "hessian_free"])
def test_steps_that_come_to_nothing_are_counted_on_after_a_checkpoint(build: str) -> None:
    def skip_steps(model: nn.Module, opt: Any, count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            opt.loss(model(torch.ones(4, 3, dtype=torch.float64)), torch.arange(4) % 3).backward()
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
            opt.step()

    model, opt = run_build(build, 2)
    skip_steps(model, opt, 3)
    saved = save(model, opt)
    model, opt = run_build(build, 1)
    load(model, opt, saved)
    with pytest.warns(UserWarning, match="the last 5 steps were skipped"):
        skip_steps(model, opt, 2)
    assert opt.state_report().failures == 5


REFUSED: dict[str, tuple[Any, str]] = {
    "SGD": (lambda: torch.optim.SGD(net().parameters(), lr=0.1), "was not saved by natgrad.NaturalGradient"),
    "Adam": (lambda: torch.optim.Adam(net().parameters()), "was not saved by natgrad.NaturalGradient"),
    "a model": (net, "was not saved by natgrad.NaturalGradient"),
    "other groups": (lambda: ng.NaturalGradient(m := net(), ng.fisher(m, CE), params=[m[0].weight]), "param"),
    "other shapes": (lambda: ng.NaturalGradient(m := mlp(3, 4, 4, 3), ng.fisher(m, CE)), "param"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_foreign_state_dict_is_refused_and_nothing_changes(kind: str) -> None:
    source, words = REFUSED[kind]
    opt = run_build("momentum", 2)[1]
    before = snapshot(opt)
    with pytest.raises(ValueError, match=words):
        opt.load_state_dict(source().state_dict())
    with pytest.raises(ValueError, match=r"state_dict .*was not saved by natgrad.NaturalGradient"):
        opt.load_state_dict({})
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("structure", [None, ng.Dense(0.5), ng.Kronecker(0.5), ng.AdaptiveInverse()], ids=repr)
def test_a_model_of_another_order_gets_its_own_numbers_or_none(structure: Any) -> None:
    def build(*names: str) -> tuple[nn.Module, Any]:
        layers = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 3)}
        model = Assembled(lambda m, x: m.last(m.first(x).tanh()), **{name: layers[name] for name in names})
        metric = ng.fisher(model, CE)
        return model, ng.NaturalGradient(model, metric, structure=structure, solver=ng.CG(rtol=1e-12), warm_start=0.5)

    (model, opt), (twin, other) = build("first", "last"), build("last", "first")
    train_numbered(model.double(), opt, range(2))
    twin.double().load_state_dict(model.state_dict())
    if structure is not None:
        with pytest.raises(ValueError, match="in an order in which"):
            other.load_state_dict(opt.state_dict())
        return
    other.load_state_dict(opt.state_dict())
    for each, optimizer in ((model, opt), (twin, other)):
        train_numbered(each, optimizer, range(2, 4))
    found, expected = twin.state_dict(), model.state_dict()
    for name, parameter in found.items():
        assert_close(parameter, expected[name], 1e-8)


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("saves_frozen", [False, True])
def test_statistics_of_all_parameters_are_not_those_of_some(frozen: int, saves_frozen: bool) -> None:
    def build(freezes: bool) -> Any:
        (model := net())[frozen].requires_grad_(not freezes)
        metric, params = ng.fisher(model, CE), list(model.parameters())
        opt = ng.NaturalGradient(model, metric, params=params, structure=ng.Dense(0.5))
        train_numbered(model, opt, range(2))
        return opt

    saved = build(saves_frozen).state_dict()
    with pytest.raises(ValueError, match=r"in an order in which .* freeze those that were frozen there"):
        build(not saves_frozen).load_state_dict(saved)


# nested values as a text and tensors: what comes back is what went in, to the bit and to the type


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
TREE: dict[str, Any] = {
    "numbers": [1, 0.1, -0.0, math.inf, 5e-324, 2**70, True, None],
    "words": ("a.b", "", 'quo"te'),
    "nested": {"empty": {}, 3: [], "pair": ((), [{"deep": torch.arange(6).reshape(2, 3)}])},
    "tensors": {str(dtype): torch.tensor([[0, 1], [1, 1]], dtype=dtype) for dtype in DTYPES},
    "scalars": [torch.tensor(2.5, dtype=dtype) for dtype in DTYPES],
    "none of it": [torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)],
    "strided": torch.arange(12.0).reshape(3, 4).T[1:, ::2],
}


def types(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: types(value) for key, value in tree.items()}
    return [type(tree), *map(types, tree)] if isinstance(tree, (list, tuple)) else type(tree)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tree_comes_back_from_tensors_beside_the_text_and_from_within_it(device: str):
    packed = pack_tree(TREE, torch.device(device))
    assert (len(packed) > 2) == (device == "cpu")
    for form in (packed, list(packed), (*packed, torch.ones(3))):  # torch makes lists of tuples, and may append
        found = unpack_tree(form)
        assert same(found, TREE)
        assert types(found) == types(TREE)
        assert found["strided"].shape == TREE["strided"].shape
        assert math.copysign(1, found["numbers"][2]) == -1


@pytest.mark.parametrize("lost", ["a tensor", "the text", "a part of the text"])
def test_what_was_lost_is_an_error(lost: str):
    packed = pack_tree(TREE, torch.device("cpu"))
    cut = {"a tensor": packed[:-1], "the text": packed[1:], "a part of the text": (packed[0][:-9], *packed[1:])}[lost]
    with pytest.raises(ValueError, match="packed state in state_dict cannot be read"):
        unpack_tree(cut)
    json.loads(packed[0])


@pytest.mark.parametrize(("given", "expected"), [({}, math.inf), ({"max_kl": 10.0}, 10.0), ({"max_kl": 0.1}, 0.1)])
def test_a_bound_that_nobody_set_is_none_where_it_once_was_ten_nats(given: dict[str, float], expected: float):
    state = ng.kfac(net(), CE, **given).state_dict()
    for group in state["param_groups"]:
        group["max_kl"] = min(group["max_kl"], 10.0)  # as older checkpoints have it
    opt = ng.kfac(net(), CE, **given)
    opt.load_state_dict(state)
    assert [group["max_kl"] for group in opt.param_groups] == [expected]
