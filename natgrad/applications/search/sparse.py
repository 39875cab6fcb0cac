"""Variables that depend on a few neighbours: a covariance whose inverse has the zeros of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.applications.search.cma import Adaptation, check_rate
from natgrad.applications.search.model import State

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SparsePrecision(Adaptation):
    """Covariance matrix adaptation of a Gaussian Markov random field: x_i and x_j interact only along an edge.

    The sub-model of the Gaussian with natural parameters zero off the graph. Its natural gradient in expectation
    coordinates moves the second moments on the edges alone; the rest of the covariance follows from them, as the one
    of greatest entropy. Once eliminating variables has added the edges that it needs, that is closed: each variable is
    regressed on its later neighbours, x_i = B_i x_N(i) + sqrt(D_i) z.

    edges: pairs of variables, such as ((0, 1), (1, 2)) for a chain.   rate: multiplies the learning rates, which are
    the larger the fewer edges there are. Memory and time grow with edges and neighbourhoods, not with d^2.
    """

    edges: Edges
    rate: float = 1.0

    def __init__(self, edges: Iterable[tuple[int, int]], rate: float = 1.0) -> None:
        check_rate(rate)
        pairs = {(min(i, j), max(i, j)) for i, j in ((int(i), int(j)) for i, j in edges)}
        wrong = [pair for pair in pairs if pair[0] == pair[1] or pair[0] < 0]
        if wrong:
            raise ValueError(f"edges has {wrong[0]}, expected pairs of different variables numbered from 0")
        object.__setattr__(self, "edges", tuple(sorted(pairs)))
        object.__setattr__(self, "rate", rate)

    def check(self, d: int) -> None:
        if self.edges and max(max(pair) for pair in self.edges) >= d:
            raise ValueError(f"edges name variable {max(max(p) for p in self.edges)}, expected numbers below {d}")

    def statistics(self, d: int) -> int:
        return d + sum(len(later) for _, later in elimination(self.edges, d))

    def begin(self, mean: Tensor) -> State:
        order = elimination(self.edges, len(mean))
        blocks = [torch.eye(1 + len(later), dtype=mean.dtype, device=mean.device) for _, later in order]
        return {"blocks": blocks, **regressions(blocks)}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        steps = torch.empty_like(normals)
        order = elimination(self.edges, normals.shape[1])
        for k in range(len(order) - 1, -1, -1):  # neighbours first
            i, later = order[k]
            value = normals[:, i] * state["deviations"][k]
            steps[:, i] = value + steps[:, later] @ state["slopes"][k] if later else value
        return steps

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        normals = torch.empty_like(steps)
        for k, (i, later) in enumerate(elimination(self.edges, steps.shape[1])):
            rest = steps[:, i] - steps[:, later] @ state["slopes"][k] if later else steps[:, i]
            normals[:, i] = rest / state["deviations"][k]
        return normals

    def variances(self, state: State) -> Tensor:
        found = torch.empty_like(state["mean"])
        for (i, _), block in zip(elimination(self.edges, len(found)), state["blocks"], strict=True):
            found[i] = block[0, 0]
        return found

    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        blocks = []
        for (i, later), block in zip(elimination(self.edges, rows.shape[1]), state["blocks"], strict=True):
            part = rows[:, [i, *later]]
            blocks.append(torch.addmm(block, part.mT * weights, part, beta=keep))
        return {"blocks": blocks, **regressions(blocks)}

    def precision(self, state: State) -> Tensor:
        """C^-1 (d, d), written out: zero off the graph and what elimination adds to it."""
        d = len(state["mean"])
        white = self.whiten(
            state, torch.eye(d, dtype=state["mean"].dtype, device=state["mean"].device)
        )  # rows A^-1 e_i
        return white @ white.mT


def regressions(blocks: list[Tensor]) -> State:
    """Slopes B_i and deviations sqrt(D_i) of each variable on its later neighbours, from the moments of both."""
    slopes, deviations = [], []
    for block in blocks:
        slope = torch.linalg.solve(block[1:, 1:], block[1:, 0]) if len(block) > 1 else block.new_empty(0)
        rest = block[0, 0] - slope @ block[1:, 0]
        slopes.append(slope)
        deviations.append(rest.clamp(min=1e-14 * block[0, 0]).sqrt())  # round-off
    return {"slopes": slopes, "deviations": torch.stack(deviations)}


@lru_cache(maxsize=16)
def elimination(edges: Edges, d: int) -> tuple[tuple[int, list[int]], ...]:
    """Variables in the order of least degree, each with its neighbours that come later, edges added where needed."""
    near: list[set[int]] = [set() for _ in range(d)]
    for i, j in edges:
        near[i].add(j)
        near[j].add(i)
    left, order = set(range(d)), []
    while left:
        i = min(left, key=lambda v: (len(near[v]), v))
        later = sorted(near[i])
        for j in later:
            near[j] |= near[i]
            near[j] -= {i, j}
        left.remove(i)
        order.append((i, later))
    return tuple(order)
