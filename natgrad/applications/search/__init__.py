"""Black-box search: a distribution over the candidates, moved by its natural gradient."""

from natgrad.applications.search.base import Best, Search
from natgrad.applications.search.bernoulli import BernoulliSearch
from natgrad.applications.search.bits import BitSearch
from natgrad.applications.search.categorical import CategoricalSearch
from natgrad.applications.search.cma import Adaptation
from natgrad.applications.search.convergence import Tolerances
from natgrad.applications.search.driver import minimize
from natgrad.applications.search.full_covariance import Full
from natgrad.applications.search.gaussian import GaussianSearch
from natgrad.applications.search.low_rank import LowRank
from natgrad.applications.search.markov import MarkovSearch
from natgrad.applications.search.model import GaussianModel
from natgrad.applications.search.noise import NoiseHandling, Repeated
from natgrad.applications.search.product import ProductSearch
from natgrad.applications.search.rank_weights import CGA, PBIL
from natgrad.applications.search.ranking import Ranking
from natgrad.applications.search.ray_pool import RayPool
from natgrad.applications.search.relaxation import Relaxation, Slope, natural_slope
from natgrad.applications.search.restarts import BIPOP, IPOP, Restarts, Run
from natgrad.applications.search.runs import SearchHistory, SearchResult
from natgrad.applications.search.separable import Separable
from natgrad.applications.search.sparse import SparsePrecision
from natgrad.applications.search.surrogate import QuadraticSurrogate
from natgrad.applications.search.xnes import XNES

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
