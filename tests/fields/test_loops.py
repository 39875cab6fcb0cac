"""`fit`, `minimize`, `learn` and `run`: one meaning of `callback` and `progress`, and Ctrl-C leaves whole steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from models import draw, mlp
from optim_models import CE, Closure, Interrupt, X, Y, net
from policy_worlds import Bandit
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


def test_what_is_no_number_of_steps_or_nats_is_refused():
    q = fit_normal()[0]
    for wrong in ({"steps": 2.5}, {"steps": -1}, {"tolerance": -1.0}, {"tolerance": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
            q.fit(**wrong)
    assert q.steps == 0


@pytest.mark.parametrize("name", LOOPS)
def test_a_callback_is_given_the_object_after_each_step_and_stops_by_true(name: str):
    seen: list[Any] = []
    owner, run = LOOPS[name](callback=lambda one: seen.append(one) or len(seen) == 2)
    assert len(run()) == 2
    assert all(one is owner for one in seen)
    with pytest.raises(TypeError, match="callback is str, expected a function of"):
        LOOPS[name](callback="stop")[1]()


@pytest.mark.parametrize("name", LOOPS)
def test_all_of_several_callbacks_are_called_and_each_may_end_the_loop(name: str):
    calls: list[str] = []
    first, last = (lambda one, word=word: calls.append(word) or calls.count(word) == 2 for word in ("first", "last"))
    assert len(LOOPS[name](callback=[first, last])[1]()) == 2
    assert calls == ["first", "last"] * 2


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
    for part in (1, 3, 5, 7):
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


def train_network(recipe: Any, **how: Any) -> Callable[[], Any]:
    model = net()
    opt = recipe(model, CE, **how)

    closure = Closure(opt, lambda: opt.loss(model(X), Y))

    return lambda: opt.step(closure)


def solve_equation() -> Callable[[], Any]:
    system = ng.residuals(mlp(1, 4, 1), {"all": lambda u, x: ng.laplacian(u, x) + 1})
    return lambda: system.step(all=draw(6, 1))


def descend_mirror() -> Callable[[], Any]:
    model = net()
    opt = ng.MirrorDescent(model.parameters(), lr=0.1)
    CE(model(X), Y).backward()
    return lambda: opt.step(lambda: CE(model(X), Y))


def learn_policy() -> Callable[[], Any]:
    agent = ng.TRPO(None, Bandit(), batch=16, critic_epochs=1, seed=0)
    return lambda: agent.learn(16)


def recalibrate_norm() -> Callable[[], Any]:
    norm = nn.BatchNorm1d(3)
    return lambda: ng.recalibrate(norm, [X.float()])


class Switch:
    """Ctrl-C inside of `torch.no_grad` and `torch.enable_grad`: at the end of the n-th entry or exit; n = 0 counts."""

    def __init__(self, patch: pytest.MonkeyPatch, event: str, n: int = 0) -> None:
        self.n, self.seen = n, 0
        for kind in (torch.no_grad, torch.enable_grad):
            patch.setattr(kind, event, self.cut(getattr(kind, event), event == "__exit__"))

    def cut(self, switch: Callable[..., Any], leaving: bool) -> Callable[..., Any]:
        def cut_switch(*arguments: Any) -> Any:
            self.seen += 1
            if self.seen == self.n and leaving:
                raise KeyboardInterrupt
            value = switch(*arguments)
            if self.seen == self.n:
                raise KeyboardInterrupt
            return value

        return cut_switch


INTERRUPTED: dict[str, Callable[[], Callable[[], Any]]] = {
    **{name: lambda make=make: make()[1] for name, make in LOOPS.items()},
    "search": lambda: lambda: ng.minimize(lambda X: X.square().sum(1), torch.ones(3), 0.5, seed=0, maxfevals=30),
    "policy": learn_policy,
    "kfac": lambda: train_network(ng.kfac),
    "ekfac": lambda: train_network(ng.ekfac),
    "hessian_free": lambda: train_network(ng.hessian_free),
    "natgrad_cg": lambda: train_network(ng.natgrad_cg),
    "residuals": solve_equation,
    "mirror descent": descend_mirror,
    "recalibration": recalibrate_norm,
}


@pytest.mark.parametrize("event", ["__enter__", "__exit__"])
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_while_torch_switches_gradients_leaves_them_on(name: str, event: str, monkeypatch: pytest.MonkeyPatch):
    def interrupt_run(n: int) -> int:
        with torch.enable_grad():
            run = INTERRUPTED[name]()
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            switch = Switch(patch, event, n)
            run()
        return switch.seen

    count = interrupt_run(0)
    for n in sorted({1, count} - {0}):
        with torch.enable_grad():
            interrupt_run(n)
            assert torch.is_grad_enabled()
    with torch.no_grad():  # a user's own choice stays
        interrupt_run(max(count // 2, 1))
        assert not torch.is_grad_enabled()
