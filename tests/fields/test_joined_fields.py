"""Applications whose data lie on several processes: their steps are those of one process with all of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from models import Assembled, assert_close, build_seeded, draw
from policy_worlds import Walk
from process_ranks import count_ranks, own_rank, run_ranks
from torch import Tensor, distributed, nn

import natgrad as ng
from natgrad.policy import Rollout, acktr
from natgrad.residuals import Causal, WhereLarge
from natgrad.residuals.stacked_rows import StackedRows

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)

INSIDE, EDGE = draw(23, 2), draw(9, 2)
SIZES = (4,)
F64 = torch.float64


def everyone() -> Any:
    return distributed.group.WORLD if distributed.is_initialized() else None


def own(rows: Tensor) -> Tensor:
    """This process's rows, unequal numbers of them: the last has none of a short batch; all where there is one."""
    edges = {1: [0, len(rows)], 2: [0, 4, len(rows)], 4: [0, 4, 5, len(rows), len(rows)]}[count_ranks()]
    return rows[edges[own_rank()] : edges[own_rank() + 1]]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


# residuals


def build_scaled() -> nn.Module:
    """A network that no chain of layers explains."""
    return Assembled(
        lambda m, x: m.last((m.first(x) * m.scale).tanh() + m.first(x).sin()),
        first=nn.Linear(2, 5),
        last=nn.Linear(5, 1),
        scale=nn.Parameter(torch.ones(5)),
    )


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))


DAMPING = ng.LevenbergMarquardt(1.0, raise_by=3.0, lower_by=1 / 3, per="loss")
TERMS: dict[str, Callable[..., Tensor]] = {
    "inside": lambda u, x: torch.stack([ng.laplacian(u, x).sum() + x[0].sin(), u(x).sum() - x[1]]),
    "edge": lambda u, x: u(x) - x[0] * x[1],
}


def solve_residuals(make: Callable[[], nn.Module], written: int = 2**22, steps: int = 4, **options: Any) -> Any:
    net, before = build_seeded(make), StackedRows.WRITTEN
    StackedRows.WRITTEN = written
    try:
        opt = ng.residuals(net, TERMS, weights={"edge": 5.0}, damping=DAMPING, group=everyone(), **options)
        losses = [float(opt.step(inside=own(INSIDE), edge=own(EDGE))) for _ in range(steps)]
    finally:
        StackedRows.WRITTEN = before
    report = opt.state_report()
    return {"flat": flat(net), "losses": losses, "terms": opt.losses, "damping": report.damping}


WEIGHED: dict[str, Any] = {"point_weights": {"inside": Causal(0.3), "edge": WhereLarge()}, "momentum": 0.5}
RESIDUALS: dict[str, Callable[[], Any]] = {
    "residuals": lambda: solve_residuals(chain),
    "residuals by layers": lambda: solve_residuals(chain, written=0),
    "residuals of a net that is no chain": lambda: solve_residuals(build_scaled),
    "residuals with weighted points": lambda: solve_residuals(chain, **WEIGHED),
    "residuals by products": lambda: solve_residuals(chain, solver=ng.CG(rtol=1e-13, max_steps=400)),
}


def one_bad_point() -> list[str]:
    """A point where a term is not finite, on the last process alone."""
    net = build_seeded(chain)
    before = flat(net)
    opt = ng.residuals(net, {"inside": lambda u, x: u(x) * x[0].sqrt()}, group=everyone())
    bad = own_rank() == count_ranks() - 1
    found = []
    for points in (torch.full((2, 2), -1.0 if bad else 1.0).double(), "none" if bad else torch.ones(2, 2).double()):
        try:
            opt.step(inside=points)
        except (ValueError, TypeError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    assert torch.equal(flat(net), before)
    return found


# wave functions

CHAIN = ng.vmc.TransverseIsing(5)
STATES = CHAIN.space.all_states(torch.float64, torch.device("cpu"))[torch.arange(24) * 7 % 32]
WEIGHTS = draw(24, 1).square().reshape(-1)
ON_ONE = WEIGHTS * (torch.arange(24) < 7)  # the others' walkers have no probability


def amplitude(complex_valued: bool = False) -> ng.LogAmplitude:
    if not complex_valued:
        return ng.LogAmplitude(build_seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))))
    net = build_seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)))
    return ng.LogAmplitude(net, head=ng.vmc.read_phase)


def reconfigure(complex_valued: bool = False, weights: Tensor | None = None, **options: Any) -> dict[str, Any]:
    psi = amplitude(complex_valued)
    sr = ng.stochastic_reconfiguration(psi, lr=0.2, damping=1e-2, group=everyone(), **options)
    states = walkers(STATES)
    for _ in range(4):
        total = 1.0 if weights is None or distributed.is_initialized() else weights.sum()
        shares = None if weights is None else walkers(weights) / total
        sr.step(states, ng.vmc.local_energies(psi, CHAIN, states), shares)
    energies = [(e.mean, e.imaginary, e.variance) for e in sr.energies]
    return {"flat": flat(psi), "energies": sum(energies, ()), "kl": sr.state_report().kl}


