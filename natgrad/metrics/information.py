"""The information in a log likelihood that a user wrote: expected, over draws, observed, and empirical."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributions, nn
from torch.distributions import Distribution

from natgrad.ground.linalg import positive_inverse, psd_root
from natgrad.ground.messages import explain_calls, show_shape
from natgrad.ground.pure import Call, PureModel, RandomState, as_call, copy_tensors
from natgrad.ground.spaces import Params, name_parameters
from natgrad.ground.typed_torch import torch_linalg, torch_plain
from natgrad.metrics.base import Metric, pull_back
from natgrad.operators import Operator
from natgrad.operators.curvature import Curvature

LogLikelihood = Callable[..., Any]
"""log_likelihood(params, *row) -> scalar, or distribution(params, *inputs) -> torch.distributions.Distribution."""


def is_own(params: object) -> bool:
    """Whether the second argument of `ng.fisher` and its like is the parameters of a function of the user's."""
    return isinstance(params, (Mapping, Tensor))


@dataclass(frozen=True, repr=False)
class Information(Metric):
    """G(theta) of a log likelihood of one's own, a mean over rows, in nats: n G is the information of n rows.

    Args:
        likelihood: The function.
    """

    likelihood: OwnLikelihood

    @partial(explain_calls, hint=lambda *_, **__: "; the data are a tensor or a tuple of tensors, an observation a row")
    def at(self, params: Params | Tensor, inputs: Any, *, random: RandomState | None = None) -> Operator:
        """G at these parameters on these data.

        Args:
            params: A dict of tensors, or the one tensor, as the function takes them.
            inputs: The data: a tensor (b, ...), or a tuple (x, ..., y) of such, the observations last.
            random: The random state at which draws of the function are replayed, default the state now.

        Raises:
            TypeError: For data of another kind, or a function that returns neither a tensor nor a distribution.
            ValueError: For rows that are missing or of unequal number, a log likelihood that is no scalar or is not
                finite, parameters that it does not depend on.
        """
        named = name_parameters(params)
        rows = self.likelihood.check_rows(copy_tensors(inputs))
        self.likelihood.check_support(named, rows)
        return self.build(named, rows, random)

    @abstractmethod
    def build(self, params: Params, rows: Call, random: RandomState | None) -> Operator:
        """G, from what was checked.

        Args:
            params: Name -> tensor.
            rows: The data.
            random: The random state at which draws of the function are replayed.
        """


@dataclass(frozen=True, repr=False)
class ExpectedInformation(Information):
    """What `ng.fisher(distribution, params)` gives: E_y[s s^T] of the scores s, exact, as J^T M J."""

    def build(self, params: Params, rows: Call, random: RandomState | None) -> Operator:
        inputs, observed = self.likelihood.split(rows)
        return pull_back(partial(self.likelihood.coordinates, observed), params, inputs, random)


