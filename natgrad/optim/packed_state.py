"""Nested values as one text and a row of tensors: a form that every tool which walks through a state_dict keeps.

`torch.distributed.checkpoint` passes tuples on unseen. With `full_state_dict=True` it flattens them too, and adds to a
fresh optimizer's values only tensors of one dimension or more, all on one device. So numbers, words and what lies on
another device become part of a text, which is there in a fresh optimizer's tuple as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.typed_torch import is_mapping, list_numbers

PLAIN = (bool, int, float, str, type(None))
WRITTEN = 2**16
"""Most bytes of a tensor that is written into the text."""


def pack_tree(tree: Any, device: torch.device) -> tuple[Any, ...]:
    """A text that says how a tree is made, an empty tensor, and the tree's tensors on a device.

    Args:
        tree: Mappings, lists, tuples, plain values and tensors.
        device: Where most of the tensors lie. Others are written into the text, if they are small.

    Returns:
        The tensors are those of the tree, not copies.
    """
    others: list[Any] = [torch.empty(0, device=device)]
    text = json.dumps(describe_branch(tree, others))
    return (text, *others)


def describe_branch(branch: Any, others: list[Any]) -> Any:
    """What the text says of a branch; what cannot be said is appended to `others`."""
    if isinstance(branch, PLAIN):
        return branch
    if isinstance(branch, Tensor):
        return describe_tensor(branch, others)
    if isinstance(branch, Mapping):
        pairs = cast("Mapping[Any, Any]", branch).items()
        return {"map": [[describe_branch(part, others) for part in pair] for pair in pairs]}
    if type(branch) in (list, tuple):
        return {type(branch).__name__: [describe_branch(part, others) for part in branch]}
    others.append(branch)
    return {"at": len(others) - 1}


def describe_tensor(tensor: Tensor, others: list[Any]) -> dict[str, Any]:
    """Where a tensor lies in `others`, or its numbers."""
    if tensor.device == others[0].device or tensor.nbytes > WRITTEN:
        others.append(tensor if tensor.dim() else tensor.reshape(1))
        return {"at": len(others) - 1, "shape": list(tensor.shape)}
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {"hex": bytes(list_numbers(numbers)).hex(), "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)}


def unpack_tree(packed: Sequence[Any]) -> Any:
    """The tree that `pack_tree` was given.

    Args:
        packed: What it gave, as a tuple or a list. What follows its last tensor is left out.

    Raises:
        ValueError: If the text or a tensor was lost.
    """
    try:
        return build_branch(json.loads(packed[0]), packed)
    except (IndexError, KeyError, TypeError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"the packed state in state_dict cannot be read ({type(error).__name__}: {error}): a part was lost on its "
            "way. With several processes, load the whole state on each and leave broadcast_from_rank0=True out. "
            "Nothing was changed"
        ) from error


def build_branch(said: Any, packed: Sequence[Any]) -> Any:
    """The branch that the text says."""
    if not is_mapping(said):
        return said
    if "map" in said:
        return {build_branch(key, packed): build_branch(value, packed) for key, value in said["map"]}
    if "list" in said:
        return [build_branch(part, packed) for part in said["list"]]
    if "tuple" in said:
        return tuple(build_branch(part, packed) for part in said["tuple"])
    if "hex" in said:
        numbers = torch.tensor(list(bytes.fromhex(said["hex"])), dtype=torch.uint8)
        return numbers.view(getattr(torch, said["dtype"])).reshape(said["shape"])
    found = packed[1 + said["at"]]
    return found.reshape(()) if said.get("shape") == [] else found
