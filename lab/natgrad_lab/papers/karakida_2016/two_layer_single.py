"""The two-layer model's gradient at one example per model, in a tight loop: 300,000 steps are the paper's SGD."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.positive_parameters import Positive, Square


class SingleExample:
    """`gradients` of natgrad.applications.two_layer for R models and one example each, in buffers made once.

    params: {"W", "V"}, (R, J, N) and (R, H, J); `descend` changes them in place. At eight variables the time of a step
    is that of calling operations: transposed views and results are made once, three times faster than the general form.
    """

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

    def descend(self, x: Tensor, rate: float | Tensor) -> None:
        """W and V less rate times the gradient of l at x (R, 1, N). rate: a number or one per model (R, 1, 1)."""
        by_W, by_V = self.gradient(x)
        self.W.addcmul_(by_W, torch.as_tensor(rate, dtype=x.dtype), value=-1)
        self.raw.addcmul_(by_V.mul_(rate), self.link.slope(self.raw), value=-1)
        self.V.copy_(self.link(self.raw))

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
        self.inner.baddbmm_(self.weighted_turned, self.weighted * self.r3_turned, alpha=2)
        self.along.sub_(c, alpha=2)
        return bmm(self.inner, W).baddbmm_(self.by_a_turned, x), by_V
