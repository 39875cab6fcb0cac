"""The Fisher information of a model: exact over labels, over sampled labels, and moments of the data's gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Entrywise, Likelihood, LogDensity, as_criterion
from natgrad.ground.checks import check_integer
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Model, RandomState, Select
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Metric, PullbackMetric, Scores, check_has_outputs, explain_at
from natgrad.metrics.information import (
    EmpiricalInformation,
    ExpectedInformation,
    LogLikelihood,
    ObservedInformation,
    OwnLikelihood,
    SampledInformation,
    is_own,
)
from natgrad.operators import Centred, Form, Linearization, Operator, Pullback


@overload
def fisher(
    model: Model,
    family: Likelihood | nn.Module | Criterion,
    *,
    chunk_size: int | None = None,
    outputs: Select | None = None,
) -> Fisher: ...


@overload
def fisher(model: LogLikelihood, family: Params | Tensor) -> ExpectedInformation: ...


@explain_calls
def fisher(
    model: Model,
    family: Likelihood | nn.Module | Criterion | Params | Tensor,
    *,
    chunk_size: int | None = None,
    outputs: Select | None = None,
) -> Fisher | ExpectedInformation:
    """F = E_x E_{y ~ p(y|x)} [grad log p(y|x) grad log p(y|x)^T] = E_x[J^T M J], the labels' expectation exact.

    It needs no targets: the expectation over labels is that of the model's own distribution. Where some targets are
    ignored or weighted, `gauss_newton` is the metric of that loss. `NaturalGradient` passes the targets of `opt.loss`
    on, and then the rows weigh what they weigh in the loss.

    Of a statistical model of your own it is the expected information of one observation, exact: give a function
    distribution(params, *inputs) -> `torch.distributions.Distribution` and its parameters. `sampled_fisher` takes draws
    of a distribution that has no closed form, `observed_fisher` and `empirical_fisher` take the data's own rows.

    Args:
        model: A module, or a function f(params, x); or a function distribution(params, *inputs).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one; or the parameters of the distribution, a
            dict of tensors or one tensor.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        outputs: A function that picks what the family is of, where the model returns more than that: `outputs=lambda
            out: out.logits`.

    Returns:
        A metric; `.at(params, inputs)` gives the operator, a mean over rows of outputs (examples; tokens for
        sequences). Of a distribution `.at(params, (*inputs, y))`, or `.at(params, y)` where it has no inputs; of y only
        the number of rows counts.

    Raises:
        NotImplementedError: For a likelihood without `fisher`, and at `.at` for a distribution without a closed form.

    Reference:
        Amari 1998; Pascanu & Bengio 2013, eq. 8-11.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> G = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), torch.randn(10, 4))
        >>> (G @ torch.ones(15)).shape, G.dense().shape
        (torch.Size([15]), torch.Size([15, 15]))
        >>> def normal(params):
        ...     return torch.distributions.Normal(params["mean"], params["scale"])
        >>> params = {"mean": torch.tensor(0.0), "scale": torch.tensor(2.0)}
        >>> ng.fisher(normal, params).at(params, torch.randn(10)).dense()
        tensor([[0.2500, 0.0000],
                [0.0000, 0.5000]])
    """
    if is_own(family):
        refuse_options(chunk_size=chunk_size, outputs=outputs)
        return ExpectedInformation(OwnLikelihood(model, isinstance(family, Tensor)))
    criterion = as_criterion(family)
    refuse_log_density(criterion.family)
    if (type(criterion.family).fisher, type(criterion.family).mv) == (Likelihood.fisher, Likelihood.mv):
        criterion.family.fisher(torch.empty(0, 0))  # NotImplementedError, with what to do
    return Fisher(model, criterion, chunk_size, outputs=outputs)


@overload
def sampled_fisher(
    model: Model,
    family: Likelihood | nn.Module | Criterion,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    outputs: Select | None = None,
) -> SampledFisher: ...


@overload
def sampled_fisher(
    model: LogLikelihood, family: Params | Tensor, *, samples: int = 1, generator: torch.Generator | None = None
) -> SampledInformation: ...


@explain_calls
def sampled_fisher(
    model: Model,
    family: Likelihood | nn.Module | Criterion | Params | Tensor,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    outputs: Select | None = None,
) -> SampledFisher | SampledInformation:
    """The Fisher with the labels' expectation replaced by `samples` draws per row: unbiased, rank <= R k.

    Every `.at` draws anew and then keeps its draws, so that the operator is one fixed matrix.

    Args:
        model: A module, or a function f(params, x); or any distribution(params, *inputs), as in `fisher`.
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one; or the parameters of the distribution.
        samples: Draws per row, k.
        generator: Private source of the draws, default a new one, seeded 0.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        outputs: As in `fisher`.

    Returns:
        A metric; `.at(params, inputs)` gives the operator.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> metric = ng.sampled_fisher(model, ng.Categorical(), samples=2)
        >>> metric.at(ng.trainable(model), torch.randn(10, 4)).root().shape
        torch.Size([15, 20])
    """
    samples = check_integer("samples", samples)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if is_own(family):
        refuse_options(chunk_size=chunk_size, outputs=outputs)
        return SampledInformation(OwnLikelihood(model, isinstance(family, Tensor)), samples, generator)
    criterion = as_criterion(family)
    refuse_log_density(criterion.family)
    return SampledFisher(model, criterion, chunk_size, samples, generator, outputs=outputs)


@overload
def empirical_fisher(
    model: Model, family: Likelihood | nn.Module | Criterion, *, outputs: Select | None = None
) -> EmpiricalFisher: ...


@overload
def empirical_fisher(model: LogLikelihood, family: Params | Tensor) -> EmpiricalInformation: ...


@explain_calls
def empirical_fisher(
    model: Model, family: Likelihood | nn.Module | Criterion | Params | Tensor, *, outputs: Select | None = None
) -> EmpiricalFisher | EmpiricalInformation:
    """U = E_{(x, t)} [g g^T], g the gradient of -log p of one row, over the data's own targets. Not the Fisher.

    A row is an example; a token for classes over a sequence; an entry where the variance is predicted too. Targets that
    are ignored do not count, and those with weights count as often as in the loss. U is in the unit of the loss, as
    the Fisher is: of a loss that averages over the C entries of an example it is 1 / C of the g's moment, and C times
    that of the loss's gradients. Where targets are drawn from the likelihood it is the Fisher on average.

    Of a model that returns log p(x), with `ng.LogDensity()`, it takes no targets, `.at(params, x)`, and is the Fisher
    at draws x of the model itself. Of a log likelihood of your own it is the mean outer product of the rows' scores.

    Args:
        model: A module, or a function f(params, x); or a function log_likelihood(params, *row) -> scalar of one row of
            the data, or distribution(params, *inputs).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one; or the parameters of the log likelihood.
        outputs: As in `fisher`.

    Returns:
        A metric; `.at(params, (inputs, targets))` gives the operator.

    Reference:
        Le Roux et al. 2008; Pascanu & Bengio 2013, eq. 13 with per-example gradients.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> metric = ng.empirical_fisher(model, nn.CrossEntropyLoss())
        >>> x, y = torch.randn(10, 4), torch.randint(3, (10,))
        >>> metric.at(ng.trainable(model), (x, y)).root().shape
        torch.Size([15, 10])
    """
    if is_own(family):
        refuse_options(outputs=outputs)
        return EmpiricalInformation(OwnLikelihood(model, isinstance(family, Tensor)))
    return EmpiricalFisher(model, as_criterion(family), outputs=outputs)


@explain_calls
def covariance(
    model: Model, family: Likelihood | nn.Module | Criterion, *, centred: bool = False, outputs: Select | None = None
) -> Covariance:
    """U = E[g g^T], or C = U - gbar gbar^T, of the per-example gradients g of -log p, in the unit of the loss.

    U is that of `ng.empirical_fisher`: the Fisher on average where targets are the model's own. The metric takes
    targets: `.at(params, (inputs, targets))`. It is kept in sample space, so the number of parameters is no obstacle:
    `ng.SampleSpace()` solves with it. With gradient and covariance from one batch (U + lambda)^-1 g and
    (C + lambda)^-1 g are exactly parallel, of length ratio 1 / (1 - e g^T (U + lambda)^-1 g), e the entries of an
    example that the loss averages over: centring changes the length alone, and can make it explode.

    Args:
        model: A module, or a function f(params, x).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one.
        centred: C instead of U.
        outputs: As in `fisher`.

    Returns:
        A metric; `.at(params, (inputs, targets))` gives the operator.

    Reference:
        Le Roux, Manzagol & Bengio 2008 (TONGA); Pascanu & Bengio 2013, eq. 12, 13, with the per-example gradients that
        the printed formulas lack.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> metric = ng.covariance(model, nn.CrossEntropyLoss(), centred=True)
        >>> opt = ng.NaturalGradient(model, metric, solver=ng.SampleSpace(), damping=0.1)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """
    return Covariance(EmpiricalFisher(model, as_criterion(family), outputs=outputs), centred)


@explain_calls
def observed_fisher(log_likelihood: LogLikelihood, params: Params | Tensor) -> ObservedInformation:
    """The observed information of one row, -d^2/dtheta^2 of the mean log likelihood: what standard errors are made of.

    It is the Hessian of the loss -log p, so that it is positive definite at an isolated maximum alone. For the outputs
    of a module it is `hessian`.

    Args:
        log_likelihood: A function log_likelihood(params, *row) -> scalar of one row of the data, or a function
            distribution(params, *inputs) -> `torch.distributions.Distribution` of the observations.
        params: A dict of tensors, or one tensor, as the function takes them.

    Returns:
        A metric; `.at(params, data)` gives the operator. Data are a tensor (b, ...) or a tuple (x, ..., y) of such.

    Raises:
        TypeError: For parameters of another kind.

    Reference:
        Efron & Hinkley 1978.

    Example:
        >>> def log_p(params, x, y):
        ...     return -0.5 * (y - params["slope"] * x) ** 2
        >>> params, x = {"slope": torch.tensor(1.0)}, torch.tensor([1.0, 2.0, 3.0])
        >>> ng.observed_fisher(log_p, params).at(params, (x, 2 * x)).dense()
        tensor([[4.6667]])
    """
    if not is_own(params):
        raise TypeError(
            f"params is {type(params).__name__}, expected a dict of tensors or one tensor; for a module and its loss "
            "the observed information is ng.hessian(model, loss)"
        )
    return ObservedInformation(OwnLikelihood(log_likelihood, isinstance(params, Tensor)))


def refuse_log_density(family: Likelihood) -> None:
    """TypeError for a model of x alone: nothing can be drawn given x."""
    if isinstance(family, LogDensity):
        raise TypeError(
            "LogDensity() has no targets that could be drawn given x: use ng.empirical_fisher(model, ng.LogDensity()), "
            "over the x that come; at draws of the model itself, .at(params, model.sample(n)), that is the Fisher"
        )


def refuse_options(**options: Any) -> None:
    """TypeError for what a function of one's own does not take."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise TypeError(f"{given[0]} is for the outputs of a model: with a distribution of your own leave it out")


