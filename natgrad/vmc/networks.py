"""Small wave functions for spins: a restricted Boltzmann machine, and an autoregressive net that draws by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer, check_positive


class RBM(nn.Module):
    """log psi = sum_i a_i s_i + sum_j log cosh(b_j + sum_i W_ji s_i), real or complex.

    A real one is convex in s, so that no psi of bosons with its peak between 0 and `most` is near: take complex
    parameters, or another network.

    Args:
        count: Variables of a state.
        hidden: Hidden units; default as many.
        complex_parameters: True for complex a, b and W, and a complex log psi.
        scale: Standard deviation of W and b at the start.
        seed: Of the start.
        dtype: Real dtype of the parameters.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Carleo & Troyer 2017.

    Example:
        >>> ng.LogAmplitude(ng.vmc.RBM(4, complex_parameters=True))(torch.ones(2, 4)).dtype
        torch.complex64
    """

    def __init__(
        self,
        count: int,
        hidden: int | None = None,
        *,
        complex_parameters: bool = False,
        scale: float = 0.05,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("scale", scale)
        count, hidden = check_integer("count", count), check_integer("hidden", count if hidden is None else hidden)
        kind = dtype or torch.get_default_dtype()
        kind = kind.to_complex() if complex_parameters else kind
        generator = torch.Generator().manual_seed(seed)

        # layers of torch's, so that their rows of the Jacobian need not be written out
        self.visible = nn.Linear(count, 1, bias=False, dtype=kind)
        self.hidden = nn.Linear(count, hidden, dtype=kind)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(scale * torch.randn(p.shape, dtype=kind, generator=generator))

    def forward(self, states: Tensor) -> Tensor:
        """log psi.

        Args:
            states: Shape (b, n).

        Returns:
            Shape (b,).
        """
        states = states.to(self.hidden.weight.dtype)
        return self.visible(states).squeeze(1) + log_cosh(self.hidden(states)).sum(1)


def log_cosh(z: Tensor) -> Tensor:
    """log cosh z without overflow, real or complex. z: Any shape."""
    if not z.is_complex():
        return torch.logaddexp(z, -z) - math.log(2)
    z = torch.where(z.real < 0, -z, z)  # cosh is even
    return z + torch.log1p(torch.exp(-2 * z)) - math.log(2)


class AutoregressiveNet(nn.Module):
    """log psi = 1/2 log p(s) + i phase(s) with p(s) = prod_i p(s_i | s_1 ... s_{i-1}) by one masked network.

    Args:
        count: Spins of a state.
        hidden: Hidden units per spin.
        phase: True for a phase by a network of its own.
        seed: Of the start.
        dtype: Of the parameters.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Germain, Gregor, Murray & Larochelle 2015 (masks); Sharir, Levine, Wies, Carleo & Shashua 2020.

    Example:
        >>> psi = ng.LogAmplitude(ng.vmc.AutoregressiveNet(3))
        >>> states = ng.vmc.Spins(3).all_states()
        >>> round(float((2 * psi(states).detach()).exp().sum()), 4)
        1.0
    """

    def __init__(
        self, count: int, hidden: int = 4, *, phase: bool = False, seed: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.count = check_integer("count", count)
        width = self.count * check_integer("hidden", hidden)
        kind, generator = dtype or torch.get_default_dtype(), torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, dtype=kind, generator=generator) / math.sqrt(columns))

        self.first, self.last = draw(width, count), draw(count, width)
        self.first_bias = nn.Parameter(torch.zeros(width, dtype=kind))
        self.last_bias = nn.Parameter(torch.zeros(count, dtype=kind))
        groups = torch.arange(count).repeat_interleave(hidden)  # unit k of group i sees s_1 ... s_i
        self.sees = nn.Buffer((groups.unsqueeze(1) >= torch.arange(count)).to(kind))
        self.tells = nn.Buffer((torch.arange(count).unsqueeze(1) > groups).to(kind))
        self.phase: nn.Module | None = None
        if phase:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                layers = nn.Linear(count, width, dtype=kind), nn.Tanh(), nn.Linear(width, 1, dtype=kind)
                self.phase = nn.Sequential(*layers)

    def logits(self, states: Tensor) -> Tensor:
        """log p(s_i = 1 | s_1 ... s_{i-1}) / p(s_i = -1 | ...), shape (b, n).

        Args:
            states: Shape (b, n).
        """
        inner = torch.tanh(nn.functional.linear(states, self.first * self.sees, self.first_bias))
        return nn.functional.linear(inner, self.last * self.tells, self.last_bias)

    def forward(self, states: Tensor) -> Tensor:
        """log psi.

        Args:
            states: Shape (b, n).

        Returns:
            Shape (b,).
        """
        half = nn.functional.logsigmoid(states * self.logits(states)).sum(1) / 2
        return half if self.phase is None else torch.complex(half, self.phase(states).squeeze(1))

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Independent states from |psi|^2, spin by spin.

        Args:
            count: How many.
            generator: Source of the draws.

        Returns:
            Shape (count, n).
        """
        states = torch.zeros(count, self.count, dtype=self.first.dtype, device=self.first.device)
        chances = torch.rand(self.count, count, generator=generator, dtype=torch.float64).to(states)
        for i, chance in enumerate(chances):
            up = torch.sigmoid(self.logits(states)[:, i])
            states[:, i] = 2 * (chance < up).to(states.dtype) - 1
        return states


# Wave functions that a group of permutations of the sites leaves as they are


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
        self.permutations = nn.Buffer(torch.tensor([list(order) for order in permutations]), persistent=False)

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
