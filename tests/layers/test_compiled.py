"""Taps inside compiled graphs: what they read, how often the model is compiled and called, what they touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_state import change_state, readings
from models import CASES, Assembled, Case, assert_close, build_seeded
from optim_models import CE, X, Y, dropout_net, flat, flat_gradient, iterate, net, train
from torch import nn

import natgrad as ng

# torch's own tracing of any autograd function makes an instance of the base class, which warns
# and reads .grad of the inputs of a compiled part
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
EXACT = ng.ExactLabels()
KINDS = ["odd convolutions", "checkpointed", "twice used", "batch norm, training"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_quickly(model: nn.Module, backend: Any = "aot_eager", dynamic: bool | None = None) -> Any:
    """Traced and differentiated ahead of time, without the slow last part of the compiler."""
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_model_is_read_as_the_plain_one(name: str):
    case: Case = CASES[name]
    inputs = case.inputs.detach()
    plain, model = case.make()[0], case.make()[0]
    targets = plain(inputs).argmax(-1)
    criterion = ng.Categorical()
    expected = readings(ng.kfac(plain, criterion, estimate=EXACT), plain, inputs, targets)
    found = readings(ng.kfac(model, criterion, estimate=EXACT), compile_quickly(model), inputs, targets)
    assert {one.key for one in found.layers} == {one.key for one in expected.layers}
    by_key = {one.key: one for one in found.layers}
    for one in expected.layers:
        assert_close(by_key[one.key].gradient(), one.gradient(), 1e-12, scale=1.0)
    for key, squares in expected.squares.items():
        assert_close(found.squares[key], squares, 1e-12)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_a_loss_behind_a_graph_that_hides_the_pass_says_what_to_give(recipe: Any):
    """The inputs that a trial loss needs, or the outputs that a loss is computed on."""
    model = net()
    called = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match="give the optimizer the compiled model"):
        iterate(recipe(model, CE, rule=ng.LineSearch()), lambda x: called(x) / 2)


# how the model is compiled


def compile_outside(model: nn.Module) -> tuple[Any, Any]:
    return (outer := compile_quickly(model)), outer


def compile_in_place(model: nn.Module) -> tuple[Any, Any]:
    model.compile(backend="aot_eager", fullgraph=True)
    return model, model


WAYS = {
    "the optimizer gets the compiled model": compile_outside,
    "the optimizer gets the plain model": lambda model: (model, compile_quickly(model)),
    "in place": compile_in_place,
}


@pytest.mark.parametrize("way", WAYS)
def test_training_does_not_depend_on_how_the_model_is_compiled(way: str):
    plain, model = net(), net()
    given, called = WAYS[way](model)
    opt, other = ng.kfac(given, CE, lr=0.1, estimate=EXACT), ng.kfac(plain, CE, lr=0.1, estimate=EXACT)
    train(opt, called, 3)
    train(other, plain, 3)
    assert_close(flat(model), flat(plain), 1e-12)
    assert {row.structure for row in opt.report()} == {"Kronecker"}
    assert opt.state_report().failures == 0


# contracts


def test_one_forward_and_nobody_s_gradients():
    model, twin = dropout_net(), dropout_net()
    called, passes, seen = compile_quickly(model), [], []
    opt = ng.kfac(called, CE)
    called.register_forward_hook(lambda *_: passes.append(1))
    for p in model.parameters():
        p.register_hook(lambda _: seen.append(1))
    torch.manual_seed(5)
    CE(twin(X), Y).backward()
    opt.loss(called(X), Y)  # the first reading compares gradients: hooks on parameters run
    change_state(opt, "outside", updates=1)  # so do all readings of the first update
    seen.clear()
    torch.manual_seed(5)
    passes.clear()
    loss = opt.loss(called(X), Y)
    assert (len(passes), seen) == (1, [])
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert torch.equal(flat_gradient(model), flat_gradient(twin))
    assert opt._flow.reader.taps.recorder.records is None
    norm = CASES["batch norm, training"].make()[0]
    ng.kfac(norm, CE).loss(compile_quickly(norm)(X), Y % 2)
    assert norm[1].num_batches_tracked == 1


def test_a_graph_that_went_backward_for_another_loss_first_is_replayed():
    def build_donating() -> nn.Module:
        """An activation between that the backward keeps, which the compiler may give away."""
        return Assembled(
            lambda m, x: m.net(x).exp().log(), net=nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3))
        )

    model, plain = build_seeded(build_donating), build_seeded(build_donating)
    called = compile_quickly(model)
    opt = ng.kfac(called, CE, estimate=EXACT)
    CE(called(X), Y).backward()
    iterate(opt, called)
    iterate(ng.kfac(plain, CE, estimate=EXACT), plain)
    assert_close(flat(model), flat(plain), 1e-12)


def test_code_for_many_sizes_trains_as_the_plain_model_and_leaves_out_a_bad_batch():
    """Its backward is made before it is known that two will run, which torch refuses."""
    plain, model = net(), net()
    called = compile_quickly(model, dynamic=True)
    runs = [(ng.kfac(called, CE, estimate=EXACT), called), (ng.kfac(plain, CE, estimate=EXACT), plain)]
    for rows in (len(X), len(X) - 1, len(X), len(X) - 2):
        for opt, network in runs:
            iterate(opt, network, X[:rows], Y[:rows])
            iterate(opt, network, X * torch.nan, Y)
    assert_close(flat(model), flat(plain), 1e-12)
    assert [opt.state_report().failures for opt, _ in runs] == [4, 4]


def test_code_for_many_sizes_that_the_optimizer_does_not_know_is_told():
    model = net()
    opt, called = ng.kfac(model, CE), compile_quickly(model)
    iterate(opt, called)
    before = flat(model)
    with pytest.raises(ValueError, match="Give the optimizer the compiled model"):
        iterate(opt, called, X[:-1], Y[:-1])  # the compiler takes the second size for one of many
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_code_that_was_compiled_for_another_model_of_the_same_layers_is_told(recipe: Any):
    """The compiler goes on with what it made when nobody listened."""
    other, model = net(), net()
    CE(torch.compile(other, backend="eager")(X), Y).backward()
    opt = recipe(model, CE)
    with pytest.raises(ValueError, match=r"call torch\.compiler\.reset\(\) once"):
        iterate(opt, torch.compile(model, backend="eager"), X, Y)
    torch.compiler.reset()
    before = flat(model)
    iterate(opt, torch.compile(model, backend="eager"), X, Y)
    assert not torch.equal(flat(model), before)
