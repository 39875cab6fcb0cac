"""The quadratic model of a loss around the current point, as every rule sees it: a flat vector, or parts by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.ground.constants import KL_SLACK
from natgrad.ground.messages import write_choices
from natgrad.ground.typed_torch import (
    as_tensor_like,
    list_numbers,
    measure_norm,
    measure_norms,
    torch_linalg,
    torch_plain,
)
from natgrad.operators import Operator
from natgrad.solvers import Subspace

# a vector over parameters that lie apart, with what rules do with a flat one


class Parts:
    """A vector over parameters that lie apart: d_p = length * share_p * rate_p * part_p, by name. No flat copy is made.

    It has what rules do with a flat vector (n,): `a * v`, `v + w`, `v @ w`, `-v`, `v.norm()`, `v.clone()`. Its parts
    are measured once, for all vectors that were made of it by factors.

    Args:
        parts: Tensors by name.
        rates: A factor by name; None: 1 for all.
        length: A factor that all have in common: a number, or a scalar tensor.
        shares: Another factor by name; None: 1 for all.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        rates: Mapping[str, float] | None = None,
        length: Tensor | float = 1.0,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.parts, self.rates, self.length, self.shares = parts, rates, length, shares
        self._sizes = list[Tensor]()

    def __repr__(self) -> str:
        return write_choices(self, parts=len(self.parts), size=sum(part.numel() for part in self.parts.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __getitem__(self, name: str) -> Tensor:
        part = self.parts[name]
        return part * (as_factor(self.length, part) * self.factor(name))

    def rate(self, name: str) -> float:
        """The factor of one parameter, without the common one.

        Args:
            name: The parameter's.
        """
        return 1.0 if self.rates is None else self.rates[name]

    def factor(self, name: str) -> float:
        """The rate and the share of one parameter.

        Args:
            name: The parameter's.
        """
        return self.rate(name) * (1.0 if self.shares is None else self.shares[name])

    def factors(self, like: Tensor, names: Iterable[str] | None = None) -> Tensor | float:
        """What the parts are multiplied by: of each, shape (names,), or one for all.

        Args:
            like: Of the dtype and on the device wanted.
            names: Of which parts; None: of all.
        """
        known = [self.factor(name) for name in names or self.parts]
        even = len(set(known)) == 1
        return as_factor(self.length, like) * (known[0] if even else as_tensor_like(known, like))

    def tensors(self) -> dict[str, Tensor]:
        """The entries by name."""
        return dict(zip(self.parts, self.list_tensors(list(self.parts.values())), strict=True))

    def list_tensors(self, like: Sequence[Tensor]) -> Sequence[Tensor]:
        """The entries in the order of the names: by one call where they lie together.

        Args:
            like: Of the dtypes and on the devices wanted.
        """
        parts = [part.to(reference.dtype) for part, reference in zip(self.parts.values(), like, strict=True)]
        if len({(part.dtype, part.device) for part in parts}) != 1:
            return [self[name].to(part) for name, part in zip(self.parts, parts, strict=True)]
        if not isinstance(self.length, Tensor):
            return torch_plain._foreach_mul(parts, [self.length * self.factor(name) for name in self.parts])
        factors = self.factors(parts[0])
        if isinstance(factors, Tensor) and factors.dim():
            return torch_plain._foreach_mul(parts, factors.unbind())
        return torch_plain._foreach_mul(parts, as_tensor_like(factors, parts[0]))

    def __mul__(self, factor: Tensor | float) -> Parts:
        return self._share_sizes(Parts(self.parts, self.rates, self.length * factor, self.shares))

    __rmul__ = __mul__

    def __neg__(self) -> Parts:
        return -1.0 * self

    def __add__(self, other: Parts) -> Parts:
        parts = other.tensors()
        for name in self.parts:
            parts[name] = self[name] + parts[name] if name in parts else self[name]
        return Parts(parts)

    def __sub__(self, other: Parts) -> Parts:
        return self + -1.0 * other

    def scale_each(self, shares: Mapping[str, float]) -> Parts:
        """The vector with each part times a factor of its own, without a copy.

        Args:
            shares: The factors by name.
        """
        before = self.shares or {}
        factors = {name: shares[name] * before.get(name, 1.0) for name in self.parts}
        return self._share_sizes(Parts(self.parts, self.rates, self.length, factors))

    def _share_sizes(self, scaled: Parts) -> Parts:
        scaled._sizes = self._sizes
        return scaled

    def __matmul__(self, other: Parts) -> Tensor:
        """The inner product, a scalar tensor; entries that only one of them has count as zero in the other."""
        if self.parts is other.parts:
            sizes = self._measure()
            return (sizes.square() * self.factors(sizes) * other.factors(sizes)).sum()
        names = [name for name in self.parts if name in other.parts]
        if not names:
            return torch.zeros(())
        pairs = [inner_product(self.parts[name], other.parts[name]) for name in names]
        home = pairs[0]
        products = torch.stack([product.to(home) for product in pairs])
        for vector in (self, other):
            products = products * vector.factors(home, names)
        return products.sum()

    def squares(self) -> Tensor:
        """|d_p|^2 of each parameter in their order, shape (parts,)."""
        sizes = self._measure()
        return (sizes * self.factors(sizes)).square()

    def _measure(self) -> Tensor:
        """|part_p| of each, measured once."""
        if not self._sizes:
            # a part is often a view of a matrix whose rows hold the bias: on a processor by rows in a fifth of the time
            by_rows = [part.is_cpu and not part.is_contiguous() for part in self.parts.values()]
            parts = zip(self.parts.values(), by_rows, strict=True)
            sizes = measure_norms([measure_norm(part, dim=-1) if rows else part for part, rows in parts])
            self._sizes.append(torch.stack([size.to(sizes[0]) for size in sizes]) if sizes else torch.zeros(0))
        return self._sizes[0]

    def norm(self) -> Tensor:
        """|d|, a scalar tensor."""
        return self.squares().sum().sqrt()

    def clone(self) -> Parts:
        """The same with memory of its own."""
        return Parts(self.tensors())


Vector = Tensor | Parts
Memory = dict[str, Vector]
Cut = float | Callable[[], Tensor | float]
"""How many times as long a step would be without a bound, or what makes that number."""


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, without a copy where they lie in one piece.

    Args:
        first: Any tensor.
        second: One of the same shape, whose dtype the product has.
    """
    return torch.dot(first.reshape(-1).to(second.dtype), second.reshape(-1))


def inner_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The inner products of k tensors with k others, for each of r pairs: shape (k, r).

    Args:
        pairs: r pairs of tensors (k, ...) of one shape, in the dtype of the second ones.
    """
    # one small product of matrices for all of them takes two to three times as long on a processor
    products = [
        inner_product(x, y).view(1) if len(x) == 1 else torch_linalg.vecdot(x.to(y.dtype).flatten(1), y.flatten(1))
        for x, y in pairs
    ]
    return torch.stack(products, 1)


def as_factor(length: Tensor | float, like: Tensor) -> Tensor | float:
    """A common factor in the dtype and on the device of what it multiplies."""
    return length.to(like) if isinstance(length, Tensor) else length


@dataclass(frozen=True)
class ErrorScale:
    """How far a regression's targets lie away, in units of its likelihood, and the parameters of its last layers.

    Attributes:
        size: The root of the mean squared error, at least 1: of targets in units of their own.
        names: Parameters of the layers whose outputs are the model's, which must grow as large.
        squares: True for a regression.
    """

    size: float = 1.0
    names: Collection[str] = ()
    squares: bool = False

    def of(self, name: str) -> float:
        """The size for a parameter of the last layers, else 1.

        Args:
            name: The parameter's.
        """
        return self.size if name in self.names else 1.0


class Step(ABC):
    """A step d with what the metric says along it.

    Attributes:
        vector: d: a tensor (n,), or `Parts` by name.
    """

    vector: Vector

    @property
    def tangent(self) -> Vector:
        """The straight part of the step, which slope and forms are of."""
        return self.vector

    @abstractmethod
    def scale_by(self, factor: Tensor | float) -> Step:
        """factor * d.

        Args:
            factor: A number, or a scalar tensor.
        """

    @abstractmethod
    def form(self) -> Tensor:
        """d^T G d, a scalar tensor."""

    @abstractmethod
    def damped_form(self, damping: Tensor | float) -> Tensor:
        """d^T (G + damping I) d, a scalar tensor.

        Args:
            damping: A number, or one per entry (n,).
        """

    @abstractmethod
    def nothing(self) -> Step:
        """The zero step."""

    def promised_form(self, damping: Tensor | float) -> Tensor:
        """d^T (G + damping I) d as the system has it that d solves, which may know less than `form`.

        Args:
            damping: A number, or one per entry (n,).
        """
        return self.damped_form(damping)

    def excess(self, damping: Tensor | float) -> Tensor:
        """d^T G d over the promised form, as far as it is known without a product: below 1 where damping shortens d.

        Args:
            damping: A number, or one per entry (n,).
        """
        promise = self.promised_form(damping)
        return torch.where(promise > 0, self.form() / promise, 1.0)

    def known_slope(self) -> Tensor | float | None:
        """g . d where whoever made the step knows it, for the model that it was made for."""
        return None

    def positive_form(self, indefinite: bool) -> Tensor:
        """d^T G d, or a bound on d^T |G| d where G has negative eigenvalues: no less than 0.

        Args:
            indefinite: True if G may have negative eigenvalues.
        """
        return self.form()


@dataclass(frozen=True)
class FlatStep(Step):
    """A step d (n,) with its image G d (n,).

    Attributes:
        vector: d.
        image: G d.
    """

    vector: Tensor  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    image: Tensor

    def scale_by(self, factor: Tensor | float) -> FlatStep:
        return FlatStep(factor * self.vector, factor * self.image)

    def form(self) -> Tensor:
        return self.image @ self.vector

    def damped_form(self, damping: Tensor | float) -> Tensor:
        return self.form() + (damping * self.vector) @ self.vector

    def nothing(self) -> FlatStep:
        return FlatStep(torch.zeros_like(self.vector), torch.zeros_like(self.image))

    def positive_form(self, indefinite: bool) -> Tensor:
        """|d| |G d| >= d^T |G| d for an indefinite G, since |G d| is as long as |G| d: equal along an eigenvector.

        Args:
            indefinite: True if G may have negative eigenvalues.
        """
        form = self.form()
        return torch.where(indefinite | (form < 0), measure_norm(self.vector) * measure_norm(self.image), form)


class Lazy:
    """A number, or scalar tensor, that is made when it is first asked for, or that is known already.

    Args:
        make: Makes it.
        value: What it is, if that is known.
    """

    def __init__(self, make: Callable[[], Tensor | float] | None = None, value: Tensor | float | None = None) -> None:
        self.make, self.value = make, value

    def __call__(self) -> Tensor | float:
        if self.value is None:
            assert self.make is not None
            self.value = self.make()
        return self.value

    def scale_by(self, factor: Tensor | float) -> Lazy:
        """factor times it.

        Args:
            factor: A number, or a scalar tensor.
        """
        return Lazy(lambda: factor * self()) if self.value is None else Lazy(value=factor * self.value)


class Products(NamedTuple):
    """What is known of a step d along some parameters, as numbers."""

    promise: float  # d^T (G~ + damping I) d of the blocks G~
    slope: float  # g . d
    square: float  # |d|^2

    def scale_by(self, factor: float) -> Products:
        """Of factor * d.

        Args:
            factor: Any number.
        """
        return Products(factor * factor * self.promise, factor * self.slope, factor * factor * self.square)


@dataclass(frozen=True)
class BlockStep(Step):
    """A step in parts.

    Attributes:
        vector: d, by name.
        true: d^T G d as it was measured, or of the blocks where nothing was.
        promise: d^T (G~ + damping I) d of the blocks G~.
        ratio: true over promise, where it was measured.
        levels: Damping by name.
        products: What is known of disjoint parameters that make up d, by the first of each; None where it is not.
        slope: g . d; None where it takes a product.
    """

    vector: Parts  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    true: Lazy
    promise: Lazy
    ratio: float | None
    levels: Mapping[str, float]
    products: Mapping[str, Products] | None = None
    slope: Lazy | None = None

    @staticmethod
    def of_products(vector: Parts, products: Mapping[str, Products]) -> BlockStep:
        """The step with these products: what the blocks promise stands for d^T G d.

        Args:
            vector: d, by name.
            products: Of disjoint parameters that make up d, by the first of each.
        """
        promise = Lazy(value=sum(known.promise for known in products.values()))
        slope = Lazy(value=sum(known.slope for known in products.values()))
        return BlockStep(vector, promise, promise, None, {}, products, slope)

    def scale_by(self, factor: Tensor | float) -> BlockStep:
        products, number = self.products, factor
        if products is not None:
            number = float(factor)
            products = {name: known.scale_by(number) for name, known in products.items()}
        true, promise = (part.scale_by(number).scale_by(number) for part in (self.true, self.promise))
        slope = None if self.slope is None else self.slope.scale_by(number)
        return BlockStep(number * self.vector, true, promise, self.ratio, self.levels, products, slope)

    def known_slope(self) -> Tensor | float | None:
        return None if self.slope is None else self.slope()

    def list_squares(self) -> dict[str, float]:
        """|d|^2 of disjoint parameters that make up d, by the first of each."""
        if self.products is not None:
            return {name: known.square for name, known in self.products.items()}
        return dict(zip(self.vector, list_numbers(self.vector.squares()), strict=True))

    def scale_layers(self, factors: Mapping[str, float]) -> BlockStep | None:
        """The step with each layer's part times a factor of its own, without a product; None where that takes one.

        d^T G d changes as much as what the blocks promise.

        Args:
            factors: By name, equal for the parameters of a block.
        """
        if self.products is None:
            return None
        products = {name: known.scale_by(factors[name]) for name, known in self.products.items()}
        step = BlockStep.of_products(self.vector.scale_each(factors), products)
        true = step.promise.scale_by(1.0 if self.ratio is None else self.ratio)
        return replace(step, true=true, ratio=self.ratio, levels=self.levels)

    def form(self) -> Tensor:
        return as_scalar(self.true())

    def damped_form(self, damping: Tensor | float) -> Tensor:
        squares, form = self.vector.squares(), self.form()
        levels = as_tensor_like([self.levels.get(name, 0.0) for name in self.vector], squares)
        return form + (levels @ squares).to(form)

    def promised_form(self, damping: Tensor | float) -> Tensor:
        return as_scalar(self.promise())

    def excess(self, damping: Tensor | float) -> Tensor:
        return as_scalar(1.0 if self.ratio is None else self.ratio)

    def norm(self) -> Tensor:
        """|d|, a scalar tensor."""
        return self.vector.norm() if self.products is None else as_scalar(math.sqrt(sum(self.list_squares().values())))

    def known_form(self) -> Tensor | float | None:
        """d^T G d, or the promise in its place, without a product; None where even that takes one."""
        return self.promise.value if self.true.value is None else self.true.value

    def nothing(self) -> BlockStep:
        return replace(BlockStep.of_products(Parts({}), {}), levels=self.levels)


def as_scalar(number: Tensor | float) -> Tensor:
    """A number as a scalar tensor, in double precision."""
    return number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


def keep_step(step: Step) -> Step:
    """The step itself: rates of 1."""
    return step


@dataclass(frozen=True)
class RunFacts:
    """Where a run stands.

    Attributes:
        steps: Taken so far.
        bounded: True if the loss is at least 0, so that a share of it says how much is left to gain.
        options: Settings of the rule that a parameter group has changed, by name: the least over the groups.
        counts: Counts the `examples` of this step and those `seen` so far with it; {} where nobody knows them.
        turned: True once directions are the rule's own, for a rule that turns to them (`Rule.turns_at`).
        errors: How far a regression's targets lie away.
    """

    steps: int = 0
    bounded: bool = False
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    counts: Callable[[], Mapping[str, float]] = dict
    turned: bool = False
    errors: ErrorScale = ErrorScale()


@dataclass(frozen=True)
class SystemFacts:
    """What is known of the system that a proposal solves.

    Attributes:
        full: The damped form of the proposal at rates of 1; None: that of the proposal.
        basis: The space that the solver searched, if it kept one.
        earlier: Proposals from iterates that the solver kept on its way, oldest first, each made when it is called.
        rated: A step at rate 1 -> the same at the parameters' rates.
        indefinite: True if G may have negative eigenvalues, so that d^T G d measures no length.
    """

    full: Tensor | float | None = None
    basis: Subspace | None = None
    earlier: Sequence[Callable[[], Step]] = ()
    rated: Callable[[Step], Step] = keep_step
    indefinite: bool = False


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a metric in blocks.

    Attributes:
        names: Of the parameters of each block.
        outputs: How many outputs each block's layer has, or how many rows a parameter without a layer.
        params: The parameters by name, for the sizes of layers.
        measure: A vector -> the step with what the metric says along it; None: by a product with the operator.
        exact: A step -> the same with d^T G d as it is on the step's own batch, which costs a forward pass; None where
            that cannot be known. None in its place: nobody can tell.
        doubt: How many times the estimate of a step's KL may be too small.
        fallen: The metric as it was measured along a step over what it was averaged to, at most 1: averages lag behind
            a metric that falls with the loss, and steps that they give are too short by this factor.
    """

    names: Sequence[tuple[str, ...]] = ()
    outputs: Sequence[int] = ()
    params: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    measure: Callable[[Vector], Step] | None = None
    exact: Callable[[Step], Step | None] | None = None
    doubt: float = 1.0
    fallen: float = 1.0


@dataclass(frozen=True)
class Quadratic:
    """m(d) = g . d + d^T (G + damping I) d / 2, the model of the loss's change around the current point.

    Attributes:
        gradient: g, as a vector (n,) or in parts.
        operator: G, for flat vectors; None where the metric lies in blocks.
        damping: A number, or one per entry (n,).
        proposal: The step at the full rate, -rate * (G + damping I)^-1 g.
        nats: Nats per example in one unit of the loss; 1/2 d^T G d * nats is the KL that a step moves, to second order.
        loss: The loss at d = 0, NaN where it is not known.
        run: Where the run stands.
        system: The system that the proposal solves.
        layers: The blocks that the metric lies in.
        cuts: What shortened the step, which the rule writes here: a setting -> how many times as long the step would be
            without it, a number or what makes it when it is asked for.
    """

    gradient: Vector
    operator: Operator | None
    damping: Tensor | float
    proposal: Step
    nats: Tensor | float = 1.0
    loss: Tensor | float = math.nan
    run: RunFacts = RunFacts()
    system: SystemFacts = SystemFacts()
    layers: LayerFacts = LayerFacts()
    cuts: dict[str, Cut] = field(default_factory=dict[str, Cut])

    def change(self, step: Step) -> Tensor:
        """m(d), a scalar tensor: negative for a predicted decrease.

        Args:
            step: Any step of this model.
        """
        return self.slope(step) + 0.5 * self.damped_form(step)

    def slope(self, step: Step) -> Tensor:
        """g . d, the first-order change, a scalar tensor.

        Args:
            step: Any step of this model.
        """
        known = step.known_slope()
        return self.gradient @ step.tangent if known is None else as_scalar(known)  # type: ignore[operator]

    def damped_form(self, step: Step) -> Tensor:
        """d^T (G + damping I) d, a scalar tensor.

        Args:
            step: Any step of this model.
        """
        return step.damped_form(self.damping)

    def kl(self, step: Step) -> Tensor:
        """How far a step moves, in nats per example: 1/2 d^T G d; where G is indefinite a bound on 1/2 d^T |G| d.

        Positive and negative curvature along d do not cancel in the bound.

        Args:
            step: Any step of this model.
        """
        return 0.5 * self.nats * step.positive_form(self.system.indefinite)

    def least_kl(self, step: Step) -> Tensor:
        """What the slope alone says of how far a step moves, in nats per example: 1/2 (g . d)^2 / E|s|^2.

        s is the score of an output in units of its spread. By Cauchy and Schwarz (g . d)^2 <= E|s|^2 d^T G d. For
        squared errors E|s|^2 is twice the loss, for others 1 unless the model is wrong and sure of it.

        Args:
            step: Any step of this model.
        """
        slope = self.slope(step)
        score = 2 * max(float(self.loss), 0.5) if self.run.errors.squares else 1.0
        return 0.5 * self.nats * slope.square() / score

    def along(self, vector: Vector) -> Step:
        """The step with this vector, which a rule made.

        Args:
            vector: A tensor (n,), or `Parts`, as the proposal has it.
        """
        if self.layers.measure is not None:
            return self.layers.measure(vector)
        assert self.operator is not None
        assert isinstance(vector, Tensor)
        return FlatStep(vector, self.operator.mv(vector))

    def nothing(self) -> Step:
        """The zero step."""
        return self.proposal.nothing()  # zeros, not 0 times a proposal that may be infinite


def hold_kl(model: Quadratic, step: Step, most: Tensor | float) -> Step:
    """The step, or so much of it that it moves at most `most` nats per example on its own batch.

    An estimate far below the bound is believed; how far is `model.layers.doubt`. So is what the slope says, which needs
    no metric: where the blocks know nothing of a batch, it does. Else the step is measured. Where that cannot be, the
    larger of both times the doubt counts.
    """
    bound = float(most)
    if math.isinf(bound) or model.layers.exact is None:
        return step
    kl = model.layers.doubt * max(float(model.kl(step)), float(model.least_kl(step)))
    if kl <= bound or not math.isfinite(kl):  # numbers that are not finite are refused where the step is taken
        return step
    measured = model.layers.exact(step)
    if measured is not None:
        step, kl = measured, float(model.kl(measured))
    allowed = (1 - KL_SLACK) * bound
    if kl <= allowed:
        return step
    if not math.isfinite(kl):
        return model.nothing()
    factor = math.sqrt(allowed / kl)
    before, rest = model.cuts.get("max_kl", 1.0), {"lr": model.cuts["lr"]} if "lr" in model.cuts else {}
    model.cuts.clear()  # whatever else is lifted, the step ends here; but for a learning rate, which this bound follows
    model.cuts.update(rest | {"max_kl": lambda: read_cut(before) / factor})
    return step.scale_by(factor)


def read_cut(cut: Cut) -> float:
    """What a rule says of one of its bounds, as a number.

    Args:
        cut: A number, or what makes it.
    """
    return float(cut() if callable(cut) else cut)


def share_of_rate(step: Step) -> float:
    """The largest learning rate of a step in parts, at most 1: a lower one takes that share of the bounded step."""
    vector = step.vector
    rates = [abs(vector.rate(name)) for name in vector] if isinstance(vector, Parts) else []
    return min(1.0, max(rates, default=1.0))
