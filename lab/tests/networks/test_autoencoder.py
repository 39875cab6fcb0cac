"""The deep autoencoders of the laboratory: drawn curves, networks, and the race of them on a few images."""

from dataclasses import replace

import pytest
import torch
from small_races import BUDGET, examples, on_tasks, runs
from small_races import task as small_task
from torch import nn

from natgrad_lab.data import curves, strokes
from natgrad_lab.experiments import contestants, execute, find
from natgrad_lab.experiments.base import Job, slug
from natgrad_lab.experiments.models import squared_error
from natgrad_lab.experiments.race import find_budget
from natgrad_lab.experiments.training import Training
from natgrad_lab.networks.autoencoder import GROUPS, RACE, STARTS, AutoencoderSettings, ImageSet, network, sparse, task

TINY = AutoencoderSettings(steps=2, looked_at=20, seconds=60.0)
KEYS = {"hessian_free", "krylov_subspace", "adam", "muon", "sgd", *contestants.FAMILY}
GRID = contestants.grid


def few():
    return curves(train=40, test=10)


def among():
    return (
        contestants.natural_gradient(GRID(batch=(20,), metric=(10,), damping=(1e-2,), products=(3,))),
        contestants.krylov_subspace(GRID(batch=(20,), metric=(10,), search=(10,), dimension=(3,))),
        contestants.adam(GRID(batch=(20,), lr=(1e-3,))),
        contestants.muon(GRID(batch=(20,), lr=(0.03,), adam_lr=(1e-3,))),
        contestants.sgd(GRID(batch=(20,), lr=(1e-3,))),
        *contestants.line_up(batch=20).values(),
    )


def tiny(settings=TINY):
    return replace(task(ImageSet("curves", "Curves", few, (784, 6, 2), 125, 40), settings), contestants=among())


STRUCTURED = {contestant.name for contestant in contestants.line_up(batch=20).values()}


# Drawn curves.


def test_a_seed_gives_the_same_curves_and_another_others():
    first, again, other = curves(5, 3), curves(5, 3), curves(5, 3, seed=1)
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.test_x, again.test_x)
    assert not torch.equal(first.train_x, other.train_x)


def test_curves_are_images_with_ink_on_a_white_ground():
    split = curves(60, 30)
    assert split.train_x.shape == (60, 28, 28)
    assert split.test_x.shape == (30, 28, 28)
    assert split.train_y.tolist() == list(range(60))
    assert split.train_x.min() == 0
    assert split.train_x.amax((1, 2)).min() > 0.2
    assert split.train_x.max() == 1
    assert torch.equal((255 * split.train_x).round() / 255, split.train_x)


def test_no_curve_is_both_in_the_training_and_the_test_set():
    split = curves(60, 30)
    assert (split.train_x.flatten(1).unsqueeze(1) - split.test_x.flatten(1)).abs().amax(2).min() > 0.1


def test_a_straight_stroke_has_its_profile_across_and_ends_where_its_points_end():
    """Through (14, 6), (14, 14), (14, 22): exp(-d^2 / 2 width^2) at distance d, a half at its ends."""
    points = torch.tensor([[[14.0, 6.0], [14.0, 14.0], [14.0, 22.0]]])
    (image,) = strokes(points, width=1.0)
    profile = torch.exp(-0.5 * (torch.arange(28) - 14.0) ** 2)
    assert torch.allclose(image[:, 14], profile, atol=0.01)
    assert torch.allclose(image[14, [6, 22]], torch.tensor(0.5), atol=0.02)
    assert image[14, [2, 26]].max() < 0.01


def test_a_curve_passes_through_its_three_points():
    points = torch.tensor([[[6.0, 6.0], [18.0, 12.0], [8.0, 20.0]]])
    (image,) = strokes(points)
    assert image[18, 12] > 0.9
    assert image[6, 6] > 0.4
    assert image[8, 20] > 0.4
    assert image[2:5, 2:5].max() < 0.1


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_a_part_without_images_is_refused(sizes):
    with pytest.raises(ValueError, match="at least one image"):
        curves(*sizes)


# Networks.


def test_the_network_is_linear_in_its_code_and_in_its_logits():
    model = network([784, 6, 2], nn.Tanh, "glorot")
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Linear", "Tanh", "Linear", "Linear", "Tanh", "Linear"]
    assert model[2].out_features == 2
    assert model(torch.zeros(3, 784)).shape == (3, 784)


def test_sparse_units_hear_fifteen_inputs():
    torch.manual_seed(0)
    linear = nn.Linear(200, 400)
    sparse(linear)
    assert (linear.weight != 0).sum(1).tolist() == [15] * 400
    heard = linear.weight[linear.weight != 0]
    assert abs(float(heard.detach().var()) - 1) < 4 * (2 / len(heard)) ** 0.5
    assert not linear.bias.any()
    assert (linear.weight != 0).any(0).all()


