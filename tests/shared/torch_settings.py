"""The settings of torch that one test could leave changed for all that run after it in the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode

Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def pop_function_modes(count: int) -> None:
    """Take modes off the stack until it has so many, those that were entered last first."""
    while len(_get_current_function_mode_stack()) > count:
        _pop_mode()


def count_autocasts() -> int:
    """How many are open, one within the other."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def close_autocasts(count: int) -> None:
    """End those that are open until there are so many; with none, the rounded parameters that they keep go."""
    while count_autocasts() > count:
        torch.autocast_decrement_nesting()
    if not count:
        torch.clear_autocast_cache()


# How each is read, and how it is written. The default device comes before the modes: it is one of them.
SETTINGS: dict[str, Setting] = {
    "default device": (torch.get_default_device, lambda device: torch.set_default_device(None)),  # none has it set
    "function modes": (lambda: len(_get_current_function_mode_stack()), pop_function_modes),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradients enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "fused attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "open autocasts": (count_autocasts, close_autocasts),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
}


def read_torch_settings() -> dict[str, Any]:
    """The settings by name."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def write_torch_settings(settings: dict[str, Any]) -> None:
    """Put those back that are not as they were read."""
    for name, (read, write) in SETTINGS.items():
        if read() != settings[name]:
            write(settings[name])
