"""Two-layer models side by side: data and initial conditions, methods that learn R models at once, their metric.

A learner has the parameters {"W", "V"} of R models, (R, 8, 8), and `step(X)`, X (R, b, 8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import natgrad as ng
from natgrad.energies import TwoLayer
from natgrad.energies.two_layer import pool_features, unit_responses
from natgrad.ground.returning_rows import count_passes, join_returns
from natgrad.ground.spaces import Positive, Square
from natgrad.structures.adaptive_inverse import (
    adapt_inverse,
    adaptation_rate,
    average_metric,
    join_spread,
    measure_data_unit,
    stays_positive,
    woodbury_inverse,
)

SUBSPACES, WIDTH = 4, 2
N = SUBSPACES * WIDTH
PURE = 0.9  # share of what a unit pools above which it belongs to one subspace
LARGE = 0.1  # units that pool less than this share of the largest one's have vanished


def isa(seed: int, examples: int) -> Tensor:
    """x = A (s_1 .. s_4), s_i = u_i N(0, I_2), u_i uniform on (0, 1); (examples, 8) in float64."""
    # A is orthogonal, without whitening: other mixings give test errors of -6 to -1190, none of them the paper's
    generator = torch.Generator().manual_seed(seed)
    mixing = draw_mixing(generator)
    scales = torch.rand(examples, SUBSPACES, 1, generator=generator, dtype=torch.float64)
    sources = torch.randn(examples, SUBSPACES, WIDTH, generator=generator, dtype=torch.float64)
    return (scales * sources).flatten(1) @ mixing.mT


def draw_mixing(generator: torch.Generator) -> Tensor:
    """A, a random orthogonal matrix, (8, 8)."""
    return torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64))[0]


def count_units(params: dict[str, Tensor], link: Positive | Square, seed: int) -> list[tuple[int, int]]:
    """For each model the subspaces that have a unit of their own, and the units that merge subspaces."""
    # a unit h pools sum_j V_hj |w_j|^2, which the rows w_j of W A split among the subspaces
    mixing = draw_mixing(torch.Generator().manual_seed(seed))
    W, V = params["W"].detach().cpu().double(), link(params["V"].detach().cpu().double())
    rows = (W @ mixing).square().unflatten(-1, (SUBSPACES, WIDTH)).sum(-1)  # (R, J, subspaces)
    pooled = V @ rows
    sizes = pooled.sum(-1)
    large = sizes > LARGE * sizes.amax(-1, keepdim=True)
    pure = pooled > PURE * sizes.unsqueeze(-1)
    own = (pure & large.unsqueeze(-1)).any(1).sum(-1)
    merged = (large & ~pure.any(-1)).sum(-1)
    return list(zip(own.tolist(), merged.tolist(), strict=True))


def starts(
    seed: int, runs: int, link: Positive | Square, spread: float = 0.3, pooling: float = 1.0
) -> dict[str, Tensor]:
    """W ~ spread N(0, 1) and V uniform on (0, pooling), whatever the link; {"W", "V"}, (runs, 8, 8) in float64."""
    # from V = exp(.5 N(0, 1)) `ng.ang` reached -28 in 27 of 30 runs, the paper's methods in 3 of 10
    generator = torch.Generator().manual_seed(1000 + seed)
    W = spread * torch.randn(runs, N, N, generator=generator, dtype=torch.float64)
    V = torch.rand(runs, N, N, generator=generator, dtype=torch.float64).clamp(min=1e-3) * pooling
    return {"W": W, "V": link.inverse(V)}


@dataclass
class DescentLearner:
    """xi <- xi - eta grad l, eta a number or one per model (R, 1, 1)."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float | Tensor
    single: SingleExample = field(init=False)

    def __post_init__(self) -> None:
        self.single = SingleExample(self.params, self.model.link)

    def step(self, examples: Tensor) -> None:
        """One step of every run against its gradient."""
        if examples.shape[1] == 1:
            self.single.descend(examples, self.rate)
            return
        for name, gradient in self.model.gradient(self.params, examples).items():
            self.params[name].sub_(self.rate * gradient)


