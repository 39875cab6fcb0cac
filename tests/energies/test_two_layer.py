"""The two-layer model: closed forms against derivatives of log p and against reference vectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor

import natgrad as ng
from natgrad.energies import TwoLayer
from natgrad.ground.spaces import Params, Positive, Square

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "scores.json").read_text(encoding="utf-8"))
LINKS = [ng.positive, Square()]


def model(*batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Three features of two variables, pooled by four."""
    return {"W": draw(*batch, 3, 2), "V": 0.5 * draw(*batch, 4, 3, seed=1)}, draw(*batch, 5, 2, seed=2)


@pytest.mark.parametrize("link", LINKS, ids=repr)
def test_closed_forms_are_the_derivatives_of_log_p(link: Positive | Square) -> None:
    density, (params, x) = TwoLayer(link), model()

    def log_p(params: Params, x: Tensor) -> Tensor:
        return density.log_p(params, x)

    given = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = ng.score_matching_loss(log_p, given, x)  # a plain function: derivatives are taken automatically
    by_graph = dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))
    assert_close(density.loss(params, x), loss.detach(), 1e-12)
    for name, gradient in density.gradient(params, x).items():
        assert_close(gradient, by_graph[name], 1e-12)
    assert_close(density.log_p(params, x[0]), density.log_p(params, x)[0], 1e-14)
    closed = ng.score_matching_loss(density, given, x)
    assert_close(closed.detach(), loss.detach(), 1e-12)
    expected = ng.score_metric(log_p).at(given, x).dense()
    found = ng.score_metric(density).at(given, x)
    assert isinstance(found, ng.operators.LowRankOperator)
    assert_close(found.dense(), expected.detach(), 1e-12)


@pytest.mark.parametrize("order", [("W", "V"), ("V", "W")])
def test_the_jacobian_follows_the_order_of_the_parameters(order: tuple[str, str]) -> None:
    params, x = model()
    given = {name: params[name] for name in order}
    found = TwoLayer().score_jacobian(given, x)
    space = ng.Space(given)

    def scores(vector: Tensor) -> Tensor:
        return TwoLayer().scores(space.unflatten(vector), x)

    assert_close(found, torch.func.jacrev(scores)(space.flatten(given)), 1e-12)


def test_models_side_by_side_are_the_models_alone() -> None:
    params, x = model(3)
    density = TwoLayer()
    together = density.loss(params, x), density.gradient(params, x), density.score_jacobian(params, x)
    for i in range(3):
        alone = {name: p[i] for name, p in params.items()}
        assert_close(together[0][i], density.loss(alone, x[i]), 1e-13)
        assert_close(together[1]["V"][i], density.gradient(alone, x[i])["V"], 1e-12)
        assert_close(together[1]["W"][i], density.gradient(alone, x[i])["W"], 1e-12)
        assert_close(together[2][i], density.score_jacobian(alone, x[i]), 1e-12)


@pytest.mark.parametrize("name", ["score_matching_n3", "score_matching_n8"])
def test_reference_vectors(name: str) -> None:
    """V^(1/2) through the square is V; the vectors' gradients are those in V itself."""
    given = {key: torch.tensor(value, dtype=F64) for key, value in VECTORS[name]["inputs"].items()}
    expected = {key: torch.tensor(value, dtype=F64) for key, value in VECTORS[name]["expected"].items()}
    params, density = {"W": given["W"], "V": Square().inverse(given["V"])}, TwoLayer(Square())
    slope = Square().slope(params["V"])
    for i, x in enumerate(given["X"].unsqueeze(1)):
        assert_close(density.loss(params, x), expected["l"][i], 1e-12)
        assert_close(density.scores(params, x)[0], expected["score"][i], 1e-12)
        gradient = density.gradient(params, x)
        assert_close(
            torch.cat([gradient["W"].flatten(), (gradient["V"] / slope).flatten()]), expected["grad"][i], 1e-12
        )
    root = density.score_jacobian(params, given["X"]) / torch.cat([torch.ones_like(slope), slope]).flatten()
    metric = torch.einsum("bik,bil->kl", root, root) / len(root)
    if "metric" in expected:
        assert_close(metric, expected["metric"], 1e-12)
    else:
        assert_close(metric.diagonal(), expected["metric_diag"], 1e-12)
        assert_close(metric.norm(), expected["metric_fro"], 1e-12)


@pytest.mark.parametrize("link", LINKS, ids=repr)
def test_links_have_an_inverse_and_their_slope(link: Positive | Square) -> None:
    raw = draw(3, 4).abs() + 0.1
    assert_close(link.inverse(link(raw)), raw, 1e-13)
    at = raw.clone().requires_grad_()
    (slope,) = torch.autograd.grad(link(at).sum(), at)
    assert_close(link.slope(raw), slope, 1e-14)