@dataclass(frozen=True, repr=False)
class SampledInformation(Information):
    """What `ng.sampled_fisher(distribution, params)` gives: s s^T averaged over draws y of the distribution itself.

    Args:
        samples: Draws per row, k.
        generator: Private source of the draws, default a new one, seeded 0.
    """

    samples: int = 1
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), compare=False)

    def build(self, params: Params, rows: Call, random: RandomState | None) -> Operator:
        likelihood, (inputs, observed) = self.likelihood, self.likelihood.split(rows)
        seed = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
        accelerators = (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
        with torch.no_grad():
            density = likelihood.distribution(params, *inputs.args)
            by_row = likelihood.arguments != 0 or has_rows(density, observed)
            with RandomState.capture(*accelerators).replay():
                torch_plain.manual_seed(seed)  # torch's distributions draw from the global source alone
                drawn = density.sample(torch.Size((self.samples,) if by_row else (self.samples, len(observed))))

        return pull_back(likelihood.log_draws, params, Call((*inputs.args, drawn.movedim(0, 1))), random)


@dataclass(frozen=True, repr=False)
class EmpiricalInformation(Information):
    """What `ng.empirical_fisher(log_likelihood, params)` gives: s s^T averaged over the data's own rows."""

    def build(self, params: Params, rows: Call, random: RandomState | None) -> Operator:
        return pull_back(self.likelihood.log_row, params, rows, random)


@dataclass(frozen=True, repr=False)
class ObservedInformation(Information):
    """What `ng.observed_fisher(log_likelihood, params)` gives: minus the mean Hessian of the log likelihood."""

    def build(self, params: Params, rows: Call, random: RandomState | None) -> Operator:
        pure = PureModel(self.likelihood.log_p, rows, random)
        return Curvature(MinusMean(pure), params)


@dataclass(frozen=True)
class MinusMean:
    """Minus the mean of a function of the parameters."""

    function: Callable[[Params], Tensor]

    def __call__(self, point: Params) -> Tensor:
        return -self.function(point).mean()


# The function of a user's


@dataclass(frozen=True, repr=False)
class OwnLikelihood:
    """A log likelihood that a user wrote, as one of a batch of rows."""

    function: LogLikelihood
    single: bool

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, (type, nn.Module)):
            raise TypeError(
                f"log_likelihood is {type(self.function).__name__}, expected a function log_likelihood(params, *row) "
                "-> scalar or distribution(params, *inputs) -> torch.distributions.Distribution; for a module give the "
                "likelihood of its outputs, ng.fisher(model, ng.Categorical())"
            )

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def arguments(self) -> int | None:
        """How many it takes after params; None for any number."""
        own = list(inspect.signature(self.function).parameters.values())[1:]
        if any(p.kind is p.VAR_POSITIONAL for p in own):
            return None
        return sum(p.default is p.empty and p.kind is not p.KEYWORD_ONLY for p in own)

    def gives_distribution(self, tensors: int) -> bool:
        """Whether the last of so many tensors are observations, of a distribution that it gives of the others."""
        return self.arguments is not None and tensors == self.arguments + 1

    def check_rows(self, data: Any) -> Call:
        """The data, one tensor per argument of the function, and the observations where it gives a distribution."""
        rows, takes = as_call(data), self.arguments
        if rows.kwargs or not all(isinstance(part, Tensor) and part.dim() for part in rows.args) or not rows.args:
            came = ", ".join(type(part).__name__ for part in rows.args) or type(data).__name__
            raise TypeError(
                f"the data are ({came}), expected a tensor (b, ...) or a tuple of such, a row of each per observation; "
                "convert arrays with torch.as_tensor"
            )
        counts = {len(part) for part in rows.args}
        if len(counts) > 1 or 0 in counts:
            shapes = ", ".join(str(tuple(part.shape)) for part in rows.args)
            raise ValueError(f"the data have shapes {shapes}, expected one number of rows, and at least one row")
        if takes is not None and len(rows.args) not in (takes, takes + 1):
            raise ValueError(
                f"{self} takes {takes} argument(s) after params and the data are {len(rows.args)} tensor(s): give "
                "as many for a function that returns a scalar, or one more, the observations, last, for one that "
                "returns a distribution"
            )
        return rows

    def check_support(self, params: Params, rows: Call) -> None:
        """ValueError for observations that the distribution cannot have given."""
        if not self.gives_distribution(len(rows.args)):
            return
        with torch.no_grad():
            density = self.distribution(params, *rows.args[:-1])
            try:
                support: Any = density.support
            except NotImplementedError:
                return
            y = rows.args[-1]
            valid = support.check(y)
        if not bool(valid.all()):
            raise ValueError(
                f"the observations, the last of the data, range from {float(y.min()):.4g} to {float(y.max()):.4g}, and "
                f"some lie outside of the support of {type(density).__name__}, {support}; look at how they are coded"
            )

    def split(self, rows: Call) -> tuple[Call, Tensor]:
        """What the distribution depends on, and the observations."""
        if not self.gives_distribution(len(rows.args)):
            raise NotImplementedError(
                f"{self} takes all of the data, so that no observations are left that a distribution were of: the "
                "expected information needs distribution(params, *inputs) -> torch.distributions.Distribution, with "
                "data (*inputs, y); of a log likelihood of numbers there are ng.observed_fisher(log_likelihood, "
                "params) and ng.empirical_fisher(log_likelihood, params)"
            )
        return Call(rows.args[:-1]), rows.args[-1]

    def log_p(self, params: Params, *row: Tensor) -> Tensor:
        """log p of every row, shape (b,)."""
        if self.gives_distribution(len(row)):
            return self.log_prob(self.distribution(params, *row[:-1]), row[-1])
        each = torch.func.vmap(self._one, in_dims=(None, *[0] * len(row)), randomness="same")
        try:
            with set_validation(False):
                return each(params, *row)
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error) and ".item()" not in str(error):
                raise
            raise ValueError(
                f"{self} branches on the numbers of a row, and all rows are computed at once: write the branch "
                "with torch.where(condition, a, b)"
            ) from error

    def evaluate(self, params: Params, rows: Call) -> Tensor:
        """log p of every row (b,), NaN where torch's distributions refuse their parameters.

        Of a log likelihood of one row they are asked at the first row alone: under vmap nothing can look at numbers.
        """
        try:
            with set_validation(True):
                if self.gives_distribution(len(rows.args)):
                    self._call(params, *rows.args[:-1])
                else:
                    self._one(params, *(part[0] for part in rows.args))
        except ValueError as error:
            if "Expected parameter" in str(error):  # not an observation that torch.where may leave out
                return torch.full((rows.batch(),), torch.nan)
        return self.log_p(params, *rows.args)

    def _one(self, params: Params, *row: Tensor) -> Tensor:
        try:
            value = self._call(params, *row)
        except Exception as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in row)
            error.add_note(
                f"{self}(params, *row) is called with one row of the data, of shapes {shapes}, and the library batches "
                "it. Where rows are not independent, as in Cox's likelihood, all of them are one row: x[None]. "
                "Derivatives inside of it are taken by torch.func.grad."
            )
            raise
        if isinstance(value, Distribution):
            raise ValueError(
                f"{self} returned the distribution {type(value).__name__}, whose observations are missing: give "
                "them last in the data, (*inputs, y)"
            )
        if not isinstance(value, Tensor) or value.dim() != 0:
            came = f"{'a tensor of shape ' if isinstance(value, Tensor) else ''}{show_shape(value)}"
            raise ValueError(
                f"{self}(params, *row) returned {came} for one row, expected a scalar tensor: the library batches it"
            )
        return value

    def log_row(self, params: Params, *row: Tensor) -> Tensor:
        """log p of every row, shape (b, 1)."""
        return self.log_p(params, *row).unsqueeze(1)

    def log_draws(self, params: Params, *row: Tensor) -> Tensor:
        """log p of the k draws of every row, the last of the data (b, k, ...), over sqrt(k): shape (b, k)."""
        density, draws = self.distribution(params, *row[:-1]), row[-1].unbind(1)
        return torch.stack([self.log_prob(density, y) for y in draws], 1) / len(draws) ** 0.5

    def distribution(self, params: Params, *inputs: Tensor) -> Distribution:
        """Of the observations of all rows."""
        with set_validation(False):
            density = self._call(params, *inputs)
        if not isinstance(density, Distribution):
            raise TypeError(
                f"{self}(params{', inputs' * bool(inputs)}) returned {type(density).__name__}, expected a "
                "torch.distributions.Distribution: a log likelihood takes the observation too, "
                "log_likelihood(params, *row) -> scalar"
            )
        return density

    def _call(self, params: Params, *row: Tensor) -> Any:
        try:
            return self.function(next(iter(params.values())) if self.single else dict(params), *row)
        except RuntimeError as error:
            if "dtype" in str(error):
                own, data = (" and ".join(sorted({str(t.dtype) for t in part})) for part in (params.values(), row))
                error.add_note(f"params are {own}, the data {data}: give both in one type, as by .double().")
            raise

    def log_prob(self, density: Distribution, observed: Tensor) -> Tensor:
        """log p of each row (b,), the sum over its independent entries."""
        try:
            with set_validation(False):
                log_p = density.log_prob(observed)
        except RuntimeError as error:
            raise ValueError(
                f"{self} returned a distribution of batch shape {tuple(density.batch_shape)} and event shape "
                f"{tuple(density.event_shape)}, which does not take observations of shape "
                f"{tuple(observed.shape)}: {error}"
                + "; convert them with .double()"
                * (not observed.is_floating_point())
            ) from error
        count = len(observed)
        if log_p.shape[1:2] == (count,) and count > 1 and (count, 1) in (observed.shape, density.batch_shape):
            raise ValueError(
                f"{self} returned a distribution of batch shape {tuple(density.batch_shape)}, and the "
                f"observations have shape {tuple(observed.shape)}: nothing is broadcast; take [:, 0] of one of them"
            )
        if log_p.dim() == 0 or len(log_p) != count:
            raise ValueError(
                f"log_prob of {count} observations has shape {tuple(log_p.shape)}, expected a row for each: "
                "look at the shapes of the distribution's parameters"
            )
        return log_p.flatten(1).sum(1) if log_p.dim() > 1 else log_p

    def coordinates(self, observed: Tensor, params: Params, *inputs: Tensor) -> Tensor:
        """`find_coordinates` by rows (b, m), or (1, m) where all rows have one distribution."""
        density = self.distribution(params, *inputs)
        # of inputs as many rows as came: of one example at a time there is one
        rows = len(inputs[0]) if inputs else len(observed) if has_rows(density, observed) else 1
        if inputs and density.batch_shape[:1] != (rows,):
            raise ValueError(
                f"{self} returned a distribution of batch shape {tuple(density.batch_shape)} for {rows} rows of "
                "inputs, expected one for each row"
            )
        return find_coordinates(density).reshape(rows, -1)