@dataclass
class Adam:
    """Adam with its usual averages (.9, .999), a rate per model."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float | Tensor
    count: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, examples: Tensor) -> None:
        """One step of every run by Adam."""
        self.count += 1
        for name, gradient in self.model.gradient(self.params, examples).items():
            zeros = (torch.zeros_like(gradient), torch.zeros_like(gradient))
            first, second = self.moments.setdefault(name, zeros)
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
            self.params[name].sub_(self.rate * first / scale / (1 - 0.9**self.count))


@dataclass
class Paper:
    """xi <- xi - eta G^-1 grad l, then G^-1 by eq. 4 or by Woodbury's formula, in place; eta the paper's, no bound."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float
    method: ng.FirstOrder | ng.Woodbury | None  # None: eq. 4 as printed, 1 / t from t = 1, whatever becomes of G^-1
    count: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        W = self.params["W"]
        self.single = SingleExample(self.params, self.model.link)
        self.inverse = torch.eye(2 * W[0].numel(), dtype=W.dtype).repeat(len(W), 1, 1)
        self.both = torch.empty_like(self.single.rows)

    def step(self, examples: Tensor) -> None:
        """One step of every run by the inverse that the paper adapts."""
        self.count += 1
        rows = self.single.slopes(examples)
        torch.bmm(rows, self.inverse, out=self.both)  # one pass over G^-1; four times faster than G^-1 times columns
        offset, floor = (0.0, 0.0) if self.method is None else (self.method.offset, self.method.floor)
        rate = adaptation_rate(self.count, offset, floor)
        self._update(rows[:, :-1].mT, self.both[:, :-1].mT, rate)
        move(self.params, self.both[:, -1], self.rate)  # by G_t^-1: this sample joins G_t+1

    def _update(self, root: Tensor, image: Tensor, rate: float) -> None:
        if isinstance(self.method, ng.Woodbury):
            woodbury_inverse(self.inverse, root, rate, image=image, out=self.inverse)
            return
        bound = (root * image).sum((1, 2))  # tr U^T G^-1 U, at least its largest eigenvalue
        if self.method is None or bool((rate * bound < 1 + rate).all()):
            adapt_inverse(self.inverse, root, rate, image=image, out=self.inverse)
            return
        positive = stays_positive(self.inverse, root, rate, image=image)
        if bool(positive.all()):
            adapt_inverse(self.inverse, root, rate, image=image, out=self.inverse)
            return
        exact = woodbury_inverse(self.inverse, root, rate, image=image)
        adapt_inverse(self.inverse, root, rate, image=image, out=self.inverse)
        self.inverse[~positive] = exact[~positive]
        self.refused += int((~positive).sum())


@dataclass
class NatgradLearner:
    """`ng.ang` with its defaults, for many models."""

    model: TwoLayer
    params: dict[str, Tensor]
    rate: float = 0.5
    method: ng.Averaged = field(default_factory=ng.Averaged)
    rule: ng.OnlineRadius = field(default_factory=ng.OnlineRadius)
    seen: int = 0
    columns: float = 0.0
    count: int = 0
    spread: dict[str, Any] | None = None
    returned: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        W = self.params["W"]
        self.single = SingleExample(self.params, self.model.link)
        self.metric = W.new_zeros(len(W), 2 * W[0].numel(), 2 * W[0].numel())
        self.upper = torch.eye(2 * W[0].numel(), dtype=W.dtype).repeat(len(W), 1, 1)

    def step(self, examples: Tensor) -> None:
        """One step of every run by the library's own metric and inverse."""
        batch = examples.shape[1]
        self.count, self.seen = self.count + 1, self.seen + batch
        gradient = self._join_metric(examples)
        self.spread = join_spread(self.spread, examples)
        unit = measure_data_unit(self.spread)
        self.returned = join_returns(self.returned, examples[0])  # all models see the same
        passes = count_passes(self.returned, self.seen, examples.shape[-1], self.metric.shape[-1])
        if self.count == 1 or self.count % self.method.every == 0:
            # U with U^T U = G + amount I, which LAPACK makes faster than L; the last good one where that fails
            damped = self.metric.clone()
            damped.diagonal(dim1=1, dim2=2).add_(self.method.amount(self.metric, self.seen, unit, passes).unsqueeze(1))
            result = torch.linalg.cholesky_ex(damped, upper=True)
            failed = result.info != 0
            self.upper = torch.where(failed.view(-1, 1, 1), self.upper, result.L) if bool(failed.any()) else result.L
        half = torch.linalg.solve_triangular(self.upper.mT, gradient.unsqueeze(-1), upper=False)
        step = torch.linalg.solve_triangular(self.upper, half, upper=True).squeeze(-1)
        length = self.rate * half.squeeze(-1).norm(dim=1, keepdim=True)
        bound = self.rule.length(batch, self.seen, passes) * unit.unsqueeze(1)
        move(self.params, step * (bound / length).clamp(max=1), self.rate)

    def _join_metric(self, examples: Tensor) -> Tensor:
        """The running average of G with these examples in it; the gradient (R, K)."""
        batch, variables = examples.shape[1:]
        self.columns = self.method.count_columns(self.columns, self.metric.shape[-1], batch * variables, self.seen)
        share = batch * variables / self.columns
        if batch == 1:
            rows = self.single.slopes(examples)
            average_metric(self.metric, rows[:, :-1].mT, share, out=self.metric)
            return rows[:, -1]
        link, raw = self.model.link, self.params["V"]
        self.metric.lerp_(score_gram(self.params["W"], link(raw), link.slope(raw), examples), share)
        return torch.cat([part.flatten(1) for part in self.model.gradient(self.params, examples).values()], 1)


