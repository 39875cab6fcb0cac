"""`fit`, `minimize`, `learn` and `run`: one meaning of `callback` and `progress`, and Ctrl-C leaves whole steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_models import Interrupt
from torch import Tensor, nn

import natgrad as ng

BITS = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])


def log_joint(z: Tensor) -> Tensor:
    """A density whose fit takes several steps."""
    return -0.25 * (z - 1).pow(4).sum(-1) - 0.1 * z.square().sum(-1)


def fit_normal(**how: Any) -> tuple[Any, Callable[[], Any]]:
    q = ng.variational(log_joint, start=2, lr=0.5)
    return q, lambda: q.fit(6, tolerance=0.0, **how)


def train_machine(kind: Any, **how: Any) -> tuple[Any, Callable[[], Any]]:
    torch.manual_seed(0)
    trainer = kind(ng.HelmholtzMachine([4, 3, 2]), lr=0.2)
    return trainer, lambda: trainer.fit(BITS, 3, batch_size=2, **how)


def find_ground_state(**how: Any) -> tuple[Any, Callable[[], Any]]:
    torch.manual_seed(0)
    h = ng.vmc.TransverseIsing(3)
    sr = ng.stochastic_reconfiguration(ng.LogAmplitude(ng.vmc.RBM(3)), lr=0.1)
    search = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), sr)
    return search, lambda: search.run(6, **how)


LOOPS: dict[str, Callable[..., tuple[Any, Callable[[], Any]]]] = {
    "variational": fit_normal,
    "wake-sleep": lambda **how: train_machine(ng.WakeSleep, **how),
    "natural wake-sleep": lambda **how: train_machine(ng.NaturalWakeSleep, **how),
    "ground state": find_ground_state,
}


def read_place(owner: Any) -> Tensor:
    """Where the loop's object stands, as one vector."""
    if isinstance(owner, ng.variational.Variational):
        return torch.cat([owner.mean, owner.precision.flatten()])
    module = owner.machine if isinstance(owner, ng.WakeSleep) else owner.psi
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


@pytest.mark.parametrize("name", LOOPS)
def test_a_callback_is_given_the_object_after_each_step_and_stops_by_true(name: str):
    seen: list[Any] = []
    owner, run = LOOPS[name](callback=lambda one: seen.append(one) or len(seen) == 2)
    assert len(run()) == 2
    assert all(one is owner for one in seen)
    with pytest.raises(TypeError, match="callback is str, expected a function of"):
        LOOPS[name](callback="stop")[1]()


@pytest.mark.parametrize("name", LOOPS)
def test_progress_is_shown_on_request_alone(name: str, capsys: pytest.CaptureFixture[str]):
    LOOPS[name](progress=True)[1]()
    assert "6 of 6 steps 100 %, 0:00 left: " in capsys.readouterr().err
    LOOPS[name]()[1]()
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="progress is 'bar'"):
        LOOPS[name](progress="bar")[1]()


@pytest.mark.parametrize("name", LOOPS)
def test_ctrl_c_anywhere_leaves_the_state_after_a_whole_step(name: str):
    places: list[Tensor] = []
    owner, run = LOOPS[name](callback=lambda one: places.append(read_place(one)))
    places.append(read_place(owner))
    with Interrupt() as lines:
        run()
    places.append(read_place(owner))
    assert len(places) >= 6
    for part in range(1, 8):
        owner, run = LOOPS[name]()
        with Interrupt(part * lines.seen // 8):
            run()
        found = read_place(owner)
        assert any(torch.equal(found, place) for place in places)
        run()
        assert bool(torch.isfinite(read_place(owner)).all())


def test_a_search_that_was_interrupted_goes_on_from_its_last_whole_generation(tmp_path: Path):
    def sphere(x: Tensor) -> float:
        calls.append(1)
        if len(calls) == limit:
            raise KeyboardInterrupt
        return float(x.square().sum())

    def search(name: str) -> Any:
        file = tmp_path / name
        return ng.minimize(sphere, torch.ones(3), 0.5, seed=0, maxfevals=70, vectorized=False, checkpoint=file)

    calls, limit = list[int](), -1
    whole = search("whole")
    calls, limit = [], 31
    assert search("part").message.startswith("interrupted")
    limit = -1
    went_on = search("part")
    assert torch.equal(went_on.x, whole.x)
    assert went_on.nfev == whole.nfev
    assert went_on.history["best"] == whole.history["best"]
