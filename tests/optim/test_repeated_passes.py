"""A pass that is done again gives what the user's gave, or is refused; a step leaves the model as that pass did."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import Assembled, assert_close, build_seeded, cross, draw, pair
from optim_models import LOOKING, Closure, flat, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.optim.passes import is_same

X, Y = draw(12, 4), torch.arange(12) % 3
CE = nn.CrossEntropyLoss()
ELSEWHERE = random.Random(0)
COUNT = itertools.count()
LEGACY: Any = np.random  # the global source


class Box:
    """An object of the user's."""

    def __init__(self) -> None:
        self.level, self.generator = 1.0, random.Random(0)


class Net(nn.Module):
    """A network whose hidden layer is multiplied by what one of several sources gives at each pass."""

    def __init__(self, source: str, record: Callable[[float], None]) -> None:
        super().__init__()
        self.first, self.last, self.source, self.record = nn.Linear(4, 5), nn.Linear(5, 3), source, record
        self.calls, self.hidden, self.pair, self.past = 0, torch.ones(()), (torch.ones(()), torch.ones(())), [1.0]
        self.queue, self.known, self.array, self.box = deque([1.0], 3), {"level": [1.0]}, np.ones(1), Box()
        self.torch_generator, self.numpy_generator = torch.Generator(), np.random.default_rng(0)
        self.python_generator, self.several = random.Random(0), [random.Random(0), (torch.Generator(),)]
        self.register_buffer("state", torch.ones(()))
        self.state: Tensor

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.5 + float(getattr(self, self.source)())
        self.record(factor)
        return self.last(factor * self.first(x).tanh())

    # sources that can be put back

    def globally(self) -> float:
        return random.random() + LEGACY.rand() + torch.rand(()).item()

    def by_torch(self) -> float:
        return torch.rand((), generator=self.torch_generator).item()

    def by_numpy(self) -> float:
        return self.numpy_generator.random()

    def by_python(self) -> float:
        return self.python_generator.random()

    def by_several(self) -> float:
        one, (two,) = self.several  # type: ignore[misc]
        return one.random() + torch.rand((), generator=two).item()  # type: ignore[union-attr]

    def by_object(self) -> float:
        self.box.level *= 0.9
        return self.box.level + self.box.generator.random()

    def count(self) -> float:
        self.calls += 1
        return 1 / self.calls

    def replace_hidden(self) -> float:
        self.hidden = (2 * self.hidden).cos()
        return self.hidden.item()

    def write_hidden(self) -> float:
        return self.hidden.mul_(2).cos_().item()

    def replace_pair(self) -> float:
        self.pair = (self.pair[1].cos(), 2 * self.pair[0])
        return self.pair[0].item()

    def append(self) -> float:
        self.past.append(0.9 * sum(self.past) / len(self.past))
        return self.past[-1]

    def rotate(self) -> float:
        self.queue.append(0.7 * sum(self.queue))
        return self.queue[-1]

    def look_up(self) -> float:
        self.known["level"][0] *= 0.9
        return self.known["level"][0]

    def write_array(self) -> float:
        self.array *= 0.9
        return float(self.array[0])

    def replace_buffer(self) -> float:
        self.state = (2 * self.state).cos()
        return self.state.item()

    def write_buffer(self) -> float:
        return self.state.mul_(2).cos_().item()

    # sources that nobody can put back

    def draw_elsewhere(self) -> float:
        return ELSEWHERE.random()

    def count_elsewhere(self) -> float:
        return 1 / (1 + next(COUNT) % 7)


KNOWN = (
    *("globally", "by_torch", "by_numpy", "by_python", "by_several", "by_object", "count", "append", "rotate"),
    *("replace_hidden", "write_hidden", "replace_pair", "look_up", "write_array", "replace_buffer", "write_buffer"),
)
UNKNOWN = "draw_elsewhere", "count_elsewhere"


def build_fixed(factor: float) -> nn.Module:
    """The same network with a factor that is given."""
    first, last = nn.Linear(4, 5), nn.Linear(5, 3)
    return Assembled(lambda m, x: m.last(factor * m.first(x).tanh()), first=first, last=last).double()


