"""Where a block is solved: here, or, with several machines, where its owner keeps the inverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from natgrad.operators import Layout


class LocalOwner:
    """Every process holds every block whole, and solves it itself.

    The seam for machines that share blocks out: a class with these two methods that sends a block's parts to the
    process that keeps its inverse, and gets back what was solved there.
    """

    def gather(self, layout: Layout, parts: Mapping[str, Tensor], zeros: Callable[[str], Tensor]) -> Tensor:
        """The parts of a block as its layer's matrix (groups, outputs, inputs), where it is solved.

        Args:
            layout: Of the layer, or of a parameter without one.
            parts: By name, as this process has them.
            zeros: A name -> zeros in the shape of the parameter, for one without a part.
        """
        return layout.join({name: parts[name] if name in parts else zeros(name) for name in layout.names})

    def give_back(self, layout: Layout, solved: Tensor, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was solved, by name, for those that have a part here."""
        return {name: part for name, part in layout.split(solved).items() if name in names}
