"""Wake-sleep training, plain and natural: every step draws, teaches both networks and returns the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from natgrad.applications.helmholtz.machine import HelmholtzMachine, as_integer
from natgrad.applications.helmholtz.phases import Algorithm, Lesson, Reweighted, Rows
from natgrad.applications.helmholtz.unit_blocks import EXACT, RADIUS, Kept, fitting, refresh_cost, within
from natgrad.applications.helmholtz.units import Conditional, chain
from natgrad.linalg import all_finite

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class WakeSleep:
    """Trains a Helmholtz machine by plain gradients: `bound = trainer.step(x)`.

    machine: an `ng.HelmholtzMachine`.   lr: learning rate.   samples: draws of h per example.   algorithm:
    `Reweighted()` (reweighted wake-sleep), `Classic()` or `Bidirectional()` from natgrad.applications.helmholtz.
    momentum: of SGD.   optimizer: what takes the steps instead, a function params -> torch optimizer, such as
    `lambda params: torch.optim.Adam(params, 1e-3)`; lr and momentum are not used then.   seed: of the draws.

    `trainer.optimizer` is that optimizer: schedulers attach to it. ValueError for numbers out of range, and at `step`
    for data that do not fit the machine; a batch whose gradients are not finite is skipped and counted in `failures`.
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
    ) -> None:
        if not isinstance(machine, HelmholtzMachine):
            raise TypeError(f"machine is {type(machine).__name__}, expected ng.HelmholtzMachine([784, 200, 10])")
        samples = as_integer(samples, "samples")
        if not isinstance(lr, Real) or not 0 < lr < math.inf:
            raise ValueError(f"lr is {lr!r}, expected a number > 0")
        if not isinstance(momentum, Real) or not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}, expected a number in [0, 1)")
        if optimizer is not None and (isinstance(optimizer, Optimizer) or not callable(optimizer)):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}, expected a function that makes one: lambda params: "
                "torch.optim.Adam(params, 1e-3)"
            )
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise TypeError(f"seed is {seed!r}, expected an integer")
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            raise TypeError(f"algorithm is {algorithm!r}, expected Reweighted(), Classic() or Bidirectional()")
        self.machine, self.samples, self.algorithm = machine, samples, algorithm or Reweighted()
        trained = [p for p in machine.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("machine has no parameter to train: requires_grad is False for all of them")
        self.optimizer = SGD(trained, lr, momentum=momentum) if optimizer is None else optimizer(trained)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise TypeError("optimizer makes LBFGS, which asks for losses: expected one that needs gradients alone")
        self.generator = torch.Generator(trained[0].device).manual_seed(int(seed))
        self.steps, self.failures = 0, 0

    @torch.no_grad()
    def step(self, x: Any) -> float:
        """One step on examples x (b, visible). Returns the bound before it, in nats per example: the mean of log 1/K
        sum_k p(x, h_k) / q(h_k | x), or what the algorithm has instead (`Bidirectional`)."""
        lesson = self.algorithm.lesson(self.machine, self.machine.check(x), self.samples, self.generator)
        found = self._directions(lesson)
        if all(all_finite(direction) for _, direction in found):
            for weight, direction in found:
                weight.grad = -direction
            self.optimizer.step()
            for weight, _ in found:
                weight.grad = None
        else:
            self.failures += 1
        self.steps += 1
        return float(lesson.bound.mean())

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, apart from the machine's own state_dict; `weights_only=True` reads it."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "failures": self.failures,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, bit for bit on the CPU."""
        missing = {"optimizer", "generator", "steps", "failures"} - set(state)
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}: it was not saved by {type(self).__name__}.state_dict()")
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.steps, self.failures = state["steps"], state["failures"]

    def _directions(self, lesson: Lesson) -> list[tuple[Tensor, Tensor]]:
        return [(weight, rows.ascent()) for _, weight, rows in self._taught(lesson)]

    def _taught(self, lesson: Lesson) -> list[tuple[str, Tensor, Rows]]:
        """Name, weight and rows of every layer that is trained."""
        lessons = {"generation": lesson.generation, "recognition": lesson.recognition}
        each = [(f"{network}.{i}", rows) for network, found in lessons.items() for i, rows in enumerate(found)]
        named = [(name, self._layer(name).weight, rows) for name, rows in each]
        return [(name, weight, rows) for name, weight, rows in named if weight.requires_grad]

    def _layer(self, name: str) -> Conditional:
        found = self.machine.get_submodule(name)
        assert isinstance(found, Conditional)
        return found


