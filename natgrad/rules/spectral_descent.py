"""Spectral steps: the polar factor of each layer's gradient, in coordinates in which its inputs are white."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.constants import ITERATIONS, KEPT_DIRECTIONS, WIDEST
from natgrad.ground.linalg import BLOCK, gram, invert_factor_or_nan, invert_shifted
from natgrad.ground.typed_torch import torch_linalg
from natgrad.operators import Operator
from natgrad.rules.base import BlockPoint, Objective, Rule
from natgrad.rules.quadratic import Memory, Quadratic, Step
from natgrad.rules.step_rules import least, share_loss

POLISH = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
"""a, b, c of X <- a X + (b X X^T + c (X X^T)^2) X, one after the other. Amsel et al. 2025 (Polar Express)."""

RESOLVENT = (1.10778854, 0.00322849, 0.13367532)
"""s, c and w of s + w / (k + c), nearest to k^(-1/2) for k in [.02^2, 1]: to .24 of it (Zolotarev)."""


@dataclass(frozen=True)
class SpectralDescent(Rule):
    """d = polar(n R) R for each layer, R = (A / mean(A) + damping I)^(-1/2) of its inputs' second moment A.

    polar(X) = U V^T for X = U S V^T. It is the steepest descent where a step is as large as what it changes in the
    layer's outputs over whitened inputs, |d R^-1| in operator norm. All directions of a layer move alike, whatever the
    gradient has of them, so that neither noise nor a few steep directions take the whole step. n = (1 - ahead) m +
    ahead g, of the running mean m and today's gradient g. A layer of (outputs, inputs) moves by length * sqrt(max(1,
    outputs / inputs)) in that norm; where a step's T examples times positions are less than enough * min(outputs,
    inputs), by the root of their ratio less: a gradient of T rows has T singular values, and all others of the
    running mean are of earlier steps. It takes several steps to see renewed * min(outputs, inputs) rows, and the
    direction is renewed that often, once in eight steps at least. Inputs of little variance are scaled up only as far
    as T rows tell it from noise: the second moment of T rows of n white inputs has eigenvalues that spread by about
    n / T, and scarce * n / T takes the place of the damping where that is more. R is longer then, so that inputs of
    mean size move as before. An embedding moves along R n, at a fixed root mean square of the change of its outputs:
    `rows` * length. A table that no layer reads (positions or queries that are parameters of the model) moves along
    polar(n), as far as a layer with its rows as inputs. Other parameters without a Kronecker product (norms, biases
    alone, cut factors of inputs) move along n / (F + damping mean(F))^(1/2), F the metric's diagonal, at a fixed root
    mean square: `vectors` * length, and no more than that of a layer's matrix.

    Lengths do not depend on the gradient's: let the learning rate fall towards the end of training, or take a finite
    `falls_after`, which needs no end: the learning rate is multiplied by sqrt(falls_after / k) after k steps.

    Args:
        length: Of a step at learning rate 1.
        damping: Added to A, in units of its mean eigenvalue.
        ahead: Weight of today's gradient in n besides its part in m.
        vectors: Root mean square of entries without a Kronecker product, in lengths.
        rows: Root mean square of the change of an embedding's outputs, in lengths.
        enough: Examples times positions per singular value of a layer, from which on its step has the whole length.
        renewed: Examples times positions per singular value, from which on each step has a direction of its own.
        scarce: Damping in inputs per example and position of a step, where that is more than `damping`; 0 for never.
        kl_share: Most nats per example of a step as a share of the loss; a bound against accidents.
        iterations: Of the polar factor, 1 to 7: with 5 singular values come out between .87 and 1.13, with 7 as 1. On a
            CPU one inverse of the smaller side takes the place of 5 iterations, and leaves them between .76 and 1.24.
        falls_after: Steps from which on the learning rate falls by itself; math.inf for never.

    Raises:
        ValueError: Unless lengths, shares, damping and falls_after are > 0, 0 <= scarce < inf, 0 <= ahead <= 1, and
            1 to 7 iterations.

    Reference:
        Jordan et al. 2024 (Muon) is R = I.
    """

    length: float = 0.05
    damping: float = 0.3
    ahead: float = 0.1
    vectors: float = 0.06
    rows: float = 0.5
    enough: float = 0.5
    renewed: float = 2.0
    scarce: float = 1.0
    kl_share: float = 0.5
    iterations: int = 5
    falls_after: float = math.inf

    def __post_init__(self) -> None:
        for name in ("length", "damping", "vectors", "rows", "enough", "renewed", "kl_share", "falls_after"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number > 0")
        if not 0 <= self.scarce < math.inf:
            raise ValueError(f"scarce is {self.scarce}, expected a number >= 0; 0 to whiten by all rows alike")
        if not 0 <= self.ahead <= 1:
            raise ValueError(f"ahead is {self.ahead}, expected a weight in [0, 1]")
        if self.iterations not in range(1, len(POLISH) + 1):
            raise ValueError(f"iterations is {self.iterations}, expected a whole number from 1 to {len(POLISH)}")

    def rate_after(self, steps: int) -> float:
        return min(1.0, math.sqrt(self.falls_after / max(steps, 1)))

    def prepare(self, metric: Operator, level: float) -> dict[str, Tensor]:
        return {"squares": metric.diagonal().clamp(min=0)}

    def prepare_inputs(self, moment: Tensor, tokens: bool, positions: float) -> dict[str, Tensor]:
        least = 0.0 if tokens else self.scarce * moment.shape[-1] / max(positions, 1.0)
        if least <= self.damping:
            return whitener(moment, tokens, self.damping)
        longer = ((1 + least) / (1 + self.damping)) ** 0.5  # directions of mean size move as before
        return {name: longer * root for name, root in whitener(moment, tokens, least).items()}

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        direction, memory = self.find_direction(block)
        return (direction if block.unit == 1 else direction * block.unit), memory

    def find_direction(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        """A block's direction where its outputs have the likelihood's unit.

        Args:
            block: The layer.
        """
        n = block.mean.lerp(block.gradient().to(block.mean), self.ahead)
        if (rows := table_rows(block.shape)) is not None:
            return self.turn_table(n, rows), {}
        if "squares" in block.prepared or not block.prepared:
            return self.scale_entries(n, block.prepared.get("squares")), {}
        if "tokens" in block.prepared:
            return self.scale_rows(n, block.prepared["tokens"].to(n)), {}
        room, since = self.room_of(block), block.steps - int(block.memory.get("step", -KEPT_DIRECTIONS))
        every = min(KEPT_DIRECTIONS, max(1, int(self.renewed / (room * self.enough))))
        renewed = (block.steps + zlib.crc32(block.names[0].encode())) % every == 0  # not all layers at one step
        if "direction" in block.memory and since < every and not renewed:
            return block.memory["direction"], dict(block.memory)
        root = block.prepared["inputs"].to(n)
        matrix = n.squeeze(0) if len(n) == 1 and root.dim() < 3 else n
        direction = apply_root(polar(apply_root(matrix, root, transposed=True), self.iterations), root).view(n.shape)
        direction = (direction * (max(1.0, n.shape[-2] / n.shape[-1]) * min(1.0, room)) ** 0.5).contiguous()
        return direction, {"direction": direction, "step": torch.tensor(block.steps)} if every > 1 else {}

    def room_of(self, block: BlockPoint) -> float:
        """Examples times positions of a step over those that a layer's singular values need, which are `enough` each.

        Args:
            block: The layer.
        """
        return block.positions / (self.enough * min(block.mean.shape[-2:]))

    def scale_rows(self, n: Tensor, root: Tensor) -> Tensor:
        """R n for a table of tokens, long enough to change its outputs by `rows` in root mean square over the tokens.

        One token reads one row and mixes none, so that no combination of rows is a direction that could take the whole
        step: a polar factor would share it out over the vocabulary.

        Args:
            n: The gradient's mean, shape (tokens, entries).
            root: R's diagonal, shape (tokens,).
        """
        step = root.unsqueeze(-1) * n
        often = (root.square().reciprocal() - self.damping).clamp(min=0)  # frequencies over their mean
        size = (step.square().mean(-1) @ often / often.sum().clamp(min=torch.finfo(n.dtype).tiny)).sqrt()
        return torch.where(size > 0, step * (self.rows / size.clamp(min=torch.finfo(n.dtype).tiny)), 0.0)

    def turn_table(self, n: Tensor, rows: int) -> Tensor:
        """polar(n) for a table that no layer reads, such as positions: as long as the step of a layer that reads it.

        Args:
            n: The gradient's mean, in the shape of the block.
            rows: Of the table: the inputs of that layer.
        """
        direction = polar(n.reshape(rows, -1), self.iterations)
        turned = (max(1.0, direction.shape[1] / rows) ** 0.5 * direction).reshape(n.shape)
        return torch.where(n == 0, n, turned)  # what a mask cuts has no gradient, and stays

    def scale_entries(self, n: Tensor, squares: Tensor | None) -> Tensor:
        """n / (F + damping mean F)^(1/2) at the root mean square of entries.

        Args:
            n: The gradient's mean, in the shape of the block.
            squares: F, the diagonal of the metric; None where there is none.
        """
        if squares is not None:
            metric = squares.view(n.shape).to(n)
            n = n / (metric + self.damping * metric.mean()).clamp(min=torch.finfo(n.dtype).tiny).sqrt()
        most = min(self.vectors, n.shape[-1] ** -0.5)
        size = n.square().mean().sqrt()
        return torch.where(size > 0, n * (most / size.clamp(min=torch.finfo(n.dtype).tiny)), 0.0)

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        proposal = model.proposal
        form = proposal.form()
        radius = self.radius(model)
        bound = (2 * radius / (model.nats * form.clamp(min=0))).sqrt()  # no curvature at all: infinite
        rate = torch.where(form > 0, bound.clamp(max=self.length), self.length)
        model.cuts["kl_share"] = lambda: self.length / rate
        return proposal.scale_by(rate), memory

    def radius(self, model: Quadratic) -> float:
        """The bound on this step's KL, in nats per example.

        Args:
            model: Knows the loss and its nats.
        """
        return least(share_loss(model, self.kl_share), model.run.options.get("max_kl", math.inf))


def whitener(moment: Tensor, tokens: bool, damping: float) -> dict[str, Tensor]:
    """W with W^T W = (A / mean(A) + damping I)^-1 for A (..., n, n), lower triangular, or for a diagonal (n,).

    Any such W gives the same step polar(n W^T) W, since it depends on W^T W alone; this one needs no eigenvectors.
    """
    values = moment if moment.dim() == 1 else moment.diagonal(dim1=-2, dim2=-1)
    mean = values.clamp(min=0).mean(-1).view(moment.shape[: max(moment.dim() - 2, 0)] + (1,) * min(moment.dim(), 2))
    ones = torch.ones_like(values)
    none = ones if moment.dim() == 1 else torch.diag_embed(ones)
    # without the scale of A: lengths are in the units of weights
    scaled = torch.where(mean > 0, moment / torch.where(mean > 0, mean, 1.0), none)
    if moment.dim() == 1:
        return {"tokens" if tokens else "inputs": (scaled.clamp(min=0) + damping).rsqrt()}
    return {"tokens" if tokens else "inputs": invert_factor_or_nan(scaled + damping * none)}


def table_rows(shape: tuple[int, ...]) -> int | None:
    """Rows of a parameter that is one matrix but for axes of one entry; None for vectors, and where that is large."""
    sides = [side for side in shape if side > 1]
    return sides[0] if len(sides) == 2 and min(sides) <= WIDEST else None


def apply_root(matrix: Tensor, root: Tensor, transposed: bool = False) -> Tensor:
    """X W, or X W^T, for X (..., p, q) and W (..., q, q), lower triangular, or (q,) for a diagonal."""
    if root.dim() == 1:
        return matrix * root
    alike = root.shape[:-2] == matrix.shape[:-2]
    if root.shape[-1] <= BLOCK or not matrix.is_cpu or not (alike or matrix.dim() == 2):
        return matrix @ (root.mT if transposed else root)
    if matrix.dim() > 2:
        return torch.stack([apply_root(x, w, transposed) for x, w in zip(matrix.unbind(), root.unbind(), strict=True)])
    product = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    multiply_triangle(matrix, root, product, transposed)
    return product


def multiply_triangle(matrix: Tensor, lower: Tensor, out: Tensor, transposed: bool) -> None:
    """X W, or X W^T, into `out`, without the products with W's zeros, block by block."""
    if (n := len(lower)) <= BLOCK:
        torch.mm(matrix, lower.mT if transposed else lower, out=out)
        return
    half = n // 32 * 16
    multiply_triangle(matrix[:, :half], lower[:half, :half], out[:, :half], transposed)
    multiply_triangle(matrix[:, half:], lower[half:, half:], out[:, half:], transposed)
    if transposed:
        out[:, half:].addmm_(matrix[:, :half], lower[half:, :half].mT)
    else:
        out[:, :half].addmm_(matrix[:, half:], lower[half:, :half])


