"""A model as a pure function of its parameters."""

from __future__ import annotations

import itertools
from collections import namedtuple

import pytest
import torch
from models import X3, Tied, affine, assert_close, batch_norm, build_seeded, mlp
from optim_models import Interrupt
from torch import nn

from natgrad.ground.pure import Call, PureModel, check_call, leaves, map_tensors
from natgrad.ground.spaces import trainable


def dropout() -> nn.Module:
    return build_seeded(lambda: nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 2)))


def pure(model, x=X3, **kwargs):
    return PureModel(model, Call((x,)), **kwargs)


def test_a_tied_parameter_moves_everywhere():
    model = build_seeded(Tied)
    moved = {name: 2 * p.detach() for name, p in trainable(model).items()}
    found = pure(model)(moved)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert_close(found, model(X3).detach())


def test_a_block_at_two_places_moves_at_both_and_stays_the_models_own():
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = build_seeded(lambda: nn.Sequential(block, nn.Tanh(), nn.Sequential(block), block[0]))
    own = [*model.parameters(), *model.buffers()]
    kept = [t.detach().clone() for t in own]
    found = pure(model)({name: 2 * p.detach() for name, p in trainable(model).items()})
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], own, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, kept, strict=True))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert_close(found, model(X3).detach())


def test_ctrl_c_while_tensors_are_exchanged_leaves_the_models_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), build_seeded(Tied)).double()
    own, moved = [*model.parameters(), *model.buffers()], {name: 2 * p.detach() for name, p in trainable(model).items()}
    for n in itertools.count(1):
        with Interrupt(n, "stateless.py", "_named_member_accessor.py") as lines:
            pure(model)(moved)
        assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], own, strict=True)), f"line {n}"
        if lines.seen < n:
            break
    assert n > 100


def test_two_values_of_one_parameter_are_refused():
    model, p = build_seeded(Tied), torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'decode.weight' and 'encode.weight' for one tensor of the model"):
        pure(model)({"encode.weight": p, "decode.weight": 2 * p})
    assert_close(pure(model)({"encode.weight": p, "decode.weight": p}), pure(model)({"decode.weight": p}))


def test_buffers_are_read_and_never_written():
    model = build_seeded(lambda: batch_norm(True))
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    pure(model)(trainable(model))
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    model.eval()
    model[1].running_mean += 1.0
    moved = pure(model)(trainable(model))
    assert torch.equal(moved, model(X3))


def test_every_call_draws_the_same_mask_and_it_is_the_one_drawn_after_capture():
    model = dropout()
    function = pure(model)
    first, second = function(trainable(model)), function(trainable(model))
    assert torch.equal(first, second)
    assert torch.equal(model(X3), first)  # the pure calls did not move the state at which they were captured


def test_the_global_random_state_comes_back_after_an_error():
    state = torch.get_rng_state()

    def fails(params, x):
        torch.rand(2)
        raise KeyError("broken model")

    with pytest.raises(KeyError):
        pure(fails)({"w": torch.ones(1)})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_chunks_partition_the_examples(size):
    call = Call((X3, torch.tensor(2.0)), {"mask": torch.arange(4), "weights": torch.ones(7)})
    chunks = list(call.chunks(size))
    assert torch.equal(torch.cat([c.args[0] for c in chunks]), X3)
    assert torch.equal(torch.cat([c.kwargs["mask"] for c in chunks]), torch.arange(4))
    assert all(len(c.kwargs["weights"]) == 7 and c.args[1] == 2.0 for c in chunks)
    assert max(c.batch() for c in chunks) == min(size, 4)


def test_nested_tensors_are_found_and_mapped_in_order():
    pair = namedtuple("pair", "left right")
    tree = {"a": pair(torch.ones(1), [torch.zeros(2), "text"]), "b": (torch.ones(3), None)}
    assert [len(t) for t in leaves(tree)] == [1, 2, 3]
    mapped = map_tensors(tree, lambda t: t + 1)
    assert isinstance(mapped["a"], pair)
    assert mapped["a"].right[1] == "text"
    assert [float(t.sum()) for t in leaves(mapped)] == [2, 2, 6]


def test_unknown_names_and_strange_devices_are_refused():
    with pytest.raises(ValueError, match=r"params has \['other'\], which the model lacks"):
        check_call(mlp(3, 2), Call((X3,)), {"other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"inputs lie on \['cpu'\] but params on meta"):
        check_call(affine, Call((X3,)), {"w": torch.ones(3, 2, device="meta")})
