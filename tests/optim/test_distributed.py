"""Two processes, one model: equal parameters on both, and those of one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import kept_of
from models import Assembled, build_seeded, draw
from optim_models import CE, flat, net, train_batches
from process_ranks import (
    assert_joined,
    catch,
    count_ranks,
    flat_whole,
    needs_gloo,
    own_rank,
    run_ranks,
    take_part,
    wrap_model,
)
from torch import Tensor, distributed, nn

import natgrad as ng

pytestmark = needs_gloo

X, Y = draw(12, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 0, 2])
EXACT: dict[str, Any] = {"estimate": ng.ExactLabels(), "lr": 0.3}
EVEN = (6, 6)
LATE = torch.where(torch.arange(12) < 4, -100, Y)


def train(opt: Any, model: nn.Module, steps: int = 4) -> None:
    train_batches(opt, model, [(X[take_part(EVEN)], Y[take_part(EVEN)])] * steps)


def build_inside() -> dict[str, Any]:
    """The optimizer is built on what is wrapped."""
    model = net()
    train(ng.kfac(model, CE, **EXACT), wrap_model(model))
    return {"flat": flat(model)}


def build_within() -> dict[str, Any]:
    """The optimizer is built on a part of what was wrapped before: the wrapped model does more with its outputs."""
    model = net()
    outer = wrap_model(nn.Sequential(model, nn.Identity()))
    train(ng.kfac(model, CE, **EXACT), outer)
    return {"flat": flat(model)}


def give_group() -> dict[str, Any]:
    """A group, and gradients that the loop averages itself."""
    model = net()
    group = distributed.group.WORLD if count_ranks() > 1 else None
    opt = ng.kfac(model, CE, group=group, **EXACT)
    for _ in range(4):
        opt.zero_grad()
        opt.loss(model(X[take_part(EVEN)]), Y[take_part(EVEN)]).backward()
        for p in model.parameters() if group is not None else ():
            distributed.all_reduce(p.grad)
            p.grad /= 2
        opt.step()
    return {"flat": flat(model)}


def shard_model(model: nn.Module) -> nn.Module:
    """A model in parts; as it is where there is one process."""
    if count_ranks() > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model


def train_parts(
    criterion: Any, targets: list[Tensor], sizes: tuple[int, int], wrap: Any = wrap_model, rule: Any = None
) -> dict[str, Any]:
    """A step on each batch of targets, of which the processes have parts of these sizes."""
    model = net()
    outer, own = wrap(model), take_part(sizes)
    opt = ng.kfac(outer, criterion, rule=rule, **EXACT)
    train_batches(opt, outer, [(X[own], y[own]) for y in targets])
    return {"flat": flat_whole(model), "failures": opt.state_report().failures}


def wrap_unused(model: nn.Module) -> nn.Module:
    return wrap_model(model, find_unused_parameters=True)


def resume_head_by_turns() -> dict[str, Any]:
    """A state is loaded before the first pass of a model in parts, and one of the heads is not used from then on."""

    def assemble() -> nn.Module:
        heads = {name: nn.Linear(4, 3) for name in ("first", "second")}
        return Assembled(lambda m, x: getattr(m, m.head)(m.body(x).tanh()), body=nn.Linear(3, 4), head="first", **heads)

    def build() -> tuple[nn.Module, Any]:
        model = shard_model(build_seeded(assemble))
        return model, ng.kfac(model, CE, share="speed", **EXACT)

    model, opt = build()
    train(opt, model, steps=1)
    model.head = "second"
    train(opt, model, steps=1)
    (twin, other), known = build(), model.state_dict()
    twin.load_state_dict(known)
    other.load_state_dict(opt.state_dict())
    train(other, twin, steps=1)
    return {"flat": flat_whole(twin)}


def train_stranger(rank: int) -> dict[str, Any]:
    """A model of this process alone, for a number of steps of its own."""
    model = nn.Sequential(nn.Linear(3, 4 + rank), nn.Tanh(), nn.Linear(4 + rank, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1 + rank, p.numel()).view_as(p))
    opt = ng.kfac(model, CE, lr=0.3, momentum=0.5)
    train_batches(opt, model, [(X * (1 + rank), Y)] * (3 + 2 * rank))
    return {"flat": flat(model), "kl": opt.state_report().kl}


def join_uneven() -> dict[str, Any]:
    """`join`, for processes that run out of examples at different times."""
    outer = wrap_model(net())
    opt = ng.kfac(outer, CE, **EXACT)

    def join() -> None:
        with outer.join():
            train(opt, outer, steps=2 + own_rank())

    words = catch(ValueError, join)
    with outer.join(enable=False):
        train(opt, outer, steps=2)
    return {"flat": flat(outer), "words": words}


def forget_to_average() -> dict[str, Any]:
    model = net()
    before, opt = flat(model), ng.kfac(model, CE, group=distributed.group.WORLD, **EXACT)
    words = catch(ValueError, lambda: train(opt, model))
    return {"words": words, "stayed": torch.equal(before, flat(model))}


def train_different_models() -> dict[str, Any]:
    """Models of other shapes, and of other values, in one group."""
    words, stayed = [], True
    for change in (lambda m: m.append(nn.Linear(3, 3).double()), lambda m: m[0].bias.data.add_(1e-12)):
        model = net()
        if own_rank() == 1:
            change(model)
        before = flat(model)
        build = lambda m=model: ng.kfac(m, CE, group=distributed.group.WORLD, **EXACT)  # noqa: E731
        words.append(catch(ValueError, lambda m=model, build=build: train(build(), m)))
        stayed &= torch.equal(before, flat(model))
    return {"words": words, "stayed": stayed}


class Partly(nn.Module):
    """(b, 3) -> three logits; a layer and rows of a bare table are used if wanted, the last layer behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.table, self.use = nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3)), True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.use:
            h = h + self.second(h) + nn.functional.embedding((x[:, 0] > 0).long(), self.table)
        return self.last(h) * self.last.weight.sum()


