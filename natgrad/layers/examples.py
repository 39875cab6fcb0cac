"""Which example a row of the outputs belongs to, and where the examples run in every layer's tensors: found by asking.

Models put examples first, (b, t, d), or second, (t, b, d), or flatten both; shapes alone do not tell (t may equal b).
So one example's cotangent is multiplied by a number of its own: what arrives at a layer is multiplied by the same
numbers exactly where that example runs, and by no such pattern where the examples meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.pure import leaves, map_tensors
from natgrad.ground.whole_tensors import gather_whole
from natgrad.layers.taps import MatrixProduct, Place, Tap, derivatives


@dataclass(frozen=True, eq=False)
class Examples:
    """A partition of the outputs' entries that may be the examples.

    Args:
        count: The number of examples.
        labels: Each entry's example, from 0 to count - 1, shape (R, m).
    """

    count: int
    labels: Tensor

    @property
    def by_row(self) -> Tensor | None:
        """Each row's example, (R,); None where a row holds entries of several."""
        first = self.labels[:, :1]
        return first[:, 0] if bool((self.labels == first).all()) else None

    def scale(self, cotangent: Tensor, numbers: Tensor) -> Tensor:
        """Each example's entries times its number, shape (R, m).

        Args:
            cotangent: Shape (R, m).
            numbers: Shape (count,).
        """
        return cotangent * numbers[self.labels].to(cotangent.dtype)

    def weigh(self, weights: Tensor, factor: float | None = None) -> Tensor | None:
        """How many times each example counts, (R,), with mean one over all of a batch.

        None where rows are not the examples, or all count once. Positions of one example may count differently: its
        inputs at all of them still count once.

        Args:
            weights: Of the rows, (R,), or (R, 1), or (R, m) of their entries.
            factor: What makes their mean one; None: these are all of the batch.
        """
        if self.count != len(weights):
            return None
        each = row_weights(weights)
        each = each * (len(each) / each.sum() if factor is None else factor)
        return each if bool(((each - 1).abs() > 64 * torch.finfo(each.dtype).eps).any()) else None

    def cotangents(self, factor: Tensor) -> Iterator[Tensor]:
        """One tensor (R, m) per column that an example has in the factor, all examples' at once.

        A column that mixes the entries of several examples makes one of them all.

        Args:
            factor: Shape (R, m, q).
        """
        row, column = (factor != 0).any(1).nonzero(as_tuple=True)
        owners = self._owners(factor, row, column)
        order = owners.argsort(stable=True)
        sizes = owners.bincount(minlength=self.count)
        place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        for p in range(max(1, int(sizes.max()))):  # one of zeros where the factor is zero
            chosen = order[place == p]
            mask = factor.new_zeros(factor.shape[0], factor.shape[2])
            mask[row[chosen], column[chosen]] = 1
            yield (factor * mask.unsqueeze(1)).sum(2)

    def _owners(self, factor: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Of every column with an entry, its example."""
        parts = factor[row, :, column] != 0  # (c, m)
        labels = self.labels[row]
        low = torch.where(parts, labels, self.count).amin(1)
        high = torch.where(parts, labels, -1).amax(1)
        return low if torch.equal(low, high) else torch.zeros_like(low)


def row_weights(weights: Tensor) -> Tensor:
    """The weights of rows, (R,).

    Args:
        weights: Of the rows, (R,), or (R, 1), or (R, m) of their entries: the means are taken.
    """
    return weights if weights.dim() == 1 else weights.flatten(1).mean(1)


def consecutive(count: int, like: Tensor) -> Examples:
    """R / count rows (R, m) after one another are an example."""
    rows = torch.arange(len(like), device=like.device) // max(1, len(like) // max(count, 1))
    return Examples(count, rows.unsqueeze(1).expand_as(like))


def alternating(count: int, like: Tensor) -> Examples:
    """Row r (of R, m) belongs to example r modulo count."""
    rows = torch.arange(len(like), device=like.device) % count
    return Examples(count, rows.unsqueeze(1).expand_as(like))


def together(like: Tensor) -> Examples:
    """All rows are one example's."""
    return Examples(1, torch.zeros_like(like, dtype=torch.long))


def partitions(
    tree: Any,
    rows: Tensor,
    lay: Callable[[Any], Tensor] | None,
    form_mv: Callable[[Tensor, Tensor], Tensor],
    batch: int,
    inputs: Sequence[Tensor] = (),
) -> list[Examples]:
    """What the examples may be, likeliest first: only partitions between whose parts the form is zero.

    All rows are one example's where the inputs have a single one, as the last batch of an epoch may have.

    Args:
        tree: The model's outputs as it returned them.
        rows: The same as rows, (R, m).
        lay: What makes the rows of the tree, if it is known.
        form_mv: Outputs and tangents v (R, m) to M v, row by row.
        batch: The number of examples if rows of one lie together.
        inputs: The model's own, where they are known.
    """
    candidates = [consecutive(batch, rows)]
    second = None if lay is None else along_second(tree, rows, lay)
    candidates += [] if second is None else [second]
    # the second dimension of two holds features, but of tokens
    shapes = {(*t.shape[:2], t.dim() > 2 or not t.is_floating_point()) for t in inputs if t.dim() > 1}
    for first, other, positional in shapes:
        if first > 1 and len(rows) % first == 0:
            candidates.append(consecutive(first, rows))
        if positional and other > 1 and len(rows) % other == 0:
            candidates.append(alternating(other, rows))
    single = {len(t) for t in inputs if t.dim() > 0} == {1}
    candidates += [together(rows)] if single else []
    return [part for part in candidates if (part.count > 1 or single) and keeps_apart(form_mv, rows, part)]


def along_second(tree: Any, rows: Tensor, lay: Callable[[Any], Tensor]) -> Examples | None:
    """Examples along the second dimension of the outputs, None where they have one only."""
    sizes = {t.shape[1] if t.dim() > 2 else 0 for t in leaves(tree)}
    count = sizes.pop() if len(sizes) == 1 else 0
    if count < 2:
        return None

    def number(tensor: Tensor) -> Tensor:
        places = torch.arange(count, device=tensor.device, dtype=rows.dtype)
        return places.view(1, -1, *[1] * (tensor.dim() - 2)).expand(tensor.shape)

    try:
        labels = lay(map_tensors(tree, number))
    except (ValueError, RuntimeError, TypeError):  # the layout looks at values
        return None
    fits = labels.shape == rows.shape and bool(((labels >= 0) & (labels < count) & (labels == labels.round())).all())
    return Examples(count, labels.long()) if fits else None


def keeps_apart(form_mv: Callable[[Tensor, Tensor], Tensor], rows: Tensor, examples: Examples) -> bool:
    """True if M (n v) = n (M v) for a number n per example: M is zero between different ones, unlike a softmax's."""
    if examples.by_row is not None:  # M acts within a row
        return True
    generator = torch.Generator(rows.device).manual_seed(0)
    kind = {"generator": generator, "device": rows.device, "dtype": rows.dtype}
    probe, numbers = torch.randn(rows.shape, **kind), 1 + torch.rand(examples.count, **kind)
    plain = form_mv(rows, probe)
    gap = form_mv(rows, examples.scale(probe, numbers)) - examples.scale(plain, numbers)
    return float(gap.norm()) <= torch.finfo(rows.dtype).eps ** 0.5 * float(plain.norm())


def find_examples(
    outputs: Tensor, taps: Sequence[Tap], known: Sequence[Examples], strict: bool = True, ask: bool = False
) -> tuple[Examples, list[Tap]]:
    """The first partition that every tap respects, and the taps with the examples' places in them.

    Two backward passes, to the taps alone; one more per partition that fails. None of them where no tap leaves a doubt
    (two dimensions, examples first) and `ask` is false.

    Args:
        outputs: (R, m), with a graph.
        taps: Calls of layers and products with matrices in it.
        known: What may be examples, likeliest first.
        strict: True: where none fits, all rows are one example. False: the partition that comes nearest.
        ask: True to look also where shapes leave no doubt: the examples may meet all the same, as the nodes of a graph
            do.
    """
    first = known[0] if known else together(outputs)
    sure = not any(doubtful(tap, first.count) for tap in taps)
    if not first.count or (sure and not (known and ask)):
        return first, list(taps)
    generator = torch.Generator(outputs.device).manual_seed(0)
    kind = {"generator": generator, "device": outputs.device, "dtype": outputs.dtype}
    probe = torch.randn(outputs.shape, **kind)
    plain = derivatives(outputs, taps, [probe])[0][0]
    best: tuple[tuple[int, float], Examples, list[Tap]] | None = None
    for partition in known:
        # none of them near another: an example in the place of another is seen
        order = torch.randperm(partition.count, generator=generator, device=outputs.device)
        numbers = 1 + order.to(outputs.dtype) / max(1, partition.count - 1)
        scaled = derivatives(outputs, taps, [partition.scale(probe, numbers)])[0][0]
        fits = [place_of(tap, d, s, numbers) for tap, d, s in zip(taps, plain, scaled, strict=True)]
        errors = [error for _, error in fits]
        placed = [replace(tap, place=place) for tap, (place, _) in zip(taps, fits, strict=True)]
        if max(errors, default=0.0) <= torch.finfo(lowest(taps, outputs.dtype)).eps ** 0.5:
            return partition, placed
        # a call that sees a part of the rows, as an expert does, fits none: it does not say which comes nearest
        near = [error for error in errors if error <= ELSEWHERE]
        distance = len(errors) - len(near), max(near, default=0.0)
        if best is None or distance < best[0]:
            best = distance, partition, placed
    if strict or best is None:
        return together(outputs), [replace(tap, place=Place()) for tap in taps]
    return best[1:]


class KnownPlaces:
    """Where the examples run in passes of known shapes, so that it is not asked at every one.

    Attributes:
        found: By `key`, the number of the partition among the candidates, -1 for all rows together, and each tap's
            place as [axis, fast] or None. Asked at other parameters the answer may be another, so that it is a part of
            the optimiser's state.
        partitions: Those of rows that were used, by key and number.
    """

    def __init__(self) -> None:
        self.found: Mapping[str, Found] = {}
        self.partitions: dict[tuple[str, int], Examples] = {}

    def key(self, outputs: Tensor, taps: Sequence[Tap], shapes: Sequence[tuple[int, ...]]) -> str:
        """What `found` has its entries under.

        Args:
            outputs: Rows of the outputs, shape (R, m).
            taps: The calls of layers and the products with matrices.
            shapes: Of the pass's inputs and outputs.
        """
        calls = [(tap.layer.key, tuple(tap.inputs.shape)) for tap in taps]
        return sha256(repr((tuple(outputs.shape), *shapes, *calls)).encode()).hexdigest()

    def find(
        self,
        outputs: Tensor,
        taps: Sequence[Tap],
        known: Callable[[], Sequence[Examples]],
        shapes: Sequence[tuple[int, ...]],
        strict: bool,
        afresh: bool,
    ) -> tuple[Examples, list[Tap]]:
        """What `find_examples` gives, or gave for a pass of these shapes.

        Args:
            outputs: (R, m), with a graph.
            taps: Calls of layers and products with matrices in it.
            known: Makes what may be examples, likeliest first.
            shapes: What these depend on.
            strict: As `find_examples` has it; then it asks also where shapes leave no doubt.
            afresh: True to ask again.
        """
        key = self.key(outputs, taps, shapes)
        if key in self.found and not afresh:
            number, places = self.found[key]
            if (examples := self.partitions.get((key, number))) is None:
                examples = together(outputs) if number < 0 else known()[number]
                self._keep(key, number, examples)
            pairs = zip(taps, places, strict=True)
            return examples, [replace(tap, place=None if at is None else Place(*at)) for tap, at in pairs]
        examples, placed = find_examples(outputs, taps, candidates := known(), strict, ask=strict)
        if not any(has_no_place(tap) and (strict or doubtful(tap, examples.count)) for tap in placed):
            number = next((i for i, candidate in enumerate(candidates) if candidate is examples), -1)
            places = [None if tap.place is None else [tap.place.axis, tap.place.fast] for tap in placed]
            self.found = {**(self.found if len(self.found) < SHAPES else {}), key: [number, places]}
            self._keep(key, number, examples)
        return examples, placed

    def _keep(self, key: str, number: int, examples: Examples) -> None:
        """A partition of rows; a number per entry would take twice the memory of the outputs."""
        if (by_row := examples.by_row) is not None:
            self.partitions = self.partitions if len(self.partitions) < SHAPES else {}
            labels = by_row.clone().unsqueeze(1).expand_as(examples.labels)
            self.partitions[key, number] = Examples(examples.count, labels)


def lowest(taps: Iterable[Tap], dtype: torch.dtype) -> torch.dtype:
    """The coarsest dtype on the way."""
    return max([dtype, *(tap.dtype for tap in taps)], key=lambda kind: torch.finfo(kind).eps)


def has_no_place(tap: Tap) -> bool:
    """True if nothing that could tell arrived at a call yet: behind a head that starts at zero, for example.

    Args:
        tap: The call, as `find_examples` returned it.
    """
    return tap.place is None and not (isinstance(tap, MatrixProduct) and tap.loose)


def doubtful(tap: Tap, count: int) -> bool:
    """True if shapes leave open where a call's examples are."""
    if isinstance(tap, MatrixProduct):
        return not tap.loose and len(tap.inputs) != count
    features = tap.layer.features(tap.inputs)
    if features is None:
        return tap.inputs.shape[:1] != (count,)
    return tap.inputs.dim() - features != 1 or len(tap.inputs) != count


def place_of(tap: Tap, plain: Tensor | None, scaled: Tensor | None, numbers: Tensor) -> tuple[Place | None, float]:
    """Where a call's examples run, from the derivative at its output and that of the examples times their numbers.

    With the relative error of the best answer; None and 0 where nothing arrived that could tell.
    """
    if plain is None or scaled is None or (isinstance(tap, MatrixProduct) and tap.loose):
        return None, 0.0
    if isinstance(tap, MatrixProduct):
        plain, scaled = tap.lay(plain), tap.lay(scaled)
    size = torch.linalg.vector_norm(plain)
    if not bool(size > 0):
        return None, 0.0
    features = 1 if isinstance(tap, MatrixProduct) else tap.layer.features(plain)
    fits = [
        (float(torch.linalg.vector_norm(scaled - place.spread(numbers.to(plain.dtype), plain) * plain) / size), place)
        for place in places(plain, 1 if features is None else plain.dim() - features, len(numbers))
    ]
    if not fits:
        return None, torch.inf
    error, place = min(fits, key=lambda pair: pair[0])
    return place, error


def places(tensor: Tensor, positional: int, count: int) -> Iterator[Place]:
    """Where `count` examples may run in a tensor, of which so many dimensions are no features."""
    for axis in range(min(positional, tensor.dim())):
        if tensor.shape[axis] == count:
            yield Place(axis)
    if tensor.shape[0] > count and tensor.shape[0] % count == 0:
        yield Place()
        yield Place(fast=True)


ELSEWHERE = 0.05
"""Of a call's derivative: the error from which on its examples run in none of the places; round-off is less."""
Found = list[Any]
"""The number of a partition, and the places."""
SHAPES = 64
"""Of passes for which the examples' places are kept."""
GROUPS = 16
"""Backward passes per reading, at most, for parameters without a layer, unless labels are exact."""


def example_squares(
    outputs: Tensor,
    params: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    examples: Examples,
    generator: torch.Generator,
    groups: int | None = None,
) -> list[Tensor | None]:
    """sum over cotangents and examples of the example's squared gradient, per parameter.

    One backward pass, to these parameters alone, per cotangent and example. Where there are more examples than
    `groups`, per group of examples with random signs: right on average over the signs, with as many degrees of freedom.

    Args:
        outputs: (R, m), with a graph, which is kept.
        params: Leaves of it.
        cotangents: (R, m) each.
        examples: Which entries of them are whose.
        generator: Of the signs.
        groups: How many passes a cotangent may take. Default: so many that all take `GROUPS`.

    Returns:
        Dense tensors, at least in float32; None for a parameter that the outputs do not depend on.
    """
    device = outputs.device
    groups = GROUPS // max(1, len(cotangents)) if groups is None else groups
    count, many = examples.count, min(max(groups, 1), examples.count)
    signs = torch.ones(count, device=device)
    if many < count:
        signs = 2.0 * torch.randint(0, 2, (count,), generator=generator, device=generator.device).to(device) - 1
    group = torch.arange(count, device=device) % many
    squares: list[Tensor | None] = [None] * len(params)
    for cotangent in cotangents:
        for g in range(many):
            part = examples.scale(cotangent, signs * (group == g))
            slopes = torch.autograd.grad(outputs, list(params), part, retain_graph=True, allow_unused=True)
            for i, slope in enumerate(slopes):
                if slope is not None:
                    square = gather_whole(slope).to_dense().to(torch.promote_types(slope.dtype, torch.float32)).square()
                    squares[i] = square if (known := squares[i]) is None else known + square
    return squares
