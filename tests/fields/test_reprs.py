"""Objects show their choices, and histories are tables in a notebook."""

from __future__ import annotations

import pytest
import torch

import natgrad
import natgrad as ng


def test_machines_show_their_choices():
    machine = ng.HelmholtzMachine([4, 3, 2])
    for trainer in (ng.WakeSleep(machine, lr=0.2, samples=7), ng.NaturalWakeSleep(machine, lr=0.2, samples=7)):
        trainer.step(torch.ones(2, 4))
        text = repr(trainer)
        assert text.startswith(f"{type(trainer).__name__}(sizes=")
        assert "lr=0.2, samples=7, algorithm=Reweighted(" in text
        assert text.endswith("steps=1)")


def test_searches_show_their_model_and_how_far_they_are():
    search = ng.GaussianSearch(torch.zeros(3), 1.0, seed=0)
    X = search.ask()
    search.tell(X, X.square().sum(1))
    text = repr(search)
    assert text.startswith(f"GaussianSearch(d=3, popsize={len(X)}, model=Full(")
    assert f"nfev={len(X)}, best=" in text
    assert repr(ng.BernoulliSearch(4)).startswith("BernoulliSearch(d=4, popsize=")


def test_variational_shows_its_choices_and_calls_back():
    q, seen = ng.variational(lambda z: -0.5 * (z - 3).square().sum(-1), start=2, lr=0.3), []
    q.fit(callback=lambda q: seen.append(q.steps) or len(seen) == 3)
    assert seen == [1, 2, 3]
    assert repr(q) == "Variational(d=2, target=DensityTarget, diagonal=False, lr=0.3, steps=3)"


def test_histories_are_tables():
    result = ng.minimize(lambda x: float((x * x).sum()), torch.ones(2), 0.5, maxfevals=60, seed=0)
    assert "<th>nfev</th>" in result.history._repr_html_()
    assert result.history._repr_html_().count("<tr>") == 1 + min(10, len(result.history))


def test_machines_show_their_layers():
    text = repr(ng.HelmholtzMachine([4, 3, 2], autoregressive=True))
    assert "sizes=[4, 3, 2], units=(0, 1), autoregressive=True" in text
    assert "Conditional(parents=3, size=4, autoregressive=True)" in text


def test_policies_show_their_choices_and_how_far_they_are():
    pytest.importorskip("gymnasium")
    agent = ng.TRPO(None, "CartPole-v1", radius=0.02, batch=16)
    agent.learn(32)
    text = repr(agent)
    assert text.startswith("TRPO(policy=Sequential, head=DiscreteHead(")
    assert "radius=0.02, backtracks=10, environments=1, batch=16, solver=CG(" in text
    assert text.endswith("steps=32, updates=2)")
    assert "lr=0.5, environments=1" in repr(ng.NaturalPolicyGradient(None, "CartPole-v1", lr=0.5))


def test_ground_states_show_their_parts():
    h = ng.vmc.TransverseIsing(3)
    sr = ng.stochastic_reconfiguration(ng.LogAmplitude(ng.vmc.RBM(3)), lr=0.1)
    text = repr(ng.vmc.GroundState(h, ng.vmc.Metropolis(h.space, samples=20), sr))
    assert text.startswith(f"GroundState(hamiltonian={h!r}, sampler=Metropolis(space={h.space!r}, samples=20, chains=")
    assert "optimizer=StochasticReconfiguration(psi=RBM, lr=0.1, structure=Exact()" in text


def test_what_metrics_and_searches_are_made_of_has_no_address():
    net = torch.nn.Linear(2, 1)
    metric = ng.score_metric(lambda params, x: -(params["w"] * x * x).sum())
    pull = ng.fisher(net, ng.Gaussian()).at(ng.trainable(net), torch.ones(3, 2))
    assert isinstance(pull, ng.operators.Pullback)
    shown = {
        "ScoreMetric(density=Plain(function=<lambda>), log_p=<lambda>, generator=Generator(cpu))": metric,
        "Energy(module=Linear)": natgrad.ground.densities.as_density(net),
        "Linearization(size=3, outputs=(3, 1), products=0)": pull.linearization,
        "Rows(size=3, rank=3, examples=3)": pull.rows,
        "PureModel(model=Linear, inputs=[(3, 2)])": natgrad.ground.pure.pure_model(net, torch.ones(3, 2)),
        "Repeated(f=<lambda>, handling=NoiseHandling(": ng.search.Repeated(lambda X: X.sum(1)),
        "Periodic(periods={0: 2.0}, harmonics=1)": ng.residuals.Periodic({0: 2.0}),
        "HardConstraint(\n  distance=<lambda>\n  (net): ": ng.residuals.HardConstraint(net, lambda x: x),
    }
    for text, thing in shown.items():
        assert repr(thing).startswith(text)
        assert " at 0x" not in repr(thing)
