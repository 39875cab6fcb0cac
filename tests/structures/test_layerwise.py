"""Structures in one block per layer, each against its definition from the dense Fisher."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from layer_blocks import assert_blocks, operator_of, place
from models import CASES, F64, X3, assert_close, build_seeded, draw, mlp, reference_metric
from optim_models import CE, X, Y, flat, flat_gradient, net, same
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import Arranged, KroneckerOperator, Units
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


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_structures_pass_the_public_check(structure: ng.Structure):
    model = net()
    check_structure(structure, ng.fisher(model, ng.Categorical()), ng.trainable(model), draw(5, 3))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["sequence", "tied", "behind a layer's back", "conv2d", "batch norm, training"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_every_operator_is_sound(structure: ng.Structure, name: str):
    operator = operator_of(structure, name)[0]
    damped = operator.shift(0.1 * float(operator.mean_eigenvalue()))
    check_operator(damped, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", SEPARATE)
def test_the_diagonal_is_the_fisher_s(name: str):
    operator, dense, _ = operator_of(ng.Diagonal(estimate=EXACT), name)
    assert_close(operator.dense(), torch.diag(dense.diagonal()), 1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", SEPARATE)
def test_unit_blocks_are_the_fisher_s(name: str):
    operator, dense, _ = operator_of(ng.UnitWise(estimate=EXACT), name)
    for layout, part in operator.parts:
        where = place(operator, layout)
        expected = dense[where][:, where]
        if isinstance(part, Units):
            for i, block in enumerate(part.matrices):
                own = slice(i * len(block), (i + 1) * len(block))
                assert_close(block, expected[own, own], 1e-12, scale=dense.abs().max())
        else:  # a parameter without a layer
            assert_close(part.diagonal(), expected.diagonal(), 1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "sequence", "odd convolutions"])
def test_quasi_diagonal_blocks_share_the_fisher_s_diagonal(name: str):
    operator, dense, _ = operator_of(ng.UnitWise(estimate=EXACT, largest=0), name)
    assert_close(operator.diagonal(), dense.diagonal(), 1e-12)


@pytest.mark.parametrize("name", ["mlp, one example", "bits", "gaussian", "frozen"])
@pytest.mark.parametrize("build", [ng.Kronecker, ng.EigenKronecker])
def test_one_example_s_layer_blocks_are_exact(build: Any, name: str):
    case = CASES[name]
    model, params = case.make()
    one = dataclasses.replace(case, inputs=X3[:1])
    dense = reference_metric(one, model, params)
    operator, _ = build(estimate=EXACT).update(None, ng.fisher(model, case.family), params, one.inputs)
    assert_blocks(operator, dense)


class Mean(nn.Module):
    """The mean over positions, (b, t, d) -> (b, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@pytest.mark.parametrize("reduce", [False, True], ids=["expand", "reduce"])
@pytest.mark.parametrize("build", [ng.Kronecker, ng.EigenKronecker])
def test_shared_weights_of_a_deep_linear_net_are_exact(build: Any, reduce: bool):
    # derivatives do not depend on the inputs there: expand for a loss at every position, reduce for one on their mean
    layers = [nn.Linear(3, 4), nn.Linear(4, 2), *([Mean()] if reduce else [])]
    model = build_seeded(lambda: nn.Sequential(*layers))
    case = dataclasses.replace(CASES["gaussian"], inputs=draw(4, 5, 3))
    params = ng.trainable(model)
    structure = build(estimate=EXACT, reduce=reduce)
    operator, _ = structure.update(None, ng.fisher(model, case.family), params, case.inputs)
    assert_blocks(operator, reference_metric(case, model, params))


@pytest.mark.parametrize("name", ["mlp", "bits", "sequence", "conv1d", "conv2d", "linear over positions"])
def test_ekfac_is_never_further_from_the_fisher_than_kfac(name: str):
    distances = []
    for build in (ng.Kronecker, ng.EigenKronecker):
        operator, dense, _ = operator_of(build(estimate=EXACT), name)
        blocks = [dense[p][:, p] for p in (place(operator, layout) for layout, _ in operator.parts)]
        parts = zip(operator.parts, blocks, strict=True)
        distances.append(torch.stack([(part.dense() - block).norm() for (_, part), block in parts]))
    assert bool((distances[1] <= distances[0] * (1 + 1e-12) + 1e-15).all())
    assert bool((distances[1] < distances[0] * 0.999).any())


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


def test_sampled_labels_are_unbiased():
    model, params = CASES["mlp"].make()
    metric, draws = ng.fisher(model, ng.Categorical()), 400
    exact = metric.at(params, X3).diagonal()
    memory, found = None, []
    for _ in range(draws):
        operator, memory = ng.Diagonal(estimate=ng.Sampled(2)).update(memory, metric, params, X3)
        found.append(operator.diagonal())
    error = torch.stack(found).std(0) / draws**0.5
    assert bool(((torch.stack(found).mean(0) - exact).abs() <= 6 * error + 1e-12).all())
    assert not torch.equal(found[0], found[1])


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


@pytest.mark.parametrize("name", ["tied", "behind a layer's back", "bare parameter", "plain function", "not reached"])
def test_a_parameter_without_a_layer_gets_its_diagonal(name: str):
    expected = {
        "tied": {"encode.bias", "decode.bias"},
        "behind a layer's back": {"inner.bias"},
        "bare parameter": {"scale"},
        "plain function": {"w", "b"},
        "not reached": {"unused.weight", "unused.bias"},
    }
    operator, dense, _ = operator_of(ng.Kronecker(estimate=EXACT), name)
    single = [(layout, part) for layout, part in operator.parts if not isinstance(part, KroneckerOperator)]
    assert {name for layout, _ in single for name in layout.names} == expected[name]
    for layout, part in single:
        where = place(operator, layout)
        assert_close(part.dense(), torch.diag(dense.diagonal()[where]), 1e-12)


def test_many_row_gradients_are_replaced_by_combinations_with_random_signs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("natgrad.structures.metric_pass.LARGEST", 0)
    monkeypatch.setattr("natgrad.structures.metric_pass.PROBES", 4000)
    operator, dense, _ = operator_of(ng.Diagonal(estimate=EXACT), "plain function")
    # the square of a sum of independent signs has a relative standard deviation of at most sqrt(2)
    assert_close(operator.diagonal(), dense.diagonal(), 6 * 2**0.5 / 4000**0.5)


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s.decay == 0], ids=repr)
def test_the_optimizer_s_step_is_the_dense_formula(structure: ng.Structure):
    model = net()
    before, operator = flat(model), structure.update(None, ng.fisher(model, CE), ng.trainable(model), X)[0]
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=0.3, structure=structure, damping=0.05)
    opt.loss(model(X), Y).backward()
    gradient = flat_gradient(model)
    opt.step()
    unit = torch.eye(len(gradient), dtype=F64)
    expected = -0.3 * torch.linalg.solve(operator.dense() + 0.05 * unit, gradient)
    assert_close(flat(model) - before, expected, 1e-11)
    assert opt.state_report().status == "converged"


