"""The two-layer model of natural stimuli (Koster & Hyvarinen 2010), with everything in closed form.

Names: a = W x (first layer), y = a^2, r_h = (1 + v_h . y)^-1/2, B_h = sum_j V_hj a_j W_j, so that
log p = -sum_h 1 / r_h, its score is psi = -sum_h r_h B_h, and d_i psi_i = sum_h r_h^3 B_hi^2 - sum_j c_j W_ji^2 with
c = V^T r. W (..., J, N), V (..., H, J) >= 0, X (..., b, N): leading axes are models side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.densities import Density
from natgrad.ground.spaces import Params, Positive, Square, positive


@dataclass(frozen=True, eq=False)  # an optimiser hears from its own density, not from an equal one
class TwoLayer(Density):
    """log p(x; W, V) = -sum_h sqrt(1 + v_h . (W x)^2) + const, V >= 0 through `link`.

    Parameters: {"W": (J, N), "V": (H, J)}, V before the link. A density with closed forms, 13 times faster than
    derivatives of `log_p` taken automatically; `log_p(params, x)` takes one example too. Params and X with leading axes
    are models side by side.

    Args:
        link: `ng.positive` (V = exp, better for the natural gradient) or `Square()` (V = v^2, better for gradient
            descent).

    Reference:
        Karakida et al. 2016, section 3; Koster & Hyvarinen 2010.
    """

    link: Positive | Square = positive

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        W, V = self.matrices(params)
        return -(1 + (inputs @ W.mT).square() @ V.mT).sqrt().sum(-1)

    def scores(self, params: Params, inputs: Tensor) -> Tensor:
        W, V = self.matrices(params)
        a, r = unit_responses(W, V, inputs)
        return -((r @ V) * a) @ W

    def scores_and_curvatures(
        self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        W, V = self.matrices(params)
        scores, curvatures = derivatives(W, V, inputs)
        return scores, curvatures if dims is None else curvatures[..., list(dims)]

    def score_jacobian(self, params: Params, inputs: Tensor) -> Tensor:
        """d psi_i / dW_kl = x_l (a_k sum_h r_h^3 V_hk B_hi - c_k W_ki) - c_k a_k [i = l]; d psi_i / dV_hk.

        The latter is 1/2 r_h^3 B_hi a_k^2 - r_h a_k W_ki, times the link's slope.
        """
        W, V = self.matrices(params)
        a, r = unit_responses(W, V, inputs)
        c = r @ V
        _, B = pool_features(W, V, a)
        B = (r**3).unsqueeze(-1) * B
        along = a.unsqueeze(-1) * (V.mT.unsqueeze(-3) @ B) - c.unsqueeze(-1) * W.unsqueeze(-3)  # (..., b, J, N)
        by_W = along.mT.unsqueeze(-1) * inputs[..., None, None, :]  # (..., b, N, J, N)
        by_W.diagonal(dim1=-3, dim2=-1).sub_((c * a).unsqueeze(-1))
        features = (a.unsqueeze(-1) * W.unsqueeze(-3)).mT.unsqueeze(-2)  # a_k W_ki, (..., b, N, 1, J)
        by_V = B.mT.unsqueeze(-1) * (0.5 * a.square())[..., None, None, :]  # (..., b, N, H, J)
        by_V = by_V.addcmul_(r[..., None, :, None], features, value=-1)
        parts = {"W": by_W, "V": by_V * self.link.slope(params["V"])[..., None, None, :, :]}
        return torch.cat([parts[name].flatten(-2) for name in params], -1)

    def loss(self, params: Params, inputs: Tensor) -> Tensor:
        """mean of l over the examples, shape (...,): `ng.score_matching_loss` of every model.

        Args:
            params: W and V before the link.
            inputs: Examples, shape (..., b, N).
        """
        scores, curvatures = derivatives(*self.matrices(params), inputs)
        return (0.5 * scores.square() + curvatures).sum(-1).mean(-1)

    def gradient(self, params: Params, inputs: Tensor) -> dict[str, Tensor]:
        """The gradient of `loss` in params, without a graph.

        Args:
            params: W and V before the link.
            inputs: Examples, shape (..., b, N).
        """
        W, V = self.matrices(params)
        by_W, by_V = gradients(W, V, inputs)
        return {"W": by_W, "V": by_V * self.link.slope(params["V"])}

    def matrices(self, params: Params) -> tuple[Tensor, Tensor]:
        """W and V >= 0.

        Args:
            params: W and V before the link.

        Raises:
            ValueError: If they have other names, or shapes that do not fit.
        """
        if set(params) != {"W", "V"}:
            raise ValueError(f"params has {sorted(params)}, expected W (J, N) and V (H, J)")
        W, V = params["W"], params["V"]
        if W.dim() < 2 or V.dim() < 2 or V.shape[-1] != W.shape[-2]:
            raise ValueError(
                f"W has shape {tuple(W.shape)} and V {tuple(V.shape)}, expected (J, N) and (H, J): V pools the J "
                "features that are the rows of W"
            )
        return W, self.link(V)


def unit_responses(W: Tensor, V: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """a = W x, shape (..., b, J), and r = (1 + V a^2)^-1/2, shape (..., b, H)."""
    a = X @ W.mT
    return a, (1 + a.square() @ V.mT).rsqrt()


def pool_features(W: Tensor, V: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """V_hj a_j, shape (..., b, H, J), and B, shape (..., b, H, N), its product with W."""
    weighted = V.unsqueeze(-3) * a.unsqueeze(-2)
    return weighted, (weighted.flatten(-3, -2) @ W).unflatten(-2, weighted.shape[-3:-1])


def derivatives(W: Tensor, V: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """psi and d_i psi_i, both (..., b, N)."""
    a, r = unit_responses(W, V, X)
    c = r @ V
    _, B = pool_features(W, V, a)
    curvatures = (r**3).unsqueeze(-2) @ B.square()
    return -(c * a) @ W, curvatures.squeeze(-2) - c @ W.square()


def gradients(W: Tensor, V: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss's gradient in W and V: the chain rule through a, r and B, which enter by the Gram matrix W W^T.

    With z = W W^T (c o a), T = (V o a) W W^T and n the diagonal of W W^T: W psi = -z, |B_h|^2 = T_h . (V_h o a).
    """
    a, r = unit_responses(W, V, X)
    r3, c = r**3, r @ V
    gram = W @ W.mT
    ca = c * a
    z = ca @ gram
    weighted = V.unsqueeze(-3) * a.unsqueeze(-2)
    rows = weighted.flatten(-3, -2)  # (..., b H, J)
    S = r3.unsqueeze(-1) * (rows @ gram).view(weighted.shape)
    q = a * z - gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    # -2 dl / du_h, u = 1 + V y: S holds r^3 already, and r^3 (3 r^2 |B|^2 + V q) is what is left
    by_u = torch.addcmul(r3 * (q @ V.mT), r.square(), (weighted * S).sum(-1), value=3)
    by_V = r.mT @ q + 2 * (a.unsqueeze(-2) * S).sum(-3) - 0.5 * (by_u.mT @ a.square())
    by_a = 2 * (V.unsqueeze(-3) * S).sum(-2) + c * z - a * (by_u @ V)
    inner = 2 * rows.mT @ (r3.unsqueeze(-1) * weighted).flatten(-3, -2) + ca.mT @ ca
    inner.diagonal(dim1=-2, dim2=-1).sub_(2 * c.sum(-2))
    by_W = inner @ W + by_a.mT @ X
    return by_W / X.shape[-2], by_V / X.shape[-2]
