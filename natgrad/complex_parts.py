"""Complex parameters as pairs of real ones, which all that is flat and real here can move."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization


def split_complex_parameters(net: nn.Module) -> None:
    """Represent every complex parameter by its real and imaginary parts, a parametrisation of torch's."""
    found = [
        (module, name, p)
        for module in net.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.is_complex()
    ]
    if len({id(p) for _, _, p in found}) < len(found):
        raise ValueError("net shares a complex parameter between modules; keep it in one and call that one twice")
    for module, name, _ in found:
        register_parametrization(module, name, ComplexParts())


class ComplexParts(nn.Module):
    """A complex tensor from its real and imaginary parts, as a parametrisation of torch's."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """real + i imaginary.

        real: Any shape. imaginary: The same shape.
        """
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The two parts.

        value: Complex, any shape.
        """
        return value.real.clone(), value.imag.clone()
