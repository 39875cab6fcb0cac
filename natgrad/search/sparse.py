"""Variables that depend on a few neighbours: a covariance whose inverse has the zeros of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.ground.linalg import inverse_psd
from natgrad.search.cma import Adaptation
from natgrad.search.model import State, build_identity

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SparsePrecision(Adaptation):
    """Covariance matrix adaptation of a Gaussian Markov random field: x_i and x_j interact only along an edge.

    The sub-model of the Gaussian whose natural parameters are zero off the graph. Its natural gradient in expectation
    coordinates moves the second moments on the edges alone; the rest of the covariance follows from them, as the one of
    greatest entropy. Once elimination of variables has added the edges that it needs, this has a closed form: each
    variable is regressed on its later neighbours, x_i = B_i x_N(i) + sqrt(D_i) z. Memory and time grow with edges and
    neighbourhoods, not with d^2.

    Args:
        edges: Pairs of variables, such as ((0, 1), (1, 2)) for a chain.
        rate: Multiplies the learning rates, which are the larger the fewer edges there are.

    Raises:
        ValueError: If a pair is no pair of different variables numbered from 0.
    """

    edges: Edges
    rate: float = 1.0

    def __init__(self, edges: Iterable[tuple[int, int]], rate: float = 1.0) -> None:
        pairs = {(min(i, j), max(i, j)) for i, j in ((int(i), int(j)) for i, j in edges)}
        for pair in (pair for pair in pairs if pair[0] == pair[1] or pair[0] < 0):
            raise ValueError(f"edges has {pair}, expected pairs of different variables numbered from 0")
        object.__setattr__(self, "edges", tuple(sorted(pairs)))
        object.__setattr__(self, "rate", rate)
        self.__post_init__()

    def check(self, d: int) -> None:
        if self.edges and max(max(pair) for pair in self.edges) >= d:
            raise ValueError(f"edges name variable {max(max(p) for p in self.edges)}, expected numbers below {d}")

    def statistics(self, d: int) -> int:
        return d + sum(len(later) for _, later in eliminate_variables(self.edges, d))

    def begin(self, mean: Tensor) -> State:
        sizes = [rows.shape for rows in group_by_neighbours(self.edges, len(mean))]
        blocks = [torch.eye(size, dtype=mean.dtype, device=mean.device).repeat(count, 1, 1) for count, size in sizes]
        return {"blocks": blocks, **regress_blocks(blocks)}

    def steps(self, state: State, normals: Tensor) -> Tensor:
        order = eliminate_variables(self.edges, normals.shape[1])
        columns: list[Tensor] = [normals] * len(order)
        scaled = torch.empty_like(normals)
        slopes: dict[int, Tensor] = {}
        for rows, slope, deviations in self._parts(state, normals.shape[1]):
            scaled[:, rows[:, 0]] = normals[:, rows[:, 0]] * deviations
            slopes |= zip(rows[:, 0].tolist(), slope, strict=True)
        for i, later in reversed(order):  # neighbours first
            columns[i] = scaled[:, i]
            if later:
                columns[i] = columns[i] + torch.stack([columns[j] for j in later], 1) @ slopes[i]
        return torch.stack(columns, 1)

    def whiten(self, state: State, steps: Tensor) -> Tensor:
        normals = torch.empty_like(steps)
        for rows, slopes, deviations in self._parts(state, steps.shape[1]):
            predicted = (steps[:, rows[:, 1:]] * slopes).sum(2)
            normals[:, rows[:, 0]] = (steps[:, rows[:, 0]] - predicted) / deviations
        return normals

    def variances(self, state: State) -> Tensor:
        variances = torch.empty_like(state["mean"])
        for rows, blocks in zip(group_by_neighbours(self.edges, len(variances)), state["blocks"], strict=True):
            variances[rows[:, 0]] = blocks[:, 0, 0]
        return variances

    def reshape(self, state: State, keep: float, rows: Tensor, weights: Tensor) -> State:
        blocks = []
        for members, block in zip(group_by_neighbours(self.edges, rows.shape[1]), state["blocks"], strict=True):
            # only the moments on the graph's cliques move: the expectation coordinates of the sub-model
            part = rows[:, members].permute(1, 2, 0)  # (variables, size, k)
            blocks.append(torch.baddbmm(block, part * weights, part.mT, beta=keep))
        return {"blocks": blocks, **regress_blocks(blocks)}

    def precision(self, state: State) -> Tensor:
        """C^-1 (d, d), written out: zero off the graph and what elimination adds to it.

        Args:
            state: Of the search, `search.state`.
        """
        roots = self.whiten(state, build_identity(state["mean"]))  # rows A^-1 e_i
        return roots @ roots.mT

    def _parts(self, state: State, d: int) -> zip[tuple[Tensor, Tensor, Tensor]]:
        return zip(group_by_neighbours(self.edges, d), state["slopes"], state["deviations"], strict=True)


def regress_blocks(blocks: list[Tensor]) -> State:
    """Slopes B_i and deviations sqrt(D_i) of variables on their later neighbours."""
    slopes, deviations = [], []
    for block in blocks:
        slope = regress_on_neighbours(block[:, 1:, 1:], block[:, 1:, 0])
        rest = block[:, 0, 0] - (slope * block[:, 1:, 0]).sum(1)
        slopes.append(slope)
        deviations.append(torch.maximum(rest, 1e-14 * block[:, 0, 0]).sqrt())  # round-off
    return {"slopes": slopes, "deviations": deviations}


def regress_on_neighbours(moments: Tensor, cross: Tensor) -> Tensor:
    """M^-1 c; neighbours that depend on one another share the slope."""
    # solved for variables of deviation one, so that the units of the problem do not decide what is round-off
    if not cross.numel():
        return cross
    deviations = moments.diagonal(dim1=1, dim2=2).sqrt()
    scale = torch.where(deviations > 0, 1 / deviations, 0.0)
    correlations = scale.unsqueeze(2) * moments * scale.unsqueeze(1)
    return scale * (inverse_psd(correlations) @ (scale * cross).unsqueeze(2)).squeeze(2)


@lru_cache(maxsize=16)
def group_by_neighbours(edges: Edges, d: int) -> tuple[Tensor, ...]:
    """Variables with equally many later neighbours, for batched algebra."""
    groups: dict[int, list[list[int]]] = {}
    for i, later in eliminate_variables(edges, d):
        groups.setdefault(len(later), []).append([i, *later])
    return tuple(torch.tensor(groups[size]) for size in sorted(groups))


@lru_cache(maxsize=16)
def eliminate_variables(edges: Edges, d: int) -> tuple[tuple[int, list[int]], ...]:
    """Variables in the order of least degree, each with its later neighbours, edges added where needed."""
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
