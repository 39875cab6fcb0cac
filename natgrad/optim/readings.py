"""What one pass of the user's model told the statistics, and where its rows stand in the batch of all processes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.layers import Examples, Heard, Layer, Mixed, Seen
from natgrad.optim.distributed import Ranks
from natgrad.typed_torch import list_numbers, measure_norm

HEADROOM = 1e-6  # of the largest number: running averages add up
SOME = 256
"""Rows of a pass that factors are taken from at the least, if there are as many, however often passes are read."""


@dataclass(frozen=True)
class Reading:
    """What one pass tells. With several processes: this one's part.

    Attributes:
        heard: The layers, and squares for the parameters without a layer.
        rows: The number of its rows.
        apart: The layers again, with labels drawn apart, for measuring what the statistics were fitted to.
        scores: From those labels, of the parameters without a layer, summed over examples, per cotangent.
        weights: By layer and parameter, the rows of all processes that used it; default this one's.
        positions: By layer, its examples times positions, of all processes.
        exchange: How the parts of several processes are added up.
        span: Where this part stands in the batch of all processes; None: it is all there is.
        part: Of the rows that factors need: less where passes are read more often than they have to be.
    """

    heard: Heard
    rows: int
    apart: list[Seen] = field(default_factory=list[Seen])
    scores: tuple[dict[str, Tensor], ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict[str, int])
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    exchange: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    span: Span | None = None
    part: float = 1.0

    @property
    def layers(self) -> list[Seen]:
        """The layers that explain their parameters' gradients."""
        return self.heard.layers

    @property
    def squares(self) -> dict[str, Tensor]:
        """Of the parameters without a layer, by name."""
        return self.heard.squares

    @property
    def weight(self) -> float:
        """What a row's derivatives weigh beside those of another process, whose mean is over other rows."""
        return 1.0 if self.span is None or not self.rows else self.span.share / self.rows


def agree_on_parts(fine: bool, reading: Reading) -> bool:
    """Whether all processes find their parts of a reading fine."""
    if reading.exchange is None:
        return fine
    like = next(iter(reading.squares.values()), None)
    like = reading.layers[0].deltas[0] if like is None else like
    return not bool(reading.exchange({"bad": torch.tensor(float(not fine), device=like.device)})["bad"])


def norm(tensor: Tensor) -> Tensor:
    """Root of the sum of squares, a scalar tensor."""
    return measure_norm(tensor)


def sum_scores(watched: Iterable[str], slopes: Sequence[Tensor | None], known: Container[str]) -> dict[str, Tensor]:
    """The scores of one cotangent by name, dense, of the parameters without a layer."""
    pairs = zip(watched, slopes, strict=True)
    return {name: slope.to_dense() for name, slope in pairs if slope is not None and name in known}


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


def make_empty_pass(layer: Layer, cotangents: int, like: Tensor, by_token: bool) -> Seen:
    """A pass of a layer that this process did not use: it adds zeros to the others' sums, in the shapes of theirs."""
    groups, outputs, columns = layer.layout.matrix_shape
    if by_token or layer.by_token:
        tokens = torch.zeros(1, 1, dtype=torch.long, device=like.device)
        return Seen(layer, tokens, [like.new_zeros(1, 1, columns)] * cotangents, 0.0)
    deltas = [like.new_zeros(1, 1, groups, outputs)] * cotangents
    counts = like.new_zeros(groups) if layer.is_routed else None
    return Seen(layer, like.new_zeros(1, 1, groups, columns), deltas, 0.0, counts)


def match_parts(seen: Seen, count: int, cotangents: int, like: Tensor) -> Seen:
    """The same pass in as many parts as another process has, zeros in place of those that are not there."""
    parts = seen.split_parts()
    if len(parts) >= count:
        return seen
    parts = parts + [make_empty_pass(seen.layer, cotangents, like, False)] * (count - len(parts))
    return Mixed(seen.layer, parts, seen.share)
