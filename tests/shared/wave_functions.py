"""Small wave functions, all states of a few spins, and quantum mechanics by definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from models import F64
from torch import Tensor, nn

import natgrad as ng

SPINS = 4


def all_spins(n: int = SPINS) -> Tensor:
    """Every state of n spins of -1 and 1, shape (2^n, n)."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=F64)


class ComplexRBM(nn.Module):
    """log psi = sum_j log cosh(W s + b)_j with complex W and b: holomorphic in them."""

    def __init__(self, n: int = SPINS, hidden: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        kind = {"dtype": torch.complex128, "generator": generator}
        self.W = nn.Parameter(0.3 * torch.randn(hidden, n, **kind))
        self.b = nn.Parameter(0.3 * torch.randn(hidden, **kind))

    def forward(self, s: Tensor) -> Tensor:
        return (s.to(self.W.dtype) @ self.W.mT + self.b).cosh().log().sum(1)

    def log_derivatives(self, s: Tensor) -> Tensor:
        """O (b, 15), d log psi / d (W, b), as one derives it on paper."""
        slopes = torch.tanh(s.to(self.W.dtype) @ self.W.mT + self.b).detach()
        return torch.cat([(slopes.unsqueeze(2) * s.unsqueeze(1)).flatten(1), slopes], dim=1)


class SignedNet(nn.Module):
    """(sign, log |psi|) of a real function that takes both signs."""

    def __init__(self, complex_sign: bool = False) -> None:
        super().__init__()
        self.net, self.complex_sign = tanh_net(2), complex_sign

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(s)
        if self.complex_sign:
            return torch.polar(torch.ones_like(out[:, 0]), 3 * out[:, 0]), out[:, 1]
        return out[:, 0].sign(), out[:, 0].abs().log() + out[:, 1]


class Formula(nn.Module):
    """log psi as a function of a parameter and the coordinates."""

    def __init__(self, log: Callable[[Tensor, Tensor], Tensor], start: float = 1.0) -> None:
        super().__init__()
        self.log, self.a = log, nn.Parameter(torch.tensor(start, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.log(self.a, x)


def tanh_net(outputs: int = 1, n: int = SPINS) -> nn.Sequential:
    """A small dense net in float64."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


WAVES = {
    "real log psi": lambda: ng.LogAmplitude(tanh_net()),
    "log psi and phase": lambda: ng.LogAmplitude(tanh_net(2), head=ng.vmc.read_phase),
    "psi itself": lambda: ng.LogAmplitude(tanh_net(), head=ng.vmc.read_amplitude),
    "sign and log psi": lambda: ng.LogAmplitude(SignedNet(), head=ng.vmc.read_sign),
    "complex sign": lambda: ng.LogAmplitude(SignedNet(complex_sign=True), head=ng.vmc.read_sign),
    "complex parameters": lambda: ng.LogAmplitude(ComplexRBM()),
}


def draw_hermitian(size: int, real: bool = False) -> Tensor:
    """A Hamiltonian without structure."""
    generator = torch.Generator().manual_seed(5)
    h = torch.randn(size, size, dtype=F64 if real else torch.complex128, generator=generator)
    return (h + h.mH) / 2


def enumerate_state(psi: ng.LogAmplitude, hamiltonian: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """psi as a normalised vector with its graph, the probabilities, and the local energies (H psi) / psi."""
    log = psi(states).to(torch.complex128)
    vector = (log - log.real.max().detach()).exp()
    vector = vector / vector.abs().square().sum().sqrt()
    local = (hamiltonian.to(vector.dtype) @ vector / vector).detach()
    return vector, vector.detach().abs().square(), local


def flat_parameters(psi: ng.LogAmplitude) -> Tensor:
    """The real parameters as a vector, a copy."""
    params = ng.trainable(psi)
    return ng.Space(params).flatten(params).detach().clone()
