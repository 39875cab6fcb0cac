"""G^-1 kept from step to step and updated online (Karakida, Okada & Amari 2016, section 2)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.linalg import all_finite, cholesky, cholesky_over, damp, psd_root, widen_dtype
from natgrad.ground.messages import Explained
from natgrad.ground.pure import RandomState
from natgrad.ground.returning_rows import count_passes, join_returns
from natgrad.ground.spaces import Params
from natgrad.metrics import Metric
from natgrad.operators import Factored, InvertedOperator, Operator
from natgrad.structures.base import Memory, Structure


def average_metric(matrix: Tensor, root: Tensor, rate: float, *, out: Tensor | None = None) -> Tensor:
    """Eq. 3 itself: (1 - rate) G + rate U U^T, in O(n^2 r).

    matrix: G, (..., n, n). root: U, (..., n, r). rate: Weight of U U^T, in (0, 1).
    """
    return _plus_outer(matrix, root, 1 - rate, rate, out)


def adapt_inverse(
    inverse: Tensor, root: Tensor, rate: float, *, image: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Eq. 4: G^-1 after the update, to first order in rate: (1 + rate) G^-1 - rate (G^-1 U)(G^-1 U)^T, in O(n^2 r).

    Positive definite exactly where `stays_positive` is true.

    inverse: G^-1, (..., n, n). root: U, (..., n, r). rate: Weight of U U^T, in (0, 1). image: G^-1 U, (..., n, r),
    where it is known.
    """
    image = inverse @ root if image is None else image
    return _plus_outer(inverse, image, 1 + rate, -rate, out)


def stays_positive(inverse: Tensor, root: Tensor, rate: float, *, image: Tensor | None = None) -> Tensor:
    """True where eq. 4 leaves G^-1 positive definite: rate * lambda_max(U^T G^-1 U) < 1 + rate, shape (...,).

    By a Cholesky factorisation of (1 + rate) I - rate U^T G^-1 U, (r, r), which exists on the same condition.
    False where anything is not finite.

    inverse: G^-1, (..., n, n). root: U, (..., n, r). rate: Weight of U U^T, in (0, 1). image: G^-1 U, (..., n, r),
    where it is known.
    """
    gram = root.mT @ (inverse @ root if image is None else image)
    factorisation = torch.linalg.cholesky_ex(_shift(-rate * gram, 1 + rate))
    return (factorisation.info == 0) & torch.isfinite(factorisation.L.diagonal(dim1=-2, dim2=-1)).all(-1)


