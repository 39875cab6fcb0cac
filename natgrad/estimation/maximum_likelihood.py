"""Maximum likelihood for a model that a user wrote: the estimate, its standard errors, their ellipses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_number, check_range
from natgrad.ground.linalg import all_finite, eigh, gram, take_absolute
from natgrad.ground.messages import explain_calls, write_table
from natgrad.ground.pure import Call, copy_tensors, keep_gradient_mode, set_modes_aside
from natgrad.ground.spaces import Params, Space, name_parameters
from natgrad.metrics import (
    Information,
    Metric,
    ObservedInformation,
    SampledInformation,
    empirical_fisher,
    fisher,
    observed_fisher,
)
from natgrad.operators import Operator

Status = Literal["converged", "round_off", "kink", "flat", "saddle", "stalled", "unbounded", "max_steps"]
SETTLED: tuple[Status, ...] = ("converged", "round_off", "kink")
Estimate = Params | Tensor
"""Parameters as a log likelihood takes them: a dict of tensors, or one tensor."""

TOLERANCE = {torch.float64: 1e-6}
"""Standard errors from the maximum; in less than float64 `COARSE`."""
COARSE = 1e-2
SINGULAR = 100.0
"""Times n eps: share of the largest eigenvalue that round-off is told from."""
TINY = 1e-30
"""Share of the largest squared score, below which one is round-off."""
NOISE = 10.0
"""Times eps: round-off of a mean log likelihood, as a share of 1 + the mean size of its rows'."""
ENOUGH = 0.1
"""Share of the gain that the slope promises, for a step to be taken."""
LONGEST = 2.0**40
"""Of a step along which the log likelihood never bends."""
RESTLESS = 0.25
"""Change of log sqrt(information) along a step, above which the fit is not near a maximum."""
DRAWN = 0.4
"""The same for an information over draws, which changes by itself."""
FEW = 5
"""Such steps, after which a fit that goes no further is on its way to infinity."""
SHORT = 1e-3
"""Of a step, below which parameters are tried alone: a kink along one of them holds all."""
IDLE = 3
"""Steps in a row without a gain or a shorter distance, after which a fit ends."""


