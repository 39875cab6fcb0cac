"""A metric: which G, as a function of the parameters and the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion
from natgrad.ground.checks import check_integer
from natgrad.ground.messages import Explained, explain_calls, write_choices
from natgrad.ground.pure import (
    Call,
    Labelled,
    Model,
    PureModel,
    RandomState,
    Select,
    as_call,
    check_call,
    check_select,
    copy_tensors,
    leaves,
    mixes_examples,
    pure_model,
    run_detached,
)
from natgrad.ground.spaces import Params, check_parameters, hint_at_parameters
from natgrad.operators import Chunked, Facts, Form, Linearization, Operator, OutputMap, Pullback, Scaled

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def hint_at_targets(metric: Any, *args: Any, **kwargs: Any) -> str:
    """Where targets belong in a call of a metric's `at`."""
    if metric.needs_targets:
        return "; targets come with their inputs, at(ng.trainable(model), (x, y))"
    return "; this metric takes no targets, at(ng.trainable(model), x), and several inputs as a tuple"


explain_at = partial(explain_calls, hint=hint_at_targets)
"""Decorator of a metric's `at`: calls that do not fit are a sentence."""


class Metric(Explained):
    """G(theta) as an operator, a mean over examples."""

    needs_targets: bool = False
    """Whether inputs come as (inputs, targets)."""

    is_joined: bool = False
    """Whether its operators are over the examples of all processes already, of a model that several of them train."""

    def __repr__(self) -> str:
        own = fields(self) if is_dataclass(self) else ()
        return write_choices(self, **{field.name: getattr(self, field.name) for field in own})

    @abstractmethod
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        """G at these parameters on these inputs, as an operator.

        Args:
            params: Name -> tensor, such as `ng.trainable(model)`.
            inputs: A tensor (b, ...), a tuple of arguments or a dict of keyword arguments. A model that takes one dict
                gets it as ({...},). Where `needs_targets` it is (inputs, targets).
            random: The random state at which dropout is replayed, default the state now.

        Returns:
            A mean over examples, of size n, the number of entries of `params`.

        Raises:
            ValueError: For an empty batch, non-finite outputs, outputs that do not depend on `params`, unknown
                parameter names or mixed devices.
        """

    def read_examples(self, inputs: Any) -> Tensor | None:
        """The examples by whose spread lengths are measured; None where lengths are in nats.

        Args:
            inputs: As `at` takes them.

        Returns:
            Shape (b, N), or None.
        """
        return None

    def count_examples(self, inputs: Any) -> int:
        """How many examples the mean is over.

        Args:
            inputs: As `at` takes them.
        """
        if isinstance(inputs, Labelled):
            return as_call(inputs.inputs).batch()
        return as_call(inputs[0] if self.needs_targets else inputs).batch()

    def add_up(self, params: Params, inputs: Any) -> tuple[Operator, float]:
        """G, and c with which c G is the information of all examples together. Default: their number, times the nats.

        Args:
            params: As `at` takes them.
            inputs: As `at` takes them.
        """
        operator = self.at(params, inputs)
        return operator, self.count_examples(inputs) * operator.nats

    @property
    def inner(self) -> Metric:
        """The metric of this process's own examples, where this one is of several processes' examples; else itself."""
        return self

    def carry(self, metric: Metric) -> Metric:
        """Another metric, over the same processes' examples as this one.

        Args:
            metric: Of this process's own examples.
        """
        return metric


