"""Policies in gymnasium's environments, by the natural gradient of their expected return.

`trpo` has the methods and `learner` the loop that they share: collect steps (`rollout`, in `environments`), judge them
(`advantage`, with the critic), move the policy (`update`). `heads` says what a policy's outputs mean in each kind of
action space.
"""

from natgrad.ground.messages import resolve_names
from natgrad.policy.advantage import Rollout, gae
from natgrad.policy.environments import EnvironmentFault, Episode
from natgrad.policy.evaluation import EvalCallback, make_vec_env
from natgrad.policy.heads import (
    DiscreteHead,
    GaussianHead,
    Head,
    MultiBinaryHead,
    MultiDiscreteHead,
    SquashedGaussianHead,
)
from natgrad.policy.learner import LearningHistory, PolicyLearner
from natgrad.policy.rollout import RunningMoments
from natgrad.policy.settings import Backtracking, CriticTraining, NaturalStep, Rollouts
from natgrad.policy.trpo import TRPO, NaturalPolicyGradient, acktr

__all__ = [
    "TRPO",
    "Backtracking",
    "CriticTraining",
    "DiscreteHead",
    "EnvironmentFault",
    "Episode",
    "EvalCallback",
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
    "make_vec_env",
]

resolve_names(__name__)
