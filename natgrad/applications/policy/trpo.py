"""Trust region policy optimisation, the natural policy gradient, and ACKTR."""

from __future__ import annotations

from typing import Any

from torch import nn

from natgrad.applications.policy.checks import as_integer, require_positive
from natgrad.applications.policy.heads import Head
from natgrad.applications.policy.learner import PolicyLearner
from natgrad.applications.policy.step_rules import MeasuredTrustRegion, NormalisedRate
from natgrad.damping import Damping, LevenbergMarquardt
from natgrad.rules import Rate, Rule
from natgrad.solvers import CG, Direct, Solver
from natgrad.structures import Kronecker, Structure

ADAPTIVE = LevenbergMarquardt(start=0.01, floor=1e-4, ceiling=10.0)


class TRPO(PolicyLearner):
    """Trust region policy optimisation, Schulman et al. 2015: `ng.TRPO(policy, env).learn(100_000)`.

    policy: an `nn.Module` from observations (b, ...) to the action parameters, or to (parameters, value) for a shared
    critic; None or "MlpPolicy": two tanh layers of 64.   env: a gymnasium environment, vector environment, registered
    name, or a sequence of them.   radius: bound on the mean KL of an update over the visited states, in nats; every
    update is measured to be within it, and the policy stays as it was where no step is.

    critic: a module from observations to (b,) or (b, 1), default two tanh layers of 64.   head: the distribution of
    actions, where the space's own will not do, such as `SquashedGaussianHead()`.   batch: steps per update, all
    environments together.   gamma, gae_lambda: discount and GAE's weight.   solver, structure: of (F + damping I) x =
    g; `ng.Kronecker(0.95)` with `ng.Direct()` is K-FAC.   damping: a number or a strategy; the default adapts to the
    ratios of real to predicted gain and of predicted to real KL.   backtrack, backtracks: factor and number of the line
    search's trials.   metric_batch: states that the metric is taken over, default all.   entropy_weight: of an entropy
    bonus in the surrogate.   critic_lr, critic_epochs, critic_batch: of Adam on the critic.   normalize_observations,
    normalize_rewards: by running moments, saved, and frozen in `predict`.   max_episode_steps: longer episodes are
    truncated; math.inf: the task has no end.   seed: of all draws and of the environments; the global generators are
    never used.

    Networks run in eval mode. ValueError for a radius that is not positive, outputs of the wrong shape, a space
    without a head.
    """

    def __init__(
        self,
        policy: nn.Module | str | None,
        env: Any,
        radius: float = 0.01,
        *,
        critic: nn.Module | None = None,
        head: Head | None = None,
        batch: int = 1024,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        solver: Solver = CG(rtol=1e-3, max_steps=10),
        structure: Structure | None = None,
        damping: float | Damping = ADAPTIVE,
        backtrack: float = 0.8,
        backtracks: int = 10,
        metric_batch: int | None = None,
        entropy_weight: float = 0.0,
        critic_lr: float = 1e-3,
        critic_epochs: int = 10,
        critic_batch: int = 128,
        normalize_observations: bool = True,
        normalize_rewards: bool = True,
        max_episode_steps: float | None = None,
        seed: int = 0,
    ) -> None:
        require_positive("radius", radius)
        require_positive("backtrack", backtrack)
        if not backtrack < 1:
            raise ValueError(f"backtrack is {backtrack}, expected a factor between 0 and 1")
        self.radius, self.backtrack, self.backtracks = radius, backtrack, as_integer("backtracks", backtracks, 1)
        super().__init__(
            policy,
            env,
            critic=critic,
            head=head,
            batch=batch,
            gamma=gamma,
            gae_lambda=gae_lambda,
            solver=solver,
            structure=structure,
            damping=damping,
            metric_batch=metric_batch,
            entropy_weight=entropy_weight,
            critic_lr=critic_lr,
            critic_epochs=critic_epochs,
            critic_batch=critic_batch,
            normalize_observations=normalize_observations,
            normalize_rewards=normalize_rewards,
            max_episode_steps=max_episode_steps,
            seed=seed,
        )

    @property
    def rule(self) -> Rule:
        """The measured KL within the radius, by backtracking."""
        return MeasuredTrustRegion(self.radius, self.backtracks, self.backtrack)


class NaturalPolicyGradient(PolicyLearner):
    """The natural policy gradient, Kakade 2001: theta + rate (F + damping I)^-1 g, without a line search.

    radius: rate = sqrt(2 radius / g^T (F + damping I)^-1 g), Rajeswaran et al. 2017, so that the quadratic model of the
    mean KL is at most the radius; the real one is measured and logged, and may be above it.   lr: a rate instead of
    that. A step after which the policy is not finite is not taken. The rest: as in `TRPO`.
    """

    def __init__(
        self,
        policy: nn.Module | str | None,
        env: Any,
        radius: float = 0.01,
        *,
        lr: float | None = None,
        critic: nn.Module | None = None,
        head: Head | None = None,
        batch: int = 1024,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        solver: Solver = CG(rtol=1e-3, max_steps=10),
        structure: Structure | None = None,
        damping: float | Damping = ADAPTIVE,
        metric_batch: int | None = None,
        entropy_weight: float = 0.0,
        critic_lr: float = 1e-3,
        critic_epochs: int = 10,
        critic_batch: int = 128,
        normalize_observations: bool = True,
        normalize_rewards: bool = True,
        max_episode_steps: float | None = None,
        seed: int = 0,
    ) -> None:
        require_positive("radius", radius)
        if lr is not None:
            require_positive("lr", lr)
        self.radius, self.lr, self.rate = radius, lr, 1.0 if lr is None else lr
        super().__init__(
            policy,
            env,
            critic=critic,
            head=head,
            batch=batch,
            gamma=gamma,
            gae_lambda=gae_lambda,
            solver=solver,
            structure=structure,
            damping=damping,
            metric_batch=metric_batch,
            entropy_weight=entropy_weight,
            critic_lr=critic_lr,
            critic_epochs=critic_epochs,
            critic_batch=critic_batch,
            normalize_observations=normalize_observations,
            normalize_rewards=normalize_rewards,
            max_episode_steps=max_episode_steps,
            seed=seed,
        )

    @property
    def rule(self) -> Rule:
        """The rate, or the length at which the damped form is the radius."""
        return NormalisedRate(self.radius) if self.lr is None else Rate()


def acktr(
    policy: nn.Module | str | None,
    env: Any,
    radius: float = 0.01,
    *,
    decay: float = 0.95,
    damping: float = 0.01,
    **choices: Any,
) -> NaturalPolicyGradient:
    """The natural policy gradient with K-FAC's Fisher, a Kronecker product per layer: ACKTR's step for the policy.

    decay: of the factors' running averages, per update.   radius: bounds the KL by the exact Fisher's quadratic model.
    choices: as for `NaturalPolicyGradient`. The critic is fitted by Adam. Wu, Mansimov, Grosse, Liao & Ba 2017.
    """
    return NaturalPolicyGradient(
        policy, env, radius, structure=Kronecker(decay, factored=True), solver=Direct(), damping=damping, **choices
    )
