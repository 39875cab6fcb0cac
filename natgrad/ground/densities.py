"""Unnormalised models: log p(x) up to a constant, its derivatives in x, its change when a bit is flipped."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.chains import Affine, Features, LayerChain, read_chain
from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.linalg import all_finite, is_concrete
from natgrad.ground.messages import Explained, show_shape, write_choices
from natgrad.ground.pure import Call, PureModel, check_call, full_precision, mixes_examples, run_detached
from natgrad.ground.spaces import Params, check_parameters

LogP = Callable[[Params, Tensor], Tensor]


class Density(Explained):
    """log p(x; params) + constant over batches X (b, ...), N variables per example.

    One method to write; the others come from derivatives of it, and a model with closed forms overrides them.

    Example:
        >>> class Gaussian(ng.Density):
        ...     def log_p(self, params, inputs):
        ...         return -0.5 * (params["precision"] * inputs.square()).sum(1)
        >>> X = torch.ones(2, 3)
        >>> Gaussian().scores({"precision": torch.tensor([1.0, 2.0, 3.0])}, X)
        tensor([[-1., -2., -3.],
                [-1., -2., -3.]])
    """

    call_hint = "; a function log_p(params, x) or a module of energies needs none"

    @abstractmethod
    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        """log p of every example, up to a constant.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, ...).

        Returns:
            Shape (b,).
        """

    def scores(self, params: Params, inputs: Tensor) -> Tensor:
        """d log p / dx_i of every example.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, ...).

        Returns:
            Shape (b, N).
        """
        with exact_derivatives():

            def sum_log_p(x: Tensor) -> Tensor:
                return self.log_p(params, x).sum()

            return torch.func.grad(sum_log_p)(inputs).flatten(1)

    def curvatures(self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None) -> Tensor:
        """d^2 log p / dx_i^2 of every example.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, ...).
            dims: The variables i. None: all.

        Returns:
            Shape (b, len(dims)).
        """
        return self.scores_and_curvatures(params, inputs, dims)[1]

    def scores_and_curvatures(
        self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores (b, N) and curvatures (b, len(dims)): one backward pass of the score per variable, all at once.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, ...).
            dims: The variables i of the curvatures. None: all.
        """
        scores, pull = vjp(lambda x: self.scores(params, x), inputs)

        def second(unit: Tensor) -> Tensor:
            return pull(unit.expand_as(scores))[0].flatten(1) @ unit

        return scores, torch.func.vmap(second, randomness="same")(unit_vectors(scores, dims)).mT

    def score_jacobian(self, params: Params, inputs: Tensor) -> Tensor | None:
        """d score_i / d params, params flat in their own order; None where no closed form is known.

        Args:
            params: Name -> tensor, K numbers in all.
            inputs: X, shape (b, ...).

        Returns:
            Shape (b, N, K), or None.
        """
        return None

    def ratios(self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None) -> Tensor:
        """log p(x) - log p(x with bit i flipped), x in {0, 1}.

        Args:
            params: Name -> tensor.
            inputs: X, shape (b, ...).
            dims: The variables i. None: all.

        Returns:
            Shape (b, len(dims)).
        """
        flat = inputs.flatten(1)

        def flip_unit(unit: Tensor) -> Tensor:
            return self.log_p(params, (flat + unit * (1 - 2 * flat)).view(inputs.shape))

        there = torch.func.vmap(flip_unit, randomness="same")(unit_vectors(flat, dims))
        return self.log_p(params, inputs).unsqueeze(1) - there.mT

    def ratio_jacobian(self, params: Params, inputs: Tensor) -> Tensor | None:
        """d ratio_i / d params, params flat in their own order; None where no closed form is known.

        Args:
            params: Name -> tensor, K numbers in all.
            inputs: X, shape (b, ...).

        Returns:
            Shape (b, N, K), or None.
        """
        return None


def unit_vectors(like: Tensor, dims: Sequence[int] | None) -> Tensor:
    """e_i of the variables i of a batch (b, N), (len(dims), N)."""
    units = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    return units if dims is None else units[torch.as_tensor(dims, device=like.device)]


class Plain(Density):
    """A function log_p(params, x) of one example x (N,) with a scalar back.

    Args:
        function: The function.
    """

    def __init__(self, function: LogP) -> None:
        self.function = function

    def __repr__(self) -> str:
        return write_choices(self, function=self.function)

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        return torch.func.vmap(self._one, in_dims=(None, 0), randomness="same")(params, inputs)

    def _one(self, params: Params, x: Tensor) -> Tensor:
        value = self.function(params, x)
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise ValueError(
                f"log_p(params, x) returned {show_shape(value)} for one example x of shape {tuple(x.shape)}, expected "
                "a scalar tensor: the library batches it"
            )
        return value