def has_rows(density: Distribution, observed: Tensor) -> bool:
    """Whether a distribution has one of its own for each observation, as one has that its function closes over."""
    axes = len(density.batch_shape) + len(density.event_shape)
    return axes == observed.dim() and density.batch_shape[:1] == observed.shape[:1]


@contextmanager
def set_validation(validate: bool) -> Generator[None]:
    """Inside, torch's distributions look at their arguments, or not, which nothing can under vmap."""
    open_type: Any = Distribution
    before = open_type._validate_args
    Distribution.set_default_validate_args(validate)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


# Coordinates r of a distribution in which its Fisher information, at the point itself, is the identity: J^T M J is
# (dr)^T dr, with r = M^(1/2) (parameters), M held fixed

ROOT_2 = math.sqrt(2.0)


def find_coordinates(density: Distribution) -> Tensor:
    """r (*batch, m) with E[s s^T] = (dr)^T dr. NotImplementedError for a distribution without a closed form here."""
    if isinstance(density, distributions.Independent):
        return find_coordinates(cast("Any", density).base_dist).reshape(*density.batch_shape, -1)
    build = COORDINATES.get(type(density))
    if build is None:
        names = ", ".join(sorted(kind.__name__ for kind in COORDINATES))
        raise NotImplementedError(
            f"the Fisher information of {type(density).__name__} has no closed form here, as {names} and Independent "
            "have: take draws, ng.sampled_fisher(distribution, params, samples=k), or "
            "ng.observed_fisher(distribution, params)"
        )
    return build(density)


