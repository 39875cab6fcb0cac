"""Parameters as one vector and back."""

from __future__ import annotations

import pytest
import torch
from models import draw, mlp
from torch import nn

from natgrad.ground.spaces import Space, trainable

SHAPES = {"a": (2, 3), "scalar": (), "none": (0, 4), "b": (4,), "c": (1, 2, 2)}


def tensors() -> dict[str, torch.Tensor]:
    return {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


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


def test_a_subset_keeps_the_order_and_knows_its_indices():
    space = Space(tensors())
    part = space.subset(["c", "a"])
    assert list(part) == ["a", "c"]
    vector = torch.arange(15.0)
    assert torch.equal(vector[space.indices(["c", "a"])], torch.cat([vector[:6], vector[11:]]))
    assert part.size == len(part) == 10


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
