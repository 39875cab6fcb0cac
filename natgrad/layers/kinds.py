"""Layers as linear maps: what went in, and the derivative at what came out, laid out so that a score is delta a^T.

For every layer kind the gradient of one example's loss in the layer's matrix (weight rows per output, the bias as last
column) is sum_t delta_t a_t^T, with activations a (b, t, groups, columns) and deltas (b, t, groups, outputs) over t
positions: tokens, pixels of a convolution's output, 1 for a vector.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from natgrad.ground.densities import Score
from natgrad.ground.messages import Explained
from natgrad.ground.pure import computes_as
from natgrad.ground.spaces import Space

# a layer's parameters as one matrix: joined from the modules' tensors, and split into them again


@dataclass(frozen=True)
class Layout:
    """A layer's parameters as one matrix per group, (groups, outputs, inputs [+ 1]): the bias is the last column.

    Args:
        weight: The weight's name; None where the layer has none or it is not trained.
        bias: The bias's name; None likewise.
        groups: The number of groups, each with a matrix of its own.
        outputs: Of one group.
        inputs: Of one group, without the bias; 0 without a weight.
        shape: Of the weight as the module stores it.
        bias_shape: Of the bias as the module stores it.
        channels: Of one group's inputs, if the weight is stored with them before the outputs: (groups * channels,
            outputs, ...), as in transposed convolutions, or (groups, channels, outputs). Then `inputs` = channels *
            taps. None for a weight that is stored with its outputs first.
    """

    weight: str | None
    bias: str | None
    groups: int
    outputs: int
    inputs: int
    shape: tuple[int, ...] = ()
    bias_shape: tuple[int, ...] = (-1,)
    channels: int | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, weight first."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(groups, outputs, columns)."""
        return self.groups, self.outputs, self.inputs + (self.bias is not None)

    @property
    def all_outputs(self) -> int:
        """Of all groups together."""
        return self.groups * self.outputs

    @property
    def is_stored(self) -> bool:
        """True if the weight is stored as the matrix itself: one group, (outputs, inputs)."""
        return self.groups == 1 and self.channels is None and self.shape in ((), (self.outputs, self.inputs))

    @cached_property
    def places(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] | None:
        """Sizes, strides and offset of each tensor in the memory of its matrix; None where `split` copies."""
        if self.channels is not None and self.groups not in (1, self.shape[0]):
            return None
        parts = self.split(torch.empty(self.matrix_shape, device="meta"))
        return {name: (tuple(p.shape), p.stride(), int(p.storage_offset())) for name, p in parts.items()}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The layer's matrix, shape (groups, outputs, columns).

        Args:
            tensors: The layer's tensors by name, in the modules' shapes.
        """
        parts = []
        if self.weight is not None:
            weight = tensors[self.weight]
            if self.channels is not None:
                weight = weight.reshape(self.groups, self.channels, self.outputs, -1).transpose(1, 2)
            parts.append(weight.reshape(self.groups, self.outputs, self.inputs))
        if self.bias is not None:
            parts.append(tensors[self.bias].reshape(self.groups, self.outputs, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """The layer's tensors by name, in the modules' shapes.

        Args:
            matrix: Shape (groups, outputs, columns).
        """
        parts = {}
        if self.weight is not None:
            weight = matrix[..., : self.inputs]
            if self.channels is not None:
                weight = weight.reshape(self.groups, self.outputs, self.channels, -1).transpose(1, 2)
            parts[self.weight] = weight.reshape(self.shape)
        if self.bias is not None:
            parts[self.bias] = matrix[..., -1].reshape(self.bias_shape)
        return parts


# what a unit has of several tensors as one row: a row of one matrix with a column of the next


@dataclass(frozen=True)
class UnitLayout:
    """Several tensors as one matrix (1, units, columns): row j holds slice j of each, along its own dimension.

    Args:
        names: Of the tensors.
        dims: The dimension of each tensor that counts the units.
        shapes: Of the tensors.

    Raises:
        ValueError: If the tensors have unlike numbers of units.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        counts = {name: shape[dim] for name, dim, shape in zip(self.names, self.dims, self.shapes, strict=True)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"units has {counts} along the given dimensions, expected one number of units")

    @cached_property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(1, units, columns)."""
        units = self.shapes[0][self.dims[0]]
        numbers = sum(torch.Size(shape).numel() for shape in self.shapes)
        return 1, units, numbers // max(units, 1)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The matrix, shape (1, units, columns).

        Args:
            tensors: By name, in their own shapes.
        """
        units = self.matrix_shape[1]
        dims = zip(self.names, self.dims, strict=True)
        return torch.cat([tensors[name].movedim(dim, 0).reshape(units, -1) for name, dim in dims], 1).unsqueeze(0)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """The tensors by name, in their own shapes.

        Args:
            matrix: Shape (1, units, columns).
        """
        sides = zip(self.dims, self.shapes, strict=True)
        moved = [torch.Size((shape[dim], *shape[:dim], *shape[dim + 1 :])) for dim, shape in sides]
        parts = matrix[0].split([size[1:].numel() for size in moved], dim=1)
        return {
            name: part.reshape(size).movedim(0, dim)
            for name, part, size, dim in zip(self.names, parts, moved, self.dims, strict=True)
        }


