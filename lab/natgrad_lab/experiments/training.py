"""One run: a model trained by one contestant from one seed, giving plain numbers per step.

A run is a value that can be put down after any step and taken up again: `state_dict` is complete, the order of the
examples is a function of seed and epoch alone, and nothing but the seconds depends on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

import natgrad as ng
from natgrad_lab.data import Split
from natgrad_lab.experiments.base import Budget, Job, Rows
from natgrad_lab.experiments.frame import PieceRun
from natgrad_lab.experiments.records import Numbers

OURS = (ng.NaturalGradient, ng.StructuredNaturalGradient)  # they compute the loss themselves
PROBE = 1000  # training examples on which the KL moved by a step is measured
CHUNK = 200  # examples evaluated at once: with 1000 and more a small convolutional network took up to twice the time


class Training:
    """Iterate over it for the rows of a run: row 0 is the state before the first step.

    Each row has step, epoch (a fraction), seconds (of training so far), loss (on the step's batch) and what the
    optimiser reports of itself; rows of evaluated steps have train_loss, test_loss, train_error, test_error, and
    valid_loss, valid_error where there is such a part; the row after an evaluated one has kl_measured, KL(before the
    step, after the step) on the first 1000 training examples.
    """

    def __init__(self, job: Job, budget: Budget, pool: Split, device: str = "cpu") -> None:
        self.job, self.budget, self.device = job, job.within(budget), device
        self.examples = examples = job.task.examples(pool, job.seed)
        torch.manual_seed(job.seed)
        self.model = job.task.model().to(device)
        self.optimizer = job.contestant.build(self.model, job.task.criterion, job.choice)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.order = Order(len(examples.train_x), int(job.choice["batch"]), job.seed)
        self.steps, self.seconds, self.evaluated, self.finite = 0, 0.0, -1, True

    @property
    def is_finished(self) -> bool:
        """Whether the budget is spent, or the loss no longer finite."""
        out_of_steps = self.budget.steps is not None and self.steps >= self.budget.steps
        return not self.finite or out_of_steps or self.seconds >= self.budget.seconds

    def __iter__(self) -> Iterator[Numbers]:
        if self.evaluated < 0:
            yield self._add_evaluation({"step": 0, "epoch": 0.0, "seconds": 0.0})
        while not self.is_finished:
            yield self.advance()

    def advance(self) -> Numbers:
        """One step of training and, where one is due, an evaluation."""
        before = self._probe() if self.evaluated == self.steps else None
        marks = self.budget.marks(self.steps, self.seconds)
        loss = self._step()
        epoch = self.steps / self.order.per_epoch
        row = {"step": self.steps, "epoch": epoch, "seconds": self.seconds, "loss": loss}
        row |= report(self.optimizer)
        if before is not None:
            self._recalibrate()
            row["kl_measured"] = self.job.task.divergence(before, self._probe()).item()
        passed = self.budget.marks(self.steps, self.seconds) > marks
        due = self.is_finished or passed or self.steps >= max(1, self.evaluated * self.budget.growth)
        return self._add_evaluation(row) if due else row

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "counters": [self.steps, self.seconds, self.evaluated, self.finite],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.steps, self.seconds, self.evaluated, self.finite = state["counters"]

    def _step(self) -> float:
        start = clock(self.device)
        rows = self.order.batch(self.steps, self.device)
        loss = self._backward(rows)
        self.finite = math.isfinite(loss)
        if self.finite:
            self._schedule()
            if (observes := self.job.contestant.observes) is not None:
                assert isinstance(self.optimizer, ng.NaturalGradient)
                self.optimizer.observe(observes(self.examples, rows, self.job.seed, self.steps))
            self.optimizer.step()
        self.seconds += clock(self.device) - start
        self.steps += 1
        return loss

    def _schedule(self) -> None:
        contestant, factor = self.job.contestant, 1.0
        if contestant.schedule is None and contestant.falls is None:
            return
        if contestant.schedule is not None:
            factor *= contestant.schedule(self.steps + 1)
        if contestant.falls is not None:
            factor *= contestant.falls(min(self.budget.spent_part(self.steps, self.seconds), 1.0))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def _backward(self, batch: Rows) -> float:
        """The gradient of scale * criterion, but of the criterion itself for natgrad, which knows the loss's units."""
        task, inputs, targets = self.job.task, self.examples.train_x[batch], self.examples.train_y[batch]
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        if knows_criterion(self.optimizer):
            loss, unit = self.optimizer.loss(task.hear(outputs), targets), task.scale
        else:
            loss, unit = task.scale * task.criterion(task.hear(outputs), targets), 1.0
        if task.besides is not None:
            loss = loss + task.besides(outputs) / unit
        loss.backward()
        return unit * loss.item()

    def _add_evaluation(self, row: Numbers) -> Numbers:
        self.evaluated = self.steps
        self._recalibrate()
        task, examples, many = self.job.task, self.examples, self.budget.looked_at
        for part in examples.parts:
            inputs, targets = getattr(examples, f"{part}_x")[:many], getattr(examples, f"{part}_y")[:many]
            outputs = self._outputs(inputs)
            row[f"{part}_loss"] = task.scale * task.criterion(task.hear(outputs), targets).item()
            if task.besides is not None:
                row[f"{part}_loss"] += task.besides(outputs).item()
            outputs = task.hear(outputs)
            if task.error is not None:
                row[f"{part}_error"] = task.error(outputs, targets).item()
            row |= {f"{part}_{name}": number(outputs, targets).item() for name, number in (task.also or {}).items()}
        return row

    def _recalibrate(self) -> None:
        if many := self.job.task.recalibrated_on:
            ng.recalibrate(self.model, self.examples.train_x[:many].split(CHUNK))

    def _probe(self) -> Tensor:
        return self.job.task.hear(self._outputs(self.examples.train_x[: min(PROBE, self.budget.looked_at)]))

    @torch.no_grad()
    def _outputs(self, inputs: Tensor) -> Tensor:
        training, optimizer = self.model.training, cast("Any", self.optimizer)
        averages = hasattr(optimizer, "eval")  # as schedule-free ones, which evaluate at an average
        self.model.eval()
        if averages:
            optimizer.eval()
        try:
            return torch.cat([self.model(part) for part in inputs.split(CHUNK)])
        finally:
            self.model.train(training)
            if averages:
                optimizer.train()


class Order:
    """Which examples a step sees: each epoch a permutation of its own, cut into full batches. size: 0 for all."""

    def __init__(self, n: int, size: int, seed: int) -> None:
        self.n, self.size, self.seed = n, min(size, n) or n, seed
        self.per_epoch = self.n // self.size
        self.epoch, self.permutation = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int, device: str) -> Rows:
        """Indices (b,) of the examples for step number `step`, counted from 0."""
        if self.size == self.n:
            return slice(None)
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.permutation = epoch, torch.randperm(self.n, generator=generator).to(device)
        return self.permutation[place * self.size : (place + 1) * self.size]


