"""P ~ (G + damping I)^-1 for iterative solvers: fewer products with G for one cheap product with P each."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_share
from natgrad.ground.linalg import cholesky
from natgrad.ground.messages import Explained
from natgrad.ground.pure import Call, Labelled, RandomState
from natgrad.ground.spaces import Params
from natgrad.metrics import Covariance, Hessian, Metric, PullbackMetric, empirical_fisher
from natgrad.operators import DiagonalOperator, Operator, Pullback, Rows
from natgrad.solvers import Solver
from natgrad.structures.base import Memory, Structure, average_tensor
from natgrad.structures.diagonal import Diagonal as DiagonalStructure
from natgrad.structures.estimates import Sampled


class Preconditioner(Explained):
    """Makes P for one step's system. It changes how fast that goes and what an early stop gives, not the solution."""

    @abstractmethod
    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        damping: float,
        operator: Operator,
        random: RandomState | None = None,
    ) -> tuple[Operator, Memory]:
        """P as an operator, and the memory for the next step.

        Args:
            memory: As for `Structure.update`.
            metric: As for `Structure.update`.
            params: As for `Structure.update`.
            inputs: As for `Structure.update`.
            damping: Of the system, in G's units, >= 0.
            operator: G, of size n.
            random: As for `Structure.update`.
        """


@dataclass(frozen=True)
class DiagonalPreconditioner(Preconditioner):
    """P = (diag(D) + damping I)^-power, D the diagonal of G or of the data's own gradients.

    A metric that is no likelihood's has no labels to draw: there D is the mean of `samples` of z o G z, z random signs.

    Args:
        power: In (0, 1]. It is .75 in Martens 2010, section 4.7; 1 is Jacobi's.
        samples: Draws of the labels from which D = diag(G) is estimated, one more pass with a backward each
            (`ng.Diagonal`). None: exact, which costs a backward pass per output.
        empirical: True for D = mean of the examples' squared gradients, Martens' choice. It needs targets.
        decay: Weight of the past in a running average of the estimate, in [0, 1).

    Raises:
        ValueError: For a power or a decay outside of these ranges, or samples < 1.

    Reference:
        Martens 2010, section 4.7.
    """

    power: float = 0.75
    samples: int | None = 1
    empirical: bool = False
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.power <= 1:
            raise ValueError(f"power is {self.power}, expected a number in (0, 1]")
        if self.samples is not None:
            check_integer("samples", self.samples, hint=", or None for the exact diagonal")
        check_share("decay", self.decay)

    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        damping: float,
        operator: Operator,
        random: RandomState | None = None,
    ) -> tuple[Operator, Memory]:
        samples = None if self.empirical or operator.closed_form else self.samples
        if samples is not None and isinstance(operator, Pullback) and operator.rank is not None:
            structure = DiagonalStructure(decay=self.decay, estimate=Sampled(samples))
            estimated, held = structure.update(memory, metric, params, inputs, random=random)
            diagonal = estimated.diagonal()
        else:
            draws = memory["draws"] if memory else 0
            if self.empirical:
                fresh = empirical(metric, params, inputs, None, random).diagonal()
            else:
                fresh = operator.diagonal() if samples is None else probed_diagonal(operator, samples, draws)
            diagonal, held = average_tensor(memory, fresh, self.decay, list(params))
            held["draws"] = draws + 1
        return DiagonalOperator(safe_power(diagonal.clamp(min=0) + damping, -self.power)), held


@dataclass(frozen=True)
class EmpiricalPreconditioner(Preconditioner):
    """P = (U + damping I)^-1, U the empirical Fisher of some of the batch's examples, inverted in sample space.

    One product with P takes two passes over the examples' row gradients. It catches the directions in which the data's
    gradients are large, which are those of large G only near a good fit. Needs targets, and a damping above zero.

    Args:
        examples: How many, drawn with a fixed seed.

    Raises:
        ValueError: For examples < 1.
    """

    examples: int = 100

    def __post_init__(self) -> None:
        check_integer("examples", self.examples)

    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        damping: float,
        operator: Operator,
        random: RandomState | None = None,
    ) -> tuple[Operator, Memory]:
        if not damping > 0:
            raise ValueError(f"damping is {damping}, expected a number > 0: (U + 0 I) has no inverse")
        moment = empirical(metric, params, inputs, self.examples, random)
        assert moment.rows is not None
        return SampleSpaceInverse(moment.rows, damping), {}


