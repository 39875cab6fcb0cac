"""What an experiment is, and where each one is found by its name.

`EXPERIMENTS` maps a name to where it is, "module:attribute"; modules are imported when they are asked for. An
experiment is named pieces of work and a page told from their numbers; `race` makes one in which contestants minimise
the same losses.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from natgrad_lab.experiments.base import Choice, Contestant, LabError, Task
from natgrad_lab.experiments.frame import Experiment, Findings, Interrupted, Piece, PieceRun, execute, interruptible
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled, join_unlabelled
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import override

__all__ = [
    "EXPERIMENTS",
    "Choice",
    "Contestant",
    "Experiment",
    "Findings",
    "Interrupted",
    "LabError",
    "Picture",
    "Piece",
    "PieceRun",
    "Section",
    "Story",
    "Table",
    "Task",
    "draw_another_batch",
    "draw_unlabelled",
    "execute",
    "find",
    "interruptible",
    "join_unlabelled",
    "override",
    "race",
]

EXPERIMENTS = {
    "boltzmann_ratio": "natgrad_lab.energies.boltzmann_ratio:STUDY",
    "boltzmann_digits": "natgrad_lab.energies.boltzmann_digits:STUDY",
    "digits": "natgrad_lab.networks.digits:RACE",
    "fashion": "natgrad_lab.networks.digits:FASHION",
    "fashion_cnn": "natgrad_lab.networks.fashion_cnn:RACE",
    "autoencoder": "natgrad_lab.networks.autoencoder:RACE",
    "char_transformer": "natgrad_lab.networks.char_transformer:RACE",
    "llama_text": "natgrad_lab.networks.llama_text:RACE",
    "vit_cifar": "natgrad_lab.networks.vit_cifar:RACE",
    "vae_mnist": "natgrad_lab.networks.vae_mnist:RACE",
    "survival": "natgrad_lab.networks.survival:RACE",
    "ang_2020_cifar": "natgrad_lab.papers.ang_2020.cifar:RACE",
    "arbel_2020_toy": "natgrad_lab.papers.arbel_2020.toy:STUDY",
    "arbel_2020_cifar": "natgrad_lab.papers.arbel_2020.cifar:RACE",
    "koster_2010_natural_images": "natgrad_lab.papers.koster_2010.natural_images:STUDY",
    "karakida_2016_table1": "natgrad_lab.papers.karakida_2016.runs:TABLE1",
    "karakida_2016_figure1": "natgrad_lab.papers.karakida_2016.runs:FIGURE1",
    "karakida_2016_gap": "natgrad_lab.papers.karakida_2016.runs:GAP",
    "malago_2023_toy": "natgrad_lab.papers.malago_2023.flows:TOY_STUDY",
    "malago_2023_polynomials": "natgrad_lab.papers.malago_2023.flows:POLYNOMIALS",
    "malago_2023_quadratic": "natgrad_lab.papers.malago_2023.flows:QUADRATIC",
    "malago_2023_kl_balls": "natgrad_lab.papers.malago_2023.points:BALLS",
    "malago_2023_polarization": "natgrad_lab.papers.malago_2023.points:POLARIZATION",
    "malago_2023_convergence": "natgrad_lab.papers.malago_2023.points:CONVERGENCE",
    "pascanu_2013_faces": "natgrad_lab.papers.pascanu_2013.table1:FACES_RACE",
    "pascanu_2013_figure1": "natgrad_lab.papers.pascanu_2013.figure1:STUDY",
    "pascanu_2013_mnist": "natgrad_lab.papers.pascanu_2013.table1:MNIST_RACE",
    "pascanu_2013_order": "natgrad_lab.papers.pascanu_2013.order:STUDY",
    "pascanu_2013_restricted_mnist": "natgrad_lab.papers.pascanu_2013.table1:RESTRICTED_RACE",
    "policy_cartpole": "natgrad_lab.policies.runs:CARTPOLE",
    "policy_acrobot": "natgrad_lab.policies.runs:ACROBOT",
    "policy_pendulum": "natgrad_lab.policies.runs:PENDULUM",
    "score_energy_net": "natgrad_lab.energies.score_energy_net:STUDY",
    "pinn_poisson": "natgrad_lab.equations.pinn:POISSON",
    "pinn_heat": "natgrad_lab.equations.pinn:HEAT",
    "pinn_helmholtz": "natgrad_lab.equations.pinn:HELMHOLTZ",
    "pinn_burgers": "natgrad_lab.equations.pinn:BURGERS",
    "pinn_allen_cahn": "natgrad_lab.equations.pinn:ALLEN_CAHN",
    "pinn_inverse": "natgrad_lab.equations.pinn:INVERSE",
    "varady_2022_lines": "natgrad_lab.papers.varady_2022.runs:LINES",
    "varady_2022_digits": "natgrad_lab.papers.varady_2022.runs:DIGITS",
    "varady_2022_mnist": "natgrad_lab.papers.varady_2022.runs:MNIST",
    "varady_2022_fashion": "natgrad_lab.papers.varady_2022.runs:FASHION",
    "varady_2022_faces": "natgrad_lab.papers.varady_2022.runs:FACES",
    "vmc_ising": "natgrad_lab.quantum.runs:ISING",
    "vmc_helium": "natgrad_lab.quantum.runs:HELIUM",
}


def find(name: str) -> Experiment:
    """The experiment of that name.

    Args:
        name: As `natgrad list` shows it.

    Raises:
        LabError: For an unknown one, with the nearest known name.
    """
    if name not in EXPERIMENTS:
        near = get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see `natgrad list`"
        raise LabError(f"there is no experiment {name!r}: {hint}")
    module, _, attribute = EXPERIMENTS[name].partition(":")
    return getattr(import_module(module), attribute)
