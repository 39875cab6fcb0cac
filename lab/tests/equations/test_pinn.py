"""Networks that solve equations: the terms vanish at the solutions, and a page for every study."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.func import vmap

from natgrad_lab.equations.pinn import PinnSettings, mean_squares
from natgrad_lab.equations.problems import heat, inverse, poisson
from natgrad_lab.experiments import LabError, Run, find
from natgrad_lab.experiments.study import Findings, Found

FEW = PinnSettings(seconds=0.05, width=8)
PROBLEMS = {"pinn_poisson": poisson, "pinn_heat": heat, "pinn_inverse": inverse}


@pytest.mark.parametrize("name", PROBLEMS)
def test_residuals_vanish_at_the_solution(name: str):
    problem = PROBLEMS[name]()
    given = [torch.tensor(problem.coefficient).double()] if problem.coefficient is not None else []
    for term, points in problem.draw(torch.Generator().manual_seed(0)).items():
        chosen = points if isinstance(points, tuple) else (points,)
        residual = vmap(lambda *point: problem.terms[term](problem.solution, *given, *point))(*chosen)  # noqa: B023
        assert float(residual.abs().max()) < 1e-12


def test_both_methods_have_one_loss():
    import natgrad as ng

    problem = inverse()
    unknowns, points = problem.unknowns(0, 8), problem.draw(torch.Generator().manual_seed(0))
    expected = mean_squares(problem, unknowns, points).detach()
    torch.testing.assert_close(ng.residuals(unknowns, problem.terms).step(**points), expected)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_page_tells_what_is_finished(name: str):
    study, found = find(name), []
    for piece in study.pieces(FEW):
        numbers = piece.work(Run(FEW, 0))
        assert all(math.isfinite(error) for _, _, error in numbers["curve"])
        assert ("k" in numbers) == (name == "pinn_inverse")
        found.append(Found({"piece": piece.name, "seed": 0}, numbers))
    story = study.tell(Findings(FEW, tuple(found)))
    assert "ng.residuals" in story.lead
    assert "Adam" in story.lead
    assert len(story.sections) == 1
    assert study.tell(Findings(FEW, ())).sections == ()


@pytest.mark.parametrize("options", [{"seconds": 0.0}, {"width": 0}, {"adam": -1.0}])
def test_settings_say_what_is_wrong(options):
    with pytest.raises(LabError, match=next(iter(options))):
        replace(FEW, **options)
