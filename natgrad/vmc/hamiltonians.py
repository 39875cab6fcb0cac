"""Lattice Hamiltonians by their matrix elements: <s|H|s'> for every s' that s is connected with."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.messages import Explained
from natgrad.vmc.configurations import Bosons, Configurations, Spins

Edges = Sequence[tuple[int, int]]


def chain_edges(count: int, distance: int = 1, *, periodic: bool = True) -> list[tuple[int, int]]:
    """Pairs of sites at a distance along a chain, each once.

    Args:
        count: Number of sites.
        distance: Between the sites of a pair.
        periodic: Whether the chain is closed.

    Example:
        >>> ng.vmc.chain_edges(3)
        [(0, 1), (1, 2), (0, 2)]
    """
    return keep_once([(i, (i + distance) % count) for i in range(count if periodic else count - distance)])


def square_edges(rows: int, columns: int, *, diagonal: bool = False, periodic: bool = True) -> list[tuple[int, int]]:
    """Nearest neighbours on a square lattice, site (i, j) numbered i * columns + j, each pair once.

    Args:
        rows: Of the lattice.
        columns: Of the lattice.
        diagonal: The next-nearest neighbours instead, along both diagonals.
        periodic: Whether the lattice is closed.

    Example:
        >>> len(ng.vmc.square_edges(4, 4)), len(ng.vmc.square_edges(4, 4, diagonal=True))
        (32, 32)
    """
    moves = ((1, 1), (1, -1)) if diagonal else ((1, 0), (0, 1))
    pairs = []
    for i in range(rows):
        for j in range(columns):
            for di, dj in moves:
                inside = i + di < rows and 0 <= j + dj < columns
                if inside or periodic:
                    pairs.append((i * columns + j, (i + di) % rows * columns + (j + dj) % columns))
    return keep_once(pairs)


def keep_once(pairs: Edges) -> list[tuple[int, int]]:
    """Pairs of different sites in increasing order, each once."""
    return list(dict.fromkeys((min(a, b), max(a, b)) for a, b in pairs if a != b))


class Hamiltonian(Explained):
    """H by its matrix elements. A subclass gives `space`, `diagonal` and `moves`.

    Anything else with `connected(states)`, or with NetKet's `get_conn_padded(states)`, serves as well where local
    energies are taken.
    """

    space: Configurations
    """The states."""

    @abstractmethod
    def diagonal(self, states: Tensor) -> Tensor:
        """<s|H|s>, shape (b,).

        Args:
            states: s, shape (b, n).
        """

    @abstractmethod
    def moves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The other states s' (b, k, n) with their <s|H|s'> (b, k). An element of zero fills places.

        Args:
            states: s, shape (b, n).
        """

    def connected(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """All states s' (b, k, n) with their <s|H|s'> (b, k), s itself first.

        Args:
            states: s, shape (b, n).
        """
        others, values = self.moves(states)
        here = self.diagonal(states).unsqueeze(1)
        return torch.cat([states.unsqueeze(1), others], dim=1), torch.cat([here, values], dim=1)

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """H over all states, sparse, in the order of `space.all_states()`.

        Args:
            dtype: Of the numbers.

        Raises:
            ValueError: If there are too many states, or if H leads out of them.
        """
        states = self.space.all_states(dtype)
        return place_elements(self, self.space, states, *self.connected(states))


def place_elements(hamiltonian: Any, space: Configurations, states: Tensor, others: Tensor, values: Tensor) -> Tensor:
    """H over all states (b, n), from those that they are connected with (b, k, n), with their elements (b, k)."""
    numbers = space.number(states)
    columns = torch.searchsorted(numbers, space.number(others).clamp(max=int(numbers[-1])))
    present = values != 0
    if not torch.equal(others[present], states[columns[present]]):
        raise ValueError(f"{hamiltonian} leads out of {space}: H does not conserve what its states do")
    rows = torch.arange(len(states)).unsqueeze(1).expand_as(columns)
    places = torch.stack([rows[present], columns[present]])
    return torch.sparse_coo_tensor(places, values[present], (len(states),) * 2, check_invariants=True).coalesce()


class EdgeHamiltonian(Hamiltonian):
    """A Hamiltonian that joins pairs of sites: those of `edges`, or neighbours on a closed chain where that is None."""

    edges: Edges | None

    @property
    def edges_or_chain(self) -> Edges:
        """The edges in use."""
        return chain_edges(self.space.count) if self.edges is None else self.edges

    def _settle(self, name: str, count: int, coupling: Any) -> None:
        """Read and check the edges, and that the coupling is one number or one per edge."""
        check_integer(name, count)
        if self.edges is not None:
            try:
                pairs = [(operator.index(a), operator.index(b)) for a, b in self.edges]
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"edges is {self.edges!r}, expected pairs of sites numbered from 0, [(0, 1), (1, 2)]; of a "
                    "networkx graph with other names: networkx.convert_node_labels_to_integers(graph).edges"
                ) from error
            object.__setattr__(self, "edges", pairs)
        edges = self.edges_or_chain
        for pair in edges:
            if not all(0 <= site < count for site in pair) or pair[0] == pair[1]:
                raise ValueError(f"edges has {pair}, expected pairs of different sites from 0 to {count - 1}")
        if hasattr(coupling, "__len__") and len(coupling) != len(edges):
            raise ValueError(f"coupling has {len(coupling)} numbers, expected one, or one per edge: {len(edges)}")