class Energy(Density):
    """A module that maps X (b, ...) to energies (b,) or (b, 1): log p(x) = -energy(x).

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __repr__(self) -> str:
        return write_choices(self, module=self.module)

    def log_p(self, params: Params, inputs: Tensor) -> Tensor:
        with exact_derivatives():
            energies = PureModel(self.module, Call((inputs,)))(params)
        return -read_energies(energies, len(inputs))

    def scores_and_curvatures(
        self, params: Params, inputs: Tensor, dims: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both, (b, N) and (b, len(dims)): through the layers of an `nn.Sequential`, else as for any density."""
        state = {name: p.detach() for name, p in self.module.named_parameters()} | dict(params)
        chain = chain_of(self.module, state, inputs)
        if chain is None:
            return super().scores_and_curvatures(params, inputs, dims)
        with full_precision(params):
            return chain.scores_and_curvatures(state, inputs, dims)


def chain_of(module: nn.Module, state: Params, inputs: Tensor) -> LayerChain | None:
    """An energy as layers that take X (b, N) to (b, 1) in one dtype; None where it is not made of them."""
    if inputs.dim() != 2 or {inputs.dtype} != {p.dtype for p in state.values()}:
        return None
    chain = read_chain(module)
    if chain is None or isinstance(chain.parts[0], Features):
        return None
    layers = [state[part.weight] for part in chain.parts if isinstance(part, Affine)]
    widths = [inputs.shape[1], *map(len, layers)]
    fit = all(weight.shape[1] == width for weight, width in zip(layers, widths, strict=False))
    return chain if fit and widths[-1] == 1 else None


def read_energies(outputs: Any, count: int) -> Tensor:
    """An energy network's outputs as (b,). ValueError for another shape."""
    if not isinstance(outputs, Tensor) or outputs.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"the energy network returned {show_shape(outputs)} for {count} examples, expected one energy each: "
            f"({count},) or ({count}, 1); log p(x) = -energy(x)"
        )
    return outputs.reshape(-1)


class Score(nn.Module):
    """x -> d log p / dx for an energy E(x), log p = -E: a module with the energy's parameters, (b, ...) -> (b, ...).

    With it denoising score matching is a regression, and everything that trains a regression trains an energy. The
    Fisher metric of the Gaussian in the example is the score metric.

    Args:
        energy: A module, (b, ...) -> (b,) or (b, 1).

    Example:
        >>> energy = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 1))
        >>> score = ng.Score(energy)
        >>> opt = ng.kfac(score, nn.MSELoss(), lr=0.1)
        >>> x, z, noise = torch.randn(20, 2), torch.randn(20, 2), 0.1
        >>> opt.loss(score(x + noise * z), -z / noise).backward()
        >>> opt.step()
    """

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        if not isinstance(energy, nn.Module):
            raise TypeError(f"energy is {type(energy).__name__}, expected a torch.nn.Module of energies (b,) or (b, 1)")
        self.energy = energy

    def forward(self, x: Tensor) -> Tensor:
        """d log p / dx.

        Args:
            x: Shape (b, ...).

        Returns:
            The shape of x.
        """
        if any(not is_concrete(t) for t in (x, *self.energy.parameters())):  # inside torch.func

            def sum_log_p(y: Tensor) -> Tensor:
                return -self.energies(y).sum()

            return torch.func.grad(sum_log_p)(x)
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            value = -self.energies(point).sum()
            (score,) = torch.autograd.grad(value, point, create_graph=True, materialize_grads=True)
        return score if torch.is_grad_enabled() else score.detach()

    def energies(self, x: Tensor) -> Tensor:
        """E of every example.

        Args:
            x: Shape (b, ...).

        Returns:
            Shape (b,).
        """
        with exact_derivatives():
            return read_energies(self.energy(x), len(x))


