"""Derivatives in the inputs of a network, carried forward beside its values: Taylor mode.

With z(x), z_i = dz/dx_i and s = sum_i d^2z/dx_i^2 over a set of coordinates, linear maps treat the three alike, and

    f(z):  f'(z) z_i      f'(z) s + f''(z) sum_i z_i^2
    a b:   a b_i + b a_i  a s_b + b s_a + 2 sum_i a_i b_i

so that one pass with 1 + d + 1 numbers in the place of each gives value, gradient and Laplacian: the forward Laplacian
(Li et al. 2023), for any network made of operations that are known here. Others raise `NotCarriedError`. Layers and
activations have a way back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.linalg import invert_or_nan, is_concrete
from natgrad.ground.typed_torch import torch_returns

Function = Callable[..., Any]
Places = slice | list[int]


@dataclass(frozen=True)
class Derivatives:
    """What is carried beside a value, in this order: first derivatives, then sums of second ones."""

    first: tuple[int, ...] = ()  # the coordinates of the first derivatives, in order
    second: tuple[tuple[int, ...], ...] = ()  # sets of coordinates over which second derivatives are summed

    @property
    def count(self) -> int:
        """T: numbers per value, itself with them."""
        return 1 + len(self.first) + len(self.second)

    def place_of(self, coordinate: int) -> int:
        """The position of d/dx_i among the T numbers."""
        return 1 + self.first.index(coordinate)

    def places_of(self, coordinates: Sequence[int]) -> Places:
        """The positions of first derivatives: a slice, of which a tensor has a view, where they are side by side."""
        places = [self.place_of(i) for i in coordinates]
        side_by_side = bool(places) and places == list(range(places[0], places[0] + len(places)))
        return slice(places[0], places[0] + len(places)) if side_by_side else places

    def place_of_sum(self, group: tuple[int, ...]) -> int:
        """The position of a sum of second derivatives among the T numbers."""
        return 1 + len(self.first) + self.second.index(group)

    @cached_property
    def sums(self) -> list[tuple[int, Places]]:
        """The position of every sum of second derivatives, and those of the first ones in its coordinates."""
        return [(self.place_of_sum(group), self.places_of(group)) for group in self.second]

    def select(self, wish: Derivatives) -> list[int]:
        """The positions of a value and of what is wished beside it."""
        return [0, *map(self.place_of, wish.first), *map(self.place_of_sum, wish.second)]

    def holds(self, wish: Derivatives) -> bool:
        """True if all of a wish is among the T numbers."""
        return set(wish.first) <= set(self.first) and set(wish.second) <= set(self.second)

    def merge(self, other: Derivatives) -> Derivatives:
        """What either of them has."""
        first = tuple(sorted({*self.first, *other.first}))
        return Derivatives(first, tuple(dict.fromkeys((*self.second, *other.second))))

    @cached_property
    def inner(self) -> Derivatives:
        """What goes through a network for it: second derivatives need the first ones on their way."""
        return self.merge(Derivatives(tuple(i for group in self.second for i in group)))


class NotCarriedError(Exception):
    """An operation that has no rule here."""


class Jet(Tensor):
    """A tensor z that has its derivatives with it: it goes through a network in the place of the coordinates.

    Attributes:
        jets: z and its derivatives, shape (T, *shape of z).
        derivatives: Which ones they are.
    """

    jets: Tensor
    derivatives: Derivatives

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


def start_jets(x: Tensor, layout: Derivatives) -> Tensor:
    """The coordinates (b, d) with their own derivatives, unit vectors and zeros: (T, b, d)."""
    jets = x.new_zeros(layout.count, *x.shape)
    jets[0] = x
    if layout.first:
        units = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[list(layout.first)]
        jets[1 : 1 + len(units)] = units.unsqueeze(1)
    return jets


def wrap_jets(jets: Any, layout: Derivatives) -> Any:
    """Stacked values and derivatives, (T, ...), as a tensor of the values; of each part of a tuple."""
    if isinstance(jets, (tuple, list)):
        kind = type(jets)
        return kind(wrap_jets(part, layout) for part in jets) if kind in (tuple, list) else refuse("a named tuple")
    value = jets[0].as_subclass(Jet)
    value.jets, value.derivatives = jets, layout
    return value


def refuse(what: str) -> Any:
    """NotCarriedError for what has no rule."""
    raise NotCarriedError(f"{what} is not carried")


def name_function(func: Any) -> str:
    """The operation's name without the marks of operators and attributes: `rsub` of `Tensor.__rsub__`."""
    name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def read_value(value: Any) -> Any:
    """The value alone, without derivatives; anything else as it is."""
    return value.jets[0] if isinstance(value, Jet) else value


