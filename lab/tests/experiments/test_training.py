"""One run: reproducible from its seed, resumable after any step, blind to its own evaluation."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from small_races import BUDGET, contestants, examples, task
from torch import nn

from natgrad_lab.experiments.base import Budget, Job
from natgrad_lab.experiments.models import bernoulli_divergence, categorical_divergence, gaussian_divergence
from natgrad_lab.experiments.training import Order, Training


def training(index=0, seed=0, budget=BUDGET, contestant=0):
    return Training(Job(task(), contestants()[contestant], index, seed, "race"), budget, examples())


def losses(rows):
    return [row.get("loss") for row in rows]


@pytest.mark.parametrize("contestant", range(3))
def test_same_seed_same_losses_bit_for_bit(contestant):
    first, second, other = (losses(training(contestant=contestant, seed=seed)) for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.parametrize("contestant", range(3))
def test_put_down_and_taken_up_equals_never_stopped(contestant, tmp_path):
    uncut = losses(training(contestant=contestant))
    early = training(contestant=contestant)
    rows = []
    for row in early:
        rows.append(row)
        if row["step"] == 5:
            break
    torch.save(early.state_dict(), tmp_path / "state")
    late = training(contestant=contestant, seed=0)
    late.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert losses(rows) + losses(late) == uncut


def test_evaluation_changes_no_loss():
    often = losses(training(budget=replace(BUDGET, evaluations=1000)))
    assert often == losses(training(budget=replace(BUDGET, evaluations=1)))


def test_all_contestants_start_from_the_same_model():
    assert len({next(iter(training(contestant=c)))["train_loss"] for c in range(3)}) == 1


def test_rows_count_steps_and_seconds():
    rows = list(training())
    assert [row["step"] for row in rows] == list(range(BUDGET.steps + 1))
    seconds = [row["seconds"] for row in rows]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)
    assert "train_loss" in rows[0]
    assert "test_error" in rows[-1]


def test_a_run_ends_with_its_seconds():
    rows = list(training(budget=Budget(seconds=0.02)))
    assert rows[-1]["seconds"] >= 0.02 > rows[-2]["seconds"]


def test_measured_divergence_follows_every_evaluation():
    rows = list(training())
    for before, after in pairwise(rows):
        assert ("kl_measured" in after) == ("train_loss" in before)
        assert after.get("kl_measured", 1.0) > 0


def test_a_run_that_breaks_down_stops():
    run = training()
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    rows = list(run)
    assert len(rows) == 2
    assert run.is_finished
    assert not run.finite


def test_order_covers_an_epoch_and_depends_on_the_seed():
    order = Order(10, 3, seed=4)
    epoch = torch.cat([order.batch(step, "cpu") for step in range(3)])
    assert len(epoch.unique()) == 9
    again = Order(10, 3, seed=4)
    assert torch.equal(again.batch(7, "cpu"), order.batch(7, "cpu"))
    assert not torch.equal(Order(10, 3, seed=5).batch(0, "cpu"), again.batch(0, "cpu"))
    assert Order(10, 0, seed=0).batch(0, "cpu") == Order(10, 99, seed=0).batch(3, "cpu") == slice(None)


@pytest.mark.parametrize(
    ("divergence", "family"),
    [
        (categorical_divergence, lambda r: torch.distributions.Categorical(logits=r)),
        (bernoulli_divergence, lambda r: torch.distributions.Independent(torch.distributions.Bernoulli(logits=r), 1)),
        (gaussian_divergence, lambda r: torch.distributions.Independent(torch.distributions.Normal(r, 1.0), 1)),
    ],
)
def test_divergences_are_the_kl_of_the_family(divergence, family):
    p, q = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(3)
    expected = torch.distributions.kl_divergence(family(p), family(q)).mean()
    torch.testing.assert_close(divergence(p, q), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("index", range(3))
def test_a_rate_falls_with_the_share_of_the_steps(index):
    falling = replace(contestants()[index], falls=lambda share: 1 - share)
    run = Training(Job(task(), falling, 0, 0, "race"), BUDGET, examples())
    first = run.optimizer.param_groups[0]["lr"]
    rates = []
    while not run.is_finished:
        run.advance()
        rates.append(run.optimizer.param_groups[0]["lr"] / first)
    assert rates == pytest.approx([1 - step / BUDGET.steps for step in range(BUDGET.steps)])


def test_the_share_that_is_spent_is_that_of_what_ends_first():
    assert Budget(seconds=10.0, steps=100).spent_part(20, 5.0) == 0.5
    assert Budget(seconds=10.0, steps=100).spent_part(80, 5.0) == 0.8
    assert Budget(steps=100).spent_part(80, 5.0) == 0.8


@pytest.mark.parametrize("index", range(3))
@pytest.mark.filterwarnings("ignore:a large part of the gradient")
def test_a_part_of_the_loss_besides_the_criterion_is_trained_in_its_unit(index):
    def double_outputs(outputs):
        return outputs.repeat(1, 2)

    def norm(outputs):
        return outputs[:, 2:].square().sum(1).mean()

    plain = task(among=contestants())
    wide = replace(
        plain,
        scale=3.0,
        model=lambda: nn.Sequential(*plain.model(), Function(double_outputs)),
        heard=lambda outputs: outputs[:, :2],
        besides=norm,
    )
    run = Training(Job(wide, wide.contestants[index], 0, 0, "race"), BUDGET, examples())
    rows = list(run)
    outputs = run.model.eval()(examples().test_x).detach()
    expected = 3 * wide.criterion(outputs[:, :2], examples().test_y) + norm(outputs)
    assert rows[-1]["test_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


class Function(nn.Module):
    """A function of a tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def training_of_norms(on):
    """A run of a network with batch norm whose statistics are taken anew on so many examples before an evaluation."""
    model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))  # noqa: E731
    changed = replace(task(), model=model, recalibrated_on=on)
    return Training(Job(changed, contestants()[0], 0, 0, "race"), BUDGET, examples())


def test_evaluations_see_statistics_of_the_weights_of_now():
    run = training_of_norms(20)
    rows = list(run)
    inputs, targets = run.examples.train_x[:20], run.examples.train_y[:20]
    run.model.eval()
    norm, hidden = run.model[1], run.model[0](inputs)
    torch.testing.assert_close(norm.running_mean, hidden.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var, hidden.var(0), rtol=1e-5, atol=1e-6)
    assert len(run.examples.train_x) > len(targets)
    assert rows[-1]["train_loss"] != list(training_of_norms(0))[-1]["train_loss"]


def test_taking_statistics_anew_changes_no_step():
    assert losses(training_of_norms(20)) == losses(training_of_norms(0))
