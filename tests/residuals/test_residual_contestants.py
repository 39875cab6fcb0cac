"""The benchmark of `ng.residuals`: all contestants lower one loss, and who has variants is tuned on the first seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

import natgrad as ng
from benchmarks.residual_equations import BoundaryProblem, poisson
from benchmarks.residuals import CONTESTANTS, EQUATIONS, RATES, SCHEDULES, draw_points, train
from benchmarks.variants import check_names, race_variants, write_errors


def vanish(equation: BoundaryProblem, nets: nn.ModuleList, seconds: float) -> Iterator[None]:
    """Networks that are zero: their relative error is 1."""
    with torch.no_grad():
        for p in nets.parameters():
            p.zero_()
    yield


def explode(equation: BoundaryProblem, nets: nn.ModuleList, seconds: float) -> Iterator[None]:
    with torch.no_grad():
        for p in nets.parameters():
            p.fill_(1e3)
    yield


def fail(equation: BoundaryProblem, nets: nn.ModuleList, seconds: float) -> Iterator[None]:
    raise RuntimeError("this run fails")
    yield


class Worsen:
    """Zero networks at the first run, far ones afterwards."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, equation: BoundaryProblem, nets: nn.ModuleList, seconds: float) -> Iterator[None]:
        self.runs += 1
        return (vanish if self.runs == 1 else explode)(equation, nets, seconds)


def test_the_variant_that_is_best_on_the_first_seed_runs_from_all_of_them():
    equation, worsen = poisson(2, (2, 4, 1)), Worsen()
    variants = {"far": explode, "failed": fail, "near": worsen}
    chosen, errors = race_variants(partial(train, equation, seconds=0.0), variants, range(3))
    assert (chosen, worsen.runs) == ("near", 3)
    assert errors[0] == 1.0
    assert errors[1] == errors[2] > 100  # they count although another variant is as good there


def test_a_contestant_whose_variants_all_fail_has_no_finite_error():
    run = partial(train, poisson(2, (2, 4, 1)), seconds=0.0)
    assert race_variants(run, {"": fail}, range(2)) == ("", [math.inf, math.inf])


def test_errors_are_written_with_their_range_and_variant():
    assert write_errors("near", [1.0, 2.0, 40.0]) == "2.0e+00 (1.0e+00 to 4.0e+01), near"
    assert write_errors("", [1.0]) == "1.0e+00 (1.0e+00 to 1.0e+00)"


def test_a_name_that_is_not_known_ends_with_those_that_are():
    check_names("methods", ["Adam"], CONTESTANTS)
    with pytest.raises(SystemExit, match="methods nope: expected some of"):
        check_names("methods", ["nope", "Adam"], CONTESTANTS)


def test_adam_has_every_rate_on_every_schedule():
    assert set(CONTESTANTS["Adam"]) == {f"{rate:g} {name}" for rate in RATES for name in SCHEDULES}
    ends = {name: schedule(1.0) for name, schedule in SCHEDULES.items()}
    assert ends == pytest.approx({"constant": 1.0, "cosine": 0.0, "exponential": 0.01})
    assert all(schedule(0.0) == 1.0 for schedule in SCHEDULES.values())


@pytest.mark.parametrize("name", EQUATIONS)
def test_all_contestants_have_one_loss(name: str):
    equation = EQUATIONS[name][0]()
    nets = equation.networks(0)
    points = {term: x[:7] for term, x in next(draw_points(equation, nets)).items()}
    expected = equation.loss(nets, points).detach()
    unknowns = nets[0] if len(nets) == 1 else list(nets)
    torch.testing.assert_close(ng.residuals(unknowns, equation.terms(), equation.weights).step(**points), expected)
