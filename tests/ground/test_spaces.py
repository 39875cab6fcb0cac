"""Parameters as one vector and back."""

from __future__ import annotations

import pytest
import torch
from models import F64, Tied, build_seeded, draw, freeze_parts, mlp
from torch import nn

from natgrad.ground.spaces import Space, trainable

SHAPES = {"a": (2, 3), "scalar": (), "none": (0, 4), "b": (4,), "c": (1, 2, 2)}


def tensors() -> dict[str, torch.Tensor]:
    return {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


def test_flatten_concatenates_row_major_in_the_order_of_the_dict():
    params = tensors()
    assert torch.equal(Space(params).flatten(params), torch.cat([p.reshape(-1) for p in params.values()]))


def test_unflatten_undoes_flatten():
    params = tensors()
    space = Space(params)
    back = space.unflatten(space.flatten(params))
    assert list(back) == list(params)
    assert all(torch.equal(back[name], params[name]) for name in params)


def test_unflatten_gives_views_on_the_vector():
    vector = draw(15)
    parts = Space(tensors()).unflatten(vector)
    parts["b"].zero_()
    parts["scalar"].fill_(7.0)
    assert vector[6] == 7.0
    assert not vector[7:11].any()
    assert parts["c"].data_ptr() == vector[11:].data_ptr()


def test_a_strided_vector_can_be_unflattened():
    block = draw(15, 3)
    assert torch.equal(Space(tensors()).unflatten(block[:, 1])["a"], block[:6, 1].reshape(2, 3))


def test_missing_and_none_count_as_zeros():
    space = Space(tensors())
    assert torch.equal(
        space.flatten({"b": torch.ones(4, dtype=F64), "a": None})[6:12], torch.tensor([0, 1, 1, 1, 1, 0.0], dtype=F64)
    )


def test_dtypes_promote_in_the_vector_and_come_back():
    params = {"half": torch.ones(2, dtype=torch.float32), "double": torch.ones(2, dtype=F64)}
    space = Space(params)
    assert space.dtype == F64
    assert {name: p.dtype for name, p in space.unflatten(space.zeros()).items()} == {
        n: p.dtype for n, p in params.items()
    }


def test_a_subset_keeps_the_order_and_knows_its_indices():
    space = Space(tensors())
    part = space.subset(["c", "a"])
    assert list(part) == ["a", "c"]
    vector = torch.arange(15.0)
    assert torch.equal(vector[space.indices(["c", "a"])], torch.cat([vector[:6], vector[11:]]))
    assert part.size == len(part) == 10


def test_the_space_keeps_no_tensor():
    space = Space(tensors())
    assert not any(isinstance(value, torch.Tensor) for block in space.blocks.values() for value in vars(block).values())


def test_trainable_is_in_the_order_of_named_parameters():
    model = mlp(2, 3, 2)
    assert list(trainable(model)) == [name for name, _ in model.named_parameters()]


def test_a_tied_parameter_appears_once():
    model = build_seeded(Tied)
    assert list(trainable(model)) == ["encode.weight", "encode.bias", "decode.bias"]
    assert Space(trainable(model)).size == 9 + 3 + 3


def test_frozen_parameters_are_left_out():
    names = set(trainable(build_seeded(freeze_parts)))
    assert names == {"0.bias", "2.weight", "5.weight", "5.bias"}


BAD = {
    "no parameter": ({}, ValueError, "params is empty"),
    "not a dict": ([torch.ones(2)], TypeError, "params is list"),
    "integers": ({"w": torch.ones(2, dtype=torch.long)}, ValueError, "params['w'] is torch.int64"),
    "complex": ({"w": torch.ones(2, dtype=torch.complex64)}, ValueError, "params['w'] is torch.complex64"),
    "a number": ({"w": 3.0}, ValueError, "params['w'] is float"),
    "two devices": ({"w": torch.ones(2), "v": torch.ones(2, device="meta")}, ValueError, "several devices"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_space_is_refused(case):
    params, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        Space(params)
    assert words in str(caught.value)


def test_wrong_vectors_and_names_are_refused():
    space = Space(tensors())
    with pytest.raises(ValueError, match=r"vector has shape \(3,\), expected \(15,\)"):
        space.unflatten(torch.ones(3))
    with pytest.raises(ValueError, match=r"tensors\['a'\] has shape \(3, 2\), expected \(2, 3\)"):
        space.flatten({"a": torch.ones(3, 2)})
    with pytest.raises(ValueError, match="does not hold"):
        space.flatten({"z": torch.ones(2)})
    with pytest.raises(ValueError, match="does not hold"):
        space.subset(["z"])


def test_models_that_cannot_be_trained_are_refused():
    with pytest.raises(ValueError, match="no trainable parameters"):
        trainable(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="lazy"):
        trainable(nn.LazyLinear(2))
    with pytest.raises(TypeError, match="model is function, expected"):
        trainable(mlp)  # type: ignore[arg-type]
