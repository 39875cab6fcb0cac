"""Statistics with a likelihood of one's own: the maximum, its standard errors, intervals and ellipses.

`maximum_likelihood` has both: `maximize_likelihood` climbs by Fisher scoring or Newton's method, `standard_errors`
reads the information at any estimate.

Example:
    >>> normal = lambda p: torch.distributions.Normal(p["mean"], p["log_sd"].exp())
    >>> start = {"mean": torch.zeros(()), "log_sd": torch.zeros(())}
    >>> fit = ng.estimation.maximize_likelihood(normal, start, torch.randn(100))
"""

from natgrad.estimation.maximum_likelihood import (
    MaximumLikelihood,
    StandardErrors,
    maximize_likelihood,
    standard_errors,
)
from natgrad.ground.messages import resolve_names

__all__ = ["MaximumLikelihood", "StandardErrors", "maximize_likelihood", "standard_errors"]

resolve_names(__name__)
