"""The Boltzmann experiment: gradients and metrics of the exact machine, the preconditioner, runs, and the page."""

from __future__ import annotations

import math

import pytest
import torch

import natgrad as ng
from natgrad.energies.boltzmann import PairPreconditioner
from natgrad.ground.spaces import Space
from natgrad_lab.energies import boltzmann_ratio
from natgrad_lab.energies.boltzmann_images import CONTESTANTS, Images, images, start, train
from natgrad_lab.experiments import PieceRun, execute
from natgrad_lab.report import build

FEW = boltzmann_ratio.BoltzmannRatioSettings(
    units=3, more=3, steps=400, field=2, examples=50, seconds=0.05, looked_at=20, sweeps=2, batch=20
)


def somewhere(exact: boltzmann_ratio.ExactMachine) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return 0.5 * torch.randn(2, exact.space.size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("loss", boltzmann_ratio.LOSSES)
def test_gradients_are_those_of_the_losses(loss):
    exact = boltzmann_ratio.ExactMachine(3, 0.7, 0)
    for theta, gradient in zip(somewhere(exact), exact.gradient(loss, somewhere(exact)), strict=True):
        params = exact.params(theta)
        value = {
            "ratio matching": lambda p: ng.ratio_matching_loss(exact.machine, p, exact.states, weights=exact.q),
            "pseudo-likelihood": lambda p: exact.machine.pseudo_likelihood_loss(p, exact.states, weights=exact.q),
            "maximum likelihood": lambda p: -exact.q @ exact.machine.log_probabilities(p),
        }[loss](params)
        torch.testing.assert_close(gradient, torch.cat(torch.autograd.grad(value, list(params.values()))))


@pytest.mark.parametrize("loss", boltzmann_ratio.LOSSES)
def test_metrics_are_the_hessians_at_the_truth(loss):
    exact = boltzmann_ratio.ExactMachine(3, 0.5, 1)
    generator = torch.Generator().manual_seed(1)
    truth = exact.space.flatten(exact.machine.parameters(0.5, generator=generator, dtype=torch.float64)).detach()
    assert float(exact.gap(truth.unsqueeze(0))) == pytest.approx(0, abs=1e-14)
    hessian = torch.func.jacfwd(lambda t: exact.gradient(loss, t.unsqueeze(0)).squeeze(0))(truth)
    torch.testing.assert_close(exact.metric(loss, truth), hessian)


def test_steps_are_counted_to_the_goal():
    exact, rates = boltzmann_ratio.ExactMachine(3, 0.3, 0), torch.tensor([0.01, 0.5], dtype=torch.float64)
    slow, fast = boltzmann_ratio.descend(exact, "ratio matching", rates, 1e-4, 1000, lambda: None)
    assert slow is None
    assert fast is not None
    gaps = boltzmann_ratio.path(exact, "ratio matching", 0.5, fast)
    assert gaps[-1][0] == fast
    assert gaps[-1][1] <= 1e-4 < gaps[-2][1]
    assert boltzmann_ratio.descend(exact, "ratio matching", rates, 1e-4, 3, lambda: None) == [None, None]
    few = boltzmann_ratio.natural(exact, "ratio matching", 1e-4, 100)
    assert few[-1] <= 1e-4 < few[-2]
    assert len(few) - 1 < fast


def test_diverged_runs_are_told_apart():
    assert boltzmann_ratio.count_steps_to_goal([1.0, 0.5, 1e-5]) == 2
    assert boltzmann_ratio.count_steps_to_goal([1.0, 2e4]) is None
    assert boltzmann_ratio.count_steps_to_goal([1.0, None]) is None
    assert boltzmann_ratio.write_range([3, 5, None]) == "3 to 5, 1 of 3 never"
    assert boltzmann_ratio.write_range([None]) == "never"
    assert boltzmann_ratio.best({"0.1": 2.0, "0.3": 1.0, "1.0": None}) == 0.3


def test_one_natural_step_recovers_the_field():
    numbers = boltzmann_ratio.field(PieceRun(FEW))
    assert all(cell["natural"] < 1e-9 for cell in numbers.values())
    assert [cell["condition"] for cell in numbers.values()] == sorted(cell["condition"] for cell in numbers.values())
    model = ng.GaussMarkov(4, [(0, 1), (1, 3), (0, 2), (2, 3)])
    values = torch.linalg.eigvalsh(model.precision(boltzmann_ratio.laplacian(model, 0.1)).detach())
    assert float(values[0]) == pytest.approx(0.1)


@pytest.mark.parametrize("spins", [False, True])
def test_the_preconditioner_is_symmetric_and_inverts_its_own_model(spins):
    """Where w_i does not depend on v (at zero, on independent pixels) and nothing lies on the diagonal, P = G^-1."""
    machine = ng.Boltzmann(4, spins=spins)
    params, x = machine.parameters(dtype=torch.float64), machine.states
    metric = ng.ratio_metric(machine)
    operator = metric.at(params, x)
    damping = 1e-9
    inverse, memory = PairPreconditioner(machine).update(None, metric, params, x, damping, operator)
    dense = inverse.mm(torch.eye(inverse.size, dtype=torch.float64))
    torch.testing.assert_close(dense, dense.mT)
    assert float(torch.linalg.eigvalsh(dense)[0]) > 0
    torch.testing.assert_close(dense @ operator.dense(), torch.eye(10, dtype=torch.float64), atol=1e-3, rtol=0)
    again, _ = PairPreconditioner(machine).update(memory, metric, params, 1 - x, damping, operator)
    torch.testing.assert_close(again.mv(dense[0]), inverse.mv(dense[0]))


def test_rows_alone_are_solved_where_all_weights_are_alike():
    machine = ng.Boltzmann(4)
    x, params = machine.states[torch.arange(300) % 16], machine.parameters(dtype=torch.float64)
    metric = ng.ratio_metric(machine)
    both, rows = (
        PairPreconditioner(machine, by_rows=by_rows).update(None, metric, params, x, 1e-9, None)[0].dense()
        for by_rows in (False, True)
    )
    torch.testing.assert_close(rows, both, atol=1e-3, rtol=0)  # independent bits: C and W are multiples of I
    torch.testing.assert_close(rows, rows.mT)
    skewed = machine.states[torch.arange(400).square() % 13]
    dense = PairPreconditioner(machine, by_rows=True).update(None, metric, params, skewed, 1e-3, None)[0].dense()
    torch.testing.assert_close(dense, dense.mT)
    assert float(torch.linalg.eigvalsh(dense)[0]) > 0


def test_parts_and_contestants_are_chosen():
    settings = boltzmann_ratio.BoltzmannRatioSettings(
        parts="images", methods="pseudo-likelihood, SGD;ratio matching, SGD"
    )
    assert [piece.name for piece in boltzmann_ratio.STUDY.pieces(settings)] == ["choice", "race"]
    assert list(settings.contestants()) == ["pseudo-likelihood, SGD", "ratio matching, SGD"]


def test_the_preconditioner_saves_steps_of_cg():
    machine, generator = ng.Boltzmann(30), torch.Generator().manual_seed(0)
    mix = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    x = (mix @ torch.randn(6, 200, generator=generator, dtype=torch.float64) > 1).double().mT.contiguous()
    params, metric = start(machine, x), ng.ratio_metric(machine)
    params = {name: value.detach().double().requires_grad_() for name, value in params.items()}
    operator = metric.at(params, x)
    loss = ng.ratio_matching_loss(machine, params, x)
    gradient = Space(params).flatten(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))
    inverse, _ = PairPreconditioner(machine).update(None, metric, params, x, 1e-3, operator)
    plain, helped = (
        ng.natural_gradient(operator, gradient, solver=ng.CG(rtol=1e-4, max_steps=500, preconditioner=p), damping=1e-3)
        for p in (None, inverse)
    )
    assert helped.steps < 0.7 * plain.steps
    torch.testing.assert_close(helped.value, plain.value, atol=1e-2 * float(plain.value.abs().max()), rtol=0)


