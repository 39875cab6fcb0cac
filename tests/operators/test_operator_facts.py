"""What an operator says of itself (nats, indefinite, inverse kept, counts) is known of whatever is made of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from models import F64, X3, assert_close, draw
from torch import nn

import natgrad as ng
from natgrad.ground.spaces import Space, trainable
from natgrad.metrics import Metric
from natgrad.operators import (
    Arranged,
    BlockOperator,
    Chunked,
    DenseOperator,
    Facts,
    Layout,
    Operator,
    Scaled,
    Shifted,
    Sum,
    Tiled,
    Units,
)
from natgrad.optim.joined import JoinedOperator
from natgrad.optim.processes import Processes
from natgrad.rules import FlatStep, Quadratic, SystemFacts

SIZE = 6


class Told(Operator):
    """An operator with every fact set to what is not the default."""

    facts = Facts(nats=3.0, indefinite=True, inverse_kept=True, counts={"seen": 7}, length_unit=2.0)

    def __init__(self) -> None:
        matrix = draw(SIZE, SIZE)
        self.matrix = matrix + matrix.mT
        self.size, self.dtype, self.device = SIZE, F64, self.matrix.device

    def mv(self, vector: torch.Tensor) -> torch.Tensor:
        return self.matrix @ vector

    def inverse(self, damping: float = 0.0) -> Operator:
        return self


def arrange_one(operator: Operator) -> Operator:
    return Arranged(Space({"a": torch.zeros(SIZE, dtype=F64)}), [(Layout("a", None, 1, 1, SIZE, (SIZE,)), operator)])


WRAPPERS: dict[type, Callable[[Operator], Operator]] = {
    Sum: lambda operator: operator + operator,
    Scaled: lambda operator: 2.0 * operator,
    Shifted: lambda operator: operator.shift(0.5),
    BlockOperator: lambda operator: BlockOperator([operator, operator]),
    Arranged: arrange_one,
    Tiled: lambda operator: Tiled(operator, (1, 1, 2, 3), (2, 3)),
    Chunked: lambda operator: Chunked([lambda: operator, lambda: operator]),
    JoinedOperator: lambda operator: JoinedOperator(
        operator, Space({"a": torch.zeros(SIZE, dtype=F64)}), [1.0], None, operator.facts, Processes()
    ),
}


def operators() -> set[type]:
    """Every operator class in the package."""
    for module in pkgutil.walk_packages(ng.__path__, "natgrad."):
        if module.name != "natgrad.applications":  # earlier names, which warn
            importlib.import_module(module.name)
    found, queue = set(), [Operator]
    while queue:
        kind = queue.pop()
        queue += kind.__subclasses__()
        found |= {kind} if kind.__module__.startswith("natgrad.") else set()
    return found


@pytest.mark.parametrize("kind", WRAPPERS, ids=lambda kind: kind.__name__)
def test_what_wraps_operators_keeps_their_facts(kind):
    operator = WRAPPERS[kind](Told())
    assert type(operator) is kind
    assert (operator.nats, operator.indefinite, dict(operator.counts)) == (3.0, True, {"seen": 7})
    assert operator.length_unit == 2.0
    assert operator.inverse_kept is (kind is not Sum)  # no sum of inverses is the inverse of a sum


@pytest.mark.parametrize("join", [lambda a, b: a + b, lambda a, b: BlockOperator([a, b])], ids=["Sum", "Block"])
def test_operators_in_different_units_are_not_joined(join):
    first, second = DenseOperator(torch.eye(3, dtype=F64)), DenseOperator(torch.eye(3, dtype=F64))
    second = second.declare(nats=4.0)
    with pytest.raises(ValueError, match=r"units of \[1.0, 4.0\] nats"):
        join(first, second)


# structures

STRUCTURES = [ng.Exact(), ng.Dense(0.5), ng.Blocks(), ng.Blocks(0.5)]


def newton(seed: int = 0) -> tuple[nn.Module, Metric, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, ng.hessian(model, nn.MSELoss()), (X3, 3 * draw(len(X3), 2, seed=seed))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_structures_keep_the_hessians_facts_and_its_numbers(structure):
    model, metric, data = newton()
    params = trainable(model)
    exact = metric.at(params, data)
    operator, memory = structure.update(None, metric, params, data)
    operator, _ = structure.update(memory, metric, params, data)
    assert operator.indefinite
    assert operator.nats == exact.nats
    assert operator.root() is None
    matrix, damping = operator.dense(), 0.1
    assert torch.linalg.eigvalsh(matrix)[0] < -1e-3  # else nothing is tested
    for block in Space(params).blocks.values():
        inside = slice(
            block.start, block.start + block.size // (block.shape[0] if "rows=True" in str(structure) else 1)
        )
        assert_close(matrix[inside, inside], exact.dense()[inside, inside])
    inverse, eye = operator.inverse(damping), torch.eye(len(matrix), dtype=F64)
    if inverse is not None:
        assert inverse.indefinite
        assert_close((matrix + damping * eye) @ inverse.dense(), eye, rtol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("solver", [None, ng.Direct(), ng.MinresQLP(rtol=1e-10)], ids=["auto", "direct", "minres"])
def test_newton_steps_solve_the_structures_own_system(structure, solver):
    model, metric, (x, y) = newton(1)
    opt = ng.NaturalGradient(model, metric, 0.1, structure=structure, solver=solver, damping=1e-3, rule=ng.Rate())
    before = Space(trainable(model)).flatten(trainable(model)).detach().clone()
    operator = structure.update(None, metric, trainable(model), (x, y))[0]
    matrix, level = operator.dense(), 1e-3 / operator.nats
    opt.loss(model(x), y).backward()
    gradient = Space(trainable(model)).flatten({n: p.grad for n, p in model.named_parameters()})
    opt.step()
    moved = Space(trainable(model)).flatten(trainable(model)).detach() - before
    assert_close(matrix @ moved + level * moved, -0.1 * gradient, rtol=1e-6)
    assert opt.state_report().failures == 0


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_indefinite_blocks_are_inverted_by_their_eigenvalues(damping):
    blocks = draw(4, 3, 3)
    blocks = blocks + blocks.mT
    blocks[2] = 0.0
    blocks[3] = torch.diag(torch.tensor([1.0, 0.0, -2.0]))
    found = Units(blocks, indefinite=True).inverse(damping).matrices
    shifted = blocks + damping * torch.eye(3, dtype=F64)
    assert_close(found, torch.linalg.pinv(shifted, hermitian=True), rtol=1e-9)
    assert_close(DenseOperator(blocks[0], indefinite=True).inverse(damping).matrix, found[0])


# the trust region

SIGNS = {"negative": [-1.0, -2.0, -3.0], "cancelling": [1.0, 1.0, -2.0], "mixed": [5.0, -1.0, 1e-9], "zero": [0.0] * 3}


@pytest.mark.parametrize("radius", [1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("signs", SIGNS)
def test_a_trust_region_bounds_the_absolute_curvature_whatever_its_sign(signs, radius):
    H, nats = torch.diag(torch.tensor(SIGNS[signs], dtype=F64)), 2.0
    for scale in (1e-3, 1.0, 1e4):
        d = scale * torch.ones(3, dtype=F64)
        model = Quadratic(
            d, DenseOperator(H, indefinite=True), 0.0, FlatStep(d, H @ d), nats, system=SystemFacts(indefinite=True)
        )
        step, _ = ng.TrustRegion(radius).step(model, None, {})
        moved = 0.5 * nats * float(step.vector @ H.abs() @ step.vector)
        assert moved <= radius * (1 + 1e-12)
        assert_close(step.image, H @ step.vector)
        reached = model.kl(model.proposal) > radius
        assert (model.kl(step) == pytest.approx(radius)) if reached else torch.equal(step.vector, d)


@pytest.mark.parametrize("outer", WRAPPERS, ids=lambda kind: kind.__name__)
def test_facts_go_through_two_wrappers(outer):
    for wrap in (WRAPPERS[Scaled], WRAPPERS[Shifted], arrange_one):
        operator = WRAPPERS[outer](wrap(Told()))
        assert (operator.nats, operator.indefinite) == (3.0, True)
