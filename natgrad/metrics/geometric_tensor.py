"""The metric of a wave function: the covariance of d log psi, centred, over samples of |psi|^2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import show_shape
from natgrad.ground.pure import Model, RandomState, Select, check_select
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Diagonals, Metric, check_has_outputs, check_model, linearise, split_targets
from natgrad.operators import Centred, Facts, Operator, Pullback

NATS = 4.0
"""Fisher information of |psi|^2 in one unit of the covariance of d log |psi|."""


def geometric_tensor(model: Model, *, centred: bool = True, outputs: Select | None = None) -> GeometricTensor:
    """S = Re(E[O* O^T] - E[O]* E[O]^T), O = d log psi / d theta: the real part of the quantum geometric tensor.

    The expectation is over the given states, with weights where they are given: samples of |psi|^2, or all states with
    their probabilities. For a real log psi, 4 S is the Fisher matrix of |psi|^2, so that a trust region counts nats of
    |psi|^2; the imaginary part, the phase, counts in the same unit.

    Args:
        model: A module, or a function f(params, states), that returns log psi, shape (b,) or (b, 1), real or complex.
            Its parameters are real: `ng.LogAmplitude` gives complex ones by their real and imaginary parts.
        centred: False leaves out the second term, as structures with a block per layer need it.
        outputs: A function that picks log psi where the model returns more, or other things, than that.

    Returns:
        A metric; `.at(params, (states, weights))` gives the operator, of weights (b,) that add up to one; None for
        equal ones. It is kept in sample space.

    Reference:
        Sorella 1998; Stokes, Izaac, Killoran & Carleo 2020.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> S = ng.metrics.geometric_tensor(model).at(ng.trainable(model), (torch.randn(10, 3), None))
        >>> bool(S.diagonal()[-1] < 1e-12)  # the last bias multiplies psi by a number: no change of the state
        True
    """
    check_model(model, "states")
    check_select(outputs)
    return GeometricTensor(model, centred, outputs)


@dataclass(frozen=True, repr=False)
class GeometricTensor(Metric):
    """What `geometric_tensor` gives: S = Re Cov(O, O).

    Args:
        model: What returns log psi.
        centred: False leaves the mean in.
        outputs: A function that picks log psi of what the model returns.
    """

    model: Model
    centred: bool = True
    outputs: Select | None = None
    needs_targets = True

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        states, weights = split_targets(inputs)
        read = (lay_out_amplitudes, self.outputs)
        linearization = linearise(self.model, params, states, random, *read, recorded=self.centred)
        rows = linearization.outputs
        weights = read_probabilities(weights, rows)
        moment = Pullback(linearization, Diagonals(torch.ones_like(rows)), weights, Facts(nats=NATS))
        if not self.centred:
            return moment
        roots = moment.weights.sqrt().view(-1, 1, 1)  # U has sqrt(w_i) O_i: its mean is U sqrt(w)
        unit = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return Centred(moment, (roots * unit).flatten(0, 1))


def lay_out_amplitudes(outputs: Any) -> Tensor:
    """log psi as real rows: (b, 1) for real ones, (b, 2) with real and imaginary parts for complex ones.

    Args:
        outputs: log psi, shape (b,) or (b, 1).

    Raises:
        ValueError: For another shape, or several tensors.
    """
    check_has_outputs(outputs)
    if not isinstance(outputs, Tensor) or outputs.dim() > 2 or outputs.shape[1:].numel() != 1:
        raise ValueError(
            f"log psi has shape {show_shape(outputs)}, expected (b,) or (b, 1), one number per state; wrap a "
            "network with other outputs in ng.LogAmplitude(net, head=...)"
        )
    flat = outputs.reshape(-1)
    return torch.stack([flat.real, flat.imag], dim=1) if flat.is_complex() else flat.unsqueeze(1)


def read_probabilities(weights: Tensor | None, rows: Tensor) -> Tensor | None:
    """The weights of states in the dtype of the rows."""
    if weights is None:
        return None
    if weights.shape != rows.shape[:1]:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, expected ({len(rows)},), one per state")
    weights = weights.to(rows)
    total = float(weights.sum())
    if not all_finite(weights) or bool((weights < 0).any()) or abs(total - 1) > 1e-3:
        raise ValueError(f"weights add up to {total}, expected numbers >= 0 that add up to 1: divide by their sum")
    return weights / total
