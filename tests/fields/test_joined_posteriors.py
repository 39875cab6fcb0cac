"""Posteriors and machines whose data lie on several processes: their steps are those of one process with all of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, draw
from process_ranks import count_ranks, own_rank, run_ranks
from torch import Tensor, distributed, nn

import natgrad as ng
from natgrad.helmholtz import Algorithm, Reweighted
from natgrad.helmholtz.phases import Lesson
from natgrad.helmholtz.units import PARTS, LogisticRows
from natgrad.optim import Processes
from natgrad.variational import Projected

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)

X, Y = draw(14, 3), draw(14, 1)
SIGNS = X[:, 0].sign()


def everyone() -> Any:
    return distributed.group.WORLD if distributed.is_initialized() else None


def own(rows: Tensor) -> Tensor:
    """This process's rows, unequal numbers of them; the last of three has none."""
    edges = {1: [0, len(rows)], 3: [0, 5, len(rows), len(rows)]}[count_ranks()]
    return rows[edges[own_rank()] : edges[own_rank() + 1]]


# posteriors


def network(**options: Any) -> dict[str, Any]:
    net = build_seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    q = ng.variational(net, criterion=nn.MSELoss(), data_size=50, lr=0.3, group=everyone(), **options)
    bounds = [q.step(own(X), own(Y)) for _ in range(3)]
    return {"q": torch.cat([q.mean, q.precision.reshape(-1)]), "bounds": [*bounds, q.elbo(own(X), own(Y))]}


def log_terms(z: Tensor) -> Tensor:
    """This process's terms of log p, and the prior on the first one."""
    own_terms = nn.functional.logsigmoid(own(SIGNS) * (z @ own(X).mT)).sum(-1)
    return own_terms - (0.5 * z.square().sum(-1) if own_rank() == 0 else 0.0)


def fit(make: Callable[[], Any]) -> dict[str, Any]:
    q = make()
    bounds = q.fit(6)
    return {"q": torch.cat([q.mean, q.covariance.reshape(-1)]), "bounds": list(bounds), "gap": bounds.gap}


def mix() -> Any:
    return ng.variational_mixture(log_terms, [[-1.0, 0.0, 0.5], [1.0, 0.3, 0.0]], group=everyone())


def project() -> Any:
    rows, signs = own(X), own(SIGNS)
    return ng.variational(Projected(rows, lambda f: nn.functional.logsigmoid(signs * f)), start=3, group=everyone())


def fit_low_rank() -> Any:
    return ng.variational_low_rank(log_terms, 3, rank=2, group=everyone())


def step_low_rank() -> dict[str, Any]:
    net = build_seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    q = ng.variational_low_rank(net, rank=2, criterion=nn.MSELoss(), data_size=50, lr=0.3, group=everyone())
    bounds = [q.step(own(X), own(Y)) for _ in range(3)]
    return {"q": torch.cat([q.mean, q.covariance.reshape(-1)]), "bounds": [*bounds, q.elbo(own(X), own(Y))]}


POSTERIORS: dict[str, Callable[[], dict[str, Any]]] = {
    "a network": network,
    "a network with a diagonal": lambda: network(diagonal=True),
    "terms": lambda: fit(lambda: ng.variational(log_terms, start=3, group=everyone())),
    "terms and a mixture": lambda: fit(mix),
    "rows": lambda: fit(project),
    "terms and a low rank": lambda: fit(fit_low_rank),
    "a network with a low rank": step_low_rank,
}


def end_together() -> list[int]:
    """A callback on the last process alone, which ends all."""
    q = ng.variational(log_terms, start=3, lr=0.1, group=everyone())
    asked = own_rank() == count_ranks() - 1
    trainer = ng.WakeSleep(build_machine(), group=everyone())
    return [
        len(q.fit(50, callback=(lambda q: q.steps == 3) if asked else None)),
        len(trainer.fit(own(BITS), 5, batch_size=4, callback=(lambda t: t.steps == 4) if asked else None)),
    ]


def fail_together() -> list[str]:
    """What one process gives does not fit."""
    last, words = own_rank() == count_ranks() - 1, []
    net = build_seeded(lambda: nn.Sequential(nn.Linear(3, 1)))
    q = ng.variational(net, criterion=nn.MSELoss(), data_size=50, group=everyone())
    trainer = ng.NaturalWakeSleep(build_machine(), group=everyone())
    before = torch.cat([q.mean, flat(trainer.machine)])
    for call in (
        lambda: q.step(X[:, :2] if last else X, Y),
        lambda: trainer.step(BITS + (1 if last else 0)),
        lambda: ng.variational(log_terms, torch.full((3,), float(last)).double(), group=everyone()),
        lambda: ng.variational(log_terms, start=3, lr=0.5 if last else 1.0, group=everyone()),
        lambda: ng.variational_low_rank(log_terms, 3, rank=2 if last else 1, group=everyone()),
        lambda: ng.WakeSleep(build_machine([6, 5, 2] if last else SIZES), group=everyone()),
    ):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whichever it is, it is looked at
            words.append(f"{type(error).__name__}: {error}")
    assert torch.equal(torch.cat([q.mean, flat(trainer.machine)]), before)
    return words


# machines

SIZES = [6, 5, 3]
BITS = (draw(14, 6) > 0).double()


def build_machine(sizes: list[int] = SIZES) -> ng.HelmholtzMachine:
    return build_seeded(lambda: ng.HelmholtzMachine(sizes))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@dataclass(frozen=True)
