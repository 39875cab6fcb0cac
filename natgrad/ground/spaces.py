"""Parameters by name and as one flat vector; complex ones by their parts, positive ones by their logarithms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from natgrad.ground.checks import check_precision
from natgrad.ground.messages import show_dtype

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class ParameterBlock:
    """One parameter's place in the flat vector: entries start .. stop, row-major in `shape`.

    Args:
        name: The parameter's name.
        shape: Its shape.
        start: Position of its first entry.
        stop: Position after its last entry.
        dtype: Its dtype.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.stop - self.start


class Space:
    """The vector space of a dict of parameters: concatenated in the dict's order, each row-major.

    Only shapes, dtypes and names are kept, never the tensors.

    Args:
        params: Name -> tensor, floating point, all on one device.

    Raises:
        ValueError: For no parameter at all, mixed devices, complex or integer tensors.

    Example:
        >>> space = ng.Space(ng.trainable(nn.Linear(2, 1)))
        >>> len(space), list(space)
        (3, ['weight', 'bias'])
        >>> space.unflatten(torch.tensor([1.0, 2.0, 3.0]))["weight"]
        tensor([[1., 2.]])
    """

    def __init__(self, params: Params) -> None:
        check_parameters(params)
        stops = list(accumulate(p.numel() for p in params.values()))
        self.blocks: dict[str, ParameterBlock] = {
            name: ParameterBlock(name, p.shape, stop - p.numel(), stop, p.dtype)
            for (name, p), stop in zip(params.items(), stops, strict=True)
        }
        self.size: int = stops[-1]
        self.device: torch.device = next(iter(params.values())).device
        self.dtype: torch.dtype = reduce(torch.promote_types, (p.dtype for p in params.values()))

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __repr__(self) -> str:
        return f"Space({len(self.blocks)} parameters, {self.size} entries, {self.dtype}, {self.device})"

    def flatten(self, tensors: Mapping[str, Tensor | None]) -> Tensor:
        """Dict of tensors -> vector, in the space's dtype. A missing name or None counts as zeros.

        Args:
            tensors: Name -> tensor of the parameter's shape.

        Returns:
            Shape (n,).
        """
        self._check_names("tensors", tensors)
        parts: list[Tensor] = []
        for name, block in self.blocks.items():
            tensor = tensors.get(name)
            if tensor is None:
                tensor = torch.zeros(block.shape, dtype=self.dtype, device=self.device)
            if tensor.shape != block.shape:
                raise ValueError(f"tensors[{name!r}] has shape {tuple(tensor.shape)}, expected {tuple(block.shape)}")
            parts.append((tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1).to(self.dtype))
        return torch.cat(parts)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Vector -> dict of views on it: no copy, except for parameters of another dtype.

        Args:
            vector: Shape (n,).
        """
        self.check(vector)
        return {
            name: vector[block.start : block.stop].view(block.shape).to(block.dtype)
            for name, block in self.blocks.items()
        }

    def subset(self, names: Iterable[str]) -> Space:
        """The space of some of the parameters, in this space's order.

        Args:
            names: Of parameters.

        Raises:
            ValueError: For unknown names.
        """
        wanted, number = set(names), torch.empty(1, device=self.device)
        self._check_names("names", wanted)
        return Space({b.name: number.to(b.dtype).expand(b.shape) for b in self.blocks.values() if b.name in wanted})

    def indices(self, names: Iterable[str]) -> Tensor:
        """Positions of the named parameters' entries in the flat vector.

        Args:
            names: Of parameters.

        Returns:
            Integers, shape (k,).
        """
        wanted = [self.blocks[name] for name in self.subset(names)]
        return torch.cat([torch.arange(b.start, b.stop, device=self.device) for b in wanted])

    def zeros(self) -> Tensor:
        """The origin, shape (n,)."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def check(self, vector: Tensor, name: str = "vector") -> None:
        """Check that a vector belongs to the space.

        Args:
            vector: What came.
            name: The argument's name in the error message.

        Raises:
            ValueError: Unless `vector` has shape (n,).
        """
        if vector.shape != (self.size,):
            raise ValueError(
                f"{name} has shape {tuple(vector.shape)}, expected ({self.size},): the space has "
                f"{self.size} entries; flatten a dict of tensors with space.flatten(...)"
            )

    def _check_names(self, what: str, names: Iterable[str]) -> None:
        unknown = set(names) - set(self.blocks)
        if unknown:
            raise ValueError(f"{what} has {sorted(unknown)}, which this space does not hold; its names: {list(self)}")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's trainable parameters, in the order of `named_parameters()`; a tied one appears once.

    Args:
        model: A module.

    Returns:
        Name -> parameter.

    Raises:
        ValueError: If there are none, or if one is still lazy (not yet materialised by a first forward).

    Example:
        >>> model = nn.Linear(2, 1).requires_grad_(False)
        >>> model.bias.requires_grad_(True).shape
        torch.Size([1])
        >>> list(ng.trainable(model))
        ['bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module; pass a dict of tensors directly")
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        frozen = any(True for _ in model.parameters())
        reason = "every requires_grad is False; unfreeze at least one" if frozen else "it has no parameters at all"
        raise ValueError(f"model has no trainable parameters: {reason}")
    for name, p in params.items():
        check_recorded(name, p)
    return params


def hint_at_parameters(given: object) -> str:
    """What to give in place of parameters alone, as torch's optimizers take them; empty for anything else."""
    if isinstance(given, Iterator):
        return "; give the model itself, not model.parameters()"
    parts = list(cast("Sequence[object]", given)) if isinstance(given, (list, tuple)) else [given]
    if not parts or not all(isinstance(part, (Tensor, Mapping)) for part in parts):
        return ""
    return (
        "; these are parameters alone, as torch.optim takes them, and pyro.optim and ZeroRedundancyOptimizer give "
        'them: give the model that they belong to, ng.kfac(model, criterion), with share="memory" to share its state'
    )


def check_parameters(params: Params) -> None:
    """ValueError or TypeError unless `params` maps names to real floating-point tensors on one device."""
    if not isinstance(params, Mapping):
        came, hint = type(params).__name__, hint_at_parameters(params)
        raise TypeError(f"params is {came}, expected a dict of tensors such as ng.trainable(model){hint}")
    if not params:
        raise ValueError("params is empty, expected at least one trainable tensor")
    for name, p in params.items():
        if not isinstance(p, Tensor) or not p.is_floating_point():
            split = isinstance(p, Tensor) and p.is_complex()
            raise ValueError(
                f"params[{name!r}] is {show_dtype(p)}, expected a real floating-point tensor"
                + "; keep real and imaginary parts as two, and join them with torch.complex in the model" * split
            )
    devices = {str(p.device) for p in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"params lie on several devices, {sorted(devices)}; move the model to one with model.to(device)"
        )


def name_parameters(params: Params | Tensor) -> Params:
    """A dict of tensors as it is, one tensor alone as {"params": tensor}, checked."""
    if not isinstance(params, (Tensor, Mapping)):
        raise TypeError(
            f"params is {type(params).__name__}, expected a tensor or a dict of tensors, {{'slopes': torch.zeros(3)}}"
        )
    named: Params = {"params": params} if isinstance(params, Tensor) else params
    check_parameters(named)
    for name, value in named.items():
        check_precision(name if named is params else "params", value.dtype, "convert it with .double()")
        check_recorded(name, value)
    return named


def check_recorded(name: str, value: Tensor) -> None:
    """ValueError for a tensor of inference mode, of which torch takes no derivatives, and for one without a shape."""
    if isinstance(value, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name} is lazy: run one forward pass of the model first, so that it gets a shape")
    if value.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), where torch records no derivatives: make it outside of it, "
            "or under torch.no_grad()"
        )


