"""Adaptive integration in batches, and boundary values by shooting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.lapack import all_finite, solve_or_nan

COLUMNS = tuple(range(2, 17, 2))  # midpoint steps per column of the extrapolation table: order 16
STEPS = 2000
POWER = 1 / 15  # of the error estimate, which is of order 14 in the step


def integrate(
    field: Callable[[Tensor], Tensor],
    start: Tensor,
    span: float = 1.0,
    rtol: float = 1e-11,
    atol: float = 1e-12,
    steps: int = STEPS,
) -> Tensor:
    """x(span) of dx/dt = field(x) from x(0) = start, (..., m); one step length for the whole batch.

    Gragg's midpoint rule extrapolated to order 16 (Bulirsch & Stoer), all columns of the table in one batch: 16 calls
    of the field per step, and few steps.
    A row whose field is not finite or not tame however short the step, as on the edge of a domain, becomes NaN.
    Gradients flow through the steps. RuntimeError after that many steps, tried ones included.
    """
    state, time, step = start, 0.0, span
    slope = field(state)
    for _ in range(steps):
        step = min(step, span - time)
        moved, error = _step(field, state, slope, step)
        alive = torch.isfinite(state).all(-1) & torch.isfinite(slope).all(-1)
        scaled = _scaled(error, state, moved, rtol, atol)
        worst = float(torch.where(alive, scaled, 0.0).max()) if alive.numel() else 0.0
        broken = worst != worst or worst == float("inf")
        if not worst <= 1 and step <= 1e-12 * span:  # a NaN is not <= 1 either
            lost = (alive & ~(scaled <= 1)).unsqueeze(-1)
            state, slope = torch.where(lost, torch.nan, state), torch.where(lost, torch.nan, slope)
            step = 1e-3 * span
            continue
        if broken or worst > 1:
            step *= 0.2 if broken else max(0.2, 0.9 * worst**-POWER)
            continue
        state, time = moved, time + step
        if time >= span * (1 - 1e-15) or not bool(alive.any()):
            return state
        slope = field(state)
        step *= min(4.0, 0.9 * max(worst, 1e-10) ** -POWER)
    raise RuntimeError(f"the integration did not end within {steps} steps: loosen rtol, or shorten the way")


def _step(field: Callable[[Tensor], Tensor], state: Tensor, slope: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """(new state, error estimate)."""
    counts = state.new_tensor(COLUMNS).view(-1, *(1,) * state.dim())
    width = step / counts
    before, now, ends = state.expand(len(COLUMNS), *state.shape), state + width * slope, []
    for number in range(1, COLUMNS[-1]):
        before, now = now, before + 2 * width * field(now)
        if number + 1 == COLUMNS[len(ends)]:  # the shortest column is done
            ends.append(now[0])
            before, now, width = before[1:], now[1:], width[1:]
    for level in range(1, len(ends)):  # Aitken and Neville in the square of the width
        last = ends[-1]
        ends = [
            ends[k] + (ends[k] - ends[k - 1]) / ((COLUMNS[k + level - 1] / COLUMNS[k - 1]) ** 2 - 1)
            for k in range(1, len(ends))
        ]
    return ends[-1], ends[-1] - last


def _scaled(error: Tensor, before: Tensor, after: Tensor, rtol: float, atol: float) -> Tensor:
    """Root mean square of error / tolerance, (..., m) -> (...)."""
    width = atol + rtol * torch.maximum(before.abs(), after.abs())
    return (error / width).detach().square().mean(-1).sqrt()


def shoot(
    reach: Callable[[Tensor], Tensor],
    target: Callable[[float], Tensor],
    guess: Callable[[float], Tensor],
    size: Callable[[Tensor], Tensor],
    tolerance: float,
) -> Tensor:
    """The velocity v (..., n) with reach(v) = target(1), by Newton's method along a path of targets.

    target(s) and guess(s): the point at the part s of the way, and a first velocity towards it. size: length of a
    misfit, (..., n) -> (...). The whole way is tried at once; where that fails, half of it first, and so on.
    ValueError where 2^-12 of the way is still too much.
    """
    begun, velocity, part = 0.0, guess(1.0), 1.0
    while begun < 1:
        aim = min(1.0, begun + part)
        start = guess(aim) if begun == 0 else velocity * (aim / begun)
        found = _newton(reach, target(aim), start, size, tolerance)
        if found is None:
            part /= 2
            if part < 2**-12:
                raise ValueError("no geodesic was found between the points: they are too far apart for shooting")
            continue
        begun, velocity, part = aim, found, 2 * part
    return velocity


def _newton(
    reach: Callable[[Tensor], Tensor],
    target: Tensor,
    velocity: Tensor,
    size: Callable[[Tensor], Tensor],
    tolerance: float,
) -> Tensor | None:
    """None where it does not arrive within 12 steps, halved where a whole one is worse."""
    misfit = target - reach(velocity)
    left = size(misfit)
    for _ in range(12):
        if bool((left <= tolerance).all()):
            return velocity
        if not bool(torch.isfinite(left).all()):
            return None
        step = solve_or_nan(_jacobian(reach, velocity), misfit.unsqueeze(-1)).squeeze(-1)
        if not all_finite(step):
            return None
        rate = (velocity.norm(dim=-1) / step.norm(dim=-1).clamp_min(1e-300)).clamp(max=1.0)  # no longer than the way
        tried = velocity
        for _ in range(6):
            tried = velocity + rate.unsqueeze(-1) * step
            misfit = target - reach(tried)
            worse = ~(size(misfit) <= left.clamp_min(tolerance))
            if not bool(worse.any()):
                break
            rate = torch.where(worse, rate / 2, rate)
        velocity, left = tried, size(misfit)
    return velocity if bool((left <= tolerance).all()) else None


def _jacobian(reach: Callable[[Tensor], Tensor], velocity: Tensor) -> Tensor:
    """d reach / d v (..., n, n) by central differences, all in one batch; Newton's method corrects the rest."""
    n = velocity.shape[-1]
    width = 1e-5 * (1 + velocity.detach().norm(dim=-1, keepdim=True))
    units = torch.eye(n, dtype=velocity.dtype, device=velocity.device).view(n, *(1,) * (velocity.dim() - 1), n)
    ahead, behind = reach(torch.cat([velocity + width * units, velocity - width * units])).split(n)
    return ((ahead - behind) / (2 * width)).movedim(0, -1)
