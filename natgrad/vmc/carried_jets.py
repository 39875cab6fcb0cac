"""Values with their gradient and their Laplacian in the coordinates, carried forward through torch's operations.

For z(x) with z_i = dz/dx_i and s = sum_i d^2z/dx_i^2, linear maps treat the three alike, and

    f(z):  f'(z) z_i      f'(z) s + f''(z) sum_i z_i^2
    a b:   a b_i + b a_i  a s_b + b s_a + 2 sum_i a_i b_i

so that one pass with 2 + d numbers in the place of each gives what the kinetic energy needs: the forward Laplacian (Li
et al. 2023), for any network made of operations that are known here. Others raise `NotCarriedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.jets import SMOOTH, differentiate_elementwise
from natgrad.ground.linalg import invert_or_nan
from natgrad.ground.typed_torch import torch_returns

Function = Callable[..., Any]


class NotCarriedError(Exception):
    """An operation that has no rule here."""


class ForwardJet(Tensor):
    """A tensor z that has its derivatives with it: it goes through a network in the place of the coordinates.

    Attributes:
        jets: z, its first derivatives and the sum of its second ones, shape (d + 2, *shape of z).
    """

    jets: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_function(func)
        if name in RULES:
            return RULES[name](func, args, kwargs or {})
        if name not in COMPOSED:
            raise NotCarriedError(f"{name} has no rule for first and second derivatives")
        try:
            return COMPOSED[name](*args, **(kwargs or {}))
        except TypeError as error:
            raise NotCarriedError(f"{name} is not carried with these arguments") from error


def start_jet(x: Tensor) -> ForwardJet:
    """The coordinates with their own derivatives: unit vectors and zeros. x: (b, d)."""
    b, d = x.shape
    jets = x.new_zeros(d + 2, b, d)
    jets[0] = x
    jets[1:-1] = torch.eye(d, dtype=x.dtype, device=x.device).unsqueeze(1)
    return wrap_jets(jets)


def wrap_jets(jets: Any) -> Any:
    """Stacked values and derivatives, (d + 2, ...), as a tensor of the values; of each part of a tuple."""
    if isinstance(jets, (tuple, list)):
        return type(jets)(wrap_jets(part) for part in jets) if type(jets) in (tuple, list) else refuse("a named tuple")
    value = jets[0].as_subclass(ForwardJet)
    value.jets = jets
    return value


def refuse(what: str) -> Any:
    """NotCarriedError for what has no rule."""
    raise NotCarriedError(f"{what} is not carried")


def name_function(func: Any) -> str:
    """The operation's name without the marks of operators and attributes: `rsub` of `Tensor.__rsub__`."""
    name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def is_carried(value: Any) -> bool:
    """Whether it is a tensor with derivatives."""
    return isinstance(value, ForwardJet)


def read_value(value: Any) -> Any:
    """The value alone, without derivatives; anything else as it is."""
    return value.jets[0] if isinstance(value, ForwardJet) else value


def hold_plain(*parts: Any) -> None:
    """NotCarriedError if one of them has derivatives, where the rule knows of none."""
    for part in parts:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, (tuple, list)) else (part,)
        if any(is_carried(value) for value in inner):
            refuse("this argument")


# linear maps


