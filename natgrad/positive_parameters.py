"""Parameters that must stay positive, as functions of parameters that may be anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positive:
    """values = exp(raw): for use inside a model, `ng.positive(params["V"])`; `ng.positive.inverse(start)` to begin.

    Train raw. Setting negative entries to zero after the step instead (projection) is right for a Euclidean step only:
    the closest feasible point in the metric G is another one, and a natural-gradient step that is cut off in the
    coordinates need not go downhill. The two-layer model of Karakida, Okada & Amari 2016 stays on its plateau that way.
    The metric sees through exp: the natural gradient's path is that of values until the step length counts.

    Example:
        >>> raw = ng.positive.inverse(torch.tensor([0.5, 2.0]))
        >>> ng.positive(raw)
        tensor([0.5000, 2.0000])
    """

    def __call__(self, raw: Tensor) -> Tensor:
        """exp(raw).

        Args:
            raw: Any shape.
        """
        return raw.exp()

    def slope(self, raw: Tensor) -> Tensor:
        """d values / d raw, entry by entry: exp(raw).

        Args:
            raw: Any shape.
        """
        return raw.exp()

    def inverse(self, values: Tensor) -> Tensor:
        """raw with exp(raw) = values.

        Args:
            values: Any shape.

        Raises:
            ValueError: For an entry that is not positive and finite.
        """
        if not isinstance(values, Tensor) or not values.is_floating_point():
            came = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"values is {came}, expected a floating-point tensor of positive entries")
        if not bool(((values > 0) & (values < torch.inf)).all()):
            low, high = float(values.min()), float(values.max())
            raise ValueError(
                f"values lie between {low:.3g} and {high:.3g}, expected positive, finite entries: exp never reaches 0; "
                "start small ones at 1e-3, say"
            )
        return values.log()


@dataclass(frozen=True)
class Square:
    """values = raw^2: reaches 0, where its slope vanishes too. Both signs of raw give one model."""

    def __call__(self, raw: Tensor) -> Tensor:
        """raw^2.

        Args:
            raw: Any shape.
        """
        return raw.square()

    def slope(self, raw: Tensor) -> Tensor:
        """d values / d raw, entry by entry: 2 raw.

        Args:
            raw: Any shape.
        """
        return 2 * raw

    def inverse(self, values: Tensor) -> Tensor:
        """raw >= 0 with raw^2 = values.

        Args:
            values: Any shape.

        Raises:
            ValueError: For a negative entry.
        """
        if not bool((values >= 0).all()):
            raise ValueError(f"values has entries down to {float(values.min()):.3g}, expected none below 0")
        return values.sqrt()


positive = Positive()