@set_modes_aside
@explain_calls
def maximize_likelihood(
    log_likelihood: Callable[..., Any],
    params: Estimate,
    data: Any,
    *,
    metric: Metric | None = None,
    tolerance: float | None = None,
    max_steps: int = 100,
) -> MaximumLikelihood:
    """theta <- theta + a G^-1 (mean score), a by a line search, until a step is a small share of a standard error.

    With the expected information this is Fisher scoring, with the observed one Newton's method on the absolute values
    of its eigenvalues, which saddle points do not attract, and with the empirical one it is the algorithm of Berndt,
    Hall, Hall & Hausman. All is solved and judged in units of the information's diagonal, so that the parameters' own
    do not count. Directions that the data do not identify are left where they started. A step where a
    `torch.distributions` object refuses its parameters is shortened.

    Args:
        log_likelihood: A function log_likelihood(params, *row) -> scalar of one row of the data, or a function
            distribution(params, *inputs) -> `torch.distributions.Distribution` of the observations.
        params: Where to start: a dict of tensors, or one tensor, as the function takes them. Left as they are.
        data: A tensor (b, ...), or a tuple (x, ..., y) of such, the observations last. Rows are independent: what is
            not, such as the members of a group, is one row.
        metric: `ng.fisher(f, params)` and its like. None: expected where the distribution has a closed form, else
            observed.
        tolerance: Length of a whole step, in standard errors, at which the estimate has converged. None: 1e-6 in
            float64, else 1e-2.
        max_steps: Most steps.

    Returns:
        A `MaximumLikelihood`: the estimate, `.status`, `.standard_errors()`. "saddle", "stalled", "unbounded" and
        "max_steps" come with a warning.

    Raises:
        ValueError: For a log likelihood that is not finite at the start, a metric of another function, and what
            `metric.at` raises.

    Reference:
        Fisher scoring: McCullagh & Nelder 1989, section 2.5; the empirical matrix: Berndt et al. 1974.

    Example:
        >>> def poisson(params, x):
        ...     return torch.distributions.Poisson((params["intercept"] + params["slope"] * x).exp())
        >>> x, y = torch.arange(6.0), torch.tensor([1.0, 2.0, 3.0, 5.0, 8.0, 14.0])
        >>> start = {"intercept": torch.tensor(0.0), "slope": torch.tensor(0.0)}
        >>> fit = ng.maximize_likelihood(poisson, start, (x, y))
        >>> fit.status, round(fit.params["slope"].item(), 2)
        ('converged', 0.51)
    """
    check_integer("max_steps", max_steps)
    if tolerance is not None:
        check_number("tolerance", tolerance, hint=" of standard errors")
    check_start(log_likelihood, params, data)
    chosen = choose_metric(log_likelihood, params, data) if metric is None else metric
    if not isinstance(chosen, Information) or chosen.likelihood.function is not log_likelihood:
        raise ValueError(
            f"metric is {chosen!r}, expected one of the same function: ng.fisher(f, params), ng.sampled_fisher(f, "
            "params), ng.observed_fisher(f, params) or ng.empirical_fisher(f, params)"
        )
    ascent = Ascent(chosen, params, data)
    bound = TOLERANCE.get(ascent.space.dtype, COARSE) if tolerance is None else tolerance
    status: Status | None = None
    while status is None and ascent.steps < max_steps:
        status = ascent.step(bound)
    status = ascent.judge(status or "max_steps")
    rows = copy_tensors(data)  # standard errors are those of these rows, whatever is written over them later
    result = MaximumLikelihood(
        ascent.estimate, status, ascent.steps, ascent.distance, ascent.value * ascent.count, chosen, rows
    )
    if status in ADVICE:
        warnings.warn(f"{result}: {ADVICE[status]}", stacklevel=6)
    return result


ADVICE = {
    "max_steps": "the estimate had not settled; start from there with more max_steps, or from a better start",
    "stalled": "no step raised the likelihood any more; it has kinks, or its rounding hides the rest: start "
    "elsewhere, take float64, or shift the data to zero",
    "saddle": "the log likelihood curves upwards along a direction there, as where two components start alike; start "
    "elsewhere",
    "unbounded": (
        "the likelihood rises for ever, or up to the edge of where it is defined, as with classes that a line "
        "separates, or a variance that falls to 0; there is no maximum: leave a parameter out, or add a penalty as a "
        "prior's log density, and look at the sign, which is that of log p and not of a loss"
    ),
}


def check_start(log_likelihood: Callable[..., Any], params: Estimate, data: Any) -> None:
    """ValueError for a log likelihood that is not finite at the start."""
    named, likelihood = name_parameters(params), observed_fisher(log_likelihood, params).likelihood
    rows = likelihood.check_rows(data)
    likelihood.check_support(named, rows)
    with torch.no_grad():
        value = likelihood.evaluate(named, rows).sum()
    if torch.promote_types(value.dtype, dtype := Space(named).dtype) != dtype:
        raise ValueError(
            f"the log likelihood is {value.dtype} and params are {dtype}: give params in the type of the data, as by "
            ".double()"
        )
    if not bool(value.isfinite()):
        raise ValueError(
            f"the log likelihood is {float(value)} at the start: look for a scale that is not positive or a NaN in the "
            "data, start elsewhere, or let the function take the logarithm of what must be positive"
        )


def choose_metric(log_likelihood: Callable[..., Any], params: Estimate, data: Any) -> Information:
    """The expected information where it has a closed form, else the observed one."""
    expected = fisher(log_likelihood, params)
    try:
        expected.at(params, data)
    except NotImplementedError:
        return observed_fisher(log_likelihood, params)
    return expected


