"""Energies built of linear layers and elementwise activations: derivatives in x carried forward through the layers.

For E(x) with z_l what goes into activation l and a_l = f_l(z_l) what comes out, all layers between being linear,

    d^2E/dx_i^2  =  sum_l sum_h  dE/da_lh  f_l''(z_lh)  (dz_lh/dx_i)^2

so that one forward and one backward pass, and the Jacobians dz_l/dx carried through the layers, give every second
derivative: no backward pass of the score per variable. dz_1/dx is the first layer's matrix itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.pure import full_precision
from natgrad.spaces import Params

Elementwise = Callable[[Tensor], Tensor]

ACTIVATIONS = (
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.LogSigmoid,
    nn.Softsign, nn.Tanhshrink, nn.ReLU, nn.LeakyReLU,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.AlphaDropout)


@dataclass(frozen=True)
class Affine:
    """z = W a + b, by the parameters' names.

    Args:
        weight: The name of W.
        bias: The name of b, or None.
    """

    weight: str
    bias: str | None


@dataclass(frozen=True, eq=False)
class Chain:
    """A network of affine maps and elementwise functions, in order: (b, N) -> (b, 1).

    Args:
        parts: The maps and functions, in order.
        frozen: The parameters of the module, for those that are not given.
    """

    parts: tuple[Affine | Elementwise, ...]
    frozen: dict[str, Tensor]

    def scores_and_curvatures(
        self, params: Params, inputs: Tensor, dims: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """d log p / dx (b, N) and d^2 log p / dx_i^2 (b, len(dims)), log p = -E.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, N).
            dims: The variables i of the curvatures. None: all.
        """
        with full_precision(params):
            state = self.frozen | dict(params)
            bent = self._forward(state, inputs, dims)
            delta, seconds = inputs.new_ones(len(inputs), 1), inputs.new_zeros(())
            for part in reversed(self.parts):
                if isinstance(part, Affine):
                    delta = delta @ state[part.weight]
                    continue
                one = bent.pop()
                seconds = seconds - sum_weighted_squares(one.jacobian, delta * one.bend)
                delta = delta * one.slope
        count = inputs.shape[1] if dims is None else len(dims)
        return -delta, seconds.expand(len(inputs), count)

    def _forward(self, state: Params, inputs: Tensor, dims: Sequence[int] | None) -> list[Bent]:
        """What bends on the way: one entry per activation."""
        value, jacobian, found = inputs, None, list[Bent]()
        count = sum(not isinstance(part, Affine) for part in self.parts)
        for part in self.parts:
            if isinstance(part, Affine):
                weight, bias = state[part.weight], None if part.bias is None else state[part.bias]
                value = nn.functional.linear(value, weight, bias)
                if len(found) < count:
                    jacobian = carry_jacobian(jacobian, weight, dims)
                continue
            if jacobian is None:  # an activation of x itself
                unit = torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
                jacobian = unit if dims is None else unit[list(dims)]
            found.append(bend_activation(part, jacobian, value))
            if len(found) < count:
                jacobian = found[-1].slope.unsqueeze(1) * jacobian
            value = part(value)
        return found


@dataclass(frozen=True)
class Bent:
    """An activation on the way, with what it does to derivatives.

    Args:
        jacobian: dz/dx of what goes in, shape (i, d) or (b, i, d).
        slope: f'(z), shape (b, d).
        bend: f''(z), shape (b, d).
    """

    jacobian: Tensor
    slope: Tensor
    bend: Tensor


def carry_jacobian(jacobian: Tensor | None, weight: Tensor, dims: Sequence[int] | None) -> Tensor:
    """The Jacobian in x behind W, from the one before it; None: of x itself."""
    if jacobian is None:
        return weight.mT if dims is None else weight.mT[list(dims)]
    return jacobian @ weight.mT


def sum_weighted_squares(jacobian: Tensor, weights: Tensor) -> Tensor:
    """sum_h w_h J_ih^2 per example, (b, i), for J (b, i, d), or (i, d) where it is the same for all examples."""
    if jacobian.dim() == 2:
        return weights @ jacobian.square().mT
    return (jacobian.square() @ weights.unsqueeze(2)).squeeze(2)


def bend_activation(part: Elementwise, jacobian: Tensor, z: Tensor) -> Bent:
    """An activation at z; in closed form for the commonest, else by autograd."""
    if type(part) is nn.Tanh:
        value = torch.tanh(z)
        first = 1 - value.square()
        return Bent(jacobian, first, -2 * value * first)
    if type(part) is nn.Softplus:
        softplus: Any = part
        s, straight = torch.sigmoid(softplus.beta * z), softplus.beta * z > softplus.threshold
        return Bent(jacobian, torch.where(straight, 1, s), torch.where(straight, 0, softplus.beta * s * (1 - s)))
    if type(part) is nn.SiLU:
        s = torch.sigmoid(z)
        first = s + z * s * (1 - s)
        return Bent(jacobian, first, s * (1 - s) * (2 + z * (1 - 2 * s)))
    first = differentiate_elementwise(part)
    return Bent(jacobian, first(z), differentiate_elementwise(first)(z))


def differentiate_elementwise(function: Elementwise) -> Elementwise:
    """f' of an elementwise f, as a function that can be differentiated again."""
    return torch.func.grad(lambda z: function(z).sum())


