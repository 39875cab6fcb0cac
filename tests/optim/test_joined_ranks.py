"""Four processes and a step that is solved by products: that of one process on the joined batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import Assembled, assert_close, build_seeded, draw
from optim_models import CE, Closure, flat, net
from process_ranks import count_ranks, run_ranks
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)

X = draw(24, 3)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 1, 1, 2, 0, 0, 2] * 2)
EVEN = [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 24)]
UNEVEN = [slice(0, 11), slice(11, 13), slice(13, 13), slice(13, 24)]  # one has no examples
MASKED = torch.where(torch.arange(24) < 18, Y, -100)  # no target counts on the last of four equal parts
TIGHT = ng.CG(rtol=1e-14, max_steps=200)
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double(), ignore_index=2)
SUMMED = nn.CrossEntropyLoss(reduction="sum")


def own(parts: list[slice]) -> slice:
    """This process's examples; all where there is one."""
    return parts[distributed.get_rank()] if distributed.is_initialized() else slice(None)


def wrap_model(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if distributed.is_initialized() else model


def everyone() -> Any:
    return distributed.group.WORLD if distributed.is_initialized() else None


def train(
    build: Callable[[nn.Module, nn.Module], Any],
    parts: list[slice],
    criterion: nn.Module = CE,
    make: Callable[[], nn.Module] = net,
    steps: int = 3,
    weighted: bool = False,
    targets: Tensor = Y,
) -> dict[str, Any]:
    model = make()
    outer = wrap_model(model)
    opt = build(outer, criterion)
    for _ in range(steps):
        opt.zero_grad()
        loss, x = opt.loss(outer(X[own(parts)]), targets[own(parts)]), X[own(parts)]
        # as loops do that know what a mean of means lacks
        (loss * len(x) * count_ranks() / len(X) if weighted else loss).backward()
        opt.step()
    report = opt.state_report()
    return {"flat": flat(model), "loss": report.loss, "kl": report.kl, "damping": report.damping}


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
    model = net()
    opt = ng.natgrad_cg(model, CE, solver=TIGHT, group=everyone())
    for _ in range(3):
        opt.zero_grad()
        opt.loss(model(X[own(UNEVEN)]), Y[own(UNEVEN)]).backward()
        opt.step()
    return {"flat": flat(model)}


def step_by_closure() -> dict[str, Any]:
    """A closure that does not use the optimizer's loss: all processes weigh the same."""
    model = net()
    outer = wrap_model(model)
    opt = ng.hessian_free(outer, CE, solver=TIGHT)

    closure = Closure(opt, lambda: CE(outer(X[own(EVEN)]), Y[own(EVEN)]))

    for _ in range(2):
        opt.step(closure)
    return {"flat": flat(model), "loss": opt.state_report().loss}


def accumulate_losses() -> dict[str, Any]:
    """Two losses of one step, over processes with unequal numbers of examples, and a loss that is a sum."""
    model = net()
    outer = wrap_model(model)
    opt = ng.hessian_free(outer, SUMMED, solver=TIGHT)
    for _ in range(2):
        opt.zero_grad()
        outputs, y = outer(X[own(UNEVEN)]), Y[own(UNEVEN)]
        low = X[own(UNEVEN)][:, 0] < 0
        (opt.loss(outputs[low], y[low]) + 0.5 * opt.loss(outputs[~low], y[~low])).backward()
        opt.step()
    return {"flat": flat(model), "loss": opt.state_report().loss}


def observe_metric() -> dict[str, Any]:
    """The metric on other data than the gradient's."""
    model = net()
    outer = wrap_model(model)
    opt = ng.natgrad_cg(outer, CE, solver=TIGHT)
    for _ in range(2):
        opt.zero_grad()
        opt.loss(outer(X[own(EVEN)]), Y[own(EVEN)]).backward()
        opt.observe(2 * X[own(UNEVEN)])
        opt.step()
    return {"flat": flat(model)}


def several() -> dict[str, Any]:
    """Two metrics, each over all processes' examples of its own, in the space of all their rows."""
    model = net()
    outer = wrap_model(model)
    metrics = {"one": ng.fisher(outer, CE), "other": ng.fisher(outer, CE)}
    weights = {"other": 3.0}
    opt = ng.NaturalGradient(outer, metrics=metrics, weights=weights, lr=0.3, damping=0.1, solver=ng.SampleSpace())
    for _ in range(2):
        opt.zero_grad()
        CE(outer(X[own(EVEN)]), Y[own(EVEN)]).backward()
        opt.observe({"one": X[own(UNEVEN)], "other": 2 * X[own(EVEN)]})
        opt.step()
    return {"flat": flat(model)}


def log_p(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return -0.5 * (params["precision"] * x * x).sum() + (params["mean"] * x).tanh().sum()


def adaptive() -> dict[str, Any]:
    """`ng.ang`: score metric, data unit, gradients and counts are those of all rows."""
    params = {"precision": torch.ones(3).double(), "mean": torch.linspace(-1, 1, 3).double()}
    params = {name: p.requires_grad_() for name, p in params.items()}
    opt = ng.ang(params, ng.score_metric(log_p), group=everyone())
    parts = [slice(0, 10), slice(10, 12), slice(12, 13), slice(13, 24)]
    for _ in range(3):
        opt.zero_grad()
        ng.score_matching_loss(log_p, params, X[own(parts)]).backward()
        opt.step()
    return {"flat": flat(params), "seen": opt.state_report().counts["seen"]}


def mirror() -> dict[str, Any]:
    """Steps by gradients alone, of the mean over the processes; the last parameter has none on some of them."""
    weights, shift = torch.full((3,), 1 / 3).double().requires_grad_(), torch.ones(3).double().requires_grad_()
    opt = ng.MirrorDescent([weights, shift], ng.geometry.NegativeEntropy(), momentum=0.5, group=everyone())
    for _ in range(3):
        opt.zero_grad()
        alone = not distributed.is_initialized()
        loss = (X[own(EVEN)] @ weights).square().mean()
        if alone or distributed.get_rank() < 2:
            loss = loss + (0.5 if alone else 1.0) * shift.square().sum()
        loss.backward()
        opt.step()
    return {"flat": torch.cat([weights, shift]).detach()}


def poison_batch() -> dict[str, Any]:
    """NaN in the batch of one process, an infinite loss on another: nobody steps, and the run goes on."""
    model, stayed = net(), True
    outer = wrap_model(model)
    opt = ng.hessian_free(outer, CE, solver=TIGHT, on_trouble="skip")
    for bad, poison in ((None, 0.0), (1, math.nan), (2, math.inf), (None, 0.0)):
        before = flat(model)
        x = X[own(EVEN)].clone()
        if distributed.get_rank() == bad:
            x[0] = poison
        opt.zero_grad()
        opt.loss(outer(x), Y[own(EVEN)]).backward()
        opt.step()
        stayed &= torch.equal(before, flat(model)) == (bad is not None)
    return {"flat": flat(model), "stayed": stayed, "failures": opt.state_report().failures}


def apart() -> dict[str, Any]:
    """Other rates and solvers, gradients not averaged, a metric that fails on one process, a wrapper inside."""
    words, stayed = [], True
    nested = nn.Sequential(wrap_model(net()), nn.Identity())

    def break_metric(opt: Any) -> None:
        if distributed.get_rank() == 1:
            opt.observe(torch.full((2, 3), math.nan).double())

    def leave(opt: Any) -> None:
        """Nothing."""

    cases: list[tuple[Callable[[nn.Module], Any], Callable[[Any], None], bool]] = [
        (lambda m: ng.natgrad_cg(m, CE, lr=0.1 + distributed.get_rank(), solver=TIGHT), leave, True),
        (lambda m: ng.natgrad_cg(m, CE, solver=ng.CG(max_steps=2 + distributed.get_rank())), leave, True),
        (lambda m: ng.natgrad_cg(m, CE, solver=TIGHT), leave, False),
        (lambda m: ng.natgrad_cg(m, CE, solver=TIGHT), break_metric, True),
        (lambda m: ng.natgrad_cg(nested, CE), leave, True),
        (lambda m: ng.kfac(m, CE, damping=0.1 + distributed.get_rank()), leave, True),
    ]
    cases += [(partial(build_unlike, *choice), leave, True) for choice in UNLIKE]
    cases += [(lambda m, r=recipe: r(m, CE), slow_down, True) for recipe in (ng.natgrad_cg, ng.kfac)]
    for build, prepare, averaged in cases:
        model = net()
        outer, before = wrap_model(model), flat(model)
        try:
            opt = build(outer)
            opt.loss((outer if averaged else model)(X[own(EVEN)]), Y[own(EVEN)]).backward()
            prepare(opt)
            opt.step()
        except (ValueError, RuntimeError, TypeError) as error:
            words.append(str(error))
        stayed &= torch.equal(before, flat(model))
    return {"words": words, "stayed": stayed}


UNLIKE: list[tuple[Any, str, Any, Any]] = [
    (ng.natgrad_cg, "weight_decay", 0.0, 0.1),
    (ng.natgrad_cg, "search_batch", None, 3),
    (ng.natgrad_cg, "warm_start", 0.0, 0.5),
    (ng.natgrad_cg, "on_trouble", "skip", "raise"),
    (ng.kfac, "lr", 1.0, 0.5),
    (ng.kfac, "momentum", 0.9, 0.5),
    (ng.kfac, "weight_decay", 0.0, 0.1),
    (ng.kfac, "l2", 0.0, 0.1),
    (ng.kfac, "share", "speed", "memory"),
    (ng.kfac, "share", 1000, 2000),
    (ng.kfac, "on_trouble", "skip", "raise"),
]
"""A recipe, an option, and its values on the first process and on the others."""


def build_unlike(recipe: Any, option: str, first: Any, others: Any, model: nn.Module) -> Any:
    return recipe(model, CE, **{option: others if distributed.get_rank() else first})


def slow_down(opt: Any) -> None:
    """As a scheduler does that reads the loss of each process by itself."""
    opt.param_groups[0]["lr"] *= 0.5 if distributed.get_rank() == 1 else 1.0


def flat_kfac(model: nn.Module, criterion: nn.Module) -> Any:
    structure = ng.Kronecker(0.5, estimate=ng.ExactLabels())
    return ng.NaturalGradient(model, ng.fisher(model, criterion), lr=0.3, structure=structure, damping=0.1)


def centre_covariance(model: nn.Module, criterion: nn.Module) -> Any:
    metric = ng.covariance(model, criterion, centred=True)
    return ng.NaturalGradient(model, metric, lr=0.1, solver=ng.SampleSpace(), damping=0.1)


SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "CG": lambda: train(lambda m, c: ng.hessian_free(m, c, solver=TIGHT), EVEN, steps=5),
    "CG, unequal": lambda: train(lambda m, c: ng.hessian_free(m, c, solver=TIGHT), UNEVEN, WEIGHTED),
    "CG, no target counts": lambda: train(lambda m, c: ng.hessian_free(m, c, solver=TIGHT), EVEN, targets=MASKED),
    "CG, weighted by the loop": lambda: train(lambda m, c: ng.hessian_free(m, c, solver=TIGHT), UNEVEN, weighted=True),
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
    "several": several,
    "adaptive": adaptive,
    "mirrored": mirror,
    "poisoned": poison_batch,
    "apart": apart,
}
TOGETHER = [name for name in SCENES if name not in ("poisoned", "apart")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 4, tmp_path_factory)


@pytest.mark.parametrize("scene", TOGETHER)
def test_several_processes_step_as_one_on_the_joined_batch(ranks: list[dict[str, Any]], scene: str):
    alone = SCENES[scene]()
    for rank in ranks:
        assert torch.equal(rank[scene]["flat"], ranks[0][scene]["flat"])  # bit for bit
    assert_close(ranks[0][scene]["flat"], alone["flat"], 1e-7 if scene == "Krylov subspace" else 1e-10)
    for number in alone.keys() - {"flat"}:
        assert ranks[0][scene][number] == pytest.approx(alone[number], rel=1e-7, nan_ok=True)


def test_one_bad_batch_skips_the_step_on_all_processes_and_the_run_goes_on(ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert rank["poisoned"]["stayed"]
        assert rank["poisoned"]["failures"] == 2
        assert torch.equal(rank["poisoned"]["flat"], ranks[0]["poisoned"]["flat"])


def test_processes_that_disagree_end_with_an_error_on_all_and_change_nothing(ranks: list[dict[str, Any]]):
    for i, rank in enumerate(ranks):
        drifted, settings, inside, failed, nested, blocks, *unlike, slow, slow_blocks = rank["apart"]["words"]
        for text in (drifted, slow, slow_blocks):
            assert "other numbers in their parameter groups" in text
            assert text.count("lr=") == 2
        for text, (_, option, first, others) in zip(unlike, UNLIKE, strict=True):
            assert option in text
            assert option == "search_batch" or (str(first) in text and str(others) in text)
        assert "max_steps=2" in settings
        assert "max_steps=3" in settings
        assert "call the DistributedDataParallel" in inside
        assert "not finite" in failed if i == 1 else "process 1 of 4" in failed
        assert "wrap the whole model" in nested
        assert "build the optimizer alike" in blocks
        assert rank["apart"]["stayed"]