def knows_criterion(optimizer: torch.optim.Optimizer) -> TypeGuard[ng.NaturalGradient | ng.StructuredNaturalGradient]:
    """Whether the optimiser computes the loss itself: natgrad's, unless its metric is of no likelihood."""
    if isinstance(optimizer, ng.NaturalGradient):
        return hasattr(optimizer.metric, "criterion")
    return isinstance(optimizer, OURS)


REPORTED = ("kl", "damping", "ratio", "solver_steps", "residual", "rate", "status", "failures")
OF_STRUCTURES = ("kl", "rate", "status", "failures")  # they solve in closed form


def report(optimizer: torch.optim.Optimizer) -> Numbers:
    """What a natgrad optimiser tells of its last step; nothing for others."""
    if not isinstance(optimizer, OURS):
        return {}
    names = REPORTED if isinstance(optimizer, ng.NaturalGradient) else OF_STRUCTURES
    return {name: getattr(optimizer.state_report(), name) for name in names}


def clock(device: str) -> float:
    """CPU seconds where one thread works; else those of the wall clock, on an accelerator once it is idle."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def follow_clock(
    run: PieceRun, seconds: float, looks: int, step: Callable[[float], object], look: Callable[[], tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """(CPU seconds, steps, *look()) at the start and so many times; step(share of the seconds that is over)."""
    spent, steps, curve = 0.0, 0, [(0.0, 0, *look())]
    while spent < seconds:
        run.advance(spent / seconds)
        began = time.process_time()
        step(spent / seconds)
        spent, steps = spent + time.process_time() - began, steps + 1
        if spent >= seconds * len(curve) / looks:
            curve.append((spent, steps, *look()))
    return curve


def warm_up(job: Job, budget: Budget, pool: Split, device: str) -> None:
    """Two steps that are thrown away: the first calls of a process are slow, whoever makes them."""
    training = Training(job, budget, pool, device)
    for _ in range(2):
        training.advance()
