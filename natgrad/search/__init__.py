"""Black-box search: a distribution over the candidates, moved by its natural gradient.

`driver` has `minimize`, from the first point to a result, and `base` has ask and tell. `gaussian` searches continuous
variables; its covariances are in `cma`, `low_rank`, `sparse` and `xnes`. `bernoulli`, `markov` and `categorical` search
finitely many points, `product` searches both kinds at once.

Example:
    >>> result = ng.search.minimize(lambda x: (x - 1).square().sum(), torch.zeros(3), 0.5, seed=0)
"""

from natgrad.ground.messages import resolve_names
from natgrad.search.base import Best, Search
from natgrad.search.bernoulli import BernoulliSearch
from natgrad.search.bits import BitSearch
from natgrad.search.categorical import CategoricalSearch
from natgrad.search.cma import Adaptation, Full, Separable
from natgrad.search.driver import BIPOP, IPOP, Restarts, Run, SearchHistory, SearchResult, minimize
from natgrad.search.gaussian import GaussianSearch, Tolerances
from natgrad.search.low_rank import LowRank
from natgrad.search.markov import MarkovSearch
from natgrad.search.model import GaussianModel
from natgrad.search.noise import NoiseHandling, Repeated
from natgrad.search.product import ProductSearch
from natgrad.search.ranking import CGA, PBIL, Ranking
from natgrad.search.relaxation import Relaxation, Slope, natural_slope
from natgrad.search.sparse import SparsePrecision
from natgrad.search.surrogate import QuadraticSurrogate
from natgrad.search.workers import RayPool
from natgrad.search.xnes import XNES

__all__ = [
    "BIPOP",
    "CGA",
    "IPOP",
    "PBIL",
    "XNES",
    "Adaptation",
    "BernoulliSearch",
    "Best",
    "BitSearch",
    "CategoricalSearch",
    "Full",
    "GaussianModel",
    "GaussianSearch",
    "LowRank",
    "MarkovSearch",
    "NoiseHandling",
    "ProductSearch",
    "QuadraticSurrogate",
    "Ranking",
    "RayPool",
    "Relaxation",
    "Repeated",
    "Restarts",
    "Run",
    "Search",
    "SearchHistory",
    "SearchResult",
    "Separable",
    "Slope",
    "SparsePrecision",
    "Tolerances",
    "minimize",
    "natural_slope",
]

resolve_names(__name__)
