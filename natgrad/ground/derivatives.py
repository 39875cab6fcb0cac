"""Derivatives of every order that torch's own operations lack: forward mode, embeddings, factorisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, cast
from weakref import WeakSet, ref

import torch
from torch import Tensor, overrides
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from natgrad.ground.linalg import invert_or_nan
from natgrad.ground.pure import run_alone
from natgrad.ground.typed_torch import Map, torch_linalg, torch_plain, torch_returns


def look_up_bags(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`functional.embedding_bag`, by a look-up of every token and a sum, mean or maximum over each bag.

    The arguments are those of torch. The rows of `weight` are taken to keep `max_norm` already, as after a pass of the
    layer.
    """
    if scale_grad_by_freq:
        raise ValueError(
            "an EmbeddingBag has scale_grad_by_freq=True, which scales gradients apart from the function that it "
            "computes, so that no metric belongs to it; build it with scale_grad_by_freq=False"
        )
    tokens, bags, count = number_bags(input, offsets, include_last_offset)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    if padding_idx is not None:
        mask = tokens != padding_idx % len(weight)
    rows = functional.embedding(tokens, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    shape = (count, weight.shape[1])
    place = bags.unsqueeze(1).expand_as(rows)
    if mode == "max":
        lowest = rows.new_full(shape, -torch.inf)
        filled = torch.where(mask.unsqueeze(1), rows, -torch.inf)
        maxima = lowest.scatter_reduce(0, place, filled, "amax")
        return torch.where(maxima == -torch.inf, 0, maxima)
    rows = torch.where(mask.unsqueeze(1), rows, 0)
    total = rows.new_zeros(shape).scatter_add(0, place, rows)
    if mode == "sum":
        return total
    sizes = rows.new_zeros(count).scatter_add(0, bags, mask.to(rows.dtype))
    return total / sizes.clamp(min=1).unsqueeze(1)


def number_bags(input: Tensor, offsets: Tensor | None, include_last: bool) -> tuple[Tensor, Tensor, int]:
    """Every token, the number of its bag, and how many bags there are."""
    if input.dim() == 2:
        count, size = input.shape
        return input.reshape(-1), torch.arange(count, device=input.device).repeat_interleave(size), count
    if offsets is None:
        raise ValueError("an EmbeddingBag got tokens of one dimension without offsets; give tokens (b, n), or offsets")
    starts = offsets[:-1] if include_last else offsets
    places = torch.arange(len(input), device=input.device)
    return input, torch.searchsorted(starts.contiguous(), places, right=True) - 1, len(starts)


# Norms, determinants and solutions of linear systems by operations whose derivatives of every order are right


def measure_length(x: Tensor, dim: Any = None, *, keepdim: bool = False, order: float = 2) -> Tensor:
    """(sum |x|^p)^(1/p) along axes, with derivatives of zero where it is zero, as torch has them."""
    squares = x.real.square() + x.imag.square() if x.is_complex() else x.square()
    powers = squares if order == 2 else x.abs().pow(order)
    total = powers.sum(dim=tuple(range(x.dim())) if dim is None else dim, keepdim=keepdim)
    zero = total == 0
    size = torch.where(zero, torch.ones_like(total), total)
    return (size.sqrt() if order == 2 else size.pow(1 / order)) * (~zero).to(total.dtype)


def vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """`torch.linalg.vector_norm`."""
    if not 1 <= ord < math.inf:
        return torch_linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)
    return measure_length(x if dtype is None else x.to(dtype), dim, keepdim=keepdim, order=ord)


def linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """`torch.linalg.norm`."""
    if ord is None or isinstance(dim, int) or (dim is None and A.dim() == 1):
        return vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return torch_linalg.norm(A, ord, dim, keepdim, dtype=dtype)


