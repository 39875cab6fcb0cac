"""Adaptive integration in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.ground.linalg import refuse_mapped

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
    """x(span) of dx/dt = field(x) from x(0) = start; one step length for the whole batch.

    Gragg's midpoint rule extrapolated to order 16 (Bulirsch & Stoer), all columns of the table in one batch: 16 calls
    of the field per step, and few steps. A row whose field is not finite or not tame however short the step, as on the
    edge of a domain, becomes NaN. Gradients flow through the steps.

    Args:
        field: x -> dx/dt, (..., m) -> (..., m).
        start: x(0), shape (..., m).
        span: Time; negative to go back.
        rtol: Relative tolerance of a step.
        atol: Absolute tolerance of a step.
        steps: At most, tried ones included.

    Returns:
        Shape (..., m).

    Raises:
        RuntimeError: After that many steps.
        ValueError: Within `torch.func.vmap`.

    Example:
        >>> ng.geometry.integrate(lambda x: -x, torch.tensor([1.0]))
        tensor([0.3679])
    """
    refuse_mapped(start, "start")
    state, time, step = start, 0.0, 1.0  # both in shares of the span
    slope = field(state)
    for _ in range(steps):
        step = min(step, 1 - time)
        moved, error = _step(field, state, slope, span * step)
        alive = torch.isfinite(state).all(-1) & torch.isfinite(slope).all(-1)
        width = atol + rtol * torch.maximum(state.abs(), moved.abs())
        scaled = (error / width).detach().square().mean(-1).sqrt()
        worst = float(torch.where(alive, scaled, 0.0).max()) if alive.numel() else 0.0
        broken = worst != worst or worst == float("inf")
        if not worst <= 1 and step <= 1e-12:  # a NaN is not <= 1 either
            lost = (alive & ~(scaled <= 1)).unsqueeze(-1)
            state, slope = torch.where(lost, torch.nan, state), torch.where(lost, torch.nan, slope)
            step = 1e-3
            continue
        if broken or worst > 1:
            step *= 0.2 if broken else max(0.2, 0.9 * worst**-POWER)
            continue
        state, time = moved, time + step
        if time >= 1 - 1e-15 or not bool(alive.any()):
            return state
        slope = field(state)
        step *= min(4.0, 0.9 * max(worst, 1e-10) ** -POWER)
    raise RuntimeError(f"the integration did not end within {steps} steps: loosen rtol, or shorten the way")


def integrate_wide(field: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """`integrate` in float64, where the device has it: the tolerance is below the round-off of float32."""
    wide = start if start.device.type == "mps" else start.double()
    return integrate(field, wide).to(start.dtype)


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
