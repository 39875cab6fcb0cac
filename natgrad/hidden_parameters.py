"""Parameters that outputs depend on and their graph does not know: a derivative of zero that is not known to be one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from natgrad.pure import RandomState, mark_evaluation, run_alone, run_detached
from natgrad.spaces import Params
from natgrad.typed_torch import measure_norm

HIDDEN = (
    "the outputs depend on {names} in a way that their graph does not show, so that the derivative would count as "
    "zero: look for torch.utils.checkpoint.checkpoint(..., use_reentrant=True), where use_reentrant=False works; for "
    "an autograd.Function or a hook that reads parameters which are not among its arguments: give them to apply(...); "
    "or for a list of parameters that the model keeps beside its modules: read them from the modules in each forward"
)
MEANT = "; where that is meant, as by a detach(), leave them out of params"
INSTEAD = (
    "where the same can be computed by torch's operations, such as by torchdiffeq's odeint in place of odeint_adjoint, "
    "take that"
)
REENTRANT = (
    "the model checkpoints activations with use_reentrant=True, through which a derivative that leaves .grad alone "
    "cannot go: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def check_followed(
    outputs: Tensor,
    leaves: Mapping[str, Tensor],
    model: object = None,
    evaluate: Callable[[Params], Tensor] | None = None,
) -> None:
    """ValueError, with their names, for parameters that outputs depend on and whose derivative the graph lacks.

    A graph of torch's own operations that holds every parameter is believed. Otherwise `backward` runs from the
    outputs, which may reach the module's own parameters too, and what arrives is compared with the derivative; every
    `.grad` is put back. A function's parameters are not known beside the leaves: those that its graph lacks are moved,
    and the outputs must stay.

    outputs: Any shape, with a graph, which is kept.
    """
    graph = Ancestors.of(outputs)
    missing = [name for name, leaf in leaves.items() if id(leaf) not in graph.variables]
    if not (missing or graph.opaque):
        return
    own = dict(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else {}
    with run_alone():  # `.grad` of the model's own parameters is taken away for a while
        hidden = compare_backward(outputs, leaves, own, graph) if own or graph.opaque else []
    if not (hidden or own) and graph.opaque and evaluate is not None:
        hidden = [name for name in missing if moves_outputs(name, leaves, outputs, evaluate)]
        meant = MEANT
    else:
        meant = ""
    if hidden:
        raise ValueError(HIDDEN.format(names=sorted(hidden)) + meant)


@dataclass(frozen=True)
class Ancestors:
    """What a tensor was computed from.

    Args:
        variables: The leaves of its graph by `id`.
        opaque: The functions in the graph that are written in Python, whose backward passes may do anything.
    """

    variables: Mapping[int, Tensor]
    opaque: frozenset[str]

    @staticmethod
    def of(outputs: Tensor) -> Ancestors:
        """Of this tensor."""
        queue, seen = [outputs.grad_fn], set[Node]()
        variables, opaque = dict[int, Tensor](), set[str]()
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            # what torch.compile wrote hides nothing, and goes backward once only
            if isinstance(node, BackwardCFunction) and not node.name().startswith("CompiledFunction"):
                opaque.add(node.name().removesuffix("Backward"))
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                variables[id(leaf)] = leaf
            queue += [below for below, _ in node.next_functions]
        return Ancestors(variables, frozenset(opaque))


def compare_backward(
    outputs: Tensor, leaves: Mapping[str, Tensor], own: Mapping[str, Tensor], graph: Ancestors
) -> list[str]:
    """The names of the parameters whose `.grad` after a backward pass is not the derivative of the outputs."""
    places = torch.arange(outputs.numel(), device=outputs.device, dtype=torch.float64)
    cotangent, random = places.cos().reshape(outputs.shape).to(outputs.dtype), RandomState.capture(outputs.device)
    touched = [*graph.variables.values(), *leaves.values(), *own.values()]
    before = [tensor.grad for tensor in touched]
    try:
        for tensor in touched:
            tensor.grad = None
        with mark_evaluation(), random.replay():
            torch.autograd.backward(outputs, cotangent, retain_graph=True)
        arrived = {name: leaf.grad for name, leaf in leaves.items()}
        hidden = [name for name in leaves if name in own and own[name].grad is not None]
    finally:
        for tensor, gradient in zip(touched, before, strict=True):
            tensor.grad = gradient
    if hidden or not graph.opaque:
        return hidden
    try:
        with mark_evaluation(), random.replay():
            known = torch.autograd.grad(outputs, list(leaves.values()), cotangent, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise ValueError(REENTRANT) from error
        raise
    return [name for name, gradient in zip(leaves, known, strict=True) if not agree(arrived[name], gradient)]


def agree(arrived: Tensor | None, derivative: Tensor | None) -> bool:
    """Whether two gradients are one, as far as their dtype tells; None stands for zero."""
    if arrived is None:
        return derivative is None or not bool(derivative.any())
    if derivative is None:
        return not bool(arrived.any())
    arrived, derivative = arrived.to_dense(), derivative.to_dense()
    gap, size = measure_norm(arrived - derivative), measure_norm(arrived)
    return not bool(gap > 10 * torch.finfo(arrived.dtype).eps ** 0.5 * size)  # NaN: not known


def moves_outputs(
    name: str, leaves: Mapping[str, Tensor], outputs: Tensor, evaluate: Callable[[Params], Tensor]
) -> bool:
    """Whether the outputs change with a parameter."""
    point = {key: leaf.detach() for key, leaf in leaves.items()}
    size = point[name].abs().mean().clamp(min=torch.finfo(point[name].dtype).eps ** 0.5)
    steps = torch.arange(point[name].numel(), device=size.device).cos().reshape(point[name].shape)
    point[name] = point[name] + (0.1 * size * (2 + steps)).to(point[name].dtype)
    moved = run_detached(lambda: evaluate(point))
    return moved.shape != outputs.shape or not torch.equal(moved.nan_to_num(), outputs.detach().nan_to_num())
