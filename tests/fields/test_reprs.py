"""Objects show their choices, and histories are tables in a notebook."""

from __future__ import annotations

import torch

import natgrad
import natgrad as ng


def test_histories_are_tables():
    result = ng.minimize(lambda x: float((x * x).sum()), torch.ones(2), 0.5, maxfevals=60, seed=0)
    assert "<th>nfev</th>" in result.history._repr_html_()
    assert result.history._repr_html_().count("<tr>") == 1 + min(10, len(result.history))


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
