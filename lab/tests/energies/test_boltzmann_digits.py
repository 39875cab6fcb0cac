"""Machines of pixels: chains, both directions with hidden bits, and the page, on embedded digits of a few pixels."""

from __future__ import annotations

import itertools
import math
import time

import torch

import natgrad as ng
from natgrad.energies import RestrictedBoltzmann
from natgrad_lab.energies.boltzmann_digits import STUDY, BoltzmannDigitsSettings, measure_likelihood, raise_likelihood
from natgrad_lab.energies.boltzmann_images import Images, find_log_odds
from natgrad_lab.experiments import PieceRun, execute, find
from natgrad_lab.report import build

FEW = BoltzmannDigitsSettings(
    data="digits", fit=0.05, likelihood=0.05, hidden=4, seconds=0.1, sweeps=5, levels=5, looked_at=30, chains=20
)


def test_the_study_ends_in_a_page(tmp_path):
    assert find("boltzmann_digits") is STUDY
    execute(STUDY, FEW, [0], tmp_path)
    numbers, page = build(tmp_path)
    text = page.read_text()
    assert numbers.missing == 0
    for words in ("All pairs of pixels", "Hidden bits", "maximum likelihood, from noise", "natural gradient"):
        assert words in text


def test_maximum_likelihood_matches_what_pairs_do(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: next(ticks) / 1000)  # .3 seconds are 300 steps on all machines
    x = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).float().repeat(40, 1)
    shown, machine = Images(x, x, 2), ng.Boltzmann(4)
    params = machine.parameters()
    s = BoltzmannDigitsSettings(likelihood=0.3, chains=20)
    exact = (x.mT @ x / len(x)).double()

    def find_gap(point) -> float:
        states = machine.states
        shares = machine.log_probabilities({name: p.detach().double() for name, p in point.items()}).exp()
        return float(((states * shares.unsqueeze(1)).mT @ states - exact).abs().max())

    moved, chains = raise_likelihood(PieceRun(s), machine, params, shown)
    assert find_gap(moved) < 0.8 * find_gap(params)
    assert chains.shape == (100, 4)


def test_a_machine_that_is_lost_has_no_likelihood():
    x = torch.eye(4).repeat(5, 1)
    base = find_log_odds(x)
    params = {"b": base, "c": torch.full((2,), math.nan), "W": torch.zeros(2, 4)}
    assert measure_likelihood(FEW, RestrictedBoltzmann(4, 2), params, base, x) == (-math.inf, math.inf)