def woodbury_inverse(
    inverse: Tensor, root: Tensor, rate: float, *, image: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """G^-1 after the update, exactly: [G^-1 - G^-1 U ((1 - rate) / rate I + U^T G^-1 U)^-1 U^T G^-1] / (1 - rate).

    O(n^2 r + r^3). Always positive definite. Not finite where the (r, r) matrix cannot be factorised.

    inverse: G^-1, (..., n, n). root: U, (..., n, r). rate: Weight of U U^T, in (0, 1). image: G^-1 U, (..., n, r),
    where it is known.
    """
    image = inverse @ root if image is None else image
    small = torch.linalg.cholesky_ex(_shift(root.mT @ image, (1 - rate) / rate))
    lower = torch.where((small.info == 0)[..., None, None] & torch.isfinite(small.L), small.L, torch.nan)
    half = torch.linalg.solve_triangular(lower.mT, image, upper=True, left=False)  # G^-1 U L^-T
    return _plus_outer(inverse, half, 1 / (1 - rate), -1 / (1 - rate), out)


def compress_root(root: Tensor) -> Tensor:
    """A root of the same U U^T with at most n columns: R^T of U^T = Q R, in O(n^2 r)."""
    return root if root.shape[-1] <= root.shape[-2] else torch.linalg.qr(root.mT, mode="r").R.mT


def _plus_outer(matrix: Tensor, factor: Tensor, keep: float, weight: float, out: Tensor | None) -> Tensor:
    """keep A + weight F F^T. One pass over A; in place that is all the memory that moves."""
    if matrix.dim() == 2:
        return torch.addmm(matrix, factor, factor.mT, beta=keep, alpha=weight, out=out)
    shape, n = matrix.shape, matrix.shape[-1]
    flat, columns = matrix.reshape(-1, n, n), factor.reshape(-1, n, factor.shape[-1])
    target = None if out is None else out.view(-1, n, n)
    return torch.baddbmm(flat, columns, columns.mT, beta=keep, alpha=weight, out=target).view(shape)


def _shift(matrix: Tensor, shift: float) -> Tensor:
    """A + shift I for (..., r, r), in place."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift)
    return matrix


# A length for steps in a score metric: how long the score of data like these must be, so that no unit matters


def join_spread(known: dict[str, Any] | None, examples: Tensor) -> dict[str, Any]:
    """Mean and spread of the examples seen so far and of these, without cancellation (Chan's update).

    examples: X, (..., b, N), finite.
    """
    count, mean = examples.shape[-2], examples.mean(-2)
    squares = (examples - mean.unsqueeze(-2)).square().sum((-2, -1))
    if known is None:
        return {"examples": count, "mean": mean, "squares": squares}
    before, total = known["examples"], known["examples"] + count
    gap = mean - known["mean"]
    between = gap.square().sum(-1) * (before * count / total)
    return {
        "examples": total,
        "mean": known["mean"] + gap * (count / total),
        "squares": known["squares"] + squares + between,
    }


def measure_data_unit(known: dict[str, Any]) -> Tensor:
    """N / sqrt(tr Cov x), in 1 / (units of x): sqrt(E |d log p / dx|^2) is at least this, for any density of the data.

    By Cramer and Rao the second moment of the score is at least C^-1, whose trace is at least N^2 / tr C. Where a
    single example was seen, or all are equal, |x|^2 stands for the trace.
    """
    mean = known["mean"]
    trace = known["squares"] / max(known["examples"] - 1, 1)
    trace = torch.where(trace > 0, trace, mean.square().sum(-1))
    return mean.shape[-1] / trace.sqrt()


# G^-1 kept from step to step and updated online (Karakida, Okada & Amari 2016, section 2)

SYMMETRISE = 16
"""Steps between which round-off may make a kept inverse unsymmetric: forgetting amplifies that part."""


class Update(Explained):
    """How the average of eq. 3, G <- (1 - eps) G + eps U U^T, is inverted."""

    @abstractmethod
    def start(self, operator: Operator) -> Memory:
        """The memory before the first update.

        Args:
            operator: G of the first step, for its size, dtype and device.
        """

    @abstractmethod
    def step(self, memory: Memory, root: Tensor) -> Memory | None:
        """The memory after U U^T joined; None where it would not be finite. Writes anew.

        Args:
            memory: From the last step, with `step`, this one's number from 1, `seen`, examples up to and with this
                step's, `unit`, the length that sqrt(d^T G d) is measured by, and `passes` over the same rows.
            root: U, shape (n, r).
        """

    @abstractmethod
    def operator(self, memory: Memory) -> Operator:
        """What is solved with.

        Args:
            memory: From `step`.
        """

    @property
    @abstractmethod
    def matrices(self) -> int:
        """How many numbers are remembered, in units of n^2."""


class InverseUpdate(Update):
    """The inverse itself is kept, and nothing else."""

    offset: float
    floor: float
    start_at: float

    def __post_init__(self) -> None:
        check_positive("offset", self.offset)
        check_positive("start_at", self.start_at)
        if not 0 <= self.floor < 1:
            raise ValueError(f"floor is {self.floor}, expected a number in [0, 1): the least weight of new data")

    def start(self, operator: Operator) -> Memory:
        return {"inverse": scaled_identity(operator, 1 / self.start_at)}

    def operator(self, memory: Memory) -> Operator:
        return InvertedOperator(memory["inverse"])

    @property
    def matrices(self) -> int:
        return 1


@dataclass(frozen=True)
class FirstOrder(InverseUpdate):
    """Eq. 4: G^-1 <- (1 + eps) G^-1 - eps (G^-1 U)(G^-1 U)^T, eps = max(1 / (t + offset), floor).

    Where eq. 4 would lose positivity (eps lambda_max(U^T G^-1 U) >= 1 + eps, tested exactly) the exact update is taken
    instead, and counted as "refused".

    Args:
        offset: In steps, > 0. With a small one the first updates are refused: 121 of 600,000 at 1, in Karakida's table.
        floor: The least eps, in [0, 1).
        start_at: G is start_at * I at first, > 0.

    Raises:
        ValueError: For a value outside of these ranges.
    """

    offset: float = 100.0
    floor: float = 0.0
    start_at: float = 1.0

    def start(self, operator: Operator) -> Memory:
        return super().start(operator) | {"refused": 0}

    def step(self, memory: Memory, root: Tensor) -> Memory | None:
        before, rate = memory["inverse"], adaptation_rate(memory["step"], self.offset, self.floor)
        image = before @ root
        positive = bool(stays_positive(before, root, rate, image=image))
        update = adapt_inverse if positive else woodbury_inverse
        inverse = kept_symmetric(update(before, root, rate, image=image), memory["step"])
        return {"inverse": inverse, "refused": memory["refused"] + (not positive)} if all_finite(inverse) else None


@dataclass(frozen=True)
class Woodbury(InverseUpdate):
    """The exact inverse of eq. 3 by Woodbury's formula, at the cost of eq. 4 and an (r, r) factorisation.

    There is no damping: with floor > 0, G^-1 grows by 1 / (1 - floor) per step in directions that the data never show;
    `Averaged` bounds it. The weight of new data is eps = max(1 / (t + offset), floor).

    Args:
        offset: In steps, > 0.
        floor: The least eps, in [0, 1).
        start_at: G is start_at * I at first, > 0.

    Raises:
        ValueError: For a value outside of these ranges.
    """

    offset: float = 30.0
    floor: float = 0.0
    start_at: float = 1.0

    def step(self, memory: Memory, root: Tensor) -> Memory | None:
        rate = adaptation_rate(memory["step"], self.offset, self.floor)
        inverse = kept_symmetric(woodbury_inverse(memory["inverse"], compress_root(root), rate), memory["step"])
        return {"inverse": inverse} if all_finite(inverse) else None


@dataclass(frozen=True)
class Averaged(Update):
    """Keeps G itself (eq. 3), and factorises G + damping I every few steps. The default.

    G is the mean over the last horizon * n columns of roots (n parameters), or over `batches` batches where these have
    more columns, and over seen / hold times as many once `hold` examples were seen: eps = r / columns for U (n, r).

    The damping is unit^2 max(damping, decay / (1 + seen)), plus (seen - hold) / late of G's mean eigenvalue, at most
    all of it, once `hold` examples were seen. Where the same rows come again, and have few numbers for the parameters
    (`returning_rows.py`), `again` of the mean eigenvalue joins it for every pass over them after the first, at most all
    of it: what they do not determine stays where it is. `Operator.length_unit` is the metric's: with the score metric
    of data in other units, G, unit^2 and the damping change alike, and the step not at all. Long steps at first, which
    leave plateaus, short and averaged ones later, which fit the noise of few batches no more.

    Args:
        horizon: Columns averaged over, per parameter.
        batches: Averaged over at least; with one or two, metric and gradient share their noise.
        damping: The least, in units of unit^2.
        decay: Of the first steps: damping times examples, in units of unit^2.
        hold: Examples after which averages lengthen and the damping grows; math.inf for neither.
        late: Further examples after which the damping is G's mean eigenvalue.
        again: Share of G's mean eigenvalue in the damping for every further pass over the same rows; 0 for none.
        every: Steps between Cholesky factorisations; until the next the last factor solves.

    Raises:
        ValueError: Unless horizon, damping, decay, hold, late > 0 (finite, all but hold), again >= 0 and batches, every
            are integers >= 1.
    """

    horizon: float = 8.0
    batches: int = 3
    damping: float = 2e-4
    decay: float = 0.06
    hold: float = 4000.0
    late: float = 20_000.0
    again: float = 0.3
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("horizon", "damping", "decay", "late"):
            check_positive(name, getattr(self, name))
        if not self.hold > 0:
            raise ValueError(f"hold is {self.hold}, expected a positive number of examples")
        if not 0 <= self.again < float("inf"):
            raise ValueError(f"again is {self.again}, expected a number >= 0, of mean eigenvalues")
        check_integer("batches", self.batches, hint=", batches averaged over at least")
        check_integer("every", self.every, hint=", steps between factorisations")

    def start(self, operator: Operator) -> Memory:
        return {"metric": scaled_identity(operator, 0.0), "columns": 0.0}

    def step(self, memory: Memory, root: Tensor) -> Memory | None:
        columns = self.columns(memory["columns"], root, memory["seen"])
        metric = average_metric(memory["metric"], root, root.shape[-1] / columns)
        state = {"metric": metric, "columns": columns}
        if "lower" in memory and memory["step"] % self.every:
            return {**state, "lower": memory["lower"]} if all_finite(metric) else None
        lower = factor_damped(
            metric, float(self.amount(metric, memory["seen"], memory["unit"], memory.get("passes", 1.0)))
        )
        return None if lower is None else {**state, "lower": lower}

    def columns(self, before: float, root: Tensor, seen: int) -> float:
        """How many columns the mean is over, once U has joined.

        Args:
            before: The number of columns without U.
            root: U, shape (..., n, r).
            seen: Examples up to and with this step's.
        """
        n, r = root.shape[-2:]
        return self.count_columns(before, n, r, seen)

    def count_columns(self, before: float, n: int, r: int, seen: int) -> float:
        """The same for a root of n rows and r columns that is not made.

        Args:
            before: The number of columns without it.
            n: Parameters.
            r: Its columns.
            seen: Examples up to and with this step's.
        """
        return min(before + r, max(self.horizon * n, self.batches * r) * max(1.0, seen / self.hold))

    def amount(self, metric: Tensor, seen: int, unit: float | Tensor, passes: float = 1.0) -> Tensor:
        """The damping of G after so many examples, in units of G, shape (...,).

        Args:
            metric: G, shape (..., n, n).
            seen: Examples up to and with this step's.
            unit: The length that sqrt(d^T G d) is measured by.
            passes: Over the same rows, weighed by how few they are; 1 for a stream.
        """
        mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)
        share = min(1.0, max(seen - self.hold, 0.0) / self.late) + min(1.0, self.again * (passes - 1.0))
        return unit**2 * max(self.damping, self.decay / (1 + seen)) + share * mean

    def operator(self, memory: Memory) -> Operator:
        return Factored(memory["lower"])

    @property
    def matrices(self) -> int:
        return 2


@dataclass(frozen=True)
class AdaptiveInverse(Structure):
    """Keeps the inverse of a running average of G: O(r n^2) per step for a root U (n, r), r = N b for the score metric.

    For any metric; one without a root is written out, O(n^3). Solve with damping=0, as `ng.ang` does: the updates hold
    what they need, and more of it costs a factorisation per step. Numbers that are not finite leave the last inverse in
    place, which `opt.state_report().counts` counts as "kept", and exact updates in the place of eq. 4 as "refused".
    Parameters that come or go start the average anew. Memory: n^2 numbers, 2 n^2 for `Averaged`. A step writes at most
    two more. An update raises a ValueError for a metric that may be indefinite.

    Args:
        method: `ng.Averaged()` (default), `ng.Woodbury()` or `ng.FirstOrder()`, eq. 4.

    Raises:
        TypeError: For a method that is none of these.

    Reference:
        Karakida, Okada & Amari 2016, section 2.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> fisher = ng.fisher(model, nn.CrossEntropyLoss())
        >>> opt = ng.NaturalGradient(model, fisher, structure=ng.AdaptiveInverse(), damping=0.0)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    method: Update = field(default_factory=Averaged)

    def __post_init__(self) -> None:
        if not isinstance(self.method, Update):
            hint = "; did you forget the parentheses?" if isinstance(self.method, type) else ""
            raise TypeError(
                f"method is {self.method!r}, expected ng.Averaged(), ng.Woodbury() or ng.FirstOrder(){hint}"
            )

    def update(
        self, memory: Memory | None, metric: Metric, params: Params, inputs: Any, *, random: RandomState | None = None
    ) -> tuple[Operator, Memory]:
        now = metric.at(params, inputs, random=random)
        if now.indefinite:
            raise ValueError("the metric may be indefinite: an inverse is kept of positive semi-definite ones only")
        if now.dtype != widen_dtype(now.dtype):
            raise ValueError(
                f"the parameters are {now.dtype}, in which no inverse is kept: train them in float32, and compute the "
                "loss under torch.autocast"
            )
        shapes = [f"{name} {tuple(p.shape)}" for name, p in params.items()]
        if memory is None or memory["parameters"] != shapes:
            memory = {"parameters": shapes, "step": 0, "seen": 0, "kept": 0, **self.method.start(now)}
        spread = measure_spread(memory, now, metric, inputs)
        following = self._follow({**memory, **spread}, now, metric.count_examples(inputs))
        counts = {key: following[key] for key in ("examples", "seen", "kept", "refused") if key in following}
        counts |= {"passes": following.get("passes", 1.0)}
        operator = self.method.operator(following)
        return operator.declare(nats=now.nats, length_unit=following["unit"], counts=counts), following

    def count_numbers(self, size: int, total: int) -> int:
        return self.method.matrices * size * total

    def _follow(self, memory: Memory, now: Operator, examples: int) -> Memory:
        """The memory after this step's metric; where that is not finite, the last one with a count."""
        root = now.root()
        root = psd_root(now.dense()) if root is None else root
        counted = {**memory, "step": memory["step"] + 1, "seen": memory["seen"] + examples, "examples": examples}
        state = self.method.step(counted, root) if all_finite(root) else None
        if state is not None:
            return {**counted, **state}
        if memory["step"] == 0:
            raise ValueError(
                "the metric is not finite: its root overflows or is NaN; nothing was changed. Look for infinite "
                "derivatives (a square root at 0) or an overflow in the model"
            )
        return {**memory, "kept": memory["kept"] + 1}


def measure_spread(memory: Memory, now: Operator, metric: Metric, inputs: Any) -> Memory:
    """What to remember of the data's spread and returning rows, with the unit of length and the passes that follow.

    Without data: the operator's own unit, and one pass.
    """
    rows = metric.read_examples(inputs)
    if rows is None or not rows.is_floating_point() or not all_finite(rows):
        return {"unit": memory.get("unit", now.length_unit), "passes": memory.get("passes", 1.0)}
    spread = join_spread(memory.get("spread"), rows)
    unit = float(measure_data_unit(spread))
    returned = join_returns(memory.get("returned"), rows)
    passes = count_passes(returned, memory["seen"] + len(rows), rows.shape[1], now.size)
    unit = unit if 0 < unit < float("inf") else now.length_unit
    return {"spread": spread, "unit": unit, "returned": returned, "passes": passes}


def adaptation_rate(step: int, offset: float, floor: float) -> float:
    """eps_t = max(1 / (t + offset), floor), t = 1, 2, ...: at offset 0 the first update would forget the start."""
    return max(1 / (step + offset), floor)


def factor_damped(metric: Tensor, damping: float) -> Tensor | None:
    """L (n, n) with L L^T = G + damping I, in one new matrix; more damping where that fails, None where it must."""
    lower, info = cholesky_over(damp(metric, damping))
    if int(info) == 0 and all_finite(lower):
        return lower.to(metric.dtype)
    factor = cholesky(damp(metric, damping))
    return None if factor.failed else factor.lower.to(metric.dtype)


def kept_symmetric(matrix: Tensor, step: int) -> Tensor:
    """The matrix, every `SYMMETRISE` steps with its round-off made symmetric."""
    return (matrix + matrix.mT).mul_(0.5) if step % SYMMETRISE == 0 else matrix


def scaled_identity(operator: Operator, scale: float) -> Tensor:
    """scale * I (n, n), where the operator lives."""
    matrix = torch.zeros(operator.size, operator.size, dtype=operator.dtype, device=operator.device)
    matrix.diagonal().fill_(scale)
    return matrix
