"""Two processes, one model: equal parameters on both, and those of one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import kept_of
from models import assert_close, build_seeded, draw
from optim_models import CE, flat, net, train_batches
from process_ranks import run_ranks
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)

EXACT = ng.ExactLabels()
X, Y = draw(12, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 0, 2])
PARTS = {0: slice(0, 6), 1: slice(6, 12)}
FREE: dict[str, Any] = {"estimate": EXACT, "lr": 0.3}


def wrap_model(model: nn.Module, **options: Any) -> nn.Module:
    """As users train on several processes; the same model where there is one."""
    return DistributedDataParallel(model, **options) if distributed.is_initialized() else model


def own(parts: dict[int, slice]) -> slice:
    """This process's examples; all where there is one."""
    return parts[distributed.get_rank()] if distributed.is_initialized() else slice(None)


def train(opt: Any, model: nn.Module, steps: int = 4) -> None:
    train_batches(opt, model, [(X[own(PARTS)], Y[own(PARTS)])] * steps)


def inner() -> dict[str, Any]:
    """The optimizer is built on what is wrapped."""
    model = net()
    opt = ng.kfac(model, CE, **FREE)
    train(opt, wrap_model(model))
    return {"flat": flat(model)}


def within() -> dict[str, Any]:
    """The optimizer is built on a part of what was wrapped before: the wrapped model does more with its outputs."""
    model = net()
    outer = wrap_model(nn.Sequential(model, nn.Identity()))
    opt = ng.kfac(model, CE, **FREE)
    train(opt, outer)
    return {"flat": flat(model)}


def give_group() -> dict[str, Any]:
    """A group, and gradients that the loop averages itself."""
    model = net()
    group = distributed.group.WORLD if distributed.is_initialized() else None
    opt = ng.kfac(model, CE, group=group, **FREE)
    for _ in range(4):
        opt.zero_grad()
        opt.loss(model(X[own(PARTS)]), Y[own(PARTS)]).backward()
        for p in model.parameters() if group is not None else ():
            distributed.all_reduce(p.grad)
            p.grad /= 2
        opt.step()
    return {"flat": flat(model)}


def stranger(rank: int) -> dict[str, Any]:
    """A model of this process alone, for a number of steps of its own; a second one is in a group of one."""
    model = nn.Sequential(nn.Linear(3, 4 + rank), nn.Tanh(), nn.Linear(4 + rank, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1 + rank, p.numel()).view_as(p))
    opt = ng.kfac(model, CE, lr=0.3, momentum=0.5)
    for _ in range(3 + 2 * rank):
        opt.zero_grad()
        opt.loss(model(X * (1 + rank)), Y).backward()
        opt.step()
    return {"flat": flat(model), "kl": opt.state_report().kl}


def strangers() -> dict[str, Any]:
    return stranger(distributed.get_rank())


def uneven() -> dict[str, Any]:
    """`join`, for processes that run out of examples at different times."""
    outer = wrap_model(net())
    opt, words = ng.kfac(outer, CE, **FREE), ""
    try:
        with outer.join():
            train(opt, outer, steps=2 + distributed.get_rank())
    except ValueError as error:
        words = str(error)
    with outer.join(enable=False):
        train(opt, outer, steps=2)
    return {"flat": flat(outer), "words": words}


def forget_to_average() -> dict[str, Any]:
    model, words = net(), ""
    before = flat(model)
    try:
        train(ng.kfac(model, CE, group=distributed.group.WORLD, **FREE), model)
    except ValueError as error:
        words = str(error)
    return {"words": words, "stayed": torch.equal(before, flat(model))}


def different() -> dict[str, Any]:
    """Models of other shapes, and of other values, in one group."""
    words, stayed = [], True
    for change in (lambda m: m.append(nn.Linear(3, 3).double()), lambda m: m[0].bias.data.add_(1e-12)):
        model = net()
        if distributed.get_rank() == 1:
            change(model)
        before = flat(model)
        try:
            train(ng.kfac(model, CE, group=distributed.group.WORLD, **FREE), model)
        except ValueError as error:
            words.append(str(error))
        stayed &= torch.equal(before, flat(model))
    return {"words": words, "stayed": stayed}


class Shy(nn.Module):
    """(b, 3) -> three logits; the second layer is used if wanted, the last one behind its back too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h + self.second(h) if self.use else h
        return self.last(h) * self.last.weight.sum()


def partly() -> dict[str, Any]:
    """The first process does not use a layer: the others' statistics are all there are."""
    model = build_seeded(Shy)
    outer = wrap_model(model, find_unused_parameters=True)
    opt = ng.kfac(outer, CE, **FREE)
    for step in range(4):
        model.use = not (distributed.is_initialized() and distributed.get_rank() == 0 and step < 2)
        train(opt, outer, steps=1)
    return {"flat": flat(model), "kinds": [row.structure for row in opt.report()]}


class Table(nn.Module):
    """(b, 3) -> three logits, and rows of a bare table by the first input's sign, if wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3))
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return found + nn.functional.embedding((x[:, 0] > 0).long(), self.table) if self.use else found


def looked_up() -> dict[str, Any]:
    """The first process does not look rows up at first: the others' statistics of the table are all there are."""
    model = build_seeded(Table)
    outer = wrap_model(model, find_unused_parameters=True)
    opt = ng.kfac(outer, CE, **FREE)
    for step in range(4):
        model.use = not (distributed.is_initialized() and distributed.get_rank() == 0 and step < 2)
        train(opt, outer, steps=1)
    left = kept_of(opt, model.table)["totals"]["left"]
    return {"flat": flat(model), "left": left}


