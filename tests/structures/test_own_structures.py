"""A structure of a user's own, made of operators of their own, in the drop-in optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import F64, assert_close, draw, mlp
from optim_models import flat, pass_through_file, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.exchanges import Sums
from natgrad.layers import Layer, Seen
from natgrad.operators import Operator, Scaled, pack_operator, unpack_operator
from natgrad.structures import Layerwise, Statistics, hear_metric


class OwnMatrix(Operator):
    """A block as a matrix and a number that is kept beside it."""

    state = ("matrix", "scale")

    def __init__(self, matrix: Tensor, scale: float = 1.0) -> None:
        self.matrix, self.scale = matrix, scale
        self.size, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.scale * (self.matrix @ vector)

    def inverse(self, damping: float = 0.0) -> Operator:
        eye = torch.eye(self.size, dtype=self.dtype)
        return OwnMatrix(torch.linalg.inv(self.scale * self.matrix + damping * eye), 1.0)


class Forgetful(OwnMatrix):
    """One that says nothing of what it is made of."""

    state = None

    def inverse(self, damping: float = 0.0) -> Operator:
        return self


class Stubborn(OwnMatrix):
    """One without an inverse."""

    def inverse(self, damping: float = 0.0) -> None:  # type: ignore[override]
        return None


@dataclass(frozen=True)
class OwnKronecker(Layerwise):
    """K-FAC's blocks, written out."""

    kind_of_block: Any = OwnMatrix

    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        return ng.Kronecker().statistics(seen, before, decay)

    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        return self.kind_of_block(ng.Kronecker().operator(layer, totals, weight).dense() / 2, 2.0)


def build_own(structure: Layerwise) -> tuple[nn.Module, Any]:
    model = mlp(3, 4, 3)
    return model, ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), structure, lr=0.1)


def test_blocks_of_ones_own_step_as_natgrads_do_and_come_back_from_a_checkpoint():
    (own, opt), (known, other) = build_own(OwnKronecker(0.9)), build_own(ng.Kronecker(0.9))
    train(opt, own, 3)
    saved = pass_through_file({"model": own.state_dict(), "opt": opt.state_dict()})
    train(opt, own, 2)
    train(other, known, 5)
    assert_close(flat(own), flat(known), rtol=1e-8)
    assert {row.structure for row in opt.report()} == {"OwnKronecker"}
    assert opt.state_report().failures == 0
    resumed, later = build_own(OwnKronecker(0.9))
    resumed.load_state_dict(saved["model"])
    later.load_state_dict(saved["opt"])
    train(later, resumed, 2)
    assert torch.equal(flat(resumed), flat(own))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [(Forgetful, "give its class state = "), (Stubborn, r"whose inverse\(.*\) is None: a block needs one")],
)
def test_blocks_that_cannot_be_kept_or_inverted_are_named_at_the_first_step(kind: type, sentence: str):
    model, opt = build_own(OwnKronecker(0.9, kind_of_block=kind))
    with pytest.raises(TypeError, match=sentence):
        train(opt, model, 1)


def test_operators_within_operators_come_back_with_their_facts():
    inner = OwnMatrix(torch.eye(2, dtype=F64), 3.0).declare(nats=2.0)
    block = ng.operators.BlockOperator([inner, 2.0 * inner])
    found = unpack_operator(pack_operator(block))
    assert_close(found.dense(), block.dense())
    assert found.nats == 2.0
    assert [type(part) for part in vars(found)["blocks"]] == [OwnMatrix, Scaled]
    with pytest.raises(ValueError, match=r"'FromElsewhere' is known.*import the module that"):
        unpack_operator(pack_operator(inner) | {"kind": "FromElsewhere"})


def test_natgrads_own_names_are_not_taken():
    with pytest.raises(TypeError, match="'units' is an operator of natgrad's"):
        type("Own", (OwnMatrix,), {}, packed_as="units")
    with pytest.raises(TypeError, match="cannot be kept in a checkpoint"):
        pack_operator(OwnMatrix(torch.eye(1), scale=object()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Alone(OwnKronecker):
    """One that claims to add up over processes."""

    sums = True


def test_statistics_that_are_not_added_up_over_processes_are_refused():
    layer = nn.Linear(3, 2).double()
    (reading,) = hear_metric(
        ng.fisher(layer, ng.Categorical()), ng.trainable(layer), draw(4, 3), ng.ExactLabels(), torch.Generator()
    ).layers
    added = list[Statistics]()

    def add(fresh: Statistics) -> Statistics:
        added.append(fresh)
        return {name: 2 * total for name, total in fresh.items()}

    totals = ng.Kronecker().advance(reading, None, 0.9, Sums(add))
    assert_close(totals["left"], 2 * added[0]["left"], 1e-14)
    with pytest.raises(TypeError, match=r"seen\.sums\.total"):
        Alone().advance(reading, None, 0.9, Sums(add))
