"""Wake-sleep training by plain gradients: every step draws, teaches both networks and returns the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from natgrad.ground.checks import check_integer, check_positive, check_share, is_integer
from natgrad.ground.exchanges import any_asks, share_count, sum_numbers, sum_tensors
from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import explain_calls, write_choices
from natgrad.ground.progress import Callbacks, join_callbacks, run_steps
from natgrad.ground.pure import set_modes_aside
from natgrad.ground.spaces import check_recorded
from natgrad.ground.typed_torch import as_tensor_like
from natgrad.helmholtz.blocks import Taught, thin_rows
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.phases import Algorithm, Lesson, Reweighted
from natgrad.helmholtz.units import LogisticRows
from natgrad.optim import (
    Accidents,
    Attributes,
    OnTrouble,
    Processes,
    guard_steps,
    meet_processes,
    read_parts,
    write_parts,
)

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class WakeSleep:
    """Trains a Helmholtz machine by plain gradients: `bound = trainer.step(x)`.

    `trainer.optimizer` is the torch optimizer that takes the steps: schedulers attach to it. `trainer.lr` is its rate.

    Args:
        machine: What is trained.
        lr: Learning rate of SGD.
        samples: Draws of h per example.
        algorithm: `Reweighted()` (reweighted wake-sleep, the default), `Classic()` or `Bidirectional()` from
            natgrad.helmholtz.
        momentum: Of SGD, in [0, 1).
        optimizer: What takes the steps instead, a function params -> torch optimizer, such as
            `lambda params: torch.optim.Adam(params, 1e-3)`; lr and momentum are not used then.
        seed: Of the draws.
        on_trouble: What a step does that would write a number that is not finite. "skip" leaves it out and counts it in
            `failures`, with a warning at the fifth in a row and RuntimeError at the 25th; "raise": ValueError.
        group: The processes of `torch.distributed` that train one machine, each with examples of its own and draws of
            its own: the step is that of one process with all rows.

    Raises:
        ValueError: For a number out of range; at `step`, for data that do not fit the machine.
        TypeError: For an argument of another kind.

    Example:
        ```python
        machine = ng.HelmholtzMachine([4, 3, 2])
        trainer = ng.WakeSleep(machine, lr=0.1)
        x = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]])
        bound = trainer.step(x)
        bounds = trainer.fit(x, epochs=20)
        ```
    """

    def __init__(
        self,
        machine: HelmholtzMachine,
        lr: float = 0.1,
        *,
        samples: int = 5,
        algorithm: Algorithm | None = None,
        momentum: float = 0.0,
        optimizer: MakeOptimizer | None = None,
        seed: int = 0,
        on_trouble: OnTrouble = "skip",
        group: Any = None,
    ) -> None:
        if not isinstance(machine, HelmholtzMachine):
            raise TypeError(f"machine is {type(machine).__name__}, expected ng.HelmholtzMachine([784, 200, 10])")
        samples = check_integer("samples", samples)
        check_positive("lr", lr)
        check_share("momentum", momentum)
        if optimizer is not None and (isinstance(optimizer, Optimizer) or not callable(optimizer)):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}, expected a function that makes one: lambda params: "
                "torch.optim.Adam(params, 1e-3)"
            )
        if not is_integer(seed):
            raise TypeError(f"seed is {seed!r}, expected an integer")
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            raise TypeError(f"algorithm is {algorithm!r}, expected Reweighted(), Classic() or Bidirectional()")
        self.machine, self.samples, self.algorithm = machine, samples, algorithm or Reweighted()
        trained = [p for p in machine.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("machine has no parameter to train: requires_grad is False for all of them")
        for name, p in machine.named_parameters():
            check_recorded(name, p)
        self.optimizer = SGD(trained, lr, momentum=momentum) if optimizer is None else optimizer(trained)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise TypeError("optimizer makes LBFGS, which asks for losses: expected one that needs gradients alone")
        self.generator = torch.Generator(trained[0].device).manual_seed(int(seed))
        settings = type(self).__name__, lr, samples, self.algorithm, momentum, type(self.optimizer).__name__, seed
        self.processes = meet_processes(dict(machine.named_parameters()), group, *settings)
        self.steps, self.accidents = 0, Accidents(on_trouble)

    def __repr__(self) -> str:
        optimizer = type(self.optimizer).__name__
        choices = {"sizes": self.machine.sizes, "lr": self.lr, "samples": self.samples, "algorithm": self.algorithm}
        return write_choices(self, **choices, optimizer=optimizer, steps=self.steps)

    @property
    def lr(self) -> float:
        """The learning rate of all parameters; it may be changed between steps."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float) -> None:
        check_positive("lr", rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def failures(self) -> int:
        """Steps in which a number was not finite; they were left out, or taken with an earlier inverse."""
        return self.accidents.count

    @set_modes_aside
    @torch.no_grad()
    def step(self, x: Any) -> float:
        """One step: draw, teach both networks. A step that would not be finite is left out.

        Args:
            x: Examples, shape (b, visible). Of several processes (`group=`) some may have none, (0, visible).

        Returns:
            The bound before the step, in nats per example: the mean of log 1/K sum_k p(x, h_k) / q(h_k | x), or what
            the algorithm has instead (`Bidirectional`).

        Raises:
            ValueError: For data that do not fit the machine; with `on_trouble="raise"` where a number is not finite.
        """
        generator = self.processes.generator(self.generator)
        with self.processes.failing_together(self.generator.device):
            lesson = self._draw_lesson(self._check(x), generator)
        joined = join_lesson(lesson, self._read_lesson(lesson), self.processes)
        directions, fresh = self._directions(joined)
        trouble = None if all(all_finite(direction) for _, direction in directions) else "a direction is not finite"
        if trouble is None and not self._follow(directions):
            trouble = "a weight would not be finite"
        self.steps += 1
        self.accidents.meet(trouble)
        if trouble is None and not fresh:
            self.accidents.count += 1
        return joined.bound

    @set_modes_aside
    @explain_calls
    def fit(
        self,
        x: Tensor,
        epochs: int = 1,
        *,
        batch_size: int = 100,
        callback: Callbacks[WakeSleep] | None = None,
        progress: bool | None = None,
    ) -> list[float]:
        """Steps over all examples, in a new order in each epoch. Ctrl-C ends them after the last whole step.

        Args:
            x: Examples, shape (n, visible).
            epochs: How many times each example is seen.
            batch_size: Examples per step; the last step of an epoch takes what is left.
            callback: Called with the trainer after each step, or a list of such functions; training stops if one
                returns True.
            progress: True for a line that shows how far it is, False for none; None for one where the standard error is
                a terminal.

        Returns:
            The bound before each step, in nats per example.

        Raises:
            ValueError: For a number out of range, and for data that do not fit the machine.
        """
        size, epochs = check_integer("batch_size", batch_size), check_integer("epochs", epochs, 0)
        call = join_callbacks(callback, "the trainer")
        device = self.generator.device
        with self.processes.failing_together(device):
            x = self._check(x)
        most = max(share_count(self.processes, len(x), device))
        bounds, per_epoch = list[float](), math.ceil(most / size)

        def list_batches() -> Iterator[Tensor]:
            for _ in range(epochs):
                generator = self.processes.generator(self.generator)
                order = torch.randperm(len(x), generator=generator, device=device).to(x.device)
                yield from (x[order[place * size : (place + 1) * size]] for place in range(per_epoch))

        batches = list_batches()

        def step() -> dict[str, float]:
            bounds.append(self.step(next(batches)))
            return {"bound": bounds[-1]}

        run_steps(step, "steps", epochs * per_epoch, progress, lambda: any_asks(self.processes, call(self), device))
        return bounds

    def _check(self, x: Any) -> Tensor:
        """x as the machine takes it; no examples where other processes may have some."""
        shape = tuple(getattr(x, "shape", ()))
        if self.processes.size > 1 and shape == (0, self.machine.sizes[0]):
            return as_tensor_like(x, next(self.machine.parameters()))
        return self.machine.check(x)

    def _draw_lesson(self, x: Tensor, generator: torch.Generator) -> Lesson:
        """What a batch (b, visible) teaches both networks; nothing, in the same shapes, if it has no examples."""
        stand_in = x if len(x) else x.new_full((1, x.shape[1]), self.machine.units[0])
        lesson = self.algorithm.lesson(self.machine, stand_in, self.samples, generator)
        if len(x):
            return lesson
        p, q = ([rows.drop_all() for rows in network] for network in (lesson.generation, lesson.recognition))
        return Lesson(p, q, lesson.bound[:0])

    def _follow(self, directions: list[tuple[Tensor, Tensor]]) -> bool:
        """Let the optimizer take a step uphill along the directions. False, and nothing moved, if it overflows."""
        for weight, direction in directions:
            weight.grad = -direction
        _, stands = guard_steps(self.optimizer, self.optimizer.step)
        for weight, _ in directions:
            weight.grad = None
        return stands

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, apart from the machine's own state_dict; `weights_only=True` reads it."""
        return write_parts(self._parts())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, bit for bit on the CPU.

        Args:
            state: What was saved.

        Raises:
            ValueError: If it is of another trainer or machine; this one is as before then.
        """
        read_parts(self._parts(), state, f"{type(self).__name__}.state_dict()", optional={"skipped"})

    def _parts(self) -> dict[str, Any]:
        """What a step changes, the machine apart."""
        return {
            "optimizer": self.optimizer,
            "generator": self.generator,
            "steps": Attributes(self, "steps"),
            "failures": Attributes(self.accidents, "count"),
            "skipped": Attributes(self.accidents, "in_a_row"),
        }

    def _directions(self, lesson: JoinedLesson) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """Every trained weight with the way that it is to go, and whether what that was made with is up to date."""
        return [(weight, ascent) for (_, weight, _), ascent in zip(lesson.taught, lesson.ascents(), strict=True)], True

    def _read_lesson(self, lesson: Lesson) -> Taught:
        """Name, weight and rows of every layer that is trained."""
        lessons = {"generation": lesson.generation, "recognition": lesson.recognition}
        each = [(f"{network}.{i}", rows) for network, layers in lessons.items() for i, rows in enumerate(layers)]
        named = [(name, self.machine.find_layer(name).weight, rows) for name, rows in each]
        return [(name, weight, rows) for name, weight, rows in named if weight.requires_grad]


# Lessons whose examples may lie on several processes: what one process with all rows has


@dataclass(frozen=True)
class JoinedLesson:
    """A step's rows, and what the processes add to one another's."""

    taught: Taught  # the rows' weights sum to this process's share of all examples
    counts: list[int]  # rows of each layer on all processes
    bound: float  # the mean over all examples, in nats
    processes: Processes

    def ascents(self) -> list[Tensor]:
        """Every layer's gradient over the rows of all processes."""
        return sum_tensors(self.processes, [rows.ascent() for _, _, rows in self.taught])

    def gather(self, rows: LogisticRows, most: int) -> LogisticRows:
        """Rows of all processes, at most as many of each; what a Fisher block is made of, without residuals."""
        if self.processes.size == 1:
            return rows
        few = thin_rows(rows, most)
        columns, units = few.inputs.shape[1], few.logits.shape[1]
        gathered = self.processes.gather_rows(torch.cat([few.inputs, few.logits, few.weights.unsqueeze(1)], dim=1))
        inputs, logits, weights = gathered.split([columns, units, 1], dim=1)
        return LogisticRows(inputs, logits[:, :0], logits, weights.squeeze(1), rows.mask)


def join_lesson(lesson: Lesson, taught: Taught, processes: Processes) -> JoinedLesson:
    """A process's lesson with what it weighs among those of all processes, which all call this."""
    counts = [len(rows.inputs) for _, _, rows in taught]
    if processes.size == 1:
        return JoinedLesson(taught, counts, float(lesson.bound.mean()), processes)
    numbers = [len(lesson.bound), float(lesson.bound.sum()), *counts]
    examples, bound, *rows = sum_numbers(processes, numbers, lesson.bound.device)
    if not examples:
        raise ValueError("x is an empty batch on every process; give at least one of them an example")
    share = len(lesson.bound) / examples
    weighed = [(name, weight, part.scale_by(share)) for name, weight, part in taught]
    return JoinedLesson(weighed, [int(count) for count in rows], bound / examples, processes)
