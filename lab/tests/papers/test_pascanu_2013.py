"""The experiments of Pascanu & Bengio 2013 on small synthetic sets laid out as the real ones."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from small_races import idx, on_tasks, results, runs
from torch import nn

import natgrad as ng
from natgrad_lab.experiments import Interrupted, LabError, execute, find
from natgrad_lab.experiments.models import Convolution, convolutional
from natgrad_lab.experiments.records import Folder
from natgrad_lab.figures import draw
from natgrad_lab.papers.kept_tables import insert
from natgrad_lab.papers.pascanu_2013 import at_size, at_size_page
from natgrad_lab.papers.pascanu_2013.at_size import SparsePixels, sort_pixels
from natgrad_lab.papers.pascanu_2013.table1 import ADAPTED, damping, standardise_images

SMALL = {
    "pascanu_2013_restricted_mnist": {"hidden": 3, "labelled": 40, "validation": 20, "batch": 20, "products": 3},
    "pascanu_2013_mnist": {"filters": 1, "hidden": 3, "validation": 20, "batch": 20, "products": 2},
    "pascanu_2013_faces": {"filters": 1, "first": 3, "second": 2, "validation": 20, "batch": 20, "unlabelled": 5},
}
SHORT = {"steps": 1, "evaluations": 1, "threads": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (place / "mnist").mkdir()
    for part, n in (("train", 100), ("t10k", 20)):
        idx(place / "mnist" / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (n, 28, 28)))
        idx(place / "mnist" / f"{part}-labels-idx1-ubyte.gz", rng.integers(0, 10, n))
    faces = {f"x_{part}": rng.integers(0, 256, (n, 48, 48), dtype=np.uint8) for part, n in (("train", 70), ("test", 9))}
    labels = {f"y_{part}": rng.integers(0, 7, n).astype(np.uint8) for part, n in (("train", 70), ("test", 9))}
    more = rng.integers(0, 256, (12, 48, 48), dtype=np.uint8)
    names = np.array(list("abcdefg"))
    np.savez(place / "fer2013_subset.npz", **faces, **labels, x_unlabelled=more, class_names=names)
    return place


@pytest.mark.parametrize("name", SMALL)
def test_the_experiment_runs_to_its_report(name, data, monkeypatch, tmp_path):
    monkeypatch.setenv("NATGRAD_DATA", str(data))
    race = find(name)
    settings = race.settings(**SMALL[name], **SHORT)
    task = race.tasks(settings)[0]
    firsts = tuple(replace(contestant, grid=contestant.grid[:1]) for contestant in task.contestants)  # to be quick
    race = on_tasks(race, lambda _: (replace(task, contestants=firsts),))
    folder = execute(race, settings, [0, 1], tmp_path)
    ends = {r.header["contestant"]: r.end["steps"] for r in runs(folder).values()}
    assert ends == {contestant.name: 20 if contestant.name == "MSGD" else 1 for contestant in task.contestants}
    assert set(task.paper) == set(ends)
    (result,) = results(folder, *race.tasks(settings))
    assert result.task.note == task.note
    assert [entry.name for entry in result.entries] == [contestant.name for contestant in task.contestants]
    assert len(result.pairs) == len(ends) * (len(ends) - 1) // 2


def test_one_choice_for_all_fisher_metrics_is_not_tuned():
    race = find("pascanu_2013_restricted_mnist")
    tuned = race.tasks(race.settings())[0].contestants
    for choice in range(6):
        among = race.tasks(race.settings(choice=choice))[0].contestants
        assert [contestant.name for contestant in among] == [
            contestant.name for contestant in tuned if contestant.name.startswith("KL")
        ]
        assert all(contestant.grid == (tuned[1].grid[choice],) for contestant in among)


def read_losses(folder):
    """Run -> training and test loss of every evaluation."""
    names = "step", "loss", "damping", "train_loss", "test_loss"
    return {run: [[row.get(name) for name in names] for row in r.rows] for run, r in runs(folder).items()}


@pytest.mark.parametrize("steps", [1, 7])
def test_table_1_goes_on_after_an_interrupt_with_equal_numbers(steps, data, monkeypatch, tmp_path):
    monkeypatch.setenv("NATGRAD_DATA", str(data))
    race = find("pascanu_2013_restricted_mnist")
    settings = race.settings(**SMALL[race.name], full=True, steps=3, evaluations=1, threads=None)
    task = race.tasks(settings)[0]
    chosen = tuple(
        replace(contestant, grid=contestant.grid[-1:], steps=3) for contestant in task.contestants
    )  # the adapted dampings
    race = on_tasks(race, lambda _: (replace(task, contestants=chosen),))
    folder = execute(race, settings, [0], tmp_path / "whole")
    for _ in range(2):  # in a run, and again in the one that goes on
        asked = iter(range(1000))
        with pytest.raises(Interrupted):
            execute(race, settings, [0], tmp_path / "parts", stopped=lambda asked=asked: next(asked) >= steps)
    parts = execute(race, settings, [0], tmp_path / "parts")
    assert read_losses(parts) == read_losses(folder)


@pytest.mark.parametrize("name", SMALL)
def test_fisher_metrics_share_their_grid_and_all_grids_are_as_large(name):
    among = find(name).tasks(find(name).settings())[0].contestants
    assert len({len(contestant.grid) for contestant in among}) == 1
    grids = [contestant.grid for contestant in among if contestant.name.startswith("KL")]
    assert len(grids) > 1
    assert all(grid == grids[0] for grid in grids)


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("pascanu_2013_restricted_mnist", {"hidden": 1500, "batch": 2500, "steps": 2000}),
        ("pascanu_2013_mnist", {"filters": 32, "hidden": 750, "batch": 10_000, "steps": 2000, "hold": 200}),
        ("pascanu_2013_faces", {"filters": 300, "first": 2048, "second": 1024, "batch": 960, "unlabelled": 480}),
    ],
)
def test_full_is_the_paper_s_size_and_a_setting_overrides_it(name, paper):
    kind = find(name).settings
    full = kind(full=True)
    assert {key: getattr(full, key) for key in paper} == paper
    first = next(iter(paper))
    assert getattr(kind(full=True, **{first: 7}), first) == 7
    assert all(value is not None for key, value in vars(kind()).items() if key not in ("threads", "choice"))


def test_damping_has_a_floor_where_it_is_adapted():
    adapted = damping({"batch": 1, "lr": 5.0, ADAPTED: 2.0}, floor=0.01)
    assert (adapted.start, adapted.floor, adapted.linear_model) == (2.0, 0.01, True)
    level = adapted.start
    for _ in range(100):
        level = adapted.update(level, 1.0)
    assert level == 0.01
    assert damping({"batch": 1, "lr": 0.1, "damping": 0.3}, floor=0.01) == 0.3


def test_too_few_examples_for_another_batch_are_refused(data, monkeypatch, tmp_path):
    monkeypatch.setenv("NATGRAD_DATA", str(data))
    race = find("pascanu_2013_restricted_mnist")
    settings = replace(race.settings(**SMALL[race.name], **SHORT), batch=30)
    with pytest.raises(LabError, match="asks for 30 examples besides the gradient's, and there are 10"):
        execute(race, settings, [0], tmp_path)


@pytest.mark.parametrize("stride", [1, 3])
def test_a_convolution_by_patches_is_a_convolution(stride):
    layer = Convolution(4, 5, pooling=2, stride=stride).layer(1).double()
    images = torch.randn(3, 1, 17, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = layer.filters.weight.view(4, 1, 5, 5)
    expected = nn.functional.conv2d(images, weight, layer.filters.bias + 1, stride) - 1
    torch.testing.assert_close(layer(images), expected, rtol=0, atol=1e-12)


def test_pooling_before_the_activation_is_pooling_after_it():
    net = convolutional(14, [Convolution(2, 3, 2), Convolution(4, 3, 2)], (5, 3), nn.Tanh)
    images = torch.randn(6, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    first, pool, tanh, second, _, _, _, *dense = net
    late = pool(tanh(second(pool(tanh(first(images))))))
    torch.testing.assert_close(net(images), nn.Sequential(*dense)(late.flatten(1)))


def test_faces_have_mean_zero_and_variance_one():
    faces = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1
    images = standardise_images(faces)
    assert images.shape == (4, 1, 6, 6)
    torch.testing.assert_close(images.mean((1, 2, 3)), torch.zeros(4), rtol=0, atol=1e-6)
    torch.testing.assert_close(images.square().mean((1, 2, 3)), torch.ones(4))
    assert standardise_images(torch.ones(1, 6, 6)).isfinite().all()


def test_frequent_pixels_dense_and_the_others_sparse_are_a_linear_layer():
    torch.manual_seed(0)
    images = torch.rand(9, 12, dtype=torch.float64) * (torch.rand(9, 12) < 0.3)
    images = images[:, sort_pixels(images)]
    share = (images != 0).double().mean(0)
    assert (share.diff() <= 0).all()
    sparse = nn.Sequential(SparsePixels(12, 4, dense=5), nn.Tanh(), nn.Linear(4, 3)).double()
    dense = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for own, other in zip(sparse.parameters(), dense.parameters(), strict=True):
            other.copy_(own.T if own.shape == (12, 4) else own)

    def flip(vector):  # the first weight is kept the other way round
        return torch.cat([vector[:48].view(12, 4).T.flatten(), vector[48:]])

    close = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(sparse(images), dense(images), **close)
    metrics = [ng.fisher(net, ng.Categorical()).at(ng.trainable(net), images) for net in (sparse, dense)]
    vector = torch.randn(metrics[0].size, dtype=torch.float64)
    torch.testing.assert_close(flip(metrics[0] @ vector), metrics[1] @ flip(vector), **close)
    gradients = [torch.autograd.grad(net(images).square().sum(), list(net.parameters())) for net in (sparse, dense)]
    torch.testing.assert_close(gradients[0][0].T, gradients[1][0], **close)


AT_SIZE = {"hidden": 3, "labelled": 40, "validation": 20, "batch": 20, "products": 3, "dense": 200, "threads": None}


def test_all_contestants_go_to_one_stage_before_one_goes_to_the_next(data, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NATGRAD_DATA", str(data))
    settings = at_size.AtSizeSettings(**AT_SIZE, steps=8, evaluations=4)
    at_size.main(tmp_path / "parts", settings, (2,))
    (record,) = at_size_page.read_records(tmp_path / "parts")
    names = [contestant.name for contestant in at_size.contestants(settings)]
    assert [*record["contestants"]] == names
    assert {at_size_page.last(record, name)["updates"] for name in names} == {2}
    at_size.main(tmp_path / "parts", settings, (2, 4))
    at_size.main(tmp_path / "whole", settings, (4,))
    (parts,), (uncut,) = (at_size_page.read_records(tmp_path / name) for name in ("parts", "whole"))
    for name in names:
        assert parts["contestants"][name]["curve"] == uncut["contestants"][name]["curve"]
        assert parts["contestants"][name]["wrong"] == uncut["contestants"][name]["wrong"]
        end = at_size_page.last(uncut, name)
        assert end["test_error"] == pytest.approx(len(uncut["contestants"][name]["wrong"]) / 20)
    said = capsys.readouterr().out
    assert all(f"{name}: training loss" in said for name in names)
    at_size.main(tmp_path / "parts", settings, (6,), names[-1:])
    (further,) = at_size_page.read_records(tmp_path / "parts")
    assert [at_size_page.last(further, name)["updates"] for name in names] == [4] * (len(names) - 1) + [6]
    assert f"less {names[-1]} |" not in at_size_page.write_tables([further])  # never at unequal updates
    with pytest.raises(SystemExit, match="no contestant is called 'KL'"):
        at_size.main(tmp_path / "parts", settings, (6,), ["KL"])


def test_a_stage_goes_on_after_interrupts_with_equal_numbers(data, monkeypatch, tmp_path):
    monkeypatch.setenv("NATGRAD_DATA", str(data))
    settings = at_size.AtSizeSettings(**AT_SIZE, steps=8, evaluations=4)
    for updates in (30, 100):  # of MSGD's 40 to the first stage, and of a later contestant
        asked = iter(range(1000))
        staged = at_size.StagedRuns(
            Folder(tmp_path / "parts"), settings, lambda asked=asked, end=updates: next(asked) >= end
        )
        with pytest.raises(Interrupted):
            staged.carry_out((2,))
        assert not at_size_page.read_records(tmp_path / "parts")
    for name in ("parts", "whole"):
        at_size.main(tmp_path / name, settings, (2,))
    (parts,), (uncut,) = (at_size_page.read_records(tmp_path / name) for name in ("parts", "whole"))
    for name, contestant in uncut["contestants"].items():
        assert parts["contestants"][name]["curve"] == contestant["curve"]
        assert parts["contestants"][name]["wrong"] == contestant["wrong"]


def test_another_seed_is_another_run_in_the_same_folder(data, monkeypatch, tmp_path):
    monkeypatch.setenv("NATGRAD_DATA", str(data))
    settings = at_size.AtSizeSettings(**AT_SIZE, steps=8, evaluations=4)
    names = [contestant.name for contestant in at_size.contestants(settings)][-2:]
    for seed, raced in ((0, names), (1, names[:1])):
        at_size.main(tmp_path, settings, (2,), raced, seed)
    first, second = at_size_page.read_records(tmp_path)
    assert (first["seed"], second["seed"]) == (0, 1)
    assert ([*first["contestants"]], [*second["contestants"]]) == (names, names[:1])
    assert first["contestants"][names[0]]["curve"] != second["contestants"][names[0]]["curve"]
    assert f"| {names[0]} | 1 | 2 |" in at_size_page.write_tables([first, second])
    assert len(draw(partial(at_size_page.fill, [first, second]), (9.0, 4.6)).axes[0].lines) == 3


def test_the_page_holds_the_records_of_the_paper_s_size():
    records = at_size_page.read_records()
    page = (Path(__file__).parents[3] / "docs" / "papers" / "pascanu_2013.md").read_text()
    assert insert(page, "at size", at_size_page.write_tables(records)) == page
    assert all(record["settings"] == vars(at_size.AtSizeSettings()) for record in records)
    assert draw(partial(at_size_page.fill, records), (9.0, 4.6)).axes