Learner = DescentLearner | Adam | Paper | NatgradLearner


def move(params: dict[str, Tensor], step: Tensor, rate: float) -> None:
    """params less rate * step (R, K), in place."""
    for part, moved in zip(params.values(), step.split([p[0].numel() for p in params.values()], 1), strict=True):
        part.sub_(moved.view_as(part), alpha=rate)


# The score metric in closed form: products over examples, never the Jacobian. With the names of
# natgrad.energies.two_layer, P_k = a_k sum_h V_hk Q_h - c_k W_k and Q_h = r_h^3 B_h are rows of N numbers for every
# example, u = c o a. Then d psi_i / dW_kl = x_l P_ki - u_k [i = l] and d psi_i / dV_hm = 1/2 a_m^2 Q_hi - r_h a_m W_mi,
# and every sum over i is a small product of an example's own.


def score_gram(W: Tensor, V: Tensor, slope: Tensor, X: Tensor) -> Tensor:
    """G = mean over examples of sum_i g_i g_i^T, g_i the slope of psi_i in (W, raw V), shape (R, K, K)."""
    # with J = H = N = 8 an eighth of the multiplications of U U^T, and no U
    a, r = unit_responses(W, V, X)
    c = r @ V
    Q = pool_features(W, V, a)[1] * (r**3).unsqueeze(-1)
    P = a.unsqueeze(-1) * (V.mT.unsqueeze(-3) @ Q) - c.unsqueeze(-1) * W.unsqueeze(-3)
    size, rest = W[0].numel(), V[0].numel()
    gram = X.new_empty(len(W), size + rest, size + rest)
    above, below = gram.split([size, rest], 1)
    corner, side = above.split([size, rest], 2)
    _fill_first(_split_axes(corner, W, W), P, c * a, X)
    _fill_mixed(_split_axes(side, W, V), P, Q, c * a, a, r, W, X)
    _fill_second(_split_axes(below[:, :, size:], V, V), Q, a, r, W)
    flat = torch.cat([slope.new_ones(len(W), size), slope.flatten(1)], 1)
    side.mul_(flat[:, None, size:])
    below[:, :, size:].mul_(flat[:, size:, None] * flat[:, None, size:])
    below[:, :, :size].copy_(side.mT)
    return gram.div_(X.shape[-2])


def _fill_first(out: Tensor, P: Tensor, u: Tensor, X: Tensor) -> None:
    """(R, J, N, J, N), by W twice."""
    out.copy_(_sum_pairs(P @ P.mT, _outer(X, X)).transpose(2, 3))  # (R, k, l, k', l')
    crossed = _sum_pairs(P, _outer(u, X)).permute(0, 1, 4, 3, 2)  # sum_b P_kl' u_k' x_l
    out.sub_(crossed).sub_(crossed.permute(0, 3, 4, 1, 2))
    out.diagonal(dim1=2, dim2=4).add_((u.mT @ u).unsqueeze(-1))