def mix_dtypes() -> dict[str, Any]:
    """Local energies that are real or complex, of single or double precision, as each process has them."""
    psi = amplitude()
    sr, states = ng.stochastic_reconfiguration(psi, lr=0.2, damping=1e-2, group=everyone()), walkers(STATES)
    kind = (torch.float32, torch.complex128, torch.float64, torch.complex64)[own_rank()] if count_ranks() > 1 else F64
    for _ in range(4):
        sr.step(states, ng.vmc.local_energies(psi, CHAIN, states).float().to(kind))
    energies = [(e.mean, e.imaginary, e.variance) for e in sr.energies]
    return {"flat": flat(psi), "energies": sum(energies, ()), "kl": sr.state_report().kl}


def walkers(rows: Tensor) -> Tensor:
    """This process's walkers, unequal numbers of them; all where there is one."""
    edges = {1: [0, 24], 2: [0, 7, 24], 4: [0, 7, 12, 13, 24]}[count_ranks()]
    return rows[edges[own_rank()] : edges[own_rank() + 1]]


WAVES: dict[str, Callable[[], dict[str, Any]]] = {
    "walkers": reconfigure,
    "walkers in their own space": lambda: reconfigure(solver=ng.SampleSpace(), momentum=0.8, clip=1.0),
    "walkers of a complex psi": lambda: reconfigure(True),
    "walkers of a complex psi with weights": lambda: reconfigure(True, WEIGHTS),
    "walkers with weights on one process": lambda: reconfigure(weights=ON_ONE),
    "walkers with energies of several dtypes": mix_dtypes,
    "walkers and layers": lambda: reconfigure(structure=ng.Kronecker(estimate=ng.ExactLabels())),
}


def draw_walkers() -> dict[str, Any]:
    """The whole job with draws of each process's own, and what comes of equal seeds."""
    psi = amplitude()
    sr = ng.stochastic_reconfiguration(psi, lr=0.1, group=everyone())
    try:
        ng.vmc.GroundState(CHAIN, ng.vmc.ExactSampler(CHAIN.space, 50), sr).run(1)
        error = ""
    except ValueError as same:
        error = str(same)
    sampler = ng.vmc.ExactSampler(CHAIN.space, 50 + own_rank(), seed=own_rank())
    search = ng.vmc.GroundState(CHAIN, sampler, sr)
    found = search.run(9, callback=lambda _: own_rank() == 1 and len(sr.energies) == 6)
    return {"flat": flat(psi), "energies": [e.mean for e in found], "error": error, "samples": found[0].samples}


# policies


def build_agent(kind: Any, group: Any = None, **options: Any) -> Any:
    """An agent with two environments on the first process, and one on the others."""
    policy = build_seeded(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)))
    critic = build_seeded(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    worlds = [Walk(end=9) for _ in range(2 if own_rank() == 0 else 1)]
    return kind(policy, worlds, critic=critic, batch=80, critic_batch=16, critic_epochs=2, group=group, **options)


def learn_together(kind: Any = ng.TRPO, **options: Any) -> dict[str, Any]:
    """Two updates; then the same by one process that is given all transitions."""
    agent, batches, gaps = build_agent(kind, everyone(), **options), [], []
    collect, gather = agent._collect, agent.processes.gather_rows

    def keep() -> Rollout:
        found = collect()
        own = [getattr(found, field.name) for field in fields(found)]
        batches.append(Rollout(*(gather(one) if isinstance(one, Tensor) else one for one in own)))
        return found

    agent._collect = keep
    alone = build_agent(kind, **options)
    alone._collect = lambda: batches[-1]
    for _ in range(2):
        agent._update()
        alone._update()
        gaps.append(max(float((a - b).abs().max()) for a, b in zip(weights_of(agent), weights_of(alone), strict=True)))
    keys = ("steps", "episodes", "return", "kl", "gain", "entropy", "explained_variance", "critic_loss", "accepted")
    return {
        "gaps": gaps,
        "flat": torch.cat([p.reshape(-1) for p in weights_of(agent)]),
        "rows": [[found.history[key] for key in keys] for found in (agent, alone)],
        "seen": (agent.scale.moments.count, agent.reward_scale.moments.count, sum(len(one) for one in batches)),
        "scale": (agent.scale.moments.mean.tolist(), agent.reward_scale.moments.var.tolist()),
        "first": batches[0].states[0].tolist(),
    }


def weights_of(agent: Any) -> list[Tensor]:
    return [p.detach() for p in [*agent.policy.parameters(), *agent.critic.params]]


POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "TRPO": learn_together,
    "TRPO with some states": lambda: learn_together(metric_batch=30, solver=ng.Direct(), entropy_weight=0.01),
    "ACKTR": lambda: learn_together(acktr),
}