def snapshot(value: Any) -> Any:
    """What a value holds, as plain numbers."""
    if isinstance(value, nn.Module):
        own = {k: v for k, v in vars(value).items() if k not in vars(nn.Module()) and not callable(v)}
        buffers = [b.tolist() for b in value.buffers()]
        return [snapshot(own), buffers]
    if isinstance(value, dict):
        return [(key, snapshot(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [snapshot(one) for one in value]
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return snapshot(vars(value)) if isinstance(value, Box) else value


def all_states(net: nn.Module) -> list[Any]:
    """What a network and the global generators hold."""
    return [snapshot(net), random.getstate(), snapshot(list(LEGACY.get_state())), torch.get_rng_state().tolist()]


def make(source: str) -> tuple[Net, list[float]]:
    """A network, and the factors of its passes."""
    factors = list[float]()
    net = build_seeded(lambda: Net(source, factors.append))
    assert isinstance(net, Net)
    return net, factors


REST = [name for name in LOOKING if name not in ("hessian_free", "kfac, judged")]


@pytest.mark.parametrize(("name", "source"), cross(["hessian_free"], REST, KNOWN) + pair(["kfac, judged"], KNOWN[::4]))
def test_a_step_is_that_of_the_function_that_the_users_pass_was(name: str, source: str) -> None:
    net, factors = make(source)
    opt = LOOKING[name](net, CE)
    for _ in range(3):
        start, used = flat(net), len(factors)
        opt.zero_grad()
        opt.loss(net(X), Y).backward()
        before = all_states(net)
        opt.step()
        assert all_states(net) == before
        assert len(set(factors[used:])) == 1  # every pass had the user's
        if used == 0:  # nothing is remembered yet
            assert len(factors) > 1
            twin = build_fixed(factors[0])
            torch.nn.utils.vector_to_parameters(start, twin.parameters())
            other = LOOKING[name](twin, CE)
            other.loss(twin(X), Y).backward()
            other.step()
            assert_close(flat(net), flat(twin), 1e-10)


@pytest.mark.parametrize(("name", "source"), pair(LOOKING, UNKNOWN))
def test_a_model_that_is_no_function_is_refused(name: str, source: str) -> None:
    net, _ = make(source)
    opt, before = LOOKING[name](net, CE), flat(net)
    opt.loss(net(X), Y).backward()
    with pytest.raises(ValueError, match="gave other outputs when its last pass was done again"):
        opt.step()
    assert torch.equal(flat(net), before)


@pytest.mark.parametrize("source", UNKNOWN)
def test_a_closure_that_is_no_function_is_refused(source: str) -> None:
    net, _ = make(source)
    opt = ng.NaturalGradient(net, ng.fisher(net, CE), rule=ng.LineSearch())

    closure = Closure(opt, lambda: CE(net(X), Y))

    with pytest.raises(ValueError, match=r"closure gave .* at the same parameters"):
        opt.step(closure)


@pytest.mark.parametrize("source", KNOWN)
def test_a_closure_is_called_again_from_the_same_state(source: str) -> None:
    net, factors = make(source)
    opt = ng.NaturalGradient(net, ng.fisher(net, CE), rule=ng.LineSearch())

    closure = Closure(opt, lambda: CE(net(X), Y))

    once = make(source)[0]
    state = random.getstate(), LEGACY.get_state(), torch.get_rng_state()
    once(X)
    expected = snapshot(once)
    random.setstate(state[0])
    LEGACY.set_state(state[1])
    torch.set_rng_state(state[2])
    opt.step(closure)
    assert snapshot(net) == expected
    assert len(set(factors)) == 1


def test_a_bound_that_cannot_be_measured_says_so() -> None:
    net, _ = make("draw_elsewhere")
    opt = ng.kfac(net, CE, max_kl=1e-4)
    with pytest.warns(UserWarning, match="measured on averages"):
        train(opt, net, 5, X, Y)


def test_other_optimizers_may_move_the_parameters_in_between(recwarn: pytest.WarningsRecorder) -> None:
    net, _ = make("count")
    one, two = (ng.hessian_free(net, CE, params=list(part.parameters())) for part in (net.first, net.last))
    one.loss(net(X), Y).backward()
    two.loss(net(X), Y).backward()
    one.step()
    two.step()
    assert not recwarn.list


@pytest.mark.parametrize("source", KNOWN)
def test_a_metric_leaves_the_model_as_it_was(source: str) -> None:
    net, factors = make(source)
    before = all_states(net)
    first = ng.fisher(net, CE).at(ng.trainable(net), X).dense()
    second = ng.gauss_newton(net, CE).at(ng.trainable(net), (X, Y)).dense()
    assert all_states(net) == before
    assert len(set(factors)) == 1
    assert_close(second, first, 1e-12)


@pytest.mark.parametrize(("rows", "same"), [(1, True), (40, False)])
def test_round_off_may_be_large_in_single_rows(rows: int, same: bool) -> None:
    outputs = draw(40, 3).half()
    again = outputs.float()
    again[:rows] *= 1.05  # of a precision of .001, whose root is .03
    assert is_same(outputs, again, 0.0) == same
