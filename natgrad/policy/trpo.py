"""Trust region policy optimisation, the natural policy gradient, and ACKTR."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from natgrad.ground.checks import Group, check_positive, read_groups
from natgrad.policy.heads import Head
from natgrad.policy.learner import PolicyLearner
from natgrad.policy.sb3 import translate_choices
from natgrad.policy.settings import (
    Backtracking,
    CriticTraining,
    NaturalStep,
    PolicySettings,
    Rollouts,
    TRPOSettings,
)
from natgrad.rules import MeasuredTrustRegion, NormalisedRate, Rate, Rule
from natgrad.solvers import Direct
from natgrad.structures import Kronecker

OWN = ("policy", "env", "radius", "critic", "head")
GROUPS = {
    "rollouts": Group(Rollouts()),
    "natural_step": Group(NaturalStep()),
    "critic_training": Group(CriticTraining(), "critic_"),
}
TRPO_GROUPS = GROUPS | {"backtracking": Group(Backtracking())}


class TRPO(PolicyLearner):
    """Trust region policy optimisation, Schulman et al. 2015: `ng.TRPO(policy, env).learn(100_000)`.

    Each update is measured to be within the radius, and the policy stays as it was where no step is. Networks run in
    eval mode. Settings may come as groups, `rollouts=Rollouts(batch=2048, gamma=0.9)`, or one by one, `batch=2048,
    gamma=0.9`; keywords of stable-baselines3 that mean the same are taken too.

    Args:
        policy: A module from observations (b, ...) to the action parameters, or to (parameters, value) for a shared
            critic; None or "MlpPolicy" for two tanh layers of 64.
        env: A gymnasium environment, vector environment, registered name, or a sequence of them.
        radius: Bound on the mean KL of an update over the visited states, in nats; None for .01, times the entries of a
            real action.
        critic: A module from observations to (b,) or (b, 1); None for two tanh layers of 64.
        head: The distribution of actions, where the space's own will not do, such as `SquashedGaussianHead()`.
        **settings: The following, as groups or one by one.
        rollouts: A `Rollouts` group.
        natural_step: A `NaturalStep` group.
        critic_training: A `CriticTraining` group.
        backtracking: A `Backtracking` group.
        batch: Steps per update, all environments together.
        gamma: Discount of rewards, in [0, 1].
        gae_lambda: GAE's weight, in [0, 1].
        normalize_observations: Scale observations by running moments, saved, and frozen in `predict`; False does not.
        normalize_rewards: Scale rewards by the standard deviation of their running discounted sum; False does not.
        max_episode_steps: Longer episodes are truncated; math.inf for a task without an end.
        seed: Of all draws and of the environments; the global generators are never used.
        group: The processes of `torch.distributed` that each have environments of their own; `batch` counts the steps
            of all.
        solver: Of (F + damping I) x = g.
        structure: How F is held between updates; `ng.Kronecker(0.95)` with `ng.Direct()` is K-FAC.
        damping: A number in nats per squared unit of a parameter, or an ng damping; None adapts to the ratios of real
            to predicted gain and of predicted to real KL, at least .1, times the entries of a real action.
        metric_batch: States that F is taken over; None for all.
        entropy_weight: Of an entropy bonus in the surrogate.
        on_trouble: "skip" leaves out what is not finite and counts it in `agent.failures`; "raise" is a ValueError.
        critic_lr: Adam's learning rate on the critic.
        critic_epochs: Passes over a batch.
        critic_batch: States per step of Adam.
        backtrack: Factor between two trials of the line search.
        backtracks: Number of its trials.

    Raises:
        ValueError: For a number out of range, outputs of the wrong shape, a space without a head.
        TypeError: For an unknown keyword; the sentence names the nearest one, or what to write for one of
            stable-baselines3.

    Example:
        >>> agent = ng.TRPO(None, "CartPole-v1", batch=64)
        >>> history = agent.learn(128)
        >>> history["steps"]
        [64, 128]
    """

    def __init__(
        self,
        policy: nn.Module | str | None,
        env: Any,
        radius: float | None = None,
        *,
        critic: nn.Module | None = None,
        head: Head | None = None,
        **settings: Unpack[TRPOSettings],
    ) -> None:
        choices = translate_choices("TRPO", radius, dict(settings))
        groups = read_groups("TRPO", TRPO_GROUPS, choices.choices, OWN)
        search: Backtracking = groups["backtracking"]
        self.backtrack, self.backtracks = search.backtrack, search.backtracks
        self._lengths = ("radius", "backtracks")
        super().__init__(policy, env, critic, head, choices, groups)

    @property
    def rule(self) -> Rule:
        """The measured KL within the radius, by backtracking."""
        return MeasuredTrustRegion(self.radius, self.backtracks, self.backtrack)


class NaturalPolicyGradient(PolicyLearner):
    """The natural policy gradient, Kakade 2001: theta + rate (F + damping I)^-1 g, without a line search.

    rate = sqrt(2 radius / g^T (F + damping I)^-1 g), Rajeswaran et al. 2017, so that the quadratic model of the mean
    KL is at most the radius; the real one is measured and logged, and may be above it. A step after which the policy is
    not finite is not taken.

    Args:
        policy: As for `TRPO`, as are env, critic and head.
        env: A gymnasium environment, vector environment, registered name, or a sequence of them.
        radius: Bound on the quadratic model of an update's mean KL, in nats; None for .01, times the entries of a real
            action.
        lr: A rate instead of that.
        critic: A module from observations to (b,) or (b, 1).
        head: The distribution of actions.
        **settings: As for `TRPO`, the line search's left out.

    Raises:
        ValueError: For a number out of range, outputs of the wrong shape, a space without a head.
        TypeError: For an unknown keyword.

    Example:
        >>> agent = ng.NaturalPolicyGradient(None, "CartPole-v1", batch=64)
        >>> agent.learn(64)["steps"]
        [64]
    """

    def __init__(
        self,
        policy: nn.Module | str | None,
        env: Any,
        radius: float | None = None,
        *,
        lr: float | None = None,
        critic: nn.Module | None = None,
        head: Head | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        for name, length in (("radius", radius), ("target_kl", dict(settings).get("target_kl"))):
            if lr is not None and length is not None:
                raise TypeError(
                    f"NaturalPolicyGradient was given lr and {name}, which both give a step its length: give one"
                )
        choices = translate_choices("NaturalPolicyGradient", radius, dict(settings))
        groups = read_groups("NaturalPolicyGradient", GROUPS, choices.choices, (*OWN, "lr"))
        if lr is not None:
            check_positive("lr", lr)
            self.rate, self._lengths = lr, ("lr",)
        self.lr = lr
        super().__init__(policy, env, critic, head, choices, groups)

    @property
    def rule(self) -> Rule:
        """The rate, or the length at which the damped form is the radius."""
        return NormalisedRate(self.radius) if self.lr is None else Rate()


def acktr(
    policy: nn.Module | str | None,
    env: Any,
    radius: float | None = None,
    *,
    decay: float = 0.95,
    **settings: Any,
) -> NaturalPolicyGradient:
    """The natural policy gradient with K-FAC's Fisher, a Kronecker product per layer: ACKTR's step for the policy.

    The critic is fitted by Adam.

    Args:
        policy: As for `NaturalPolicyGradient`.
        env: As for `NaturalPolicyGradient`.
        radius: Bounds the KL by the exact Fisher's quadratic model, in nats; None as for `NaturalPolicyGradient`.
        decay: Of the factors' running averages, per update.
        **settings: As for `NaturalPolicyGradient`; `damping` is 0.01 unless given.

    Reference:
        Wu, Mansimov, Grosse, Liao & Ba 2017.
    """
    step = NaturalStep(Direct(), Kronecker(decay, factored=True), 0.01)
    choices: dict[str, Any] = {"natural_step": step, **settings}
    return NaturalPolicyGradient(policy, env, radius, **choices)
