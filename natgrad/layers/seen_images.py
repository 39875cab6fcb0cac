"""A convolution's pass without its patches, nine times its input for kernels of 3 x 3, until they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from natgrad.layers.kinds import TRANSPOSED, ConvolutionLayer, Layer, pad_as, patches_at
from natgrad.layers.moments import Seen
from natgrad.layers.spread_rows import spread_rows
from natgrad.typed_torch import measure_norm

IMAGES = 32
"""Examples that a convolution's patches are made of at the least: neighbouring patches tell much the same."""
GATHERED = 3
"""Times as many patches that `unfold` makes in the time of one that is gathered by itself."""
CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)
SPREAD: tuple[Callable[..., Tensor], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
WEIGHT_GRADIENT = (conv1d_weight, conv2d_weight, conv3d_weight)


class SeenImages(Seen):
    """One call of a convolution. Its gradient and its scores along a step are convolutions too: no patches are made.

    Args:
        layer: The convolution's.
        inputs: What it saw, (b, channels, ...).
        derivatives: Per cotangent, the derivative at its output, (b, outputs, ...).
        share: As `Seen` has it.
    """

    inputs: Tensor
    derivatives: list[Tensor]

    def __init__(self, layer: Layer, inputs: Tensor, derivatives: Sequence[Tensor], share: float = 1.0) -> None:
        self.__dict__ |= {"layer": layer, "inputs": inputs, "derivatives": list(derivatives), "share": share}
        self.__dict__ |= {"counts": None, "pooled": False, "cotangents": 1, "skip": None}

    @staticmethod
    def fits(layer: ConvolutionLayer, inputs: Tensor, derivatives: Sequence[Tensor], examples: int | None) -> bool:
        """True if a call of a convolution can be followed without patches: one image per example, the usual size.

        Args:
            layer: The convolution's.
            inputs: What it saw.
            derivatives: Per cotangent.
            examples: Their number, if known.
        """
        counts = {len(inputs), *map(len, derivatives)} | (set() if examples is None else {examples})
        return len(counts) == 1 and (
            not isinstance(layer.module, TRANSPOSED) or has_usual_size(layer.module, inputs, derivatives[0])
        )

    @cached_property
    def activations(self) -> Tensor:  # type: ignore[override]
        return self.layer.activations(self.inputs)

    @cached_property
    def deltas(self) -> list[Tensor]:  # type: ignore[override]
        return [self.layer.deltas(each) for each in self.derivatives]

    @property
    def positions(self) -> float:
        return float(self.derivatives[0].shape[0] * prod(self.derivatives[0].shape[2:]))

    @property
    def by_token(self) -> bool:
        return False

    @property
    def examples(self) -> int:
        return len(self.inputs)

    def bound_inputs(self) -> Tensor:
        padded = self.inputs if self._is_transposed else pad_as(self.layer.module, self.inputs)
        taps = prod(self.layer.module.kernel_size)  # an entry is in no more patches than that
        ones = padded.new_tensor(float(self.deltas[0].shape[:2].numel())).sqrt()
        return torch.hypot(taps**0.5 * measure_norm(padded), ones)

    def count_times(self, share: float, weight: float = 1.0) -> SeenImages:
        factor = (share * weight) ** 0.5
        return SeenImages(self.layer, self.inputs, [factor * d for d in self.derivatives], share * self.share)

    def thin(self, rows: float) -> Seen:
        """The same pass with some patches, of all images where few are wanted, else of enough images.

        Args:
            rows: About how many; blocks of one output per group take whole images.
        """
        count, t = int(self.positions), prod(self.derivatives[0].shape[2:])
        images = min(self.examples, max(IMAGES, 2 * rows / max(t, 1)))
        if not self.single and GATHERED * rows < images * t:
            return self._pick_patches(spread_rows(count, rows, self.inputs.device), t)
        chosen = self
        if self.examples >= 1.5 * images:
            kept = spread_rows(self.examples, images, self.inputs.device)
            factor = (self.examples / len(kept)) ** 0.5
            chosen = SeenImages(self.layer, self.inputs[kept], [factor * d[kept] for d in self.derivatives], self.share)
        return Seen(self.layer, chosen.activations, chosen.deltas, self.share).thin(rows)

    def _pick_patches(self, kept: Tensor, t: int) -> Seen:
        """Patches by their numbers in examples times positions, of which an example has t."""
        groups, factor = self.layer.layout.groups, (self.examples * t / len(kept)) ** 0.5
        patches = patches_at(self.layer.module, self.inputs, kept).unflatten(1, (groups, -1))
        deltas = [factor * d.flatten(2)[kept // t, :, kept % t].unflatten(1, (groups, -1)) for d in self.derivatives]
        return Seen(
            self.layer, self.layer.with_bias(patches).unsqueeze(1), [d.unsqueeze(1) for d in deltas], self.share
        )

    def take(self, kept: slice, factor: float) -> SeenImages:
        return SeenImages(self.layer, self.inputs[kept].clone(), [factor * d[kept] for d in self.derivatives])

    def only(self, which: slice) -> SeenImages:
        return SeenImages(self.layer, self.inputs, self.derivatives[which], self.share)

    def gradient(self) -> Tensor:
        layout, module, first = self.layer.layout, self.layer.module, self.derivatives[0]
        found = dict[str, Tensor]()
        if layout.weight is not None:
            find = WEIGHT_GRADIENT[len(module.kernel_size) - 1]
            if self._is_transposed:  # the adjoint of a convolution of the outputs: the two change places
                options = self._strides() | {"padding": module.padding}
                found[layout.weight] = find(first, layout.shape, self.inputs, **options)
            else:
                found[layout.weight] = find(pad_as(module, self.inputs), layout.shape, first, **self._strides())
        if layout.bias is not None:
            found[layout.bias] = first.flatten(2).sum((0, 2))
        return layout.join(found)

    def slopes(self, matrix: Tensor, examples: int) -> Tensor:
        layout = self.layer.layout
        parts = layout.split(matrix)
        found = torch.zeros(len(self.derivatives), examples, dtype=matrix.dtype, device=matrix.device)
        if layout.weight is not None:
            image = self._convolve(parts[layout.weight])
            found += torch.stack([(image * each).reshape(examples, -1).sum(1) for each in self.derivatives])
        if layout.bias is not None:
            sums = torch.stack([each.flatten(2).sum(2) for each in self.derivatives])
            found += (sums @ parts[layout.bias].reshape(-1)).reshape(len(sums), examples, -1).sum(2)
        return found

    @property
    def _is_transposed(self) -> bool:
        return isinstance(self.layer.module, TRANSPOSED)

    def _convolve(self, weight: Tensor) -> Tensor:
        """The convolution without its bias, of another weight."""
        module = self.layer.module
        if self._is_transposed:
            options = self._strides() | {"padding": module.padding, "output_padding": module.output_padding}
            return SPREAD[len(module.kernel_size) - 1](self.inputs, weight, **options)
        convolve: Any = CONVOLVE[len(module.kernel_size) - 1]
        return convolve(pad_as(module, self.inputs), weight, **self._strides())

    def _strides(self) -> dict[str, Any]:
        module = self.layer.module
        return {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}


def has_usual_size(module: Any, inputs: Tensor, outputs: Tensor) -> bool:
    """True if a transposed convolution was asked for no `output_size`, and the inputs are what a plain one returns.

    Args:
        module: The transposed convolution.
        inputs: What it saw.
        outputs: What it gave, or a derivative there.
    """
    options = zip(
        module.kernel_size, module.stride, module.padding, module.dilation, module.output_padding, strict=True
    )
    for (kernel, stride, padding, dilation, more), before, after in zip(
        options, inputs.shape[2:], outputs.shape[2:], strict=True
    ):
        reach = dilation * (kernel - 1) + 1 - 2 * padding
        if after != (before - 1) * stride + reach + more or (after - reach) // stride + 1 != before:
            return False
    return True
