"""Races on steps, tuned on a validation part, with metrics on other data and falling rates: reproducible throughout."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from small_races import examples, runs, task
from torch import nn

import natgrad as ng
from natgrad_lab.experiments import Contestant, LabError, Task, execute
from natgrad_lab.experiments import race as make_race
from natgrad_lab.experiments.base import Budget, Job, slug
from natgrad_lab.experiments.contestants import sgd
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled, join_unlabelled
from natgrad_lab.experiments.race_summary import Record, choose, final
from natgrad_lab.experiments.training import Training
from natgrad_lab.papers.pascanu_2013.table1 import Falling, divide


@dataclass(frozen=True)
class Settings:
    steps: int | None = 4
    evaluations: int = 2
    looked_at: int = 100
    tuning_seed: int = 100
    threads: int | None = None
    device: str = "cpu"


def pool():
    """The 30 training examples of `lab`, and unlabelled ones whose first coordinate is their number from 100 on."""
    more = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
    more[:, 0] = torch.arange(100, 112)
    return replace(examples(), unlabelled_x=more)


def truncate_newton(name, observes, **rest):
    def build(model, criterion, choice):
        return ng.natgrad_cg(model, criterion, choice["lr"], damping=0.1)

    grid = ({"batch": 8, "lr": 0.3}, {"batch": 8, "lr": 1.0})
    return Contestant(name, grid, build, observes=observes, **rest)


def contestants():
    return (
        replace(sgd([{"batch": 4, "lr": 0.1}, {"batch": 4, "lr": 0.5}], momentum=0.0), steps=9),
        truncate_newton("other", draw_another_batch(6), schedule=Falling(2, 1.0)),
        truncate_newton("unlabelled", draw_unlabelled(6)),
        truncate_newton("joined", join_unlabelled(3)),
    )


def validate_task(**changes):
    sample = task(among=contestants())
    values = {"data": pool, "draw": lambda all_, seed: divide(all_, seed, 6), "tuned_on": "valid_error", **changes}
    return replace(sample, **values)


def race(task: Task | None = None):
    return make_race("tiny", "Rings again", Settings, lambda settings: (task or validate_task(),))


def training(index, seed=0, budget=None):
    among = validate_task().contestants
    return Training(Job(validate_task(), among[index], 1, seed, "race"), budget or Budget(steps=6), pool())


@pytest.mark.parametrize("index", range(4))
def test_put_down_and_taken_up_equals_never_stopped(index, tmp_path):
    uncut = [row["loss"] for row in training(index) if row["step"]]
    early = training(index)
    for _ in range(3):
        early.advance()
    torch.save(early.state_dict(), tmp_path / "state")
    late = training(index)
    late.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    rest = [row["loss"] for row in late if row["step"]]
    assert rest == uncut[-len(rest) :]
    assert len(rest) == len(uncut) - 3


def test_every_contestant_runs_its_own_number_of_steps(tmp_path):
    records = runs(execute(race(), Settings(), [0], tmp_path)).values()
    steps = {(r.header["contestant"], r.end["steps"], r.end["end"]) for r in records}
    assert steps == {("SGD-momentum", 9, "steps")} | {(n, 4, "steps") for n in ("other", "unlabelled", "joined")}


def test_another_batch_has_nothing_of_the_gradient_s():
    numbered = replace(examples(), train_x=torch.arange(30.0)[:, None])
    rows = torch.tensor([3, 7, 20])
    draws = [draw_another_batch(9)(numbered, rows, seed, step) for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0))]
    for draw in draws:
        assert len(draw.unique()) == 9
        assert not set(draw[:, 0].tolist()) & {3.0, 7.0, 20.0}
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_unlabelled_inputs_come_alone_or_behind_the_batch():
    rows = torch.tensor([3, 7, 20])
    alone, joined = (draw(4)(pool(), rows, 0, 0) for draw in (draw_unlabelled, join_unlabelled))
    assert (alone[:, 0] >= 100).all()
    assert torch.equal(joined[:3], pool().train_x[rows])
    assert torch.equal(joined[3:], alone)


def test_the_metric_is_taken_where_the_contestant_says():
    """One step with the metric on chosen inputs is the dense natural gradient with that metric."""
    chosen = torch.randn(5, 3, generator=torch.Generator().manual_seed(9))
    contestant = truncate_newton("chosen", lambda *_: chosen)
    run = Training(
        Job(replace(task(), contestants=(contestant,)), contestant, 1, 0, "race"), Budget(steps=1), examples()
    )
    torch.manual_seed(0)
    model = task().model()
    rows = run.order.batch(0, "cpu")
    nn.functional.cross_entropy(model(examples().train_x[rows]), examples().train_y[rows]).backward()
    metric = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), chosen).dense()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    step = torch.linalg.solve(metric + 0.1 * torch.eye(len(gradient)), gradient)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    run.advance()
    after = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    torch.testing.assert_close(after, before - step, rtol=2e-3, atol=2e-4)  # float32, and CG to a residual of 1e-4


@pytest.mark.parametrize(
    ("draw", "has", "said"),
    [
        (draw_another_batch(25), pool, "asks for 25 examples besides the gradient's, and there are 22"),
        (draw_unlabelled(13), pool, "there are 12"),
        (draw_unlabelled(3), examples, "expected Split.unlabelled_x"),
        (join_unlabelled(3), examples, "expected Split.unlabelled_x"),
    ],
)
def test_missing_data_is_refused_in_a_sentence(draw, has, said):
    with pytest.raises(LabError, match=said):
        draw(has(), torch.arange(8), 0, 0)


def test_the_rate_is_held_and_falls():
    schedule = Falling(200, 20)  # section 8.6
    assert schedule(1) == schedule(200) == 1
    assert schedule(220) == 0.5
    assert schedule(2000) == 1 / 91
    assert schedule.slow_down(20)(4400) == 0.5


def test_a_schedule_sets_the_rate_of_every_step():
    among = validate_task().contestants
    run = Training(Job(validate_task(), among[1], 1, 0, "race"), Budget(steps=5), pool())
    rates = []
    for _ in range(5):
        run.advance()
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1 / 2, 1 / 3, 1 / 4]


def test_evaluations_are_spread_over_the_steps():
    rows = list(training(0, budget=Budget(steps=6, evaluations=3)))
    at = [row["step"] for row in rows if "valid_error" in row]
    assert at == [0, 1, 2, 3, 6, 9]  # thirds of its own nine steps, and the doubled ones between


def test_divide_keeps_every_example_once_and_depends_on_the_seed():
    numbered = replace(examples(), train_x=torch.arange(30.0)[:, None], train_y=torch.arange(30))
    labelled_parts = divide(numbered, 4, validation=6, labels=10)
    assert (len(labelled_parts.train_x), len(labelled_parts.valid_x), len(labelled_parts.unlabelled_x)) == (10, 6, 14)
    every = torch.cat([labelled_parts.train_x, labelled_parts.valid_x, labelled_parts.unlabelled_x])
    assert torch.equal(every[:, 0].sort().values, torch.arange(30.0))
    assert torch.equal(labelled_parts.train_y.float(), labelled_parts.train_x[:, 0])
    assert torch.equal(labelled_parts.valid_y.float(), labelled_parts.valid_x[:, 0])
    assert torch.equal(divide(numbered, 4, 6, 10).train_y, labelled_parts.train_y)
    assert not torch.equal(divide(numbered, 5, 6, 10).train_y, labelled_parts.train_y)
    parts = divide(pool(), 4, validation=6)
    assert len(parts.train_x) == 24
    assert torch.equal(parts.unlabelled_x, pool().unlabelled_x)


@pytest.mark.parametrize("sizes", [(0, 10), (6, 0), (20, 11), (30, None)])
def test_parts_that_do_not_fit_are_refused(sizes):
    with pytest.raises(LabError, match="sum of at most 30"):
        divide(examples(), 0, *sizes)


def record(index, end="steps", **numbers):
    row = {"step": 3, "seconds": 1.0, "train_loss": 1.0, **numbers}
    return Record({"index": index, "budget": None}, (row,), {"end": end})


def test_the_choice_has_the_lowest_validation_error_and_then_loss():
    tried = [
        record(0, valid_error=0.2, valid_loss=0.1, train_loss=0.1),
        record(1, valid_error=0.1, valid_loss=0.9),
        record(2, valid_error=0.1, valid_loss=0.8),
        record(3, end="not finite", valid_error=0.0, valid_loss=0.0),
    ]
    assert choose(tried, "valid_error") == 2
    assert choose(tried) == 0
    assert final(tried[3], "valid_error") == float("inf")


def test_what_races_was_chosen_on_the_validation_part(tmp_path):
    records = runs(execute(race(), Settings(), [0], tmp_path))
    for contestant in contestants():
        name = f"rings-{slug(contestant.name)}"
        tried = [records[f"{name}-tune-{index}"] for index in range(2)]
        assert records[f"{name}.seed-0"].header["index"] == choose(tried, "valid_error")


def test_seeds_differ_in_their_data_and_contestants_of_a_seed_do_not():
    first, second, other = training(1, 0), training(2, 0), training(1, 1)
    assert torch.equal(first.examples.valid_x, second.examples.valid_x)
    assert not torch.equal(first.examples.valid_x, other.examples.valid_x)
    for state, other in pairwise([first.model.state_dict(), second.model.state_dict()]):
        assert all(torch.equal(state[key], other[key]) for key in state)


def test_unbounded_runs_and_unknown_criteria_are_refused():
    with pytest.raises(LabError, match="expected a number of one of them"):
        Budget(steps=None)
    with pytest.raises(LabError, match="expected train_loss, valid_loss or valid_error"):
        validate_task(tuned_on="test_error")
