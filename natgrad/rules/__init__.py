"""From a direction to a step: the quadratic model of the loss, and the rules that bound and shape what it proposes."""

from natgrad.ground.messages import find_name
from natgrad.rules.base import Objective, Rule, refuse_measured_kl, require_loss
from natgrad.rules.bent_step import BentStep
from natgrad.rules.block_point import BlockPoint, BlockStack
from natgrad.rules.damping import Constant, Damping, LevenbergMarquardt, Relative, as_damping
from natgrad.rules.grid_search import GridSearch
from natgrad.rules.measured_trust_region import MeasuredTrustRegion, Measuring, NormalisedRate, leads_down
from natgrad.rules.noise_aware import NoiseAware
from natgrad.rules.parts import Memory, Parts, Vector, inner_product
from natgrad.rules.quadratic import (
    BlockStep,
    ErrorScale,
    FlatStep,
    LayerFacts,
    Lazy,
    Quadratic,
    RunFacts,
    Step,
    SystemFacts,
)
from natgrad.rules.spectral_descent import SpectralDescent
from natgrad.rules.spectral_progress import SpectralProgress
from natgrad.rules.step_rules import (
    LineSearch,
    MeasuredLength,
    Momentum,
    OnlineRadius,
    Rate,
    SafeRate,
    TrustRegion,
    check_backtracking,
    shorten,
)
from natgrad.rules.subspace_search import Differentiable, SubspaceSearch

__all__ = [
    "BentStep",
    "BlockPoint",
    "BlockStack",
    "BlockStep",
    "Constant",
    "Damping",
    "Differentiable",
    "ErrorScale",
    "FlatStep",
    "GridSearch",
    "LayerFacts",
    "Lazy",
    "LevenbergMarquardt",
    "LineSearch",
    "MeasuredLength",
    "MeasuredTrustRegion",
    "Measuring",
    "Memory",
    "Momentum",
    "NoiseAware",
    "NormalisedRate",
    "Objective",
    "OnlineRadius",
    "Parts",
    "Quadratic",
    "Rate",
    "Relative",
    "Rule",
    "RunFacts",
    "SafeRate",
    "SpectralDescent",
    "SpectralProgress",
    "Step",
    "SubspaceSearch",
    "SystemFacts",
    "TrustRegion",
    "Vector",
    "as_damping",
    "check_backtracking",
    "inner_product",
    "leads_down",
    "refuse_measured_kl",
    "require_loss",
    "shorten",
]

# not by a def: type checkers would then take any name for one that exists
globals()["__getattr__"] = find_name(__name__, {})
