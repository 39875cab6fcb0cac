"""The metric as something you multiply with: a symmetric positive semi-definite operator, and its sums and shifts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from itertools import accumulate
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from natgrad.ground.messages import write_choices, write_table
from natgrad.ground.pure import leave_autocast
from natgrad.ground.typed_torch import Map, split_tensor


@dataclass(frozen=True)
class Facts:
    """What is known of an operator G besides its products.

    Args:
        nats: Nats per example in one unit of d^T G d / 2, where the metric's loss is a mean over an example's entries.
        indefinite: True if G may have negative eigenvalues after all: a Hessian's products.
        inverse_kept: True if G^-1 is what is held, so that a product with G costs more than a solve. A solver then
            makes no product to check its solution.
        counts: What a structure counted on its way here: examples of this step and seen so far, updates refused.
        length_unit: What sqrt(d^T G d) is measured by in `ng.ang`. Nats have no scale to choose, so that this is a
            plain number; the score metric over data takes the length of their score instead, N / sqrt(tr Cov x): 4.85
            where the defaults come from.

    Example:
        >>> G = ng.operators.DenseOperator(torch.eye(2)).declare(nats=3.0)
        >>> (2 * G).nats
        3.0
    """

    nats: float = 1.0
    indefinite: bool = False
    inverse_kept: bool = False
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    length_unit: float = 5.0


NAMES = frozenset(field.name for field in fields(Facts))


def combine_facts(*facts: Facts) -> Facts:
    """The facts of an operator that is made of others.

    Args:
        facts: Of the parts, at least one.

    Returns:
        Indefinite if a part is; its inverse is kept if every part's is; all counts; the first part's unit of length.

    Raises:
        ValueError: If the parts disagree on `nats`.
    """
    units = {fact.nats for fact in facts}
    if len(units) > 1:
        raise ValueError(f"terms are in units of {sorted(units)} nats, expected operators of one unit; convert one")
    return Facts(
        nats=units.pop(),
        indefinite=any(fact.indefinite for fact in facts),
        inverse_kept=all(fact.inverse_kept for fact in facts),
        counts={key: count for fact in facts for key, count in fact.counts.items()},
        length_unit=facts[0].length_unit,
    )


T = TypeVar("T")
PACKABLE: dict[str, type[Any]] = {}
"""The operator classes that checkpoints may name."""


def register_packable(kind: type[Any]) -> None:
    """Let checkpoints name an operator class. TypeError for a class of yours with the name of one of natgrad's."""
    known = PACKABLE.get(kind.packed_as, kind)
    foreign = (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__)
    if foreign and known.__module__.startswith("natgrad."):
        raise TypeError(f"{kind.packed_as!r} is an operator of natgrad's: choose another name, packed_as='...'")
    PACKABLE[kind.packed_as] = kind


