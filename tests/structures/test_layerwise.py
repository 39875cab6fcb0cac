"""Structures in one block per layer, each against its definition from the dense Fisher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_blocks import assert_units, operator_of, place
from models import CASES, F64, X3, assert_close, cross, draw
from optim_models import CE, X, Y, net
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import Arranged, KroneckerOperator
from natgrad.structures.kronecker import fits, misfit
from natgrad.testing import check_operator, check_structure

EXACT = ng.ExactLabels()
STRUCTURES = [
    ng.Kronecker(),
    ng.Kronecker(decay=0.9, estimate=EXACT),
    ng.Kronecker(decay=0.5, reduce=True),
    ng.EigenKronecker(),
    ng.EigenKronecker(decay=0.9),
    ng.Diagonal(decay=0.9),
    ng.UnitWise(),
    ng.UnitWise(decay=0.5, largest=2),
]
# the layers of a batch norm in training mode see all examples: their scores are those of the batch, cut up
SEPARATE = [name for name, case in CASES.items() if name != "batch norm, training"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_structures_pass_the_public_checks(structure: ng.Structure):
    model = net()
    check_structure(structure, ng.fisher(model, ng.Categorical()), ng.trainable(model), draw(5, 3))


NETS = "sequence", "tied", "behind a layer's back", "conv2d", "batch norm, training"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("structure", "name"), cross(STRUCTURES[:1], STRUCTURES[1:], NETS), ids=repr)
def test_their_operators_pass_the_public_checks(structure: ng.Structure, name: str):
    operator = operator_of(structure, name)[0]
    check_operator(operator.shift(0.1 * float(operator.mean_eigenvalue())), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", SEPARATE)
def test_unit_blocks_are_the_fisher_s(name: str):
    operator, dense, _ = operator_of(ng.UnitWise(estimate=EXACT), name)
    assert_units(operator, dense, 1e-12)


def test_factors_are_the_second_moments_of_inputs_and_derivatives():
    model, params = CASES["mlp"].make()
    operator, _ = ng.Kronecker(estimate=EXACT).update(None, ng.fisher(model, ng.Categorical()), params, X3)
    assert isinstance(operator, Arranged)
    hidden, logits = torch.tanh(model[0](X3)), model(X3)
    y = logits.softmax(1)
    form = torch.diag_embed(y) - y.unsqueeze(2) * y.unsqueeze(1)
    last = operator.parts[1][1]
    assert isinstance(last, KroneckerOperator)
    a = torch.cat([hidden, torch.ones(4, 1, dtype=F64)], dim=1)
    assert_close(last.left, form.mean(0).detach(), 1e-13)
    assert_close(last.right, (a.mT @ a / 4).detach(), 1e-13)
    back = (1 - hidden.square()).unsqueeze(2) * model[2].weight.mT  # (b, hidden, logits)
    first = operator.parts[0][1]
    assert isinstance(first, KroneckerOperator)
    assert_close(first.left, (back @ form @ back.mT).mean(0).detach(), 1e-13)


def test_random_signs_stand_for_labels_where_there_is_no_likelihood():
    model = net()
    metric, params = ng.empirical_fisher(model, CE), ng.trainable(model)
    operator, _ = ng.Diagonal().update(None, metric, params, (X, Y))
    assert_close(operator.diagonal(), metric.at(params, (X, Y)).diagonal(), 1e-13)  # one column: signs cancel


@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_running_averages_are_bias_corrected(decay: float):
    model = net()
    metric, params, memory = ng.fisher(model, ng.Categorical()), ng.trainable(model), None
    structure, factors = ng.Kronecker(decay, EXACT), []
    for t in range(4):
        x = draw(5, 3, seed=t)
        single, _ = ng.Kronecker(estimate=EXACT).update(None, metric, params, x)
        operator, memory = structure.update(memory, metric, params, x)
        factors.append([part for _, part in single.parts])
        weights = torch.tensor([decay ** (t - s) for s in range(t + 1)], dtype=F64)
        for i, (_, part) in enumerate(operator.parts):
            for side in ("left", "right"):
                each = torch.stack([getattr(parts[i], side) for parts in factors])
                assert_close(getattr(part, side), torch.einsum("s,sab->ab", weights / weights.sum(), each), 1e-13)


def test_the_corrected_eigenvalues_average_in_a_moving_basis():
    model = net()
    metric, params = ng.fisher(model, ng.Categorical()), ng.trainable(model)
    structure = ng.EigenKronecker(0.9, EXACT)
    first, memory = structure.update(None, metric, params, draw(5, 3))
    second, _ = structure.update(memory, metric, params, draw(5, 3))  # the same batch: nothing may change
    assert_close(second.dense(), first.dense(), 1e-10)
    # from another batch: the diagonal, in the new basis, of the mean of what was and what is
    other = draw(5, 3, seed=5)
    mixed, _ = structure.update(memory, metric, params, other)
    fresh = metric.at(params, other).dense()
    for (layout, part), (_, before) in zip(mixed.parts, first.parts, strict=True):
        where = place(mixed, layout)
        basis = torch.kron(*part.eigen.vectors())
        mean = (0.9 * before.dense() + fresh[where][:, where]) / 1.9
        assert_close(part.spectrum.reshape(-1), (basis.mT @ mean @ basis).diagonal(), 1e-10)


def test_one_bad_batch_does_not_poison_the_averages():
    model = net()
    metric, params, structure = ng.fisher(model, ng.Categorical()), ng.trainable(model), ng.Kronecker(0.9, EXACT)
    good, memory = structure.update(None, metric, params, X)
    # finite outputs after the tanh, infinite second moments
    operator, memory = structure.update(memory, metric, params, 1e200 * X)
    assert torch.equal(operator.dense(), good.dense())
    assert all(t.isfinite().all() for total in memory["totals"].values() for t in total.values())
    assert_close(structure.update(memory, metric, params, X)[0].dense(), good.dense(), 1e-13)


WITHOUT_A_LAYER = {
    "tied": {"encode.bias", "decode.bias"},
    "behind a layer's back": {"inner.bias"},
    "bare parameter": {"scale"},
    "plain function": {"w", "b"},
    "not reached": {"unused.weight", "unused.bias"},
}


@pytest.mark.parametrize(("name", "expected"), WITHOUT_A_LAYER.items())
def test_a_parameter_without_a_layer_gets_its_diagonal(name: str, expected: set[str]):
    operator, dense, _ = operator_of(ng.Kronecker(estimate=EXACT), name)
    single = [(layout, part) for layout, part in operator.parts if not isinstance(part, KroneckerOperator)]
    assert {name for layout, _ in single for name in layout.names} == expected
    for layout, part in single:
        where = place(operator, layout)
        assert_close(part.dense(), torch.diag(dense.diagonal()[where]), 1e-12)


def test_many_row_gradients_are_replaced_by_combinations_with_random_signs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("natgrad.structures.metric_pass.LARGEST", 0)
    monkeypatch.setattr("natgrad.structures.metric_pass.PROBES", 4000)
    operator, dense, _ = operator_of(ng.Diagonal(estimate=EXACT), "plain function")
    # the square of a sum of independent signs has a relative standard deviation of at most sqrt(2)
    assert_close(operator.diagonal(), dense.diagonal(), 6 * 2**0.5 / 4000**0.5)


BAD = {
    "decay of one": (lambda: ng.Kronecker(decay=1.0), ValueError, "decay is 1.0"),
    "an estimate by name": (lambda: ng.Diagonal(estimate="exact"), TypeError, "expected an estimate"),  # type: ignore[arg-type]
    "no samples": (lambda: ng.Sampled(0), ValueError, "samples is 0"),
    "chunks": (lambda: update(ng.fisher(net(), CE, chunk_size=2)), TypeError, "chunk_size=None"),
    "a plain loss": (lambda: update(ng.gauss_newton(net(), loss), (X, Y)), ValueError, "has no root"),
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def update(metric: Any, inputs: Any = X) -> Any:
    return ng.Kronecker().update(None, metric, ng.trainable(metric.model), inputs)


@pytest.mark.parametrize("case", BAD)
def test_errors_at_the_door(case: str):
    build, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        build()
    assert words in str(caught.value)


def test_eigenvectors_are_kept_while_they_fit():
    model = net()
    metric, params = ng.fisher(model, ng.Categorical()), ng.trainable(model)
    structure, fresh = ng.EigenKronecker(0.9, EXACT, stale=0.3), ng.EigenKronecker(0.9, EXACT)
    x = draw(50, 3)
    _, memory = structure.update(None, metric, params, x)
    _, later = structure.update(memory, metric, params, x + 0.01 * draw(50, 3, seed=1))
    _, far = structure.update(memory, metric, params, 30 * draw(50, 3, seed=2) * torch.tensor([3.0, 1.0, 0.1]))
    _, exact = fresh.update(memory, metric, params, x)
    for key, totals in memory["totals"].items():
        assert torch.equal(later["totals"][key]["right_vectors"], totals["right_vectors"])
        assert misfit(exact["totals"][key]["right"], exact["totals"][key]["right_vectors"]) < 1e-6  # a root of eps
    first = "0.weight 0.bias"
    assert not torch.equal(far["totals"][first]["right_vectors"], memory["totals"][first]["right_vectors"])
    with pytest.raises(ValueError, match="stale is 1"):
        ng.EigenKronecker(stale=1.0)


def test_some_eigenvectors_bound_the_misfit_from_above():
    factor = draw(3, 16, 16) @ torch.diag(torch.logspace(-3, 0, 16).to(F64))
    factor = factor @ factor.mT
    vectors = torch.linalg.eigh(factor + 0.01 * draw(16, 16, seed=5))[1]
    whole = float(misfit(factor, vectors))
    assert whole <= float(misfit(factor, vectors[..., -2:])) < 1
    for stale in (0.5 * whole, 0.99 * whole, 1.01 * whole, 0.9):
        assert fits(factor, vectors, stale) == (whole <= stale)


@pytest.mark.parametrize("structure", [ng.Kronecker(0.0, ng.ExactLabels()), ng.EigenKronecker(0.0, ng.ExactLabels())])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64), label_smoothing=0.2),
    ],
    ids=["ignored", "weights", "weights, smoothed"],
)
def test_a_product_is_the_metric_where_rows_differ_in_weight_alone(structure: ng.Structure, loss: nn.Module):
    model = nn.Linear(4, 3).double()
    nn.init.zeros_(model.weight)  # all rows have the same probabilities
    metric, params = ng.gauss_newton(model, loss), ng.trainable(model)
    data = draw(9, 4), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 0])
    operator, _ = structure.update(None, metric, params, data)
    assert_close(operator.dense(), metric.at(params, data).dense(), 1e-12)
