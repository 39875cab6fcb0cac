"""Four processes and a step that is solved by products: that of one process on the joined batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from models import Assembled, build_seeded, draw
from optim_models import CE, Closure, flat, iterate, net, train_batches
from process_ranks import assert_joined, catch, count_ranks, needs_gloo, own_rank, run_ranks, take_part, wrap_model
from torch import Tensor, distributed, nn

import natgrad as ng

pytestmark = needs_gloo

X = draw(24, 3)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 1, 1, 2, 0, 0, 2] * 2)
EVEN, UNEVEN = (6, 6, 6, 6), (11, 2, 0, 11)  # one has no examples
MASKED = torch.where(torch.arange(24) < 18, Y, -100)  # no target counts on the last of four equal parts
TIGHT = ng.CG(rtol=1e-14, max_steps=200)
SMOOTHED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.0]).double(), label_smoothing=0.1)
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double(), ignore_index=2)


def everyone() -> Any:
    return distributed.group.WORLD if distributed.is_initialized() else None


def train(
    build: Callable[[nn.Module, nn.Module], Any],
    parts: Sequence[int],
    criterion: nn.Module = CE,
    make: Callable[[], nn.Module] = net,
    steps: int = 3,
    weighted: bool = False,
    targets: Tensor = Y,
) -> dict[str, Any]:
    """weighted: as loops do that know what a mean of means lacks."""
    model, own = make(), take_part(parts)
    outer = wrap_model(model)
    opt = build(outer, criterion)
    for _ in range(steps):
        opt.zero_grad()
        loss = opt.loss(outer(X[own]), targets[own])
        (loss * len(X[own]) * count_ranks() / len(X) if weighted else loss).backward()
        opt.step()
    report = opt.state_report()
    return {"flat": flat(model), "loss": report.loss, "kl": report.kl, "damping": report.damping}


def smooth_weightless() -> dict[str, Any]:
    """The last process has targets of a class of weight zero alone: they are left out, with what smoothing adds."""
    weightless = torch.where(MASKED < 0, 2, Y)
    return train(by_cg, EVEN, SMOOTHED, targets=weightless if distributed.is_initialized() else MASKED)


def build_convolved() -> nn.Module:
    """(b, 3) -> three logits, by a convolution and a bare scale: rows of U that no linear layer explains."""
    return Assembled(
        lambda m, x: m.last(m.first(x.unsqueeze(1)).tanh().flatten(1) * m.scale),
        first=nn.Conv1d(1, 2, 2),
        last=nn.Linear(4, 3),
        scale=nn.Parameter(torch.linspace(0.5, 1.5, 4)),
    )


def gather_gradients() -> dict[str, Any]:
    """A group, and gradients that nobody averaged."""
    model, own = net(), take_part(UNEVEN)
    opt = ng.natgrad_cg(model, CE, solver=TIGHT, group=everyone())
    train_batches(opt, model, [(X[own], Y[own])] * 3)
    return {"flat": flat(model)}


def step_by_closure() -> dict[str, Any]:
    """A closure that does not use the optimizer's loss: all processes weigh the same."""
    model, own = net(), take_part(EVEN)
    outer = wrap_model(model)
    opt = ng.hessian_free(outer, CE, solver=TIGHT)
    closure = Closure(opt, lambda: CE(outer(X[own]), Y[own]))
    for _ in range(2):
        opt.step(closure)
    return {"flat": flat(model), "loss": opt.state_report().loss}


def accumulate_losses() -> dict[str, Any]:
    """Two losses of one step, over processes with unequal numbers of examples, and a loss that is a sum."""
    model, own = net(), take_part(UNEVEN)
    outer = wrap_model(model)
    opt = ng.hessian_free(outer, nn.CrossEntropyLoss(reduction="sum"), solver=TIGHT)
    for _ in range(2):
        opt.zero_grad()
        outputs, y, low = outer(X[own]), Y[own], X[own][:, 0] < 0
        (opt.loss(outputs[low], y[low]) + 0.5 * opt.loss(outputs[~low], y[~low])).backward()
        opt.step()
    return {"flat": flat(model), "loss": opt.state_report().loss}


def observe_metric() -> dict[str, Any]:
    """The metric on other data than the gradient's."""
    model = net()
    outer = wrap_model(model)
    opt = ng.natgrad_cg(outer, CE, solver=TIGHT)
    for _ in range(2):
        opt.observe(2 * X[take_part(UNEVEN)])
        iterate(opt, outer, X[take_part(EVEN)], Y[take_part(EVEN)])
    return {"flat": flat(model)}