def map_linear(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A linear map of its first argument: of value and derivatives alike."""
    first, rest = args[0], args[1:]
    hold_plain(*rest, kwargs)
    return wrap_jets(torch.func.vmap(lambda part: func(part, *rest, **kwargs))(first.jets))


def map_shaped(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A linear map of its first argument that takes a shape from the others."""
    return map_linear(func, [args[0], *map(read_value, args[1:])], kwargs) if is_carried(args[0]) else refuse("a shape")


def map_together(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.cat` or `torch.stack`: linear in all the tensors of a list."""
    count = next(len(tensor.jets) for tensor in args[0] if is_carried(tensor))
    parts = [fill_jets(tensor, count) for tensor in args[0]]
    return wrap_jets(torch.func.vmap(lambda *given: func(given, *args[1:], **kwargs))(*parts))


def join_complex(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.complex(a, b)`."""
    real, imaginary = args
    count = len((real if is_carried(real) else imaginary).jets)
    return wrap_jets(torch.complex(fill_jets(real, count), fill_jets(imaginary, count)))


def map_affine(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.linear` of the first argument: the bias moves the value alone."""
    jet, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    hold_plain(weight, bias)
    out = func(jet.jets, weight)
    if bias is not None:
        out[0] += bias
    return wrap_jets(out)


def fill_jets(value: Any, count: int) -> Tensor:
    """Values and derivatives, the latter zero for a constant."""
    if is_carried(value):
        return value.jets
    zeros = value.new_zeros(count, *value.shape)
    zeros[0] = value
    return zeros


def keep_value(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What does not move with the coordinates: signs, comparisons, shapes."""
    return func(*map(read_value, args), **kwargs)


def choose(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.where(condition, a, b)`."""
    if len(args) != 3 or kwargs:
        refuse("torch.where of other arguments")
    condition, *parts = args
    count = next(len(part.jets) for part in parts if is_carried(part))
    like = next(part.jets for part in parts if is_carried(part))
    sides = [fill_jets(part if isinstance(part, Tensor) else like.new_full((), part), count) for part in parts]
    dims = max(condition.dim(), *(part.dim() - 1 for part in sides))
    return wrap_jets(torch.where(condition, *(lift(part, dims) for part in sides)))


# sums and products


def lift(jets: Tensor, dims: int) -> Tensor:
    """Axes of one behind the derivatives' axis, so that values with `dims` axes are broadcast to the right."""
    more = dims + 1 - jets.dim()
    return jets.reshape(len(jets), *[1] * more, *jets.shape[1:]) if more > 0 else jets


def add(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """a + b."""
    if kwargs:
        refuse("alpha")
    a, b = args
    if is_carried(a) and is_carried(b):
        dims = max(a.jets.dim(), b.jets.dim()) - 1
        return wrap_jets(lift(a.jets, dims) + lift(b.jets, dims))
    jets, constant = (a.jets, b) if is_carried(a) else (b.jets, a)
    value = jets[0] + constant
    rest = lift(jets[1:], value.dim()).expand(-1, *value.shape).to(value.dtype)
    return wrap_jets(torch.cat([value.unsqueeze(0), rest]))


def multiply(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """a b, elementwise."""
    if kwargs:
        refuse("a keyword")
    a, b = args
    if not (is_carried(a) and is_carried(b)):
        jets, constant = (a.jets, b) if is_carried(a) else (b.jets, a)
        return wrap_jets(lift(jets, constant.dim() if isinstance(constant, Tensor) else 0) * constant)
    dims = max(a.jets.dim(), b.jets.dim()) - 1
    left, right = lift(a.jets, dims), lift(b.jets, dims)
    out = left[0] * right + right[0] * left
    out[0] = left[0] * right[0]
    out[-1] += 2 * (left[1:-1] * right[1:-1]).sum(0)  # 2 sum_i a_i b_i
    return wrap_jets(out)


def map_bilinear(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.matmul` and `torch.einsum`, of one or two tensors with derivatives."""
    places = [i for i, argument in enumerate(args) if is_carried(argument)]
    hold_plain(kwargs, *(argument for i, argument in enumerate(args) if i not in places))
    if len(places) not in (1, 2):
        refuse("a product of many")

    def call(*given: Tensor) -> Tensor:
        return func(*(given[places.index(i)] if i in places else argument for i, argument in enumerate(args)), **kwargs)

    stacks = [args[i].jets for i in places]
    if len(stacks) == 1:
        return wrap_jets(torch.func.vmap(call)(stacks[0]))
    left, right = stacks
    out = torch.func.vmap(call, (0, None))(left, right[0]) + torch.func.vmap(call, (None, 0))(left[0], right)
    out[0] = call(left[0], right[0])
    out[-1] += 2 * torch.func.vmap(call)(left[1:-1], right[1:-1]).sum(0)
    return wrap_jets(out)


# functions of every number by itself


def bend_jet(derivatives: Iterable[Tensor], jets: Tensor) -> Any:
    """f(z) with its derivatives from f, f' and f'' at z."""
    value, slope, bend = islice(derivatives, 3)
    out = jets * slope
    out[0] = value
    out[-1] += bend * jets[1:-1].square().sum(0)  # f'' sum_i z_i^2
    return wrap_jets(out)


def map_smooth(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function whose derivatives are written out."""
    if len(args) != 1 or any(value is not None and value is not False for value in kwargs.values()):
        refuse("a keyword")
    return bend_jet(SMOOTH[name_function(func)](args[0].jets[0]), args[0].jets)


def map_elementwise(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of every number by itself, whose derivatives come from autograd."""
    hold_plain(*args[1:], kwargs)
    jets = args[0].jets
    if jets.is_complex():
        refuse("a complex argument")
    derivatives = differentiate_elementwise(lambda z: func(z, *args[1:], **kwargs), jets[0], 2)
    if derivatives[0].shape != jets[0].shape:
        refuse("a function of several numbers")
    return bend_jet(derivatives, jets)


def raise_power(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """z^p with a number p."""
    jet, power = args if len(args) == 2 else (args[0], kwargs["exponent"])
    if not is_carried(jet) or not isinstance(power, (int, float)) or power in (0, 1):
        refuse("this power")
    if power == 2:
        return jet.square()
    z = jet.jets[0]
    return bend_jet((z**power, power * z ** (power - 1), power * (power - 1) * z ** (power - 2)), jet.jets)


def split_determinant(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The sign, and log |det A| with tr(A^-1 A_i) and tr(A^-1 A_ii) - tr(A^-1 A_i A^-1 A_i)."""
    jets = args[0].jets
    if jets.is_complex():
        refuse("a complex determinant")
    sign, log = func(jets[0])
    images = invert_or_nan(jets[0]) @ jets[1:]
    out = images.diagonal(dim1=-2, dim2=-1).sum(-1)
    out[-1] -= (images[:-1] * images[:-1].mT).sum((0, -2, -1))
    return torch_returns.linalg_slogdet((sign, wrap_jets(torch.cat([log.unsqueeze(0), out]))))


# functions of others, as they are written; their arguments are named as torch does


def measure_size(input: Any, p: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """The Euclidean norm along an axis; torch.linalg has `ord` in the place of p."""
    order = kwargs.pop("ord", p)
    if order not in (None, "fro", 2) or kwargs.get("dtype") or not isinstance(dim, int) or input.is_complex():
        refuse("this norm")
    return input.square().sum(dim, keepdim).sqrt()


def sum_exponentials(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """log sum exp z along an axis."""
    if not isinstance(dim, int):
        refuse("several axes")
    top = input.jets[0].amax(dim, keepdim=True)
    return (input - top).exp().sum(dim, keepdim).log() + (top if keepdim else top.squeeze(dim))


def take_log_softmax(input: Any, dim: int, dtype: None = None, **kwargs: Any) -> Any:
    """`torch.log_softmax`."""
    return input - sum_exponentials(input, dim, True) if dtype is None else refuse("a dtype")


def normalise_layer(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """`torch.nn.functional.layer_norm`."""
    dims = tuple(range(-len(normalized_shape), 0))
    gap = input - input.mean(dims, keepdim=True)
    out = gap / (gap.square().mean(dims, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def divide(input: Any, other: Any) -> Any:
    """a / b."""
    return input * (other.reciprocal() if isinstance(other, Tensor) else 1 / other)


COMPOSED: dict[str, Function] = {
    **dict.fromkeys(("sub", "subtract"), lambda input, other: input + -other),
    "rsub": lambda input, other: -input + other,
    **dict.fromkeys(("div", "divide", "true_divide"), divide),
    "rdiv": lambda input, other: divide(other, input),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), measure_size),
    "logsumexp": sum_exponentials,
    "log_softmax": take_log_softmax,
    "softmax": lambda *args, **kwargs: take_log_softmax(*args, **kwargs).exp(),
    "layer_norm": normalise_layer,
}
ELEMENTWISE = (
    "abs softplus log_sigmoid gelu mish elu selu celu relu leaky_relu softsign tanhshrink hardtanh clamp clamp_min "
    "clamp_max erf atan arctan asinh atanh cosh sinh tan expm1 rsqrt log2 log10 sinc"
)
LINEAR = (
    "sum mean unsqueeze squeeze flatten unflatten reshape view expand movedim permute transpose swapaxes "
    "getitem select narrow index_select roll flip positive tile repeat repeat_interleave diagonal "
    "real imag mT T to double contiguous clone triu tril chunk split unbind diff cumsum"
)
CONSTANT = (
    "shape dtype device ndim requires_grad is_leaf layout dim size numel len is_complex is_floating_point sign "
    "detach gt lt ge le eq ne zeros_like ones_like new_zeros new_ones new_full isfinite isnan isinf argmax argmin "
    "argsort"
)
RULES: dict[str, Callable[[Function, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(CONSTANT.split(), keep_value),
    **dict.fromkeys(LINEAR.split(), map_linear),
    **dict.fromkeys(("expand_as", "view_as", "reshape_as", "type_as"), map_shaped),
    **dict.fromkeys(ELEMENTWISE.split(), map_elementwise),
    **dict.fromkeys(SMOOTH, map_smooth),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), map_together),
    **dict.fromkeys(("matmul", "mm", "bmm", "einsum"), map_bilinear),
    **dict.fromkeys(("neg", "negative"), lambda func, args, kwargs: wrap_jets(-args[0].jets)),
    "add": add,
    **dict.fromkeys(("mul", "multiply"), multiply),
    "pow": raise_power,
    "linear": map_affine,
    "complex": join_complex,
    "where": choose,
    "linalg_slogdet": split_determinant,
    "slogdet": split_determinant,
}