def of_location(density: Any, of_scale: float) -> Tensor:
    """diag(1, c) / scale^2 in (loc, scale)."""
    return torch.stack([density.loc / density.scale.detach(), math.sqrt(of_scale) * density.scale.log()], -1)


def of_logits(density: Any, information: Callable[[Tensor], Tensor]) -> Tensor:
    """A number of the logit, for it."""
    return weigh(information(density.logits.detach()), density.logits).unsqueeze(-1)


def of_bit(logits: Tensor) -> Tensor:
    """p (1 - p), p = sigmoid(logits)."""
    return logits.sigmoid() * (-logits).sigmoid()  # 1 - p rounds to 0 in float32 beyond 17


def of_rate(rate: Tensor) -> Tensor:
    """1 / rate."""
    return weigh(positive_inverse(rate.detach(), 0.0), rate).unsqueeze(-1)


def of_classes(density: Any) -> Tensor:
    """diag(p) - p p^T in logits: sqrt(p) d log p."""
    return weigh(density.probs.detach(), density.logits)


def weigh(information: Tensor, parameter: Tensor) -> Tensor:
    """sqrt(M) r; 0 where M is, as for a class that a logit of -inf rules out."""
    return information.sqrt() * torch.where(information > 0, parameter, 0.0)


def of_gamma(density: Any) -> Tensor:
    """[[psi'(a), -1/b], [-1/b, a/b^2]] in concentration a and rate b, by its Cholesky factor."""
    a, rate = density.concentration, density.rate
    fixed = a.detach()
    remainder = (fixed.polygamma(1) - 1 / fixed).clamp(min=0).sqrt()
    return torch.stack([remainder * a, fixed.sqrt() * rate.log() - a / fixed.sqrt()], -1)


def of_concentrations(c: Tensor) -> Tensor:
    """diag(psi'(c)) - psi'(sum c) in the concentrations of Dirichlet's distribution."""
    fixed = c.detach()
    matrix = torch.diag_embed(fixed.polygamma(1)) - fixed.sum(-1).polygamma(1)[..., None, None]
    return (c.unsqueeze(-2) @ psd_root(matrix)).squeeze(-2)


def of_normal(density: Any) -> Tensor:
    """|L^-1 dmu|^2 + |A + A^T|^2 / 2 with A = L^-1 dL, Sigma = L L^T."""
    root: Tensor = density.scale_tril
    fixed = root.detach()
    mean = torch_linalg.solve_triangular(fixed, density.loc.unsqueeze(-1), upper=False).squeeze(-1)
    share = torch_linalg.solve_triangular(fixed, root, upper=False)
    return torch.cat([mean, ((share + share.mT) / ROOT_2).flatten(-2)], -1)


COORDINATES: dict[type, Callable[[Any], Tensor]] = {
    distributions.Normal: partial(of_location, of_scale=2.0),
    distributions.LogNormal: partial(of_location, of_scale=2.0),
    distributions.Laplace: partial(of_location, of_scale=1.0),
    distributions.Bernoulli: partial(of_logits, information=of_bit),
    distributions.Geometric: partial(of_logits, information=lambda logits: (-logits).sigmoid()),
    distributions.Binomial: lambda density: density.total_count.sqrt().unsqueeze(-1) * of_logits(density, of_bit),
    distributions.Categorical: of_classes,
    distributions.OneHotCategorical: of_classes,
    distributions.Poisson: lambda density: of_rate(density.rate),
    distributions.Exponential: lambda density: density.rate.log().unsqueeze(-1),
    distributions.Gamma: of_gamma,
    distributions.Beta: lambda density: of_concentrations(
        torch.stack([density.concentration1, density.concentration0], -1)
    ),
    distributions.Dirichlet: lambda density: of_concentrations(density.concentration),
    distributions.MultivariateNormal: of_normal,
}
