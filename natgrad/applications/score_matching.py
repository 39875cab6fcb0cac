"""Objectives for models without their constant: score matching, sliced, denoising; ratio matching for bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from natgrad.densities import (
    Density,
    LogP,
    as_density,
    check_binary,
    check_continuous,
    check_density,
    check_mask,
    check_weights,
    guard_derivatives,
    vjp,
)
from natgrad.lapack import is_concrete
from natgrad.loss_listeners import announce
from natgrad.spaces import Params

Term = Callable[[Params, list[int]], Tensor]


def score_matching_loss(
    log_p: LogP | nn.Module | Density,
    params: Params,
    X: Tensor,
    *,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """mean over X of l(x) = sum_i 1/2 (d_i log p)^2 + d_i^2 log p, Hyvarinen 2005; a scalar.

    log_p: a function log_p(params, x) of one example x (N,), or a module of energies E(X) (b,), log p = -E; without its
    constant.   params: dict of tensors, such as ng.trainable(module).   X: (b, N), continuous.   mask: (N,) or (b, N),
    the variables i that the sum runs over: the conditional density of these given the others is matched.
    chunk_size: variables at a time, to bound memory; the value then has gradients, but no second ones, in params.

    The divergence of Karakida, Okada & Amari 2016 is D = 2 <l> + const; the metric that belongs to l is
    `ng.score_metric`. Costs N backward passes of the score. ValueError for data of zeros and ones, NaN, a mask or X of
    the wrong shape, and a log_p whose second derivatives in x are all zero (ReLU).
    """
    density = as_density(log_p)
    inputs = check_density(density, params, X).detach()
    check_continuous(inputs)
    weights = check_mask(mask, inputs)

    def term(point: Params, dims: list[int]) -> Tensor:
        scores, curvatures = density.scores_and_curvatures(point, inputs, dims)
        check_smooth(scores, curvatures)
        entries = 0.5 * scores[:, dims].square() + curvatures
        return (entries if weights is None else entries * weights[:, dims]).sum(1).mean()

    return announce(log_p, inputs, _summed(density, term, params, inputs, chunk_size))


def sliced_score_matching_loss(
    log_p: LogP | nn.Module | Density,
    params: Params,
    X: Tensor,
    *,
    slices: int = 1,
    variance_reduced: bool = True,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """An unbiased estimate of `score_matching_loss` from random directions v, Song et al. 2019.

    mean of v^T (Hess log p) v + 1/2 |s|^2, or 1/2 (v^T s)^2 in the last place without variance reduction; v has
    independent signs.   slices: directions per example: one backward pass of the score each, whatever N.   generator:
    of the directions, default the global one.
    """
    if not isinstance(slices, int) or slices < 1:
        raise ValueError(f"slices is {slices}, expected an integer >= 1")
    density = as_density(log_p)
    inputs = check_density(density, params, X).detach()
    check_continuous(inputs)
    weights = check_mask(mask, inputs)
    with guard_derivatives(density, params, inputs):
        scores, pull = vjp(lambda x: density.scores(params, x), inputs)
        size = (slices, *scores.shape)
        signs = 2 * torch.randint(0, 2, size, generator=generator, device=inputs.device).to(scores.dtype) - 1
        directions = signs if weights is None else signs * weights
        second = torch.func.vmap(lambda v: (pull(v)[0].flatten(1) * v).sum(1), randomness="same")(directions)
    check_smooth(scores, second)
    if variance_reduced:
        first = scores.square() if weights is None else scores.square() * weights
        return announce(log_p, inputs, (0.5 * first.sum(1) + second.mean(0)).mean())
    projected = torch.einsum("kbn,bn->kb", directions, scores)
    return announce(log_p, inputs, (0.5 * projected.square() + second).mean())


def denoising_score_matching_loss(
    log_p: LogP | nn.Module | Density,
    params: Params,
    X: Tensor,
    *,
    noise: float | Tensor,
    scaled: bool = False,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """mean of 1/2 |s(x + noise z) + z / noise|^2 over X and one z ~ N(0, I) each, Vincent 2011.

    Matches the scores of the data blurred by `noise`, up to a constant; first derivatives only, so ReLU is welcome.
    noise: standard deviation, a number or one per example (b,).   scaled: times noise^2, which weighs several levels
    alike.   The metric that belongs to it is `ng.score_metric` at the noisy examples, which is where an optimiser on
    log_p takes it. X may be binary. ValueError for noise <= 0.
    """
    density = as_density(log_p)
    inputs = check_density(density, params, X).detach()
    if not inputs.is_floating_point():
        raise ValueError(f"X is {inputs.dtype}, expected floating point")
    weights = check_mask(mask, inputs)
    levels = check_noise(noise, inputs)
    z = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype, device=inputs.device)
    noisy = inputs + levels.view(-1, *[1] * (inputs.dim() - 1)) * z
    with guard_derivatives(density, params, inputs):
        scores = density.scores(params, noisy)
    residuals = scores + z.flatten(1) / levels.view(-1, 1)
    squares = residuals.square() if weights is None else residuals.square() * weights
    each = 0.5 * squares.sum(1)
    return announce(log_p, noisy, (each * levels.square() if scaled else each).mean())


def ratio_matching_loss(
    log_p: LogP | nn.Module | Density,
    params: Params,
    X: Tensor,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """mean over X of J(x) = sum_i sigmoid(-r_i)^2, r_i = log p(x) - log p(x with bit i flipped), Hyvarinen 2007.

    X: (b, N) of 0 and 1.   weights: (b,), how often each example came, or its probability: the mean is then weighted,
    and X may be a table of distinct states. The rest as in `score_matching_loss`. The divergence is 2 J + const; the
    metric that belongs to J is `ng.ratio_metric`. Costs N + 1 evaluations of log_p. ValueError for data that is not
    binary.
    """
    density = as_density(log_p)
    dtype = next(iter(params.values())).dtype if params else torch.get_default_dtype()
    inputs = check_binary(check_density(density, params, X).detach(), dtype)
    counted, shares = check_mask(mask, inputs), check_weights(weights, inputs)

    def term(point: Params, dims: list[int]) -> Tensor:
        entries = torch.sigmoid(-density.ratios(point, inputs, dims)).square()
        each = (entries if counted is None else entries * counted[:, dims]).sum(1)
        return each.mean() if shares is None else shares.to(each.dtype) @ each

    return announce(log_p, inputs, _summed(density, term, params, inputs, chunk_size))


def _summed(density: Density, term: Term, params: Params, inputs: Tensor, chunk_size: int | None) -> Tensor:
    """The sum of a term over all variables, `chunk_size` at a time."""
    size = inputs[0].numel()
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size is {chunk_size!r}, expected an integer >= 1 or None")
    with guard_derivatives(density, params, inputs):
        if chunk_size is None or chunk_size >= size:
            return term(params, list(range(size)))
        chunks = [list(range(start, min(start + chunk_size, size))) for start in range(0, size, chunk_size)]
        return _Chunks.apply(term, chunks, list(params), *params.values())


class _Chunks(torch.autograd.Function):
    """A sum over chunks whose gradient is taken chunk by chunk, so that only one chunk's graph is in memory."""

    @staticmethod
    def forward(ctx: Any, term: Term, chunks: list[list[int]], names: list[str], *tensors: Tensor) -> Tensor:
        needed = ctx.needs_input_grad[3:]
        total, gradients = tensors[0].new_zeros(()), [torch.zeros_like(t) for t in tensors]
        for dims in chunks:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(tensors, needed, strict=True)]
                value = term(dict(zip(names, leaves, strict=True)), dims)
            total = total + value.detach()
            if value.requires_grad:
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                found = iter(torch.autograd.grad(value, wanted, materialize_grads=True))
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    if leaf.requires_grad:
                        gradient += next(found)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(gradient * part if need else None for part, need in wanted)


def check_smooth(scores: Tensor, curvatures: Tensor) -> None:
    """ValueError if every second derivative in x is exactly zero: the objective has no lower bound then."""
    if is_concrete(curvatures) and not bool(curvatures.detach().any()):
        if not bool(scores.detach().any()):
            raise ValueError("log_p does not depend on x: its derivatives in x are zero at every example")
        raise ValueError(
            "the second derivatives of log_p in x are zero at every example: is it piecewise linear in x (ReLU, abs, "
            "max pooling)? Use a smooth activation (Softplus, SiLU, tanh), or ng.denoising_score_matching_loss"
        )


def check_noise(noise: float | Tensor, inputs: Tensor) -> Tensor:
    """Standard deviations (1,) or (b,). ValueError unless positive and finite."""
    levels = torch.as_tensor(noise, dtype=inputs.dtype, device=inputs.device).reshape(-1)
    if len(levels) not in (1, len(inputs)):
        raise ValueError(f"noise has {len(levels)} entries, expected a number or one per example ({len(inputs)},)")
    if not bool(((levels > 0) & torch.isfinite(levels)).all()):
        raise ValueError(f"noise is {noise}, expected standard deviations > 0")
    return levels