def use_parts_late() -> dict[str, Any]:
    """The first process does not use a layer and a table at first: the others' statistics are all there are."""
    model = build_seeded(Partly)
    outer = wrap_model(model, find_unused_parameters=True)
    opt = ng.kfac(outer, CE, **EXACT)
    for step in range(4):
        model.use = not (count_ranks() > 1 and own_rank() == 0 and step < 2)
        train(opt, outer, steps=1)
    kinds = [row.structure for row in opt.report()]
    return {"flat": flat(model), "kinds": kinds, "left": kept_of(opt, model.table)["totals"]["left"]}


def sample_labels() -> dict[str, Any]:
    """Labels differ between processes; a checkpoint of one resumes all."""
    model = net()
    outer = wrap_model(model)
    opt = ng.kfac(outer, CE, lr=0.1)
    labels: list[Tensor] = []
    draw_labels = opt._flow.reader._cotangents
    opt._flow.reader._cotangents = lambda *a: labels.extend(found := draw_labels(*a)) or found
    same = [(X[:6], Y[:6])] * 2  # on all
    train_batches(opt, outer, same)
    states = copy.deepcopy([{"opt": opt.state_dict(), "model": model.state_dict()}])
    distributed.broadcast_object_list(states)
    twin = net()
    twin.load_state_dict(states[0]["model"])
    outer_twin = wrap_model(twin)
    other = ng.kfac(outer_twin, CE, lr=0.1)
    other.load_state_dict(states[0]["opt"])
    train_batches(opt, outer, same)
    train_batches(other, outer_twin, same)
    return {"flat": flat(model), "labels": labels[0], "resumed": torch.equal(flat(model), flat(twin))}


class Odd(ng.Diagonal):
    """A structure that does not say that its statistics are sums."""

    sums = False