class Operator(ABC):
    """Symmetric positive semi-definite G of shape (n, n), known by its products; a Hessian may be `indefinite`.

    A subclass sets `size`, `dtype` and `device` and gives `mv`; everything else has a default, and is overridden where
    a closed form is cheaper. `facts` says what else is known of G: a subclass declares them for all its objects,
    `facts = Facts(indefinite=True)`, or in its constructor, with `combine_facts` if it is made of others.
    `check_operator` in `natgrad.testing` checks all of it.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    facts: Facts = Facts()
    state: tuple[str, ...] | None = None
    """The constructor's arguments that are attributes too, which is all that `pack` keeps and `unpack` passes on."""
    has_closed_form: ClassVar[bool] = False
    """True for a class whose `inverse` is always known without forming an (n, n) matrix."""
    shown: tuple[str, ...] = ()
    """Attributes that `repr` shows in the place of the size, for an operator that is made of others."""
    packed_as: str
    """The class's name in checkpoints: its own, unless `class G(Operator, packed_as="...")` says another."""

    def __init_subclass__(cls, *, packed_as: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.packed_as = cls.__name__ if packed_as is None else packed_as
        if cls.state is not None or cls.pack is not Operator.pack:
            register_packable(cls)
        loose = sorted(name for name in NAMES & vars(cls).keys() if not isinstance(vars(cls)[name], property))
        if loose:
            raise TypeError(f"{cls.__name__} sets {loose} itself: declare them together, facts = Facts({loose[0]}=...)")

    @property
    def nats(self) -> float:
        """Nats per example in one unit of d^T G d / 2."""
        return self.facts.nats

    @property
    def indefinite(self) -> bool:
        """True if G may have negative eigenvalues."""
        return self.facts.indefinite

    @property
    def inverse_kept(self) -> bool:
        """True if G^-1 is what is held: a product with G costs more than a solve."""
        return self.facts.inverse_kept

    @property
    def counts(self) -> Mapping[str, float]:
        """What a structure counted on its way here."""
        return self.facts.counts

    @property
    def length_unit(self) -> float:
        """What sqrt(d^T G d) is measured by in `ng.ang`."""
        return self.facts.length_unit

    def declare(self, **facts: Any) -> Self:
        """A shallow copy with other facts, which shares all tensors; this operator stays as it is.

        Args:
            facts: Fields of `Facts` by name; the others stay as they are.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self), facts=replace(self.facts, **facts))
        return other

    def pack(self) -> dict[str, Any]:
        """What this operator is made of, by name: tensors, numbers, strings, lists of them, and other operators.

        Raises:
            TypeError: If the class has no `state` and no `pack` of its own.
        """
        if self.state is None:
            raise TypeError(
                f"{self!r} cannot be kept between steps: give its class state = (...), the names of its constructor's "
                "arguments that are attributes too, or methods pack() and unpack(parts)"
            )
        return {name: getattr(self, name) for name in self.state}

    @classmethod
    def unpack(cls, parts: dict[str, Any]) -> Operator:
        """The operator made of what `pack` gave.

        Args:
            parts: As from `pack`, with lists in place of tuples.
        """
        return cls(**parts)

    @property
    def sample_rows(self) -> SampleRows | None:
        """The root's columns, one or a few per example, where products with them need no (n, r) matrix; else None."""
        return None

    @property
    def sample_rank(self) -> int | None:
        """How many columns `sample_rows` has, by a class that can without computing them; None if there are none."""
        rows = self.sample_rows
        return None if rows is None else rows.rank

    @abstractmethod
    def mv(self, vector: Tensor) -> Tensor:
        """G v, shape (n,).

        Args:
            vector: v, shape (n,).
        """

    def mm(self, block: Tensor) -> Tensor:
        """G V, shape (n, k). Column by column: batched products gained nothing on wide layers (measured).

        Args:
            block: V, shape (n, k).
        """
        if block.shape[1] == 0:
            return torch.zeros_like(block)
        return torch.stack([self.mv(column) for column in block.unbind(1)], dim=1)

    def root(self) -> Tensor | None:
        """U (n, r) with G = U U^T, or None where no factor is known."""
        return None

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """(G + damping I)^-1 as an operator where it has a closed form, else None. At damping 0: the pseudo-inverse.

        Args:
            damping: In G's units, >= 0.
        """
        return None

    def invert_each(self, damping: Tensor) -> Operator | None:
        """The inverse of k blocks that lie along a leading axis, each with a damping of its own; None: one by one.

        Args:
            damping: Of each block, shape (k,), > 0.
        """
        return None

    @property
    def closed_form(self) -> bool:
        """Whether `inverse` is known without forming an (n, n) matrix."""
        return self.has_closed_form

    @leave_autocast
    def diagonal(self) -> Tensor:
        """The diagonal of G, shape (n,)."""
        return self.dense().diagonal().clone()

    @leave_autocast
    def trace(self) -> Tensor:
        """Sum of the diagonal, a scalar tensor."""
        return self.diagonal().sum()

    @leave_autocast
    def mean_eigenvalue(self) -> Tensor:
        """Trace over n, a scalar tensor: the scale that relative damping refers to. May be an unbiased estimate."""
        return self.trace() / self.size

    @leave_autocast
    def dense(self) -> Tensor:
        """G as a matrix (n, n), symmetrised."""
        matrix = self.mm(torch.eye(self.size, dtype=self.dtype, device=self.device))
        return (matrix + matrix.mT) / 2

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n)."""
        return (self.size, self.size)

    def check(self, block: Tensor, name: str = "vector") -> None:
        """Check the shape of what is to be multiplied.

        Args:
            block: A tensor of shape (n,) or (n, k).
            name: What the error message calls it.

        Raises:
            TypeError: If it is no tensor.
            ValueError: If its shape is another one.
        """
        if not isinstance(block, Tensor):
            raise TypeError(f"{name} is {type(block).__name__}, expected a tensor of shape ({self.size},)")
        if block.dim() not in (1, 2) or block.shape[0] != self.size:
            raise ValueError(
                f"{name} has shape {tuple(block.shape)}, expected ({self.size},) or ({self.size}, k): the operator "
                f"has size {self.size}; flatten a dict of tensors with ng.Space(params).flatten(...)"
            )
        if block.is_complex():
            raise ValueError(f"{name} is {block.dtype}, expected real numbers: multiply its real and imaginary parts")

    @leave_autocast
    def __matmul__(self, other: Tensor) -> Tensor:
        self.check(other, "the right-hand side of @")
        return self.mv(other) if other.dim() == 1 else self.mm(other)

    def __add__(self, other: Operator) -> Sum:
        if not isinstance(other, Operator):
            return NotImplemented
        return Sum((self, other))

    def __mul__(self, factor: float) -> Scaled:
        return Scaled(self, factor)

    __rmul__ = __mul__

    def shift(self, damping: float) -> Shifted:
        """G + damping I.

        Args:
            damping: In G's units, >= 0.
        """
        return Shifted(self, damping)

    def __repr__(self) -> str:
        known = {"size": self.size, "dtype": self.dtype, "device": self.device}
        return write_choices(self, **({name: getattr(self, name) for name in self.shown} or known))

    def _repr_html_(self) -> str:
        known = {"operator": self, "size": f"{self.size:,}", "dtype": self.dtype, "device": self.device}
        if self.sample_rank is not None:
            known["rank of U, G = U U^T"] = f"{self.sample_rank:,}"
        known |= {name: value for name, value in vars(self.facts).items() if value != getattr(Facts(), name)}
        return write_table(("", type(self).__name__), [(name, str(value)) for name, value in known.items()])


def list_all(parts: Iterable[T | None]) -> list[T] | None:
    """All parts; None where one is."""
    known = list[T]()
    for part in parts:
        if part is None:
            return None
        known.append(part)
    return known


class Added(Operator):
    """G_1 + G_2 + ..., whose terms are at hand one after the other."""

    @abstractmethod
    def each(self, part: Callable[[Operator], Any]) -> Iterator[Any]:
        """Something of every term.

        Args:
            part: What is asked of a term.
        """

    def mv(self, vector: Tensor) -> Tensor:
        return self._sum(lambda term: term.mv(vector))

    def mm(self, block: Tensor) -> Tensor:
        return self._sum(lambda term: term.mm(block))

    def root(self) -> Tensor | None:
        roots = list_all(self.each(lambda term: term.root()))
        return None if roots is None else torch.cat(roots, dim=1)

    def diagonal(self) -> Tensor:
        return self._sum(lambda term: term.diagonal())

    def mean_eigenvalue(self) -> Tensor:
        return self._sum(lambda term: term.mean_eigenvalue())

    def dense(self) -> Tensor:
        return self._sum(lambda term: term.dense())

    def _sum(self, part: Callable[[Operator], Tensor]) -> Tensor:
        return reduce(torch.add, self.each(part))


class Sum(Added):
    """G_1 + G_2 + ...

    Args:
        terms: Operators of one size, dtype, device and unit (`nats`).

    Raises:
        ValueError: If they differ in one of these.
    """

    state = shown = ("terms",)

    def __init__(self, terms: tuple[Operator, ...]) -> None:
        sizes = {term.size for term in terms}
        if len(sizes) != 1:
            raise ValueError(f"terms have sizes {sorted(sizes)}, expected operators of one size")
        kinds = {(term.size, term.dtype, term.device) for term in terms}
        if len(kinds) != 1:
            raise ValueError(f"terms are {terms}, expected operators of one dtype, device and unit (nats); convert one")
        self.terms = terms
        self.size, self.dtype, self.device = next(iter(kinds))
        facts = combine_facts(*(term.facts for term in terms))
        # a sum's inverse is not the sum of inverses
        self.facts = replace(facts, inverse_kept=len(terms) == 1 and facts.inverse_kept)

    def each(self, part: Callable[[Operator], Any]) -> Iterator[Any]:
        return map(part, self.terms)

    @property
    def sample_rank(self) -> int | None:
        ranks = list_all(term.sample_rank for term in self.terms)
        return None if ranks is None else sum(ranks)

    @property
    def sample_rows(self) -> SampleRows | None:
        rows = list_all(term.sample_rows for term in self.terms)
        return None if rows is None else StackedColumns(rows)

    def trace(self) -> Tensor:
        return self._sum(lambda term: term.trace())


class Chunked(Added):
    """A sum of operators that are rebuilt for every product, so that only one graph is in memory at a time.

    A product costs a forward pass more than with a kept graph, and the memory of all graphs but one is saved.

    Args:
        builders: Each returns its term of the sum. At least one.
    """

    def __init__(self, builders: Sequence[Callable[[], Operator]]) -> None:
        self.builders = tuple(builders)
        first = self.builders[0]()
        self.size, self.dtype, self.device = first.size, first.dtype, first.device
        self.facts = first.facts

    def each(self, part: Callable[[Operator], Any]) -> Iterator[Any]:
        return (part(build()) for build in self.builders)


class Scaled(Operator):
    """factor * G.

    Args:
        operator: G, of size n.
        factor: A number >= 0.

    Raises:
        ValueError: For a negative factor: the result would not be positive semi-definite.
    """

    state = shown = ("operator", "factor")

    def __init__(self, operator: Operator, factor: float) -> None:
        if not factor >= 0:
            raise ValueError(f"factor is {factor}, expected a number >= 0: a metric stays positive semi-definite")
        self.operator, self.factor = operator, factor
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device
        self.facts = operator.facts

    @property
    def sample_rank(self) -> int | None:
        return self.operator.sample_rank

    @property
    def sample_rows(self) -> SampleRows | None:
        rows = self.operator.sample_rows
        return None if rows is None else StackedColumns([rows], [self.factor**0.5])

    def mv(self, vector: Tensor) -> Tensor:
        return self.factor * self.operator.mv(vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.factor * self.operator.mm(block)

    def root(self) -> Tensor | None:
        root = self.operator.root()
        return None if root is None else root * self.factor**0.5

    def inverse(self, damping: float = 0.0) -> Operator | None:
        if self.factor == 0:
            return None
        inverse = self.operator.inverse(damping / self.factor)  # (c G + l I)^-1 = (G + l/c I)^-1 / c
        return None if inverse is None else Scaled(inverse, 1 / self.factor)

    @property
    def closed_form(self) -> bool:
        return self.factor > 0 and self.operator.closed_form

    def diagonal(self) -> Tensor:
        return self.factor * self.operator.diagonal()

    def trace(self) -> Tensor:
        return self.factor * self.operator.trace()

    def mean_eigenvalue(self) -> Tensor:
        return self.factor * self.operator.mean_eigenvalue()

    def dense(self) -> Tensor:
        return self.factor * self.operator.dense()


class Shifted(Operator):
    """G + damping I.

    Args:
        operator: G, of size n.
        damping: In G's units, >= 0.

    Raises:
        ValueError: For a negative damping.
    """

    state = shown = ("operator", "damping")

    def __init__(self, operator: Operator, damping: float) -> None:
        if not damping >= 0:
            raise ValueError(f"damping is {damping}, expected a number >= 0")
        self.operator, self.damping = operator, damping
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device
        self.facts = operator.facts

    def mv(self, vector: Tensor) -> Tensor:
        return self.operator.mv(vector) + self.damping * vector

    def mm(self, block: Tensor) -> Tensor:
        return self.operator.mm(block) + self.damping * block

    def inverse(self, damping: float = 0.0) -> Operator | None:
        return self.operator.inverse(self.damping + damping)

    @property
    def closed_form(self) -> bool:
        return self.operator.closed_form

    def diagonal(self) -> Tensor:
        return self.operator.diagonal() + self.damping

    def trace(self) -> Tensor:
        return self.operator.trace() + self.damping * self.size

    def mean_eigenvalue(self) -> Tensor:
        return self.operator.mean_eigenvalue() + self.damping

    def dense(self) -> Tensor:
        matrix = self.operator.dense()
        return matrix + self.damping * torch.eye(self.size, dtype=matrix.dtype, device=matrix.device)


class Closed(Operator):
    """G (n, n) by functions: v -> G v, (..., n) -> (..., n), and that of G^-1 where it is known.

    Args:
        like: A tensor (n,) of the operator's dtype, on its device.
        product: v -> G v; more dimensions in front are batches.
        inverse_product: v -> G^-1 v, likewise.
        origin: A function and its arguments that give this operator again, for copies and pickles where the products
            are functions that cannot be pickled.

    Example:
        >>> G = ng.operators.Closed(torch.zeros(3), lambda v: 2 * v, lambda v: v / 2)
        >>> G.inverse() @ torch.ones(3)
        tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        like: Tensor,
        product: Map,
        inverse_product: Map | None = None,
        origin: tuple[Callable[..., Operator | None], tuple[Any, ...]] | None = None,
    ) -> None:
        self.product, self.inverse_product, self.origin = product, inverse_product, origin
        self.size, self.dtype, self.device = len(like), like.dtype, like.device

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy has products of its own, where it is known how they are made."""
        return super().__reduce_ex__(protocol) if self.origin is None else (*self.origin, {"facts": self.facts})

    def mv(self, vector: Tensor) -> Tensor:
        return self.product(vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.product(block.mT).mT  # leading dimensions are batches

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """The other product; None where it is not known, and with damping."""
        if damping or self.inverse_product is None:
            return None
        like = torch.empty(self.size, dtype=self.dtype, device=self.device)
        origin = None if self.origin is None else (Closed.inverse, (self,))
        return Closed(like, self.inverse_product, self.product, origin)


# U of G = U U^T by its products, for solving in the space of the examples


class SampleRows(Protocol):
    """U (n, r) of G = U U^T by its products, for solving in the space of the examples."""

    rank: int

    def mv(self, weights: Tensor) -> Tensor:
        """U w, shape (n,).

        Args:
            weights: w, shape (r,).
        """
        ...

    def rmv(self, vector: Tensor) -> Tensor:
        """U^T v, shape (r,).

        Args:
            vector: v, shape (n,).
        """
        ...

    def dense(self) -> Tensor:
        """U written out, (n, r)."""
        ...

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle: what Cholesky and eigh read."""
        root = self.dense()
        return root.mT @ root

    def gram(self) -> Tensor:
        """U^T U (r, r), symmetric."""
        lower = self.lower_gram()
        return lower.tril() + lower.tril(-1).mT


