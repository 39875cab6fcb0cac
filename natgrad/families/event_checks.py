"""What a family's methods are given, checked: examples x, and the moments that a distribution is made from."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.lapack import is_concrete


def check_width(x: Tensor, width: int | None, what: str = "") -> Tensor:
    """x as it is, checked to be a tensor (..., width).

    Args:
        x: What came.
        width: How many entries the last dimension must have. None: any number.
        what: What the entries are, for the error message.

    Raises:
        ValueError: For another shape.
    """
    if not isinstance(x, Tensor) or x.dim() == 0 or (width is not None and x.shape[-1] != width):
        came = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {type(x).__name__}"
        raise ValueError(f"x {came}, expected {what}{' ' if what else ''}(..., {'n' if width is None else width})")
    return x


def check_support(x: Tensor, allowed: Tensor, words: str) -> Tensor:
    """x as it is. ValueError unless `allowed`, of any shape, holds everywhere; nothing is said within torch.func."""
    if is_concrete(allowed) and not bool(allowed.all()):
        raise ValueError(f"x has entries outside of what the family can give, expected {words}")
    return x


def check_above(value: Tensor, low: float, name: str) -> Tensor:
    """The value as it is. ValueError unless every entry is above `low`."""
    if is_concrete(value) and not bool((value > low).all()):
        raise ValueError(f"{name} is {float(value.min()):.4g} at least, expected above {low:g}")
    return value


def check_moments(mean: Tensor, matrix: Tensor, d: int, name: str = "covariance") -> None:
    """ValueError unless the shapes are (..., d) and (..., d, d), of finite floating-point numbers."""
    for each, what in ((mean, "mean"), (matrix, name)):
        if not isinstance(each, Tensor) or not each.is_floating_point():
            came = each.dtype if isinstance(each, Tensor) else type(each).__name__
            raise TypeError(f"{what} is {came}, expected a floating-point tensor")
    if mean.shape[-1:] != (d,) or matrix.shape[-2:] != (d, d):
        raise ValueError(
            f"mean and {name} have shapes {tuple(mean.shape)} and {tuple(matrix.shape)}, expected (..., {d}) and "
            f"(..., {d}, {d})"
        )
    if not is_concrete(mean) or not is_concrete(matrix):
        return
    if not bool(torch.isfinite(mean.detach()).all()):
        raise ValueError("mean has entries that are not finite")
    gap = (matrix - matrix.mT).detach().abs()
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    if bool((gap > 1e4 * torch.finfo(matrix.dtype).eps * largest).any()):
        raise ValueError(f"{name} is not symmetric; symmetrise it with (A + A.mT) / 2")


def centre_examples(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Mean (..., d) of x (b, ..., d) and what is left of x without it, in float64. ValueError for an empty x."""
    x = check_width(x, d)
    if len(x) == 0:
        raise ValueError("x is empty, expected at least one example")
    x = x if x.device.type == "mps" and x.is_floating_point() else x.double()
    return x.mean(0), x - x.mean(0)


def floating_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x, torch's default one for integers."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
