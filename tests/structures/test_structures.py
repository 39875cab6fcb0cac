"""How a metric is remembered between steps."""

from __future__ import annotations

import io

import pytest
import torch
from models import CASES, Case, assert_close, draw
from optim_models import CE, X, Y, deep, iterate, net, same
from torch import nn

import natgrad as ng
from natgrad.testing import check_structure

STRUCTURES = [ng.Exact(), ng.Dense(), ng.Dense(decay=0.9)]
BATCHES = [draw(5, 3, seed=seed) for seed in range(4)]


def fix_case() -> tuple[nn.Module, ng.Metric]:
    model = net()
    return model, ng.fisher(model, ng.Categorical())


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_structures_pass_the_public_check(structure: ng.Structure) -> None:
    model, metric = fix_case()
    check_structure(structure, metric, ng.trainable(model), BATCHES[0])


@pytest.mark.parametrize("name", ["mlp", "tied", "frozen", "in-place rectifier", "batch norm, training", "dropout"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_the_first_operator_is_the_metric(structure: ng.Structure, name: str) -> None:
    case: Case = CASES[name]
    model, params = case.make()
    metric, random = ng.fisher(model, case.family), torch.get_rng_state()
    operator, _ = structure.update(None, metric, params, case.inputs)
    torch.set_rng_state(random)
    assert_close(operator.dense(), metric.at(params, case.inputs).dense(), 1e-13)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_dense_is_the_bias_corrected_running_average(decay: float) -> None:
    model, metric = fix_case()
    params, memory, structure = ng.trainable(model), None, ng.Dense(decay)
    matrices = []
    for t, x in enumerate(BATCHES):
        matrices.append(metric.at(params, x).dense())
        operator, memory = structure.update(memory, metric, params, x)
        weights = torch.tensor([decay ** (t - s) for s in range(t + 1)], dtype=torch.float64)
        expected = torch.einsum("s,sab->ab", weights / weights.sum(), torch.stack(matrices))
        assert_close(operator.dense(), expected, 1e-13)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_the_memory_passed_in_is_not_changed_and_is_plain(structure: ng.Structure) -> None:
    model, metric = fix_case()
    params = ng.trainable(model)
    _, memory = structure.update(None, metric, params, BATCHES[0])
    kept = deep(memory)
    first, _ = structure.update(memory, metric, params, BATCHES[1])
    assert same(memory, kept)
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    second, _ = structure.update(torch.load(file, weights_only=True), metric, params, BATCHES[1])
    assert torch.equal(first.dense(), second.dense())


def test_dense_starts_anew_when_the_parameters_change() -> None:
    model, metric = fix_case()
    params, structure = ng.trainable(model), ng.Dense(0.9)
    fewer = {name: p for name, p in params.items() if name.startswith("0")}
    _, memory = structure.update(None, metric, fewer, BATCHES[0])
    operator, _ = structure.update(memory, metric, params, BATCHES[1])
    assert_close(operator.dense(), metric.at(params, BATCHES[1]).dense(), 1e-13)


def test_dense_memory_belongs_to_its_parameters() -> None:
    # two heads of one size, reached by the loss in turn: neither is preconditioned with the other's matrix
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).double()
    params = ng.trainable(model)
    by_head = {h: {name: p for name, p in params.items() if name.startswith(h)} for h in "ab"}

    def both(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return sum(x * i @ values[f"{h}.weight"].T for i, h in enumerate("ab", 1) if f"{h}.weight" in values)

    metric, structure = ng.fisher(both, ng.Categorical()), ng.Dense(0.9)
    _, memory = structure.update(None, metric, by_head["a"], X)
    operator, _ = structure.update(memory, metric, by_head["b"], X)
    assert_close(operator.dense(), metric.at(by_head["b"], X).dense(), 1e-13)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_decay_is_checked(decay: float) -> None:
    with pytest.raises(ValueError, match=f"decay is {decay}, expected a number in"):
        ng.Dense(decay)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_the_report_lists_every_parameter_with_its_structure_and_memory(structure: ng.Structure) -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=0.1, structure=structure, rule=ng.Momentum())
    iterate(opt, model, X, Y)
    n = sum(p.numel() for p in model.parameters())
    rows = opt.report()
    assert [row.parameter for row in rows] == [name for name, _ in model.named_parameters()]
    assert [row.size for row in rows] == [p.numel() for p in model.parameters()]
    assert {row.structure for row in rows} == {type(structure).__name__}
    matrix = n * n if structure == ng.Dense(0.9) else 0
    assert sum(row.memory for row in rows) == n + matrix  # the velocity, and the average
    assert str(rows).splitlines()[0].split() == ["parameter", "structure", "size", "memory"]
