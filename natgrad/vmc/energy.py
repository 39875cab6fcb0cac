"""The mean of local energies with its error: correlated samples count for what they are worth, chains are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_tensor
from natgrad.ground.exchanges import share_count
from natgrad.optim import Processes

MIXED = 1.1
"""Chains whose R-hat is above this differ; mixed ones have 1."""
NOISE = 0.07
"""The largest standard deviation of R-hat squared, of independent samples, at which MIXED can be told from 1."""


@dataclass(frozen=True)
class EnergyEstimate:
    """An energy with its error.

    Args:
        mean: Of the local energies' real part.
        error: Standard error of the mean, from blocks of correlated samples; 0 where all states were enumerated.
        variance: Of the local energies, E|e - E e|^2: zero in an eigenstate.
        correlation: Samples that are worth one independent sample: (error / naive error)^2.
        samples: Their number.
        settled: False if the chains are too short to tell the error, which is then a lower bound.
        imaginary: Mean of the imaginary part, which is zero up to noise.
        r_hat: How much the chains, and their first and second halves, differ: split R-hat, 1 where they are mixed. None
            where there are too few samples to tell 1.1 from 1, as from chains of one sample each.

    Example:
        >>> print(ng.vmc.EnergyEstimate(mean=-2.90372, error=0.00041, variance=0.1, correlation=1.0, samples=1000))
        -2.90372 +- 0.00041
    """

    mean: float
    error: float
    variance: float
    correlation: float = 1.0
    samples: int = 1
    settled: bool = True
    imaginary: float = 0.0
    r_hat: float | None = None

    def __str__(self) -> str:
        digits = 8 if not 0 < self.error < math.inf else max(0, 1 - math.floor(math.log10(self.error)))
        text = f"{self.mean:.{digits}f} +- {self.error:.{digits}f}{'' if self.settled else ' or more'}"
        if self.r_hat is not None and self.r_hat > MIXED:
            text = f"{text}, chains differ (R-hat {self.r_hat:.2f})"
        spread = math.sqrt(max(self.variance, 0.0))
        noise = max(self.error, spread * math.sqrt(max(self.correlation, 1.0) / max(self.samples, 1)))
        # <H> is real where H is Hermitian: 1e-3 is single precision's, with elements of both signs
        if self.settled and abs(self.imaginary) > 1e-3 * (abs(self.mean) + spread) + 10 * noise:
            text = f"{text}, imaginary part {self.imaginary:.3g}: is H Hermitian?"
        return text


def estimate_energy(
    local_energies: Tensor, weights: Tensor | None = None, *, enumerated: bool = False
) -> EnergyEstimate:
    """The mean of local energies with its error.

    Samples of a chain are taken in order, and averaged in blocks of 1, 2, 4, ... The error of the block means grows
    until blocks are longer than the correlations; the smallest block B with B^3 > 2 L (error_B / error_1)^4 is taken.
    Chains are independent of one another, and `r_hat` compares them.

    Args:
        local_energies: Shape (L,), or (chains, L); real or complex.
        weights: Of the samples, relative to one another, same shape: their error is that of a weighted mean of
            independent samples. None: equal ones, in chains.
        enumerated: True if the states are all there are, with their probabilities: no error is left.

    Reference:
        Flyvbjerg & Petersen 1989; the choice of the block: Lee, Mella & Rappe 2011 and Wolff 2004; R-hat: Gelman &
        Rubin 1992, with halves of chains as in Vehtari et al. 2021.

    Example:
        >>> energy = ng.vmc.estimate_energy(torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)))
        >>> energy.settled, abs(energy.mean) < 4 * energy.error
        (True, True)
    """
    check_tensor("local_energies", local_energies)
    values = local_energies.detach().reshape(1, -1) if local_energies.dim() == 1 else local_energies.detach()
    values = values.to(torch.complex128 if values.is_complex() else torch.float64)
    shares = torch.full(values.shape, 1 / values.numel(), dtype=torch.float64, device=values.device)
    if weights is not None:
        shares = weights.detach().reshape(values.shape).to(torch.float64)
        shares = shares / shares.sum()
    mean = (shares * values).sum()
    gaps = values - mean
    variance = float((shares * gaps.abs().square()).sum())
    error, correlation, settled, r_hat = 0.0, 1.0, True, None
    if not enumerated and weights is not None:
        error = float((shares * gaps.real).square().sum().sqrt())
    elif not enumerated:
        error, correlation, settled = measure_error(gaps.real)
        r_hat = compare_chains(gaps.real)
    imaginary = float(mean.imag) if values.is_complex() else 0.0
    return EnergyEstimate(float(mean.real), error, variance, correlation, values.numel(), settled, imaginary, r_hat)


def measure_error(gaps: Tensor) -> tuple[float, float, bool]:
    """The standard error of the mean of (chains, L) by blocking, the samples worth one, and whether it has settled."""
    chains, length = gaps.shape
    if gaps.numel() < 2:
        return math.inf, 1.0, False
    naive, size = block_error(gaps), 1
    if naive == 0:
        return 0.0, 1.0, True
    error = largest = naive
    while not (settled := size**3 > 2 * length * (error / naive) ** 4):
        size *= 2
        if length < size or chains * (length // size) < 8:
            settled = length == 1
            break
        error = block_error(gaps[:, : length // size * size].unflatten(1, (-1, size)).mean(2))
        largest = max(largest, error)
    chosen = error if settled else largest
    return chosen, (chosen / naive) ** 2, settled


def block_error(means: Tensor) -> float:
    """Standard error of the mean of independent numbers."""
    return math.sqrt(float(means.var()) / means.numel())


def compare_chains(values: Tensor) -> float | None:
    """Split R-hat, ((n - 1) / n + B / (n W))^(1/2) of the halves of chains (chains, L); None where noise hides it.

    Of halves of n samples, W is the mean of their variances and B n times the variance of their means.
    """
    length = values.shape[1] // 2
    parts = values[:, values.shape[1] - 2 * length :].reshape(-1, max(1, length))
    if length < 2 or math.sqrt(2 / (len(parts) - 1) + 2 / (len(parts) * (length - 1))) / length > NOISE:
        return None
    within, between = float(parts.var(1).mean()), length * float(parts.mean(1).var())
    if within == 0:
        return math.inf if between > 0 else 1.0
    return math.sqrt((length - 1) / length + between / (length * within))


def extrapolate_variance(energies: list[EnergyEstimate]) -> EnergyEstimate:
    """The energy at zero variance, by a weighted line through (variance, energy): an eigenstate has none.

    Args:
        energies: Of several trial states of one Hamiltonian that approach the same eigenstate, at least two with
            different variances.

    Returns:
        The line's value at zero, with the error that follows from the energies' errors; where all of these are zero,
        from their scatter about the line.

    Raises:
        ValueError: For fewer than two different variances.

    Reference:
        Kashima & Imada 2001.

    Example:
        >>> line = [ng.vmc.EnergyEstimate(-1.0 + 0.5 * v, 0.01, v) for v in (0.1, 0.2, 0.4)]
        >>> print(ng.vmc.extrapolate_variance(line))
        -1.000 +- 0.012
    """
    x = torch.tensor([energy.variance for energy in energies], dtype=torch.float64)
    y = torch.tensor([energy.mean for energy in energies], dtype=torch.float64)
    if len(set(x.tolist())) < 2:
        raise ValueError(f"energies have {len(set(x.tolist()))} different variances, expected at least two")
    errors = torch.tensor([energy.error for energy in energies], dtype=torch.float64)
    known = bool((errors > 0).all()) and bool(errors.isfinite().all())
    weights = errors.pow(-2) if known else torch.ones_like(errors)
    total, centre = weights.sum(), (weights * x).sum() / weights.sum()
    spread = (weights * (x - centre).square()).sum()
    slope = (weights * (x - centre) * y).sum() / spread
    value = (weights * y).sum() / total - slope * centre
    leverage = 1 / total + centre.square() / spread
    if not known:
        left = y - value - slope * x
        leverage = leverage * left.square().sum() / max(1, len(energies) - 2)
    return EnergyEstimate(float(value), float(leverage.sqrt()), 0.0, samples=sum(energy.samples for energy in energies))


# walkers on several processes


def estimate_jointly(
    processes: Processes, local_energies: Tensor, weights: Tensor | None, *, enumerated: bool = False
) -> EnergyEstimate:
    """`estimate_energy` over the walkers of all processes, whose weights count relative to one another."""
    if processes.size == 1:
        return estimate_energy(local_energies, weights, enumerated=enumerated)
    everyone = processes.gather_rows(local_energies.reshape(-1))
    if weights is not None:
        shares = processes.gather_rows(weights.detach().reshape(-1).double())
        return estimate_energy(everyone, shares, enumerated=enumerated)
    lengths = share_count(processes, local_energies.shape[-1], local_energies.device)
    if len(set(lengths)) == 1:
        return estimate_energy(everyone.view(-1, lengths[0]), enumerated=enumerated)
    # chains of different lengths cannot be one table
    own = vars(estimate_energy(local_energies, enumerated=enumerated))
    return combine_estimates([EnergyEstimate(*values) for values in processes.share_objects(list(own.values()))])


def combine_estimates(parts: Sequence[EnergyEstimate]) -> EnergyEstimate:
    """What estimates from independent samples come to together."""
    samples = sum(part.samples for part in parts)
    shares = [part.samples / samples for part in parts]
    pairs = list(zip(shares, parts, strict=True))
    mean = sum(share * part.mean for share, part in pairs)
    imaginary = sum(share * part.imaginary for share, part in pairs)
    error = math.sqrt(sum((share * part.error) ** 2 for share, part in pairs))
    return EnergyEstimate(
        mean=mean,
        error=error,
        variance=sum(
            share * (part.variance + (part.mean - mean) ** 2 + (part.imaginary - imaginary) ** 2)
            for share, part in pairs
        ),
        correlation=max(part.correlation for part in parts),
        samples=samples,
        settled=all(part.settled for part in parts),
        imaginary=imaginary,
        r_hat=max((part.r_hat for part in parts if part.r_hat is not None), default=None),
    )
