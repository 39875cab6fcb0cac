"""Policies in gymnasium's environments, by the natural gradient of their expected return."""

from natgrad.applications.policy.environments import EnvironmentFault, Episode
from natgrad.applications.policy.heads import (
    DiscreteHead,
    GaussianHead,
    Head,
    MultiBinaryHead,
    MultiDiscreteHead,
    SquashedGaussianHead,
)
from natgrad.applications.policy.learner import LearningHistory, PolicyLearner
from natgrad.applications.policy.normalise import RunningMoments
from natgrad.applications.policy.rollout import Rollout, gae
from natgrad.applications.policy.settings import Backtracking, CriticTraining, NaturalStep, Rollouts
from natgrad.applications.policy.trpo import TRPO, NaturalPolicyGradient, acktr

__all__ = [
    "TRPO",
    "Backtracking",
    "CriticTraining",
    "DiscreteHead",
    "EnvironmentFault",
    "Episode",
    "GaussianHead",
    "Head",
    "LearningHistory",
    "MultiBinaryHead",
    "MultiDiscreteHead",
    "NaturalPolicyGradient",
    "NaturalStep",
    "PolicyLearner",
    "Rollout",
    "Rollouts",
    "RunningMoments",
    "SquashedGaussianHead",
    "acktr",
    "gae",
]
