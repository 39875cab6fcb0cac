"""What a family's methods are given, checked: examples x, and the moments that a distribution is made from."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.ground.linalg import factor_or_nan, is_concrete
from natgrad.ground.messages import show_dtype, show_shape
from natgrad.ground.typed_torch import as_tensor_like


def check_width(x: Tensor, width: int | None, what: str = "") -> Tensor:
    """x as it is, checked to be a tensor (..., width)."""
    if not isinstance(x, Tensor) or x.dim() == 0 or (width is not None and x.shape[-1] != width):
        came = f"{'has shape' if isinstance(x, Tensor) else 'is'} {show_shape(x)}"
        advice = "; for numbers, x[:, None]" if width == 1 and isinstance(x, Tensor) else ""
        raise ValueError(
            f"x {came}, expected {what}{' ' if what else ''}(..., {'n' if width is None else width}){advice}"
        )
    return x


def as_tensors(*values: Tensor | float) -> list[Tensor]:
    """Tensors as they are, and numbers in the dtype and on the device of the first floating-point one among them."""
    floating = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    like = next(floating, torch.empty(0))
    return [value if isinstance(value, Tensor) else as_tensor_like(value, like) for value in values]


def check_support(x: Tensor, allowed: Tensor, words: str) -> Tensor:
    """x as it is. ValueError unless `allowed`, of any shape, holds everywhere; nothing is said within torch.func."""
    if is_concrete(allowed) and not bool(allowed.all()):
        raise ValueError(f"x has entries outside of what the family can give, expected {words}")
    return x


def read_positive(x: Tensor) -> Tensor:
    """x (..., 1) as it is. ValueError unless every entry is above zero."""
    return check_support(check_width(x, 1), x > 0, "x > 0")


def check_above(value: Tensor, low: float, name: str) -> Tensor:
    """The value as it is. ValueError unless every entry is above `low`."""
    if is_concrete(value) and not bool((value > low).all()):
        raise ValueError(f"{name} is {float(value.min()):.4g} at least, expected above {low:g}")
    return value


def check_moments(mean: Tensor, matrix: Tensor, d: int, name: str = "covariance") -> None:
    """ValueError unless the shapes are (..., d) and (..., d, d), of finite floating-point numbers."""
    for each, what in ((mean, "mean"), (matrix, name)):
        if not isinstance(each, Tensor) or not each.is_floating_point():
            raise TypeError(f"{what} is {show_dtype(each)}, expected a floating-point tensor")
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


VARIES = 8.0
"""Standard deviations of examples, in units of their own round-off, up to which they do not vary."""

LOST = 1e3
"""Parts of a covariance's round-off up to which the variance of one variable given the others is not known."""


def widen(x: Tensor) -> Tensor:
    """x in float64 or complex128, on devices that have them."""
    if x.device.type == "mps" and (x.is_floating_point() or x.is_complex()):
        return x
    return x.to(torch.complex128) if x.is_complex() else x.double()


def centre(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of x (b, ...) and x without it, from differences to the first example, which are exact for near numbers."""
    away = x - x[:1]
    gap = away.mean(0)
    return x[0] + gap, away - gap


def root_mean_square(x: Tensor) -> Tensor:
    """Of x (b, ...), shape (...)."""
    return x.detach().abs().square().mean(0).sqrt()


def floating_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x or of its real part, torch's default one for integers."""
    return x.dtype.to_real() if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()


def check_varies(spread: Tensor, size: Tensor | float, dtype: torch.dtype) -> None:
    """ValueError unless examples of a size spread (...) by more than round-off in the dtype in which they came."""
    if is_concrete(spread) and not bool((spread > VARIES * torch.finfo(dtype).eps * size).all()):
        raise ValueError(
            f"x does not vary, or no more than round-off in {dtype} does: its standard deviation is "
            f"{float(spread.min()):.2g}; expected examples of a distribution with a density: take more of them, or "
            "give x without its mean, or in float64"
        )


def centre_varying(x: Tensor, by_mean: bool = False) -> tuple[Tensor, Tensor]:
    """`centre` of x in float64. ValueError unless it varies by more than the round-off of its size, or of its mean."""
    mean, centred = centre(widen(x))
    size = mean.detach() if by_mean else x.detach().abs().amax(0)
    check_varies(root_mean_square(centred), size, floating_dtype(x))
    return mean, centred


def check_spreads(covariance: Tensor, size: Tensor, dtype: torch.dtype) -> None:
    """`check_varies` of the deviation of each variable given those before it, from a covariance (..., d, d)."""
    variance = covariance.detach().diagonal(dim1=-2, dim2=-1)
    check_varies(variance.sqrt(), size, dtype)
    given = factor_or_nan(covariance.detach()).diagonal(dim1=-2, dim2=-1).square()
    lost = torch.maximum(
        (VARIES * torch.finfo(dtype).eps * size).square(),
        LOST * covariance.shape[-1] * torch.finfo(covariance.dtype).eps * variance,
    )
    if is_concrete(given) and not bool((given > lost).all()):
        raise ValueError(
            "the covariance of x is not positive definite, or no more than round-off is: some variable is a "
            "combination of the others; expected more examples than variables, none of which repeats others"
        )


def check_rest(rest: Tensor, total: Tensor, dtype: torch.dtype, words: str, expected: str) -> None:
    """ValueError unless a difference is above the round-off of `total`, the size of the numbers it was taken of."""
    if is_concrete(rest) and not bool((rest > 4 * torch.finfo(dtype).eps * total).all()):
        raise ValueError(f"{words}, or no larger than round-off in {dtype}: expected {expected}")