@dataclass(frozen=True, eq=False)
class Layer(Explained):
    """A module whose parameters a structure knows how to treat.

    Args:
        module: The module itself.
        layout: Its matrix.
    """

    module: Any
    layout: Layout

    @property
    def key(self) -> str:
        """The layer's parameters, as one string."""
        return " ".join(self.layout.names)

    @abstractmethod
    def activations(self, inputs: Tensor) -> Tensor:
        """The module's input as (b, t, groups, columns), the bias's ones appended; tokens (b, t) for an embedding.

        Args:
            inputs: As the module was given them.
        """

    @abstractmethod
    def deltas(self, gradient: Tensor) -> Tensor:
        """The derivative at the module's output as (b, t, groups, outputs); (b, t, e) for an embedding.

        Args:
            gradient: In the output's shape.
        """

    @property
    def claims(self) -> tuple[str, ...]:
        """What a reader notes of a layer that it trusts: its parameters' names."""
        return self.layout.names

    @property
    def by_token(self) -> bool:
        """True if the layer looks rows up by token."""
        return False

    @property
    def is_routed(self) -> bool:
        """True if the groups are experts: each sees some of the positions, and another number of them in every pass."""
        return False

    def has_examples(self, inputs: Tensor) -> bool:
        """True if the input has an example dimension (a module may be called on one example without it).

        Args:
            inputs: As the module was given them.
        """
        return inputs.dim() >= 2

    def features(self, tensor: Tensor) -> int | None:
        """How many of the input's or output's last dimensions are no positions; None if its layout is fixed.

        Args:
            tensor: The input or the output.
        """
        return None

    def with_bias(self, columns: Tensor) -> Tensor:
        """The trained columns only, and ones for the bias.

        Args:
            columns: Shape (..., d).
        """
        inputs = columns if self.layout.weight is not None else columns[..., :0]
        return functional.pad(inputs, (0, 1), value=1.0) if self.layout.bias is not None else inputs


class LinearLayer(Layer):
    """y = W x + b, on vectors or at every position of a sequence."""

    def features(self, tensor: Tensor) -> int:
        return 1

    def activations(self, inputs: Tensor) -> Tensor:
        return self.with_bias(positions(inputs)).unsqueeze(2)

    def deltas(self, gradient: Tensor) -> Tensor:
        return positions(gradient).unsqueeze(2)


class ConvolutionLayer(Layer):
    """Convolutions in 1, 2 or 3 dimensions, transposed or not: a linear map of patches, one per output position."""

    def has_examples(self, inputs: Tensor) -> bool:
        return inputs.dim() == len(self.module.kernel_size) + 2

    def activations(self, inputs: Tensor) -> Tensor:
        patches = patches_of(self.module, inputs)  # (b, channels * taps, positions), channels first
        grouped = patches.unflatten(1, (self.layout.groups, -1))
        return self.with_bias(grouped.permute(0, 3, 1, 2))

    def deltas(self, gradient: Tensor) -> Tensor:
        return gradient.flatten(2).unflatten(1, (self.layout.groups, -1)).permute(0, 3, 1, 2)


