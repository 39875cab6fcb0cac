"""Races of a Llama, a vision transformer, ResNet-20, a variational autoencoder and survival times, on stand-ins."""

import math

import pytest
import torch
from small_races import runs
from test_networks import ALL, SMALL, assert_all_stepped, assert_looks_back_alone, pictures, race_of
from torch import nn

import natgrad as ng
from natgrad.testing import check_family
from natgrad_lab.data import Split
from natgrad_lab.experiments import LabError, execute, find
from natgrad_lab.networks import char_transformer, fashion_cnn, llama_text, survival, vae_mnist, vit_cifar
from natgrad_lab.networks.char_transformer import SYMBOLS, windows
from natgrad_lab.networks.vit_cifar import resnet
from natgrad_lab.papers.ang_2020 import cifar

MODULES = {"llama_text": llama_text, "vit_cifar": vit_cifar, "vae_mnist": vae_mnist, "survival": survival}
MODULES |= {"char_transformer": char_transformer, "fashion_cnn": fashion_cnn, "ang_2020_cifar": cifar}


@pytest.mark.parametrize("name", MODULES)
def test_the_races_as_they_are_registered(name):
    assert find(name) is MODULES[name].RACE
    for task in MODULES[name].tasks(MODULES[name].RACE.settings()):
        assert len({len(contestant.grid) for contestant in task.contestants if contestant.has_choices}) == 1


# A Llama.


def small_llama(**choices):
    return llama_text.Llama(
        **{"symbols": 7, "width": 8, "heads": 2, "groups": 1, "layers": 2, "tied": False, **choices}
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_does_not_look_ahead(tied):
    torch.manual_seed(0)
    assert_looks_back_alone(small_llama(tied=tied))


def test_rotations_see_distances_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = [llama_text.rotate(x.expand(1, 1, 6, 8)) for x in (query, key)]
    products = (turned[0] @ turned[1].mT)[0, 0]
    for distance in range(-4, 5):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along))
    assert torch.allclose(turned[0].norm(dim=-1), query.norm().expand(1, 1, 6))


def test_queries_of_a_group_share_keys_and_values():
    model = small_llama(heads=4, groups=2, width=16)
    block = model.blocks[0]
    assert block.key.weight.shape == block.value.weight.shape == (8, 16)
    assert block.query.weight.shape == (16, 16)


def test_a_tied_llama_has_one_matrix_for_symbols():
    model = small_llama(tied=True)
    assert model.head.weight is model.symbol.weight
    assert small_llama().head.weight.shape == model.head.weight.shape


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"heads": 4, "groups": 3}])
def test_sizes_that_do_not_divide_are_refused(sizes):
    with pytest.raises(LabError, match="expected heads that divide half the width"):
        small_llama(**sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_every_contestant_reads_a_text_with_a_llama(tmp_path, tied):
    settings = llama_text.LlamaTextSettings(
        **SMALL, methods="kfac,adam,muon,soap,sgd", width=8, heads=2, groups=1, length=6, tied=tied
    )
    text = windows("".join(SYMBOLS[i * i % 90] for i in range(300)), 6)
    assert_all_stepped(execute(race_of(llama_text, settings, text, 8), settings, [0], tmp_path))


# Pictures.


def test_resnet_20_has_20_layers_with_weights():
    model = resnet(filters=16, blocks=3)
    weighted = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(weighted) == 20
    assert sum(p.numel() for layer in weighted for p in layer.parameters()) == pytest.approx(0.27e6, rel=0.02)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_a_short_cut_adds_channels_of_zeros():
    block = vit_cifar.ResNetBlock(2, 4, stride=2).eval()
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(1, 2, 6, 6)
    outputs = block(x)
    assert torch.equal(outputs[:, :2], x[:, :, ::2, ::2])
    assert not outputs[:, 2:].any()


def test_every_contestant_sees_pictures_with_both_networks(tmp_path):
    sizes = {"layers": 1, "width": 6, "heads": 2, "patch": 8, "filters": 2, "blocks": 1}
    settings = vit_cifar.VitCifarSettings(**SMALL, methods="kfac,adam,muon,soap,sgd", networks="vit,resnet", **sizes)
    folder = execute(race_of(vit_cifar, settings, pictures(3, 32), 16), settings, [0], tmp_path)
    assert_all_stepped(folder)
    assert {record.header["task"] for record in runs(folder).values()} == {"vit", "resnet"}


@pytest.mark.parametrize(("race", "known"), [(vit_cifar, "vit, resnet"), (cifar, "densenet, wide_resnet")])
def test_an_unknown_network_is_refused(race, known):
    with pytest.raises(LabError, match=f"networks has the word 'lenet', expected words among {known}"):
        race.tasks(race.RACE.settings(networks="lenet"))


# A variational autoencoder.


def test_the_divergence_from_the_prior_is_torch_s():
    posterior = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    mean, log_variance = posterior.chunk(2, dim=1)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, (log_variance / 2).exp()), normal(0.0, 1.0))
    assert torch.allclose(vae_mnist.divergence_from_prior(posterior), expected.sum(1).mean())