def one_fault() -> list[Any]:
    """An environment that fails on the last process; then a callback there that ends the training."""
    last = own_rank() == count_ranks() - 1
    net = build_seeded(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)))
    agent = ng.TRPO(net, Walk(end=9, fault="raise" if last else "", at=30), batch=20 * count_ranks(), group=everyone())
    agent.learn(1)
    before, errors = flat(net), []
    try:
        agent.learn(1)
    except Exception as error:  # noqa: BLE001 - whichever it is, it is looked at
        errors.append(f"{type(error).__name__}: {error}")
    assert torch.equal(flat(net), before)
    agent.learn(10_000, callback=lambda _: last)
    return [*errors, agent.updates]


SCENES: dict[str, Callable[[], Any]] = {
    **RESIDUALS,
    **WAVES,
    **POLICIES,
    "one fault": one_fault,
    "one bad point": one_bad_point,
    "own draws": draw_walkers,
}


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, request.param, tmp_path_factory)


@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals_over_points_on_processes_step_as_over_all_points(ranks: list[dict[str, Any]], name: str):
    alone = RESIDUALS[name]()
    for rank in ranks:
        assert torch.equal(rank[name]["flat"], ranks[0][name]["flat"])
        assert rank[name]["damping"] == ranks[0][name]["damping"]
    found = ranks[0][name]
    assert_close(found["flat"], alone["flat"], 1e-9)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert found["terms"] == pytest.approx(alone["terms"], rel=1e-9)
    assert alone["losses"][-1] < alone["losses"][0]


def test_a_residual_that_is_not_finite_on_one_process_is_an_error_on_all(ranks: list[dict[str, Any]]):
    *others, last = [rank["one bad point"] for rank in ranks]
    assert "term 'inside' is not finite" in last[0]
    assert "TypeError: inside is str" in last[1]
    for rank in others:
        assert f"NotFiniteError: process {len(others)} of {len(ranks)} met an error" in rank[0]
        assert f"RuntimeError: process {len(others)} of {len(ranks)} met an error" in rank[1]


@pytest.mark.parametrize("name", WAVES)
def test_walkers_on_processes_step_as_all_walkers(ranks: list[dict[str, Any]], name: str):
    alone = WAVES[name]()
    for rank in ranks:
        assert torch.equal(rank[name]["flat"], ranks[0][name]["flat"])
    found = ranks[0][name]
    assert_close(found["flat"], alone["flat"], 1e-9)
    assert found["energies"] == pytest.approx(alone["energies"], rel=1e-9, abs=1e-12)
    assert found["kl"] == pytest.approx(alone["kl"], rel=1e-7)


def test_processes_draw_walkers_of_their_own_and_end_together(ranks: list[dict[str, Any]]):
    for rank in ranks:
        found = rank["own draws"]
        assert "would draw the same walkers" in found["error"]
        assert torch.equal(found["flat"], ranks[0]["own draws"]["flat"])
        assert found["samples"] == sum(50 + one for one in range(len(ranks)))
        assert len(found["energies"]) == 6


@pytest.mark.parametrize("name", POLICIES)
def test_policies_over_environments_on_processes_step_as_over_all_transitions(ranks: list[dict[str, Any]], name: str):
    for rank in ranks:
        found = rank[name]
        # ten steps of CG and Adam's division by small moments enlarge round-off; ACKTR draws labels on each process
        assert max(found["gaps"]) < (1e-7 if name != "ACKTR" else math.inf)
        assert torch.equal(found["flat"], ranks[0][name]["flat"])
        assert found["scale"] == ranks[0][name]["scale"]
        assert found["rows"] == ranks[0][name]["rows"]
        for own, alone in zip(*found["rows"], strict=True) if name != "ACKTR" else ():
            assert own == pytest.approx(alone, rel=1e-5, nan_ok=True)
        steps = found["rows"][0][0][-1]
        assert found["seen"][1:] == (steps, steps)
        assert found["seen"][0] == steps + len(ranks) + 1  # and the first observation of each environment


def test_a_fault_of_one_environment_is_an_error_on_all_processes(ranks: list[dict[str, Any]]):
    *others, last = [rank["one fault"] for rank in ranks]
    assert "the simulator is gone" in last[0]
    assert last[1] == 2
    words = f"RuntimeError: process {len(others)} of {len(ranks)} met an error, which it reports itself"
    for rank in others:
        assert rank[0].startswith(words)
        assert rank[1:] == [2]
