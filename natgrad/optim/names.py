"""The names that stand for choices in a text: `rule="spectral"`, `damping="relative(0.1)"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from natgrad.families import LOSSES
from natgrad.ground.choices import Names, read_choice
from natgrad.rules import (
    Constant,
    GridSearch,
    LevenbergMarquardt,
    LineSearch,
    MeasuredLength,
    MeasuredTrustRegion,
    Momentum,
    NoiseAware,
    NormalisedRate,
    OnlineRadius,
    Rate,
    Relative,
    SafeRate,
    SpectralDescent,
    SpectralProgress,
    SubspaceSearch,
    TrustRegion,
)
from natgrad.solvers import (
    CG,
    Auto,
    Direct,
    KrylovSubspace,
    LeastSquares,
    MinresQLP,
    Nystrom,
    PseudoInverse,
    SampleSpace,
    Spring,
)
from natgrad.structures import (
    AdaptiveInverse,
    Averaged,
    Blocks,
    Dense,
    Diagonal,
    DiagonalPreconditioner,
    EigenKronecker,
    Empirical,
    EmpiricalPreconditioner,
    Exact,
    ExactLabels,
    FirstOrder,
    Kronecker,
    LowRankCovariance,
    OnlineLowRank,
    Sampled,
    UnitWise,
    Woodbury,
)

NAMES: Mapping[str, Names] = {
    "criterion": LOSSES,
    "rule": {
        "noise_aware": NoiseAware,
        "spectral": SpectralProgress,
        "spectral_progress": SpectralProgress,
        "spectral_descent": SpectralDescent,
        "measured_length": MeasuredLength,
        "trust_region": TrustRegion,
        "measured_trust_region": MeasuredTrustRegion,
        "line_search": LineSearch,
        "grid_search": GridSearch,
        "subspace_search": SubspaceSearch,
        "online_radius": OnlineRadius,
        "normalised_rate": NormalisedRate,
        "momentum": Momentum,
        "safe_rate": SafeRate,
        "rate": Rate,
    },
    "damping": {"constant": Constant, "relative": Relative, "levenberg_marquardt": LevenbergMarquardt},
    "solver": {
        "auto": Auto,
        "cg": CG,
        "minres_qlp": MinresQLP,
        "direct": Direct,
        "pseudo_inverse": PseudoInverse,
        "sample_space": SampleSpace,
        "least_squares": LeastSquares,
        "nystrom": Nystrom,
        "krylov_subspace": KrylovSubspace,
        "spring": Spring,
    },
    "structure": {
        "exact": Exact,
        "dense": Dense,
        "blocks": Blocks,
        "diagonal": Diagonal,
        "unitwise": UnitWise,
        "kronecker": Kronecker,
        "eigen_kronecker": EigenKronecker,
        "online_low_rank": OnlineLowRank,
        "low_rank_covariance": LowRankCovariance,
        "adaptive_inverse": AdaptiveInverse,
    },
    "estimate": {"sampled": Sampled, "exact_labels": ExactLabels, "empirical": Empirical},
    "method": {"averaged": Averaged, "first_order": FirstOrder, "woodbury": Woodbury},
    "preconditioner": {"diagonal": DiagonalPreconditioner, "empirical": EmpiricalPreconditioner},
}
"""By argument, the names that it takes as text, and what each builds."""


def replace_name(argument: str, value: Any) -> Any:
    """The choice that a text names; anything else as it is."""
    if not isinstance(value, str):
        return value
    return read_choice(argument, value, NAMES[argument], {**NAMES["estimate"], **NAMES["method"]})