def test_evaluations_of_a_variational_autoencoder_agree_and_training_passes_do_not():
    torch.manual_seed(0)
    model, x = vae_mnist.VAE(16, 8, 3), torch.rand(4, 16)
    assert model(x).shape == (4, 16 + 6)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.filterwarnings("ignore:a large part of the gradient")
def test_every_contestant_compresses_digits(tmp_path):
    settings = vae_mnist.VaeSettings(**SMALL, methods=ALL, data="digits", hidden=6, code=2)
    x = torch.rand(48, 64, generator=torch.Generator().manual_seed(0))
    data = Split(x[:32], x[:32], x[32:], x[32:])
    folder = execute(race_of(vae_mnist, settings, data, 16), settings, [0], tmp_path)
    assert_all_stepped(folder)
    starts = [record.rows[0]["train_loss"] for record in runs(folder).values()]
    assert starts[0] > 64 * math.log(2) * 0.9  # both parts are there, in nats per image


# Survival.


@pytest.mark.parametrize("hazard", survival.HAZARDS)
def test_a_hazard_is_a_likelihood(hazard):
    likelihood = survival.HAZARDS[hazard]
    outputs = 0.3 * torch.randn(6, likelihood.numbers, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check_family(likelihood, outputs)


@pytest.mark.parametrize("hazard", survival.HAZARDS)
def test_a_hazard_is_torch_s_distribution(hazard):
    outputs, targets = torch.tensor([[0.3, 0.2], [-0.4, -0.1]]), torch.tensor([[0.7, 1.0], [survival.END, 0.0]])
    laws = {
        "weibull": torch.distributions.Weibull((-outputs[:, 0]).exp(), outputs[:, 1].exp()),
        "exponential": torch.distributions.Exponential(outputs[:, 0].exp()),
    }
    likelihood, law = survival.HAZARDS[hazard], laws[hazard]
    expected = torch.stack([-law.log_prob(targets[0, 0])[0], -(1 - law.cdf(targets[1, 0])[1]).log()])
    assert torch.allclose(likelihood.nll(outputs[:, : likelihood.numbers], targets), expected, atol=1e-6)


def test_drawn_patients_die_as_often_as_the_law_says():
    outputs = torch.tensor([[-0.7, 0.3]]).repeat(20_000, 1)
    drawn = survival.HAZARDS["weibull"].sample(outputs, torch.Generator().manual_seed(0))
    alive = math.exp(-((math.exp(-0.7) * survival.END) ** math.exp(0.3)))
    assert float(1 - drawn[:, 1].mean()) == pytest.approx(alive, abs=4 * (alive * (1 - alive) / 20_000) ** 0.5)
    assert bool((drawn[:, 0] <= survival.END).all())


def test_the_truth_scores_better_than_a_constant():
    examples = survival.patients(2000)
    weibull = survival.HAZARDS["weibull"]
    constant = survival.truth(examples.test_x).mean(0).expand(len(examples.test_x), 2)
    assert survival.compute_true_loss(2000) < weibull(constant, examples.test_y)


@pytest.mark.parametrize("hazard", survival.HAZARDS)
def test_every_contestant_predicts_survival(tmp_path, hazard):
    settings = survival.SurvivalSettings(**{**SMALL, "steps": 3}, methods=ALL, hazard=hazard, patients=200)
    folder = execute(race_of(survival, settings, survival.patients(200), 64), settings, [0], tmp_path)
    assert_all_stepped(folder)


def test_the_natural_gradient_finds_the_law_of_survival():
    (task,) = survival.tasks(survival.SurvivalSettings(methods="kfac"))
    torch.manual_seed(0)
    model, examples, steps = task.model(), survival.patients(2000), 30
    opt = ng.kfac(model, task.criterion)
    falling = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / (steps + 1))
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        losses.append(opt.loss(model(examples.train_x), examples.train_y))
        losses[-1].backward()
        opt.step()
        falling.step()
    assert losses[0] - losses[-1] > 0.7 * (losses[0] - survival.compute_true_loss(2000))


def test_targets_that_are_no_times_are_refused():
    with pytest.raises(ValueError, match=r"expected \(3, 2\): times and deaths"):
        survival.HAZARDS["weibull"].check_targets(torch.zeros(3, 2), torch.zeros(3))
