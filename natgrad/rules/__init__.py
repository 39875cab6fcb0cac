"""From a direction to a step: the quadratic model of the loss, and the rules that bound and shape what it proposes."""

from natgrad.ground.messages import resolve_names
from natgrad.rules.base import BlockPoint, BlockStack, Objective, Rule, require_loss
from natgrad.rules.damping import Constant, Damping, LevenbergMarquardt, Relative, as_damping
from natgrad.rules.noise_aware import NoiseAware
from natgrad.rules.quadratic import (
    BlockStep,
    ErrorScale,
    FlatStep,
    LayerFacts,
    Lazy,
    Memory,
    Parts,
    Quadratic,
    RunFacts,
    Step,
    SystemFacts,
    Vector,
    inner_product,
)
from natgrad.rules.spectral_descent import SpectralDescent
from natgrad.rules.spectral_progress import SpectralProgress
from natgrad.rules.step_rules import (
    BentStep,
    GridSearch,
    LineSearch,
    MeasuredLength,
    MeasuredTrustRegion,
    Measuring,
    Momentum,
    NormalisedRate,
    OnlineRadius,
    Rate,
    SafeRate,
    TrustRegion,
    check_backtracking,
    leads_down,
    refuse_measured_kl,
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

resolve_names(__name__)