def _fill_mixed(out: Tensor, P: Tensor, Q: Tensor, u: Tensor, a: Tensor, r: Tensor, W: Tensor, X: Tensor) -> None:
    """(R, J, N, H, J), by W and V."""
    half = 0.5 * a.square()
    out.copy_(_sum_pairs(P @ Q.mT, _outer(X, half)).transpose(2, 3))  # (R, k, l, h, m)
    out.sub_(_sum_pairs((P @ W.mT.unsqueeze(1)) * a.unsqueeze(2), _outer(X, r)).permute(0, 1, 3, 4, 2))
    out.sub_(_sum_pairs(_outer(u, half), Q).permute(0, 1, 4, 3, 2))
    left = _sum_pairs(_outer(u, r), a.unsqueeze(2)).transpose(2, 3)  # (R, k, 1, h, m)
    out.addcmul_(left, W.mT[:, None, :, None])


def _fill_second(out: Tensor, Q: Tensor, a: Tensor, r: Tensor, W: Tensor) -> None:
    """(R, H, J, H, J), by V twice."""
    half, gram = 0.5 * a.square(), W @ W.mT
    out.copy_(_sum_pairs(Q @ Q.mT, _outer(half, half)).transpose(2, 3))  # (R, h, m, h', m')
    crossed = _sum_pairs(_outer(half, r), (Q @ W.mT.unsqueeze(1)) * a.unsqueeze(2)).permute(0, 3, 1, 2, 4)
    out.sub_(crossed).sub_(crossed.permute(0, 3, 4, 1, 2))
    out.addcmul_(_sum_pairs(_outer(r, r), _outer(a, a)).transpose(2, 3), gram[:, None, :, None])