@dataclass(frozen=True, repr=False)
class PullbackMetric(Metric):
    """A form on the model's outputs, pulled back: E_x[J^T M J]. Subclasses say which form.

    Args:
        model: A module, or a function f(params, x).
        criterion: What the outputs mean.
        chunk_size: Examples per graph, to bound memory. Each product then pays for fresh graphs. None: all at once.
        outputs: A function that picks what the criterion is of, where the model returns more than that.
    """

    model: Model
    criterion: Criterion
    chunk_size: int | None = None
    outputs: Select | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_model(self.model)
        check_chunks(self.chunk_size)
        check_select(self.outputs)

    @abstractmethod
    def form(self, linearization: Linearization, outputs: Any, targets: Any, seed: int) -> tuple[Form, Tensor | None]:
        """The form and the weights of the rows.

        Args:
            linearization: The model at its parameters and inputs.
            outputs: As the model returned them.
            targets: The targets of the loss, or None.
            seed: For a form that draws.

        Returns:
            The form, and weights (R,) of the rows; None in their place stands for equal weights.
        """

    def layout(self, outputs: Any) -> Tensor:
        """The model's outputs as rows (R, m).

        Args:
            outputs: As the model returned them.
        """
        check_has_outputs(outputs)
        return self.criterion.family.rows(outputs)

    def seeds(self, count: int) -> list[int]:
        """One seed per chunk, for forms that draw.

        Args:
            count: Number of chunks.
        """
        return [0] * count

    @explain_at
    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        data, targets = self._split(inputs)
        pure = build_pure_model(self.model, params, data, random)
        if self.chunk_size is None:
            return self._term(params, pure, targets, self.seeds(1)[0])
        return self._build_chunks(params, pure, targets, self.chunk_size)

    def add_up(self, params: Params, inputs: Any) -> tuple[Operator, float]:
        return add_up_rows(self, params, *self._split(inputs), self.criterion, self.model, self.outputs)

    def _split(self, inputs: Any) -> tuple[Any, Any]:
        if self.needs_targets:
            return split_targets(inputs)
        return (inputs.inputs, copy_tensors(inputs.targets)) if isinstance(inputs, Labelled) else (inputs, None)

    def _term(self, params: Params, pure: PureModel, targets: Any, seed: int) -> Pullback:
        outputs = OutputMap(pure, self.layout, self.outputs)
        linearization = Linearization(outputs, params, linearise_after(self.model))
        form, weights = self.form(linearization, outputs.first, targets, seed)
        return Pullback(linearization, form, weights, Facts(nats=self.criterion.nats(outputs.first)))

    def _build_chunks(self, params: Params, pure: PureModel, targets: Any, size: int) -> Operator:
        if mixes_examples(self.model):
            raise ValueError(
                f"chunk_size={size} would change the statistics of a batch norm in training mode; use chunk_size=None, "
                "or model.eval()"
            )
        if self.needs_targets:
            raise ValueError(f"chunk_size={size} is for metrics without targets; use chunk_size=None with targets")
        models = [PureModel(self.model, call, pure.random) for call in pure.call.chunks(size)]
        point = copy_tensors(params)  # the parameters move on between products
        if len(models) > 1:
            self._check_apart(pure, point, size)
        parts: list[tuple[Any, float]] = [(None, model.call.batch() / pure.call.batch()) for model in models]
        if targets is not None:  # rows weigh as in the loss over all of them

            def compute(model: PureModel) -> Any:
                returned = model(point)
                return returned if self.outputs is None else self.outputs(returned)

            parts = self.criterion.cut([run_detached(partial(compute, model)) for model in models], targets)
        builders: list[Callable[[], Operator]] = []
        for model, (part, share), seed in zip(models, parts, self.seeds(len(models)), strict=True):
            if share:
                builders.append(partial(scale_term, partial(self._term, point, model, part, seed), share))
        return Chunked(builders)

    def _check_apart(self, pure: PureModel, point: Params, size: int) -> None:
        """ValueError where what the model returns for an example changes with the one before it, by the same draws."""

        def compute(*places: int) -> Tensor:
            returned = PureModel(self.model, pure.call.take(torch.tensor(places)), pure.random)(point)
            rows = self.layout(returned if self.outputs is None else self.outputs(returned))
            return rows[len(rows) // 2 :]

        try:
            beside, alone = (run_detached(partial(compute, place, size)) for place in (0, size))
        except RuntimeError:  # a model of so many examples and no others
            return
        if float((beside - alone).norm()) > torch.finfo(alone.dtype).eps ** 0.5 * float(alone.norm()):
            raise ValueError(
                f"chunk_size={size} cuts the inputs along their first dimension, and the outputs of an example depend "
                "on those before it, as where that dimension is time: put the examples first, or use chunk_size=None"
            )


def add_up_rows(
    metric: Metric, params: Params, inputs: Any, targets: Any, criterion: Criterion, model: Model, select: Select | None
) -> tuple[Operator, float]:
    """`Metric.add_up` of a mean over the rows of a model's outputs, with the weights that targets have in their sum."""
    returned = build_pure_model(model, params, inputs, None)(params)
    outputs = returned if select is None else select(returned)
    if targets is None:
        return metric.at(params, inputs), float(len(criterion.family.rows(outputs)))
    _, counted, count = criterion.add_up(outputs, targets)
    pair = inputs, targets if counted is None else counted
    return metric.at(params, pair if metric.needs_targets else Labelled(*pair)), count


def scale_term(build: Callable[[], Operator], share: float) -> Operator:
    """A chunk's operator, for its share of all examples."""
    return Scaled(build(), share)


def check_model(model: Any, inputs: str = "x") -> None:
    """TypeError for what is no model."""
    if not callable(model):
        raise TypeError(
            f"model is {type(model).__name__}, expected a torch.nn.Module or a function f(params, {inputs})"
            f"{hint_at_parameters(model)}"
        )


def check_chunks(chunk_size: int | None) -> None:
    """ValueError unless None or an integer >= 1."""
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, hint=" or None")


