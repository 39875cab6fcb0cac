"""How large the errors of a regression are beside the noise of its likelihood, and which layers answer for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from natgrad.families import Criterion, Gaussian, Huber, Laplace
from natgrad.families.criteria import Entrywise
from natgrad.layers import Tap
from natgrad.rules import ErrorScale

Density = Gaussian | Laplace | Huber
STANDARD = 2.0  # standard deviations of the likelihood that errors have where targets are in units of their own
RESHAPES = ("View", "Squeeze", "Unsqueeze", "Transpose", "Permute", "TBackward", "Alias", "Clone", "ToCopy", "Reshape")


@dataclass(frozen=True)
class ErrorSize:
    """The unit of a regression's targets, for bounds that would else depend on it.

    Squared errors stand for a Gaussian of fixed width, absolute ones for Laplace's density. Targets in units of their
    own (prices, grams) may lie a thousand widths away, and layers that start at a size of one have as far to go.

    Args:
        names: Parameters of the layers whose outputs are the model's.
        entries: Outputs of one row of the likelihood.
        density: Of the errors.
    """

    names: tuple[str, ...]
    entries: int
    density: Density = Gaussian()

    def scale(self, loss: Tensor | float) -> ErrorScale:
        """The root of the mean squared error in units of two standard deviations of the likelihood, at least 1.

        Args:
            loss: In nats per row of the likelihood.
        """
        nats = float(loss) / self.entries
        size = max(1.0, self.density.error_of(nats) / STANDARD) if 0 < nats < math.inf else 1.0
        return ErrorScale(size, self.names, squares=self.squares)

    @property
    def squares(self) -> bool:
        """True if the square of a score grows with the loss: where errors of more than one width are squared."""
        return isinstance(self.density, Gaussian) or (isinstance(self.density, Huber) and self.density.delta > 1)

    def save(self) -> list[Any]:
        """As plain values for a checkpoint."""
        return [list(self.names), self.entries]

    @staticmethod
    def load(saved: Sequence[Any] | None, criterion: Criterion) -> ErrorSize | None:
        """From `save`; None for None.

        Args:
            saved: What a checkpoint has.
            criterion: The loss.
        """
        if saved is None or criterion.errors is None:
            return None
        return ErrorSize(tuple(saved[0]), saved[1], criterion.errors)


def find_error_size(criterion: Criterion, outputs: Any, calls: Iterable[Tap]) -> ErrorSize:
    """What a pass tells of a regression's units.

    Args:
        criterion: The loss of a regression, with a density of errors.
        outputs: What the model returned, with a graph.
        calls: The layers' calls in that pass. Where none of them made the outputs as they are, no names are known.
    """
    ends = trace_reshapes(outputs) if isinstance(outputs, Tensor) else []
    nodes = {call.edge.node: call.layer.layout.names for call in calls if call.edge is not None}
    names = next((nodes[node] for node in ends if node in nodes), ())
    entries = (
        1 if isinstance(criterion.family, Entrywise) or not isinstance(outputs, Tensor) else max(1, outputs[:1].numel())
    )
    assert criterion.errors is not None
    return ErrorSize(names, entries, criterion.errors)


def trace_reshapes(outputs: Tensor) -> list[Any]:
    """The nodes of a graph from its end to the first one that is more than another shape of the same numbers.

    Args:
        outputs: With a graph.
    """
    node, found = outputs.grad_fn, list[Any]()
    while node is not None:
        found.append(node)
        if not node.name().startswith(RESHAPES):
            break
        node = node.next_functions[0][0]
    return found
