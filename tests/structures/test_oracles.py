"""K-FAC and EKFAC against independent numbers: a prototype's (tests/vectors/kfac.json) and curvlinops'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import F64, Assembled, assert_close, build_seeded, draw, mlp
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import Arranged, KroneckerOperator

EXACT = ng.ExactLabels()
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "kfac.json").read_text(encoding="utf-8"))


def vector(name: str) -> Tensor:
    return torch.tensor(VECTORS[name], dtype=F64)


def block_of(structure: ng.Structure) -> Any:
    """The block of one linear layer before a softmax, on [W, b]."""
    model = nn.Linear(4, 3).double()
    model.weight.data, model.bias.data = vector("W"), vector("b")
    metric = ng.fisher(model, nn.CrossEntropyLoss())
    operator, _ = structure.update(None, metric, ng.trainable(model), vector("x"))
    assert isinstance(operator, Arranged)
    return operator.parts[0][1]


def test_factors_of_a_linear_softmax_layer():
    block = block_of(ng.Kronecker(estimate=EXACT))
    assert isinstance(block, KroneckerOperator)
    assert_close(block.right, vector("A"), 1e-14)
    assert_close(block.left, vector("G"), 1e-14)


STRUCTURES = {
    "precond_factored": ng.Kronecker(estimate=EXACT, factored=True),
    "precond_exact": ng.Kronecker(estimate=EXACT),
    "precond_ekfac": ng.EigenKronecker(estimate=EXACT),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_damped_steps_of_a_linear_softmax_layer(name: str):
    inverse = block_of(STRUCTURES[name]).inverse(VECTORS["damping"])
    assert_close(inverse.mv(vector("grad").reshape(-1)).view(3, 5), vector(name), 1e-11)


# curvlinops


# enough examples for factors of full rank: in a null space the eigenbasis, and so EKFAC, is not unique
IMAGES, SEQUENCES = draw(12, 2, 4, 4), draw(4, 5, 3)


def build_images() -> nn.Module:
    return build_seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)))


def build_sequences() -> nn.Module:
    run = lambda m, x: m.out(m.inner(x).tanh().mean(1))  # noqa: E731
    return build_seeded(lambda: Assembled(run, inner=nn.Linear(3, 4), out=nn.Linear(4, 3)))


CASES: dict[str, tuple[Any, Tensor, bool]] = {
    "mlp": (lambda: mlp(3, 4, 3), draw(6, 3), False),
    "convolution": (build_images, IMAGES, False),
    "convolution, reduce": (build_images, IMAGES, True),
    "sequence": (build_sequences, SEQUENCES, False),
    "sequence, reduce": (build_sequences, SEQUENCES, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("corrected", [False, True], ids=["kfac", "ekfac"])
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=["cross-entropy", "squares"])
@pytest.mark.parametrize("name", CASES)
def test_curvlinops_has_the_same_blocks(name: str, criterion: nn.Module, corrected: bool):
    curvlinops = pytest.importorskip("curvlinops")
    build, x, reduce = CASES[name]
    model = build()
    targets: Tensor = torch.arange(len(x)) % 3 if isinstance(criterion, nn.CrossEntropyLoss) else draw(len(x), 3)
    peer = curvlinops.EKFACLinearOperator if corrected else curvlinops.KFACLinearOperator
    expected = peer(
        model,
        criterion,
        list(model.parameters()),
        [(x, targets)],
        fisher_type=curvlinops.FisherType.TYPE2,
        kfac_approx=curvlinops.KFACType.REDUCE if reduce else curvlinops.KFACType.EXPAND,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    kind = ng.EigenKronecker if corrected else ng.Kronecker
    metric = ng.fisher(model, criterion)
    operator, _ = kind(estimate=EXACT, reduce=reduce).update(None, metric, ng.trainable(model), x)
    unit = torch.eye(operator.size, dtype=F64)
    assert_close(operator.dense(), expected @ unit, 1e-9)
