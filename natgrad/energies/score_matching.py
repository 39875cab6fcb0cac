"""Objectives for unnormalised densities: score matching, sliced, denoising; ratio matching for bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from natgrad.ground.checks import check_integer
from natgrad.ground.densities import (
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
from natgrad.ground.linalg import is_concrete
from natgrad.ground.messages import explain_calls
from natgrad.ground.pure import announce
from natgrad.ground.spaces import Params

Term = Callable[[Params, Tensor, list[int]], Tensor]  # of params, X and variables


@explain_calls
def score_matching_loss(
    log_p: LogP | nn.Module | Density,
    params: Params,
    X: Tensor,
    *,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """mean over X of l(x) = sum_i 1/2 (d_i log p)^2 + d_i^2 log p; a scalar.

    The divergence of Karakida, Okada & Amari 2016 is D = 2 <l> + const; the metric that belongs to l is
    `ng.score_metric`. Costs N backward passes of the score.

    Args:
        log_p: A function log_p(params, x) of one example x (N,), up to a constant; or a module of energies E(X)
            (b,), with log p = -E.
        params: A dict of tensors, such as `ng.trainable(module)`.
        X: Continuous examples, shape (b, N). The loss is differentiable in them too, as an encoder before log_p needs.
        mask: The variables i that the sum runs over, shape (N,) or (b, N): the conditional density of these given the
            others is matched.
        chunk_size: Variables at a time, to bound memory; the value then has gradients, but no second ones.

    Raises:
        ValueError: If the data are zeros and ones or NaN, X or the mask has the wrong shape, or the second derivatives
            of log_p in x are all zero (ReLU).

    Reference:
        Hyvarinen 2005.

    Example:
        >>> log_p = lambda params, x: -0.5 * (params["precision"] * x * x).sum()
        >>> params = {"precision": torch.ones(3, requires_grad=True)}
        >>> ng.score_matching_loss(log_p, params, torch.randn(50, 3)).backward()
        >>> params["precision"].grad.shape
        torch.Size([3])
    """
    density, inputs, weights = read_continuous(log_p, params, X, mask)

    def term(point: Params, examples: Tensor, dims: list[int]) -> Tensor:
        scores, curvatures = density.scores_and_curvatures(point, examples, dims)
        check_smooth(scores, curvatures)
        entries = 0.5 * scores[:, dims].square() + curvatures
        return (entries if weights is None else entries * weights[:, dims]).sum(1).mean()

    return announce(log_p, inputs, _sum_in_chunks(density, term, params, inputs, chunk_size))


@explain_calls
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
    """An unbiased estimate of `score_matching_loss` from random directions v; a scalar.

    mean of v^T (Hess log p) v + 1/2 |s|^2, or 1/2 (v^T s)^2 in the last place without variance reduction; v has
    independent signs. Costs one backward pass of the score per direction, whatever N.

    Args:
        log_p: As in `score_matching_loss`.
        params: A dict of tensors.
        X: Continuous examples, shape (b, N).
        slices: Directions per example.
        variance_reduced: False for the noisier form with 1/2 (v^T s)^2.
        mask: The variables that the sum runs over, shape (N,) or (b, N).
        generator: Of the directions; default torch's global one.

    Raises:
        ValueError: As `score_matching_loss`, or if slices is no integer >= 1.

    Reference:
        Song et al. 2019.
    """
    check_integer("slices", slices)
    density, inputs, weights = read_continuous(log_p, params, X, mask)
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


@explain_calls
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
    """mean of 1/2 |s(x + noise z) + z / noise|^2 over X and one z ~ N(0, I) each; a scalar.

    It matches the scores of the data blurred by `noise`, up to a constant. It takes first derivatives only, so ReLU is
    possible, and X may be binary. The metric that belongs to it is `ng.score_metric` at the noisy examples, where an
    optimiser on log_p takes it.

    Args:
        log_p: As in `score_matching_loss`.
        params: A dict of tensors.
        X: Floating-point examples, shape (b, N).
        noise: Standard deviation > 0, a number or one per example (b,).
        scaled: True to multiply by noise^2, which weighs several levels alike.
        mask: The variables that the sum runs over, shape (N,) or (b, N).
        generator: Of z; default torch's global one.

    Raises:
        ValueError: If noise is not positive, or a shape does not fit.

    Reference:
        Vincent 2011.
    """
    density = as_density(log_p)
    inputs = check_density(density, params, X)
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


@explain_calls
def ratio_matching_loss(
    log_p: LogP | nn.Module | Density,
    params: Params,
    X: Tensor,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """mean over X of J(x) = sum_i sigmoid(-r_i)^2, r_i = log p(x) - log p(x with bit i flipped); a scalar.

    The divergence is 2 J + const; the metric that belongs to J is `ng.ratio_metric`. Costs N + 1 evaluations of log_p.

    Args:
        log_p: As in `score_matching_loss`, or an `ng.Boltzmann` machine.
        params: A dict of tensors.
        X: Examples of 0 and 1, shape (b, N).
        mask: The variables that the sum runs over, shape (N,) or (b, N).
        weights: How often each example came, or its probability, shape (b,): the mean is then weighted, and X may be a
            table of distinct states.
        chunk_size: Variables at a time, to bound memory; the value then has gradients, but no second ones.

    Raises:
        ValueError: If the data are not binary, or a shape does not fit.

    Reference:
        Hyvarinen 2007.

    Example:
        >>> X = torch.randint(0, 2, (50, 4)).float()
        >>> machine = ng.Boltzmann(4)
        >>> ng.ratio_matching_loss(machine, machine.parameters(), X).item()
        1.0
    """
    density = as_density(log_p)
    dtype = next(iter(params.values())).dtype if params else torch.get_default_dtype()
    inputs = check_binary(check_density(density, params, X).detach(), dtype)
    counted, shares = check_mask(mask, inputs), check_weights(weights, inputs)

    def term(point: Params, examples: Tensor, dims: list[int]) -> Tensor:
        entries = torch.sigmoid(-density.ratios(point, examples, dims)).square()
        each = (entries if counted is None else entries * counted[:, dims]).sum(1)
        return each.mean() if shares is None else shares.to(each) @ each

    return announce(log_p, inputs, _sum_in_chunks(density, term, params, inputs, chunk_size))


def _sum_in_chunks(density: Density, term: Term, params: Params, inputs: Tensor, chunk_size: int | None) -> Tensor:
    """The sum of a term over all variables, `chunk_size` at a time."""
    size = inputs[0].numel()
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, hint=" or None")
    with guard_derivatives(density, params, inputs):
        if chunk_size is None or chunk_size >= size:
            return term(params, inputs, list(range(size)))
        chunks = [list(range(start, min(start + chunk_size, size))) for start in range(0, size, chunk_size)]
        return _Chunks.apply(term, chunks, list(params), *params.values(), inputs)


class _Chunks(torch.autograd.Function):
    """A sum over chunks whose gradient is taken chunk by chunk, so that only one chunk's graph is in memory."""

    @staticmethod
    def forward(ctx: Any, term: Term, chunks: list[list[int]], names: list[str], *tensors: Tensor) -> Tensor:
        needed = ctx.needs_input_grad[3:]
        total, gradients = tensors[0].new_zeros(()), [torch.zeros_like(t) for t in tensors]
        for dims in chunks:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(tensors, needed, strict=True)]
                value = term(dict(zip(names, leaves[:-1], strict=True)), leaves[-1], dims)
            total = total + value.detach()
            if value.requires_grad:
                moved = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
                slopes = torch.autograd.grad(value, [leaves[i] for i in moved], materialize_grads=True)
                for i, slope in zip(moved, slopes, strict=True):
                    gradients[i] += slope
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, *(gradient * part for part in ctx.saved_tensors)


