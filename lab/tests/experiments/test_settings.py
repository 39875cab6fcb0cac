"""Settings: their types on the command line, and what no run can have, refused at the door of every experiment."""

import pytest

from natgrad_lab.experiments import LabError, find, override
from natgrad_lab.experiments.base import Budget
from natgrad_lab.experiments.settings import parse


def test_settings_take_the_type_they_are_annotated_with():
    settings = override(find("digits").settings, ["seconds=3", "steps=20", "steps=7", "device=cuda"])
    assert (settings.seconds, settings.steps, settings.device) == (3.0, 7, "cuda")
    assert override(find("digits").settings, ["steps=none"]).steps is None
    assert parse("flag", "yes", bool) is True


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("second=3", "expected one of seconds, steps"),
        ("seconds=fast", "--set seconds=fast: expected a number"),
        ("seconds=nan", "--set seconds=nan: expected a number"),
        ("steps=1.5", "expected a whole number of at least 0 or none"),
        ("steps=-1", "expected a whole number of at least 0 or none"),
        ("steps", "has no equals sign"),
    ],
)
def test_wrong_settings_say_what_is_expected(assignment, said):
    with pytest.raises(LabError, match=said):
        override(find("digits").settings, [assignment])


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"seconds": float("nan")}, {"steps": 0}, {"evaluations": 0}])
def test_impossible_budgets_are_refused(wrong):
    with pytest.raises(LabError, match="expected"):
        Budget(**{"seconds": 1.0, **wrong})


NUMBERS = {  # experiment -> settings with numbers that are below what a run can have
    "ang_2020_cifar": ("epochs=0",),
    "arbel_2020_cifar": ("side=20", "condition=0.5", "damping=0"),
    "arbel_2020_toy": ("condition=0.5", "samples=3"),
    "boltzmann_digits": ("fit=0", "chains=1"),
    "boltzmann_ratio": ("units=30", "tuning=0", "goal=0"),
    "char_transformer": ("layers=0", "width=0", "heads=0", "length=0"),
    "fashion_cnn": ("filters=0",),
    "karakida_2016_table1": ("processes=0", "runs=0", "rate=0"),
    "koster_2010_natural_images": ("batch=0", "products=0", "feature_every=0", "damping=0", "adam=0", "keep=256",
                                   "patches=10", "seconds=0"),
    "llama_text": ("layers=0", "width=0", "heads=0", "groups=0", "length=0"),
    "malago_2023_toy": ("starts=1",),
    "malago_2023_kl_balls": ("radius=0", "bits=20"),
    "pascanu_2013_faces": ("batch=0", "products=0", "floor=-1", "fall=0"),
    "pascanu_2013_figure1": ("std=0", "steps=1", "later=0"),
    "pascanu_2013_mnist": ("batch=0", "products=0", "floor=-1", "fall=0"),
    "pascanu_2013_order": ("rtol=-1", "runs=1", "batch=0", "damping=-1", "steps=5000"),
    "pascanu_2013_restricted_mnist": ("batch=0", "products=0", "choice=6"),
    "pinn_poisson": ("seconds=0", "width=0", "depth=0", "adam=-1"),
    "policy_cartpole": ("steps=0", "episodes=0"),
    "score_energy_net": ("batch=0", "kfac=-1", "signal=1", "move=0", "noise=0"),
    "survival": ("patients=2",),
    "vae_mnist": ("hidden=0", "code=0"),
    "varady_2022_lines": ("train=0", "test=0", "epochs=0"),
    "vit_cifar": ("layers=0", "width=0", "heads=0", "patch=0", "filters=0", "blocks=0"),
    "vmc_ising": ("steps=0", "samples=0"),
    "autoencoder": ("choices=0",),
}  # fmt: skip


@pytest.mark.parametrize("assignment", [f"{name} {wrong}" for name, given in NUMBERS.items() for wrong in given])
def test_numbers_that_no_run_can_have_are_refused(assignment):
    name, wrong = assignment.split()
    with pytest.raises(LabError, match=f"{wrong.partition('=')[0]} is .*expected "):
        override(find(name).settings, [wrong])


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("ang_2020_cifar", {"batch": 0}, "batch is 0, expected 1 to 2000"),
        ("ang_2020_cifar", {"batch": 3000}, "batch is 3000, expected 1 to 2000"),
        ("ang_2020_cifar", {"side": 20}, "side is 20, expected 8, 16 or 32"),
        ("autoencoder", {"activation": "softmax"}, "activation is 'softmax', expected one of tanh"),
        ("autoencoder", {"start": "zeros"}, "start is 'zeros', expected one of torch"),
        ("autoencoder", {"data": "letters"}, "data has the word 'letters', expected words among mnist"),
        ("autoencoder", {"methods": "kfac,newton"}, r"the word 'newton', expected words among structures, .*, kfac, "),
        ("boltzmann_digits", {"data": "faces"}, "data is 'faces', expected one of digits, mnist"),
        ("boltzmann_ratio", {"data": "faces"}, "data is 'faces', expected one of digits, mnist"),
        ("boltzmann_ratio", {"parts": "faces"}, "words among exact, field, images"),
        ("boltzmann_ratio", {"methods": "SGD"}, "pseudo-likelihood, SGD"),
        ("karakida_2016_table1", {"dtype": "int8"}, "dtype"),
        ("karakida_2016_table1", {"tuned_steps": 1}, "tuned_steps"),
        ("koster_2010_natural_images", {"photographs": "mine"}, "photographs .*kodak"),
        ("koster_2010_natural_images", {"methods": "Adam,Muon"}, "Muon.*natural gradient"),
        ("pascanu_2013_order", {"data": "nist"}, "data is 'nist', expected one of mnist, omniglot"),
        ("policy_cartpole", {"env": "Hopper"}, "env is 'Hopper', expected one of CartPole"),
        ("policy_cartpole", {"marks": "soon"}, "marks"),
        ("score_energy_net", {"tasks": "rings,squares"}, "squares.*spiral"),
        ("survival", {"hazard": "cox"}, "hazard is 'cox', expected one of weibull"),
        ("vae_mnist", {"data": "faces"}, "data is 'faces', expected one of mnist, digits"),
        ("varady_2022_lines", {"data": "cats"}, "data is 'cats', expected one of lines, digits"),
        ("varady_2022_lines", {"sizes": "a-b"}, "sizes is a-b, expected hidden layers such as 32-16"),
        ("varady_2022_lines", {"sizes": "3-0"}, "sizes is 3-0, expected hidden layers such as 32-16"),
        ("varady_2022_lines", {"evaluation": -1}, "evaluation is -1, .*exact"),
        ("varady_2022_lines", {"rates": "nrws:.5"}, "rates .*nrws:.5/10"),
        ("varady_2022_lines", {"rates": "adam:.5/1"}, "rates .*rws-adam"),
        ("varady_2022_lines", {"rates": "nrws:-1/1"}, "rates .*nrws:.5/10"),
        ("varady_2022_lines", {"units": "bits"}, "units is 'bits', expected one of 01, signs"),
        ("varady_2022_lines", {"contestants": "adam"}, "contestants .*rws-adam"),
        ("vmc_ising", {"system": "neon"}, "system is 'neon', expected one of ising"),
        ("vmc_ising", {"rates": "fast"}, "rates"),
        ("vmc_ising", {"samples": -1}, "samples"),
    ],
)
def test_settings_that_will_not_do(name, given, said):
    experiment = find(name)
    with pytest.raises(LabError, match=said):
        experiment.pieces(experiment.settings(**given))
