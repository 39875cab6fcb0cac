"""A model as a pure function of its parameters."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from models import X3, Tied, affine, assert_close, batch_norm, build_seeded, draw, mlp
from torch import nn

from natgrad.ground.pure import Call, PureModel, RandomState, as_call, check_call, leaves, map_tensors, mixes_examples
from natgrad.ground.spaces import trainable


def dropout() -> nn.Module:
    return build_seeded(lambda: nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 2)))


def pure(model, x=X3, **kwargs):
    return PureModel(model, Call((x,)), **kwargs)


def test_the_pure_function_is_the_model():
    model = mlp(3, 4, 2)
    assert torch.equal(pure(model)(trainable(model)), model(X3))


def test_parameters_can_be_moved_and_some_left_out():
    model = mlp(3, 4, 2)
    moved = {"2.bias": trainable(model)["2.bias"].detach() + 1.0}
    assert_close(pure(model)(moved), model(X3).detach() + 1.0)


def test_a_tied_parameter_moves_everywhere():
    model = build_seeded(Tied)
    moved = {name: 2 * p.detach() for name, p in trainable(model).items()}
    found = pure(model)(moved)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert_close(found, model(X3).detach())


def test_a_function_of_a_dict_is_a_model():
    params = {"w": draw(3, 2), "b": draw(2)}
    assert torch.equal(pure(affine)(params), affine(params, X3))


def test_keywords_and_several_arguments_reach_the_model():
    def function(params, x, *, scale):
        return params["w"] * x * scale

    call = Call((X3,), {"scale": torch.tensor(2.0)})
    assert torch.equal(PureModel(function, call)({"w": torch.ones(3)}), 2 * X3)


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


def test_the_global_random_state_does_not_move():
    model = dropout()
    state = torch.get_rng_state()
    function = pure(model)
    function(trainable(model))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    moved = torch.get_rng_state()
    function(trainable(model))
    assert torch.equal(torch.get_rng_state(), moved)


def test_the_global_random_state_comes_back_after_an_error():
    state = torch.get_rng_state()

    def fails(params, x):
        torch.rand(2)
        raise KeyError("broken model")

    with pytest.raises(KeyError):
        pure(fails)({"w": torch.ones(1)})
    assert torch.equal(torch.get_rng_state(), state)


def test_a_captured_state_replays():
    state = RandomState.capture()
    drawn = torch.rand(4)
    torch.rand(7)
    with state.replay():
        assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_chunks_partition_the_examples(size):
    call = Call((X3, torch.tensor(2.0)), {"mask": torch.arange(4), "weights": torch.ones(7)})
    chunks = list(call.chunks(size))
    assert torch.equal(torch.cat([c.args[0] for c in chunks]), X3)
    assert torch.equal(torch.cat([c.kwargs["mask"] for c in chunks]), torch.arange(4))
    assert all(len(c.kwargs["weights"]) == 7 and c.args[1] == 2.0 for c in chunks)
    assert max(c.batch() for c in chunks) == min(size, 4)


def test_inputs_as_users_pass_them():
    assert as_call(X3) == Call((X3,))
    assert as_call((X3, X3)).args == (X3, X3)
    assert as_call({"x": X3}).kwargs == {"x": X3}
    call = Call((X3,))
    assert as_call(call) is call


def test_a_batch_needs_a_tensor_with_a_leading_dimension():
    with pytest.raises(ValueError, match="no tensor with a leading example dimension"):
        Call((torch.tensor(1.0),)).batch()


def test_nested_tensors_are_found_and_mapped_in_order():
    pair = namedtuple("pair", "left right")
    tree = {"a": pair(torch.ones(1), [torch.zeros(2), "text"]), "b": (torch.ones(3), None)}
    assert [len(t) for t in leaves(tree)] == [1, 2, 3]
    mapped = map_tensors(tree, lambda t: t + 1)
    assert isinstance(mapped["a"], pair)
    assert mapped["a"].right[1] == "text"
    assert [float(t.sum()) for t in leaves(mapped)] == [2, 2, 6]


def test_only_a_batch_norm_in_training_mixes_examples():
    assert mixes_examples(batch_norm(True))
    assert not mixes_examples(batch_norm(False))
    assert not mixes_examples(mlp(2, 2))
    assert not mixes_examples(affine)


def test_unknown_names_and_strange_devices_are_refused():
    with pytest.raises(ValueError, match=r"params has \['other'\], which the model lacks"):
        check_call(mlp(3, 2), Call((X3,)), {"other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"inputs lie on \['cpu'\] but params on meta"):
        check_call(affine, Call((X3,)), {"w": torch.ones(3, 2, device="meta")})
