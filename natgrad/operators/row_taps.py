"""Row gradients of layers, read from one forward pass and its output derivatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.spaces import Params, Space

BLOCK = 256  # rows of a Gram matrix at a time
ALL = slice(None)


class Part(Protocol):
    """Some parameters' part of U (n, r): r row gradients, in whatever form is cheapest."""

    def add_gram(self, total: Tensor) -> None:
        """total (r, r) += this part's U^T U, in the lower triangle only."""
        ...

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        """name -> (r, size): the row gradients written out; which: those of some whole examples."""
        ...

    def squares(self) -> dict[str, Tensor]:
        """name -> (size,): sums of squares over the rows."""
        ...

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        """name -> (size,): the combination of the rows with weights (r,)."""
        ...

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        """(r,): every row's inner product with a tangent, given by name, in the parameters' shapes."""
        ...


@dataclass(frozen=True)
class Outer:
    """A linear layer seen once per example: row (x, c) of the weight is delta_xc (x) a_x, of the bias delta_xc.

    inputs: a (b, d).   deltas: (b, k, o).   r = b k. A name is None where that parameter is not in the space.
    """

    inputs: Tensor
    deltas: Tensor
    weight: str | None
    bias: str | None

    def add_gram(self, total: Tensor) -> None:
        b, k, o = self.deltas.shape
        if o == 1:  # delta is a number per row: one product of width d instead of two
            Explicit.of(self.rows()).add_gram(total)
            return
        flat = self.deltas.reshape(b * k, o)
        # a column of ones is the bias's input
        inputs = self.inputs if self.weight else self.inputs[:, :0]
        inputs = torch.cat([inputs, torch.ones_like(self.inputs[:, :1])], dim=1) if self.bias else inputs
        for start, stop in blocks(b, max(1, BLOCK // k)):
            like = inputs[start:stop] @ inputs[:stop].mT
            pairs = flat[start * k : stop * k] @ flat[: stop * k].mT
            corner = total[start * k : stop * k, : stop * k].view(stop - start, k, stop, k)
            corner.addcmul_(pairs.view(stop - start, k, stop, k), like.view(stop - start, 1, stop, 1))

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        b, k, _ = self.deltas.shape
        start, stop, _ = which.indices(b * k)
        inputs, deltas = (tensor[start // k : stop // k] for tensor in (self.inputs, self.deltas))
        outer = torch.einsum("xko,xd->xkod", deltas, inputs) if self.weight else None
        found = {self.weight: outer, self.bias: deltas}
        return {n: v.reshape(stop - start, -1) for n, v in found.items() if n is not None and v is not None}

    def squares(self) -> dict[str, Tensor]:
        squared = self.deltas.square().sum(1)  # (b, o)
        return self._named(squared.mT @ self.inputs.square() if self.weight else None, squared.sum(0))

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        b, k, _ = self.deltas.shape
        combined = (weights.view(b, k, 1) * self.deltas).sum(1)  # not einsum: its batched product is slower for k = 1
        return self._named(combined.mT @ self.inputs if self.weight else None, combined.sum(0))

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        image = torch.zeros(1, 1, dtype=self.deltas.dtype, device=self.deltas.device)
        if self.weight:
            image = self.inputs @ tangents[self.weight].mT
        if self.bias:
            image = image + tangents[self.bias]
        return (self.deltas * image.unsqueeze(1)).sum(2).reshape(-1)

    def _named(self, weight: Tensor | None, bias: Tensor) -> dict[str, Tensor]:
        found = {self.weight: weight, self.bias: bias}
        return {name: value.reshape(-1) for name, value in found.items() if name is not None and value is not None}


@dataclass(frozen=True)
class Explicit:
    """Row gradients written out: matrix (r, total size of the named parameters)."""

    matrix: Tensor
    sizes: dict[str, int]

    @staticmethod
    def of(rows: dict[str, Tensor]) -> Explicit:
        """From (r, size) by name."""
        return Explicit(torch.cat(list(rows.values()), dim=1), {name: part.shape[1] for name, part in rows.items()})

    def add_gram(self, total: Tensor) -> None:
        for start, stop in blocks(len(self.matrix), BLOCK):
            total[start:stop, :stop].addmm_(self.matrix[start:stop], self.matrix[:stop].mT)

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        return dict(zip(self.sizes, self.matrix[which].split(list(self.sizes.values()), dim=1), strict=True))

    def squares(self) -> dict[str, Tensor]:
        return self._named(self.matrix.square().sum(0))

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        return self._named(weights @ self.matrix)

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        return self.matrix @ torch.cat([tangents[name].reshape(-1) for name in self.sizes])

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.sizes, vector.split(list(self.sizes.values())), strict=True))


def shared_over_positions(inputs: Tensor, deltas: Tensor, weight: str | None, bias: str | None) -> Explicit:
    """Rows of a linear map applied at t positions of every example (sequences, convolution patches).

    inputs: (b, t, d).   deltas: (b, k, t, o). The row of the weight is sum_t delta_t (x) a_t.
    """
    b, k, _, o = deltas.shape
    found: dict[str, Tensor] = {}
    if weight:
        found[weight] = torch.einsum("xkto,xtd->xkod", deltas, inputs).reshape(b * k, -1)
    if bias:
        found[bias] = deltas.sum(2).reshape(b * k, o)
    return Explicit.of(found)


def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over `count` rows; blocks of a symmetric product stay in the cache and skip its upper half."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


@dataclass(frozen=True)
class Tap:
    """One layer's pass: what went in, and a zero added to what came out, whose gradient is the output derivative."""

    module: nn.Module
    inputs: Tensor
    dummy: Tensor
    weight: str | None
    bias: str | None

    def part(self, deltas: Sequence[Tensor], dtype: torch.dtype) -> Part:
        """This layer's rows, from the output derivatives of k cotangents, each of the output's shape."""
        stacked = torch.stack(tuple(deltas), dim=1).to(dtype)  # (b, k, ...)
        if isinstance(self.module, nn.Linear):
            return self._linear(self.inputs.to(dtype), stacked)
        return self._convolution(self.inputs.to(dtype), self.module, stacked)

    def _linear(self, inputs: Tensor, deltas: Tensor) -> Part:
        if inputs.dim() == 2:
            return Outer(inputs, deltas, self.weight, self.bias)
        positions = inputs.flatten(1, -2)
        return shared_over_positions(positions, deltas.flatten(2, -2), self.weight, self.bias)

    def _convolution(self, inputs: Tensor, module: Any, deltas: Tensor) -> Part:
        images = inputs if inputs.dim() == 4 else inputs.unsqueeze(2)
        kernel, stride, padding, dilation = (
            tuple(getattr(module, key)) for key in ("kernel_size", "stride", "padding", "dilation")
        )
        if inputs.dim() == 3:  # a 1-d convolution is a 2-d one on images of height 1
            kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
        patches = functional.unfold(images, kernel, dilation, padding, stride).mT  # (b, positions, d)
        return shared_over_positions(patches, deltas.flatten(3).mT, self.weight, self.bias)


def record_taps(model: nn.Module, space: Space, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tap]]:
    """Call `run()`, a forward pass of `model`, with a tap in every layer that the layer-wise rows know.

    Returns run's outputs and the taps of the layers that were called exactly once and whose parameters belong to
    them alone. The hooks are gone when this returns.
    """
    names = own_names(model, space)
    seen: list[Tap] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        dummy = torch.zeros_like(output, requires_grad=True)
        weight, bias = names[module]
        seen.append(Tap(module, args[0].detach(), dummy, weight, bias))
        return output + dummy  # a new tensor: an in-place activation after it does no harm

    handles = [module.register_forward_hook(hook) for module in names]
    try:
        with torch.enable_grad():
            outputs = run()
    finally:
        for handle in handles:
            handle.remove()
    calls = Counter(tap.module for tap in seen)
    return outputs, [tap for tap in seen if calls[tap.module] == 1 and is_batched(tap)]


def is_batched(tap: Tap) -> bool:
    """False for a layer called on a single example, whose leading dimension is not the examples'."""
    if isinstance(tap.module, nn.Linear):
        return tap.inputs.dim() >= 2
    return tap.inputs.dim() == (3 if isinstance(tap.module, nn.Conv1d) else 4)


def own_names(model: nn.Module, space: Space) -> dict[nn.Module, tuple[str | None, str | None]]:
    """Layers with a closed form -> the names of their weight and bias in the space (None if not there).

    Left out: layers that share a parameter with another, and layers without any parameter in the space.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found = {}
    for prefix, module in model.named_modules():
        if not has_closed_form(module) or any(uses[id(p)] > 1 for p in module.parameters(recurse=False)):
            continue
        dot = f"{prefix}." if prefix else ""
        weight, bias = (name if name in space.blocks else None for name in (f"{dot}weight", f"{dot}bias"))
        if weight or bias:
            found[module] = (weight, bias)
    return found


def has_closed_form(module: nn.Module) -> bool:
    """True for plain linear layers and for convolutions that `unfold` describes. Subclasses may compute anything."""
    if type(module) is nn.Linear:
        return True
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)) or type(module) not in (nn.Conv1d, nn.Conv2d):
        return False
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def backward_to_taps(outputs: Tensor, taps: Sequence[Tap], cotangent: Tensor) -> list[Tensor]:
    """Output derivatives at every tap for one cotangent on the outputs: a backward pass without weight gradients."""
    dummies = [tap.dummy for tap in taps]
    return list(
        torch.autograd.grad(outputs, dummies, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True)
    )


def frozen_point(leaves: Params) -> dict[str, Tensor]:
    """The parameters without gradient: a tapped pass needs derivatives at the taps only."""
    return {name: leaf.detach() for name, leaf in leaves.items()}
