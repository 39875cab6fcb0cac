"""SOAP: Adam in the eigenbasis of Shampoo's factors. Vyas et al. 2024, algorithm 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh


class SOAP(torch.optim.Optimizer):
    """W <- W - lr Q_L A(Q_L^T M Q_R) Q_R^T with A the division by the root of the second moments in that basis.

    Q_L, Q_R: eigenvectors of the running means of G G^T and G^T G for a gradient G, made at the first step and then
    followed by one power iteration and a QR decomposition every so many steps. Filters of convolutions count as
    matrices, a row per filter. A side longer than `longest` keeps the identity, a vector is Adam's.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        every: int = 10,
        longest: int = 10_000,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every, "longest": longest})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    matrix = p.grad.flatten(1) if p.dim() > 1 else p.grad.reshape(1, -1)
                    p.add_(direction(matrix, self.state[p], group, p.dim() > 1).view_as(p), alpha=-group["lr"])


def direction(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], rotated: bool) -> Tensor:
    """What is subtracted from a matrix, per unit of the rate. state: of the parameter, brought up to date."""
    if not state:
        state |= {"step": 0, "mean": torch.zeros_like(gradient), "square": torch.zeros_like(gradient)}
    state["step"] += 1
    if rotated:
        turn(gradient, state, group)
    first, second = group["betas"]
    state["mean"].lerp_(gradient, 1 - first)
    state["square"].lerp_(into_basis(gradient, state).square(), 1 - second)
    mean = into_basis(state["mean"], state) / (1 - first ** state["step"])
    root = (state["square"] / (1 - second ** state["step"])).sqrt()
    return out_of_basis(mean / (root + group["eps"]), state)


def turn(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update the factors, and the basis where that is due."""
    decay = group["betas"][1]
    for side, product in (("left", lambda: gradient @ gradient.mT), ("right", lambda: gradient.mT @ gradient)):
        if gradient.shape[0 if side == "left" else 1] > group["longest"]:
            continue
        if f"{side} basis" not in state:
            state[side] = (1 - decay) * product()
            state[f"{side} basis"] = eigh(state[side])[1].flip(1)
            continue
        state[side].lerp_(product(), 1 - decay)
        if state["step"] % group["every"] == 0:
            iterate_power(state, side)


def iterate_power(state: dict[str, Any], side: str) -> None:
    """One orthogonal iteration, eigenvectors sorted by what they explain, and the second moments with them."""
    factor, basis = state[side], state[f"{side} basis"]
    order = (basis * (factor @ basis)).sum(0).argsort(descending=True)
    state["square"] = state["square"].index_select(0 if side == "left" else 1, order)
    state[f"{side} basis"] = torch.linalg.qr(factor @ basis[:, order])[0]


def into_basis(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Q_L^T X Q_R."""
    left, right = state.get("left basis"), state.get("right basis")
    matrix = matrix if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right


def out_of_basis(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Q_L X Q_R^T."""
    left, right = state.get("left basis"), state.get("right basis")
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.mT
