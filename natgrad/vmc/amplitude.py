"""psi as a module that returns log psi, with real parameters only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.pure import run_detached
from natgrad.ground.spaces import split_complex_parameters
from natgrad.optim import refuse_processes

CHUNK = 2**16
"""Amplitudes that are computed at a time."""

Head = Callable[[Any], Tensor]
"""What turns a network's outputs into log psi, shape (b,)."""


def read_log(outputs: Any) -> Tensor:
    """log psi from a network that returns it: the default head.

    Args:
        outputs: log psi, shape (b,) or (b, 1), real (psi > 0) or complex.

    Returns:
        Shape (b,).

    Raises:
        ValueError: For outputs of another shape.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2) or outputs.shape[1:].numel() != 1:
        came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the network's outputs are {came}, expected log psi of shape (b,) or (b, 1); say what they are: head="
            "vmc.read_phase for (log |psi|, phase), vmc.read_sign for (sign, log |psi|), vmc.read_amplitude for psi"
        )
    return outputs.reshape(-1)


def read_phase(outputs: Any) -> Tensor:
    """log psi = log |psi| + i phase, from a network with two real outputs.

    Args:
        outputs: (log |psi|, phase) as a pair of tensors (b,), or one tensor (b, 2).

    Returns:
        Complex, shape (b,).
    """
    log, phase = split_pair(outputs, "(log |psi|, phase)")
    return torch.complex(log, phase)


def read_sign(outputs: Any) -> Tensor:
    """log psi from (sign, log |psi|), as `torch.linalg.slogdet` returns them.

    Args:
        outputs: A pair of tensors (b,), or one tensor (b, 2). The sign is -1 or 1, or a complex number of modulus one.

    Returns:
        Complex, shape (b,), with imaginary part pi where the sign is -1. A real sign has no derivative.
    """
    sign, log = split_pair(outputs, "(sign, log |psi|)")
    phase = torch.angle(sign) if sign.is_complex() else math.pi * (sign.detach() < 0).to(log.dtype)
    return torch.complex(log, phase)


def read_amplitude(outputs: Any) -> Tensor:
    """log psi from a network that returns psi itself, real with its sign or complex.

    Args:
        outputs: psi, shape (b,) or (b, 1).

    Returns:
        Complex, shape (b,).
    """
    psi = read_log(outputs)
    return psi.log() if psi.is_complex() else read_sign((psi.sign(), psi.abs().log()))


def split_pair(outputs: Any, wanted: str) -> tuple[Tensor, Tensor]:
    """Two tensors (b,) from a pair, or from the columns of one tensor."""
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] == 2:
        return outputs[:, 0], outputs[:, 1]
    if isinstance(outputs, (tuple, list)) and len(outputs) == 2 and all(isinstance(t, Tensor) for t in outputs):
        return outputs[0].reshape(-1), outputs[1].reshape(-1)
    came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ValueError(f"the network's outputs are {came}, expected {wanted}: two tensors (b,), or one of shape (b, 2)")


class LogAmplitude(nn.Module):
    """log psi of a network: a module whose parameters are real, whatever the network's.

    Each complex parameter of the network becomes two real ones, its real and imaginary part, by a parametrisation of
    torch's: `net.weight` is complex as before, `net.state_dict()` holds the parts. `psi(states)` is log psi, shape
    (b,), real where the network's outputs are real and stand for log psi, complex elsewhere.

    Args:
        net: A module from states (b, ...) to outputs.
        head: What turns outputs into log psi: `vmc.read_log` (default), `vmc.read_phase`, `vmc.read_sign`,
            `vmc.read_amplitude`, or a function of your own.

    Raises:
        TypeError: If the network is no module or several processes train it, or the head is no function.
        ValueError: If one complex parameter is shared by several modules.

    Example:
        >>> net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> psi = ng.LogAmplitude(net, head=ng.vmc.read_phase)
        >>> psi(torch.ones(3, 6)).dtype
        torch.complex64
    """

    def __init__(self, net: nn.Module, *, head: Head = read_log) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net is {type(net).__name__}, expected a torch.nn.Module from states (b, ...) to log psi")
        refuse_processes(net, "net")
        if not callable(head):
            raise TypeError(f"head is {head!r}, expected a function of the network's outputs such as vmc.read_phase")
        self.net, self.head = net, head
        self.signed = False
        split_complex_parameters(net)

    def forward(self, states: Tensor) -> Tensor:
        """log psi, shape (b,), real or complex.

        Args:
            states: Shape (b, ...), as the network takes them.
        """
        outputs = self.net(states)
        value = self.head(outputs)
        # a real sign makes log psi complex, and its imaginary part constant
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        self.signed = (self.head is read_sign or self.head is read_amplitude) and not first.is_complex()
        return value

    def take_moving(self, value: Tensor) -> Tensor:
        """The part of log psi that moves with the parameters: without the constant phase of a real sign.

        Args:
            value: log psi, as `forward` returned it.
        """
        return value.real if self.signed else value

    @property
    def dtype(self) -> torch.dtype:
        """The real dtype of the parameters, which states should have."""
        return next(p for p in self.parameters() if p.is_floating_point()).dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device


def evaluate(psi: LogAmplitude, states: Tensor, chunk_size: int = CHUNK) -> Tensor:
    """log psi without a graph, some states at a time."""
    logs = [run_detached(lambda part=part: psi(part)) for part in states.split(chunk_size)]
    return torch.cat(logs) if len(logs) > 1 else logs[0]
