"""The second derivative of a scalar function of the parameters: products from one gradient graph that is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.derivatives import apply_linear, exact_derivatives
from natgrad.ground.messages import show_shape
from natgrad.ground.pure import check_followed, run_alone
from natgrad.ground.spaces import Params, Space
from natgrad.operators.base import Facts, Operator
from natgrad.operators.linearization import UNRECORDED


class Curvature(Operator):
    """H = d^2 f / d theta^2 at a point, symmetric and as a rule indefinite; H v by double backward.

    H is zero where f is linear.

    Args:
        function: f, params -> scalar tensor.
        params: The point, by name. It is copied, so that H stays that of this point.
        model: The module that f evaluates with these parameters in the place of its own, if it does.
        name: What an error message calls f.

    Raises:
        ValueError: If the value is not a finite scalar, or does not depend on params.

    Reference:
        Pearlmutter 1994.
    """

    facts = Facts(indefinite=True)

    def __init__(
        self, function: Callable[[Params], Tensor], params: Params, model: object = None, name: str = "the loss"
    ) -> None:
        self.space, self.function, self.model = Space(params), function, model
        self.size, self.dtype, self.device = self.space.size, self.space.dtype, self.space.device
        self.leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad(), exact_derivatives():
            # cuDNN's recurrent layers have no second derivative; the setting is one for all threads
            with run_alone(), torch.backends.cudnn.flags(enabled=False):
                value = function(self.leaves)
            if not isinstance(value, Tensor) or value.dim() != 0:
                came = f"{'has shape' if isinstance(value, Tensor) else 'is'} {show_shape(value)}"
                raise ValueError(f"{name} {came}, expected a scalar tensor, such as the mean loss of a batch")
            if torch.is_inference_mode_enabled():
                raise ValueError(UNRECORDED)
            if not value.requires_grad:
                raise ValueError(f"{name} does not depend on params: look for a detach() in it, or in its model")
            if not bool(torch.isfinite(value)):
                came = float(value.detach())
                raise ValueError(f"{name} is {came} at params: look for a NaN in the inputs, or an overflow")
            check_followed(value, self.leaves, model, function)
            points = list(self.leaves.values())
            gradients = torch.autograd.grad(value, points, create_graph=True, materialize_grads=True)
        self.value = value.detach()
        # a parameter in which f is linear has a gradient without a graph
        self.curved = {name: g for name, g in zip(self.leaves, gradients, strict=True) if g.requires_grad}
        self.gradient = self.space.flatten({n: g.detach() for n, g in zip(self.leaves, gradients, strict=True)})

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has a graph of its own: a tensor's does not go with it."""
        point = {name: leaf.detach() for name, leaf in self.leaves.items()}
        return type(self), (self.function, point, self.model), {"facts": self.facts}

    def mv(self, vector: Tensor) -> Tensor:
        self.space.check(vector)
        return apply_linear(self._push, self._push, vector)

    def _push(self, vector: Tensor) -> Tensor:
        tangents = self.space.unflatten(vector)
        if not self.curved:
            return torch.zeros_like(vector)
        images = torch.autograd.grad(
            list(self.curved.values()),
            list(self.leaves.values()),
            [tangents[name] for name in self.curved],
            retain_graph=True,
            materialize_grads=True,
        )
        return self.space.flatten(dict(zip(self.leaves, images, strict=True)))
