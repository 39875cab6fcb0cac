"""The optimisers beside which `ng.kfac` and its family are raced, each with rates to be tuned over.

Five are tried at first; where the best of them is the lowest or the highest, those beyond it are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from natgrad_lab.experiments import Choice, Contestant, contestants
from natgrad_lab.experiments.contestants import FAMILY, apply_recipe, grid

RATES: dict[str, tuple[float, ...]] = {
    "adam": (5e-4, 1e-3, 3e-3, 6e-3, 0.012),
    "adamw": (5e-4, 1e-3, 3e-3, 6e-3, 0.012),
    "muon": (0.005, 0.01, 0.02, 0.05, 0.1),
    "soap": (1e-3, 3e-3, 0.01, 0.02, 0.03),
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0),
}
PEERS = tuple(RATES)
BEYOND = 2  # rates below and above the five, each three times further out


def widen(rates: Sequence[float]) -> tuple[float, ...]:
    """The five with those beyond them."""
    low, high = min(rates), max(rates)
    below, above = (low / 3**k for k in range(BEYOND, 0, -1)), (high * 3**k for k in range(1, BEYOND + 1))
    return (*below, *rates, *above)


def falling(share: float) -> float:
    """The factor on everybody's rate: straight down to zero at the end of the run."""
    return 1 - share


def contestant(
    name: str, batch: int, rates: Sequence[float] | None = None, but: Sequence[str] = (), falls: bool = True
) -> Contestant:
    """One by its name. but: matrices that are Adam's where Muon has the rest. falls: its rate, to zero."""
    fall = falling if falls else None
    if name in FAMILY:
        title, recipe = FAMILY[name]
        return replace(apply_recipe(title, recipe, grid(batch=(batch,))), falls=fall)
    return replace(make_peer(name, batch, widen(rates or RATES[name]), but), falls=fall)


def make_peer(name: str, batch: int, rates: Sequence[float], but: Sequence[str]) -> Contestant:
    """A peer. Adam, and what of Muon's parameters is Adam's, have the betas .9 and .95 of language models."""
    if name == "muon":
        return contestants.muon(grid(batch=(batch,), lr=rates, adam_lr=(3e-3,)), but=but)
    builders: Mapping[str, Callable[[list[Choice]], Contestant]] = {
        "adam": lambda choices: contestants.adam(choices, betas=(0.9, 0.95)),
        "adamw": adamw,
        "soap": contestants.soap,
        "sgd": contestants.sgd,
    }
    return builders[name](grid(batch=(batch,), lr=rates))


def adamw(choices: list[Choice], decay: float = 0.1) -> Contestant:
    """torch.optim.AdamW with the weight decay of language models."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=choice["lr"], betas=(0.9, 0.95), weight_decay=decay)

    return Contestant("AdamW", tuple(choices), build)
