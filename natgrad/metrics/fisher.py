"""The Fisher information of a model: exact over labels, over sampled labels, and the empirical one over the data's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Entrywise, Likelihood, as_criterion
from natgrad.ground.checks import check_integer
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Model, Select
from natgrad.metrics.base import PullbackMetric, Scores, check_has_outputs
from natgrad.operators import Form, Linearization


@explain_calls
def fisher(
    model: Model,
    family: Likelihood | nn.Module | Criterion,
    *,
    chunk_size: int | None = None,
    outputs: Select | None = None,
) -> Fisher:
    """F = E_x E_{y ~ p(y|x)} [grad log p(y|x) grad log p(y|x)^T] = E_x[J^T M J], the labels' expectation exact.

    It needs no targets: the expectation over labels is that of the model's own distribution. Where some targets are
    ignored or weighted, `gauss_newton` is the metric of that loss. `NaturalGradient` passes the targets of `opt.loss`
    on, and then the rows weigh what they weigh in the loss.

    Args:
        model: A module, or a function f(params, x).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        outputs: A function that picks what the family is of, where the model returns more than that: `outputs=lambda
            out: out.logits`.

    Returns:
        A metric; `.at(params, inputs)` gives the operator, a mean over rows of outputs (examples; tokens for
        sequences).

    Raises:
        NotImplementedError: For a likelihood without `fisher`.

    Reference:
        Amari 1998; Pascanu & Bengio 2013, eq. 8-11.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> G = ng.fisher(model, ng.Categorical()).at(ng.trainable(model), torch.randn(10, 4))
        >>> (G @ torch.ones(15)).shape, G.dense().shape
        (torch.Size([15]), torch.Size([15, 15]))
    """
    criterion = as_criterion(family)
    require_fisher(criterion.family)
    return Fisher(model, criterion, chunk_size, outputs=outputs)


@explain_calls
def sampled_fisher(
    model: Model,
    family: Likelihood | nn.Module | Criterion,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    outputs: Select | None = None,
) -> SampledFisher:
    """The Fisher with the labels' expectation replaced by `samples` draws per row: unbiased, rank <= R k.

    Every `.at` draws anew and then keeps its draws, so that the operator is one fixed matrix.

    Args:
        model: A module, or a function f(params, x).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one.
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
    return SampledFisher(model, as_criterion(family), chunk_size, samples, generator, outputs=outputs)


@explain_calls
def empirical_fisher(
    model: Model, family: Likelihood | nn.Module | Criterion, *, outputs: Select | None = None
) -> EmpiricalFisher:
    """U = E_{(x, t)} [g g^T], g the gradient of -log p of one row, over the data's own targets. Not the Fisher.

    A row is an example; a token for classes over a sequence; an entry where the variance is predicted too. Targets that
    are ignored do not count, and those with weights count as often as in the loss. U is in the unit of the loss, as
    the Fisher is: of a loss that averages over the C entries of an example it is 1 / C of the g's moment, and C times
    that of the loss's gradients. Where targets are drawn from the likelihood it is the Fisher on average.

    Args:
        model: A module, or a function f(params, x).
        family: An `ng` likelihood, or a `torch.nn` loss that stands for one.
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
    return EmpiricalFisher(model, as_criterion(family), outputs=outputs)


@dataclass(frozen=True, repr=False)
class Fisher(PullbackMetric):
    """What `fisher` gives: E_x[J^T M J], exact over labels.

    Args:
        model: A module, or a function f(params, x).
        criterion: What the outputs mean.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        outputs: A function that picks what the criterion is of, where the model returns more than that.
    """

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        return self.criterion.family, weigh_rows(self.criterion, outputs, targets)


@dataclass(frozen=True, repr=False)
class SampledFisher(PullbackMetric):
    """What `sampled_fisher` gives: the Fisher over sampled labels.

    Args:
        model: A module, or a function f(params, x).
        criterion: What the outputs mean.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        outputs: A function that picks what the criterion is of, where the model returns more than that.
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
        return scores, weigh_rows(self.criterion, outputs, targets)


@dataclass(frozen=True, repr=False)
class EmpiricalFisher(PullbackMetric):
    """What `empirical_fisher` gives: U = E[g g^T] over the data's targets.

    Args:
        model: A module, or a function f(params, x).
        criterion: What the outputs mean.
        chunk_size: Examples per graph, to bound memory. None: all at once.
        outputs: A function that picks what the criterion is of, where the model returns more than that.
    """

    needs_targets = True

    def layout(self, outputs: Any) -> Tensor:
        family = self.criterion.family
        check_has_outputs(outputs)
        # entrywise means: one gradient per example, not one per entry
        return (family.family if isinstance(family, Entrywise) else family).rows(outputs)

    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        if targets is None:
            raise ValueError(
                "targets is None: the empirical Fisher needs the data's targets; pass (inputs, targets), compute the "
                "loss with optimizer.loss(outputs, targets), or use ng.fisher without them"
            )
        scores, shares = self.criterion.scores(outputs, targets)
        rows = len(linearization.outputs)  # of an example's entries one gradient is made
        # how the mean of the columns weighs them, on several processes too
        counted = (shares.view(rows, -1).sum(1) * self.criterion.count(outputs, targets)).sqrt()
        return Scores(scores.reshape(rows, -1).unsqueeze(2), counted), torch.ones_like(counted)


def weigh_rows(criterion: Criterion, outputs: Any, targets: Any) -> Tensor | None:
    """Each row's weight in the mean loss where its targets are known (ignored, class weights), None for uniform."""
    return None if targets is None else criterion.weights(outputs, targets)


def require_fisher(family: Likelihood) -> None:
    """NotImplementedError, with what to do, unless the likelihood knows its Fisher form."""
    known = (type(family).fisher, type(family).mv)
    if known == (Likelihood.fisher, Likelihood.mv):
        family.fisher(torch.empty(0, 0))
