"""Which process solves which block: by modelled cost, the dearest first to whoever has the least to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.operators import Layout, pack_operator, unpack_operator
from natgrad.optim.arriving_sums import ArrivingSums
from natgrad.optim.distributed import Ranks
from natgrad.optim.process_messages import send_tree
from natgrad.optim.state import Block
from natgrad.structures import Statistics
from natgrad.typed_torch import list_numbers, split_tensor

Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Solve = Callable[[Callable[[], Tensor], Tensor], Tensor]
BUDGET = 2**32
"""Bytes of state that a process keeps with `share="auto"` before the state is shared out."""
WAYS = ("auto", "speed", "memory")


@dataclass(frozen=True)
class Cost:
    """What a block takes.

    Args:
        work: The sum of n^3 over the matrices that are inverted; its entries where nothing is.
        state: Numbers that are remembered between steps.
    """

    work: float
    state: float


@dataclass
class Owners:
    """Every block has an owner, who alone inverts it.

    Attributes:
        ranks: The processes.
        share: "speed" sends the inverses to all, so that nothing is sent between updates; "memory" leaves a block's
            statistics, inverse and mean gradient with its owner, who sends its direction at every step; "auto" is one
            of them, by the budget.
        budget: Most bytes of state per process with "speed", where share is "auto".
        costs: By block.
        of: The owner's number by block.
        done: Sum of n^3 over all inversions that this process made so far.
    """

    ranks: Ranks
    share: str = "auto"
    budget: int = BUDGET
    costs: dict[str, Cost] = field(default_factory=dict[str, Cost])
    of: dict[str, int] = field(default_factory=dict[str, int])
    done: float = 0.0

    @property
    def is_shared(self) -> bool:
        """True if there is somebody to share with."""
        return self.ranks.size > 1

    @property
    def apart(self) -> bool:
        """True if a block's numbers are its owner's alone."""
        return self.is_shared and self.share == "memory"

    def solves(self, key: str) -> bool:
        """Whether this process inverts a block."""
        return not self.is_shared or self.of.get(key, 0) == self.ranks.rank

    def holds(self, key: str) -> bool:
        """Whether this process remembers a block's numbers."""
        return not self.apart or self.solves(key)

    def assign(self, costs: Mapping[str, Cost], itemsize: int) -> None:
        """Give blocks that have no owner yet to one. All processes call this with the same blocks.

        Args:
            costs: By block.
            itemsize: Bytes of a number.
        """
        fresh = {key: cost for key, cost in costs.items() if key not in self.of}
        self.costs |= fresh
        if not self.is_shared or not fresh:
            return
        if self.share == "auto":
            state = itemsize * sum(cost.state for cost in self.costs.values())
            self.share = "memory" if state > self.budget else "speed"
        self.of |= balance(fresh, self.costs, self.of, self.ranks.size, self.share == "memory")

    def load(self, saved: Mapping[str, Any] | None) -> Owners:
        """The same with the owners of an older checkpoint of one process's part, if that is of as many processes."""
        fresh = replace(self, costs={}, of={})
        if saved and saved["size"] == self.ranks.size:
            fresh.share, fresh.of = saved["share"], dict(saved["of"])
        return fresh

    # statistics

    def exchange(self, key: str) -> tuple[Exchange | None, Solve | None, Exchange | None]:
        """How a block's statistics are added up, how what its owner alone computes comes to all; `exchanging`'s own."""
        if not self.is_shared:
            return None, None, None
        owner = self.of[key]
        return partial(self._sum_statistics, owner), partial(self._solve, owner), self.ranks.sum_entries

    def share_past(self, key: str, own: Statistics | None, needed: bool) -> Statistics | None:
        """A block's totals so far: where its owner alone remembers them and all need them, from it to all.

        Args:
            key: The block.
            own: This process's; None where there are none.
            needed: Whether all processes need them.
        """
        if not (self.apart and needed):
            return own
        return send_tree(self.ranks, own, self.of[key], "statistics")

    def open_sums(
        self, symmetric: frozenset[str], deliver: Callable[[str, dict[str, Tensor]], None], fine: bool
    ) -> ArrivingSums:
        """Statistics of a pass that are sent in messages of many blocks.

        Args:
            symmetric: The entries that are symmetric matrices.
            deliver: Takes a block's sums.
            fine: Whether this process's part is finite.
        """
        return ArrivingSums(self.ranks, symmetric, deliver, fine)

    def _sum_statistics(self, owner: int, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums for all processes, or for the owner alone."""
        return self.ranks.sum_entries(fresh, owner if self.apart else None)

    def _solve(self, owner: int, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        made = make().contiguous() if self.ranks.rank == owner else torch.empty_like(like).contiguous()
        return self.ranks.broadcast(made, owner, "statistics")

    # inverses

    def share_inverses(self, fresh: Mapping[str, Block], blocks: Mapping[str, Block]) -> dict[str, Block]:
        """With "speed": every block that was inverted, from their owners, one message each.

        The owners' own take the same way: products round by how a matrix lies in memory, and the processes would drift
        apart.
        """
        if not self.is_shared or self.apart:
            return dict(fresh)
        whole = dict[str, Block]()
        for owner in range(self.ranks.size):
            mine = {key: fresh[key] for key in blocks if self.of[key] == owner and key in fresh}
            tree = {
                key: [None if one.inverse is None else pack_operator(one.inverse), dict(one.prepared), one.level]
                for key, one in mine.items()
            }
            for key, (packed, prepared, level) in send_tree(self.ranks, tree, owner, "inverses").items():
                inverse = None if packed is None else unpack_operator(packed)
                whole[key] = replace(blocks[key], inverse=inverse, prepared=prepared, level=level)
        return {key: whole[key] for key in blocks if key in whole}

    # with "memory": what owners found, for all

    def share_scalars(self, found: Mapping[str, Any], names: Iterable[str], like: Tensor) -> dict[str, Tensor]:
        """Scalars of which every process has some, by name; without those that nobody has."""
        known = list(names)
        if not self.apart:
            return dict(found)
        table = torch.zeros(2, len(known), dtype=torch.float64, device=like.device)
        for i, name in enumerate(known):
            if name in found:
                table[0, i], table[1, i] = 1.0, torch.as_tensor(found[name]).double()
        there, values = self.ranks.sum(table, "scalars")
        present = [name for name, flag in zip(known, list_numbers(there), strict=True) if flag]
        return {name: values[i].to(like.dtype) for i, name in enumerate(known) if name in set(present)}

    def share_directions(
        self,
        gradients: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        slopes: Mapping[str, Tensor],
        levels: Mapping[str, float],
        keys: Mapping[str, str],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        """The directions, slopes and damping of all blocks by name, from their owners.

        Args:
            gradients: By name; they tell the shapes.
            steps: The directions of this process's own blocks.
            slopes: Theirs.
            levels: Their damping.
            keys: The block of each parameter.
        """
        like = next(iter(gradients.values()))
        whole_slopes = self.share_scalars(dict(slopes), keys, like)
        damping = self.share_scalars(dict(levels), keys, like.new_zeros((), dtype=torch.float64))
        moved = self.share_scalars(dict.fromkeys(steps, 1.0), keys, like)
        whole = self.share_parts(dict(steps), {name: gradients[name] for name in moved}, keys)
        return whole, whole_slopes, {name: float(level) for name, level in damping.items()}

    def share_parts(
        self, found: Mapping[str, Tensor], like: Mapping[str, Tensor], keys: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Directions, from the owners to all, in one message of each.

        Args:
            found: This process's, by name.
            like: Tensors of their shapes and dtypes, for the names that somebody has.
            keys: The block of each name.
        """
        whole = dict[str, Tensor]()
        for owner in range(self.ranks.size):
            names = [name for name in like if self.of[keys[name]] == owner]
            for kind in dict.fromkeys((like[name].dtype, like[name].device) for name in names):
                those = [name for name in names if (like[name].dtype, like[name].device) == kind]
                sizes = [like[name].numel() for name in those]
                if owner == self.ranks.rank:
                    flat = torch.cat([found[name].to(kind[0]).reshape(-1) for name in those])
                else:
                    flat = torch.empty(sum(sizes), dtype=kind[0], device=kind[1])
                parts = split_tensor(self.ranks.broadcast(flat, owner, "directions"), sizes)
                whole |= {n: part.clone().view_as(like[n]) for n, part in zip(those, parts, strict=True)}
        return {name: whole[name] for name in like}


def balance(
    fresh: Mapping[str, Cost], known: Mapping[str, Cost], owners: Mapping[str, int], size: int, state: bool
) -> dict[str, int]:
    """Owners by longest processing time first: the dearest block to the process with the least so far.

    Args:
        fresh: Blocks without an owner.
        known: All blocks.
        owners: Of those that have one.
        size: The processes.
        state: True to count what is remembered as much as the work.
    """
    works, states = (sum(getattr(cost, kind) for cost in known.values()) or 1.0 for kind in ("work", "state"))

    def weigh(cost: Cost) -> float:
        return cost.work / works + state * cost.state / states

    loads = [
        sum(weigh(known[key]) for key, owner in owners.items() if owner == r and key in known) for r in range(size)
    ]
    found = dict[str, int]()
    for key, cost in sorted(fresh.items(), key=lambda pair: (-weigh(pair[1]), pair[0])):
        found[key] = min(range(size), key=lambda r: (loads[r], r))
        loads[found[key]] += weigh(cost)
    return found


def cost_of(layout: Layout, sizes: Iterable[tuple[int, int]] | None) -> Cost:
    """A block's cost.

    Args:
        layout: Its matrix.
        sizes: (count, n) of the (n, n) matrices that are inverted; None or none of them for a diagonal.
    """
    groups, outputs, columns = layout.matrix_shape
    entries = float(groups * outputs * columns)
    pairs = list(sizes or ())
    work = sum(count * float(n) ** 3 for count, n in pairs) or entries
    kept = sum(count * float(n) ** 2 for count, n in pairs) or entries
    return Cost(work, 2 * kept + entries)  # the averages, the inverse, the gradient's mean


def check_share(share: Any) -> tuple[str, int]:
    """The way and the budget that an option names. ValueError for anything else."""
    if isinstance(share, int) and not isinstance(share, bool) and share > 0:
        return "auto", share
    if share not in WAYS:
        raise ValueError(
            f'share is {share!r}, expected "speed" (every process keeps all inverses), "memory" (blocks\' numbers are '
            'their owners\' alone), "auto", or a number of bytes of state from which on it is "memory"'
        )
    return share, BUDGET
