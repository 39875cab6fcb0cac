"""What every check is made of: sentences that name the broken promise and its size."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.spaces import Params

DEVIATIONS = 6  # standard errors between a sampled and an exact number: one false alarm in 5e8 normal draws


def require(condition: bool, sentence: str) -> None:
    """AssertionError with the sentence unless the condition holds (a bare assert vanishes under python -O)."""
    if not condition:
        raise AssertionError(sentence)


def require_close(what: str, value: Tensor, expected: Tensor, rtol: float, scale: Any = None) -> None:
    """AssertionError unless shapes agree and the largest error is within rtol * scale."""
    require(value.shape == expected.shape, f"{what} has shape {tuple(value.shape)}, expected {tuple(expected.shape)}")
    if expected.numel():
        error = float((value - expected).abs().max())
        allowed = rtol * float(expected.abs().max() if scale is None else scale) + torch.finfo(expected.dtype).tiny
        require(error <= allowed, f"{what} is off by {error:.3g}, allowed {allowed:.3g}")


def require_mean(what: str, draws: Tensor, expected: Tensor) -> None:
    """AssertionError unless the mean of draws is within six standard errors of what is expected."""
    error = (draws.mean(0) - expected).abs()
    floor = 1e4 * torch.finfo(draws.dtype).eps * (1 + draws.abs().max())  # entries without spread, such as exact zeros
    spread = draws.std(0) / len(draws) ** 0.5
    worst = float((error / (spread + floor)).max())
    require(worst <= DEVIATIONS, f"{what} over {len(draws)} draws is {worst:.3g} standard errors off")


def require_raises(what: str, call: Callable[[], Any]) -> None:
    """AssertionError unless the call raises a ValueError or TypeError that says something."""
    try:
        call()
    except (ValueError, TypeError) as error:
        require(len(str(error)) > 20, f"{what} raises {error!r}: say what was expected, what came and what to do")
    except Exception as error:
        raise AssertionError(
            f"{what} raises {error!r}, expected a ValueError or TypeError before anything is computed"
        ) from error
    else:
        raise AssertionError(f"{what} passes without an error")


def tolerance(rtol: float | None, dtype: torch.dtype) -> float:
    """rtol, or its default for the dtype."""
    return 1e4 * torch.finfo(dtype).eps if rtol is None else rtol  # 2e-12 in float64, 1e-3 in float32


@contextmanager
def require_untouched(params: Params, model: Any, what: str) -> Generator[None]:
    """AssertionError unless the block inside leaves parameters, gradients, buffers and the random state as they are."""
    buffers = dict(model.named_buffers(prefix="buffer ")) if isinstance(model, nn.Module) else {}

    def list_watched() -> dict[str, Tensor]:
        tensors = {f"params[{name!r}]": p for name, p in params.items()} | buffers
        return tensors | {
            f"params[{name!r}].grad": p.grad for name, p in params.items() if p.is_leaf and p.grad is not None
        }

    copies = {name: tensor.detach().clone() for name, tensor in list_watched().items()}
    state = torch.get_rng_state()
    yield
    for name, tensor in list_watched().items():
        require(name in copies and torch.equal(tensor, copies[name]), f"{what} changed {name}")
    require(torch.equal(state, torch.get_rng_state()), f"{what} moved the global random state; draw from a generator")
