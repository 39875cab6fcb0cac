"""The two-layer model's gradient and metric at one example per model, in a tight loop: 300,000 steps are SGD's."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.ground.spaces import Positive, Square


class SingleExample:
    """`gradients` of natgrad.energies.two_layer for R models and one example each, in buffers made once.

    params: {"W", "V"}, (R, J, N) and (R, H, J); `descend` changes them in place. At eight variables the time of a step
    is that of calling operations: transposed views and results are made once, three times faster than the general form.
    `slopes` adds the Jacobian of the score, from what the gradient has computed.
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
        """d psi_i / d params in a row for every variable i, then the gradient of l: (R, N + 1, K), in one buffer.

        The formulas are those of `jacobians` in natgrad.energies.two_layer.
        """
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
