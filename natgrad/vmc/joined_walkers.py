"""Walkers on several processes: their energies and the matrix S are those of all walkers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.operators import Centred, Operator, Pullback
from natgrad.optim import RankExchange, join_operator
from natgrad.vmc.energy import EnergyEstimate, estimate_energy
from natgrad.vmc.samples import Sampler


def join_moment(processes: RankExchange, moment: Pullback, share: float, counted: Tensor) -> Operator:
    """S over the walkers of all processes, about their common mean."""
    joined = join_operator(processes.ranks, moment, moment.linearization.space, share)
    return Centred(cast("Any", joined), processes.gather_rows(joined.shares[processes.rank] ** 0.5 * counted))


def gather_numbers(processes: RankExchange, values: Tensor) -> Tensor:
    """The numbers of all processes, real or complex, (sum of all b,) from (b,) each."""
    if not values.is_complex():
        return processes.gather_rows(values)
    return torch.view_as_complex(processes.gather_rows(torch.view_as_real(values).contiguous()))


def estimate_jointly(
    processes: RankExchange, local_energies: Tensor, weights: Tensor | None, *, enumerated: bool = False
) -> EnergyEstimate:
    """`estimate_energy` over the walkers of all processes.

    Chains of one length, or numbers of a chain each, are taken together; from chains of different lengths the processes
    estimate apart, and what they found is joined.

    local_energies: Of this process's walkers, (b,) or (chains, b). weights: Of them, same shape, or None; over all
    processes they count relative to one another.
    """
    if processes.size == 1:
        return estimate_energy(local_energies, weights, enumerated=enumerated)
    everyone = gather_numbers(processes, local_energies.reshape(-1))
    if weights is not None:
        shares = processes.gather_rows(weights.detach().reshape(-1).double())
        return estimate_energy(everyone, shares / shares.sum(), enumerated=enumerated)
    lengths = [int(one) for (one,) in processes.share_numbers([local_energies.shape[-1]], local_energies.device)]
    if len(set(lengths)) == 1:
        return estimate_energy(everyone.view(-1, lengths[0]), enumerated=enumerated)
    own = estimate_energy(local_energies, enumerated=enumerated)
    return combine_estimates([EnergyEstimate(*told) for told in processes.share_objects(list(vars(own).values()))])


def combine_estimates(parts: Sequence[EnergyEstimate]) -> EnergyEstimate:
    """What estimates from independent samples come to together."""
    samples = sum(part.samples for part in parts)
    shares = [part.samples / samples for part in parts]
    pairs = list(zip(shares, parts, strict=True))
    mean = sum(share * part.mean for share, part in pairs)
    error = math.sqrt(sum((share * part.error) ** 2 for share, part in pairs))
    return EnergyEstimate(
        mean=mean,
        error=error,
        variance=sum(share * (part.variance + (part.mean - mean) ** 2) for share, part in pairs),
        correlation=max(part.correlation for part in parts),
        samples=samples,
        settled=all(part.settled for part in parts),
        imaginary=sum(share * part.imaginary for share, part in pairs),
        r_hat=max((part.r_hat for part in parts if part.r_hat is not None), default=None),
    )


def check_draws(processes: RankExchange, sampler: Sampler) -> None:
    """ValueError if samplers of two processes would draw the same walkers, which would count them twice."""
    generator = getattr(sampler, "generator", None)
    if processes.size == 1 or not isinstance(generator, torch.Generator):
        return
    states = processes.share_objects(generator.get_state().tolist())
    for rank, state in enumerate(states):
        if state in states[:rank]:
            raise ValueError(
                f"the samplers of process {states.index(state)} and {rank} would draw the same walkers: give each a "
                "seed of its own, such as seed=torch.distributed.get_rank()"
            )
