"""Layer kinds of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from natgrad.layers.kinds import OWN_KINDS, Layer, Layout, positions

Lay = Callable[[Any, Tensor], Tensor]


def lay_positions(module: Any, tensor: Tensor) -> Tensor:
    """(b, ..., d) -> (b, t, d)."""
    return positions(tensor)


@dataclass(frozen=True)
class Kind:
    """How a module of a user's own, or of another package, is read. The arguments are those of `register`."""

    activations: Lay = lay_positions
    deltas: Lay = lay_positions
    shape: Callable[[Any], tuple[int, int, int]] | None = None
    weight: str = "weight"
    bias: str = "bias"
    transposed: bool = False
    features: int | None = 1

    def read_shape(self, module: nn.Module) -> tuple[int, int, int]:
        """(G, o, d)."""
        if self.shape is not None:
            return self.shape(module)
        rows, *columns = getattr(module, self.weight).shape
        return (1, prod(columns), rows) if self.transposed else (1, rows, prod(columns))

    def layer(self, module: nn.Module, prefix: str, trained: Callable[[str], bool]) -> RegisteredLayer | None:
        """A module as a layer; None if none of its parameters is trained."""
        weight, bias = (f"{prefix}{name}" if name else "" for name in (self.weight, self.bias))
        groups, outputs, inputs = self.read_shape(module)
        has = dict(module.named_parameters(recurse=False))
        used = has.get(self.weight) if trained(weight) else None
        added = has.get(self.bias) if trained(bias) else None
        if used is None and added is None:
            return None
        layout = Layout(
            None if used is None else weight,
            None if added is None else bias,
            groups,
            outputs,
            0 if used is None else inputs,
            () if used is None else tuple(used.shape),
            (-1,) if added is None else tuple(added.shape),
            inputs if self.transposed else None,
        )
        return RegisteredLayer(module, layout, self)


@dataclass(frozen=True, eq=False)
class RegisteredLayer(Layer):
    """A module of a registered kind."""

    kind: Kind

    def features(self, tensor: Tensor) -> int | None:
        return self.kind.features

    def activations(self, inputs: Tensor) -> Tensor:
        return self.with_bias(as_groups(self.kind.activations(self.module, inputs), "activations"))

    def deltas(self, gradient: Tensor) -> Tensor:
        return as_groups(self.kind.deltas(self.module, gradient), "deltas")


def register(
    module: type[nn.Module],
    *,
    activations: Lay = lay_positions,
    deltas: Lay = lay_positions,
    shape: Callable[[Any], tuple[int, int, int]] | None = None,
    weight: str = "weight",
    bias: str = "bias",
    transposed: bool = False,
    features: int | None = 1,
) -> None:
    """Let all structures read a module class of your own: an example's gradient is sum_t delta_t a_t^T.

    For optimisers and metrics that are made afterwards, and for classes that derive from this one with the same
    forward. Whether the activations and deltas give the whole gradient of the parameters is compared with a plain
    backward pass, as for every layer: where they do not, the parameters keep their diagonal, and `opt.report()` shows
    it.

    Args:
        module: The class. Its forward takes the input as first positional argument and returns one tensor.
        activations: What went in, (module, inputs) -> a (b, t, d) or, in G groups, (b, t, G, d), for b examples and t
            positions; without a column for the bias. Default: positions are all dimensions between the first and last.
        deltas: The derivative at the output, (module, gradient) -> (b, t, o) or (b, t, G, o). Default: likewise.
        shape: module -> (G, o, d). Default: (1, o, d) from the weight's own shape (o, d).
        weight: The attribute that holds the matrix, stored as (G, o, d) row by row, in any shape.
        bias: The attribute that holds the shift, (G, o) in any shape; the module may lack it.
        transposed: True if the weight is stored as (G, d, o) instead: y = x W. Only for G = 1.
        features: How many of the last dimensions of inputs and outputs are no positions, so that examples may stand
            first or second; None if examples always come first.

    Raises:
        TypeError: If `module` is no class of modules, or a rule is no function.

    Example:
        >>> class Projection(nn.Module):  # y = x W
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        ...
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> ng.layers.register(Projection, transposed=True)
    """
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise TypeError(f"module is {module!r}, expected a class of torch.nn modules")
    for name, rule in (("activations", activations), ("deltas", deltas), ("shape", shape or prod)):
        if not callable(rule):
            raise TypeError(f"{name} is {rule!r}, expected a function of the module")
    OWN_KINDS[module] = Kind(activations, deltas, shape, weight, bias, transposed, features).layer


OWN_KINDS["transformers.pytorch_utils.Conv1D"] = Kind(transposed=True).layer


def as_groups(tensor: Tensor, name: str) -> Tensor:
    """(b, t, d) -> (b, t, 1, d); ValueError for other than three or four dimensions."""
    if tensor.dim() not in (3, 4):
        raise ValueError(f"{name} gave a tensor of shape {tuple(tensor.shape)}, expected (b, t, d) or (b, t, G, d)")
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor
