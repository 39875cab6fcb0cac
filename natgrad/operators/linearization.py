"""A network's outputs near a point: J v and J^T w from a graph that is built once and used for every product."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.ground.derivatives import apply_linear, exact_derivatives
from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import write_choices
from natgrad.ground.pure import INSTEAD, Ancestors, PureModel, check_followed, map_tensors
from natgrad.ground.spaces import Params, Space
from natgrad.layers import Recording, record_pass

UNREACHED = (
    "the model's outputs do not depend on params: a metric needs outputs that move with them; look for a detach(), or "
    "for checkpoint(..., use_reentrant=True), whose graph hides the parameters (use_reentrant=False works)"
)

UNRECORDED = "torch.inference_mode() records no derivatives, of which a metric is made: use torch.no_grad() there"


class OutputMap:
    """params -> outputs as rows (R, m): a pure model followed by a family's layout of its outputs.

    The rows of one example lie together: R = b * positions.

    Args:
        pure: The model as a function of its parameters.
        rows: What turns the model's outputs into (R, m), one row per independent event (an example, a token).
        select: What is taken of the outputs first. Default: all.
    """

    def __init__(
        self, pure: PureModel, rows: Callable[[Any], Tensor], select: Callable[[Any], Any] | None = None
    ) -> None:
        self.pure, self.rows, self.select = pure, rows, select
        self.first: Any = None  # what was selected at the first evaluation, before the layout

    def __repr__(self) -> str:
        return write_choices(self, pure=self.pure, select=self.select)

    def of(self, pure: PureModel) -> OutputMap:
        """The same rows of another pure model.

        Args:
            pure: The other model.
        """
        return OutputMap(pure, self.rows, self.select)

    def __call__(self, params: Params) -> Tensor:
        """The outputs as rows, shape (R, m).

        Args:
            params: The parameters, by name.
        """
        outputs = self.pure(params)
        outputs = outputs if self.select is None else self.select(outputs)
        if self.first is None:
            self.first = map_tensors(outputs, torch.detach)
        return self.rows(outputs)


class Linearization:
    """f(theta) ~ f(theta_0) + J (theta - theta_0), J never formed.

    J^T w is a backward pass of the one forward graph. J v is the derivative of u -> J^T u, a backward pass of
    the backward graph: both graphs are built once, which makes J^T M J cost 1.25 gradients instead of 2.1 to 2.4.
    For convolutions a linear form is cheaper still, .8: after `linearise_after` products `torch.func.linearize`
    takes over (it costs 12 gradients to prepare, the check included). A network without double backward falls back
    to forward-mode products with a fresh graph each.

    Args:
        function: f, params -> outputs (R, m).
        params: theta_0, by name. It is copied.
        linearise_after: Number of products J v after which the linear form takes over. Default: never.
        recorded: True to record the layers' calls in the pass, for an operator that will need the layers' rows: `Rows`
            takes a pass of its own otherwise.

    Raises:
        ValueError: If the outputs are not finite, are empty or do not depend on the parameters.
    """

    def __init__(
        self,
        function: Callable[[Params], Tensor],
        params: Params,
        linearise_after: int | None = None,
        *,
        recorded: bool = False,
    ) -> None:
        self.space = Space(params)
        self.function = function
        self.linearise_after = linearise_after
        # copies: the operator stays that of this point when the parameters move on
        self.leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        model = None if self.origin is None else self.origin.pure.model
        self.recording: Recording | None = None
        if recorded and isinstance(model, nn.Module):
            self.recording = record_pass(model, self.space, lambda: function(self.leaves))
        with torch.enable_grad():
            self.graph = function(self.leaves) if self.recording is None else self.recording.outputs
        check_outputs(self.graph)
        check_followed(self.graph, self.leaves, model, function)
        self.outputs = self.graph.detach()
        self.products = 0
        self._pulled: tuple[Tensor, dict[str, Tensor]] | None = None
        self._forward: Callable[[Tensor], Tensor] | None = None

    def __repr__(self) -> str:
        return write_choices(self, size=self.space.size, outputs=tuple(self.outputs.shape), products=self.products)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has a graph of its own: a tensor's does not go with it."""
        build = partial(type(self), recorded=self.recording is not None)
        return build, (self.function, self._point(), self.linearise_after)

    @property
    def origin(self) -> OutputMap | None:
        """The output map that was linearised; None for any other function of the parameters."""
        inner = self.function.map if isinstance(self.function, PlainKernels) else self.function
        return inner if isinstance(inner, OutputMap) else None

    @property
    def examples(self) -> int:
        """Number of examples behind the rows of the outputs: the inputs' leading size if it divides them, else 1."""
        call = None if self.origin is None else self.origin.pure.call
        if call is None or not any(t.dim() > 0 for t in call.tensors()):
            return 1
        batch = call.batch()
        return batch if batch and len(self.outputs) % batch == 0 else 1

    def vjp(self, cotangent: Tensor) -> Tensor:
        """J^T w, shape (n,).

        Args:
            cotangent: w, shape (R, m).

        Raises:
            ValueError: If the outputs do not depend on the parameters.
        """
        return apply_linear(self._pull, self._push, cotangent)

    def _pull(self, cotangent: Tensor) -> Tensor:
        gradients = torch.autograd.grad(
            self.graph, list(self.leaves.values()), cotangent.to(self.graph.dtype), retain_graph=True, allow_unused=True
        )
        if all(gradient is None for gradient in gradients):
            raise ValueError(UNREACHED)
        return self.space.flatten(dict(zip(self.leaves, gradients, strict=True)))

    def vjp_batch(self, cotangents: Tensor) -> Tensor | None:
        """J^T w for several w by one batched backward pass, shape (k, n); None where an operation does not allow that.

        What an operation's rule for batches makes of it is to be checked against `vjp`: some are wrong.

        Args:
            cotangents: The w, shape (k, R, m).
        """
        leaves, given = list(self.leaves.values()), cotangents.to(self.graph.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an operation without a rule is repeated, and says so
                gradients = torch.autograd.grad(
                    self.graph, leaves, given, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except Exception:  # noqa: BLE001 - batched transforms fail on models in many ways
            return None
        count, rows = len(given), dict[str, Tensor]()
        for (name, leaf), part in zip(self.leaves.items(), gradients, strict=True):
            gradient = leaf.new_zeros(count, *leaf.shape) if part is None else part
            if gradient.shape != (count, *leaf.shape):  # nn.PReLU's gradient of one slope, for example
                return None
            rows[name] = gradient.reshape(count, -1)
        return torch.cat([rows[name] for name in self.space], dim=1).to(self.space.dtype)

    def jvp(self, vector: Tensor) -> Tensor:
        """J v, shape (R, m).

        Args:
            vector: v, shape (n,).

        Raises:
            RuntimeError: If the model supports neither double backward nor forward-mode derivatives.
        """
        self.space.check(vector)
        return apply_linear(self._push, self._pull, vector)

    def _push(self, vector: Tensor) -> Tensor:
        self.products += 1
        if self._forward is not None:
            return self._forward(vector)
        try:
            image = self._double_backward(vector)
        except RuntimeError as error:
            return self._fall_back(vector, error)
        if self.linearise_after is not None and self.products >= self.linearise_after:
            self._linearise()
        return image

    def _double_backward(self, vector: Tensor) -> Tensor:
        """d/du (J^T u) . v: linear in u, so the point u = 0 serves for every v."""
        if self._pulled is None:
            with torch.enable_grad():
                dummy = torch.zeros_like(self.graph, requires_grad=True)
                pulled = torch.autograd.grad(
                    self.graph, list(self.leaves.values()), dummy, create_graph=True, materialize_grads=True
                )
                # a parameter that the outputs do not reach has zeros without a graph
                reached = {name: u for name, u in zip(self.leaves, pulled, strict=True) if u.requires_grad}
                self._pulled = dummy, reached
        dummy, reached = self._pulled
        tangents = self.space.unflatten(vector)
        (image,) = torch.autograd.grad(
            list(reached.values()), dummy, [tangents[name] for name in reached], retain_graph=True
        )
        return image

    def _fall_back(self, vector: Tensor, error: RuntimeError) -> Tensor:
        """A graph without the fused kernels that lack second derivatives; then forward mode; then an error."""
        if "embedding_bag" not in str(error):  # its plain kernel costs no more
            say_once(
                "natgrad: an operation of this model has no double backward "
                f"({str(error).splitlines()[0]}); products use plain kernels or forward mode instead"
            )
        self.function, self.recording = PlainKernels(self.function), None
        with torch.enable_grad():
            self.graph, self._pulled = self.function(self.leaves), None
        with suppress(RuntimeError):
            return self._double_backward(vector)

        def product(tangent: Tensor) -> Tensor:
            return torch.func.jvp(self.function, (self._point(),), (self.space.unflatten(tangent),))[1].detach()

        try:
            image = product(vector)
        except (RuntimeError, NotImplementedError) as other:
            own = sorted(Ancestors.of(self.graph).opaque)
            also = f". {own} are autograd.Functions of its own: {INSTEAD}" if own else ""
            raise RuntimeError(
                f"the model supports neither double backward ({error}) nor forward-mode derivatives ({other}); "
                f"replace the operation named there, or use a structure that needs gradients only{also}"
            ) from error
        self._forward = product  # with a fresh graph each time
        return image

    def _linearise(self) -> None:
        """Take over with a linearised form, if it exists and agrees with double backward on random vectors."""
        # Constant folding loses in-place copies (circular padding) and gave wrong products. Stale memory may agree by
        # chance: the linear form sees the second vector before double backward does, and zeros in between.
        self.linearise_after = None
        generator = torch.Generator(self.space.device).manual_seed(0)
        n, dtype, device = self.space.size, self.space.dtype, self.space.device
        first, second = (torch.randn(n, generator=generator, dtype=dtype, device=device) for _ in range(2))
        expected = self._double_backward(first)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _, linear = torch.func.linearize(self.function, self._point())

            origin = self.origin

            def product(vector: Tensor) -> Tensor:
                # the linear form draws its dropout masks anew at every call: from the same state, then
                with nullcontext() if origin is None else origin.pure.random.replay():
                    return linear(self.space.unflatten(vector)).detach()

            images = [product(second), product(first), product(torch.zeros_like(first))]
        except Exception:  # noqa: BLE001 - tracing fails in many ways; the products at hand are right, only slower
            return
        known = [self._double_backward(second), expected, torch.zeros_like(expected)]
        tolerance = 1e3 * torch.finfo(expected.dtype).eps * expected.abs().max()
        if all(bool((a - b).abs().max() <= tolerance) for a, b in zip(images, known, strict=True)):
            self._pulled, self._forward = None, product

    def _point(self) -> dict[str, Tensor]:
        return {name: leaf.detach() for name, leaf in self.leaves.items()}


@dataclass(frozen=True)
class PlainKernels:
    """An output map evaluated by operations that every derivative passes through."""

    map: Callable[[Params], Tensor]

    def __call__(self, params: Params) -> Tensor:
        with exact_derivatives():
            return self.map(params)


@lru_cache(maxsize=64)
def say_once(message: str) -> None:
    """A warning, the first time that this message comes up in the process."""
    warnings.warn(message, stacklevel=2)


def check_outputs(outputs: Tensor) -> None:
    """ValueError unless outputs (R, m) exist, depend on the parameters, and are finite or -inf (masked logits)."""
    if outputs.numel() == 0:
        raise ValueError(f"outputs have shape {tuple(outputs.shape)}: the batch is empty; give at least one example")
    if not outputs.requires_grad:
        raise ValueError(UNREACHED if not torch.is_inference_mode_enabled() else UNRECORDED)
    if not all_finite(outputs) and not bool((outputs < torch.inf).all()):  # a NaN is not below either
        raise ValueError("the model's outputs are not finite: look for a NaN in the inputs, or lower the learning rate")