def polar(matrix: Tensor, iterations: int = len(POLISH)) -> Tensor:
    """U V^T for X = U S V^T (..., p, q). 0 for X = 0.

    By products alone: with 5 iterations singular values above 1e-3 of |X| come out between .87 and 1.13, with 7 as 1;
    smaller ones below. On a CPU, where a factorisation costs no more than a product or two of that size, the place of 5
    iterations is taken by one inverse of X X^T + c I: singular values above .02 of |X X^T|^(1/2) come out between .76
    and 1.24. Two inverses, which are nearer, bring nothing on ten races.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    size = torch_linalg.matrix_norm(x, keepdim=True)
    x = x / size.clamp_(min=torch.finfo(x.dtype).tiny)
    if x.shape[-2] == 1:
        pass
    elif x.is_cpu and iterations == ITERATIONS:
        x = polish_by_resolvent(x)
    else:
        x = polish(x / 1.01, iterations)
    return x.mT if tall else x


def polish_by_resolvent(x: Tensor) -> Tensor:
    """(s I + w (K + c I)^-1) X / k^(1/2) for X (..., p, q), K = X X^T / k of norm 1."""
    start, shift, weight = RESOLVENT
    square = self_product(x)
    size = torch_linalg.matrix_norm(square, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
    root = invert_shifted(square.div_(size), shift).mul_(weight)
    root.diagonal(dim1=-2, dim2=-1).add_(start)
    return root.div_(size.sqrt()) @ x


def polish(x: Tensor, iterations: int) -> Tensor:
    """The polar factor of X (..., p, q), all singular values at most 1.

    Products of X X^T alone would be fewer where q is far more than p, but rounding in them makes eigenvalues negative,
    which the polynomials blow up: with factors rounded to TF32 to singular values of 25 in place of 1.12.
    """
    for a, b, c in POLISH[:iterations]:
        square = self_product(x)
        x = torch.add((b * square + c * self_product(square)) @ x, x, alpha=a)
    return x


def self_product(x: Tensor) -> Tensor:
    """X X^T, (..., p, p)."""
    return gram(x.mT) if x.dim() == 2 else x @ x.mT