# Complex parameters as pairs of real ones, which all that is flat and real here can move


def split_complex_parameters(net: nn.Module) -> None:
    """Represent every complex parameter by its real and imaginary parts, a parametrisation of torch's."""
    parameters = [
        (module, name, p)
        for module in net.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.is_complex()
    ]
    if len({id(p) for _, _, p in parameters}) < len(parameters):
        raise ValueError("net shares a complex parameter between modules; keep it in one and call that one twice")
    for module, name, _ in parameters:
        register_parametrization(module, name, ComplexParts())


class ComplexParts(nn.Module):
    """A complex tensor from its real and imaginary parts, as a parametrisation of torch's."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """real + i imaginary."""
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The two parts."""
        return value.real.clone(), value.imag.clone()


# Parameters that must stay positive, as functions of parameters that may be anything


@dataclass(frozen=True)
class Positive:
    """values = exp(raw): for use inside a model, `ng.positive(params["V"])`; `ng.positive.inverse(start)` to begin.

    Train raw. Setting negative entries to zero after the step instead (projection) is right for a Euclidean step only:
    the closest feasible point in the metric G is another one, and a natural-gradient step that is cut off in the
    coordinates need not go downhill. The two-layer model of Karakida, Okada & Amari 2016 stays on its plateau that way.
    The metric sees through exp: the natural gradient's path is that of values until the step length counts.

    Example:
        >>> raw = ng.positive.inverse(torch.tensor([0.5, 2.0]))
        >>> ng.positive(raw)
        tensor([0.5000, 2.0000])
    """

    def __call__(self, raw: Tensor) -> Tensor:
        """exp(raw).

        Args:
            raw: Any shape.

        Raises:
            TypeError: For anything but a tensor.
        """
        if not isinstance(raw, Tensor):
            raise TypeError(f"raw is {type(raw).__name__}, expected a tensor: ng.positive.inverse(values) makes it")
        return raw.exp()

    def slope(self, raw: Tensor) -> Tensor:
        """d values / d raw, entry by entry: exp(raw).

        Args:
            raw: Any shape.
        """
        return raw.exp()

    def inverse(self, values: Tensor) -> Tensor:
        """raw with exp(raw) = values.

        Args:
            values: Any shape.

        Raises:
            ValueError: For an entry that is not positive and finite.
        """
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(f"values is {show_dtype(values)}, expected a floating-point tensor of positive entries")
        if not bool(((values > 0) & (values < torch.inf)).all()):
            low, high = float(values.min()), float(values.max())
            raise ValueError(
                f"values lie between {low:.3g} and {high:.3g}, expected positive, finite entries: exp never reaches 0; "
                "start small ones at 1e-3, say"
            )
        return values.log()


@dataclass(frozen=True)
class Square:
    """values = raw^2: reaches 0, where its slope vanishes too. Both signs of raw give one model."""

    def __call__(self, raw: Tensor) -> Tensor:
        """raw^2.

        Args:
            raw: Any shape.
        """
        return raw.square()

    def slope(self, raw: Tensor) -> Tensor:
        """d values / d raw, entry by entry: 2 raw.

        Args:
            raw: Any shape.
        """
        return 2 * raw

    def inverse(self, values: Tensor) -> Tensor:
        """raw >= 0 with raw^2 = values.

        Args:
            values: Any shape.

        Raises:
            ValueError: For a negative entry.
        """
        if not bool((values >= 0).all()):
            raise ValueError(f"values has entries down to {float(values.min()):.3g}, expected none below 0")
        return values.sqrt()


positive = Positive()
