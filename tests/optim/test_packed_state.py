"""Nested values as a text and tensors: what comes back is what went in, to the bit and to the type."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from optim_models import same

from natgrad.optim.checkpoint import pack_tree, unpack_tree

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
TREE: dict[str, Any] = {
    "numbers": [1, 0.1, -0.0, math.inf, 5e-324, 2**70, True, None],
    "words": ("a.b", "", 'quo"te'),
    "nested": {"empty": {}, 3: [], "pair": ((), [{"deep": torch.arange(6).reshape(2, 3)}])},
    "tensors": {str(dtype): torch.tensor([[0, 1], [1, 1]], dtype=dtype) for dtype in DTYPES},
    "scalars": [torch.tensor(2.5, dtype=dtype) for dtype in DTYPES],
    "none of it": [torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)],
    "strided": torch.arange(12.0).reshape(3, 4).T[1:, ::2],
}


def types(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: types(value) for key, value in tree.items()}
    return [type(tree), *map(types, tree)] if isinstance(tree, (list, tuple)) else type(tree)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tree_comes_back_from_tensors_beside_the_text_and_from_within_it(device: str):
    packed = pack_tree(TREE, torch.device(device))
    assert (len(packed) > 2) == (device == "cpu")
    for form in (packed, list(packed), (*packed, torch.ones(3))):  # torch makes lists of tuples, and may append
        found = unpack_tree(form)
        assert same(found, TREE)
        assert types(found) == types(TREE)
        assert found["strided"].shape == TREE["strided"].shape
        assert math.copysign(1, found["numbers"][2]) == -1


def test_tensors_are_not_copied_and_none_is_without_a_dimension():
    _, *tensors = pack_tree(TREE, torch.device("cpu"))
    assert all(tensor.dim() for tensor in tensors)
    assert TREE["scalars"][0].data_ptr() in [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("lost", ["a tensor", "the text", "a part of the text"])
def test_what_was_lost_is_an_error(lost: str):
    packed = pack_tree(TREE, torch.device("cpu"))
    cut = {"a tensor": packed[:-1], "the text": packed[1:], "a part of the text": (packed[0][:-9], *packed[1:])}[lost]
    with pytest.raises(ValueError, match="packed state in state_dict cannot be read"):
        unpack_tree(cut)
    json.loads(packed[0])
