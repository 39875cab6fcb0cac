"""Small wave functions: a restricted Boltzmann machine, an autoregressive net, symmetric and antisymmetric ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer, check_positive
from natgrad.vmc.continuous import Molecule


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
                p.copy_(scale * torch.randn(p.shape, dtype=kind, generator=generator, device=generator.device))

    def forward(self, states: Tensor) -> Tensor:
        """log psi, shape (b,).

        Args:
            states: Shape (b, n).
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
            return nn.Parameter(
                torch.randn(rows, columns, dtype=kind, generator=generator, device=generator.device)
                / math.sqrt(columns)
            )

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
        """log psi, shape (b,).

        Args:
            states: Shape (b, n).
        """
        half = nn.functional.logsigmoid(states * self.logits(states)).sum(1) / 2
        return half if self.phase is None else torch.complex(half, self.phase(states).squeeze(1))

    @torch.no_grad()
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Independent states from |psi|^2, spin by spin, shape (count, n).

        Args:
            count: How many.
            generator: Source of the draws.
        """
        states = torch.zeros(count, self.count, dtype=self.first.dtype, device=self.first.device)
        chances = torch.rand(self.count, count, generator=generator, device=generator.device, dtype=torch.float64).to(
            states
        )
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
        """log psi, shape (b,).

        Args:
            states: Shape (b, n).
        """
        count, sites = self.permutations.shape
        if states.shape[-1] != sites:
            raise ValueError(f"states have {states.shape[-1]} sites, expected {sites}, those of the permutations")
        moved = states[:, self.permutations]  # (b, |G|, n)
        logs = self.net(moved.flatten(0, 1)).reshape(len(states), count)
        top = logs.real.detach().amax(1, keepdim=True)
        return (logs - top).exp().sum(1).log() + top.squeeze(1) - math.log(count)


# Electrons: a small antisymmetric wave function, of the kind of FermiNet and PauliNet

LARGEST = 5
"""Electrons of one spin at most: the determinants are written out as sums over permutations."""

SLOWEST = 0.2
"""Slowest decay of an orbital, per bohr: exp(-sqrt(2 I) r) has .23 for H- and more for whatever binds more firmly."""


class AntisymmetricNet(nn.Module):
    """psi = exp(J) sum_k det[phi^k_i(x_j; all others)]_up det[...]_down, with all cusps built in.

    A stream of features per electron sees smooth functions of its distances to the nuclei, and the means of the other
    electrons' features and of those of its pairs (FermiNet); orbitals are linear in the features, times an envelope
    about each nucleus, which decays whatever its parameter is, so that |psi|^2 has a finite integral. J has the cusps:
    -Z r / (1 + r) at nuclei, and r / (2 + 2 r) or r / (4 + 4 r) for pairs of different or of equal spin (PauliNet), so
    that local energies are finite everywhere. Returns (sign, log |psi|):
    `ng.LogAmplitude(net, head=ng.vmc.read_sign)`.

    Args:
        molecule: Nuclei and electrons.
        hidden: Features per electron.
        layers: Of the streams.
        determinants: k.
        seed: Of the start.
        dtype: Of the parameters.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        Pfau, Spencer, Matthews & Foulkes 2020; Hermann, Schaetzle & Noe 2020.

    Example:
        >>> helium = ng.vmc.Molecule.helium()
        >>> psi = ng.LogAmplitude(ng.vmc.AntisymmetricNet(helium), head=ng.vmc.read_sign)
        >>> psi(torch.randn(5, 6)).shape
        torch.Size([5])
    """

    def __init__(
        self,
        molecule: Molecule,
        hidden: int = 24,
        layers: int = 2,
        determinants: int = 4,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden", hidden), ("layers", layers), ("determinants", determinants)):
            check_integer(name, value)
        if max(molecule.up, molecule.down) > LARGEST:
            raise ValueError(
                f"molecule has {molecule.up} and {molecule.down} electrons, expected at most {LARGEST} each"
            )
        self.molecule, self.determinants = molecule, determinants
        kind, count = dtype or torch.get_default_dtype(), molecule.electrons
        charges, places = molecule.nuclei(torch.zeros(1, dtype=kind))
        self.charges, self.places = nn.Buffer(charges), nn.Buffer(places)
        spins = torch.arange(count) < molecule.up
        self.cusps = nn.Buffer(torch.where(spins.unsqueeze(1) == spins, 0.25, 0.5).to(kind).triu(1))
        inputs, pair = 4 * len(charges), hidden // 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.pairs = nn.Linear(4, pair, dtype=kind)
            widths = [inputs, *[hidden] * layers]
            sizes = [(2 if molecule.down else 1) * (a + pair) + a for a in widths[:-1]]
            self.streams = nn.ModuleList(nn.Linear(size, hidden, dtype=kind) for size in sizes)
            self.orbitals = nn.Linear(hidden, determinants * max(molecule.up, molecule.down) * 2, dtype=kind)
            shape = (2, determinants, max(molecule.up, molecule.down), len(charges))
            self.decays = nn.Parameter(torch.full(shape, math.log(math.expm1(1 - SLOWEST)), dtype=kind))
            self.shares = nn.Parameter(torch.ones(shape, dtype=kind) + 0.1 * torch.randn(shape, dtype=kind))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(sign, log |psi|).

        Args:
            states: Shape (b, 3 electrons), spin up first.

        Returns:
            Two tensors (b,).
        """
        x = states.unflatten(1, (-1, 3))
        offsets = x.unsqueeze(2) - self.places  # (b, n, A, 3)
        squares = offsets.square().sum(3)
        between = x.unsqueeze(2) - x.unsqueeze(1)  # (b, n, n, 3)
        features = self._stream(offsets, squares, between)
        tables = self.orbitals(features).unflatten(2, (2, self.determinants, -1))  # (b, n, 2, k, orbital)
        decays = SLOWEST + nn.functional.softplus(self.decays)  # below zero |psi|^2 could not be sampled
        envelope = torch.exp(-torch.einsum("skoa,bna->bnskoa", decays, (1 + squares).sqrt()))
        tables = tables * (envelope * self.shares).sum(5)
        up, down = self.molecule.up, self.molecule.down
        psi = determinant(tables[:, :up, 0, :, :up].movedim(2, 1))
        if down:
            psi = psi * determinant(tables[:, up:, 1, :, :down].movedim(2, 1))
        total = psi.sum(1)
        return total.sign().detach(), total.abs().log() + self._cusp(squares, between)

    def _stream(self, offsets: Tensor, squares: Tensor, between: Tensor) -> Tensor:
        """Features of every electron, (b, n, hidden)."""
        far = (1 + squares).sqrt().unsqueeze(3)
        now = torch.cat([offsets / far, far.log()], dim=3).flatten(2)
        reach = (1 + between.square().sum(3, keepdim=True)).sqrt()
        pairs = torch.tanh(self.pairs(torch.cat([between / reach, reach.log()], dim=3)))  # (b, n, n, pair)
        up, down = self.molecule.up, self.molecule.down
        spins = [slice(0, up), slice(up, None)] if down else [slice(0, up)]
        for layer in self.streams:
            parts = [now]  # and of every spin the means of the electrons' features and of their pairs'
            for spin in spins:
                parts += [now[:, spin].mean(1, keepdim=True).expand_as(now), pairs[:, :, spin].mean(2)]
            after = torch.tanh(layer(torch.cat(parts, dim=2)))
            now = after + now if after.shape == now.shape else after
        return now

    def _cusp(self, squares: Tensor, between: Tensor) -> Tensor:
        """J: the kinks of log |psi| where particles meet."""
        tiny = torch.finfo(squares.dtype).eps ** 2
        near = (squares + tiny).sqrt()
        total = -(self.charges * near / (1 + near)).sum((1, 2))
        if self.molecule.electrons > 1:
            first, second = torch.triu_indices(*self.cusps.shape, offset=1, device=squares.device)
            gaps = (between[:, first, second].square().sum(2) + tiny).sqrt()
            total = total + (self.cusps[first, second] * gaps / (1 + gaps)).sum(1)
        return total


def determinant(matrix: Tensor) -> Tensor:
    """The determinant of (..., n, n) as its sum over permutations: right in derivatives of every order and mode."""
    size, total = matrix.shape[-1], torch.zeros_like(matrix[..., 0, 0])
    for order in permutations(range(size)):
        turns = sum(order[i] > order[j] for i in range(size) for j in range(i + 1, size))
        term = torch.ones_like(total)
        for row, column in enumerate(order):
            term = term * matrix[..., row, column]
        total = total + (-1) ** turns * term
    return total