def norm(input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """`torch.norm` and `torch.Tensor.norm`."""
    if p == "nuc":
        return torch_plain.norm(input, p, dim, keepdim, dtype=dtype)
    return vector_norm(input, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype)


def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """`torch.nn.functional.normalize`."""
    return input / vector_norm(input, p, dim, True).clamp(min=eps)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`torch.nn.functional.cosine_similarity`."""
    left: Tensor
    right: Tensor
    left, right = torch_plain.broadcast_tensors(x1, x2)
    first, second = (measure_length(vectors, dim, keepdim=True).clamp(min=eps) for vectors in (left, right))
    return (left / first * (right / second)).sum(dim)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """`torch.nn.functional.glu`, which has no second forward derivative."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The pivots of Gaussian elimination, shape (..., n), and the sign of the rows' exchanges, shape (...)."""
    factors, places, _ = torch_linalg.lu_factor_ex(matrix)
    own = torch.arange(1, matrix.shape[-1] + 1, device=matrix.device)
    turns = (places != own).sum(-1) % 2
    return factors.diagonal(dim1=-2, dim2=-1), 1 - 2 * turns


def det(A: Tensor) -> Tensor:
    """`torch.linalg.det`."""
    pivots, sign = factor(A)
    return sign * pivots.prod(-1)


def slogdet(A: Tensor) -> Any:
    """`torch.linalg.slogdet`."""
    pivots, sign = factor(A)
    size = pivots.abs()
    signs = pivots / size if pivots.is_complex() else pivots.detach().sign()
    return torch_returns.linalg_slogdet((sign * signs.prod(-1), size.log().sum(-1)))


def logdet(input: Tensor) -> Tensor:
    """`torch.logdet`: NaN where the determinant is negative."""
    sign, log = slogdet(input)
    if sign.is_complex():
        return log + sign.log()
    return torch.where(sign < 0, torch.nan, log)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """`torch.linalg.solve`, by the inverse; NaN where A is singular."""
    inverse = invert_or_nan(A)
    if B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]):
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B if left else B @ inverse


def cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    """`torch.cholesky_inverse`."""
    eye = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device).expand_as(input)
    half = torch_linalg.solve_triangular(input.triu() if upper else input.tril(), eye, upper=upper)
    return half @ half.mH if upper else half.mH @ half


def jacobians(function: Map, points: Tensor) -> Tensor:
    """d f / d x at every point x (..., n) of a map (..., n) -> (..., m) of batches, shape (..., m, n)."""
    values, pull, *_ = torch.func.vjp(function, points)
    units = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    return torch.func.vmap(lambda unit: pull(unit.expand_as(values))[0], out_dims=-2)(units)


# Linear maps whose products are all that is known of them