class NormLayer(Layer):
    """y = scale * z + shift per channel, z the normalised input: one group per channel, with one input and output."""

    def features(self, tensor: Tensor) -> int | None:
        return len(self.module.normalized_shape) if isinstance(self.module, (nn.LayerNorm, nn.RMSNorm)) else None

    def activations(self, inputs: Tensor) -> Tensor:
        return self.with_bias(self.normalise(inputs))

    def normalise(self, inputs: Tensor) -> Tensor:
        """The input before scale and shift as (b, t, groups, 1)."""
        return self._channels(normalise_inputs(self.module, inputs)).unsqueeze(-1)

    def deltas(self, gradient: Tensor) -> Tensor:
        return self._channels(gradient).unsqueeze(-1)

    def _channels(self, tensor: Tensor) -> Tensor:
        """(b, t, channels): the normalised dimensions of a layer norm come last, the others' channels second."""
        if isinstance(self.module, (nn.LayerNorm, nn.RMSNorm)):
            flat = tensor.flatten(-len(self.module.normalized_shape))
            return positions(flat)
        return tensor.flatten(2).mT if tensor.dim() > 2 else tensor.unsqueeze(1)


class EmbeddingLayer(Layer):
    """Rows of a table by token: the input is a unit vector, so that its second moment is the tokens' frequencies."""

    @property
    def by_token(self) -> bool:
        return True

    def has_examples(self, inputs: Tensor) -> bool:
        return inputs.dim() >= 1

    def features(self, tensor: Tensor) -> int:
        return int(tensor.is_floating_point())

    def activations(self, inputs: Tensor) -> Tensor:
        return inputs.reshape(len(inputs), -1)

    def deltas(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(len(gradient), -1, gradient.shape[-1])


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)
KINDS: dict[tuple[type[nn.Module], ...], type[Layer]] = {
    (nn.Linear,): LinearLayer,
    (*CONVOLUTIONS, *TRANSPOSED): ConvolutionLayer,
    NORMS: NormLayer,
    (nn.Embedding,): EmbeddingLayer,
}
TORCH_KINDS = frozenset(chain(RECURRENT, *KINDS))