def _split_axes(block: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A view of (R, p q, s t) as (R, p, q, s, t)."""
    return block.unflatten(2, second.shape[1:]).unflatten(1, first.shape[1:])


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """(R, b, p) and (R, b, q) -> (R, b, p, q)."""
    return first.unsqueeze(-1) * second.unsqueeze(-2)


def _sum_pairs(first: Tensor, second: Tensor) -> Tensor:
    """sum over b of (R, b, p, q) times (R, b, s, t) -> (R, p, q, s, t)."""
    product = torch.bmm(first.flatten(2).mT, second.flatten(2))
    return product.view(len(first), *first.shape[2:], *second.shape[2:])


# The gradient and the metric at one example per model, in a tight loop: 300,000 steps are SGD's.


class SingleExample:
    """`gradients` of natgrad.energies.two_layer for R models and one example each, W (R, J, N) and V (R, H, J).

    At eight variables the time of a step is that of calling operations: views and results are made once, three times
    faster than the general form.
    """

    a: Tensor  # W x
    c: Tensor  # V^T r
    y: Tensor  # a^2
    pooled: Tensor  # r_h^3 V_hj a_j

    def __init__(self, params: dict[str, Tensor], link: Positive | Square) -> None:
        W, V = params["W"], params["V"]
        runs, size, _ = W.shape
        pools, new = V.shape[1], W.new_empty
        self.W, self.raw, self.link = W, V, link
        self.V = link(V)
        self.W_turned, self.V_turned = W.mT, self.V.mT
        self.gram, self.inner = new(runs, size, size), new(runs, size, size)
        self.norms, self.along = (m.diagonal(dim1=1, dim2=2).unsqueeze(1) for m in (self.gram, self.inner))
        self.r, self.r3, self.by_u, self.ones = (new(runs, 1, pools).fill_(1) for _ in range(4))
        self.r_turned, self.r3_turned, self.by_u_turned = self.r.mT, self.r3.mT, self.by_u.mT
        self.ca, self.by_a = new(runs, 1, size), new(runs, 1, size)
        self.ca_turned, self.by_a_turned = self.ca.mT, self.by_a.mT
        self.weighted, self.squares = new(runs, pools, size), new(runs, pools, 1)
        self.weighted_turned, self.squares_turned = self.weighted.mT, self.squares.mT
        self.rows = new(runs, W.shape[2] + 1, W[0].numel() + V[0].numel())
        jacobian, last = self.rows[:, :-1], self.rows[:, -1]
        first, second = jacobian.split([W[0].numel(), V[0].numel()], -1)
        self.by_first, self.by_second = first.unflatten(-1, W.shape[1:]), second.unflatten(-1, V.shape[1:])
        self.own = self.by_first.diagonal(dim1=1, dim2=3)  # x_i itself, (R, J, N)
        ends = last.split([W[0].numel(), V[0].numel()], -1)
        self.end_first, self.end_second = (end.unflatten(-1, p.shape[1:]) for end, p in zip(ends, (W, V), strict=True))

    def descend(self, x: Tensor, rate: float | Tensor) -> None:
        """W and V less rate times the gradient of l at x (R, 1, N). rate: a number or one per model (R, 1, 1)."""
        by_W, by_V = self.gradient(x)
        self.W.addcmul_(by_W, torch.as_tensor(rate, dtype=x.dtype), value=-1)
        self.raw.addcmul_(by_V.mul_(rate), self.link.slope(self.raw), value=-1)
        self.V.copy_(self.link(self.raw))

    def slopes(self, x: Tensor) -> Tensor:
        """d psi_i / d params (`score_jacobian`) in a row for each variable i, then the gradient of l: (R, N + 1, K)."""
        self.V.copy_(self.link(self.raw))
        by_W, by_V = self.gradient(x)
        slope, a_turned = self.link.slope(self.raw), self.a.mT
        B = torch.bmm(self.pooled, self.W)  # r_h^3 B_hi
        along = torch.bmm(self.V_turned, B).mul_(a_turned).addcmul_(self.c.mT, self.W, value=-1)
        torch.mul(along.mT.unsqueeze(-1), x.unsqueeze(1), out=self.by_first)
        self.own.sub_(self.ca_turned)
        torch.mul(B.mT.unsqueeze(-1), (0.5 * self.y).unsqueeze(1), out=self.by_second)
        features = (self.W * a_turned).mT.unsqueeze(2)
        self.by_second.addcmul_(self.r_turned.unsqueeze(1), features, value=-1).mul_(slope.unsqueeze(1))
        self.end_first.copy_(by_W)
        torch.mul(by_V, slope, out=self.end_second)
        return self.rows

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of l in W and in V itself, in the names of `gradients`."""
        W, V, bmm = self.W, self.V, torch.bmm
        a = bmm(x, self.W_turned)
        y = a * a
        r = torch.baddbmm(self.ones, y, self.V_turned, out=self.r).rsqrt_()
        r2 = r * r
        torch.mul(r2, r, out=self.r3)
        c = bmm(r, V)
        torch.mul(c, a, out=self.ca)
        bmm(W, self.W_turned, out=self.gram)
        z = bmm(self.ca, self.gram)
        q = (a * z).sub_(self.norms)
        torch.mul(V, a, out=self.weighted)
        S = bmm(self.weighted, self.gram).mul_(self.r3_turned)
        torch.sum(self.weighted * S, -1, keepdim=True, out=self.squares)
        by_u = bmm(q, self.V_turned).mul_(self.r3)
        torch.addcmul(by_u, r2, self.squares_turned, value=3, out=self.by_u)
        by_V = bmm(self.r_turned, q).addcmul_(S, a, value=2).baddbmm_(self.by_u_turned, y, alpha=-0.5)
        torch.sum(S.mul_(V), 1, keepdim=True, out=self.by_a)
        self.by_a.mul_(2).addcmul_(c, z).addcmul_(a, bmm(self.by_u, V), value=-1)
        bmm(self.ca_turned, self.ca, out=self.inner)
        self.pooled = self.weighted * self.r3_turned
        self.inner.baddbmm_(self.weighted_turned, self.pooled, alpha=2)
        self.along.sub_(c, alpha=2)
        self.a, self.c, self.y = a, c, y
        return bmm(self.inner, W).baddbmm_(self.by_a_turned, x), by_V