class LinearMap(torch.autograd.Function):
    """A v with the derivative A^T, for products taken by backward passes, whose graphs end at v."""

    generate_vmap_rule = True

    @staticmethod
    def forward(product: Map, transposed: Map, vector: Tensor) -> Tensor:
        return product(vector)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Map, Map, Tensor], output: Tensor) -> None:
        ctx.product, ctx.transposed, _ = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        return None, None, apply_linear(ctx.transposed, ctx.product, gradients[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return apply_linear(ctx.product, ctx.transposed, tangents[2])


def apply_linear(product: Map, transposed: Map, vector: Tensor) -> Tensor:
    """A v by `product`, differentiable in v by `transposed`, the products with A^T, to any order."""
    if not (vector.requires_grad and torch.is_grad_enabled()):
        return product(vector)
    return cast(Tensor, LinearMap.apply(product, transposed, vector))  # type: ignore[reportUnknownMemberType]


# Operations whose higher derivatives torch gets wrong or lacks, written out in others that it gets right

_ACTIVE: ContextVar[_WrittenOut | None] = ContextVar("natgrad_exact_derivatives", default=None)


@contextmanager
def exact_derivatives() -> Generator[None]:
    """Inside, derivatives of every order are right where torch's own are not: norms written out, plain attention.

    It is for a loss of your own that differentiates a model in its inputs (a physics-informed network, an energy) and
    is then trained. In torch 2.13 the third derivative of `nn.LayerNorm`, of `nn.InstanceNorm` and of a batch norm on
    images in training mode is wrong by up to its own size, and so is the second of
    `torch.nn.utils.parametrizations.weight_norm`; fused attention, `nn.EmbeddingBag` and `torch.cdist` have no second
    derivative. Two nested forward derivatives of `det`, `slogdet`, `logdet`, `linalg.solve` and `cholesky_inverse` are
    wrong, and Euclidean norms end in an error behind them. The score matching losses, `ng.score_metric`, `ng.Score`,
    `ng.hessian`, `ng.laplacian` and its like do this by themselves. Costs a few microseconds per torch call.

    Example:
        >>> net, x = nn.Sequential(nn.Linear(1, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(20, 1)
        >>> x.requires_grad_(True).shape
        torch.Size([20, 1])
        >>> with ng.exact_derivatives():
        ...     slope = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
        ...     second = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
        ...     loss = (second + x).square().mean()
        >>> loss.backward()
    """
    before = _ACTIVE.get()
    if before is not None and before.on:
        yield
        return
    _drop_dead_modes()
    block = _Block()  # dies with this generator, however it ends
    unfused = cast("Callable[..., AbstractContextManager[Any]]", sdpa_kernel)
    plain = unfused(SDPBackend.MATH) if torch.compiler.is_compiling() else _PlainAttention(block)
    with plain, _WrittenOut(block) as mode:
        try:
            _ACTIVE.set(mode)
            yield
        finally:
            _ACTIVE.set(before)


class _Block:
    """Lives as long as a `with` block is open."""


class _PlainAttention:
    """Fused attention is off while the block of some thread is open: torch has one setting for all threads."""

    KINDS = ("flash", "mem_efficient", "math", "cudnn")
    blocks: ClassVar[WeakSet[_Block]] = WeakSet()
    before: ClassVar[dict[str, bool] | None] = None

    def __init__(self, block: _Block) -> None:
        self.block = block

    def __enter__(self) -> None:
        kind = _PlainAttention
        with run_alone():
            kind.blocks.add(self.block)
            if kind.before is None:
                kind.before = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in kind.KINDS}
            kind.allow({name: name == "math" for name in kind.KINDS})

    def __exit__(self, *error: object) -> None:
        kind = _PlainAttention
        with run_alone():
            kind.blocks.discard(self.block)
            if kind.before is not None and not kind.blocks:
                kind.allow(kind.before)
                kind.before = None

    @staticmethod
    def allow(kinds: dict[str, bool]) -> None:
        for name, allowed in kinds.items():
            getattr(cuda, f"enable_{name}_sdp")(allowed)


class _WrittenOut(TorchFunctionMode):
    """Replaces the operations of `REPLACED` by functions of the same arguments.

    Ctrl-C on the way in or out may leave the mode on torch's stack: that costs time, until the next block drops it, but
    never gives wrong derivatives.
    """

    on = False

    def __init__(self, block: _Block) -> None:
        super().__init__()
        self.block = ref(block)

    def __enter__(self) -> _WrittenOut:
        super().__enter__()
        self.on = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.on = False
        cast("Any", super()).__exit__(*error)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in REPLACED or kwargs.get("out") is not None:  # what is written into `out` has no derivatives
            return func(*args, **kwargs)
        return REPLACED[func](*args, **{name: value for name, value in kwargs.items() if name != "out"})


def _drop_dead_modes() -> None:
    """Take modes from torch's stack that an interrupt left on top of it."""
    stack: Any = overrides  # what it says of modes, torch keeps to itself
    while isinstance(top := stack._get_current_function_mode(), _WrittenOut) and not (top.on and top.block()):
        stack._pop_mode()


def normalise(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) over dims, in at least single precision; with the mean and the reciprocal."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(dims, keepdim=True)
    gap = wide - mean
    scale = (gap.square().mean(dims, keepdim=True) + eps).rsqrt()
    return (gap * scale).to(x.dtype), mean, scale


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x * weight + bias, each where it is given."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`torch.nn.functional.layer_norm`."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def native_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.native_layer_norm`."""
    shape = tuple(normalized_shape) if not isinstance(normalized_shape, int) else (normalized_shape,)
    if tuple(input.shape[-len(shape) :]) != shape:
        raise RuntimeError(f"layer norm got an input of shape {tuple(input.shape)}, expected it to end in {shape}")
    values, mean, scale = normalise(input, tuple(range(-len(shape), 0)), eps)
    return scale_and_shift(values, weight, bias), mean, scale


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`: over the batch and positions in training, which updates the running values."""
    known, plain = (running_mean, running_var), functional.batch_norm
    if not training and running_mean is not None:  # affine, which torch gets right
        return plain(input, *known, weight, bias, training, momentum, eps)
    _renew(plain, input, known, training, momentum, eps)
    return _by_channel(input, (0, *range(2, input.dim())), weight, bias, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.instance_norm`: over each example's positions; or with the running values, as given."""
    known, plain = (running_mean, running_var), functional.instance_norm
    if not use_input_stats:
        return plain(input, *known, weight, bias, use_input_stats, momentum, eps)
    _renew(plain, input, known, use_input_stats, momentum, eps)
    return _by_channel(input, tuple(range(2, input.dim())), weight, bias, eps)


def _renew(plain: Any, input: Tensor, known: tuple[Tensor | None, Tensor | None], *settings: Any) -> None:
    """Update the running values, as torch does."""
    if any(value is not None for value in known):
        with torch.no_grad():
            plain(input.detach(), *known, None, None, *settings)


def reorder_arguments(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.batch_norm` or `torch.instance_norm`: the functional with weight and bias before the running values."""

    def call(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *settings: Any,
        cudnn_enabled: bool = True,
        **named: Any,
    ) -> Tensor:
        # settings: training or use_input_stats, momentum, eps; cudnn_enabled has no meaning here
        return norm(input, running_mean, running_var, weight, bias, *settings[:3], **named)

    return call


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v| with norms over all axes but dim; dim -1: over all. What the weight_norm parametrisation calls."""
    axes = tuple(axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim())
    return v * (g / measure_length(v, axes, keepdim=True))


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """`torch.cdist`, which has no second derivative."""
    return vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _by_channel(x: Tensor, dims: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalised over dims; weight and bias by channel, the second axis."""
    if math.prod(x.shape[axis] for axis in dims) <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    shape = (-1, *[1] * (x.dim() - 2))
    weight, bias = (None if part is None else part.view(shape) for part in (weight, bias))
    return scale_and_shift(normalise(x, dims, eps)[0], weight, bias)


REPLACED: dict[Any, Callable[..., Any]] = {
    # third derivatives are wrong (pytorch issues 175754 and 186256), and two nested forward ones (196700 and 196699)
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    torch.native_layer_norm: native_layer_norm,
    functional.batch_norm: batch_norm,
    torch.batch_norm: reorder_arguments(batch_norm),
    functional.instance_norm: instance_norm,
    torch.instance_norm: reorder_arguments(instance_norm),
    # no second derivative (83510, for `cdist`)
    torch.cdist: cdist,
    functional.embedding_bag: look_up_bags,
    # two nested forward derivatives are wrong (196695, 196696 and 196697), of `cholesky_inverse` one is (196682)
    **{
        getattr(home, function.__name__): function
        for function in (det, slogdet, logdet, cholesky_inverse)
        for home in (torch, Tensor, torch_linalg)
        if hasattr(home, function.__name__)
    },
    torch_linalg.solve: solve,
    # two nested forward derivatives end in an error, themselves or once they are differentiated
    functional.glu: glu,
    torch_plain.norm: norm,
    torch_plain.Tensor.norm: norm,
    torch_linalg.norm: linalg_norm,
    torch_linalg.vector_norm: vector_norm,
    functional.normalize: normalize,
    functional.cosine_similarity: cosine_similarity,
    torch.cosine_similarity: cosine_similarity,
}
"""What torch calls -> what is called in its place where derivatives of higher order are taken; all by torch 2.13."""
WEIGHT_NORM = "_weight_norm"
"""What the parametrisation calls, whose second derivative is wrong: a name of torch's own, which may go."""
if hasattr(torch, WEIGHT_NORM):
    REPLACED[getattr(torch, WEIGHT_NORM)] = weight_norm