def sample_labels() -> dict[str, Any]:
    """Labels differ between processes; a checkpoint of one resumes all."""
    model = net()
    outer = wrap_model(model)
    opt = ng.kfac(outer, CE, lr=0.1)
    labels: list[Tensor] = []
    draw_labels = opt._flow.reader._cotangents
    opt._flow.reader._cotangents = lambda *a: labels.extend(found := draw_labels(*a)) or found
    x, y = X[:6], Y[:6]  # the same on all

    def go(opt: Any, outer: nn.Module) -> None:
        for _ in range(2):
            opt.zero_grad()
            opt.loss(outer(x), y).backward()
            opt.step()

    go(opt, outer)
    states = [{"opt": opt.state_dict(), "model": copy.deepcopy(model.state_dict())}]
    states = copy.deepcopy(states)
    if distributed.is_initialized():
        distributed.broadcast_object_list(states)
    twin = net()
    twin.load_state_dict(states[0]["model"])
    outer_twin = wrap_model(twin)
    other = ng.kfac(outer_twin, CE, lr=0.1)
    other.load_state_dict(states[0]["opt"])
    go(opt, outer)
    go(other, outer_twin)
    return {"flat": flat(model), "labels": labels[0], "resumed": torch.equal(flat(model), flat(twin))}


def refuse_structures() -> dict[str, Any]:
    words = []
    for build in (
        lambda: ng.StructuredNaturalGradient(wrap_model(net()), CE, Odd()),
        lambda: ng.kfac(wrap_model(net(), static_graph=True), CE),
    ):
        try:
            build()
        except (TypeError, ValueError) as error:
            words.append(str(error))
    return {"words": words}


class Odd(ng.Diagonal):
    """A structure that does not say that its statistics are sums."""

    sums = False


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "inner": inner,
    "within": within,
    "given": give_group,
    "partly": partly,
    "looked up": looked_up,
    "sampled": sample_labels,
    "refused": refuse_structures,
    "strangers": strangers,
    "uneven": uneven,
    "unaveraged": forget_to_average,
    "different": different,
}
TOGETHER = ["inner", "within", "given"]
APART = {"refused", "strangers", "unaveraged", "different"}  # no two processes train one model there


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 2, tmp_path_factory)


@pytest.mark.parametrize("scene", [name for name in SCENES if name not in APART])
def test_parameters_are_equal_bit_for_bit(both: list[dict[str, Any]], scene: str):
    assert torch.equal(both[0][scene]["flat"], both[1][scene]["flat"])


@pytest.mark.parametrize("scene", TOGETHER)
def test_two_processes_train_as_one_on_the_joined_batch(both: list[dict[str, Any]], scene: str):
    alone = SCENES[scene]()
    assert_close(both[0][scene]["flat"], alone["flat"], 1e-9)


def test_a_layer_that_one_process_does_not_use_is_trained_on_both(both: list[dict[str, Any]]):
    assert both[0]["partly"]["kinds"] == both[1]["partly"]["kinds"] == ["Kronecker"] * 4 + ["Diagonal"] * 2


def test_a_table_that_one_process_does_not_look_up_keeps_its_frequencies(both: list[dict[str, Any]]):
    assert all(rank["looked up"]["left"].shape == (5,) for rank in both)


def test_labels_differ_and_one_checkpoint_resumes_both(both: list[dict[str, Any]]):
    assert not torch.equal(both[0]["sampled"]["labels"], both[1]["sampled"]["labels"])
    assert both[0]["sampled"]["resumed"]
    assert both[1]["sampled"]["resumed"]


def test_what_cannot_be_shared_is_refused(both: list[dict[str, Any]]):
    adding, static = both[0]["refused"]["words"]
    assert "2 processes" in adding
    assert "static_graph" in static
    assert not refuse_structures()["words"]  # alone, all is well


def test_models_of_one_process_each_are_trained_alone(both: list[dict[str, Any]]):
    for rank in range(2):
        found, alone = both[rank]["strangers"], stranger(rank)
        assert torch.equal(found["flat"], alone["flat"])
        assert found["kl"] == alone["kl"]


def test_join_is_refused_before_a_statistic_waits_for_ever(both: list[dict[str, Any]]):
    for rank in both:
        assert "join()" in rank["uneven"]["words"]
        assert "as many batches" in rank["uneven"]["words"]


def test_gradients_that_nobody_averages_are_refused(both: list[dict[str, Any]]):
    for rank in both:
        assert "different gradients" in rank["unaveraged"]["words"]
        assert rank["unaveraged"]["stayed"]


def test_different_models_in_one_group_are_refused_on_all_processes(both: list[dict[str, Any]]):
    for rank in both:
        shapes, values = rank["different"]["words"]
        assert "'3.weight' is missing on rank 0 and (3, 3) of torch.float64 on rank 1" in shapes
        assert "other values on rank 1" in values
        assert rank["different"]["stayed"]
