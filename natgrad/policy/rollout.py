"""Steps of a policy in environments: what was seen and done, and the moments that observations are scaled by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from natgrad.ground.chains import Affine, Features, has_hooks, read_chain
from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import write_choices
from natgrad.ground.pure import run_detached
from natgrad.ground.states import Stateful
from natgrad.optim import Processes
from natgrad.policy.actor import Actor
from natgrad.policy.environments import Array, Environments

Change = Callable[[Tensor], Tensor]
ROUNDING = 3e-8  # of a mean: a variance joined from several processes is a difference of squares in float64

CollectedSteps = tuple[list[tuple[Any, ...]], dict[tuple[int, int], Tensor]]
"""Raw steps: states, draws, rows, rewards, whether terminated, over and valid, each (n, ...); and by step and
environment the successors where nothing follows in the batch."""


@torch.no_grad()
def collect_steps(
    actor: Actor, worlds: Environments, scale: ObservationScale, size: int, seed: int, generator: torch.Generator
) -> CollectedSteps:
    """At least `size` transitions with the policy as it is, and as few more as come in step."""
    # While no episode has ended in environments without a time limit, it goes on: until one does, or they are found to
    # be endless. So nothing is learned from a task that never ends. Observations enter the running moments as they
    # come, and are scaled by the moments of then.
    like = next(actor.parameters())
    steps: list[tuple[Any, ...]] = []
    ends: dict[tuple[int, int], Tensor] = {}
    fresh = worlds.observations is None
    observations = worlds.start(seed)
    if fresh:
        scale.learn(observations)
    count, act = 0, prepare_acting(actor)
    while count < size or not worlds.patient:
        states = scale.states(observations, like)
        rows = act(states)
        if not (all_finite(rows) or all_finite(actor.head.kl(rows, rows))):  # logits of -inf are a distribution's too
            raise ValueError("the policy's outputs are not finite: look for a NaN in its parameters, or in a layer")
        draws = actor.head.draw(rows, generator)
        stepped = worlds.step(actor.head.actions(draws))
        over = stepped.over
        count += int(np.count_nonzero(stepped.valid))
        last = count >= size and worlds.patient
        if last or over.any():
            for i in np.flatnonzero((stepped.truncated & ~stepped.terminated) | (last & ~over)):
                ends[len(steps), int(i)] = scale.states(stepped.successors[i : i + 1], like)
        steps.append((states, draws, rows, stepped.rewards, stepped.terminated, over, stepped.valid))
        observations = stepped.following
        scale.learn(observations)
    return steps, ends


def prepare_acting(actor: Actor) -> Change:
    """states (b, ...) -> rows (b, width), without a graph, by the actor's parameters of now."""
    # A plain perceptron of few units spends two thirds of its time in the calls around its products: they are made
    # directly, with the same numbers to the last bit. Every other network is called as it is.
    changes = list_changes(actor)
    if changes is None:
        return lambda states: run_detached(partial(actor, states))

    def act(states: Tensor) -> Tensor:
        outputs = states
        for change in changes:
            outputs = change(outputs)
        return actor.rows(outputs).detach()

    return torch.no_grad()(act)


def list_changes(actor: Actor) -> list[Change] | None:
    """The layers of a plain perceptron as functions of vectors; None for another network."""
    chain = None if actor.valued or has_hooks(actor) or len(actor.order) > 2 else read_chain(actor.policy)
    if chain is None or isinstance(chain.parts[0], Features):
        return None
    state = {name: p.detach() for name, p in actor.policy.named_parameters()}

    def as_change(part: Any) -> Change:
        if not isinstance(part, Affine):
            return part
        return partial(functional.linear, weight=state[part.weight], bias=state.get(part.bias or ""))

    return list(map(as_change, chain.parts))


class ObservationScale:
    """(observation - mean) / std, cut at +-10; the identity where it is off."""

    def __init__(self, shape: tuple[int, ...], on: bool) -> None:
        self.on, self.moments = on, RunningMoments(shape)

    def learn(self, observations: Array) -> None:
        """Take observations (b, *shape) into the running moments."""
        if self.on:
            self.moments.update(observations)

    def __call__(self, observations: Array) -> Array:
        """(b, *shape) -> (b, *shape). Learns nothing."""
        if not self.on or not self.moments.count:
            return observations
        return np.minimum(np.maximum((observations - self.moments.mean) / self.moments.std, -10.0), 10.0)

    def states(self, observations: Array, like: Tensor) -> Tensor:
        """The observations (b, *shape) as the networks get them, in the dtype and on the device of a tensor."""
        return torch.from_numpy(np.ascontiguousarray(self(observations))).to(like.device, like.dtype)


class RunningMoments(Stateful):
    """Mean and variance (population's) of all rows seen, entry by entry: those of numpy over the whole, in float64.

    Args:
        shape: Of one row.
    """

    STATE = ("count", "mean", "var")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean, self.var = np.zeros(shape), np.ones(shape)

    def __repr__(self) -> str:
        return write_choices(self, shape=self.mean.shape, count=self.count)

    def update(self, rows: Array) -> None:
        """Take in rows; exact for batches of any size.

        Args:
            rows: An array (b, *shape).

        Reference:
            Chan, Golub & LeVeque 1979.
        """
        if not len(rows):
            return
        size = len(rows)
        mean = np.add.reduce(rows, 0) / size  # `mean` and `sum` of an array take longer than to add up a few rows
        shift, total, away = mean - self.mean, self.count + size, rows - mean
        squares = (self.var * self.count if self.count else 0.0) + np.add.reduce(away * away, 0)
        squares = squares + shift**2 * (self.count * size / total)
        self.mean, self.var, self.count = self.mean + shift * (size / total), squares / total, total

    @property
    def std(self) -> Array:
        """Standard deviation; 1 where all rows are equal up to rounding, or fewer than two were seen."""
        std = np.sqrt(self.var)
        return np.where((std > ROUNDING * np.abs(self.mean)) & (self.count > 1), std, 1.0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; ValueError for moments of another shape."""
        if tuple(state["mean"].shape) != self.mean.shape:
            raise ValueError(
                f"the saved moments have shape {tuple(state['mean'].shape)}, expected {self.mean.shape}: was it saved "
                "with another environment?"
            )
        super().load_state_dict(state)


def join_moments(processes: Processes, before: RunningMoments, after: RunningMoments) -> RunningMoments:
    """The moments of all that the processes saw, each since the same start."""
    # Chan, Golub & LeVeque 1979, about the mean at the start.
    if processes.size == 1:
        return after
    away = after.mean - before.mean
    squares = after.count * (after.var + away**2) - before.count * before.var
    own = torch.from_numpy(np.stack([after.count * away, squares]))
    counts = processes.share_numbers([after.count - before.count], torch.device("cpu"))
    joined = RunningMoments(before.mean.shape)
    joined.count = before.count + int(sum(count for (count,) in counts))
    if joined.count:
        shift, scatter = processes.sum(own).numpy() / joined.count
        joined.mean = before.mean + shift
        joined.var = np.maximum(scatter + before.count / joined.count * before.var - shift**2, 0.0)
    return joined