def refuse_structures() -> list[str]:
    builds = (
        lambda: ng.StructuredNaturalGradient(wrap_model(net()), CE, Odd()),
        lambda: ng.kfac(wrap_model(net(), **({"static_graph": True} if count_ranks() > 1 else {})), CE),
    )
    return [catch((TypeError, ValueError), build) for build in builds]


TOGETHER: dict[str, Callable[[], dict[str, Any]]] = {
    "inside": build_inside,
    "within": build_within,
    "a group": give_group,
    "an empty part": lambda: train_parts(ng.Gaussian(), [20 * X, 20 * X], (12, 0)),
    "unused parameters": lambda: train_parts(nn.MSELoss(), [20 * X, 20 * X], EVEN, wrap_unused),
    "masked in one part": lambda: train_parts(ng.Masked(ng.Categorical()), [LATE, LATE], (4, 8)),
    "no target at first": lambda: train_parts(CE, [torch.full_like(Y, -100), Y], EVEN),
    "no target, no rows": lambda: train_parts(CE, [Y, torch.full_like(Y, -100), Y], (12, 0), shard_model),
    "inputs alone": lambda: train_parts(CE, [Y, Y, LATE, LATE], (4, 8), rule="spectral"),
    "resumed in parts": resume_head_by_turns,
}
SCENES: dict[str, Callable[[], Any]] = TOGETHER | {
    "partly": use_parts_late,
    "sampled": sample_labels,
    "refused": refuse_structures,
    "strangers": lambda: train_stranger(own_rank()),
    "uneven": join_uneven,
    "unaveraged": forget_to_average,
    "different": train_different_models,
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 2, tmp_path_factory)


@pytest.mark.parametrize("scene", TOGETHER)
def test_two_processes_train_as_one_on_the_joined_batch(both: list[dict[str, Any]], scene: str):
    assert_joined([rank[scene] for rank in both], SCENES[scene]())


@pytest.mark.parametrize("scene", ["partly", "sampled", "uneven"])
def test_parameters_are_equal_bit_for_bit(both: list[dict[str, Any]], scene: str):
    assert torch.equal(both[0][scene]["flat"], both[1][scene]["flat"])


def test_what_one_process_does_not_use_is_trained_on_both(both: list[dict[str, Any]]):
    for rank in both:
        assert rank["partly"]["kinds"].count("Diagonal") == 2  # of the layer that is used behind its back
        assert rank["partly"]["kinds"].count("Kronecker") == 5
        assert rank["partly"]["left"].shape == (5,)  # the table keeps the frequencies of its rows


def test_labels_differ_and_one_checkpoint_resumes_both(both: list[dict[str, Any]]):
    assert not torch.equal(both[0]["sampled"]["labels"], both[1]["sampled"]["labels"])
    assert all(rank["sampled"]["resumed"] for rank in both)


def test_models_of_one_process_each_are_trained_alone(both: list[dict[str, Any]]):
    for rank, found in enumerate(both):
        alone = train_stranger(rank)
        assert torch.equal(found["strangers"]["flat"], alone["flat"])
        assert found["strangers"]["kl"] == alone["kl"]


def test_what_cannot_be_shared_is_refused_on_all_processes(both: list[dict[str, Any]]):
    """Before a statistic waits for ever."""
    for rank in both:
        adding, static = rank["refused"]
        assert "2 processes" in adding
        assert "static_graph" in static
        assert "join()" in rank["uneven"]["words"]
        assert "as many batches" in rank["uneven"]["words"]
        assert "different gradients" in rank["unaveraged"]["words"]
        shapes, values = rank["different"]["words"]
        assert "'3.weight' is missing on rank 0 and (3, 3) of torch.float64 on rank 1" in shapes
        assert "other values on rank 1" in values
        assert rank["unaveraged"]["stayed"]
        assert rank["different"]["stayed"]
    assert refuse_structures() == ["", ""]  # alone, all is well
