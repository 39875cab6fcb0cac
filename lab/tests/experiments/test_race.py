"""A race on disk: what is kept, what goes on after an interruption, what is refused."""

import json

import pytest
import torch
from small_races import Settings, contestants, race, runs, task
from torch import nn

import natgrad as ng
from natgrad_lab.experiments import Interrupted, LabError, execute
from natgrad_lab.experiments.base import Job
from natgrad_lab.experiments.contestants import adam, apply_recipe, grid, sgd
from natgrad_lab.experiments.race import Course
from natgrad_lab.experiments.race_summary import choose, final
from natgrad_lab.experiments.training import Training


def stop_after(steps):
    """A `stopped` that turns true when asked for the given time."""
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps


def losses(folder):
    return {name: [row.get("loss") for row in record.rows] for name, record in runs(folder).items()}


def test_a_race_leaves_a_record_of_every_run(tmp_path):
    records = runs(execute(race(), Settings(), [0, 1], tmp_path))
    assert len(records) == 2 * (2 + 2)
    header = next(iter(records.values())).header
    assert {"settings", "seed", "versions", "threads", "device", "choice", "phase"} <= set(header)
    assert set(header["versions"]) == {"natgrad", "torch", "python"}
    assert all(record.end["end"] == "steps" and record.end["steps"] == 6 for record in records.values())
    assert not list(tmp_path.glob("records/*.checkpoint"))


def test_the_choice_with_the_lowest_training_loss_races(tmp_path):
    records = runs(execute(race(), Settings(), [0], tmp_path))
    tried = [r for r in records.values() if r.header["phase"] == "tune" and r.header["contestant"] == "Adam"]
    raced = records["rings-adam.seed-0"]
    assert raced.header["index"] == choose(tried) == min(tried, key=final).header["index"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return execute(race(task()), Settings(), [0], tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("steps", [1, 9, 23, 40])
def test_interrupted_and_resumed_equals_never_stopped(whole, tmp_path, steps):
    among = race(task())
    with pytest.raises(Interrupted):
        execute(among, Settings(), [0], tmp_path / "parts", stopped=stop_after(steps))
    with pytest.raises(Interrupted):
        execute(among, Settings(), [0], tmp_path / "parts", stopped=stop_after(3))
    parts = execute(among, Settings(), [0], tmp_path / "parts")
    assert losses(parts) == losses(whole)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    among, states = race(), []
    with pytest.raises(Interrupted):
        execute(among, Settings(), [0], tmp_path, states.append, lambda: any(s.fraction > 0.5 for s in states))
    (place,) = tmp_path.glob("records/*.checkpoint")
    before = torch.load(place, weights_only=True)["rows"]
    assert len(before) > 3
    assert runs(execute(among, Settings(), [0], tmp_path))[place.stem].rows[: len(before)] == tuple(before)


def test_other_tasks_in_the_same_folder_are_refused(tmp_path):
    execute(race(), Settings(), [0], tmp_path)
    with pytest.raises(LabError, match="tasks, contestants or grids differ"):
        execute(race(task("squares", contestants()[:2])), Settings(), [0], tmp_path)


def test_grids_of_different_sizes_are_refused(tmp_path):

    uneven = (contestants()[0], adam(grid(batch=(8,), lr=(0.1, 0.2, 0.3))))
    with pytest.raises(LabError, match="same number for every contestant"):
        execute(race(task(among=uneven)), Settings(), [0], tmp_path)


def test_the_tuning_seed_does_not_race(tmp_path):
    with pytest.raises(LabError, match="none of them the tuning seed 100"):
        execute(race(), Settings(), [0, 100], tmp_path)


def test_numbers_that_are_not_finite_are_null(tmp_path):

    wild = race(task(among=(sgd(grid(batch=(0,), lr=(1e38,))),)))
    folder = execute(wild, Settings(), [0], tmp_path)
    record = runs(folder)["rings-sgd-momentum.seed-0"]
    assert record.end["end"] == "not finite"
    assert final(record) == float("inf")
    assert "NaN" not in (folder.records / "rings-sgd-momentum.seed-0.json").read_text()
    json.loads(folder.plan_path.read_text())


def test_a_run_in_memory_gives_the_rows_of_the_record(tmp_path):
    record = runs(execute(race(), Settings(), [0], tmp_path))["rings-adam.seed-0"]
    sample = task(among=contestants()[:2])
    job = Job(sample, sample.contestants[1], record.header["index"], 0, "race")
    training = Training(job, Course(sample, Settings()).budget, sample.data())
    assert [row.get("loss") for row in training] == [row.get("loss") for row in record.rows]


def test_a_contestant_with_one_choice_is_not_tuned(tmp_path):
    plain = apply_recipe("K-FAC", ng.kfac, grid(batch=(8,)))
    folder = execute(race(task(among=(plain, contestants()[1]))), Settings(), [0], tmp_path)
    names = ["rings-adam-tune-0", "rings-adam-tune-1", "rings-adam.seed-0", "rings-k-fac.seed-0"]
    assert sorted(losses(folder)) == names


def test_the_choice_s_other_keys_are_arguments_of_a_structured_recipe():
    (choice,) = grid(batch=(8,), damping=(0.7,), update_every=(3,))
    opt = apply_recipe("K-FAC", ng.kfac, [choice]).build(nn.Linear(2, 2), nn.CrossEntropyLoss(), choice)
    assert opt.param_groups[0]["damping"] == 0.7
    assert opt.update_every == 3