class NaturalWakeSleep(WakeSleep):
    """Natural (reweighted) wake-sleep, Varady, Volpi, Malago & Ay 2022: one Fisher block per unit, in both networks.

    Each unit's gradient is multiplied by (1 + damping) (F_j + damping I)^-1, F_j = E[s'(W_j a) a a^T] over the samples
    that the gradient is taken over, with their importance weights.   refresh: steps between new estimates and
    inverses; None: so that they cost about a quarter of a plain step on average, counted in operations, and more often
    at first, but never below 10 steps.   decay: weight of the past in a block's running average.   exact: True inverts
    every unit's own block; False takes all blocks of a layer as diagonal in one basis, the 256 leading eigenvectors of
    their mean, where every unit has its own eigenvalues (as in EKFAC, George et al. 2018), and their mean for what is
    left: products then cost as much as the layer itself. None: exact for units with at most 128 inputs, and in
    autoregressive machines.   radius: nats by which a step may move a unit's distribution, in the mean over its inputs:
    E[(lr d_j . a)^2] / 8, a bound on the KL divergence, estimated on 128 of the step's rows; a unit's direction is
    shortened to it. With momentum, lr / (1 - momentum) counts; under another optimizer than SGD nothing is shortened.
    math.inf: none; None: .03 in machines that have units with more than 128 inputs, none in others.   The rest as in
    `WakeSleep`.

    A refresh takes at most 256 rows, or as many as a unit has inputs, drawn by their weights. Exact inverses are
    batched over the units of a layer: by Woodbury where the rows are at most half as many as a unit's inputs (of the
    past as many are kept as this allows), by Cholesky otherwise. One that fails is counted in `failures` and the last
    good one is kept. ValueError for numbers out of range, and for exact=False where units see different inputs (an
    autoregressive machine).
    """

    def __init__(
        self,
        machine: HelmholtzMachine,
        lr: float = 0.1,
        *,
        samples: int = 5,
        damping: float = 0.03,
        refresh: int | None = None,
        decay: float = 0.8,
        exact: bool | None = None,
        radius: float | None = None,
        algorithm: Algorithm | None = None,
        momentum: float = 0.0,
        optimizer: MakeOptimizer | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(damping, Real) or not 0 < damping < math.inf:
            raise ValueError(f"damping is {damping!r}, expected a number > 0: a unit's block may be singular")
        refresh = None if refresh is None else as_integer(refresh, "refresh", ", or None")
        if not isinstance(decay, Real) or not 0 <= decay < 1:
            raise ValueError(f"decay is {decay!r}, expected a number in [0, 1)")
        super().__init__(
            machine,
            lr,
            samples=samples,
            algorithm=algorithm,
            momentum=momentum,
            optimizer=optimizer,
            seed=seed,
        )
        if radius is not None and not (isinstance(radius, Real) and radius > 0):
            raise ValueError(f"radius is {radius!r}, expected nats > 0, math.inf for no bound, or None")
        if exact is not None and not isinstance(exact, (bool, np.bool_)):
            raise ValueError(f"exact is {exact!r}, expected True, False or None")
        exact = None if exact is None else bool(exact)
        if exact is False and machine.autoregressive:
            raise ValueError("exact is False, but the machine's units see different inputs: leave exact=None")
        self.damping, self.refresh, self.decay, self.exact = damping, refresh, decay, exact
        self.radius = self._usual_radius() if radius is None else float(radius)
        self._kept: dict[str, Kept] = {}
        self._refreshed = -1

    def _usual_radius(self) -> float:
        layers = *chain(self.machine.generation), *chain(self.machine.recognition)
        return RADIUS if any(_wide(layer) for layer in layers) else math.inf

    def state_dict(self) -> dict[str, Any]:
        kept = {name: dict(kept.state) for name, kept in self._kept.items()}
        return {**super().state_dict(), "blocks": kept, "refreshed": self._refreshed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "blocks" not in state:
            raise ValueError("state lacks 'blocks': it was not saved by NaturalWakeSleep.state_dict()")
        own = {name for name, part in self.machine.named_modules() if isinstance(part, Conditional)}
        for name, part in state["blocks"].items():
            if name not in own or not fitting(part, self._layer(name).weight):
                raise ValueError(f"state's blocks of {name} are of another machine than {self.machine.sizes}")
        super().load_state_dict(state)
        self._refreshed, self._kept = state["refreshed"], {}
        for name, part in state["blocks"].items():
            self._keeper(name).load(part, self._layer(name).weight)

    def _keeper(self, name: str) -> Kept:
        """What is kept of a layer, empty at first."""
        layer = self._layer(name)
        if name not in self._kept:
            exact = layer.autoregressive or not _wide(layer) if self.exact is None else self.exact
            self._kept[name] = Kept(self.decay, self.damping, {}, layer.seen(), exact)
        self._kept[name].to(layer.weight)
        return self._kept[name]

    def _directions(self, lesson: Lesson) -> list[tuple[Tensor, Tensor]]:
        taught = self._taught(lesson)
        if self._due(taught):
            for name, _, rows in taught:
                self.failures += not self._keeper(name).refresh(rows)
            self._refreshed = self.steps
        rates = self._rates()
        return [(weight, self._natural(name, rows, rates.get(weight, 0.0))) for name, weight, rows in taught]

    def _rates(self) -> dict[Tensor, float]:
        """What a direction that stays the same is multiplied by at every step; only SGD's is known."""
        if not isinstance(self.optimizer, SGD):
            return {}
        groups = self.optimizer.param_groups
        return {p: float(group["lr"]) / (1 - group["momentum"]) for group in groups for p in group["params"]}

    def _natural(self, name: str, rows: Rows, rate: float) -> Tensor:
        inverse, ascent = self._keeper(name).inverse, rows.ascent()
        found = ascent if inverse is None else inverse.mv(ascent.flatten()).view_as(ascent)
        return found if math.isinf(self.radius) else within(self.radius, found, rows, rate)

    def _due(self, taught: list[tuple[str, Tensor, Rows]]) -> bool:
        if self._refreshed < 0 or any(name not in self._kept for name, _, _ in taught):
            return True
        if self.refresh is not None:
            return self.steps - self._refreshed >= self.refresh
        # a machine changes most at first
        return self.steps - self._refreshed >= min(self._affordable(taught), 10 + 2 * self._refreshed)

    def _affordable(self, taught: list[tuple[str, Tensor, Rows]]) -> int:
        """Steps between refreshes at which these cost a quarter of what plain steps do, in multiplications."""
        plain = sum(6 * rows.inputs.numel() * len(weight) for _, weight, rows in taught)
        costs = [refresh_cost(self._keeper(name), weight, rows) for name, weight, rows in taught]
        return max(10, math.ceil(4 * sum(costs) / max(1, plain)))


def _wide(layer: Conditional) -> bool:
    """Whether its units have more inputs, the bias left out, than exact blocks are made for."""
    return layer.weight.shape[1] - 1 > EXACT
