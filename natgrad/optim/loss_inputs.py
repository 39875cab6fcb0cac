"""How the tensors that a loss was computed on came from the model's outputs: picked from them, or made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from natgrad.pure import Select, leaves, map_tensors

LINEAR = re.compile(
    "Add|Sub|Rsub|Neg|View|UnsafeView|Reshape|ReshapeAlias|Squeeze|Unsqueeze|Transpose|T|Permute|Select|Slice|Index|"
    "IndexSelect|Gather|Take|MaskedSelect|Expand|Repeat|Clone|Alias|ToCopy|Cat|Stack|Split|SplitWithSizes|UnsafeSplit|"
    "Unbind|Flip|Roll|Sum|Mean|Diagonal|Tril|Triu|Unfold|AsStrided|MaskedFill|ConstantPadNd|Cumsum|Trace|Copy|"
    "CopyBackwards|CopySlices|_DDPSink|Conj|Real|IndexAdd|IndexPut|Scatter"
)
"""Operations that are linear in all of their tensors. Masks and indices count as data."""

PRODUCTS = re.compile("Mul|Div|Mm|Bmm|Mv|Dot|Addmm|Baddbmm|Addmv|NativeDropout")
"""Operations that are linear in one of their tensors while the others stay as they are."""

UNKNOWN = (
    "optimizer.loss was given a tensor that is not {what}: the metric and the trial losses would be those of another "
    "problem; move what lies between into the model's forward, or give the optimizer outputs=lambda out: ... with it"
)
NONLINEAR = (
    "optimizer.loss was given a nonlinear function of the model's outputs ({names}), which cannot be evaluated at "
    "other parameters: move it into the model's forward, give the optimizer outputs=lambda out: ... with it, or call "
    "optimizer.step(closure)"
)
OTHER_BATCH = (
    "optimizer.loss was given a function of the model's outputs that is known on its own batch alone, and the metric "
    "or the trial points are on other data: move the function into the model's forward, or give the optimizer "
    "outputs=lambda out: ... with it"
)


@dataclass(frozen=True)
class Made:
    """What a pass returned.

    Attributes:
        passed: The pass.
        values: The tensors that it returned, detached.
        versions: Of these tensors, at that time.
    """

    passed: Any
    values: list[Tensor]
    versions: tuple[int, ...]


def mark(outputs: Any, passed: Any, key: object) -> None:
    """Write into the graph of a pass's outputs where they come from. The graph itself keeps it, nothing else does."""
    tensors = list(leaves(outputs))
    made = Made(passed, [t.detach() for t in tensors], tuple(t._version for t in tensors))
    for index, tensor in enumerate(tensors):
        if tensor.grad_fn is not None:
            marks_of(tensor.grad_fn).setdefault(key, {})[tensor.output_nr] = made, index


@dataclass(frozen=True)
class Picked:
    """Tensors of the outputs as they are.

    Attributes:
        tree: What was given to the loss, with a tensor's place for each tensor.
    """

    tree: Any

    def __call__(self, outputs: Any) -> Any:
        values = list(leaves(outputs))
        return map_tensors(self.tree, lambda place: values[int(place)])


