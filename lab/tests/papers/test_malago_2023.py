"""The lectures' figures: their formulas, what their flows must do, and pages from few numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from natgrad.families import Ising, MultivariateNormal
from natgrad_lab.experiments import PieceRun, execute, find
from natgrad_lab.experiments.records import read
from natgrad_lab.papers.malago_2023 import flows, points
from natgrad_lab.papers.malago_2023.printed_toy import measure_difference, print_value
from natgrad_lab.report import build

FEW = flows.MalagoFlowSettings(starts=2, steps=3, lattice=2, span=0.2)
LITTLE = points.MalagoPointSettings(problems=2, starts=2, bits=3, time=1.0)
STUDIES = "toy", "polynomials", "quadratic", "kl_balls", "polarization", "convergence"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of every study, each in one of its name."""
    root = tmp_path_factory.mktemp("pages")
    for name in STUDIES:
        study = find(f"malago_2023_{name}")
        execute(study, FEW if study.settings is flows.MalagoFlowSettings else LITTLE, [0], root / name)
    return root


def test_functions_are_those_of_the_slides():
    states = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert flows.toy(states).tolist() == [6.0, -4.0, -2.0, 0.0]
    assert flows.bowl(torch.tensor([[1.0, 2.0]]).double()).item() == 1 + 4 - 3 - 4 - 8
    assert flows.quartic(torch.tensor([[2.0]])).item() == 12 + 32 - 8 - 32
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64, requires_grad=True)
    assert_close(torch.autograd.grad(points.polarization(p), p)[0], points.slope(p.detach()))
    assert points.polarization(torch.tensor([0.5, 0.5, 0.0])).item() == 0.25


@pytest.mark.parametrize("name", ["mu", "theta"])
def test_formulas_of_the_toy_slides_are_the_librarys_values_and_gradients(name: str):
    assert max(measure_difference(name)) < 2e-13


def test_both_formulas_of_the_toy_slides_are_one_function():
    theta = torch.tensor([[0.3, -1.2], [0.0, 0.0]], dtype=torch.float64)
    assert_close(print_value("theta", theta), print_value("mu", torch.sigmoid(2 * theta)))


def test_the_quadratic_line_is_the_closed_form(pages):
    numbers = read(pages / "polynomials" / "records" / "closed.json").numbers
    assert_close(torch.tensor(numbers["ours"]), torch.tensor(numbers["closed"]), rtol=1e-7, atol=1e-8)
    start = torch.tensor([1.0, -1.0], dtype=torch.float64)
    moved = flows.closed_mean(start, torch.tensor([0.0, 1e9], dtype=torch.float64))
    assert_close(moved[0], start)
    assert_close(
        moved[1], torch.linalg.solve(torch.tensor([[6.0, 2.0], [2.0, 4.0]]).double(), torch.tensor([1.0, 2.0]).double())
    )
    assert float(torch.linalg.eigvalsh(flows.COVARIANCE).min()) > 0


def test_balls_are_level_lines_of_the_kl():
    family, at = MultivariateNormal(1), torch.tensor([0.3, 0.8], dtype=torch.float64)
    other = torch.tensor([[-0.5, 1.7]], dtype=torch.float64)
    thetas = [family.from_mean_covariance(x[:1], x[1:].square().unsqueeze(0)) for x in (at, other[0])]
    assert_close(points.normal_kl(at, other)[0], family.kl(*thetas))
    numbers = points.balls(PieceRun(points.MalagoPointSettings()))["balls"]
    for drawn in numbers[:3]:
        centre, ball = (torch.tensor(drawn[key], dtype=torch.float64) for key in ("centre", "ball"))
        kl = points.normal_kl(centre, ball)
        assert_close(kl, torch.full_like(kl, 0.02), rtol=1e-6, atol=0)


def test_polarization_flows_go_where_they_must():
    numbers = points.simplex_flows(PieceRun(points.MalagoPointSettings()))
    for name, ways in numbers.items():
        values = [[points.polarization(torch.tensor(p)).item() for p in (way[0], way[-1])] for way in ways]
        assert all((b >= a) == ("ascent" in name) or abs(a - b) < 1e-6 for a, b in values)
    assert min(points.polarization(torch.tensor(way[-1])).item() for way in numbers["natural ascent"]) > 0.2


def test_natural_flow_of_a_function_in_the_span_is_a_straight_line():
    model, generator = Ising(3), torch.Generator().manual_seed(0)
    c = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    values = c @ model.statistics(model.states).mT
    start = 0.3 * torch.randn(2, 6, dtype=torch.float64, generator=generator)
    assert_close(points.descend(model, values, start, 0.5), start - 0.5 * c, rtol=1e-6, atol=1e-7)


def test_the_theorem_counts():
    numbers = points.theorem(PieceRun(LITTLE, seed=1))
    assert numbers["runs"] == 4
    assert all(0 <= counts["optimum"] <= counts["decided"] <= 4 for counts in numbers["counts"].values())
    assert [m.size for m in points.models(6).values()] == [6, 11, 21]


@pytest.mark.parametrize("name", STUDIES)
def test_every_figure_has_a_page(name, pages):
    outcome, page = build(pages / name)
    text = page.read_text()
    assert outcome.story.title in text
    assert "<svg" in text
    assert list((pages / name / "plots").glob("*.png"))