class WrittenColumns(SampleRows):
    """U as a matrix.

    Args:
        matrix: Shape (n, r).
    """

    is_written = True

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.rank = matrix, matrix.shape[1]

    def __repr__(self) -> str:
        return write_choices(self, size=len(self.matrix), rank=self.rank)

    def mv(self, weights: Tensor) -> Tensor:
        return self.matrix @ weights

    def rmv(self, vector: Tensor) -> Tensor:
        return self.matrix.mT @ vector

    def dense(self) -> Tensor:
        return self.matrix


class StackedColumns(SampleRows):
    """U = [c_1 U_1, c_2 U_2, ...], the root of a weighted sum of operators; a U_i of this kind is taken apart."""

    def __init__(self, parts: Sequence[SampleRows], factors: Sequence[float] | None = None) -> None:
        given = zip(parts, [1.0] * len(parts) if factors is None else factors, strict=True)
        split = ((part.parts if isinstance(part, StackedColumns) else [(part, 1.0)], c) for part, c in given)
        self.parts: list[tuple[SampleRows, float]] = [(each, c * own) for pairs, c in split for each, own in pairs]
        self.starts = [0, *accumulate(part.rank for part, _ in self.parts)]
        self.rank = self.starts[-1]

    def mv(self, weights: Tensor) -> Tensor:
        pieces = split_tensor(weights, [part.rank for part, _ in self.parts])
        return torch.stack([c * part.mv(w) for (part, c), w in zip(self.parts, pieces, strict=True)]).sum(0)

    def rmv(self, vector: Tensor) -> Tensor:
        return torch.cat([c * part.rmv(vector) for part, c in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([c * part.dense() for part, c in self.parts], dim=1)

    def lower_gram(self) -> Tensor:
        """U^T U (r, r), valid in its lower triangle: by layers where two parts have rows of the same layers."""
        corners = [c**2 * part.lower_gram() for part, c in self.parts]
        total = corners[0].new_zeros(self.rank, self.rank)

        @cache
        def write(k: int) -> Tensor:
            return self.parts[k][0].dense()

        for i, (rows, c) in enumerate(self.parts):
            here = slice(self.starts[i], self.starts[i + 1])
            total[here, here] = corners[i]
            for j, (other, d) in enumerate(self.parts[:i]):
                way = getattr(rows, "cross_gram", None)
                block: Tensor | None = None if way is None else way(other)
                block = write(i).mT @ write(j) if block is None else block
                total[here, self.starts[j] : self.starts[j + 1]] = c * d * block
        return total


# operators as plain tensors and values and back, so that a checkpoint of them is read without trusting its code


Packed = dict[str, Any]
PLAIN = (Tensor, bool, int, float, str, type(None))


def pack_operator(operator: Operator) -> Packed:
    """An operator as a dict of tensors, numbers, strings, lists and such dicts.

    Args:
        operator: Of a class that says what it is made of (`Operator.state`, or its own `pack` and `unpack`).

    Returns:
        What `torch.load(weights_only=True)` reads, and `unpack_operator` makes the operator of. It shares the tensors.

    Raises:
        TypeError: If the class does not say it.
    """
    facts = {} if operator.facts == Facts() else {"facts": dict(vars(operator.facts))}
    return {"kind": operator.packed_as, **{name: pack_value(v) for name, v in operator.pack().items()}, **facts}


def pack_value(value: Any) -> Any:
    """One of the things that an operator is made of; TypeError for what is neither plain nor an operator."""
    if isinstance(value, Operator):
        return pack_operator(value)
    if isinstance(value, (list, tuple)):
        return [pack_value(v) for v in cast("Sequence[Any]", value)]
    if isinstance(value, PLAIN):
        return value
    raise TypeError(f"{value!r} cannot be kept in a checkpoint: expected tensors, numbers, strings, lists or operators")


def unpack_operator(packed: Packed) -> Operator:
    """The operator that `pack_operator` took apart.

    Args:
        packed: The dict. Its "kind" names the class, which must have been defined in this process.

    Returns:
        An operator that shares the tensors.

    Raises:
        ValueError: If no operator class of that name is known.
    """
    kind = PACKABLE.get(packed["kind"])
    if kind is None:
        raise ValueError(
            f"no operator class {packed['kind']!r} is known, expected one of {sorted(PACKABLE)}: import the module "
            "that defines it before you load"
        )
    parts = {name: unpack_value(value) for name, value in packed.items() if name not in ("kind", "facts")}
    operator = kind.unpack(parts)
    return operator.declare(**packed["facts"]) if "facts" in packed else operator


def unpack_value(value: Any) -> Any:
    """What `pack_value` was given, lists for tuples."""
    if isinstance(value, dict):
        return unpack_operator(cast("dict[str, Any]", value))
    return [unpack_value(v) for v in cast("list[Any]", value)] if isinstance(value, list) else value