def add_metrics() -> dict[str, Any]:
    """Two metrics, each over all processes' examples of its own, in the space of all their rows."""
    model, even, uneven = net(), take_part(EVEN), take_part(UNEVEN)
    outer = wrap_model(model)
    metrics, weights = {"one": ng.fisher(outer, CE), "other": ng.fisher(outer, CE)}, {"other": 3.0}
    opt = ng.NaturalGradient(outer, metrics=metrics, weights=weights, lr=0.3, damping=0.1, solver=ng.SampleSpace())
    for _ in range(2):
        opt.zero_grad()
        CE(outer(X[even]), Y[even]).backward()
        opt.observe({"one": X[uneven], "other": 2 * X[even]})
        opt.step()
    return {"flat": flat(model)}


def log_p(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return -0.5 * (params["precision"] * x * x).sum() + (params["mean"] * x).tanh().sum()


def adapt() -> dict[str, Any]:
    """`ng.ang`: score metric, data unit, gradients and counts are those of all rows."""
    params = {"precision": torch.ones(3).double(), "mean": torch.linspace(-1, 1, 3).double()}
    params = {name: p.requires_grad_() for name, p in params.items()}
    opt = ng.ang(params, ng.score_metric(log_p), group=everyone())
    for _ in range(3):
        opt.zero_grad()
        ng.score_matching_loss(log_p, params, X[take_part((10, 2, 1, 11))]).backward()
        opt.step()
    return {"flat": flat(params), "seen": opt.state_report().counts["seen"]}


def mirror() -> dict[str, Any]:
    """Steps by gradients alone, of the mean over the processes; the last parameter has none on some of them."""
    weights, shift = torch.full((3,), 1 / 3).double().requires_grad_(), torch.ones(3).double().requires_grad_()
    opt = ng.MirrorDescent([weights, shift], ng.geometry.NegativeEntropy(), momentum=0.5, group=everyone())
    for _ in range(3):
        opt.zero_grad()
        loss = (X[take_part(EVEN)] @ weights).square().mean()
        if own_rank() < 2:
            loss = loss + (0.5 if count_ranks() == 1 else 1.0) * shift.square().sum()
        loss.backward()
        opt.step()
    return {"flat": torch.cat([weights, shift]).detach()}


def poison_batch() -> dict[str, Any]:
    """NaN in the batch of one process, an infinite loss on another: nobody steps, and the run goes on."""
    model, stayed = net(), True
    outer = wrap_model(model)
    opt = ng.hessian_free(outer, CE, solver=TIGHT, on_trouble="skip")
    for bad, poison in ((None, 0.0), (1, math.nan), (2, math.inf), (None, 0.0)):
        before, x = flat(model), X[take_part(EVEN)].clone()
        if own_rank() == bad:
            x[0] = poison
        iterate(opt, outer, x, Y[take_part(EVEN)])
        stayed &= torch.equal(before, flat(model)) == (bad is not None)
    return {"flat": flat(model), "stayed": stayed, "failures": opt.state_report().failures}


def leave(opt: Any) -> None:
    """Nothing happens to the optimizer."""


def call_inside(opt: Any) -> None:
    """Nothing either; but it is the wrapped model that is called, and nobody averages the gradients."""


def break_metric(opt: Any) -> None:
    if own_rank() == 1:
        opt.observe(torch.full((2, 3), math.nan).double())


def slow_down(opt: Any) -> None:
    """As a scheduler does that reads the loss of each process by itself."""
    opt.param_groups[0]["lr"] *= 0.5 if own_rank() == 1 else 1.0


def build_unlike(recipe: Any, option: str, first: Any, others: Any, model: nn.Module) -> Any:
    """An option with one value on the first process, and another on the others."""
    return recipe(model, CE, **{option: others if own_rank() else first})


Unlike = tuple[Callable[[nn.Module], Any], Callable[[Any], None], tuple[str, ...]]


def unlike(recipe: Any, option: str, first: Any, others: Any, *words: str) -> Unlike:
    return partial(build_unlike, recipe, option, first, others), leave, words or (option, str(first), str(others))


DRIFT = ("other numbers in their parameter groups", "lr=")
DISAGREEMENTS: list[Unlike] = [  # how to build an optimizer, what happens then, and the words of the error
    unlike(ng.natgrad_cg, "lr", 0.1, 1.1, *DRIFT),
    unlike(ng.natgrad_cg, "solver", ng.CG(max_steps=2), ng.CG(max_steps=3), "max_steps=2", "max_steps=3"),
    unlike(ng.natgrad_cg, "weight_decay", 0.0, 0.1),
    unlike(ng.natgrad_cg, "search_batch", None, 3, "search_batch"),
    unlike(ng.natgrad_cg, "warm_start", 0.0, 0.5),
    unlike(ng.natgrad_cg, "on_trouble", "skip", "raise"),
    unlike(ng.kfac, "damping", 0.1, 1.1, "build the optimizer alike"),
    unlike(ng.kfac, "lr", 1.0, 0.5),
    unlike(ng.kfac, "momentum", 0.9, 0.5),
    unlike(ng.kfac, "l2", 0.0, 0.1),
    unlike(ng.kfac, "share", 1000, 2000),
    unlike(ng.kfac, "on_trouble", "skip", "raise"),
    (lambda m: ng.natgrad_cg(m, CE), slow_down, DRIFT),
    (lambda m: ng.kfac(m, CE), slow_down, DRIFT),
    (lambda m: ng.natgrad_cg(m, CE), break_metric, ()),
    (lambda m: ng.natgrad_cg(nn.Sequential(m, nn.Identity()), CE), leave, ("wrap the whole model",)),
    (lambda m: ng.natgrad_cg(m, CE, solver=TIGHT), call_inside, ("call the DistributedDataParallel",)),
]


def disagree() -> dict[str, Any]:
    """What each of them ends with, and whether no parameter moved."""
    words, stayed = [], True
    for build, prepare, _ in DISAGREEMENTS:
        model = net()
        outer, before = wrap_model(model), flat(model)

        def step(build: Any = build, prepare: Any = prepare, outer: nn.Module = outer) -> None:
            opt = build(outer)
            called = outer.module if prepare is call_inside else outer
            opt.loss(called(X[take_part(EVEN)]), Y[take_part(EVEN)]).backward()
            prepare(opt)
            opt.step()

        words.append(catch((ValueError, RuntimeError, TypeError), step))
        stayed &= torch.equal(before, flat(model))
    return {"words": words, "stayed": stayed}


def flat_kfac(model: nn.Module, criterion: nn.Module) -> Any:
    structure = ng.Kronecker(0.5, estimate=ng.ExactLabels())
    return ng.NaturalGradient(model, ng.fisher(model, criterion), lr=0.3, structure=structure, damping=0.1)


def centre_covariance(model: nn.Module, criterion: nn.Module) -> Any:
    metric = ng.covariance(model, criterion, centred=True)
    return ng.NaturalGradient(model, metric, lr=0.1, solver=ng.SampleSpace(), damping=0.1)


def by_cg(model: nn.Module, criterion: nn.Module) -> Any:
    return ng.hessian_free(model, criterion, solver=TIGHT)


TOGETHER: dict[str, Callable[[], dict[str, Any]]] = {
    "CG": lambda: train(by_cg, EVEN, steps=5),
    "CG, unequal": lambda: train(by_cg, UNEVEN, WEIGHTED),
    "CG, no target counts": lambda: train(by_cg, EVEN, targets=MASKED),
    "CG, smoothed classes that do not count": smooth_weightless,
    "CG, weighted by the loop": lambda: train(by_cg, UNEVEN, weighted=True),
    "sample space": lambda: train(lambda m, c: ng.hessian_free(m, c, solver=ng.SampleSpace()), EVEN, steps=5),
    "sample space, unequal": lambda: train(
        lambda m, c: ng.hessian_free(m, c, solver=ng.SampleSpace()), UNEVEN, make=lambda: build_seeded(build_convolved)
    ),
    "Krylov subspace": lambda: train(lambda m, c: ng.krylov_subspace(m, c, damping=0.1), UNEVEN, steps=2),
    "dense": lambda: train(
        lambda m, c: ng.NaturalGradient(m, ng.fisher(m, c), lr=0.3, structure=ng.Dense(0.5), damping=0.1), UNEVEN
    ),
    "layers": lambda: train(flat_kfac, EVEN),
    "centred": lambda: train(centre_covariance, UNEVEN),
    "gathered": gather_gradients,
    "closed": step_by_closure,
    "accumulated": accumulate_losses,
    "observed": observe_metric,
    "several metrics": add_metrics,
    "adaptive": adapt,
    "mirrored": mirror,
}
SCENES = TOGETHER | {"poisoned": poison_batch, "disagreements": disagree}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 4, tmp_path_factory)


@pytest.mark.parametrize("scene", TOGETHER)
def test_several_processes_step_as_one_on_the_joined_batch(ranks: list[dict[str, Any]], scene: str):
    assert_joined([rank[scene] for rank in ranks], TOGETHER[scene](), 1e-7 if scene == "Krylov subspace" else 1e-10)


def test_one_bad_batch_skips_the_step_on_all_processes_and_the_run_goes_on(ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert rank["poisoned"]["stayed"]
        assert rank["poisoned"]["failures"] == 2
        assert torch.equal(rank["poisoned"]["flat"], ranks[0]["poisoned"]["flat"])


def test_processes_that_disagree_end_with_an_error_on_all_and_change_nothing(ranks: list[dict[str, Any]]):
    for i, rank in enumerate(ranks):
        for text, (_, prepare, words) in zip(rank["disagreements"]["words"], DISAGREEMENTS, strict=True):
            if prepare is break_metric:
                words = ("not finite" if i == 1 else "process 1 of 4",)
            assert all(word in text for word in words), (text, words)
            assert words != DRIFT or text.count("lr=") == 2
        assert rank["disagreements"]["stayed"]