@pytest.mark.parametrize("start", STARTS)
def test_every_start_comes_from_the_seed(start):
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(network([784, 6, 2], nn.Sigmoid, start)[0].weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# The race.


def test_squared_error_is_that_of_whole_images():
    images = torch.rand(3, 784)
    assert torch.allclose(squared_error(images.logit(), images), torch.tensor(0.0), atol=1e-4)
    assert torch.allclose(squared_error(torch.zeros(3, 784), torch.ones(3, 784)), torch.tensor(784 / 4))


def test_the_loss_is_the_cross_entropy_of_an_image():
    task = tiny()
    examples, model = task.data(), task.model()
    outputs = model(examples.train_x)
    p = outputs.sigmoid()
    expected = -(examples.train_x * p.log() + (1 - examples.train_x) * (1 - p).log()).sum(1).mean()
    assert torch.allclose(task.scale * task.criterion(outputs, examples.train_y), expected, rtol=1e-4)


def test_the_race_as_it_is_registered():
    assert find("autoencoder") is RACE
    tasks = RACE.tasks(AutoencoderSettings())
    assert [task.name for task in tasks] == ["mnist", "curves"]
    for raced in tasks:
        assert {len(contestant.grid) for contestant in raced.contestants} == {1, 4}
        assert {contestant.name for contestant in raced.contestants if not contestant.has_choices} == STRUCTURED
    budgets = [find_budget(task, AutoencoderSettings()).seconds for task in tasks]
    assert budgets == [60.0, 20.0]
    assert tasks[1].model()(torch.zeros(1, 784)).shape == (1, 784)


def test_data_and_methods_are_words():
    (task,) = RACE.tasks(AutoencoderSettings(data="digits", methods="sgd,kfac"))
    assert task.name == "digits"
    assert [contestant.name for contestant in task.contestants] == ["K-FAC", "SGD-momentum"]
    both = RACE.tasks(AutoencoderSettings(data="curves,digits", methods="matrix_free,kfac"))
    assert [len(task.contestants) for task in both] == [6, 6]


def test_grids_can_be_cut_short():
    (task,) = RACE.tasks(AutoencoderSettings(data="mnist", methods="adam,kfac", choices=2))
    assert [len(contestant.grid) for contestant in task.contestants] == [1, 2]


def test_groups_name_contestants():
    (task,) = RACE.tasks(AutoencoderSettings(data="digits", methods="all"))
    assert set(GROUPS["all"]) >= KEYS
    assert len({slug(contestant.name) for contestant in task.contestants}) == len(task.contestants)


def test_every_contestant_learns_a_few_curves(tmp_path):
    few_steps = replace(TINY, steps=8)
    folder = execute(on_tasks(RACE, lambda settings: (tiny(settings),)), few_steps, [0], tmp_path)
    records = runs(folder).values()
    assert len(records) == len(among())  # one choice each: nothing is tuned
    assert all(record.end["end"] == "steps" for record in records)
    (start,) = {record.rows[0]["train_loss"] for record in records}
    for name, record in runs(folder).items():
        assert record.rows[-1]["train_loss"] < start - 5, name
        assert 0 < record.rows[-1]["train_squared_error"] < 784


def test_muon_levels_filters_as_it_does_matrices():
    """A filter per row, with the layer's other parameters to Adam."""
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(2, 8, 3, bias=False), nn.Linear(18, 8, bias=False)
    linear.weight.data.copy_(conv.weight.flatten(1))
    gradient = torch.randn(8, 18)
    for model in (conv, linear):
        optimizer = contestants.Muon(model.parameters(), lr=0.1)
        model.weight.grad = gradient.view_as(model.weight).clone()
        optimizer.step()
    assert torch.equal(conv.weight.flatten(1), linear.weight)


def test_adam_takes_what_muon_is_told_to_leave():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    muon = contestants.muon(GRID(batch=(8,), lr=(0.03,), adam_lr=(1e-2,)), but=("0.weight",))
    optimizer = muon.build(model, nn.MSELoss(), muon.grid[0])
    first, second = ([p.shape for p in group["params"]] for group in optimizer.param_groups)
    assert first == [(3, 4)]
    assert sorted(second) == [(3,), (5, 4)]


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
def test_muon_levels_singular_values(shape):
    left, right = torch.linalg.qr(torch.randn(30, 20))[0], torch.linalg.qr(torch.randn(20, 20))[0]
    matrix = left @ torch.diag(torch.logspace(-1, 1, 20)) @ right
    matrix = matrix if shape == (30, 20) else matrix.mT
    polar_factor = contestants.orthogonal(matrix)
    polar = left @ right if shape == (30, 20) else (left @ right).mT
    values = torch.linalg.svdvals(polar_factor)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (polar_factor - polar).norm() < 0.4 * polar.norm()


def test_muon_and_adam_together_go_on_where_they_were_put_down():
    muon = contestants.muon(GRID(batch=(8,), lr=(0.03,), adam_lr=(1e-2,)))
    job = Job(small_task(), muon, 0, 0, "race")

    def train(training, steps):
        for _ in range(steps):
            training.advance()
        return [p.detach().clone() for p in training.model.parameters()]

    uncut = train(Training(job, BUDGET, examples()), 6)
    half = Training(job, BUDGET, examples())
    train(half, 3)
    again = Training(job, BUDGET, examples())
    again.load_state_dict(half.state_dict())
    for ours, theirs in zip(train(again, 3), uncut, strict=True):
        assert torch.equal(ours, theirs)