def known_layers(model: nn.Module, space: Space) -> dict[nn.Module, Layer]:
    """The modules with a layer's treatment, by module.

    Left out: modules that share a parameter with another one, modules without a parameter in the space, the last layer
    of an attention, whose tensors that takes itself, and those of an energy inside a `Score`, whose calls are not all
    there is to their use: a derivative passes through them again.
    """
    scores = [module for module in model.modules() if isinstance(module, Score)]
    inside = {part for module in scores for part in module.modules()}
    inside |= {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    layers = {}
    for prefix, module in model.named_modules():
        shared = any(uses[id(p)] > 1 for p in module.parameters(recurse=False))
        layer = None if module in inside or shared else layer_of(module, f"{prefix}." if prefix else "", space)
        if layer is not None:
            layers[module] = layer
    return layers


Build = Callable[[nn.Module, str, Callable[[str], bool]], Layer | None]
OWN_KINDS: dict[type | str, Build] = {}
"""What `natgrad.layers.register` was told: of a module, the prefix of its names and whether a name is trained.

Kinds of packages that are not imported here stand under the names of their classes.
"""


def layer_of(module: nn.Module, dot: str, space: Space) -> Layer | None:
    """A module as a layer; None for other kinds, and where no parameter is in the space."""
    kind = class_of(module)
    build = OWN_KINDS.get(kind) or OWN_KINDS.get(name_of(kind))
    if build is not None:
        return build(module, dot, space.blocks.__contains__)
    layer = next((layer for types, layer in KINDS.items() if kind in types), None)
    own = dict(module.named_parameters(recurse=False))
    if layer is None or not own.keys() <= {"weight", "bias"} or is_parametrized(module):
        return None
    weight, bias = (name if name in space.blocks else None for name in (f"{dot}weight", f"{dot}bias"))
    return layer(module, layout_of(module, weight, bias)) if weight or bias else None


def class_of(module: nn.Module) -> type:
    """The class of a known kind that a module is of: its own, or the nearest above that has the same forward.

    A subclass may have another start, or be what `fully_shard` makes of a class; one that computes something else has
    a forward of its own.
    """
    for kind in type(module).__mro__:
        known = kind in OWN_KINDS or name_of(kind) in OWN_KINDS or kind in TORCH_KINDS
        if known and computes_as(module, kind):
            return kind
    return type(module)


def name_of(kind: type) -> str:
    """As a package would import it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def layout_of(module: Any, weight: str | None, bias: str | None) -> Layout:
    """The matrix of a known module's trained parameters."""
    shape: tuple[int, ...] = tuple(module.weight.shape) if weight else ()
    if class_of(module) in NORMS:
        count = (module.weight if weight else module.bias).numel()
        bias_shape = tuple(module.bias.shape) if bias else (-1,)
        return Layout(weight, bias, count, 1, int(weight is not None), shape, bias_shape)
    groups = getattr(module, "groups", 1)
    if class_of(module) in TRANSPOSED:
        channels = module.in_channels // groups
        inputs = channels * prod(module.kernel_size) if weight else 0
        return Layout(weight, bias, groups, module.out_channels // groups, inputs, shape, channels=channels)
    if isinstance(module, nn.Embedding):
        outputs = len(module.weight)
    else:
        outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    return Layout(weight, bias, groups, outputs // groups, prod(shape[1:]) if weight else 0, shape)


def positions(tensor: Tensor) -> Tensor:
    """(b, d) or (b, ..., d) -> (b, t, d)."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def patches_of(module: Any, inputs: Tensor) -> Tensor:
    """What every output position of a convolution sees, (b, channels * taps, positions), channels slowest."""
    windows, dimensions = windows_of(module, inputs), len(module.kernel_size)
    last = 2 + dimensions
    patches = windows.permute(0, 1, *range(last, last + dimensions), *range(2, last)).flatten(last)
    return order_taps(module, patches.flatten(2, -2), 2).flatten(1, 2)


def patches_at(module: Any, inputs: Tensor, numbers: Tensor) -> Tensor:
    """Some of `patches_of`, without the others: (r, channels * taps), by number among examples times positions."""
    windows = windows_of(module, inputs)
    places = unravel(numbers, (len(windows), *windows.shape[2 : 2 + len(module.kernel_size)]))
    return order_taps(module, windows.movedim(1, len(places))[places].flatten(2), 2).flatten(1)


def order_taps(module: Any, patches: Tensor, axis: int) -> Tensor:
    """What `windows_of` gives, with the taps of this axis in the order of the weight."""
    return patches.flip(axis) if isinstance(module, TRANSPOSED) else patches


def windows_of(module: Any, inputs: Tensor) -> Tensor:
    """The same as (b, channels, *positions, *taps), a view; the taps of a transposed convolution in reverse."""
    transposed = isinstance(module, TRANSPOSED)
    windows = spread_inputs(module, inputs) if transposed else pad_as(module, inputs)
    for axis, (size, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
        reach, stride = (size - 1) * dilation + 1, 1 if transposed else module.stride[axis]
        windows = windows.unfold(axis + 2, reach, stride)[..., ::dilation]
    return windows


def unravel(numbers: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Indices by dimension of entries that are numbered row-major; `torch.unravel_index` takes half as long again."""
    indices = list[Tensor]()
    for size in reversed(shape):
        indices.append(numbers % size)
        numbers = numbers // size
    return tuple(reversed(indices))


def spread_inputs(module: Any, inputs: Tensor) -> Tensor:
    """What a transposed convolution is a plain one of, at stride 1 and with its taps in reverse.

    The inputs with stride - 1 zeros between them, and at the ends (taps - 1) dilation - padding of them, or fewer
    entries where that is below 0.

    inputs: (b, channels, ...).
    """
    ends = list[int]()
    for axis, stride in enumerate(module.stride):
        place = axis + 2
        spread = functional.pad(inputs.movedim(place, -1).unsqueeze(-1), (0, stride - 1)).flatten(-2)
        inputs = spread[..., : spread.shape[-1] - stride + 1].movedim(-1, place)
        reach = (module.kernel_size[axis] - 1) * module.dilation[axis] - module.padding[axis]
        ends = [reach, reach + module.output_padding[axis], *ends]  # functional.pad counts from the last dimension
    return functional.pad(inputs, ends)


def pad_as(module: Any, inputs: Tensor) -> Tensor:
    """The input padded as the convolution pads it: by numbers, 'same' or 'valid', in its padding mode."""
    pairs = []
    for i, (size, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
        if module.padding == "same":
            total = dilation * (size - 1)
            pairs.append((total // 2, total - total // 2))
        else:
            pairs.append((0, 0) if module.padding == "valid" else (module.padding[i],) * 2)
    flat = [end for pair in reversed(pairs) for end in pair]  # functional.pad counts from the last dimension
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(inputs, flat, mode=mode) if any(flat) else inputs


def normalise_inputs(module: Any, inputs: Tensor) -> Tensor:
    """A norm layer's output before its scale and shift."""
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(inputs, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.RMSNorm):
        return functional.rms_norm(inputs, module.normalized_shape, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(inputs, module.num_groups, None, None, module.eps)
    if module.training or module.running_mean is None:
        return functional.batch_norm(inputs, None, None, None, None, True, 0.0, module.eps)
    return functional.batch_norm(inputs, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