def test_the_preconditioner_names_what_is_wrong():
    machine = ng.Boltzmann(3)
    with pytest.raises(TypeError, match="Boltzmann"):
        PairPreconditioner(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        PairPreconditioner(machine, every=0)
    params, metric = machine.parameters(dtype=torch.float64), ng.ratio_metric(ng.Boltzmann(3))
    with pytest.raises(TypeError, match="same machine"):
        PairPreconditioner(machine).update(None, metric, params, machine.states, 0.1, metric.at(params, machine.states))


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_learns(name):
    pixels = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]]).float().repeat(8, 1)
    points = list(train(CONTESTANTS[name], CONTESTANTS[name].rates[1], Images(pixels, pixels, 2), 16, 0.3, 0, 3))
    assert points[0]["steps"] == 0
    assert points[-1][CONTESTANTS[name].loss] < points[0][CONTESTANTS[name].loss]
    assert points[-1]["seconds"] >= 0.3
    assert points[-1]["params"]["J"].abs().max() > 0


def test_a_diverging_run_ends():
    shown = images("digits", 30)
    assert set(shown.train.unique().tolist()) == {0.0, 1.0}
    points = list(train(CONTESTANTS["pseudo-likelihood, SGD"], 1e38, shown, 20, 1000.0, 0, 10_000_000))
    assert not math.isfinite(points[-1]["pseudo-likelihood"])


def test_the_study_ends_in_a_page(tmp_path):
    execute(boltzmann_ratio.STUDY, FEW, [0], tmp_path)
    numbers, page = build(tmp_path)
    text = page.read_text()
    assert numbers.missing == 0
    assert text.count("<svg role") == 4
    for words in ("3 spins, known exactly", "Gauss-Markov", "pseudo-likelihood, Adam", "Draws"):
        assert words in text