class Ascent:
    """A point, and the steps from it; all is solved and judged in units of the information's diagonal."""

    def __init__(self, metric: Information, params: Estimate, data: Any) -> None:
        self.metric, self.data, self.single = metric, data, isinstance(params, Tensor)
        named = name_parameters(params)
        self.space, self.rows = Space(named), metric.likelihood.check_rows(data)
        self.theta = self.space.flatten({name: p.detach().clone() for name, p in named.items()})
        self.count, self.steps, self.restless, self.idle, self.rank = self.rows.batch(), 0, 0, 0, 0
        self.distance, self.value, self.edge = math.inf, math.nan, False
        self.read()
        wrong = [name for name, part in self.space.unflatten(self.gradient).items() if not all_finite(part)]
        if wrong:
            raise ValueError(
                f"the derivative of the log likelihood by {', '.join(wrong)} is not finite at the start, where its "
                "value is: look for 0 log 0, a root of 0, or a branch of torch.where that is not finite; leave such "
                "rows out, or start elsewhere"
            )

    @property
    def params(self) -> Params:
        """Theta by name."""
        return self.space.unflatten(self.theta)

    @property
    def estimate(self) -> Estimate:
        """As the user gave the start."""
        values = {name: p.clone() for name, p in self.params.items()}
        return values["params"] if self.single else values

    @keep_gradient_mode
    def read(self) -> None:
        """The mean log likelihood, its gradient, the information and the units of the parameters at theta."""
        operator = self.metric.at(self.params, self.data)
        each, pull = differentiate(self.metric, self.params, self.rows)
        self.value = float(each.mean())
        self.noise = NOISE * torch.finfo(each.dtype).eps * (1 + float(each.abs().mean()))
        self.gradient = pull(torch.full_like(each, 1 / len(each))).detach()
        self.matrix = operator.dense()
        self.scales = find_units(operator, self.matrix, self.metric, self.params, self.rows)
        self.axes = Axes(self.matrix, self.scales)
        self.rank = max(self.rank, self.axes.rank)

    def propose(self) -> tuple[Tensor, float]:
        """|G|^+ gradient, and its slope. By the scores' own matrix where G is nothing along the gradient."""
        direction, rest = self.axes.solve(self.gradient)
        if bool(rest.any()):
            scores = read_scores(self.metric, self.params, self.rows)
            units = take_root(scores.diagonal())
            # as on a plateau: the expected information of bits that are nearly certain
            if float((rest / units).abs().max()) * math.sqrt(self.count) > COARSE:
                direction, _ = Axes(scores, units).solve(self.gradient)
        return direction, float(self.gradient @ direction)

    def step(self, bound: float) -> Status | None:
        """One step; why it is the last, or None."""
        before = self.distance
        direction, slope = self.propose()
        self.distance = math.sqrt(max(self.count * slope, 0.0))
        length, rise = self.search(direction, slope)
        long = length >= 1
        if length < SHORT and not self.edge:
            direction, length, rise = max((direction, length, rise), *self.try_alone(direction), key=lambda way: way[2])
            self.edge = False
        self.steps += 1
        if length == math.inf:
            return "unbounded"
        if length == 0:
            return self.explain(slope, bound)
        change = length * direction
        old, self.theta = self.axes, self.theta + change
        self.read()
        # towards a maximum at infinity the likelihood levels off, and the information along the way with it; or it
        # rises for ever, and a whole step leaves as far to go
        fall = (self.axes.measure(change) / old.measure(change)).log().abs()
        nearer = self.distance < 0.9 * before
        if float(fall) > (DRAWN if isinstance(self.metric, SampledInformation) else RESTLESS):
            self.restless += 1
        elif nearer and rise > self.noise and self.axes.rank == self.rank:
            self.restless = 0
        elif long and rise > self.noise and not nearer:
            self.restless += 1
        self.idle = self.idle + 1 if rise <= self.noise and self.distance > before / 2 else 0
        return self.explain(slope, bound) if self.idle == IDLE or self.distance <= bound else None

    def explain(self, slope: float, bound: float) -> Status:
        """Why the fit goes no further."""
        if self.distance <= bound:
            return "converged"
        if self.edge:
            return "unbounded"
        if slope <= 100 * self.noise and self.distance <= 10 * COARSE:
            return "round_off"
        near = self.distance <= len(self.theta) / math.sqrt(self.count)
        return "kink" if near or self.stands_on_kink(bound) else "stalled"

    def try_alone(self, direction: Tensor) -> Iterator[tuple[Tensor, float, float]]:
        """The direction's part of each parameter, with its length and its gain."""
        for part in direction.diag():
            if (slope := float(self.gradient @ part)) > 0:
                yield part, *self.search(part, slope)

    def stands_on_kink(self, bound: float) -> bool:
        """True if a single parameter is not settled, and the likelihood falls on both sides of it as lines do."""
        parts = [(part, float(self.gradient @ part)) for part in self.propose()[0].diag()]
        left = [(part, slope) for part, slope in parts if math.sqrt(self.count * abs(slope)) > bound]
        if len(left) != 1:
            return False
        part, slope = left[0]
        length = 100 * self.noise / abs(slope)  # where rounding does not count
        sides = self.evaluate(self.theta + length * part), self.evaluate(self.theta - length * part)
        # the bend of a smooth function is a share `length` of this
        return length <= 10 * SHORT and sum(sides) - 2 * self.value <= -length * abs(slope) / 2

    def search(self, direction: Tensor, slope: float) -> tuple[float, float]:
        """The length and its gain: halved while that is too little, or less; doubled while it grows as a line does.

        A length of 0 where none gains, inf where the gain has no end.
        """

        def gain(length: float) -> float:
            return self.evaluate(self.theta + length * direction) - self.value

        length, rise = 1.0, gain(1.0)
        while not rise >= ENOUGH * length * slope - self.noise:
            self.edge = not math.isfinite(rise)
            length /= 2
            if not length * slope > self.noise or bool((self.theta + length * direction == self.theta).all()):
                if not self.edge:  # what is left at no length at all
                    self.noise = max(self.noise, abs(rise))
                return 0.0, 0.0
            rise = gain(length)
        self.edge = False
        while length < 1 and (nearer := gain(length / 2)) > rise + self.noise:
            length, rise = length / 2, nearer
        while length < LONGEST and math.isfinite(rise):
            further = gain(2 * length)
            if not further - rise >= length * slope / 2 > self.noise:
                return length, rise
            length, rise = 2 * length, further
        return math.inf, rise

    @keep_gradient_mode
    def evaluate(self, theta: Tensor) -> float:
        """The mean log likelihood; NaN outside of the domain of a distribution's parameters."""
        with torch.no_grad():
            return float(self.metric.likelihood.evaluate(self.space.unflatten(theta), self.rows).mean())

    def judge(self, status: Status) -> Status:
        """The status, seen from where the fit ended."""
        if status not in SETTLED or status == "kink":  # there the second derivative is not that of the function
            return "unbounded" if status != "max_steps" and self.restless >= FEW else status
        level = "unbounded" if self.restless else status
        curvature = ObservedInformation(self.metric.likelihood).at(self.params, self.data).dense()
        observed, given = (part / self.scales / self.scales.unsqueeze(1) for part in (curvature, self.matrix))
        values = eigh(observed)[0]
        round_off = SINGULAR * len(values) * torch.finfo(values.dtype).eps
        if float(values[0]) < -round_off * float(values.abs().max()):
            return "saddle"
        if level == "unbounded":
            return level
        return "flat" if float(eigh(take_absolute(observed) + take_absolute(given))[0][0]) <= round_off else status


