"""Variables of different kinds: a product of distributions, each moved by its own natural gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.search.base import Best, Search


class ProductSearch(Search):
    """Minimum over points whose columns belong to several searches, such as a Gaussian and a categorical one.

    The Fisher matrix of a product is block diagonal: its natural gradient is that of each part, all ranked by the same
    values. Candidates are those of the parts, side by side. Parts that use ranks fit (`GaussianSearch`;
    `BernoulliSearch` and `CategoricalSearch` with `update=`). The regression of f on one part's statistics does not: it
    takes what the other parts do for noise.

    Args:
        *parts: Searches with the same popsize.

    Raises:
        TypeError: If a part is no search, or there is none.
        ValueError: If the popsizes differ.

    Example:
        >>> s = ng.search
        >>> numbers = ng.GaussianSearch([0.0, 0.0], 1.0, popsize=20, seed=0)
        >>> bits = ng.BernoulliSearch(5, popsize=20, seed=0, update=s.PBIL(0.3))
        >>> search = s.ProductSearch(numbers, bits)
        >>> for _ in range(60):
        ...     X = search.ask()
        ...     z, b = search.split(X)
        ...     search.tell(X, (z - 1).square().sum(1) - b.sum(1))
        >>> search.best.fun < -4.99
        True
    """

    STATE = ("_asked",)

    def __init__(self, *parts: Search) -> None:
        wrong = [part for part in parts if not isinstance(part, Search)]
        if not parts or wrong:
            raise TypeError(f"parts are {parts!r}, expected searches, such as GaussianSearch and CategoricalSearch")
        sizes = {part.popsize for part in parts}
        if len(sizes) > 1:
            raise ValueError(f"the parts have popsizes {sorted(sizes)}, expected one: pass popsize= to each of them")
        self.parts, self.popsize = parts, parts[0].popsize
        self.nfev = self.nit = 0
        start = torch.cat([part.best.x.to(torch.float64) for part in parts])
        self.best = Best(start, torch.inf, 0)
        self._asked: Tensor | None = None
        self._widths = [len(part.best.x) for part in parts]
        self.arguments = {
            f"{name} of part {k}": part.arguments[name] for k, part in enumerate(parts) for name in part.arguments
        }

    def renew(self, popsize: int, run: int) -> ProductSearch:
        return ProductSearch(*(part.renew(popsize, run) for part in self.parts))

    def ask(self) -> Tensor:
        self._asked = torch.cat([part.ask() for part in self.parts], 1)
        return self._asked.clone()

    def split(self, X: Tensor) -> tuple[Tensor, ...]:
        """The columns of each part, (..., d_k).

        Args:
            X: Candidates, shape (..., d).
        """
        return X.split(self._widths, -1)

    def stop(self) -> str | None:
        """The first part's reason, once all parts have one."""
        reasons = [part.stop() for part in self.parts]
        return reasons[0] if all(reasons) else None

    def centre(self) -> Tensor:
        return torch.cat([part.centre() for part in self.parts])

    def measures(self) -> dict[str, float]:
        """The measures of the parts."""
        return {name: value for part in self.parts for name, value in part.measures().items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        if len(state["parts"]) != len(self.parts):
            raise ValueError(f"the state is of {len(state['parts'])} parts, this search has {len(self.parts)}")
        pairs = list(zip(self.parts, state["parts"], strict=True))
        for part, own in pairs:
            part.check_state(own)
        super().load_state_dict(state)
        for part, own in pairs:
            part.load_state_dict(own)

    def _list_asked(self) -> Tensor | None:
        return self._asked

    def _check_candidates(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points, values = super()._check_candidates(X, F)
        own = zip(self.parts, self.split(points), strict=True)
        return torch.cat([part._check_candidates(columns, values)[0] for part, columns in own], 1), values

    def _move(self, points: Tensor, values: Tensor) -> None:
        for part, own in zip(self.parts, self.split(points), strict=True):
            part.tell(own, values)