class Kept(Algorithm):
    """Keeps what was drawn."""

    lessons: list[Lesson] = field(default_factory=list, repr=False)

    def lesson(self, machine: Any, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        self.lessons.append(Reweighted().lesson(machine, x, samples, generator))
        return self.lessons[-1]


@dataclass(frozen=True)
class Told(Algorithm):
    """The lesson that it is told."""

    lessons: list[Lesson]

    def lesson(self, machine: Any, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        return self.lessons.pop()


def gather_lesson(lesson: Lesson, processes: Processes) -> Lesson:
    """What all processes drew, as one that drew it all would have it."""
    many = len(own(BITS))

    def gather(rows: LogisticRows) -> LogisticRows:
        weighed = rows.scale_by(many / len(BITS)) if many else rows.drop_all()
        return replace(rows, **{part: processes.gather_rows(getattr(weighed, part)) for part in PARTS})

    bound = processes.gather_rows(lesson.bound[:many])
    return Lesson([gather(one) for one in lesson.generation], [gather(one) for one in lesson.recognition], bound)


def train_together(kind: Any, **options: Any) -> dict[str, Any]:
    """Steps on each process's examples; then the same by one process that is told all that they drew."""
    kept, told = Kept(), Told([])
    trainer = kind(build_machine(), algorithm=kept, group=everyone(), **options)
    alone = kind(build_machine(), algorithm=told, **options)
    bounds = []
    for _ in range(5):
        found = trainer.step(own(BITS))
        told.lessons.append(gather_lesson(kept.lessons[-1], trainer.processes))
        bounds.append((found, alone.step(BITS)))
    return {"flat": flat(trainer.machine), "alone": flat(alone.machine), "bounds": bounds}


def train_and_resume() -> dict[str, Any]:
    """The whole set on each, then the rest of it again from the first process's state."""
    trainer = ng.NaturalWakeSleep(build_machine(), group=everyone())
    bounds = trainer.fit(own(BITS), epochs=2, batch_size=4)
    states = [trainer.state_dict(), trainer.machine.state_dict()]
    distributed.broadcast_object_list(states)
    other = ng.NaturalWakeSleep(build_machine(), group=everyone())
    other.machine.load_state_dict(states[1])
    other.load_state_dict(states[0])
    for one in (trainer, other):
        one.fit(own(BITS), epochs=1, batch_size=4)
    same = torch.equal(flat(trainer.machine), flat(other.machine))
    return {"flat": flat(trainer.machine), "steps": len(bounds), "bounds": bounds, "resumed": same}


MACHINES: dict[str, Callable[[], dict[str, Any]]] = {
    "wake-sleep": lambda: train_together(ng.WakeSleep, momentum=0.5),
    "natural wake-sleep": lambda: train_together(ng.NaturalWakeSleep, refresh=2),
    "natural wake-sleep, bounded": lambda: train_together(ng.NaturalWakeSleep, refresh=2, exact=False, radius=1e-3),
    "natural wake-sleep of its own pace": lambda: train_together(ng.NaturalWakeSleep, damping=ng.Relative(0.1)),
}
SCENES: dict[str, Callable[[], Any]] = {
    **POSTERIORS,
    **MACHINES,
    "resumed": train_and_resume,
    "end": end_together,
    "fail": fail_together,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 3, tmp_path_factory)


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_posterior_of_data_on_processes_is_that_of_all_data(ranks: list[dict[str, Any]], name: str):
    alone = POSTERIORS[name]()
    # over a pair of draws the equations of a low rank are singular, and MINRES-QLP stops at 1e-4: round-off grows
    within = 1e-6 if name == "a network with a low rank" else 1e-9
    for rank in ranks:
        assert torch.equal(rank[name]["q"], ranks[0][name]["q"])
        assert rank[name]["bounds"] == ranks[0][name]["bounds"]
    assert_close(ranks[0][name]["q"], alone["q"], within)
    assert ranks[0][name]["bounds"] == pytest.approx(alone["bounds"], rel=within)
    assert alone["bounds"][-1] > alone["bounds"][0]


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_of_examples_on_processes_steps_as_with_all_rows(ranks: list[dict[str, Any]], name: str):
    for rank in ranks:
        found = rank[name]
        assert torch.equal(found["flat"], ranks[0][name]["flat"])
        assert_close(found["flat"], found["alone"], 1e-9)
        for own_bound, alone in found["bounds"]:
            assert own_bound == pytest.approx(alone, rel=1e-9)
    assert not torch.equal(ranks[0][name]["flat"], flat(build_machine()))


def test_a_machine_on_processes_sees_all_examples_and_resumes(ranks: list[dict[str, Any]]):
    for rank in ranks:
        found = rank["resumed"]
        assert torch.equal(found["flat"], ranks[0]["resumed"]["flat"])
        assert found["bounds"] == ranks[0]["resumed"]["bounds"]
        assert found["steps"] == 2 * math.ceil(9 / 4)
        assert found["resumed"]


def test_processes_with_parts_of_a_posterior_end_and_fail_together(ranks: list[dict[str, Any]]):
    *others, last = ranks
    assert all(rank["end"] == [3, 4] for rank in ranks)
    assert "ValueError: x has entries other than 0 and 1" in last["fail"][1]
    for rank in others:
        for words in rank["fail"][:2]:
            assert words.startswith("RuntimeError: process 2 of 3 met an error, which it reports itself")
    for rank in ranks:
        values, *settings, models = rank["fail"][2:]
        assert "other values on rank 2" in values
        assert len(settings) == 2
        assert all("different settings" in words for words in settings)
        assert "different models" in models
