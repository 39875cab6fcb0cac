"""A race of seconds for the laboratory's tests: 40 examples, a dozen parameters, contestants of torch and ours."""

import gzip
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from natgrad_lab.data import Split
from natgrad_lab.experiments import Task
from natgrad_lab.experiments import race as make_race
from natgrad_lab.experiments.base import Budget
from natgrad_lab.experiments.contestants import adam, grid, natural_gradient, sgd
from natgrad_lab.experiments.models import categorical_divergence, mistakes, perceptron
from natgrad_lab.experiments.race_summary import read_runs, result
from natgrad_lab.experiments.records import read

BUDGET = Budget(seconds=60.0, steps=12)


def idx(path, array):
    """A file of bytes as MNIST is published."""
    head = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


@dataclass(frozen=True)
class Settings:
    seconds: float = 60.0
    steps: int | None = 6
    evaluations: int = 40
    looked_at: int = 100
    tuning_seed: int = 100
    threads: int | None = None
    device: str = "cpu"
    factor: float = 1.0


def examples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=generator)
    y = (x.square().sum(1) > 2.5).long()
    return Split(x[:30], y[:30], x[30:], y[30:])


def contestants():
    return (
        sgd(grid(batch=(8,), lr=(0.1, 0.3))),
        adam(grid(batch=(8,), lr=(0.01, 0.1))),
        natural_gradient(grid(batch=(0,), metric=(100,), damping=(1.0, 0.1), products=(10,))),
    )


def task(name="rings", among=None):
    return Task(
        name=name,
        title=f"Two {name}",
        model=lambda: perceptron([3, 4, 2], nn.Tanh),
        data=examples,
        criterion=nn.CrossEntropyLoss(),
        unit="nats",
        divergence=categorical_divergence,
        error=mistakes,
        contestants=among or contestants(),
    )


def race(*tasks):
    return make_race("tiny", "Two rings", Settings, lambda settings: tasks or (task(among=contestants()[:2]),))


RACE = race()


def runs(folder):
    """Name of the record's file -> the run, of all that are finished."""
    places = sorted(folder.records.glob("*.json"))
    return {place.stem: record for place in places for record in read_runs([read(place)])}


def results(folder, *tasks):
    """The numbers of every task."""
    return [result(task, list(runs(folder).values())) for task in tasks]


def on_tasks(experiment, tasks):
    """A race with other tasks: settings -> tasks."""
    return make_race(experiment.name, experiment.summary, experiment.settings, tasks)
