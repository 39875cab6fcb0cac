"""Taps inside compiled graphs: what they read, how often the model is compiled and called, what they touch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_state import change_state, kept_of, record_readings
from models import CASES, Case, assert_close, build_seeded
from optim_models import CE, X, Y, dropout_net, flat, flat_gradient, net
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import natgrad as ng
from natgrad.optim.reading import Reading

# torch's own tracing of any autograd function makes an instance of the base class, which warns
# and reads .grad of the inputs of a compiled part
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
EXACT = ng.ExactLabels()
KINDS = ["sequence", "odd convolutions", "in-place rectifier", "checkpointed"]
KINDS += ["twice used", "batch norm, training"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_quickly(model: nn.Module, backend: Any = "aot_eager") -> Any:
    """Traced and differentiated ahead of time, without the slow last part of the compiler."""
    return torch.compile(model, backend=backend, fullgraph=True)


def iterate(opt: Any, model: Any, x: Any = X, y: Any = Y) -> Tensor:
    opt.zero_grad()
    loss = opt.loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def reading(opt: Any, model: Any, inputs: Any, targets: Any) -> Reading:
    """What the optimizer reads in one pass."""
    found: list[Reading] = []
    record_readings(opt, found)
    opt.loss(model(inputs), targets)
    return found[0]


@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_model_is_read_as_the_plain_one(name: str):
    case: Case = CASES[name]
    inputs = case.inputs.detach()
    plain, model = case.make()[0], case.make()[0]
    targets = plain(inputs).argmax(-1)
    criterion = ng.Categorical()
    expected = reading(ng.kfac(plain, criterion, estimate=EXACT), plain, inputs, targets)
    found = reading(ng.kfac(model, criterion, estimate=EXACT), compile_quickly(model), inputs, targets)
    assert {one.key for one in found.layers} == {one.key for one in expected.layers}
    by_key = {one.key: one for one in found.layers}
    for one in expected.layers:
        assert_close(by_key[one.key].gradient(), one.gradient(), 1e-12, scale=1.0)
    for key, squares in expected.squares.items():
        assert_close(found.squares[key], squares, 1e-12)


# how the model is compiled


class Deep(nn.Module):
    """(b, 3) -> three logits, with a compiled part in the middle if wanted."""

    def __init__(self, inner: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.inner = inner(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def whole(model: nn.Module) -> tuple[Any, Any]:
    return (outer := compile_quickly(model)), outer


def raw(model: nn.Module) -> tuple[Any, Any]:
    return model, compile_quickly(model)


def in_place(model: nn.Module) -> tuple[Any, Any]:
    model.compile(backend="aot_eager", fullgraph=True)
    return model, model


WAYS = {"the optimizer gets the compiled model": whole, "the optimizer gets the plain model": raw, "in place": in_place}


@pytest.mark.parametrize("way", WAYS)
def test_training_does_not_depend_on_how_the_model_is_compiled(way: str):
    plain, model = net(), net()
    given, called = WAYS[way](model)
    opt, other = ng.kfac(given, CE, lr=0.1, estimate=EXACT), ng.kfac(plain, CE, lr=0.1, estimate=EXACT)
    for _ in range(3):
        iterate(opt, called)
        iterate(other, plain)
    assert_close(flat(model), flat(plain), 1e-12)
    assert {row.structure for row in opt.report()} == {"Kronecker"}
    assert opt.state_report().failures == 0


def test_a_compiled_part_of_a_plain_model_is_read_too():
    plain, model = build_seeded(lambda: Deep(lambda part: part)), build_seeded(lambda: Deep(compile_quickly))
    for one in (plain, model):
        opt = ng.kfac(one, CE, estimate=EXACT)
        iterate(opt, one)
        assert {row.structure for row in opt.report()} == {"Kronecker"}
    assert_close(flat(model), flat(plain), 1e-12)


def test_two_graphs_for_all_steps():
    counter = CompileCounterWithBackend("aot_eager")
    model = dropout_net()
    opt = ng.kfac(model, CE, lr=0.01, update_every=3)
    called, states = compile_quickly(model, counter), set()
    for _ in range(30):
        states.add(opt._reader.taps.armed)
        iterate(opt, called)
    assert states == {True, False}
    assert counter.frame_count == 2


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
    assert opt._reader.taps.recorder.records is None
    norm = CASES["batch norm, training"].make()[0]
    ng.kfac(norm, CE).loss(compile_quickly(norm)(X), Y % 2)
    assert norm[1].num_batches_tracked == 1


def test_taps_keep_no_gradient_which_a_later_compilation_would_meet():
    model = net()
    called = compile_quickly(model)
    opt = ng.kfac(model, CE)
    dummy = opt._reader.taps.recorder.dummy
    for _ in range(2):
        iterate(opt, called)
        assert dummy.grad is None
    assert dummy is opt._reader.taps.recorder.dummy


def test_an_infinite_first_batch_does_no_harm():
    model = net()
    called = compile_quickly(model)
    opt = ng.kfac(model, CE)
    iterate(opt, called, X * math.inf)
    losses = [float(iterate(opt, called)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {row.structure for row in opt.report()} == {"Kronecker"}


def test_a_graph_that_went_backward_for_another_loss_first_is_replayed():
    class Donating(nn.Module):
        """An activation between that the backward keeps, which the compiler may give away."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).exp().log()

    model, plain = build_seeded(Donating), build_seeded(Donating)
    called = compile_quickly(model)
    opt = ng.kfac(called, CE, estimate=EXACT)
    CE(called(X), Y).backward()
    iterate(opt, called)
    iterate(ng.kfac(plain, CE, estimate=EXACT), plain)
    assert_close(flat(model), flat(plain), 1e-12)


def test_a_model_that_was_compiled_before_is_replayed():
    # the compiler does not look whether hooks were added since
    model, plain = net(), net()
    called = compile_quickly(model)
    called(X)
    iterate(ng.kfac(called, CE, estimate=EXACT), called)
    iterate(ng.kfac(plain, CE, estimate=EXACT), plain)
    assert_close(flat(model), flat(plain), 1e-12)
    with pytest.raises(ValueError, match=r"torch\.compiler\.reset"):
        iterate(ng.kfac(model, CE, estimate=EXACT), called)


def test_autocast_inside_a_compiled_model():
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))).float()
    called = compile_quickly(model)
    opt = ng.kfac(model, CE)
    for _ in range(2):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = opt.loss(called(X.float()), Y)
        loss.backward()
        opt.step()
    assert {row.structure for row in opt.report()} == {"Kronecker"}
    held = [t for p in model.parameters() for t in kept_of(opt, p).get("totals", {}).values()]
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in held)


def test_a_dead_optimizer_leaves_the_compiled_model_alone():
    model = net()
    called = compile_quickly(model)
    opt = ng.kfac(model, CE)
    iterate(opt, called)
    opt.detach()
    assert not opt._reader.taps.armed
    assert_close(called(X).detach(), model(X).detach(), 1e-12)