def hold_plain(*parts: Any) -> None:
    """NotCarriedError if one of them has derivatives, where the rule knows of none."""
    for part in parts:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, (tuple, list)) else (part,)
        if any(isinstance(value, Jet) for value in inner):
            refuse("this argument")


# linear maps


def map_linear(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A linear map of its first argument: of value and derivatives alike."""
    first, rest = args[0], args[1:]
    hold_plain(*rest, kwargs)
    return wrap_jets(torch.func.vmap(lambda part: func(part, *rest, **kwargs))(first.jets), first.derivatives)


def map_shaped(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A linear map of its first argument that takes a shape from the others."""
    if not isinstance(args[0], Jet):
        refuse("a shape")
    return map_linear(func, [args[0], *map(read_value, args[1:])], kwargs)


def map_together(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.cat` or `torch.stack`: linear in all the tensors of a list."""
    layout = next(tensor.derivatives for tensor in args[0] if isinstance(tensor, Jet))
    parts = [fill_jets(tensor, layout) for tensor in args[0]]
    return wrap_jets(torch.func.vmap(lambda *given: func(given, *args[1:], **kwargs))(*parts), layout)


def map_affine(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.linear` of the first argument: the bias moves the value alone."""
    jet, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    hold_plain(weight, bias)
    return wrap_jets(map_layer(jet.jets, weight, bias), jet.derivatives)


def map_layer(jets: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W a + b with its derivatives from a with its own, (T, ..., i) to (T, ..., o): the bias moves the value alone."""
    out = nn.functional.linear(jets, weight)
    if bias is not None:
        out[0] += bias
    return out


def fill_jets(value: Any, layout: Derivatives) -> Tensor:
    """Values and derivatives, the latter zero for a constant."""
    if isinstance(value, Jet):
        return value.jets
    zeros = value.new_zeros(layout.count, *value.shape)
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
    like = next(part for part in parts if isinstance(part, Jet))
    plain = [part if isinstance(part, Tensor) else like.jets.new_full((), part) for part in parts]
    sides = [fill_jets(part, like.derivatives) for part in plain]
    dims = max(condition.dim(), *(part.dim() - 1 for part in sides))
    return wrap_jets(torch.where(condition, *(lift(part, dims) for part in sides)), like.derivatives)


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
    if isinstance(a, Jet) and isinstance(b, Jet):
        dims = max(a.jets.dim(), b.jets.dim()) - 1
        return wrap_jets(lift(a.jets, dims) + lift(b.jets, dims), a.derivatives)
    jet, constant = (a, b) if isinstance(a, Jet) else (b, a)
    value = jet.jets[0] + constant
    rest = lift(jet.jets[1:], value.dim()).expand(-1, *value.shape).to(value.dtype)
    return wrap_jets(torch.cat([value.unsqueeze(0), rest]), jet.derivatives)


def multiply(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """a b, elementwise."""
    if kwargs:
        refuse("a keyword")
    a, b = args
    if not (isinstance(a, Jet) and isinstance(b, Jet)):
        jet, constant = (a, b) if isinstance(a, Jet) else (b, a)
        dims = constant.dim() if isinstance(constant, Tensor) else 0
        return wrap_jets(lift(jet.jets, dims) * constant, jet.derivatives)
    dims = max(a.jets.dim(), b.jets.dim()) - 1
    left, right = lift(a.jets, dims), lift(b.jets, dims)
    out = left[0] * right + right[0] * left
    out[0] = left[0] * right[0]
    for place, own in a.derivatives.sums:
        out[place] += 2 * (left[own] * right[own]).sum(0)  # 2 sum_i a_i b_i
    return wrap_jets(out, a.derivatives)


def map_bilinear(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.matmul` and `torch.einsum`, of one or two tensors with derivatives."""
    places = [i for i, argument in enumerate(args) if isinstance(argument, Jet)]
    hold_plain(kwargs, *(argument for i, argument in enumerate(args) if i not in places))
    if len(places) not in (1, 2):
        refuse("a product of many")

    def call(*given: Tensor) -> Tensor:
        return func(*(given[places.index(i)] if i in places else argument for i, argument in enumerate(args)), **kwargs)

    layout = args[places[0]].derivatives
    if len(places) == 1:
        return wrap_jets(torch.func.vmap(call)(args[places[0]].jets), layout)
    left, right = (args[i].jets for i in places)
    out = torch.func.vmap(call, (0, None))(left, right[0]) + torch.func.vmap(call, (None, 0))(left[0], right)
    out[0] = call(left[0], right[0])
    for place, own in layout.sums:
        out[place] += 2 * torch.func.vmap(call)(left[own], right[own]).sum(0)
    return wrap_jets(out, layout)


# functions of every number by itself


def bend_jets(jets: Tensor, layout: Derivatives, slopes: Sequence[Tensor], kept: list[int] | None = None) -> Tensor:
    """f(z) with its derivatives from z with its own.

    slopes: f, f' and f'' at z, as far as the derivatives need them. kept: The positions of what is wanted; None: all.
    """
    parts = jets if kept is None else jets[kept]
    out = parts * slopes[1] if len(parts) > 1 else torch.empty_like(parts)
    out[0] = slopes[0]
    for place, own in layout.sums:
        at = place if kept is None else kept.index(place)
        out[at].addcmul_(slopes[2], jets[own].square().sum(0))  # f'' sum_i z_i^2
    return out


def pull_bend(
    jets: Tensor, layout: Derivatives, slopes: Sequence[Tensor], kept: list[int] | None, cotangents: Tensor
) -> Tensor:
    """The cotangents (k, T, b, h) of z from those of what `bend_jets` gave; `slopes` has the third derivative too."""
    if kept is not None:
        given, cotangents = cotangents, cotangents.new_zeros(len(cotangents), *jets.shape)
        cotangents[:, kept] = given
    out = cotangents * slopes[1]
    if len(jets) > 1:
        out[:, 0].addcmul_((cotangents[:, 1:] * jets[1:]).sum(1), slopes[2])  # d/dz of f' z_i and of f' s
    for place, own in layout.sums:
        upper, first = cotangents[:, place], jets[own]
        out[:, 0].addcmul_(upper, slopes[3] * first.square().sum(0))  # d/dz of f'' sum_i z_i^2
        out[:, own] += (2 * upper * slopes[2]).unsqueeze(1) * first
    return out


def bend_jet(slopes: Sequence[Tensor], jet: Any) -> Any:
    """f(z) with its derivatives from f, f' and f'' at z."""
    return wrap_jets(bend_jets(jet.jets, jet.derivatives, slopes), jet.derivatives)


def map_smooth(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function whose derivatives are written out."""
    if len(args) != 1 or any(value is not None and value is not False for value in kwargs.values()):
        refuse("a keyword")
    return bend_jet(list(islice(SMOOTH[name_function(func)](args[0].jets[0]), 3)), args[0])


def map_elementwise(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of every number by itself, whose derivatives come from autograd."""
    hold_plain(*args[1:], kwargs)
    jets = args[0].jets
    if jets.is_complex():
        refuse("a complex argument")
    derivatives = differentiate_elementwise(lambda z: func(z, *args[1:], **kwargs), jets[0], 2)
    if derivatives[0].shape != jets[0].shape:
        refuse("a function of several numbers")
    return bend_jet(derivatives, args[0])


def raise_power(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """z^p with a number p."""
    jet, power = args if len(args) == 2 else (args[0], kwargs["exponent"])
    if not isinstance(jet, Jet) or not isinstance(power, (int, float)) or power in (0, 1):
        refuse("this power")
    if power == 2:
        return jet.square()
    z = jet.jets[0]
    return bend_jet((z**power, power * z ** (power - 1), power * (power - 1) * z ** (power - 2)), jet)


def split_determinant(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The sign, and log |det A| with tr(A^-1 A_i) and sum_i tr(A^-1 A_ii) - tr(A^-1 A_i A^-1 A_i)."""
    jets, layout = args[0].jets, args[0].derivatives
    if jets.is_complex():
        refuse("a complex determinant")
    sign, log = func(jets[0])
    images = invert_or_nan(jets[0]) @ jets
    out = images.diagonal(dim1=-2, dim2=-1).sum(-1)
    out[0] = log
    for place, own in layout.sums:
        out[place] -= (images[own] * images[own].mT).sum((0, -2, -1))
    return torch_returns.linalg_slogdet((sign, wrap_jets(out, layout)))


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


# derivatives of functions of one number


def differentiate_elementwise(function: Function, z: Tensor, order: int) -> list[Tensor]:
    """f(z), f'(z), ... up to this order, at most 3: in closed form for the commonest activations, else by torch."""
    closed = CLOSED.get(type(function))
    if closed is not None:
        return list(islice(closed(z), order + 1))
    if type(function) is nn.Softplus:
        return list(islice(differentiate_softplus(z, function), order + 1))
    if not is_concrete(z):  # inside torch.func
        return nest_gradients(function, order)(z)
    graph = z.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        point = z if graph else z.detach().requires_grad_()
        values = [function(point)]
        for _ in range(order):
            if not values[-1].requires_grad:  # f is piecewise linear
                values.append(torch.zeros_like(z))
                continue
            slope = torch.autograd.grad(values[-1].sum(), point, create_graph=True, materialize_grads=True)
            values += slope
    return values if graph else [value.detach() for value in values]


def nest_gradients(function: Function, order: int) -> Callable[[Tensor], list[Tensor]]:
    """z -> f(z), f'(z), ..., each the gradient of the sum of the one before."""
    if order == 0:
        return lambda z: [function(z)]
    lower = nest_gradients(function, order - 1)

    def sum_last(z: Tensor) -> tuple[Tensor, list[Tensor]]:
        values = lower(z)
        return values[-1].sum(), values

    def differentiate(z: Tensor) -> list[Tensor]:
        slope, values = torch.func.grad(sum_last, has_aux=True)(z)
        return [*values, slope]

    return differentiate


def differentiate_tanh(z: Tensor) -> Iterator[Tensor]:
    """tanh z, and its derivatives as far as they are asked for."""
    value = torch.tanh(z)
    yield value
    square = value.square()
    slope = 1 - square
    yield slope
    yield (value * slope).mul_(-2)
    yield square.mul_(6).sub_(2).mul_(slope)  # in place: nothing asks for three of them with a graph


def differentiate_sigmoid(z: Tensor) -> Iterator[Tensor]:
    """1 / (1 + exp(-z)), and its derivatives."""
    value = torch.sigmoid(z)
    yield value
    slope = value * (1 - value)
    yield slope
    yield slope * (1 - 2 * value)
    yield slope * (1 - 6 * slope)


def differentiate_silu(z: Tensor) -> Iterator[Tensor]:
    """z / (1 + exp(-z)), and its derivatives: z s has k s^(k-1) + z s^(k)."""
    gate = differentiate_sigmoid(z)
    below = next(gate)
    yield z * below
    for times, above in enumerate(gate, 1):
        yield times * below + z * above
        below = above


def differentiate_softplus(z: Tensor, part: Any) -> Iterator[Tensor]:
    """log(1 + exp(beta z)) / beta, and its derivatives; z itself beyond the threshold."""
    yield part(z)
    straight = part.beta * z > part.threshold
    for order, slope in enumerate(differentiate_sigmoid(part.beta * z)):
        yield torch.where(straight, 0 if order else 1, part.beta**order * slope if order else slope)


def differentiate_sqrt(z: Tensor) -> Iterator[Tensor]:
    """The root of z, with two derivatives."""
    value = z.sqrt()
    yield value
    slope = 0.5 / value
    yield slope
    yield -0.5 * slope / z


def differentiate_reciprocal(z: Tensor) -> Iterator[Tensor]:
    """1 / z, with two derivatives."""
    value = 1 / z
    yield value
    square = value.square()
    yield -square
    yield 2 * square * value


def differentiate_square(z: Tensor) -> Iterator[Tensor]:
    """z^2, with two derivatives."""
    yield z.square()
    yield 2 * z
    yield torch.full_like(z, 2)


SMOOTH: dict[str, Callable[[Tensor], Iterator[Tensor]]] = {
    "tanh": differentiate_tanh,
    "sigmoid": differentiate_sigmoid,
    "silu": differentiate_silu,
    "sqrt": differentiate_sqrt,
    "reciprocal": differentiate_reciprocal,
    "square": differentiate_square,
    "exp": lambda z: repeat(z.exp()),
    "log": lambda z: (f(z) for f in (torch.log, torch.reciprocal, lambda z: -1 / z.square())),
    "log1p": lambda z: (f(z) for f in (torch.log1p, lambda z: 1 / (1 + z), lambda z: -1 / (1 + z).square())),
    "sin": lambda z: (f(z) for f in (torch.sin, torch.cos, lambda z: -z.sin())),
    "cos": lambda z: (f(z) for f in (torch.cos, lambda z: -z.sin(), lambda z: -z.cos())),
}
"""By the names of torch's functions: z -> f and its derivatives at z, as far as they are asked for."""
CLOSED: dict[Any, Callable[[Tensor], Iterator[Tensor]]] = {
    nn.Tanh: differentiate_tanh,
    nn.Sigmoid: differentiate_sigmoid,
    nn.SiLU: differentiate_silu,
}
"""Activations whose derivatives are written out."""
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
    **dict.fromkeys(("neg", "negative"), lambda func, args, kwargs: wrap_jets(-args[0].jets, args[0].derivatives)),
    "add": add,
    **dict.fromkeys(("mul", "multiply"), multiply),
    "pow": raise_power,
    "linear": map_affine,
    "complex": lambda func, args, kwargs: map_together(lambda parts: func(*parts), (args,), kwargs),
    "where": choose,
    "linalg_slogdet": split_determinant,
    "slogdet": split_determinant,
}


# functions of the point alone


def differentiate_along(function: Function, x: Tensor, unit: Tensor) -> Tensor:
    """d/ds f(x + s e) at s = 0."""
    with exact_derivatives():
        return torch.func.jvp(function, (x,), (unit,))[1]


def differentiate_map(function: Function, inputs: Tensor, layout: Derivatives) -> Tensor:
    """Values and derivatives (T, b, f) of any function of each point (b, d) by itself, in forward mode."""
    value = function(inputs)
    if value.dim() != 2 or len(value) != len(inputs):
        raise RuntimeError(f"a function of points {tuple(inputs.shape)} returned {tuple(value.shape)}")
    jets = value.new_zeros(layout.count, *value.shape)
    jets[0] = value
    for place, i in enumerate(layout.first, 1):
        unit = torch.zeros_like(inputs)
        unit[:, i] = 1
        groups = [group for group in layout.second if i in group]
        if not groups:
            jets[place] = differentiate_along(function, inputs, unit)
            continue
        with exact_derivatives():
            along = partial(differentiate_along, function, unit=unit)
            pair = torch.func.jvp(along, (inputs,), (unit,))
        jets[place] = pair[0]
        for group in groups:
            jets[layout.place_of_sum(group)] += pair[1]
    return jets