def read_continuous(
    log_p: LogP | nn.Module | Density, params: Params, X: Tensor, mask: Tensor | None
) -> tuple[Density, Tensor, Tensor | None]:
    """The density, continuous examples, and which of their variables count."""
    density = as_density(log_p)
    inputs = check_density(density, params, X)
    check_continuous(inputs)
    return density, inputs, check_mask(mask, inputs)


def check_smooth(scores: Tensor, curvatures: Tensor) -> None:
    """Check that a second derivative in x is not zero: the objective has no lower bound where all are."""
    if is_concrete(curvatures) and not bool(curvatures.detach().any()):
        if not bool(scores.detach().any()):
            raise ValueError("log_p does not depend on x: its derivatives in x are zero at every example")
        raise ValueError(
            "the second derivatives of log_p in x are zero at every example: is it piecewise linear in x (ReLU, abs, "
            "max pooling)? Use a smooth activation (Softplus, SiLU, tanh), or ng.denoising_score_matching_loss"
        )


def check_noise(noise: float | Tensor, inputs: Tensor) -> Tensor:
    """Standard deviations, shape (1,) or (b,). inputs: Examples, (b, N)."""
    levels = torch.as_tensor(noise, dtype=inputs.dtype, device=inputs.device).reshape(-1)
    if len(levels) not in (1, len(inputs)):
        raise ValueError(f"noise has {len(levels)} entries, expected a number or one per example ({len(inputs)},)")
    if not bool(((levels > 0) & torch.isfinite(levels)).all()):
        raise ValueError(f"noise is {noise}, expected standard deviations > 0")
    return levels