@dataclass(frozen=True, repr=False)
class Fisher(PullbackMetric):
    """What `fisher` gives: E_x[J^T M J], exact over labels."""

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        return self.criterion.family, None if targets is None else self.criterion.weights(outputs, targets)


@dataclass(frozen=True, repr=False)
class SampledFisher(PullbackMetric):
    """What `sampled_fisher` gives: the Fisher over sampled labels.

    Args:
        samples: Draws per row.
        generator: Private source of the draws, default a new one, seeded 0.
    """

    samples: int = 1
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), compare=False)

    def seeds(self, count: int) -> list[int]:
        drawn = torch.randint(2**62, (count,), generator=self.generator, device=self.generator.device)
        return [int(seed) for seed in drawn]

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        family = self.criterion.family
        generator = torch.Generator(linearization.outputs.device).manual_seed(seed)
        drawn = [family.score(outputs, family.sample(outputs, generator)) for _ in range(self.samples)]
        scores = Scores(torch.stack(drawn, dim=2) / self.samples**0.5)
        return scores, None if targets is None else self.criterion.weights(outputs, targets)


@dataclass(frozen=True, repr=False)
class EmpiricalFisher(PullbackMetric):
    """What `empirical_fisher` gives: U = E[g g^T] over the data's targets."""

    @property
    def needs_targets(self) -> bool:  # type: ignore[override]
        return not isinstance(self.criterion.family, LogDensity)

    def layout(self, outputs: Any) -> Tensor:
        family = self.criterion.family
        check_has_outputs(outputs)
        # entrywise means: one gradient per example, not one per entry
        return (family.family if isinstance(family, Entrywise) else family).rows(outputs)

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        if targets is None and self.criterion.family.needs_targets:
            raise ValueError(
                "targets is None: the empirical Fisher needs the data's targets; pass (inputs, targets), compute the "
                "loss with optimizer.loss(outputs, targets), or use ng.fisher without them"
            )
        scores, shares = self.criterion.scores(outputs, targets)
        rows = len(linearization.outputs)  # of an example's entries one gradient is made
        # how the mean of the columns weighs them, on several processes too
        counted = (shares.view(rows, -1).sum(1) * self.criterion.count(outputs, targets)).sqrt()
        return Scores(scores.reshape(rows, -1).unsqueeze(2), counted), torch.ones_like(counted)


@dataclass(frozen=True, repr=False)
class Covariance(Metric):
    """What `covariance` gives: U = E[g g^T], or C = U - gbar gbar^T.

    Args:
        moment: The uncentred moment U.
        centred: C instead of U.
    """

    moment: EmpiricalFisher
    centred: bool = False

    @property
    def needs_targets(self) -> bool:  # type: ignore[override]
        return self.moment.needs_targets

    @property
    def criterion(self) -> Criterion:
        """The loss that the gradients are of."""
        return self.moment.criterion

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        operator = self.moment.at(params, inputs, random=random)
        if not self.centred or not isinstance(operator, Pullback):
            return operator
        assert isinstance(operator.form, Scores)
        return Centred(operator, operator.form.counted)
