"""(H psi)(s) / psi(s), for lattice Hamiltonians of ours and of NetKet's kind, and for those that know it themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.ground.pure import run_detached
from natgrad.vmc.amplitude import CHUNK, LogAmplitude, evaluate
from natgrad.vmc.configurations import Configurations
from natgrad.vmc.hamiltonians import Hamiltonian, choose_kind


def local_energies(psi: LogAmplitude, hamiltonian: Any, states: Any, *, chunk_size: int = CHUNK) -> Tensor:
    """e(s) = sum_s' <s|H|s'> psi(s') / psi(s).

    Args:
        psi: The wave function.
        hamiltonian: An `ng.vmc.Hamiltonian`; anything with `connected(states)` that gives states (b, k, n) and elements
            (b, k); NetKet's operators, by their `get_conn_padded`, on NumPy arrays; or anything with
            `local_energies(psi, states)`, such as `ng.vmc.Molecule`.
        states: s, shape (..., n): a tensor, of integers too where the network takes them, or an array of NumPy's or
            JAX's, as NetKet's samplers give them.
        chunk_size: Amplitudes that are computed at a time.

    Returns:
        Shape (...,), real or complex as psi and H are.

    Raises:
        TypeError: For a Hamiltonian that is none of these.
        ValueError: For states that have other variables than those of the Hamiltonian, or other values.

    Example:
        >>> psi = ng.LogAmplitude(ng.vmc.RBM(3))
        >>> ng.vmc.local_energies(psi, ng.vmc.TransverseIsing(3), torch.ones(2, 3)).shape
        torch.Size([2])
    """
    return take_local_energies(psi, hamiltonian, states, chunk_size)


def take_local_energies(
    psi: LogAmplitude, hamiltonian: Any, states: Any, chunk_size: int = CHUNK, *, space: Configurations | None = None
) -> Tensor:
    """`local_energies`; ValueError where H leads out of the states that a sampler has, `space`."""
    states = read_states(psi, states)
    flat = states.reshape(-1, states.shape[-1]) if states.dim() > 2 else states
    check_variables(hamiltonian, flat)
    check_integers(psi, flat)
    with torch.no_grad():
        own = isinstance(hamiltonian, Hamiltonian)
        if not own and hasattr(hamiltonian, "local_energies"):
            energies = hamiltonian.local_energies(psi, flat)
        elif own or has_connections(hamiltonian):
            others, values = hamiltonian.moves(flat) if own else read_connections(hamiltonian, flat)
            if space is not None and not bool((space.contains(others) | (values == 0)).all()):
                raise ValueError(
                    f"hamiltonian leads out of {space}, the sampler's states: {hamiltonian} does not conserve what "
                    "these do, and without the other states the energy is that of no wave function; take a sampler "
                    "over all states that it connects"
                )
            energies = sum_ratios(psi, flat, others, values, chunk_size)
            energies = hamiltonian.diagonal(flat) + energies if own else energies
        else:
            raise TypeError(
                f"hamiltonian is {type(hamiltonian).__name__}, expected an ng.vmc.Hamiltonian, or something with "
                "connected(states), get_conn_padded(states) or local_energies(psi, states); for particles in a "
                "potential derive from ng.vmc.Harmonic, with a potential(states) of your own"
            )
    return energies.reshape(states.shape[:-1])


def check_variables(hamiltonian: Any, states: Tensor) -> None:
    """ValueError unless states (b, n) have the variables of a lattice Hamiltonian, with their values."""
    space = getattr(hamiltonian, "space", None)
    if isinstance(space, Configurations) and not bool(space.has_values(states).all()):
        came = f"{states.shape[-1]} variables" if states.shape[-1] != space.count else "other values"
        raise ValueError(
            f"states have {came}, expected {space.count} variables with the values {list(space.values)}, those of "
            f"hamiltonian.space, {space}: take a sampler and a network over hamiltonian.space"
        )


def sum_ratios(psi: LogAmplitude, states: Tensor, others: Tensor, values: Tensor, chunk_size: int) -> Tensor:
    """sum_k values psi(s'_k) / psi(s), shape (b,); where the element is zero psi is not asked."""
    present = values != 0
    here = evaluate(psi, states, chunk_size)
    if bool(present.all()):
        there = evaluate(psi, others.flatten(0, 1), chunk_size).view(values.shape)
        kind = torch.promote_types(there.dtype, values.dtype)
        return (values.to(kind) * (there - here.unsqueeze(1)).exp().to(kind)).sum(1)
    there = evaluate(psi, others[present], chunk_size)
    rows = present.nonzero()[:, 0]
    kind = torch.promote_types(there.dtype, values.dtype)
    terms = values[present].to(kind) * (there - here[rows]).exp().to(kind)
    return torch.zeros(len(states), dtype=kind, device=states.device).index_add(0, rows, terms)


def has_connections(hamiltonian: Any) -> bool:
    """True for what `read_connections` reads."""
    return hasattr(hamiltonian, "connected") or hasattr(hamiltonian, "get_conn_padded")


def read_connections(operator: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """States and elements of a Hamiltonian that is not ours: as tensors, or as NetKet's operators give them."""
    if hasattr(operator, "connected"):
        others, values = operator.connected(states)
        b, n = states.shape
        fits = isinstance(others, Tensor) and isinstance(values, Tensor) and others.dim() == 3
        if not fits or others.shape != (b, others.shape[1], n) or values.shape != others.shape[:2]:
            came = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in (others, values)]
            raise ValueError(
                f"{type(operator).__name__}.connected(states) returned {came[0]} and {came[1]} for states {(b, n)}, "
                f"expected tensors: the connected states ({b}, k, {n}) and their elements ({b}, k), padded with zeros"
            )
        return others, values
    pair = operator.get_conn_padded(states.cpu().numpy())
    others, values = (torch.as_tensor(as_array(part)).to(states.device) for part in pair)
    kind = choose_kind(states)
    return others.to(states.dtype), values.to(torch.promote_types(kind, values.dtype) if values.is_complex() else kind)


def read_states(psi: LogAmplitude, states: Any) -> Tensor:
    """States as a tensor in the dtype of the wave function; those of an array on its device, too."""
    if isinstance(states, Tensor):
        return states.to(psi.dtype) if states.is_floating_point() else states
    return read_numbers(psi, states, "states").to(psi.dtype)


def check_integers(psi: LogAmplitude, states: Tensor) -> None:
    """ValueError for integers that the network does not take. states: (b, ...)."""
    if states.is_floating_point():
        return
    try:
        run_detached(lambda: psi(states[:1]))
    except RuntimeError as error:
        raise ValueError(
            f"states is {states.dtype}, which psi's network does not take: convert with states.to(psi.dtype), "
            f"{psi.dtype}"
        ) from error


def read_numbers(psi: LogAmplitude, numbers: Any, name: str) -> Tensor:
    """Numbers as a tensor; those of an array on the device of the wave function."""
    if isinstance(numbers, Tensor):
        return numbers
    try:
        return torch.as_tensor(as_array(numbers)).to(psi.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} is {type(numbers).__name__}, expected a tensor, or an array of NumPy's or JAX's"
        ) from error


def as_array(part: Any) -> Any:
    """A NumPy array of its own memory, from NumPy's or from another library's arrays."""
    if not hasattr(part, "__array__") and hasattr(part, "__jax_array__"):  # such as NetKet's LocalEstimators
        part = part.__jax_array__()
    array = part.__array__() if hasattr(part, "__array__") else part
    return array.copy() if hasattr(array, "copy") else array
