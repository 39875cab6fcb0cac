"""The Wasserstein metric of a model that is a distribution of samples: how far mass moves with the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.linalg import eigh
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import Model, RandomState
from natgrad.ground.spaces import Params
from natgrad.metrics.base import Diagonals, Metric, check_has_outputs, check_model, explain_at, linearise
from natgrad.operators import Linearization, LowRankOperator, Operator, Pullback

Kernel = Callable[[Tensor, Tensor], Tensor]


@explain_calls
def transport_metric(
    model: Model,
    *,
    kernel: RBF | Kernel | None = None,
    basis: int = 100,
    regularization: float = 1e-5,
    generator: torch.Generator | None = None,
) -> TransportMetric:
    """The Wasserstein-2 metric of the distribution of x = model(z), z random, from samples.

    With kernel=None it is E[J^T J], J = dx / d theta: the cost of moving every sample as the parametrisation does. That
    is the Wasserstein metric where this motion is a gradient field (any one-dimensional monotone map, shifts, scales),
    and an upper bound elsewhere: a rotation of z that leaves the distribution as it is still costs.

    With a kernel it is the kernelised metric. Motion is measured after projection on gradients of `basis` functions
    h_m(x) = d/dy_i k(y_m, x), so that such rotations cost nothing. With C_m = grad h_m at the N samples, T = E[C J] and
    K_ml = d/dx_j h_m(y_l): G = T^T (regularization K + C C^T / N)^+ T, of rank at most `basis`, with its root and a
    closed damped inverse.

    Args:
        model: A module or a function f(params, z), from draws z (b, ...) to samples (b, ...), d numbers each.
        kernel: `ng.metrics.RBF()`, or any smooth k(x, y) of points (d,). None: E[J^T J].
        basis: Number of functions on whose gradients motion is projected.
        regularization: A number > 0, in the kernel's units.
        generator: Private source of the basis points, default a new one, seeded 0. Every `.at` draws anew.

    Returns:
        A metric; `.at(params, z)` gives the operator, a mean over draws. It raises a ValueError for samples that are
        not finite.

    Raises:
        ValueError: For numbers out of range.

    Reference:
        The kernelised metric: Arbel, Gretton, Li & Montufar 2020.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> G = ng.transport_metric(model).at(ng.trainable(model), torch.randn(50, 2))
        >>> round(float(G.diagonal()[4]), 4)  # of the bias: a shift costs its square
        1.0
    """
    if kernel is not None and not callable(kernel):
        raise TypeError(f"kernel is {kernel!r}, expected natgrad.metrics.RBF(), a function k(x, y), or None")
    basis = check_integer("basis", basis)
    check_positive("regularization", regularization)
    check_model(model, "z")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return TransportMetric(model, kernel, basis, regularization, generator)


@dataclass(frozen=True)
class RBF:
    """k(x, y) = exp(-|x - y|^2 / (2 bandwidth^2)).

    Args:
        bandwidth: In the units of x. None: the median distance between samples.
    """

    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None:
            check_positive("bandwidth", self.bandwidth, hint=", or None for the median distance")

    def width(self, samples: Tensor) -> float:
        """The bandwidth, or the median distance between at most 500 samples; 1 where these coincide.

        Args:
            samples: Shape (N, d).
        """
        if self.bandwidth is not None:
            return self.bandwidth
        few = samples[:500]
        return float(torch.pdist(few).median()) or 1.0 if len(few) > 1 else 1.0

    def differentiate_twice(self, points: Tensor, axes: Tensor, samples: Tensor, width: float) -> Tensor:
        """d/dy_i d/dx_j k(y, x) for every j, shape (M, N, d).

        Args:
            points: y, shape (M, d).
            axes: The axis i of every point, shape (M,).
            samples: x, shape (N, d).
            width: The bandwidth.
        """
        gap = points.unsqueeze(1) - samples
        values = (-gap.square().sum(2) / (2 * width**2)).exp() / width**2  # (M, N)
        along = gap.gather(2, axes.view(-1, 1, 1).expand(-1, len(samples), 1))
        unit = nn.functional.one_hot(axes, samples.shape[1]).to(gap.dtype).unsqueeze(1)
        return values.unsqueeze(2) * (unit - along * gap / width**2)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """k(x, y) of two points.

        Args:
            x: Shape (d,).
            y: Shape (d,).

        Returns:
            A scalar tensor.
        """
        if self.bandwidth is None:
            raise ValueError("bandwidth is None: it is known with the samples only; give RBF a number")
        return (-(x - y).square().sum(-1) / (2 * self.bandwidth**2)).exp()


@dataclass(frozen=True, repr=False)
class TransportMetric(Metric):
    """What `transport_metric` gives: the Wasserstein-2 metric of a model's samples.

    Args:
        model: A module or a function f(params, z).
        kernel: A kernel of points (d,); None: E[J^T J].
        basis: Number of functions on whose gradients motion is projected.
        regularization: A number > 0, in the kernel's units.
        generator: Private source of the basis points, default a new one, seeded 0.
    """

    model: Model
    kernel: RBF | Kernel | None = None
    basis: int = 100
    regularization: float = 1e-5
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), compare=False)

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        lines = linearise(self.model, params, getattr(inputs, "inputs", inputs), random, lay_out_samples)
        if self.kernel is None:
            return Pullback(lines, Diagonals(torch.ones_like(lines.outputs)))
        return self._build_kernelised(lines)

    def _build_kernelised(self, lines: Linearization) -> LowRankOperator:
        samples, device = lines.outputs, self.generator.device
        count, d = samples.shape
        # points among the samples with an axis for each, no pair twice
        pairs = torch.randperm(count * d, generator=self.generator, device=device)[: self.basis].to(samples.device)
        points, axes = samples[pairs // d], pairs % d  # (M, d), (M,)
        mixed = self._derivatives(samples)
        slopes = mixed(points, axes, samples)  # C, (M, N, d)
        each = torch.arange(len(points), device=points.device)
        kernel = mixed(points, axes, points)[each.unsqueeze(1), each, axes]  # K (M, M)
        flat = slopes.flatten(1).double()  # smooth kernels are nearly dependent: float32 loses what is small
        values, vectors = eigh(self.regularization * (kernel + kernel.mT).double() / 2 + flat @ flat.mT / count)
        cut = len(points) * torch.finfo(values.dtype).eps * values[-1]
        scale = torch.where(values > cut, values.clamp(min=cut).rsqrt(), 0.0)
        turned = ((vectors * scale).mT @ flat / count).to(slopes.dtype).reshape(-1, *samples.shape)
        return LowRankOperator(torch.stack([lines.vjp(row) for row in turned], dim=1))

    def _derivatives(self, samples: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        kernel = self.kernel
        if isinstance(kernel, RBF):
            width = kernel.width(samples)
            return lambda points, axes, x: kernel.differentiate_twice(points, axes, x, width)
        assert kernel is not None
        both = torch.func.jacrev(torch.func.grad(kernel), argnums=1)  # (d, d): d/dy_i d/dx_j
        table = torch.func.vmap(torch.func.vmap(both, (None, 0)), (0, None))
        return lambda points, axes, x: table(points, x)[torch.arange(len(points), device=x.device), :, axes]


def lay_out_samples(outputs: Any) -> Tensor:
    """A model's samples as rows (b, d)."""
    check_has_outputs(outputs)
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model returned {type(outputs).__name__}, expected samples as one tensor (b, ...)")
    return outputs.flatten(1) if outputs.dim() > 1 else outputs.unsqueeze(1)
