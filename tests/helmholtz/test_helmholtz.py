"""Helmholtz machines: Fisher blocks, likelihoods, lessons and steps against enumeration and autodiff."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helmholtz_models import BITS, KINDS, data, machine
from models import F64, assert_close, tensor
from optim_models import pass_through_file
from torch import Tensor

import natgrad as ng
from natgrad.helmholtz import Classic, Reweighted

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "helmholtz.json").read_text(encoding="utf-8"))


def reference() -> tuple[ng.HelmholtzMachine, Tensor]:
    found, given = ng.HelmholtzMachine([3, 2, 2]).double(), VECTORS["inputs"]
    with torch.no_grad():
        for layer, key in zip(found.generation[:2], ("W_x_given_h1", "W_h1_given_h2"), strict=True):
            layer.weight.copy_(tensor(given[key]))
        found.generation[2].weight.copy_(tensor(given["b_h2"]).unsqueeze(1))
        for layer, key in zip(found.recognition, ("V_h1_given_x", "V_h2_given_h1"), strict=True):
            layer.weight.copy_(tensor(given[key]))
    return found, tensor(given["X_data"])


def test_blocks_and_likelihood_have_the_reference_values():
    found, x = reference()
    blocks, expected = found.fisher_blocks(x), VECTORS["expected"]
    keys = {"generation.0": "Fp_x", "generation.1": "Fp_h1", "recognition.0": "Fq_h1", "recognition.1": "Fq_h2"}
    for name, key in keys.items():
        assert_close(blocks[name], tensor(expected[key]))
    assert_close(blocks["generation.2"].flatten(), tensor(expected["Fp_top"]))
    assert_close(found.log_likelihood(x, samples=None), tensor(expected["log_p_x_data"]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_fisher_of_the_joint_is_the_blocks_and_nothing_else(kind):
    """E_p[g g^T] by enumeration and autodiff, g the gradient of log p(x, h): block-diagonal, one block per unit."""
    found = machine(**KINDS[kind])
    states, logs = found.joint()
    assert_close(logs.exp().sum(), tensor(1.0))
    weights = [layer.weight for layer in found.generation]
    total = torch.zeros(sum(w.numel() for w in weights), dtype=F64).outer(torch.zeros(sum(w.numel() for w in weights)))
    for i, log in enumerate(logs):
        value = found.log_joint([s[i] for s in states])
        slopes = torch.autograd.grad(value, [w for w in weights if w.requires_grad])
        queue = iter(slopes)
        flat = torch.cat([(next(queue) if w.requires_grad else torch.zeros_like(w)).flatten() for w in weights])
        total += log.exp() * torch.outer(flat, flat)
    blocks = found.fisher_blocks(data(kind))
    named = [blocks[f"generation.{i}"] for i in range(3)]
    if kind == "fixed prior":
        named[2] = torch.zeros_like(named[2])
    assert_close(torch.block_diag(*(block for part in named for block in part)), total, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_recognition_blocks_are_the_fisher_of_the_posterior(kind):
    found, x = machine(**KINDS[kind]), data(kind)
    hidden = found.hidden()
    weights = [layer.weight for layer in found.recognition]
    size = sum(w.numel() for w in weights)
    total = torch.zeros(size, size, dtype=F64)
    for example in x:
        for i in range(len(hidden[0])):
            value = found.log_posterior([example, *(h[i] for h in hidden)])
            flat = torch.cat([g.flatten() for g in torch.autograd.grad(value, weights)])
            total += value.detach().exp() / len(x) * torch.outer(flat, flat)
    blocks = found.fisher_blocks(x)
    units = [block for i in range(2) for block in blocks[f"recognition.{i}"]]
    assert_close(torch.block_diag(*units), total, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_likelihoods_agree(kind):
    """The enumeration sums to one over x, and importance sampling finds it within its standard error."""
    found = machine(**KINDS[kind])
    every = torch.cartesian_prod(*[tensor(found.units)] * 3)
    exact = found.log_likelihood(every, samples=None)
    assert_close(exact.exp().sum(), tensor(1.0))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([found.log_likelihood(every, samples=500, generator=generator).exp() for _ in range(20)])
    assert ((draws.mean(0) - exact.exp()).abs() < 4.5 * draws.std(0) / 20**0.5 + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_dreams_have_the_model_s_frequencies(kind):
    found, generator = machine(**KINDS[kind]), torch.Generator().manual_seed(0)
    every = torch.cartesian_prod(*[tensor(found.units)] * 3)
    p = found.log_likelihood(every, samples=None).exp()
    drawn = found.sample(20000, generator)
    counts = (drawn.unsqueeze(1) == every).all(2).to(F64).mean(0)
    assert ((counts - p).abs() < 5 * (p * (1 - p) / 20000).sqrt()).all()
    means = found.sample(7, generator, means=True)
    assert means.shape == (7, 3)
    assert ((means > 0) & (means < 1)).all()


def expected_gradients(found: ng.HelmholtzMachine, x: Tensor) -> list[Tensor]:
    """d/d theta of sum_x E_{q(h|x)}[log p(x, h)] / b by enumeration."""
    hidden = found.hidden()
    total: Any = 0.0
    for example in x:
        states = [example.expand(len(hidden[0]), -1), *hidden]
        total = total + (found.log_posterior(states).detach().exp() * found.log_joint(states)).sum() / len(x)
    return list(torch.autograd.grad(total, [layer.weight for layer in found.generation if layer.weight.requires_grad]))


@pytest.mark.parametrize("kind", KINDS)
def test_classic_wake_teaches_the_expected_gradient(kind):
    found, x = machine(**KINDS[kind]), data(kind)
    generator = torch.Generator().manual_seed(0)
    lessons = [Classic().lesson(found, x, 50, generator).generation for _ in range(30)]
    trained = [i for i, layer in enumerate(found.generation) if layer.weight.requires_grad]
    for i, expected in zip(trained, expected_gradients(found, x), strict=True):
        values = torch.stack([lesson[i].ascent() for lesson in lessons]).detach()
        assert ((values.mean(0) - expected).abs() <= 5 * values.std(0) / len(values) ** 0.5 + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reweighted_lessons_tend_to_the_likelihood_s_gradient(kind):
    """With many draws the self-normalised estimate is d/d theta log p(x), and wake-phi E_{p(h|x)}[d log q]."""
    found, x = machine(**KINDS[kind]), data(kind)
    hidden = found.hidden()
    logs = torch.stack([found.log_joint([e.expand(len(hidden[0]), -1), *hidden]) for e in x])  # (b, states)
    trained = [layer.weight for layer in found.generation if layer.weight.requires_grad]
    expected = list(torch.autograd.grad(logs.logsumexp(1).mean(), trained))
    posterior = logs.detach().softmax(1)
    seen = torch.stack([found.log_posterior([e.expand(len(hidden[0]), -1), *hidden]) for e in x])
    expected += torch.autograd.grad((posterior * seen).sum(1).mean(), [layer.weight for layer in found.recognition])
    generator, values = torch.Generator().manual_seed(0), []
    for _ in range(15):
        lesson = Reweighted(wake_phi=1.0).lesson(found, x, 3000, generator)
        rows = [r for r, layer in zip(lesson.generation, found.generation, strict=True) if layer.weight.requires_grad]
        values.append([r.ascent().detach() for r in (*rows, *lesson.recognition)])
    for i, reference_value in enumerate(expected):
        draws = torch.stack([value[i] for value in values])
        assert ((draws.mean(0) - reference_value).abs() <= 5 * draws.std(0) / 15**0.5 + 3e-3).all()


def trainers(found: ng.HelmholtzMachine) -> dict[str, Any]:
    return {
        "plain": ng.WakeSleep(found, 0.1, samples=3, momentum=0.5),
        "Adam": ng.WakeSleep(found, samples=3, optimizer=lambda p: torch.optim.Adam(p, 0.01)),
        "natural": ng.NaturalWakeSleep(found, 0.1, samples=3, refresh=3),
        "natural, wide": ng.NaturalWakeSleep(found, 0.1, samples=1, refresh=2, decay=0.5),
        "natural, shared": ng.NaturalWakeSleep(found, 0.1, samples=2, refresh=2, exact=False),
    }


@pytest.mark.parametrize("name", ["plain", "Adam", "natural", "natural, wide", "natural, shared"])
def test_a_resumed_run_is_the_run_that_never_stopped(name):
    torch.manual_seed(0)
    first = ng.HelmholtzMachine([12, 3, 2])
    second = copy.deepcopy(first)
    x = torch.randint(0, 2, (2, 12), generator=torch.Generator().manual_seed(0)).float()
    whole = trainers(first)[name]
    for _ in range(11):
        whole.step(x)
    part = trainers(second)[name]
    for _ in range(5):
        part.step(x)
    saved = pass_through_file({"machine": second.state_dict(), "trainer": part.state_dict()})
    third = ng.HelmholtzMachine([12, 3, 2])
    third.load_state_dict(saved["machine"])
    resumed = trainers(third)[name]
    resumed.load_state_dict(saved["trainer"])
    for _ in range(6):
        resumed.step(x)
    for a, b in zip(first.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)


WRONG: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "one layer": (lambda: ng.HelmholtzMachine([3]), ValueError, ("sizes", "at least two")),
    "size 0": (lambda: ng.HelmholtzMachine([3, 0]), ValueError, ("sizes", ">= 1")),
    "units": (lambda: ng.HelmholtzMachine([3, 2], units=(0, 2)), ValueError, ("units", "(0, 1)")),
    "prior": (lambda: ng.HelmholtzMachine([3, 2], prior=1.5), ValueError, ("prior", "between 0 and 1")),
    "prior's shape": (lambda: ng.HelmholtzMachine([3, 2], prior=torch.ones(3) / 2), ValueError, ("prior", "(2,)")),
    "grey": (lambda: machine().log_likelihood(0.5 * data("bits")), ValueError, ("x", "binarise")),
    "signs for bits": (lambda: machine().log_likelihood(data("signs")), ValueError, ("x", "units=(-1, 1)")),
    "images": (lambda: machine().log_likelihood(torch.ones(2, 1, 3)), ValueError, ("x", "(b, 3)", "flatten")),
    "width": (lambda: machine().log_likelihood(torch.ones(2, 4)), ValueError, ("x", "(b, 3)")),
    "no example": (lambda: machine().log_likelihood(torch.ones(0, 3)), ValueError, ("x", "b >= 1")),
    "NaN": (lambda: machine().log_likelihood(data("bits") * float("nan")), ValueError, ("x", "entries")),
    "samples": (lambda: machine().log_likelihood(data("bits"), samples=0), ValueError, ("samples", "None")),
    "too many": (
        lambda: ng.HelmholtzMachine([3, 30]).log_likelihood(BITS, samples=None),
        ValueError,
        ("30 hidden units", "use samples"),
    ),
    "n": (lambda: machine().sample(0), ValueError, ("n is 0", ">= 1")),
    "units of one kind": (lambda: ng.HelmholtzMachine([3, 2], units=2), ValueError, ("units is 2", "(-1, 1)")),  # type: ignore[arg-type]
    "prior's list": (lambda: ng.HelmholtzMachine([3, 2], prior=[0.2] * 3), ValueError, ("prior", "(2,)")),  # type: ignore[arg-type]
    "words": (lambda: machine().log_likelihood(["on"]), ValueError, ("x is list", "(b, 3)")),  # type: ignore[arg-type]
    "lr's kind": (lambda: ng.WakeSleep(machine(), lr="fast"), ValueError, ("lr is 'fast'", "> 0")),  # type: ignore[arg-type]
    "a built optimizer": (
        lambda: ng.WakeSleep(machine(), optimizer=torch.optim.SGD(machine().parameters(), 0.1)),  # type: ignore[arg-type]
        TypeError,
        ("optimizer is SGD", "lambda params"),
    ),
    "all frozen": (lambda: ng.WakeSleep(machine().requires_grad_(False)), ValueError, ("no parameter to train",)),
    "lr": (lambda: ng.WakeSleep(machine(), lr=0.0), ValueError, ("lr", "> 0")),
    "momentum": (lambda: ng.WakeSleep(machine(), momentum=1.0), ValueError, ("momentum", "[0, 1)")),
    "no machine": (lambda: ng.WakeSleep(torch.nn.Linear(2, 2)), TypeError, ("machine", "HelmholtzMachine")),  # type: ignore[arg-type]
    "algorithm": (lambda: ng.WakeSleep(machine(), algorithm=Classic), TypeError, ("algorithm", "Classic()")),  # type: ignore[arg-type]
    "wake_phi": (lambda: Reweighted(wake_phi=2.0), ValueError, ("wake_phi", "between 0 and 1")),
    "damping": (lambda: ng.NaturalWakeSleep(machine(), damping=0.0), ValueError, ("damping", "> 0")),
    "refresh": (lambda: ng.NaturalWakeSleep(machine(), refresh=0), ValueError, ("refresh", ">= 1")),
    "radius": (lambda: ng.NaturalWakeSleep(machine(), radius=0.0), ValueError, ("radius is 0.0", "math.inf")),
    "LBFGS": (lambda: ng.WakeSleep(machine(), optimizer=torch.optim.LBFGS), TypeError, ("LBFGS", "gradients alone")),
    "seed": (lambda: ng.WakeSleep(machine(), seed=None), TypeError, ("seed is None", "integer")),  # type: ignore[arg-type]
    "draws": (lambda: machine().recognise(data("bits"), 0), ValueError, ("samples is 0", ">= 1")),
    "a number for exact": (lambda: ng.NaturalWakeSleep(machine(), exact=0), ValueError, ("exact is 0",)),  # type: ignore[arg-type]
    "exact": (lambda: ng.NaturalWakeSleep(machine(), exact="no"), ValueError, ("exact is 'no'", "None")),  # type: ignore[arg-type]
    "a shared basis for units that see different inputs": (
        lambda: ng.NaturalWakeSleep(machine(autoregressive=True), exact=False),
        ValueError,
        ("exact is False", "exact=None"),
    ),
    "decay": (lambda: ng.NaturalWakeSleep(machine(), decay=1.0), ValueError, ("decay", "[0, 1)")),
    "another state": (
        lambda: ng.NaturalWakeSleep(machine()).load_state_dict(ng.WakeSleep(machine()).state_dict()),
        ValueError,
        ("blocks",),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_what_is_wrong(name):
    call, kind, words = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_reconstructions_are_the_visible_units_given_draws_of_the_hidden_ones():
    """Rows are P(x = 1 | h) of the joint distribution, and their mean is that over q(h | x)."""
    model, x = reference()
    (visible, first, _), logs = model.joint()
    table = {}
    for h in torch.unique(first, dim=0):
        chances = (first == h).all(1) * logs.exp()
        table[tuple(h.tolist())] = chances @ (visible == visible.max()).to(F64) / chances.sum()
    rows = torch.stack(list(table.values()))
    count, generator = 4000, torch.Generator().manual_seed(0)
    found = model.reconstruct(x[:1].expand(count, -1), generator)
    assert float((found.unsqueeze(1) - rows).abs().amax(2).min(1).values.max()) < 1e-12
    drawn = model.recognise(x[:1], count, torch.Generator().manual_seed(1))[1][:, 0]
    expected = torch.stack([table[tuple(h.tolist())] for h in drawn])
    error = (2 * expected.var(0) / count).sqrt()
    assert ((found.mean(0) - expected.mean(0)).abs() <= 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("trainer", [ng.WakeSleep, ng.NaturalWakeSleep])
def test_the_rate_follows_a_scheduler_and_may_be_set(trainer):
    model, x = reference()
    wake = trainer(model, lr=0.4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(wake.optimizer, 0.5)
    wake.step(x)
    scheduler.step()
    assert wake.lr == 0.2
    wake.lr = 0.1
    assert wake.optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="lr is 0"):
        wake.lr = 0