def differentiate(metric: Information, params: Params, rows: Call) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """log p of every row (b,), and the function u -> J^T u (n,) of weights of the rows."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    with torch.enable_grad():
        each = metric.likelihood.log_p(leaves, *rows.args)

    def pull(weights: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            each, list(leaves.values()), weights, create_graph=weights.requires_grad, materialize_grads=True
        )
        return Space(params).flatten(dict(zip(leaves, parts, strict=True)))

    return each.detach(), pull


@keep_gradient_mode
def read_scores(metric: Information, params: Params, rows: Call) -> Tensor:
    """The mean outer product of the rows' scores, (n, n)."""
    each, pull = differentiate(metric, params, rows)
    with torch.enable_grad():
        weights = torch.zeros_like(each).requires_grad_()
        columns = [  # of J: the derivatives of J^T u, which is linear in u
            torch.autograd.grad(part, weights, retain_graph=True, materialize_grads=True)[0]
            if part.requires_grad
            else torch.zeros_like(each)
            for part in pull(weights).unbind()
        ]
    return gram(torch.stack(columns, 1).detach(), 1 / len(each))


def find_units(operator: Operator, matrix: Tensor, metric: Information, params: Params, rows: Call) -> Tensor:
    """Units (n,) of the parameters: sqrt(G_ii), with the scores' squares where G is of second derivatives.

    The diagonal of these may vanish where they do not, and has their round-off.
    """
    sizes = matrix.diagonal().abs()
    if operator.indefinite:
        scores = read_scores(metric, params, rows).diagonal()
        sizes = torch.where(scores > TINY * scores.max(), scores + sizes, 0)
    return take_root(sizes)


