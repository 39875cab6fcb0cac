"""The score metric of the two-layer model in closed form: products over examples, never the Jacobian.

In the names of natgrad.energies.two_layer: P_k = a_k sum_h V_hk Q_h - c_k W_k and Q_h = r_h^3 B_h, rows of N
numbers for every example, u = c o a. Then d psi_i / dW_kl = x_l P_ki - u_k [i = l] and
d psi_i / dV_hm = 1/2 a_m^2 Q_hi - r_h a_m W_mi, and every sum over i is a small product of an example's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.energies.two_layer import pool_features, unit_responses


def score_gram(W: Tensor, V: Tensor, slope: Tensor, X: Tensor) -> Tensor:
    """G = mean over examples of sum_i g_i g_i^T, g_i the slope of psi_i in (W, raw V), shape (R, K, K).

    With J = H = N = 8 it needs an eighth of the multiplications of U U^T, and no U.
    """
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
