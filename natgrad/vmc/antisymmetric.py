"""A small antisymmetric wave function for electrons, of the kind of FermiNet and PauliNet."""

from __future__ import annotations

import math
from itertools import permutations

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer
from natgrad.vmc.continuous import Molecule

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
