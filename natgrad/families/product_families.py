"""Families made of families: independent products, those that lie in another one, and sub-models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.families.event_checks import check_width
from natgrad.families.exponential import ExponentialFamily
from natgrad.ground.checks import check_integer, check_positions
from natgrad.ground.pure import compute_exactly


class Product(ExponentialFamily):
    """Independent families side by side: theta, T and x are joined along their last dimension.

    Args:
        *families: (family, width of its x) each. x has to have a last axis, so take `Multinomial(1, C)` in place of
            `Categorical(C)`.

    Example:
        >>> pair = ng.Product((ng.Bernoulli(1), 1), (ng.Poisson(1), 1))
        >>> pair.expectation(torch.zeros(2))
        tensor([0.5000, 1.0000])
    """

    def __init__(self, *families: tuple[ExponentialFamily, int]) -> None:
        if not families or not all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], ExponentialFamily) for pair in families
        ):
            raise ValueError(
                f"families are {list(families)!r}, expected pairs (family, width of its x), at least one: "
                "Product((Gamma(), 1), (Bernoulli(3), 3))"
            )
        self.families = tuple(family for family, _ in families)
        self.widths = [check_integer("a width", width, of="the width of a family's x") for _, width in families]
        self.size = sum(family.size for family in self.families)
        self.domain = "; ".join(f"{family!r}: {family.domain}" for family in self.families)

    def parts(self, theta: Tensor) -> tuple[Tensor, ...]:
        """theta of every family.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return theta.split([family.size for family in self.families], dim=-1)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """x of every family.

        Args:
            x: Shape (..., widths).
        """
        return check_width(x, sum(self.widths)).split(self.widths, dim=-1)

    def statistics(self, x: Tensor) -> Tensor:
        return torch.cat(self._ask("statistics", self.pieces(x)), dim=-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        return torch.stack(self._ask("log_partition", self.parts(self.check_shape(theta, "theta")))).sum(0)

    def inside(self, theta: Tensor) -> Tensor:
        return torch.stack(self._ask("inside", self.parts(theta))).all(0)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.stack(self._ask("log_base", self.pieces(x))).sum(0)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return torch.stack(self._ask("mean_log_base", self.parts(theta))).sum(0)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return torch.stack(self._ask("log_prob", self.parts(self.check(theta)), self.pieces(x))).sum(0)

    def entropy(self, theta: Tensor) -> Tensor:
        return torch.stack(self._ask("entropy", self.parts(self.check(theta)))).sum(0)

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return torch.stack(self._ask("kl", self.parts(self.check(theta)), self.parts(self.check(other)))).sum(0)

    def expectation(self, theta: Tensor) -> Tensor:
        return torch.cat(self._ask("expectation", self.parts(self.check(theta))), dim=-1)

    def natural(self, eta: Tensor) -> Tensor:
        return torch.cat(self._ask("natural", self.parts(self.check_shape(eta, "eta"))), dim=-1)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        thetas = self._ask("maximise_likelihood", self.pieces(x), self.parts(statistics))
        return torch.cat([theta.to(statistics.dtype) for theta in thetas], dim=-1)

    def covariance(self, theta: Tensor) -> Tensor:
        blocks, start = self.check(theta).new_zeros(*theta.shape, self.size), 0
        for block in self._ask("covariance", self.parts(theta)):
            stop = start + block.shape[-1]
            pad = (start, self.size - stop, start, self.size - stop)
            blocks, start = blocks + torch.nn.functional.pad(block, pad), stop
        return blocks

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        pairs = zip(self.families, self.parts(theta), strict=True)
        draws = [family.draw(part, count, generator) for family, part in pairs]
        for family, width, x in zip(self.families, self.widths, draws, strict=True):
            if x.shape != (shape := (count, *theta.shape[:-1], width)):
                raise ValueError(
                    f"families has the pair ({family!r}, {width}), and {count} draws of it have shape "
                    f"{tuple(x.shape)}, expected {shape}: give the width of its x, which needs one axis"
                )
        return torch.cat(draws, dim=-1)

    def outcomes(self, theta: Tensor) -> Tensor:
        parts = self._ask("outcomes", self.parts(theta))
        places = torch.cartesian_prod(*(torch.arange(len(part)) for part in parts)).view(-1, len(parts)).unbind(1)
        return torch.cat([part[place] for part, place in zip(parts, places, strict=True)], dim=-1)

    def _ask(self, method: str, *arguments: Sequence[Tensor]) -> list[Tensor]:
        """What a method of every family gives for its part of the arguments."""
        return [getattr(family, method)(*parts) for family, *parts in zip(self.families, *arguments, strict=True)]

    def __repr__(self) -> str:
        return f"Product{self.families!r}"


@compute_exactly
class Embedded(ExponentialFamily):
    """Distributions of another family at A theta + b: psi(theta) = psi'(A theta + b), T = A^T T', eta = A^T eta'.

    A subclass sets `inner`, and overrides the maps that are not the identity.

    Attributes:
        inner: The other family.
    """

    inner: ExponentialFamily
    """The other family."""

    def _embed(self, theta: Tensor) -> Tensor:
        """A theta + b, the natural parameters in the other family, (..., n) -> (..., n')."""
        return theta

    def _pull(self, covector: Tensor) -> Tensor:
        """A^T v: the other family's statistics and expectation parameters to one's own, (..., n') -> (..., n)."""
        return covector

    def _source(self, y: Tensor) -> Tensor:
        """y (..., event) as the other family has it."""
        return y

    def statistics(self, x: Tensor) -> Tensor:
        return self._pull(self.inner.statistics(self._source(x)))

    def log_partition(self, theta: Tensor) -> Tensor:
        return self.inner.log_partition(self._embed(self.check_shape(theta, "theta")))

    def inside(self, theta: Tensor) -> Tensor:
        return self.inner.inside(self._embed(theta))

    def log_base(self, x: Tensor) -> Tensor:
        return self.inner.log_base(self._source(x))

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return self.inner.mean_log_base(self._embed(theta))

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.inner.log_prob(self._embed(self.check(theta)), self._source(x))

    def entropy(self, theta: Tensor) -> Tensor:
        return self.inner.entropy(self._embed(self.check(theta)))

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return self.inner.kl(self._embed(self.check(theta)), self._embed(self.check(other)))

    def expectation(self, theta: Tensor) -> Tensor:
        return self._pull(self.inner.expectation(self._embed(self.check(theta))))

    def covariance(self, theta: Tensor) -> Tensor:
        return self._pull(self._pull(self.inner.covariance(self._embed(self.check(theta)))).mT)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self.inner.draw(self._embed(theta), count, generator)


@compute_exactly
class SubModel(Embedded):
    """A family with all natural parameters at zero except those in `free`: a sparse precision is a graph.

    Args:
        family: The whole family.
        free: Positions in the family's theta. This family's theta holds these alone, and its statistics are those in
            `free`.
        base: A theta of the whole family inside its domain, from which the search for `natural` and `mle` starts. Its
            other entries must be zero. None: zero, where that is inside the domain.

    Raises:
        ValueError: For positions that the family does not have, or a base that is outside its domain or not zero
            outside of `free`; in `natural` and `mle`, where they need a base and have none.

    Example:
        >>> minimal = ng.SubModel(ng.Categorical(3), range(2))  # the last logit at zero
        >>> minimal.expectation(torch.zeros(2))
        tensor([0.3333, 0.3333])
    """

    def __init__(self, family: ExponentialFamily, free: Sequence[int], base: Tensor | None = None) -> None:
        self.inner = self.family = family
        self.free = check_positions("free", free, family.size)
        self.size, self.base, self.domain = len(self.free), base, family.domain
        if base is None:
            return
        family.single(base, "base")
        if bool(base[[i for i in range(family.size) if i not in self.free]].any()):
            raise ValueError("base must be zero outside of free")
        if not bool(family.inside(base)):
            raise ValueError(
                f"base is {base.tolist()}, expected a theta inside the domain of {family!r}: {self.domain}"
            )

    def whole(self, theta: Tensor) -> Tensor:
        """theta of the whole family, zeros and all, shape (..., n).

        Args:
            theta: This family's natural parameters, shape (..., k).
        """
        places = torch.tensor(self.free, device=theta.device).expand(theta.shape)
        return theta.new_zeros(*theta.shape[:-1], self.family.size).scatter(-1, places, theta)

    def _embed(self, theta: Tensor) -> Tensor:
        return self.whole(theta)

    def _pull(self, covector: Tensor) -> Tensor:
        return covector[..., list(self.free)]

    def as_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.family.as_numbers(x, dtype)

    def outcomes(self, theta: Tensor) -> Tensor:
        return self.family.outcomes(self.whole(theta))

    def guess(self, eta: Tensor) -> Tensor:
        if self.base is None:
            start = torch.zeros_like(eta)
            if not bool(self.inside(start).all()):
                raise ValueError(
                    f"base is None, expected for {self!r} a theta inside the whole family's domain, from which the "
                    f"search starts: zero is outside ({self.domain}); give SubModel(..., base=theta), a tensor "
                    f"({self.family.size},) that is zero outside of free"
                )
            return start
        return self.base.to(eta)[list(self.free)].expand_as(eta).clone()

    def __repr__(self) -> str:
        return f"SubModel({self.family!r}, free={list(self.free)})"