def take_root(sizes: Tensor) -> Tensor:
    """sqrt(size), 1 where there is but round-off."""
    return torch.where(sizes > TINY * sizes.max(), sizes, 1).sqrt()


class Axes:
    """Eigenvectors of D^-1 A D^-1, D = diag(scales): |A|, its inverse and its rank, the same in all units."""

    def __init__(self, matrix: Tensor, scales: Tensor) -> None:
        values, self.vectors = eigh(matrix / scales / scales.unsqueeze(1))
        self.scales, self.sizes = scales, values.abs()
        self.keep = self.sizes > SINGULAR * len(values) * torch.finfo(values.dtype).eps * self.sizes.max()
        self.rank = int(self.keep.sum())

    def solve(self, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """x = |A|^+ b, D^-1 |D^-1 A D^-1|^+ D^-1 b, and b - |A| x."""
        parts = self.vectors.mT @ (rhs / self.scales)
        solution = self.vectors @ torch.where(self.keep, parts / torch.where(self.keep, self.sizes, 1), 0) / self.scales
        return solution, self.scales * (self.vectors @ torch.where(self.keep, 0, parts))

    def measure(self, change: Tensor) -> Tensor:
        """sqrt(v^T |A| v) of a change v."""
        return (self.sizes * (self.vectors.mT @ (self.scales * change)).square()).sum().sqrt()


ATTRIBUTES = {
    **dict.fromkeys(("bse", "tvalues", "pvalues"), "write fit.standard_errors().values, and divide fit.params by them"),
    **dict.fromkeys(("cov_params", "hess_inv", "normalized_cov_params"), "write fit.standard_errors().covariance"),
    "conf_int": "write fit.standard_errors().intervals()",
    "summary": "print(fit.standard_errors()) shows a table",
    **dict.fromkeys(("llf", "fun"), "write fit.log_likelihood, the sum over rows"),
    "aic": "write 2 * k - 2 * fit.log_likelihood, k the number of parameters",
    "bic": "write k * math.log(n) - 2 * fit.log_likelihood, k the number of parameters and n of rows",
    **dict.fromkeys(("success", "converged", "mle_retvals", "message"), "fit.status says how it ended"),
    "nit": "write fit.steps",
    **dict.fromkeys(("x", "estimate", "coef_"), "write fit.params"),
}
"""Names of statsmodels' and SciPy's results, and what stands for them in a fit."""


@dataclass(frozen=True, repr=False)
class MaximumLikelihood:
    """What `maximize_likelihood` gives.

    Args:
        params: The estimate, as the start was given.
        status: "converged"; "round_off" where the log likelihood's own rounding hides what is left; "kink" where no
            step gains and what is left is a row's share or all along one parameter, as at Laplace's median; "flat"
            where a direction is not identified; "saddle", "stalled", "unbounded" or "max_steps" otherwise.
        steps: Steps that it took.
        distance: Length of the last whole step, in standard errors.
        log_likelihood: The sum over rows at the estimate.
        metric: G.
        data: The rows.
    """

    params: Estimate
    status: Status
    steps: int
    distance: float
    log_likelihood: float
    metric: Information
    data: Any = field(compare=False)

    def __repr__(self) -> str:
        return (
            f"MaximumLikelihood({self.status} after {self.steps} steps, {self.distance:.2g} standard errors a step, "
            f"log likelihood {self.log_likelihood:.6g})"
        )

    if not TYPE_CHECKING:  # a checker knows the attributes that there are

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{text}: {ATTRIBUTES[name]}" if name in ATTRIBUTES else text, name=name, obj=self)

    def standard_errors(self, metric: Metric | None = None, *, robust: bool = False) -> StandardErrors:
        """`ng.standard_errors` at the estimate.

        Args:
            metric: Another information than that of the fit.
            robust: The sandwich, right where the model is not.
        """
        return standard_errors(self.metric if metric is None else metric, self.params, self.data, robust=robust)


@set_modes_aside
@explain_calls
def standard_errors(metric: Metric, params: Estimate, data: Any, *, robust: bool = False) -> StandardErrors:
    """The covariance (n G)^-1 of the maximum likelihood estimate from n rows; robust: H^-1 J H^-1 / n.

    Of a model n counts the positions of a sequence, and targets by their weights; ignored and missing ones not.

    Which information G is says the metric: `ng.fisher(f, params)` is the expected one, `ng.observed_fisher(f, params)`
    the observed one, `ng.empirical_fisher(f, params)` the mean outer product of scores. They agree where the model is
    right and the rows are many. The robust covariance, with G as H and the empirical matrix as J, is right for any
    model whose rows are independent, if H is the observed information.

    Args:
        metric: G, of a function of one's own or of a model and its likelihood, noise included: `ng.Gaussian(std)`
            with the deviation of the residuals, where `nn.MSELoss()` stands for one of sqrt(1/2).
        params: The estimate, as `metric.at` takes it.
        data: The rows, as `metric.at` takes them.
        robust: The sandwich in place of (n G)^-1; for a function of one's own.

    Returns:
        `.values`, `.covariance`, `.intervals(level)`, `.ellipse(names, level)`, `.transform(f)`; prints as a table.

    Raises:
        TypeError: For anything but a metric; for `robust` with the metric of a model.
        ValueError: For an information that is singular, with the direction that is not identified, indefinite, or not
            finite; for `robust` with a single row.

    Reference:
        The sandwich: Huber 1967; White 1982.

    Example:
        >>> def normal(params):
        ...     return torch.distributions.Normal(params["mean"], params["scale"])
        >>> params = {"mean": torch.tensor(1.0), "scale": torch.tensor(2.0)}
        >>> errors = ng.standard_errors(ng.fisher(normal, params), params, torch.randn(100))
        >>> errors.values["mean"]  # 2 / sqrt(100)
        tensor(0.2000)
    """
    if not isinstance(metric, Metric):
        raise TypeError(
            f"metric is {type(metric).__name__}, expected a metric such as ng.fisher(f, params) or "
            "ng.observed_fisher(f, params)"
        )
    named = name_parameters(params)
    (operator, count), names = metric.add_up(named, data), name_entries(named)
    matrix, units = operator.dense(), None
    if isinstance(metric, Information):
        units = find_units(operator, matrix, metric, named, metric.likelihood.check_rows(data))
    inverse = invert_information(matrix, names, units, indefinite=operator.indefinite)
    if not robust:
        return StandardErrors(params, inverse / count, names)
    if not isinstance(metric, Information):
        raise TypeError(
            f"robust=True takes the metric of a function of your own, and metric is {metric!r}: write the model as "
            "log_likelihood(params, *row)"
        )
    likelihood = metric.likelihood
    if likelihood.check_rows(data).batch() == 1:
        raise ValueError(
            "robust=True takes the spread of the rows' scores, and the data are one row, whose score is 0 at the "
            "estimate: give independent observations as rows of their own, or leave robust out"
        )
    moment = empirical_fisher(likelihood.function, next(iter(named.values())) if likelihood.single else named)
    return StandardErrors(params, inverse @ moment.at(named, data).dense() @ inverse / count, names)


@dataclass(frozen=True, repr=False)
class StandardErrors:
    """The covariance of an estimate, and what follows from it. Prints as a table.

    Args:
        params: The estimate, as it was given.
        covariance: Shape (n, n), over the entries of params in their order, row-major.
        names: Of the n entries: `scale`, `slopes[0]`, `weights[1, 2]`.
    """

    params: Estimate
    covariance: Tensor
    names: tuple[str, ...]

    @property
    def values(self) -> Any:
        """The standard errors, a dict of tensors or one tensor as the estimate is."""
        return self._like_params(self.covariance.diagonal().clamp(min=0).sqrt())

    def intervals(self, level: float = 0.95) -> Any:
        """Wald's confidence intervals, estimate -+ z standard errors.

        Args:
            level: Of confidence, in (0, 1).

        Returns:
            As the estimate is, each tensor with a last axis of two: the lower and the upper end.
        """
        check_range("level", level, "(0, 1)", hint=", such as 0.95")
        reach = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
        width = reach * self.covariance.diagonal().clamp(min=0).sqrt()
        ends = self._like_params(self._flat - width), self._like_params(self._flat + width)
        if isinstance(self.params, Tensor):
            return torch.stack(ends, -1)
        return {name: torch.stack([ends[0][name], ends[1][name]], -1) for name in self.params}

    def ellipse(self, names: Sequence[str], level: float = 0.95, *, points: int = 100) -> Tensor:
        """The boundary of the confidence ellipse of two entries: x^T C^-1 x = -2 log(1 - level), C of these two.

        Args:
            names: The two entries, among `names`.
            level: Of confidence, in (0, 1).
            points: How many, all around.

        Returns:
            Shape (points, 2), to plot: `plt.plot(*errors.ellipse(["a", "b"]).T)`.

        Raises:
            ValueError: For names that the estimate does not have, or not two different ones.
        """
        check_range("level", level, "(0, 1)", hint=", such as 0.95")
        unknown = [name for name in names if name not in self.names]
        if unknown or len(names) != 2 or names[0] == names[1]:
            known = ", ".join(self.names[:20]) + ", ..." * (len(self.names) > 20)
            raise ValueError(f"names is {list(names)}, expected two different ones of {known}")
        places = torch.tensor([self.names.index(name) for name in names], device=self.covariance.device)
        lengths, axes = eigh(self.covariance[places][:, places])
        angles = torch.linspace(0, 2 * math.pi, points, dtype=axes.dtype, device=axes.device)
        circle = torch.stack([angles.cos(), angles.sin()], 1) * math.sqrt(-2 * math.log1p(-level))
        return self._flat[places] + (circle * lengths.clamp(min=0).sqrt()) @ axes.mT

    def transform(self, function: Callable[[Any], Estimate]) -> StandardErrors:
        """The errors of a function of the estimate by the delta method: J C J^T, with its Jacobian J.

        Args:
            function: Of params as the estimate is; returns a tensor or a dict of tensors.

        Returns:
            `StandardErrors` of the function's values.

        Raises:
            TypeError: For a function that returns anything else.

        Example:
            >>> params, C = {"log_scale": torch.tensor(0.0)}, torch.tensor([[0.04]])
            >>> errors = ng.estimation.StandardErrors(params, C, ("log_scale",))
            >>> errors.transform(lambda p: {"scale": p["log_scale"].exp()})
            StandardErrors(scale 1 +- 0.2)
        """

        def flatten(vector: Tensor) -> Tensor:
            return torch.cat([p.reshape(-1) for p in name_parameters(function(self._like_params(vector))).values()])

        value = function(self._like_params(self._flat))
        if not isinstance(value, (Tensor, dict)):
            raise TypeError(
                f"function returned {type(value).__name__}, expected a tensor or a dict of tensors: "
                "errors.transform(lambda params: {'scale': params['log_scale'].exp()})"
            )
        jacobian = torch.func.jacrev(flatten)(self._flat)
        return StandardErrors(value, jacobian @ self.covariance @ jacobian.mT, name_entries(name_parameters(value)))

    @property
    def _flat(self) -> Tensor:
        named = name_parameters(self.params)
        return Space(named).flatten({name: p.detach() for name, p in named.items()})

    def _like_params(self, vector: Tensor) -> Any:
        named = name_parameters(self.params)
        parts = Space(named).unflatten(vector)
        return parts["params"] if isinstance(self.params, Tensor) else parts

    def _rows(self) -> list[tuple[str, str, str, str]]:
        reach = 1.959963984540054
        errors = self.covariance.diagonal().clamp(min=0).sqrt().tolist()
        return [
            (name, f"{value:.4g}", f"{error:.3g}", f"{value - reach * error:.4g} to {value + reach * error:.4g}")
            for name, value, error in zip(self.names, self._flat.tolist(), errors, strict=True)
        ]

    def __str__(self) -> str:
        rows = [HEAD, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def __repr__(self) -> str:
        return f"StandardErrors({', '.join(f'{name} {value} +- {error}' for name, value, error, _ in self._rows())})"

    def _repr_html_(self) -> str:
        return write_table(HEAD, self._rows())


HEAD = ("parameter", "estimate", "standard error", "95 % interval")


def name_entries(params: Params) -> tuple[str, ...]:
    """A name per entry: `scale`, `slopes[0]`, `weights[1, 2]`."""
    return tuple(
        name + (f"[{', '.join(map(str, place))}]" if place else "")
        for name, p in params.items()
        for place in product(*map(range, p.shape))
    )


def invert_information(matrix: Tensor, names: Sequence[str], units: Tensor | None, *, indefinite: bool) -> Tensor:
    """G^-1. ValueError with the direction where G is singular or has negative curvature, and where it is not finite.

    In the units of the parameters, None: their own standard deviations, so that the user's do not count.
    """
    if not all_finite(matrix):
        raise ValueError(
            "the information is not finite: params lie at the edge of what the model can be, as a variance of 0 does, "
            "where there are no standard errors; or the model overflows, so look at params and the units of the data"
        )
    round_off = SINGULAR * len(matrix) * torch.finfo(matrix.dtype).eps
    sizes = matrix.diagonal().abs() if units is None else units.square()
    # a sum of squares has no round-off of its own; second derivatives may cancel to it
    flat = sizes <= (round_off * sizes.max() if indefinite and units is None else 0.0)
    scales = torch.where(flat, sizes.max().clamp(min=1e-30), sizes).sqrt()
    values, vectors = eigh(matrix / scales / scales.unsqueeze(1))
    least = round_off * float(values.abs().max())
    if float(values[0]) <= least:
        direction = vectors[:, 0] / scales
        spelled = spell_direction(direction / direction.abs().max(), names)
        if float(values[0]) < -least:
            raise ValueError(
                f"the information is indefinite: along {spelled} the log likelihood curves upwards, so that params "
                "are no maximum; start ng.maximize_likelihood elsewhere, such as a step along this direction away"
            )
        raise ValueError(
            f"the information is singular: the data do not identify {spelled}, along which the log likelihood is flat. "
            "Fix one of these parameters, or write the model with fewer; the empirical and the sampled matrix "
            "also need more rows than parameters"
        )
    images = vectors / scales.unsqueeze(1)
    return (images / values) @ images.mT


def spell_direction(direction: Tensor, names: Sequence[str]) -> str:
    """`1 a - 0.5 b`, the largest six entries."""
    order = direction.abs().argsort(descending=True)[:6].tolist()
    terms = [(float(direction[i]), names[i]) for i in order if abs(float(direction[i])) > 0.05]
    sign = math.copysign(1, terms[0][0])
    spelled = [f"{'-' if sign * share < 0 else '+'} {abs(share):.2g} {name}" for share, name in terms]
    return " ".join(spelled).removeprefix("+ ")