def test_the_scale_does_not_depend_on_batch_or_reduction():
    model = net()
    params = ng.trainable(model)

    def dense(criterion: nn.Module, x: Tensor) -> Tensor:
        return ng.Kronecker(estimate=EXACT).update(None, ng.fisher(model, criterion), params, x)[0].dense()

    expected = dense(CE, X)
    assert_close(dense(nn.CrossEntropyLoss(reduction="sum"), X), expected, 1e-13)
    assert_close(dense(CE, torch.cat([X, X])), expected, 1e-13)


def test_one_bad_batch_does_not_poison_the_averages():
    model = net()
    metric, params = ng.fisher(model, ng.Categorical()), ng.trainable(model)
    structure = ng.Kronecker(0.9, EXACT)
    good, memory = structure.update(None, metric, params, X)
    huge = 1e200 * X  # finite outputs after the tanh, infinite second moments
    operator, memory = structure.update(memory, metric, params, huge)
    assert torch.equal(operator.dense(), good.dense())
    assert all(t.isfinite().all() for total in memory["totals"].values() for t in total.values())
    again, _ = structure.update(memory, metric, params, X)
    assert_close(again.dense(), good.dense(), 1e-13)


def test_the_memory_starts_anew_when_the_parameters_change():
    model = net()
    metric, params = ng.fisher(model, ng.Categorical()), ng.trainable(model)
    fewer = {name: p for name, p in params.items() if name.startswith("0")}
    structure = ng.Kronecker(0.9, EXACT)
    _, memory = structure.update(None, metric, fewer, X)
    operator, _ = structure.update(memory, metric, params, X)
    expected, _ = structure.update(None, metric, params, X)
    assert_close(operator.dense(), expected.dense(), 1e-13)


def test_the_global_random_state_and_the_model_are_left_alone():
    model = net()
    before, kept = torch.get_rng_state(), flat(model)
    ng.Kronecker().update(None, ng.fisher(model, CE), ng.trainable(model), X)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(flat(model), kept)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_checkpoint_continues_bit_for_bit():
    def build() -> tuple[nn.Module, ng.NaturalGradient]:
        model = net()
        metric = ng.fisher(model, CE)
        return model, ng.NaturalGradient(model, metric, 0.1, structure=ng.EigenKronecker(0.9), damping=0.1)

    def steps(model: nn.Module, opt: ng.NaturalGradient, times: int) -> None:
        for _ in range(times):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            opt.step()

    model, opt = build()
    steps(model, opt, 2)
    twin, other = build()
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    steps(model, opt, 2)
    steps(twin, other, 2)
    assert torch.equal(flat(model), flat(twin))
    assert same(opt.state_dict(), other.state_dict())


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


def test_the_repr_is_what_was_written():
    assert repr(ng.Kronecker(0.95, reduce=True)).startswith("Kronecker(decay=0.95, estimate=Sampled(samples=1), seed=0")


def test_wide_nets_train_with_kronecker_factors():
    model, opt_losses = mlp(3, 16, 16, 3), []
    structure = ng.Kronecker(estimate=EXACT)  # eight examples are too few for one draw of the labels
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), 0.5, structure=structure, damping=0.1)
    for _ in range(15):
        opt.zero_grad()
        value = opt.loss(model(X), Y)
        value.backward()
        opt.step()
        opt_losses.append(float(value.detach()))
    assert opt_losses[-1] < 0.3 * opt_losses[0]


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


def test_misfit_is_the_share_off_the_diagonal():
    factor, other = (m @ m.mT for m in (draw(2, 5, 5), draw(2, 5, 5, seed=1)))
    vectors = torch.linalg.eigh(other)[1]
    turned = vectors.mT @ factor @ vectors
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    assert_close(misfit(factor, vectors), (off.norm(dim=(1, 2)) / factor.norm(dim=(1, 2))).max(), 1e-12)
