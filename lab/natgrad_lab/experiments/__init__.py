"""What an experiment is, and where each one is found by its name.

`EXPERIMENTS` maps a name to where it is, "module:attribute"; modules are imported when they are asked for. There are
two kinds: a `Race` sets contestants against each other, a `Study` does pieces of work and tells what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import singledispatch
from importlib import import_module
from pathlib import Path
from typing import Any

from natgrad_lab.experiments.base import Budget, Choice, Contestant, Job, LabError, Race, Task, TaskData
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled, join_unlabelled
from natgrad_lab.experiments.race import Interrupted, Silence, Watcher, interruptible
from natgrad_lab.experiments.race import execute as execute_race
from natgrad_lab.experiments.records import Folder
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import describe_settings, override
from natgrad_lab.experiments.study import Findings, Piece, Study, StudyRun, StudyState
from natgrad_lab.experiments.study import execute as execute_study
from natgrad_lab.experiments.training import Training

__all__ = [
    "EXPERIMENTS",
    "MINUTES",
    "Choice",
    "Contestant",
    "Findings",
    "Interrupted",
    "LabError",
    "Picture",
    "Piece",
    "Race",
    "Section",
    "Story",
    "Study",
    "StudyRun",
    "Table",
    "Task",
    "TaskData",
    "draw_another_batch",
    "draw_unlabelled",
    "execute",
    "find",
    "interruptible",
    "join_unlabelled",
    "override",
]

EXPERIMENTS = {
    "boltzmann_ratio": "natgrad_lab.energies.boltzmann_ratio:STUDY",
    "boltzmann_digits": "natgrad_lab.energies.boltzmann_digits:STUDY",
    "digits": "natgrad_lab.networks.digits:RACE",
    "fashion": "natgrad_lab.networks.fashion:RACE",
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
    "pascanu_2013_faces": "natgrad_lab.papers.pascanu_2013.faces:RACE",
    "pascanu_2013_figure1": "natgrad_lab.papers.pascanu_2013.figure1:STUDY",
    "pascanu_2013_mnist": "natgrad_lab.papers.pascanu_2013.mnist:RACE",
    "pascanu_2013_order": "natgrad_lab.papers.pascanu_2013.order:STUDY",
    "pascanu_2013_restricted_mnist": "natgrad_lab.papers.pascanu_2013.restricted_mnist:RACE",
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

MINUTES: dict[str, float] = {
    "boltzmann_ratio": 3,
    "boltzmann_digits": 8,
    "digits": 3,
    "fashion": 30,
    "fashion_cnn": 15,
    "autoencoder": 60,
    "char_transformer": 15,
    "llama_text": 15,
    "vit_cifar": 45,
    "vae_mnist": 15,
    "survival": 5,
    "ang_2020_cifar": 15,
    "arbel_2020_toy": 2,
    "arbel_2020_cifar": 10,
    "koster_2010_natural_images": 3,
    "karakida_2016_table1": 10,
    "karakida_2016_figure1": 4,
    "karakida_2016_gap": 15,
    "malago_2023_toy": 0.15,
    "malago_2023_polynomials": 0.33,
    "malago_2023_quadratic": 0.22,
    "malago_2023_kl_balls": 0.07,
    "malago_2023_polarization": 0.08,
    "malago_2023_convergence": 0.14,
    "pascanu_2013_faces": 15,
    "pascanu_2013_figure1": 0.7,
    "pascanu_2013_mnist": 15,
    "pascanu_2013_order": 15,
    "pascanu_2013_restricted_mnist": 15,
    "policy_cartpole": 20,
    "policy_acrobot": 30,
    "policy_pendulum": 20,
    "pinn_poisson": 1,
    "pinn_heat": 1,
    "pinn_helmholtz": 1,
    "pinn_burgers": 2.5,
    "pinn_allen_cahn": 2.5,
    "pinn_inverse": 1,
    "score_energy_net": 3,
    "vmc_ising": 2,
    "vmc_helium": 60,
    "varady_2022_lines": 7,
    "varady_2022_digits": 7,
    "varady_2022_mnist": 60,
    "varady_2022_fashion": 60,
    "varady_2022_faces": 60,
}
"""About what each takes with its defaults on one core of a server of 2025: measured, or reckoned from its settings."""


def find(name: str) -> Any:
    """The experiment of that name, a Race or a Study.

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


@singledispatch
def execute(
    experiment: Race | Study,
    settings: Any,
    seeds: Sequence[int],
    path: Path,
    watcher: Any = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Folder:
    """Run what is not yet finished of a race or a study.

    Args:
        experiment: As `find` gives it.
        settings: Its settings.
        seeds: Of the runs that are repeated.
        path: The folder of the records.
        watcher: What is told of the progress: a `Watcher` for a race, a function of a `StudyState` for a study.
        stopped: Whether to stop; what is finished is kept.

    Returns:
        The folder.

    Raises:
        Interrupted: Once `stopped()` is true.
        LabError: For seeds, settings or a folder that will not do.
    """
    raise TypeError(f"experiment is {type(experiment).__name__}, expected a Race or a Study")


execute.register(Race, execute_race)
execute.register(Study, execute_study)


def run(race: Race, settings: Any, seed: int, task: str, contestant: str, index: int = 0) -> list[dict[str, Any]]:
    """One run in memory: its rows, plain numbers per step."""
    job = _job(race.tasks(settings), seed, task, contestant, index)
    examples = job.task.data().to(settings.device)
    return list(Training(job, race.budget(settings, job.task), examples, settings.device))


def _job(tasks: tuple[Task, ...], seed: int, task: str, contestant: str, index: int) -> Job:
    for one in tasks:
        for other in one.contestants:
            if one.name == task and other.name == contestant:
                return Job(one, other, index, seed, "race")
    known = ", ".join(f"{t.name}: {', '.join(c.name for c in t.contestants)}" for t in tasks)
    raise LabError(f"no {contestant!r} on {task!r}, expected one of {known}")