@dataclass(frozen=True)
class TransverseIsing(EdgeHamiltonian):
    """H = -J sum_edges z_i z_j - h sum_i x_i.

    Args:
        count: Number of spins.
        edges: Pairs of neighbours, as a list, a tensor (edges, 2) or networkx's `graph.edges`; None: a closed chain.
        field: h.
        coupling: J, or one per edge.

    Example:
        >>> ng.vmc.TransverseIsing(3, field=0.5).connected(torch.tensor([[1.0, 1.0, -1.0]]))[1]
        tensor([[ 1.0000, -0.5000, -0.5000, -0.5000]])
    """

    count: int
    edges: Edges | None = None
    field: float = 1.0
    coupling: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        self._settle("count", self.count, self.coupling)

    @property
    def space(self) -> Spins:  # type: ignore[override]
        """The states."""
        return Spins(self.count)

    def diagonal(self, states: Tensor) -> Tensor:
        return -(pair_products(states, self.edges_or_chain) * as_weights(self.coupling, states)).sum(1)

    def moves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        signs = 1 - 2 * torch.eye(self.count, dtype=states.dtype, device=states.device)
        return states.unsqueeze(1) * signs, torch.full_like(states, -self.field, dtype=choose_kind(states))


@dataclass(frozen=True)
class Heisenberg(EdgeHamiltonian):
    """H = sum_edges J_ij S_i . S_j with spins one half, S = sigma / 2: J > 0 is the antiferromagnet.

    J1-J2 models are `Heisenberg(16, near + far, [1.0] * len(near) + [0.5] * len(far))`.

    Args:
        count: Number of spins.
        edges: Pairs; None: a closed chain.
        coupling: J, or one per edge.
        sublattice: Sites on which x and y are turned around (Marshall's sign rule): then flips between the sublattices
            have negative elements, and on a bipartite lattice psi > 0 in the ground state.
        up: The conserved number of spins that are 1. None: half of them.

    Example:
        >>> ng.vmc.Heisenberg(4).connected(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))[1]
        tensor([[-1.0000,  0.5000,  0.5000,  0.5000,  0.5000]])
    """

    count: int
    edges: Edges | None = None
    coupling: float | Sequence[float] = 1.0
    sublattice: Sequence[int] = ()
    up: int | None = None

    def __post_init__(self) -> None:
        self._settle("count", self.count, self.coupling)
        sites, count = self.sublattice, self.count
        if len({*sites}) < len(sites) or not all(0 <= site < count for site in sites):
            raise ValueError(
                f"sublattice is {list(sites)}, expected different sites from 0 to {count - 1}: all of one sublattice, "
                f"range(0, {count}, 2) for a chain"
            )

    @property
    def space(self) -> Spins:  # type: ignore[override]
        """The states."""
        return Spins(self.count, self.count // 2 if self.up is None else self.up)

    def diagonal(self, states: Tensor) -> Tensor:
        return (pair_products(states, self.edges_or_chain) * as_weights(self.coupling, states)).sum(1) / 4

    def moves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        first, second = split_edges(self.edges_or_chain, states)
        edges = torch.arange(len(first), device=states.device)
        order = torch.arange(self.count, device=states.device).repeat(len(first), 1)
        order[edges, first], order[edges, second] = second, first
        turned = torch.zeros(self.count, dtype=torch.bool, device=states.device)
        turned[list(self.sublattice)] = True
        signs = 1 - 2 * (turned[first] != turned[second]).to(states.dtype)
        different = (states[:, first] != states[:, second]).to(states.dtype)
        return states[:, order], different * signs * as_weights(self.coupling, states) / 2


@dataclass(frozen=True)
class BoseHubbard(EdgeHamiltonian):
    """H = -t sum_edges (b_i^+ b_j + b_j^+ b_i) + U / 2 sum_i n_i (n_i - 1), with at most `most` bosons on a site.

    Args:
        sites: Number of sites.
        edges: Pairs; None: a closed chain.
        hopping: t.
        interaction: U.
        particles: The conserved number of bosons. None: one per site.
        most: The largest number on a site.

    Example:
        >>> ng.vmc.BoseHubbard(3, hopping=1.0, interaction=4.0).diagonal(torch.tensor([[2.0, 1.0, 0.0]]))
        tensor([4.])
    """

    sites: int
    edges: Edges | None = None
    hopping: float = 1.0
    interaction: float = 1.0
    particles: int | None = None
    most: int = 3

    def __post_init__(self) -> None:
        self._settle("sites", self.sites, 1.0)

    @property
    def space(self) -> Bosons:  # type: ignore[override]
        """The states."""
        return Bosons(self.sites, self.sites if self.particles is None else self.particles, self.most)

    def diagonal(self, states: Tensor) -> Tensor:
        return self.interaction / 2 * (states * (states - 1)).sum(1).to(choose_kind(states))

    def moves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        first, second = split_edges(self.edges_or_chain, states)
        source, target = torch.cat([first, second]), torch.cat([second, first])
        taken, met = states[:, source], states[:, target]
        allowed = (taken > 0) & (met < self.most)
        eye = torch.eye(self.sites, dtype=states.dtype, device=states.device)
        others = states.unsqueeze(1) + (eye[target] - eye[source]) * allowed.unsqueeze(2)
        return others, -self.hopping * (taken * (met + 1)).clamp(min=0).to(choose_kind(states)).sqrt() * allowed


def pair_products(states: Tensor, edges: Edges) -> Tensor:
    """s_i s_j for every edge, (b, edges)."""
    first, second = split_edges(edges, states)
    return states[:, first] * states[:, second]


def split_edges(edges: Edges, like: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second sites of all edges."""
    pairs = torch.tensor(edges, dtype=torch.long, device=like.device).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def as_weights(coupling: float | Sequence[float], like: Tensor) -> Tensor:
    """One number per edge, or one for all, as a tensor."""
    return torch.as_tensor(coupling, dtype=choose_kind(like), device=like.device)


def choose_kind(states: Tensor) -> torch.dtype:
    """The dtype of matrix elements: that of the states, or double precision where these are integers."""
    return states.dtype if states.is_floating_point() else torch.float64
