"""Low-rank structures by layer: Kaldi's online factors and TONGA's covariance, against their dense definitions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import blocks_of, metric_of
from layer_blocks import operator_of, place
from models import CASES, F64, assert_close, draw, mlp, pair
from optim_models import CE, X, Y, flat, flat_gradient, iterate, net

import natgrad as ng
from natgrad.operators import KroneckerOperator, Spiked, SpikedKronecker, Spikes
from natgrad.structures.low_rank_covariance import leading, spike_values
from natgrad.testing import check_operator, check_structure

EXACT = ng.ExactLabels()
STRUCTURES = [
    ng.OnlineLowRank(),
    ng.OnlineLowRank(decay=0.9, rank_in=2, rank_out=1),
    ng.OnlineLowRank(decay=0.5, gradient=True),
    ng.LowRankCovariance(),
    ng.LowRankCovariance(decay=0.9, rank=3),
]


# operators


def spikes(size: int, rank: int, groups: tuple[int, ...] = (), seed: int = 0) -> Spikes:
    vectors = torch.linalg.qr(draw(*groups, size, rank, seed=seed))[0]
    return Spikes(vectors, 0.1 + draw(*groups, rank + 1, seed=seed + 1).square())


OPERATORS: dict[str, Callable[[], ng.Operator]] = {
    "both sides": lambda: SpikedKronecker(spikes(5, 2), spikes(6, 3)),
    "groups": lambda: SpikedKronecker(spikes(5, 2, (3,)), spikes(4, 1, (3,))),
    "a side of one entry": lambda: SpikedKronecker(spikes(1, 0), spikes(6, 3)),
    "two sides of one entry": lambda: SpikedKronecker(spikes(1, 0), spikes(1, 0)),
    "one side": lambda: Spiked(spikes(7, 3).vectors, torch.zeros(1, 0, dtype=F64), draw(4, 1).square()),
    "nothing": lambda: Spiked(draw(4, 0), draw(1, 0), torch.zeros(1, 1, dtype=F64)),
    "inverse": lambda: SpikedKronecker(spikes(5, 2), spikes(6, 3)).inverse(0.1),
    "factored inverse": lambda: SpikedKronecker(spikes(5, 2), spikes(6, 3), factored=True).inverse(0.1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_sound(name: str):
    check_operator(OPERATORS[name]())
    with pytest.raises(ValueError, match=r"spectrum has shape \(2, 2\), expected \(3, 2\)"):
        Spiked(draw(5, 2), draw(4, 1), torch.ones(2, 2, dtype=F64))


def test_factored_damping_is_kfac_s_and_the_smoothing_of_the_online_natural_gradient():
    left, right, alpha = spikes(5, 2), spikes(6, 3, seed=4), 4.0
    operator = SpikedKronecker(left, right, factored=True)
    level = alpha**2 * float(operator.mean_eigenvalue())
    found = operator.inverse(level).dense()
    kfac = KroneckerOperator(left.dense(), right.dense(), factored=True)
    assert_close(found, kfac.inverse(level).dense(), 1e-12)
    sides = [f.dense() + alpha * f.mean() * torch.eye(len(f.vectors), dtype=F64) for f in (left, right)]
    assert_close(found, torch.linalg.inv(torch.kron(*sides)), 1e-12)


# both structures


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("structure", "name"), pair(STRUCTURES, ["sequence", "tied", "batch norm, training", "frozen"]), ids=repr
)
def test_structures_pass_the_public_checks(structure: ng.Structure, name: str):
    model = net()
    check_structure(structure, ng.fisher(model, ng.Categorical()), ng.trainable(model), draw(5, 3))
    operator = operator_of(structure, name)[0]
    check_operator(operator.shift(0.1 * float(operator.mean_eigenvalue())), rtol=1e-8)


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if not s.decay], ids=repr)
def test_the_optimizer_s_step_is_the_dense_formula(structure: Any):
    model, before = net(), flat(net())
    structure = dataclasses.replace(structure, estimate=EXACT)
    operator, _ = structure.update(None, ng.fisher(model, CE), ng.trainable(model), X)
    opt = ng.StructuredNaturalGradient(model, CE, structure, 0.3, damping=0.2, kl_share=math.inf, measure=False)
    opt.loss(model(X), Y).backward()
    gradient = flat_gradient(model)
    opt.step()
    expected = torch.zeros_like(before)
    for layout, part in operator.parts:
        where, matrix = place(operator, layout), part.dense()
        level = 0.2 * part.mean_eigenvalue()
        expected[where] = -0.3 * torch.linalg.solve(matrix + level * torch.eye(len(matrix), dtype=F64), gradient[where])
    assert_close(flat(model) - before, expected, 1e-9)


# online factors


def test_factors_of_few_examples_are_kfac_s():
    """Three examples and one draw of the labels: rank 3 on both sides, which the ranks 7 and 5 hold."""
    model, x = mlp(12, 9), draw(3, 12)
    metric, params = ng.fisher(model, ng.Categorical()), ng.trainable(model)
    found, _ = ng.OnlineLowRank().update(None, metric, params, x)
    expected, _ = ng.Kronecker().update(None, metric, params, x)
    assert_close(found.dense(), expected.dense(), 2e-3)  # directions that no example has are floored
    exact = ng.OnlineLowRank(rank_in=3, rank_out=3).update(None, metric, params, x)[0]
    assert_close(exact.dense(), expected.dense(), 1e-12)


def test_norms_get_exact_blocks_and_embeddings_the_diagonal():
    model = CASES["sequence"].make()[0]
    opt = ng.online_ng(model, CE)
    assert {row.structure for row in opt.report()} == {"not read yet"}
    tokens = CASES["sequence"].inputs
    opt.loss(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    kinds = {row.parameter: row.structure for row in opt.report()}
    assert kinds["embedding.weight"] == "Diagonal"
    assert kinds["norm.weight"] == kinds["norm.bias"] == "UnitWise"
    assert kinds["out.weight"] == kinds["hidden.bias"] == "OnlineLowRank"
    unit, _, _ = operator_of(ng.UnitWise(estimate=EXACT), "sequence")
    found, _, _ = operator_of(ng.OnlineLowRank(estimate=EXACT), "sequence")
    by_name = {layout.names: part for layout, part in unit.parts}
    for layout, part in found.parts:
        if layout.names == ("norm.weight", "norm.bias"):
            assert_close(part.dense(), by_name[layout.names].dense(), 1e-13)


# covariance


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["mlp", "conv2d", "odd convolutions", "group norm", "sequence", "attention"])
def test_the_covariance_is_exact_where_the_rank_suffices(name: str):
    operator, dense, _ = operator_of(ng.LowRankCovariance(estimate=EXACT, rank=200), name)
    for layout, part in operator.parts:
        if isinstance(part, Spiked):
            where = place(operator, layout)
            assert_close(part.dense(), dense[where][:, where], 1e-11, scale=dense.abs().max())


def test_in_the_optimizer_it_is_the_second_moment_of_the_data_s_gradients():
    model = net()
    opt = ng.tonga(model, CE, rank=100, decay=0.9, lr=0.0, update_every=1)
    params, expected = ng.trainable(model), torch.zeros(31, 31, dtype=F64)
    for shift in range(3):
        y = (Y + shift) % 3
        iterate(opt, model, X, y)
        expected = 0.9 * expected + ng.covariance(model, CE).at(params, (X, y)).dense()
    expected /= 1 + 0.9 + 0.81
    places = ng.Space(params).unflatten(torch.arange(31.0).double())
    for block in blocks_of(opt):
        order = block.layout.join({name: places[name] for name in block.layout.names}).reshape(-1).long()
        assert_close(metric_of(opt, block).dense(), expected[order][:, order], 1e-12)


def test_the_leading_directions_are_the_best_of_their_rank():
    rows = draw(12, 30) * torch.logspace(0, -2, 30, dtype=F64)
    values, vectors = leading(rows, 5)
    every, basis = torch.linalg.eigh(rows.mT @ rows)
    expected = (basis[:, -5:] * every[-5:]) @ basis[:, -5:].mT
    assert_close(values, every[-5:].flip(0), 1e-12)
    assert_close(vectors @ vectors.mT, torch.eye(5, dtype=F64), 1e-12)
    assert_close((vectors.mT * values) @ vectors, expected, 1e-12)
    # the rest counts as much as the last
    beside = torch.eye(30, dtype=F64) - basis[:, -5:] @ basis[:, -5:].mT
    assert_close(spike_values(values, vectors, 5).dense(), expected + every[-5] * beside, 1e-12)
    # and not at all while there are fewer directions than there may be
    assert_close(spike_values(*leading(rows[:4], 5), 5).dense(), rows[:4].mT @ rows[:4], 1e-12)