def vjp(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """The value there, and the function cotangent -> (its image,)."""
    pair = torch.func.vjp(function, at)
    return pair[0], pair[1]


def as_density(log_p: Density | nn.Module | LogP) -> Density:
    """A function log_p(params, x), an `nn.Module` of energies, or a `Density` as it is.

    Args:
        log_p: Any of these.

    Raises:
        TypeError: For anything else.
    """
    if isinstance(log_p, Density):
        return log_p
    if isinstance(log_p, nn.Module):
        return Energy(log_p)
    if not callable(log_p) or isinstance(log_p, type):
        hint = "; did you forget the parentheses?" if isinstance(log_p, type) else ""
        raise TypeError(
            f"log_p is {log_p!r}, expected a function log_p(params, x) -> scalar, an nn.Module whose outputs are "
            f"energies, or a Density{hint}"
        )
    return Plain(log_p)


def check_density(density: Density, params: Params, inputs: Any) -> Tensor:
    """X as given, after the checks that every use of a density has. ValueError naming what is wrong."""
    check_parameters(params)
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        raise ValueError(
            f"X has shape {show_shape(inputs)}, expected a tensor of examples (b, N); one example is X.unsqueeze(0)"
        )
    if inputs.shape[0] == 0 or inputs[0].numel() == 0:
        raise ValueError(f"X has shape {tuple(inputs.shape)}: it is empty; give at least one example of one variable")
    model = density.module if isinstance(density, Energy) else density.log_p
    check_call(model, Call((inputs,)), params)
    if mixes_examples(model):
        raise ValueError(
            "the energy network has a batch norm in training mode: one example's energy depends on the others, and "
            "log_p(x) is not a function of x; use model.eval(), or a layer or group norm"
        )
    if is_concrete(inputs) and not all_finite(inputs):
        raise ValueError("X holds a NaN or an infinity; remove these examples first, or mask the variables they are in")
    return inputs


@contextmanager
def guard_derivatives(density: Density, params: Params, inputs: Tensor) -> Generator[None]:
    """Inside, derivatives are exact; an error of log_p on X that one example raises too is a ValueError about both."""
    try:
        with exact_derivatives():
            yield
    except (RuntimeError, IndexError):
        try:
            run_detached(lambda: density.log_p(params, inputs[:1]))
        except (RuntimeError, IndexError) as cause:
            raise ValueError(
                f"log_p fails on X of shape {tuple(inputs.shape)} ({str(cause).splitlines()[0]}): does the number of "
                "variables fit the model's? Derivatives inside of log_p are taken by torch.func.grad"
            ) from cause
        raise


def check_mask(mask: Tensor | None, inputs: Tensor) -> Tensor | None:
    """The mask as (b, N) or (1, N) of weights 0 and 1. ValueError for another shape, or if it hides everything."""
    if mask is None:
        return None
    size = inputs[0].numel()
    each = isinstance(mask, Tensor) and mask.shape in ((size,), inputs.shape[1:])
    flat = mask.reshape(1, -1) if each else mask.flatten(1) if isinstance(mask, Tensor) and mask.dim() > 1 else None
    if flat is None or flat.shape not in ((1, size), (len(inputs), size)):
        raise ValueError(
            f"mask has shape {show_shape(mask)}, expected a tensor ({size},) for the variables that count, or one of "
            f"X's shape, {tuple(inputs.shape)}"
        )
    if is_concrete(flat) and not (is_binary(flat) and bool(flat.any())):
        raise ValueError("mask must hold True for the variables that count and False for the others, at least one True")
    return flat.to(inputs.dtype)


def check_weights(weights: Tensor | None, inputs: Tensor) -> Tensor | None:
    """The weights (b,) scaled to sum to one. ValueError for another shape, a negative one, or a sum of zero."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or weights.shape != (len(inputs),):
        came = f"has shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"is {type(weights).__name__}"
        raise ValueError(f"weights {came}, expected a tensor ({len(inputs)},): how often each example of X came")
    if is_concrete(weights) and not (bool((weights >= 0).all()) and 0 < float(weights.sum()) < torch.inf):
        raise ValueError("weights must be counts or probabilities: finite, none below 0, at least one above")
    shares = weights.to(inputs)
    return shares / shares.sum()


def check_entries(params: Params, shapes: Mapping[str, tuple[int, ...]], hint: str) -> None:
    """ValueError unless the parameters have these names and shapes."""
    came = {name: tuple(value.shape) for name, value in params.items()}
    if came != shapes:
        raise ValueError(f"params are {came}, expected {shapes}{hint}")


def check_continuous(inputs: Tensor) -> None:
    """ValueError for integers, and for data of zeros and ones."""
    if not inputs.is_floating_point():
        raise ValueError(f"X is {inputs.dtype}, expected floating point: score matching differentiates in x")
    if is_concrete(inputs) and is_binary(inputs) and 0 < float(inputs.mean()) < 1:
        raise ValueError(
            "X holds only 0 and 1: score matching is for continuous x; use ng.ratio_matching_loss and ng.ratio_metric, "
            "or the denoising loss, which adds noise"
        )


def check_binary(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """X in floating point (in dtype if it was not). ValueError unless every entry is 0 or 1."""
    if is_concrete(inputs) and not is_binary(inputs):
        low, high = float(inputs.min()), float(inputs.max())
        hint = "map -1 to 0" if (low, high) == (-1.0, 1.0) else "use ng.score_matching_loss for continuous data"
        raise ValueError(f"X has entries between {low:.3g} and {high:.3g}, expected 0 and 1 only; {hint}")
    return inputs if inputs.is_floating_point() else inputs.to(dtype)


def is_binary(inputs: Tensor) -> bool:
    """Whether every entry is 0 or 1."""
    return bool(((inputs == 0) | (inputs == 1)).all())