@dataclass(frozen=True)
class StructurePreconditioner(Preconditioner):
    """P = (S + damping I)^-1 for a structure's operator S.

    At the first step it raises a TypeError for an S without a closed-form inverse, or for that of a Hessian.

    Args:
        structure: One whose operator has a closed-form inverse, such as Kronecker factors.
    """

    structure: Structure

    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        damping: float,
        operator: Operator,
        random: RandomState | None = None,
    ) -> tuple[Operator, Memory]:
        held, memory = self.structure.update(memory, metric, params, inputs, random=random)
        if held.indefinite:
            raise TypeError(
                f"preconditioner is {self.structure}, of a Hessian with negative eigenvalues: a preconditioner must be "
                "positive definite; use ng.DiagonalPreconditioner()"
            )
        inverse = held.inverse(damping)
        if inverse is None:
            raise TypeError(
                f"preconditioner is {self.structure}, whose operator {held!r} has no closed-form inverse; use "
                "ng.DiagonalPreconditioner(), or a structure that has one"
            )
        return inverse, memory


def as_preconditioner(choice: Any, solver: Solver) -> Preconditioner | None:
    """A preconditioner or a structure, for a solver that takes one.

    Args:
        choice: A preconditioner, a structure or None.
        solver: The solver that it is for.

    Returns:
        A preconditioner; None for None.

    Raises:
        TypeError: For another choice, or a solver that takes no preconditioner.
    """
    if choice is None:
        return None
    if not isinstance(choice, (Preconditioner, Structure)):
        hint = "; did you forget the parentheses?" if isinstance(choice, type) else ""
        raise TypeError(
            f"preconditioner is {choice!r}, expected a natgrad Preconditioner or Structure such as "
            f"ng.DiagonalPreconditioner(){hint}"
        )
    if not is_dataclass(solver) or "preconditioner" not in {field.name for field in fields(solver)}:
        raise TypeError(
            f"solver {solver!r} takes no preconditioner; use ng.CG(), ng.MinresQLP() or ng.KrylovSubspace()"
        )
    return choice if isinstance(choice, Preconditioner) else StructurePreconditioner(choice)


class SampleSpaceInverse(Operator):
    """(U U^T + damping I)^-1 = (I - U (U^T U + damping I)^-1 U^T) / damping for U given by its rows."""

    def __init__(self, rows: Rows, damping: float) -> None:
        self.rows, self.damping = rows, damping
        gram = rows.lower_gram()
        self.size, self.dtype, self.device = rows.space.size, rows.space.dtype, gram.device
        gram.diagonal().add_(damping)
        self.factor = cholesky(gram)

    def mv(self, vector: Tensor) -> Tensor:
        return (vector - self.rows.mv(self.factor.solve(self.rows.rmv(vector)))) / self.damping


def empirical(
    metric: Metric, params: Params, inputs: Any, examples: int | None, random: RandomState | None
) -> Pullback:
    """The empirical Fisher of a metric's model at this step's data."""
    source = metric.inner.moment if isinstance(metric.inner, Covariance) else metric.inner
    if not isinstance(source, (PullbackMetric, Hessian)):
        raise TypeError(
            f"an empirical preconditioner needs a metric of a model and a criterion, not {type(metric).__name__}; use "
            "ng.DiagonalPreconditioner()"
        )
    labelled = metric.needs_targets or isinstance(inputs, Labelled)  # else a tuple holds the model's arguments
    if isinstance(inputs, Labelled):
        inputs = inputs.inputs, inputs.targets
    if not labelled or inputs[1] is None:
        raise ValueError(
            "an empirical preconditioner needs the data's targets: compute the loss with optimizer.loss(outputs, "
            "targets), give them to observe(inputs, targets), or use ng.DiagonalPreconditioner()"
        )
    if examples is not None:
        inputs = Call(inputs).sample(examples, seed=0).args
    metric = metric.carry(empirical_fisher(source.model, source.criterion, outputs=source.outputs))
    return metric.at(params, inputs, random=random)  # type: ignore[return-value]


def probed_diagonal(operator: Operator, samples: int, seed: int = 0) -> Tensor:
    """The mean of z o G z over random signs z, (n,): unbiased for diag(G), and noisy (Bekas et al. 2007)."""
    generator = torch.Generator(operator.device).manual_seed(seed)
    kind = {"generator": generator, "device": operator.device}
    probes = [(2 * torch.randint(0, 2, (operator.size,), **kind) - 1).to(operator.dtype) for _ in range(samples)]
    return torch.stack([signs * operator.mv(signs) for signs in probes]).mean(0)


def safe_power(values: Tensor, power: float) -> Tensor:
    """values^power for negative powers, with zeros taken as the smallest positive entry (1 if there is none)."""
    positive = values > 0
    smallest = values[positive].min() if bool(positive.any()) else torch.ones_like(values[:1]).sum()
    return torch.where(positive, values, smallest) ** power
