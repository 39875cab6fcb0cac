"""Wave functions that a group of permutations of the sites leaves as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer


def chain_translations(count: int) -> list[list[int]]:
    """The translations of a closed chain, as permutations of its sites.

    Args:
        count: Sites.

    Example:
        >>> ng.vmc.chain_translations(3)
        [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    """
    check_integer("count", count)
    return [[(site + shift) % count for site in range(count)] for shift in range(count)]


def square_translations(rows: int, columns: int) -> list[list[int]]:
    """The translations of a closed square lattice, site (i, j) numbered i * columns + j as in `square_edges`.

    Args:
        rows: Of the lattice.
        columns: Of the lattice.

    Example:
        >>> len(ng.vmc.square_translations(4, 4))
        16
    """
    down, right = chain_translations(rows), chain_translations(columns)
    return [[i * columns + j for i in first for j in second] for first in down for second in right]


class SymmetricNet(nn.Module):
    """psi(s) = 1/|G| sum_g phi(g s): the mean of a network's psi over permutations g of the sites.

    The ground state of a lattice without frustration, with Marshall's signs where it is antiferromagnetic, is the same
    after every symmetry of the lattice. A forward pass costs as much as |G| of the network's.

    Args:
        net: A module from states (b, n) to log phi, shape (b,) or (b, 1), real or complex.
        permutations: g as lists of the n sites, a group: `ng.vmc.chain_translations(n)`,
            `ng.vmc.square_translations(rows, columns)`, or your own, with reflections for example.

    Raises:
        ValueError: Unless each is a permutation of the same sites.

    Reference:
        Nomura 2021, on which projections help networks.

    Example:
        >>> net = ng.vmc.SymmetricNet(ng.vmc.RBM(4), ng.vmc.chain_translations(4))
        >>> psi, state = ng.LogAmplitude(net), torch.tensor([[1.0, 1.0, -1.0, 1.0]])
        >>> torch.allclose(psi(state), psi(state.roll(1, 1)), atol=1e-6)
        True
    """

    def __init__(self, net: nn.Module, permutations: Sequence[Sequence[int]]) -> None:
        super().__init__()
        sites = list(range(len(permutations[0]))) if permutations else []
        if not sites or any(sorted(order) != sites for order in permutations):
            raise ValueError(
                "permutations are expected to be lists of all sites, at least one and each of the same length, such as "
                "ng.vmc.chain_translations(n)"
            )
        self.net = net
        self.permutations: Tensor
        self.register_buffer("permutations", torch.tensor([list(order) for order in permutations]), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """log psi.

        Args:
            states: Shape (b, n).

        Returns:
            Shape (b,).
        """
        count, sites = self.permutations.shape
        if states.shape[-1] != sites:
            raise ValueError(f"states have {states.shape[-1]} sites, expected {sites}, those of the permutations")
        moved = states[:, self.permutations]  # (b, |G|, n)
        logs = self.net(moved.flatten(0, 1)).reshape(len(states), count)
        top = logs.real.detach().amax(1, keepdim=True)
        return (logs - top).exp().sum(1).log() + top.squeeze(1) - math.log(count)
