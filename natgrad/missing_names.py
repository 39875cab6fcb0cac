"""What to say of a name that natgrad does not have: `ng.KFAC` is `ng.kfac`, `ng.Nystrom` is `ng.solvers.Nystrom`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

ELSEWHERE = {
    "natgrad.kfac": "KFACOptimizer KFACPreconditioner KFACLinearOperator Shampoo SOAP",
    "natgrad.NaturalGradient": "NGD NaturalGradientDescent NaturalGrad NaturalGradientOptimizer",
    "natgrad.fisher": "FIM fisher_matrix fisher_information FisherMetric fisher_information_matrix",
    "natgrad.sampled_fisher": "FisherMCLinearOperator",
    "natgrad.empirical_fisher": "EFLinearOperator ef",
    "natgrad.gauss_newton": "GGN GGNLinearOperator",
    "natgrad.hessian": "hvp HessianLinearOperator",
    "natgrad.minimize": "fmin fmin2 cma CMA CMAES CMAEvolutionStrategy NES SNES xNES",
    "natgrad.stochastic_reconfiguration": "SR QGT QGTOnTheFly QGTJacobianDense MinSR",
    "natgrad.vmc": "MCState VMC",
    "natgrad.variational": "SVI Trace_ELBO ELBO advi NaturalVariational VariationalDistribution",
    "natgrad.residuals": "PINN ENGD",
    "natgrad.rules.SpectralDescent": "Muon",
    "natgrad.LevenbergMarquardt": "LM",
}
"""Names of other packages, by what takes their place here."""


def find_name(package: str, fields: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` of a package: loads a field when its name is asked for, else says what was likely meant."""
    homes = {name: home for home, names in fields.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            near = suggest_name(name, sys.modules["natgrad"])
            raise AttributeError(f"module {package!r} has no attribute {name!r}{near}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        thing = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, thing)
        return thing

    return find


def suggest_name(name: str, package: ModuleType) -> str:
    """`; did you mean ng.kfac?`, or nothing where no name is near."""
    if name.startswith("_"):
        return ""
    known = {key: getattr(package, key) for key in dir(package) if not key.startswith("_")}
    folders = [thing for thing in known.values() if isinstance(thing, ModuleType)]
    places = {spell_plainly(n): f"{m.__name__}.{n}" for m in folders for n in getattr(m, "__all__", ())}
    places |= {spell_plainly(n): f"{package.__name__}.{n}" for n in known}
    plain = spell_plainly(name)
    foreign = {spell_plainly(one): place for place, names in ELSEWHERE.items() for one in names.split()}
    if plain not in places and plain in foreign:
        return f"; did you mean {foreign[plain]}, which takes the place of {name} here?"
    near = [plain] if plain in places else get_close_matches(plain, places, n=1, cutoff=0.8)
    return f"; did you mean {places[near[0]]}?" if near else ""


def spell_plainly(name: str) -> str:
    """In small letters and without underscores."""
    return name.lower().replace("_", "")
