"""The races of convolutional networks and of a transformer: text, networks, numbers, and the races on stand-ins."""

from dataclasses import replace

import pytest
import torch
from small_races import on_tasks, results, runs
from torch import nn

from natgrad_lab.data import Split
from natgrad_lab.experiments import LabError, execute
from natgrad_lab.experiments.models import categorical_divergence, mistakes, precision
from natgrad_lab.experiments.race_story import plots
from natgrad_lab.networks import char_transformer as char
from natgrad_lab.networks import fashion_cnn as fashion
from natgrad_lab.networks.char_transformer import SYMBOLS, documentation, encode_text, windows
from natgrad_lab.papers.ang_2020 import cifar
from natgrad_lab.papers.ang_2020.cifar import dense_net, wide_resnet

ALL = "structures"
SMALL = {"steps": 2, "evaluations": 2, "looked_at": 16}


def pictures(channels, side, many=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(many, channels, side, side, generator=generator)
    return Split(x[:32], torch.arange(32) % 10, x[32:], torch.arange(8))


def race_of(module, settings, data, batch):
    """The module's race on other data: one choice each, with small batches."""

    def tasks(settings):
        def small(contestant):
            choice = {**contestant.grid[0], "batch": batch}
            return replace(contestant, grid=(choice,))

        return tuple(
            replace(task, data=lambda: data, contestants=tuple(map(small, task.contestants)))
            for task in module.tasks(settings)
        )

    return on_tasks(module.RACE, tasks)


# Text.


@pytest.fixture
def library(tmp_path):
    (tmp_path / "b.py").write_text(
        '"""Of b."""\nclass B:\n    """A class."""\n\n    def f(self):\n        """A method."""\n'
    )
    (tmp_path / "a.py").write_text('"""Of a: é."""\nraise RuntimeError("was run")\n')
    (tmp_path / "c.py").write_text("this is no Python\n")
    (tmp_path / "LICENSE.txt").write_text("Free.")
    return tmp_path


def test_the_text_is_the_licence_and_the_docstrings_in_order(library):
    assert documentation(library) == "Free.\n\nOf a: é.\n\nOf b.\n\nA class.\n\nA method."


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(LabError, match="no docstrings to read"):
        documentation(tmp_path)


def test_characters_are_numbers_and_others_are_dropped():
    assert "".join(SYMBOLS[i] for i in encode_text("Of a: é.\n")) == "Of a: .\n"


def test_windows_follow_one_another_and_targets_are_one_character_on():
    text = "".join(SYMBOLS[i % 90] for i in range(101))
    examples = windows(text, 10, test=0.2)
    assert examples.train_x.shape == examples.train_y.shape == (8, 10)
    assert examples.test_x.shape == (2, 10)
    assert torch.equal(torch.cat([examples.train_x, examples.test_x]).flatten(), encode_text(text)[:100])
    assert torch.equal(torch.cat([examples.train_y, examples.test_y]).flatten(), encode_text(text)[1:])


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(LabError, match="length is 64: the text has 5 characters"):
        windows("12345", 64)


# Networks.


def assert_looks_back_alone(model):
    text = torch.randint(7, (3, 6))
    other = text.clone()
    other[:, 4] = (other[:, 4] + 1) % 7
    before, after = model(text), model(other)
    assert before.shape == (3, 7, 6)
    assert torch.allclose(before[:, :, :4], after[:, :, :4], atol=1e-6)
    assert (before[:, :, 4:] - after[:, :, 4:]).abs().amax(1).min() > 1e-4


def test_the_transformer_does_not_look_ahead():
    torch.manual_seed(0)
    assert_looks_back_alone(char.Transformer(symbols=7, length=6, width=8, heads=2, layers=2))


@pytest.mark.parametrize(
    ("model", "convolutions"),
    [(dense_net(10, 4), 1 + 6 + 2), (dense_net(7, 3), 1 + 3 + 2), (wide_resnet(10, 2), 1 + 6 + 3)],
    ids=["densenet-10", "densenet-7", "wide-10-2"],
)
def test_networks_have_the_depth_that_they_are_called_by(model, convolutions):
    """Depth counts 3 x 3 convolutions, the transitions of a DenseNet and the logits; shortcuts come on top."""
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == convolutions
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_a_dense_layer_keeps_what_came_before():
    joined = dense_net(7, 3)[1]
    images = torch.rand(2, 6, 8, 8)
    assert torch.equal(joined(images)[:, :6], images)
    assert joined(images).shape == (2, 9, 8, 8)


@pytest.mark.parametrize(("make", "depth"), [(dense_net, 12), (dense_net, 4), (wide_resnet, 12), (wide_resnet, 4)])
def test_a_depth_that_does_not_divide_is_refused(make, depth):
    with pytest.raises(LabError, match=rf"depth is {depth}, expected \d n \+ 4"):
        make(depth, 1)


# Numbers.


def test_precision_is_that_of_scikit_learn():
    from sklearn.metrics import precision_score

    torch.manual_seed(0)
    outputs, labels = torch.randn(50, 6), torch.randint(5, (50,))
    outputs[:, 2] -= 9  # nobody gets this class
    outputs[:, 5] -= 9  # and nobody has this one either
    expected = precision_score(labels, outputs.argmax(1), average="macro", zero_division=0)
    assert precision(outputs, labels).item() == pytest.approx(expected)


def test_mistakes_and_divergence_along_another_dimension():
    logits, other = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    labels = torch.randint(3, (4, 5))
    assert mistakes(logits, labels, dim=1) == mistakes(logits.mT, labels)
    divergence = categorical_divergence(logits, other, dim=1)
    assert torch.allclose(divergence, categorical_divergence(logits.mT, other.mT))
    assert divergence > 0


# Races.


def test_every_contestant_reads_a_text(tmp_path):
    settings = char.CharTransformerSettings(**SMALL, methods=ALL, width=8, heads=2, length=6)
    text = windows("".join(SYMBOLS[i * i % 90] for i in range(300)), 6)
    folder = execute(race_of(char, settings, text, 8), settings, [0], tmp_path)
    assert_all_stepped(folder)


def test_every_contestant_sees_clothes(tmp_path):
    settings = fashion.FashionCnnSettings(**SMALL, methods=ALL, filters=2)
    folder = execute(race_of(fashion, settings, pictures(1, 28), 16), settings, [0], tmp_path)
    assert_all_stepped(folder)


def test_both_networks_of_the_report_and_its_figures(tmp_path):
    sizes = {"dense_depth": 7, "growth": 2, "wide_depth": 10, "width": 1, "images": 32, "side": 8, "batch": 16}
    settings = cifar.AngCifarSettings(**sizes, epochs=1, looked_at=16)
    assert (settings.steps, settings.evaluations) == (2, 1)
    folder = execute(race_of(cifar, settings, pictures(3, 8), 16), settings, [0], tmp_path)
    assert_all_stepped(folder)
    record = runs(folder)["densenet-k-fac.seed-0"]
    assert [row["epoch"] for row in record.rows] == [0.0, 0.5, 1.0]
    assert 0 <= record.rows[-1]["test_precision"] <= 1
    for result in results(folder, *cifar.tasks(settings)):
        assert [plot.name for plot in plots(result)][:2] == ["precision-epochs", "precision-seconds"]
        assert "Precision is the mean over classes" in result.task.note


def assert_all_stepped(folder):
    records = runs(folder).values()
    assert len(records) >= 5
    assert all(record.end["end"] == "steps" for record in records)
    for task in {record.header["task"] for record in records}:
        starts = {record.rows[0]["train_loss"] for record in records if record.header["task"] == task}
        assert len(starts) == 1


def test_an_embedding_and_the_logits_are_not_muon_s():
    settings = char.CharTransformerSettings()
    (task,) = char.tasks(settings)
    (muon,) = [contestant for contestant in task.contestants if contestant.name == "Muon and Adam"]
    model = task.model()
    optimizer = muon.build(model, task.criterion, muon.grid[0])
    left = {id(p) for p in optimizer.param_groups[1]["params"]}
    assert {id(p) for p in (model.symbol.weight, model.place.weight, model.head.weight)} <= left
