"""The Boltzmann machine: its closed forms against the generic ones, and exact sums against definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from energies import VECTORS
from models import F64, tensor
from models import assert_close as close
from torch import Tensor

import natgrad as ng
from natgrad.energies.boltzmann import Boltzmann, list_bit_states
from natgrad.ground.densities import Density, Plain
from natgrad.testing import check_metric

MACHINES = [Boltzmann(4), Boltzmann(4, spins=True)]


def assert_close(found: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    close(found.detach(), expected.detach(), rtol)


def draw_parameters(machine: Boltzmann, scale: float = 0.7, seed: int = 0) -> dict[str, Tensor]:
    return machine.parameters(scale, generator=torch.Generator().manual_seed(seed), dtype=F64)


def as_written(machine: Boltzmann) -> Plain:
    """log p as the docstring has it, pair by pair."""

    def log_p(params: Any, x: Tensor) -> Tensor:
        v = 2 * x - 1 if machine.spins else x
        first, second = torch.triu_indices(machine.units, machine.units, 1)
        return params["h"] @ v + params["J"] @ (v[first] * v[second])

    return Plain(log_p)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_closed_forms_are_those_of_log_p(machine):
    params, x = draw_parameters(machine), machine.states
    plain = as_written(machine)
    assert_close(machine.log_p(params, x), plain.log_p(params, x))
    assert_close(machine.ratios(params, x), Density.ratios(plain, params, x))
    assert_close(machine.ratios(params, x, [2, 0]), Density.ratios(plain, params, x, [2, 0]))
    for order in (("h", "J"), ("J", "h")):
        point = {name: params[name].detach() for name in order}
        jacobian = torch.func.jacrev(lambda p: Density.ratios(plain, p, x))(point)
        flat = torch.cat([jacobian[name] for name in order], dim=2)
        assert_close(machine.ratio_jacobian(point, x), flat)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_the_metric_from_the_jacobian_is_that_of_the_graph(machine):
    params, x = draw_parameters(machine), machine.states[[0, 3, 3, 9, 14]]
    options: list[dict[str, Any]] = [{}, {"mask": torch.tensor([True, False, True, True])}, {"chunk_size": 2}]
    for chosen in options:
        expected = ng.ratio_metric(as_written(machine), **chosen).at(params, x).dense()
        check_metric(ng.ratio_metric(machine, **chosen), params, x, reference=expected)
    weights = torch.tensor([1.0, 0.0, 2.0, 3.0, 1.0], dtype=F64)
    expected = ng.ratio_metric(as_written(machine), weights=weights).at(params, x).dense()
    assert_close(ng.ratio_metric(machine, weights=weights).at(params, x).dense(), expected)
    root = ng.ratio_metric(machine).at(params, x).root()
    assert root is not None
    assert root.shape == (10, 20)


def test_counts_are_repeated_examples():
    machine, counts = Boltzmann(4, spins=True), torch.arange(16)
    params, x = draw_parameters(machine), machine.states
    repeated = x.repeat_interleave(counts, dim=0)
    for loss in (
        lambda *given, **options: ng.ratio_matching_loss(machine, *given, **options),
        machine.pseudo_likelihood_loss,
    ):
        assert_close(loss(params, x, weights=counts), loss(params, repeated), rtol=1e-13)
    weighted = ng.ratio_metric(machine, weights=counts).at(params, x).dense()
    assert_close(weighted, ng.ratio_metric(machine).at(params, repeated).dense(), rtol=1e-13)


def test_spins_have_the_reference_values():
    given, expected = VECTORS["ratio_matching"]["inputs"], VECTORS["ratio_matching"]["expected"]
    machine, xi, q = Boltzmann(3, spins=True), tensor(given["xi"]), tensor(given["q"])
    params = {"h": xi[:3].clone().requires_grad_(), "J": xi[3:].clone().requires_grad_()}
    probabilities = machine.log_probabilities(params).exp()
    assert_close(probabilities, tensor(expected["p_model"]))
    loss = ng.ratio_matching_loss(machine, params, machine.states, weights=q)
    assert_close(loss, tensor(expected["J_RM"]))
    assert_close(torch.cat(torch.autograd.grad(loss, list(params.values()))), tensor(expected["grad"]))
    for weights, name in ((q, "metric_empirical"), (probabilities, "metric_model")):
        metric = ng.ratio_metric(machine, weights=weights).at(params, machine.states)
        assert_close(metric.dense(), tensor(expected[name]))


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_exact_sums(machine):
    params, other = draw_parameters(machine), draw_parameters(machine, seed=1)
    p, q = machine.log_probabilities(params).exp(), machine.log_probabilities(other).exp()
    assert_close(p.sum(), tensor(1.0))
    assert_close(p.log(), machine.log_p(params, machine.states) - machine.log_partition(params))
    assert_close(machine.kl(params, other), (p * (p / q).log()).sum())
    assert torch.equal(machine.states, torch.cartesian_prod(*[tensor([0.0, 1.0])] * 4))
    # d log Z / d h is the mean of v
    slope = torch.autograd.grad(machine.log_partition(params), params["h"])[0]
    v = 2 * machine.states - 1 if machine.spins else machine.states
    assert_close(slope, p.detach() @ v)


def test_pseudo_likelihood_is_the_sum_of_the_conditionals():
    machine = Boltzmann(3)
    params, x = draw_parameters(machine), machine.states
    p = machine.log_probabilities(params).exp().view(2, 2, 2)
    logs = torch.stack([(p / p.sum(axis, keepdim=True)).log().flatten() for axis in range(3)])
    assert_close(machine.pseudo_likelihood_loss(params, x), -logs.sum(0).mean())


@pytest.mark.parametrize("machine", [Boltzmann(3), Boltzmann(3, spins=True)], ids=str)
def test_gibbs_draws_have_the_exact_probabilities(machine):
    params = draw_parameters(machine, scale=0.5)
    p, count = machine.log_probabilities(params).exp().detach(), 20_000
    start = torch.ones(count, 3, dtype=F64)
    x = machine.gibbs(params, start, sweeps=30, generator=torch.Generator().manual_seed(0))
    places = (x @ tensor([4.0, 2.0, 1.0])).long()
    found = torch.bincount(places, minlength=8) / count
    assert ((found - p).abs() < 4.5 * (p * (1 - p) / count).sqrt()).all()
    assert bool((start == 1).all())


@pytest.mark.parametrize("spins", [False, True])
def test_natural_steps_find_the_machine(spins):
    """From zero, on the exact distribution of a machine with couplings of deviation 1, at rate 1."""
    truth, machine = draw_parameters(Boltzmann(5, spins=True), 1.0), Boltzmann(5, spins=spins)
    q = Boltzmann(5, spins=True).log_probabilities(truth).exp().detach()
    params = machine.parameters(dtype=F64)
    opt = ng.NaturalGradient(params, ng.ratio_metric(machine, weights=q), lr=1.0, damping=0.0)
    gaps = []
    for _ in range(9):
        opt.zero_grad()
        ng.ratio_matching_loss(machine, params, machine.states, weights=q).backward()
        opt.step()
        gaps.append((q * (q.log() - machine.log_probabilities(params))).sum().item())
    assert gaps[-1] < 1e-4
    assert gaps[0] > gaps[-1]


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Boltzmann(1), ("units", ">= 2")),
        (lambda: Boltzmann(30).states, ("30 units", "gibbs")),
        (lambda: Boltzmann(3).log_p({"h": torch.zeros(3)}, ONES), ("J", "(3,)")),
        (lambda: Boltzmann(3).ratios(Boltzmann(4).parameters(), ONES), ("params", "3 units")),
        (lambda: Boltzmann(3).gibbs(Boltzmann(3).parameters(), ONES, sweeps=0), ("sweeps", ">= 1")),
        (lambda: Boltzmann(3).gibbs(Boltzmann(3).parameters(), 2 * ONES), ("X", "0 and 1")),
        (lambda: Boltzmann(3).pseudo_likelihood_loss(Boltzmann(3).parameters(), -ONES), ("X", "0 and 1")),
        (lambda: ng.ratio_matching_loss(Boltzmann(3), Boltzmann(3).parameters(), torch.ones(2, 5)), ("X", "(2, 5)")),
        (lambda: ng.ratio_metric(Boltzmann(3), weights=torch.ones(2), chunk_size=1), ("weights", "chunk_size")),
        (
            lambda: ng.ratio_matching_loss(Boltzmann(3), Boltzmann(3).parameters(), ONES, weights=torch.ones(3)),
            ("weights", "(2,)"),
        ),
        (
            lambda: ng.ratio_matching_loss(Boltzmann(3), Boltzmann(3).parameters(), ONES, weights=-torch.ones(2)),
            ("weights", "none below 0"),
        ),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bits_count_upwards():
    assert list_bit_states(3).tolist() == [[i // 4, i // 2 % 2, i % 2] for i in range(8)]