def check_has_outputs(outputs: Any) -> None:
    """ValueError unless the model returned tensors with an example dimension."""
    tensors = list(leaves(outputs))
    if not tensors or any(t.dim() == 0 for t in tensors):
        came = f"a scalar among {len(tensors)} tensor(s)" if tensors else type(outputs).__name__
        raise ValueError(
            f"the model's outputs are {came}, expected tensors (b, ...): a metric needs the outputs that parametrise "
            "the targets' distribution, not the loss"
        )


def split_targets(inputs: Any) -> tuple[Any, Any]:
    """(inputs, targets) as users pass them to a metric that needs targets; the targets copied, as inputs are later."""
    pair: Any = inputs
    if not isinstance(inputs, tuple) or len(pair) != 2:
        raise ValueError(
            f"inputs is {type(pair).__name__}, expected a tuple (inputs, targets): this metric depends on targets"
        )
    return pair[0], copy_tensors(pair[1])


def build_pure_model(model: Model, params: Params, inputs: Any, random: RandomState | None) -> PureModel:
    """The pure function behind a metric, checked at the door."""
    check_parameters(params)
    call = as_call(inputs)
    check_call(model, call, params)
    if any(t.dim() > 0 and t.shape[0] == 0 for t in call.tensors()):
        raise ValueError("inputs is an empty batch; give at least one example")
    # copies, as of the parameters: the operator stays that of these inputs when the next batch is written over them
    return pure_model(model, copy_tensors(inputs), random)


def linearise(
    model: Model,
    params: Params,
    inputs: Any,
    random: RandomState | None,
    layout: Callable[[Any], Tensor],
    outputs: Select | None = None,
    *,
    recorded: bool = False,
) -> Linearization:
    """The model's outputs as rows, linear in the parameters, checked at the door."""
    pure = build_pure_model(model, params, inputs, random)
    return Linearization(OutputMap(pure, layout, outputs), params, linearise_after(model), recorded=recorded)


def linearise_after(model: Model) -> int | None:
    """When a linearised form pays: for convolutional nets after some 25 products, never for dense ones (measured)."""
    convolutions = [m for m in model.modules() if isinstance(m, CONVOLUTIONS)] if isinstance(model, nn.Module) else []
    if any(convolution.padding_mode != "zeros" for convolution in convolutions):
        return None  # torch.func.linearize loses the copies of circular padding: a wrong product
    return 25 if convolutions else None


class Scores:
    """The form of given score vectors, M_i = S_i S_i^T with S (R, m, k); counted (R,) is 0 for ignored rows."""

    def __init__(self, scores: Tensor, counted: Tensor | None = None) -> None:
        self.scores = scores
        self.counted = torch.ones_like(scores[:, 0, 0]) if counted is None else counted

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """S S^T t for every row: (R, m) -> (R, m)."""
        return torch.einsum("imk,ink,in->im", self.scores, self.scores, tangents)

    def root(self, outputs: Tensor) -> Tensor:
        """S itself, (R, m, k)."""
        return self.scores


class Diagonals:
    """The form diag(d) on every row of outputs.

    Args:
        entries: d >= 0, shape (R, m).
    """

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries

    def __repr__(self) -> str:
        return write_choices(self, shape=tuple(self.entries.shape))

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """d o t, entry by entry, shape (R, m).

        Args:
            outputs: Shape (R, m).
            tangents: t, shape (R, m).
        """
        return self.entries * tangents

    def root(self, outputs: Tensor) -> Tensor:
        """diag(sqrt d), shape (R, m, m).

        Args:
            outputs: Shape (R, m).
        """
        return torch.diag_embed(self.entries[: len(outputs)].sqrt())


def pull_back(
    function: Callable[..., Tensor],
    params: Params,
    inputs: Call,
    random: RandomState | None,
    form: Callable[[Tensor], Form] = lambda rows: Diagonals(torch.ones_like(rows)),
) -> Pullback:
    """A form on the rows (R, m) of function(params, *inputs), pulled back to the parameters, as a mean over rows."""
    linearization = Linearization(OutputMap(PureModel(function, inputs, random), take_rows), params)
    return Pullback(linearization, form(linearization.outputs))


def take_rows(outputs: Tensor) -> Tensor:
    """Outputs that are rows already."""
    return outputs
