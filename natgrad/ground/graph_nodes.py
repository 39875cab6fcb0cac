"""What torch's graph tells of an operation: its kind, and what it saved. No other file knows torch's names for these.

The factors that an operation saved are public: https://pytorch.org/docs/stable/notes/autograd.html#saved-tensors. Its
name and the numbers that it saved are not promised: `tests/ground/test_graph_nodes.py` says of a torch whether they
are what is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

UNSIGNED = 2**64
"""Nodes keep negative numbers modulo this."""

FLIPS = frozenset({"T", "Transpose", "Permute"})
CUTS = frozenset({"Split", "SplitWithSizes", "Slice"})
VIEWS = FLIPS | {"Slice", "Select", "Unsqueeze", "Squeeze", "View", "UnsafeView", "ReshapeAlias", "Alias"}
"""A part or another shape of one tensor, every entry once."""
SAME = frozenset({"View", "UnsafeView", "ReshapeAlias", "Expand", "Clone", "ToCopy"})
"""Every entry in its order, and perhaps several times."""
RESHAPES = (VIEWS | SAME | {"Reshape"}) - {"Slice", "Select", "Expand"}
"""Every entry once, in any order."""
THROUGH = frozenset({"_DDPSink", "BackwardHookFunction"})
"""Each of several tensors as it is."""
# fmt: off
LINEAR = VIEWS | SAME | CUTS | {
    "Add", "Sub", "Rsub", "Neg", "Reshape", "Index", "IndexSelect", "Gather", "Take", "MaskedSelect", "Repeat", "Cat",
    "Stack", "UnsafeSplit", "Unbind", "Flip", "Roll", "Sum", "Mean", "Diagonal", "Tril", "Triu", "Unfold", "AsStrided",
    "MaskedFill", "ConstantPadNd", "Cumsum", "Trace", "Copy", "CopySlices", "_DDPSink", "BackwardHookFunction", "Conj",
    "Real", "IndexAdd", "IndexPut", "Scatter",
}
# fmt: on
"""Linear in all tensors. Masks and indices count as data."""
PRODUCTS = frozenset({"Mul", "Div", "Mm", "Bmm", "Mv", "Dot", "Addmm", "Baddbmm", "Addmv", "NativeDropout"})
"""Linear in one of the tensors while the others stay as they are."""

FACTORS = {
    "Mul": ("self", "other"),
    "Mm": ("self", "mat2"),
    "Addmm": ("", "mat1", "mat2"),
    "Bmm": ("self", "mat2"),
    "Baddbmm": ("", "batch1", "batch2"),
}
"""What a product saved of its arguments, by their places."""


def kind_of(node: Node) -> str:
    """ "Addmm" for AddmmBackward0, and so on."""
    name = node.name().rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backwards").removesuffix("Backward")


def leaf_of(node: Node) -> Tensor | None:
    """The leaf whose gradient a node accumulates; None for any other node."""
    return getattr(node, "variable", None)


def notes_of(node: Node) -> dict[Any, Any]:
    """What was written at a place in the graph, which keeps it as long as it lives."""
    return node.metadata  # type: ignore[return-value]


def walk(roots: Iterable[Node | None], skips: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """The nodes of the graph above these roots, each once, without those that are skipped and what lies above them."""
    stack, known = [node for node in roots if node is not None], set[Node]()
    while stack:
        node = stack.pop()
        if node in known or (skips is not None and skips(node)):
            continue
        known.add(node)
        yield node
        stack += [below for below, _ in node.next_functions if below is not None]


def is_empty(node: Node) -> bool:
    """Whether all that an operation gave has no entries; False where nothing is known of it."""
    shapes = [metadata.shape for metadata in getattr(node, "_input_metadata", ())]
    return bool(shapes) and all(0 in shape for shape in shapes)


def read_factor(node: Any, place: int) -> Tensor | None:
    """The argument of a product at this place, detached; None where it was a number, or was written over since."""
    try:
        return getattr(node, f"_saved_{FACTORS[kind_of(node)][place]}").detach()
    except (RuntimeError, AttributeError):
        return None


def adds_plainly(node: Any, place: int) -> bool:
    """Whether a sum takes its argument at this place as it is: the second one may have a factor."""
    return kind_of(node) == "Add" and (place == 0 or node._saved_alpha == 1)


def read_order(node: Any, count: int) -> list[int]:
    """The dimensions of what goes into a transpose or a permutation of `count` dimensions, as they come out."""
    if kind_of(node) == "T":
        return list(range(count))[::-1]
    if kind_of(node) == "Permute":
        return [place_dim(dim, count) for dim in node._saved_dims]
    order = list(range(count))
    i, j = (place_dim(dim, count) for dim in (node._saved_dim0, node._saved_dim1))
    order[i], order[j] = order[j], order[i]
    return order


def read_dim(node: Any, count: int) -> int:
    """The dimension, of `count`, that a selection, an unbinding or a cut goes along, or that was put in."""
    return place_dim(node._saved_dim, count)


def place_dim(dim: int, count: int) -> int:
    """A dimension as a node keeps it, counted from the first."""
    return read_signed(dim) % count


def read_signed(number: int) -> int:
    """A number as it was given, which may be negative."""
    return number - UNSIGNED if number >= UNSIGNED // 2 else number


def read_index(node: Any, size: int) -> int:
    """Which of `size` a selection takes."""
    return read_signed(node._saved_index) % size


def read_cut(node: Any, number: int, rows: int) -> tuple[int, int] | None:
    """First and last row, excluded, of one output of a cut of `rows`; None for every second row and the like."""
    kind = kind_of(node)
    if kind == "Slice":
        first, last, _ = slice(read_signed(node._saved_start), read_signed(node._saved_end)).indices(rows)
        return (first, max(first, last)) if node._saved_step == 1 else None
    size = node._saved_split_size if kind == "Split" else 0
    sizes: Sequence[int] = [min(size, rows - i) for i in range(0, rows, size)] if size else node._saved_split_sizes
    return sum(sizes[:number]), sum(sizes[: number + 1])


def read_shape(view: Any) -> tuple[int, ...]:
    """Of the tensor before a view, for a View or an UnsafeView; () of any other."""
    if view is None or kind_of(view) not in ("View", "UnsafeView"):
        return ()
    return tuple(int(n) for n in view._saved_self_sym_sizes)


def read_output_shape(node: Any) -> tuple[int, ...]:
    """Of what an operation gave; () where nothing is known of it."""
    return next((tuple(metadata.shape) for metadata in getattr(node, "_input_metadata", ())), ())


def read_tokens(node: Any, rows: int) -> tuple[Tensor, int | None] | None:
    """The tokens of a look-up in a matrix of so many rows, and the one that it does not train.

    None where it is no look-up of whole rows, or gradients are scaled by frequencies.
    """
    kind = kind_of(node)
    if kind == "Embedding":
        if node._saved_scale_grad_by_freq:
            return None
        padding = node._saved_padding_idx
        return node._saved_indices, None if padding == UNSIGNED - 1 else padding
    indices = {"Index": lambda: node._saved_indices, "IndexSelect": lambda: (node._saved_index,)}.get(kind, tuple)()
    if len(indices) != 1 or indices[0] is None or indices[0].dtype in (torch.bool, torch.uint8):
        return None
    by_rows = kind == "Index" or read_dim(node, 2) == 0
    return (indices[0].long() % rows, None) if by_rows else None
