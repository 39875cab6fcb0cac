"""The batch of all processes, one process's examples after another's: where this process's own stand in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.layers import Examples
from natgrad.optim.distributed import Ranks
from natgrad.typed_torch import list_numbers


@dataclass(frozen=True)
class Span:
    """This process's part of one reading, counted in the batch of all processes.

    Attributes:
        first: The place of its first example.
        count: Its examples.
        total: The examples of all.
        share: What its statistics weigh: its rows, or, of a summed loss, its part of what all are divided by, times
            the rows of all.
        rows: The rows of all.
        cotangents: The most that a process has.
    """

    first: int
    count: int
    total: int
    share: float
    rows: int
    cotangents: int

    def count_kept(self, unit: int, fewest: int, part: int) -> tuple[int, int, int]:
        """The first examples of the batch of all: how many of this process's, of all processes', and out of how many.

        Args:
            unit: Rows that one example has.
            fewest: Rows that are kept if there are as many.
            part: Of more rows, one in so many is kept.
        """
        total = unit * self.total
        kept = min(total, max(fewest, total // part))
        return min(max(kept - unit * self.first, 0), unit * self.count), kept, total


def line_up(ranks: Ranks, device: torch.device, count: int, rows: int, scale: float = 0.0, cotangents: int = 1) -> Span:
    """Agree on who has which examples of a reading. Every process calls this once per reading.

    Args:
        ranks: The processes.
        device: Where numbers are added up.
        count: This process's examples.
        rows: Its rows.
        scale: What reduction='sum' multiplied its mean loss by; 0 for other reductions.
        cotangents: Of its pass.
    """
    if ranks.size == 1:
        return Span(0, count, count, float(rows), rows, cotangents)
    table = torch.zeros(ranks.size, 4, dtype=torch.float64, device=device)
    table[ranks.rank] = torch.tensor([count, rows, scale, cotangents], dtype=torch.float64, device=device)
    counts, all_rows, scales, widths = (list_numbers(column) for column in ranks.sum(table).T)
    total = sum(all_rows)
    share = total * scale / sum(scales) if scale and sum(scales) else float(rows)
    if share == round(share) or abs(share - rows) <= 1e-9 * total:
        share = float(round(share))
    first = int(sum(counts[: ranks.rank]))
    return Span(first, count, int(sum(counts)), share, int(total), int(max(widths)))


def sign_examples(cotangent: Tensor, examples: Examples, generator: torch.Generator, span: Span) -> Tensor:
    """A random sign on every example's entries, out of as many draws as all processes have examples.

    The statistics of layers do not change. The square of a sum over examples becomes, on average, the sum of squares;
    for labels drawn at random it is one already.
    """
    bits = torch.randint(0, 2, (span.total,), generator=generator, device=cotangent.device)
    return examples.scale(cotangent, 2 * bits[span.first : span.first + span.count] - 1)
