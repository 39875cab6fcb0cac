"""A structure of a user's own, made of operators of their own, in the drop-in optimiser."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import F64, assert_close, draw
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


def train(structure: Layerwise, steps: int, saved: bytes | None = None, start: Any = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    opt = ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), structure, lr=0.1)
    if saved is not None:
        kept = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(kept["model"])
        opt.load_state_dict(kept["opt"])
    x, y = draw(8, 3), torch.arange(8) % 3
    for _ in range(steps):
        opt.zero_grad()
        opt.loss(model(x), y).backward()
        opt.step()
    return model, opt


def test_blocks_of_ones_own_step_as_natgrads_do():
    own, opt = train(OwnKronecker(0.9), 5)
    known, _ = train(ng.Kronecker(0.9), 5)
    for p, q in zip(own.parameters(), known.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), rtol=1e-8)
    assert {row.structure for row in opt.report()} == {"OwnKronecker"}
    assert opt.state_report().failures == 0


def test_a_checkpoint_of_ones_own_operators_goes_on_as_if_never_stopped():
    model, opt = train(OwnKronecker(0.9), 3)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buffer)
    resumed, _ = train(OwnKronecker(0.9), 2, buffer.getvalue())
    straight, _ = train(OwnKronecker(0.9), 5)
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), straight.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [(Forgetful, "give its class state = "), (Stubborn, r"whose inverse\(.*\) is None: a block needs one")],
)
def test_blocks_that_cannot_be_kept_or_inverted_are_named_at_the_first_step(kind: type, sentence: str):
    with pytest.raises(TypeError, match=sentence):
        train(OwnKronecker(0.9, kind_of_block=kind), 1)


def test_operators_within_operators_come_back_with_their_facts():
    inner = OwnMatrix(torch.eye(2, dtype=F64), 3.0).declare(nats=2.0)
    block = ng.operators.BlockOperator([inner, 2.0 * inner])
    found = unpack_operator(pack_operator(block))
    assert_close(found.dense(), block.dense())
    assert found.nats == 2.0
    assert [type(part) for part in vars(found)["blocks"]] == [OwnMatrix, Scaled]


def test_a_class_that_nobody_defined_here_is_named():
    packed = pack_operator(OwnMatrix(torch.eye(2, dtype=F64))) | {"kind": "FromElsewhere"}
    with pytest.raises(ValueError, match=r"'FromElsewhere' is known.*import the module that"):
        unpack_operator(packed)


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