def chain_of(module: nn.Module, params: Params, inputs: Tensor) -> Chain | None:
    """The module as a chain, or None where it is not made of known parts, or where a hook may change it.

    Args:
        module: The energy.
        params: Name -> tensor.
        inputs: X, shape (b, N).
    """
    if inputs.dim() != 2 or not inputs.is_floating_point():
        return None
    parts = list[Affine | Elementwise]()
    for prefix, part in flatten_parts(module, ""):
        if type(part) is nn.Linear and not has_hooks(part):
            parts.append(Affine(f"{prefix}weight", None if part.bias is None else f"{prefix}bias"))
        elif type(part) in ACTIVATIONS and not has_hooks(part) and not getattr(part, "inplace", False):
            parts.append(part)
        elif not passes_through(part):
            return None
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    linear = [part for part in parts if isinstance(part, Affine)]
    frozen = {name: p.detach() for name, p in module.named_parameters()}
    if (
        not linear
        or any(count > 1 for count in uses.values())
        or not fit_together(linear, frozen | dict(params), inputs)
    ):
        return None
    return Chain(tuple(parts), frozen)


def flatten_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of nested `nn.Sequential`s in order, each with the prefix of its parameters' names."""
    if type(module) is not nn.Sequential or has_hooks(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from flatten_parts(child, f"{prefix}{name}.")


def has_hooks(module: nn.Module) -> bool:
    """Whether something may change what goes in or comes out; this library's own hooks pass over such calls."""
    open_module: Any = module  # torch has no public list of hooks
    hooks = [*open_module._forward_hooks.values(), *open_module._forward_pre_hooks.values()]
    return any(not type(hook).__module__.startswith("natgrad.") for hook in hooks)


def passes_through(part: nn.Module) -> bool:
    """Whether it leaves (b, d) as it is."""
    if has_hooks(part):
        return False
    if type(part) in DROPOUTS:
        return not part.training
    return type(part) is nn.Identity or (type(part) is nn.Flatten and part.start_dim == 1)


def fit_together(linear: Sequence[Affine], state: Params, inputs: Tensor) -> bool:
    """Whether the matrices, one after the other, take (b, N) to (b, 1) in one dtype."""
    widths = [inputs.shape[1], *(len(state[part.weight]) for part in linear)]
    right = all(state[part.weight].shape[1] == width for part, width in zip(linear, widths, strict=False))
    return right and widths[-1] == 1 and {p.dtype for p in state.values()} == {inputs.dtype}
