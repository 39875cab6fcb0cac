"""Networks that solve equations: the terms vanish at the solutions, and a page for every study."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from small_study import finish
from torch.func import vmap

import natgrad as ng
from natgrad_lab.equations import pinn
from natgrad_lab.experiments import find
from natgrad_lab.experiments.frame import Findings

FEW = pinn.PinnSettings(seconds=0.05, width=8)
CLOSED = {
    "pinn_poisson": pinn.poisson,
    "pinn_heat": pinn.heat,
    "pinn_helmholtz": pinn.helmholtz,
    "pinn_inverse": pinn.inverse,
}
PROBLEMS = CLOSED | {"pinn_burgers": pinn.burgers, "pinn_allen_cahn": pinn.allen_cahn}


@pytest.mark.parametrize("name", CLOSED)
def test_residuals_vanish_at_the_solution(name: str):
    problem = PROBLEMS[name]()
    given = [torch.tensor(problem.coefficient).double()] if problem.coefficient is not None else []
    for term, points in problem.draw(torch.Generator().manual_seed(0)).items():
        chosen = points if isinstance(points, tuple) else (points,)
        residual = vmap(lambda *point: problem.terms[term](problem.solution, *given, *point))(*chosen)  # noqa: B023
        assert float(residual.abs().max()) < 1e-12


def test_the_residual_of_burgers_equation_vanishes_at_its_solution():
    problem, x = pinn.burgers(), torch.tensor([[0.3, 0.2], [-0.7, 0.6], [0.02, 0.4], [0.9, 0.9]]).double()
    residual = vmap(lambda point: problem.terms["inside"](problem.solution, point))(x)
    assert float(residual.abs().max()) < 1e-8  # its terms are some units, at the shock up to a hundred


def test_allen_and_cahns_solution_starts_right_and_does_not_depend_on_the_step():
    x = torch.tensor([[0.3, 0.0], [-0.75, 0.0], [0.9, 0.0]]).double()
    torch.testing.assert_close(
        pinn.solve_allen_cahn(x), x[:, 0] ** 2 * torch.cos(math.pi * x[:, 0]), atol=1e-4, rtol=0.0
    )
    # the start has a corner at the ends of its period, of which 256 waves leave 5e-5
    coarse, middle, fine = (pinn.split_allen_cahn(steps=steps) for steps in (200, 400, 800))
    torch.testing.assert_close(middle, coarse, atol=1e-4, rtol=0.0)
    assert float((coarse - middle).norm() / (middle - fine).norm()) == pytest.approx(4, rel=0.02)  # of second order


@pytest.mark.parametrize("make", [pinn.burgers, pinn.allen_cahn])
def test_conditions_by_construction_hold_from_the_start(make: Callable[[], pinn.EquationProblem]):
    net, points = make().unknowns(0, 4, 2)["u"], torch.linspace(-1, 1, 9).double()[:, None]
    start = torch.cat([points, torch.zeros_like(points)], 1)
    torch.testing.assert_close(net(start).squeeze(1), make().solution(start), atol=1e-4, rtol=0.0)


def test_both_methods_have_one_loss():
    problem = pinn.inverse()
    unknowns, points = problem.unknowns(0, 8), problem.draw(torch.Generator().manual_seed(0))
    expected = pinn.mean_squares(problem, unknowns, points).detach()
    torch.testing.assert_close(ng.residuals(unknowns, problem.terms).step(**points), expected)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_page_tells_what_is_finished(name: str):
    study = find(name)
    pieces = finish(study, FEW)
    assert all(("k" in piece.numbers) == (name == "pinn_inverse") for piece in pieces)
    story = study.tell(Findings(FEW, pieces))
    assert "ng.residuals" in story.lead
    assert "Adam" in story.lead
    assert len(story.sections) == 1
    assert study.tell(Findings(FEW, ())).sections == ()
