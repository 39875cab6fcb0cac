"""Earlier place of what lies in natgrad itself now: `natgrad.applications.search` is `natgrad.search`."""

import sys
import warnings
from importlib import import_module

FIELDS = ("energies", "estimation", "flows", "helmholtz", "policy", "residuals", "search", "variational", "vmc")

warnings.warn(
    "natgrad.applications goes with the next version: write natgrad.search for natgrad.applications.search, and so for"
    " flows, helmholtz, policy, residuals, variational and vmc; densities and their losses lie in natgrad.energies,"
    " maximize_likelihood and standard_errors in natgrad.estimation",
    FutureWarning,
    stacklevel=2,
)

for field in FIELDS:
    globals()[field] = import_module(f"natgrad.{field}")
for field in (globals()["energies"], globals()["estimation"]):
    globals().update({name: getattr(field, name) for name in field.__all__})
for name, module in list(sys.modules.items()):  # the modules themselves by their earlier names: old pickles have these
    package, _, rest = name.partition(".")
    if package == "natgrad" and rest.partition(".")[0] in FIELDS:
        earlier = rest.removeprefix("energies.").removeprefix("estimation.")
        sys.modules[f"{__name__}.{earlier}"] = module