class Linearised:
    """What was given to the loss as an affine function of the outputs: given + P (outputs - values).

    P is known from the graph between the two, by derivatives of derivatives, which the user's backward pass leaves
    alone. Exact at other parameters if everything in between is affine; else to first order, as a metric wants it.

    Args:
        given: What the loss was computed on, detached tensors in any nesting.
        places: Which of the outputs' tensors it was made of.
        values: What they were.
        edges: Where they lie in the graph.
    """

    def __init__(
        self,
        outputs: Any,
        places: Sequence[int],
        values: Sequence[Tensor],
        edges: Sequence[GradientEdge],
    ) -> None:
        tensors = [t for t in leaves(outputs) if t.requires_grad]
        self.given = map_tensors(outputs, torch.detach)
        self.moving = [t.requires_grad for t in leaves(outputs)]
        self.places, self.values = list(places), list(values)
        with torch.enable_grad():
            self.duals = [torch.zeros_like(t, requires_grad=True) for t in tensors]
            self.pulled = torch.autograd.grad(
                tensors, list(edges), self.duals, create_graph=True, materialize_grads=True
            )
            self.tangents = [torch.zeros_like(t, requires_grad=True) for t in self.pulled]
            self.pushed = torch.autograd.grad(
                self.pulled, self.duals, self.tangents, create_graph=True, materialize_grads=True
            )

    def __call__(self, outputs: Any) -> Any:
        found = list(leaves(outputs))
        parts = [found[place] for place in self.places if place < len(found)]
        if [t.shape for t in parts] != [t.shape for t in self.values]:
            raise ValueError(OTHER_BATCH)
        moved = [t - value.to(t.dtype) for t, value in zip(parts, self.values, strict=True)]
        images = iter(push_through(self, moved))
        flags = iter(self.moving)
        return map_tensors(self.given, lambda t: t + next(images) if next(flags) else t)

    def push(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """P v, tensor by tensor of what was given to the loss, in the dtype of v."""
        found = self._through(self.pulled, self.duals, tangents)
        return tuple(t.to(tangents[0].dtype) for t in found)

    def pull(self, cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """P^T w, tensor by tensor of the outputs, in the dtype of w."""
        found = self._through(self.pushed, self.tangents, cotangents)
        return tuple(t.to(cotangents[0].dtype) for t in found)

    def _through(self, images: Sequence[Tensor], points: list[Tensor], along: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = [(image, v.to(image.dtype)) for image, v in zip(images, along, strict=True) if image.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(point) for point in points)
        outputs, vectors = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, points, vectors, retain_graph=True, materialize_grads=True)


def push_through(route: Linearised, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """P v, differentiably."""
    apply: Callable[..., tuple[Tensor, ...]] = getattr(Push, "apply")  # noqa: B009 (torch declares no types of it)
    return apply(route, *tangents)


def pull_through(route: Linearised, cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """P^T w, differentiably."""
    apply: Callable[..., tuple[Tensor, ...]] = getattr(Pull, "apply")  # noqa: B009
    return apply(route, *cotangents)


class Push(torch.autograd.Function):
    """P v as a function of v, with derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, route: Linearised, *tangents: Tensor) -> tuple[Tensor, ...]:
        """P v."""
        ctx.route = route
        return route.push(tangents)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """P^T w."""
        return None, *pull_through(ctx.route, cotangents)


class Pull(torch.autograd.Function):
    """P^T w as a function of w, with derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, route: Linearised, *cotangents: Tensor) -> tuple[Tensor, ...]:
        """P^T w."""
        ctx.route = route
        return route.pull(cotangents)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        """P v."""
        return None, *push_through(ctx.route, tangents)


@dataclass(frozen=True)
class Route:
    """How what a loss was computed on came from the outputs of passes.

    Attributes:
        passes: Those that the loss was made of.
        select: From their outputs to what the loss was computed on; None for the outputs themselves.
        problem: What keeps the loss from being evaluated at other parameters, a sentence; empty where nothing does.
        unsure: What was given to the loss, where the graph does not tell how it came from the outputs: compare before
            you believe it.
        stale: True if the outputs were changed in place since.
    """

    passes: tuple[Any, ...]
    select: Select | None = None
    problem: str = ""
    unsure: Any = None
    stale: bool = False

    def renew(self, found: Any) -> None:
        """Take the passes' outputs from a pass that was done again: the user has written over them since."""
        assert isinstance(self.select, Linearised)
        values, pairs = list(leaves(found)), zip(self.select.places, self.select.values, strict=True)
        self.select.values = [values[place].to(old.dtype) for place, old in pairs]


def find_route(outputs: Any, key: object, params: Iterable[Tensor]) -> Route | None:
    """How `outputs` came from marked passes, read off their graph; None if no marked pass is part of it.

    Args:
        outputs: What a loss was computed on.
        key: Under which passes were marked.
        params: The model's. One that is reached besides the passes makes the route unknown: `problem` says so.
    """
    tensors = list(leaves(outputs))
    direct = [mark_of(t.grad_fn, t.output_nr, key) for t in tensors]
    if tensors and all(found is not None for found in direct):
        made = unique(found[0] for found in direct if found is not None)
        places = [place_of(found, made) for found in direct if found is not None]
        whole = len(tensors) == 1 and isinstance(outputs, Tensor) and [len(one.values) for one in made] == [1]
        numbers = iter(places)
        tree = map_tensors(outputs, lambda _: torch.tensor(next(numbers)))
        return Route(tuple(one.passed for one in made), None if whole else Picked(tree))
    graph = walk([(t.grad_fn, t.output_nr) for t in tensors if t.grad_fn is not None], key)
    if not graph.sources:
        return None
    made = unique(found[0] for found in graph.sources.values())
    passes = tuple(one.passed for one in made)
    own = {id(p) for p in params}
    if any(id(leaf) in own for leaf in graph.variables):
        return Route(
            passes, problem=UNKNOWN.format(what="made of the model's outputs alone"), unsure=detach_outputs(outputs)
        )
    return linearise_graph(outputs, graph, made, passes)


def linearise_graph(outputs: Any, graph: Graph, made: list[Made], passes: tuple[Any, ...]) -> Route:
    """The route through a graph that has passes' outputs for its only sources."""
    places = [place_of(found, made) for found in graph.sources.values()]
    edges = [GradientEdge(node, number) for node, number in graph.sources]
    nonlinear = sorted({name_of(node) for node in graph.nodes if node in graph.reaching and not graph.affine(node)})
    values = [found[0].values[found[1]] for found in graph.sources.values()]
    changed = any(found[0].values[found[1]]._version != found[0].versions[found[1]] for found in graph.sources.values())
    try:
        select = Linearised(outputs, places, values, edges)
    except RuntimeError as error:
        reason = f"made of the model's outputs in a way that can be differentiated twice ({str(error).splitlines()[0]})"
        return Route(passes, problem=UNKNOWN.format(what=reason), unsure=detach_outputs(outputs))
    problem = NONLINEAR.format(names=", ".join(nonlinear)) if nonlinear else ""
    return Route(passes, select, problem, stale=changed)


@dataclass(frozen=True)
class Graph:
    """The part of an autograd graph that lies between marked outputs and a loss.

    Attributes:
        sources: Marked outputs by node and number.
        nodes: What lies above them.
        reaching: Nodes that lead to one of them.
        variables: Leaves that are reached otherwise.
    """

    sources: Mapping[tuple[Node, int], tuple[Made, int]]
    nodes: list[Node]
    reaching: set[Node]
    variables: list[Tensor]

    def affine(self, node: Node) -> bool:
        """Whether a node's operation is affine in what leads to the sources."""
        name = name_of(node)
        used = [
            i
            for i, (below, number) in enumerate(node.next_functions)
            if below is not None and (below in self.reaching or (below, number) in self.sources)
        ]
        if LINEAR.fullmatch(name):
            return True
        return bool(PRODUCTS.fullmatch(name)) and len(used) == 1 and (name != "Div" or used == [0])


def walk(roots: Iterable[tuple[Node | None, int]], key: object) -> Graph:
    """The graph above the marked outputs that the roots come from."""
    queue, sources, order = list(roots), dict[tuple[Node, int], tuple[Made, int]](), dict[Node, None]()
    above, variables = dict[Node, set[Node]](), list[Tensor]()
    low = set[Node]()
    while queue:
        node, number = queue.pop()
        assert node is not None
        found = mark_of(node, number, key)
        if found is not None:
            sources[node, number] = found
            continue
        if node in order:
            continue
        order[node] = None
        leaf = getattr(node, "variable", None)
        variables += [] if leaf is None else [leaf]
        for below, next_number in node.next_functions:
            if below is None:
                continue
            queue.append((below, next_number))
            if mark_of(below, next_number, key) is not None:
                low.add(node)
            else:
                above.setdefault(below, set()).add(node)
    reaching, queue_up = set[Node](), list(low)
    while queue_up:
        node = queue_up.pop()
        if node not in reaching:
            reaching.add(node)
            queue_up += above.get(node, ())
    return Graph(sources, list(order), reaching, variables)


def mark_of(node: Node | None, number: int, key: object) -> tuple[Made, int] | None:
    """The pass that a place in the graph is an output of, and which; None for any other place."""
    return None if node is None else marks_of(node).get(key, {}).get(number)


def marks_of(node: Node) -> dict[Any, Any]:
    """The notes that a place in the graph keeps as long as it lives."""
    return node.metadata  # type: ignore[return-value]


def name_of(node: Node) -> str:
    """AddmmBackward0 -> Addmm."""
    return re.sub(r"Backward\d*$", "", node.name().split("::")[-1])


def place_of(found: tuple[Made, int], made: Sequence[Made]) -> int:
    """Where an output lies among the tensors of all passes in order."""
    before = next(i for i, one in enumerate(made) if one is found[0])
    return sum(len(one.values) for one in made[:before]) + found[1]


def unique(made: Iterable[Made]) -> list[Made]:
    """Each once, in order."""
    return list({id(one): one for one in made}.values())


def detach_outputs(outputs: Any) -> Any:
    """The same without its graph."""
    return map_tensors(outputs, torch.detach)


def check_same(route: Route, found: Any, chosen: Select | None) -> None:
    """Check that a loss was computed on what the model gives again, within the precision of its dtype.

    Args:
        route: How it came from the outputs.
        found: The model's outputs.
        chosen: What is chosen of them; None for all.

    Raises:
        ValueError: If it was not.
    """
    found = found if chosen is None else chosen(found)
    pairs = list(leaves(route.unsure)), list(leaves(found))
    if len(pairs[0]) != len(pairs[1]) or not all(are_close(*pair) for pair in zip(*pairs, strict=True)):
        raise ValueError(route.problem or UNKNOWN.format(what="what the model returned"))


def are_close(given: Tensor, found: Tensor) -> bool:
    """Whether two tensors agree to the square root of their coarser dtype's precision, relative to the largest one."""
    if given.shape != found.shape:
        return False
    eps = max(torch.finfo(t.dtype).eps for t in (given, found))
    error, size = (given - found).abs(), found.abs()
    return not given.numel() or bool(error.max() <= 10 * eps**0.5 * size.max()) or not bool(error.isfinite().all())
