"""The user's passes and losses: heard by hooks, recorded until the step, and which outputs a loss came from."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

from natgrad.families import Criterion
from natgrad.ground.graph_nodes import LINEAR, PRODUCTS, kind_of, leaf_of, notes_of
from natgrad.ground.pure import (
    Call,
    HeldState,
    Hook,
    Passes,
    RandomState,
    Select,
    count_writes,
    is_evaluating,
    is_transformed,
    keep,
    leaves,
    list_modules,
    listen_to,
    map_tensors,
    pure_model,
    refuse_jagged,
    run_detached,
    version_of,
)
from natgrad.ground.typed_torch import hook_gradient, keep_uncompiled, measure_norm
from natgrad.ground.whole_tensors import any_split, local_part
from natgrad.metrics import Metric

UNKNOWN = (
    "optimizer.loss was given a tensor that is not {what}: the metric and the trial losses would be those of another "
    "problem; move what lies between into the model's forward, or give the optimizer outputs=lambda out: ... with it"
)
COMPILED = (
    "if it, or a model of the same layers, was compiled and called before the optimizer was built, call "
    "torch.compiler.reset() once"
)
COMPUTED = (
    "optimizer.loss was given outputs of the model at other parameters than its own, which were computed from them: "
    "the metric and the trial losses would be those of another problem; write the whole computation as a function "
    "f(params, x) and give its metric to ng.NaturalGradient(model, ng.gauss_newton(f, criterion)), or take ng.kfac"
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
class Selection:
    """Tensors of the outputs as they are."""

    tree: Any  # what was given to the loss, with a tensor's place for each tensor

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
        tensors = list(leaves(outputs))
        parts = [tensors[place] for place in self.places if place < len(tensors)]
        if [t.shape for t in parts] != [t.shape for t in self.values]:
            raise ValueError(OTHER_BATCH)
        moved = [t - value.to(t.dtype) for t, value in zip(parts, self.values, strict=True)]
        images = iter(carry_through(self, False, moved))
        flags = iter(self.moving)
        return map_tensors(self.given, lambda t: t + next(images) if next(flags) else t)

    def carry(self, back: bool, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """P v, tensor by tensor of what was given to the loss; back: P^T w, of the outputs. In the vectors' dtype."""
        images, points = (self.pushed, self.tangents) if back else (self.pulled, self.duals)
        pairs = [(image, v.to(image.dtype)) for image, v in zip(images, vectors, strict=True) if image.requires_grad]
        products = tuple(torch.zeros_like(point) for point in points)
        if pairs:
            outputs, along = zip(*pairs, strict=True)
            products = torch.autograd.grad(outputs, points, along, retain_graph=True, materialize_grads=True)
        return tuple(t.to(vectors[0].dtype) for t in products)


def carry_through(route: Linearised, back: bool, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`Linearised.carry`, differentiably."""
    apply: Callable[..., tuple[Tensor, ...]] = getattr(JacobianProduct, "apply")  # noqa: B009 (torch declares no types of it)
    return apply(route, back, *vectors)


class JacobianProduct(torch.autograd.Function):
    """P v as a function of v, or P^T w of w, with derivatives of any order: each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, route: Linearised, back: bool, *vectors: Tensor) -> tuple[Tensor, ...]:
        """P v or P^T w."""
        ctx.route, ctx.back = route, back
        return route.carry(back, vectors)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor) -> tuple[Tensor | None, ...]:
        """P^T w or P v."""
        return None, None, *carry_through(ctx.route, not ctx.back, vectors)


@dataclass(frozen=True)
class Route:
    """How what a loss was computed on came from the outputs of passes."""

    passes: tuple[RecordedPass, ...]  # those that the loss was made of
    select: Select | None = None  # from their outputs to what the loss was computed on; None for the outputs themselves
    # what keeps the loss from being evaluated at other parameters, a sentence; empty where nothing does
    problem: str = ""
    # what was given to the loss, where the graph does not tell how it came from the outputs: to be compared with them
    unsure: Any = None
    stale: bool = False  # True if the outputs were changed in place since

    def renew(self, outputs: Any) -> None:
        """Take the passes' outputs from a pass that was done again: the user has written over them since."""
        assert isinstance(self.select, Linearised)
        values, pairs = list(leaves(outputs)), zip(self.select.places, self.select.values, strict=True)
        self.select.values = [values[place].to(old.dtype) for place, old in pairs]


def find_route(outputs: Any, key: object, params: Iterable[Tensor]) -> Route | None:
    """How `outputs` came from marked passes, read off their graph; None if no marked pass is part of it."""
    tensors = list(leaves(outputs))
    direct = [source for t in tensors if (source := pass_at(t.grad_fn, t.output_nr, key)) is not None]
    if isinstance(outputs, Tensor) and direct and direct[0][0].is_tensor:
        return Route((direct[0][0],))
    if tensors and len(direct) == len(tensors):
        passes = unique(passed for passed, _ in direct)
        numbers = iter([place_of(source, passes) for source in direct])
        tree = map_tensors(outputs, lambda _: torch.tensor(next(numbers)))
        return Route(passes, Selection(tree))
    graph = walk_to_passes([(t.grad_fn, t.output_nr) for t in tensors if t.grad_fn is not None], key)
    if not graph.sources:
        return None
    passes = unique(passed for passed, _ in graph.sources.values())
    if not {id(p) for p in params}.isdisjoint(map(id, graph.variables)):
        return Route(
            passes,
            problem=UNKNOWN.format(what="made of the model's outputs alone"),
            unsure=map_tensors(outputs, torch.detach),
        )
    return linearise_graph(outputs, graph, passes)


def linearise_graph(outputs: Any, graph: Graph, passes: tuple[RecordedPass, ...]) -> Route:
    """The route through a graph that has passes' outputs for its only sources."""
    places = [place_of(source, passes) for source in graph.sources.values()]
    edges = [GradientEdge(node, number) for node, number in graph.sources]
    nonlinear = sorted({kind_of(node) for node in graph.nodes if node in graph.reaching and not graph.affine(node)})
    returned = [passed.returned[i] for passed, i in graph.sources.values()]
    values, changed = [t for t, _ in returned], any(version_of(t) != version for t, version in returned)
    try:
        select = Linearised(outputs, places, values, edges)
    except RuntimeError as error:
        reason = f"made of the model's outputs in a way that can be differentiated twice ({str(error).splitlines()[0]})"
        return Route(passes, problem=UNKNOWN.format(what=reason), unsure=map_tensors(outputs, torch.detach))
    problem = NONLINEAR.format(names=", ".join(nonlinear)) if nonlinear else ""
    return Route(passes, select, problem, stale=changed)


@dataclass(frozen=True)
class Graph:
    """The part of an autograd graph that lies between marked outputs and a loss."""

    sources: Mapping[tuple[Node, int], tuple[RecordedPass, int]]  # marked outputs by node and number
    nodes: list[Node]  # what lies above them
    reaching: set[Node]  # nodes that lead to one of them
    variables: list[Tensor]  # leaves that are reached otherwise

    def affine(self, node: Node) -> bool:
        """Whether a node's operation is affine in what leads to the sources."""
        kind = kind_of(node)
        used = [
            i
            for i, (below, number) in enumerate(node.next_functions)
            if below is not None and (below in self.reaching or (below, number) in self.sources)
        ]
        return kind in LINEAR or (kind in PRODUCTS and len(used) == 1 and (kind != "Div" or used == [0]))


def walk_to_passes(roots: Iterable[tuple[Node | None, int]], key: object) -> Graph:
    """The graph above the marked outputs that the roots come from."""
    queue, sources, order = list(roots), dict[tuple[Node, int], tuple[RecordedPass, int]](), dict[Node, None]()
    above, variables = dict[Node, set[Node]](), list[Tensor]()
    low = set[Node]()
    while queue:
        node, number = queue.pop()
        assert node is not None
        source = pass_at(node, number, key)
        if source is not None:
            sources[node, number] = source
            continue
        if node in order:
            continue
        order[node] = None
        leaf = leaf_of(node)
        variables += [] if leaf is None else [leaf]
        for below, next_number in node.next_functions:
            if below is None:
                continue
            queue.append((below, next_number))
            if pass_at(below, next_number, key) is not None:
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


def pass_at(node: Node | None, number: int, key: object) -> tuple[RecordedPass, int] | None:
    """The pass that a place in the graph is an output of, and which; None for any other place, and after its step."""
    source = None if node is None else notes_of(node).get(key, {}).get(number)
    return source if source is not None and source[0].returned else None


def place_of(source: tuple[RecordedPass, int], passes: Sequence[RecordedPass]) -> int:
    """Where an output lies among the tensors of all passes in order."""
    return sum(len(passed.returned) for passed in passes[: passes.index(source[0])]) + source[1]


def unique(passes: Iterable[RecordedPass]) -> tuple[RecordedPass, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(passes))


def check_same(route: Route, outputs: Any, chosen: Select | None) -> None:
    """Check that a loss was computed on what the model gives again, within the precision of its dtype."""
    outputs = outputs if chosen is None else chosen(outputs)
    pairs = list(leaves(route.unsure)), list(leaves(outputs))
    if len(pairs[0]) != len(pairs[1]) or not all(are_close(*pair) for pair in zip(*pairs, strict=True)):
        compiled = "; if the model was compiled, give the optimizer the compiled model"
        raise ValueError(route.problem or UNKNOWN.format(what="what the model returned since the last step") + compiled)


def are_close(given: Tensor, output: Tensor) -> bool:
    """Whether two tensors agree to the square root of their coarser dtype's precision, relative to the largest one."""
    if given.shape != output.shape:
        return False
    eps = max(torch.finfo(t.dtype).eps for t in (given, output))
    error, size = (given - output).abs(), output.abs()
    return not given.numel() or bool(error.max() <= 10 * eps**0.5 * size.max()) or not bool(error.isfinite().all())


# One forward pass and one loss, as they are kept until the step: inputs, random state, targets. No graph

NOT_REPEATED = (
    "the model gave other outputs when its last pass was done again at the same parameters and inputs: a metric or a "
    "trial loss would be that of another function. Put back were the global generators of torch, random and NumPy, "
    "buffers, and generators and states in attributes of its modules: let it draw from one of these and keep its "
    "state there, or use an optimizer that does no pass again, such as ng.kfac(model, loss). Parameters that were "
    "changed since by way of .data have the same effect"
)


class RepeatError(ValueError):
    """A pass that was done again gave something else."""


@dataclass(frozen=True)
class Data:
    """Inputs and targets for a metric or for trial points, and the random state to replay on them."""

    inputs: Any
    targets: Any
    random: RandomState | None


@dataclass(eq=False)
class RecordedPass:
    """One training-mode forward pass: its inputs, and the random state that it started from.

    random: None for a pass that nobody does again. rounded: the precision of autocast, 0 without. computed: True if a
    parameter was the result of a computation, by `torch.func.functional_call`. returned: what it gave, with the
    tensors' versions; empty until then, and after its step. is_tensor: True if that is a tensor itself, False for one
    or several in a container.
    """

    call: Call
    random: RandomState | None
    versions: tuple[int, ...]
    modes: tuple[bool, ...] | None
    rounded: float = 0.0
    computed: bool = False
    returned: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])
    is_tensor: bool = False

    def keep_outputs(self, outputs: Any, key: str) -> None:
        """Note what it gave, and write into its graph where it comes from. The graph keeps that, nothing else does."""
        self.is_tensor, tensors = isinstance(outputs, Tensor), list(leaves(outputs))
        self.returned = [(t.detach(), version_of(t)) for t in tensors]
        for index, tensor in enumerate(tensors):
            if tensor.grad_fn is not None:
                notes_of(tensor.grad_fn).setdefault(key, {})[tensor.output_nr] = self, index

    def release(self) -> None:
        """Let go of the batch."""
        self.call, self.random, self.returned = Call(()), None, []

    def check_repeated(self, outputs: Any) -> None:
        """RepeatError unless the pass, done again at the same parameters, gave the same but for round-off.

        outputs: of the other pass. What the user has written over since is not compared, and nothing where another
        optimizer has moved the parameters.
        """
        if self.random is None or self.random.held is None or self.is_behind():
            return
        tensors = list(leaves(outputs))
        for (given, version), again in zip(self.returned, tensors, strict=False):
            if version == version_of(given) and not is_same(given, again, self.rounded):
                raise RepeatError(NOT_REPEATED)
        if self.returned and len(self.returned) != len(tensors):
            raise RepeatError(NOT_REPEATED)

    def is_behind(self) -> bool:
        """Whether the parameters were written to since."""
        held = None if self.random is None else self.random.held
        return held is not None and held.writes != count_writes(list_modules(held.model))

    @contextmanager
    def modes_of(self, model: nn.Module) -> Generator[None]:
        """Inside, every submodule is in the mode (train or eval) that it had during the pass, where that is known."""
        if self.modes is None:
            yield
            return
        now = modes_of(model)
        try:
            set_modes(model, self.modes)
            yield
        finally:
            set_modes(model, now)

    def check(self) -> None:
        """ValueError if the inputs were changed in place since: the metric would belong to other data."""
        if self.versions != versions_of(self.call):
            raise ValueError(
                "the inputs of the model's last forward were changed in place before step(); copy them, or call "
                "optimizer.observe(inputs) with the data that the metric should use"
            )


@dataclass(eq=False)
class Loss:
    """One loss in units of its mean."""

    criterion: Criterion  # what it is
    value: Tensor  # of the mean
    rows: int  # what it weighs: its rows; 0 where no target counts
    scale: float  # what the criterion's value was divided by to be a mean
    summed: bool  # True if that is what reduction='sum' multiplied it by
    count: float = math.nan  # what it is a mean over; NaN where nobody asked
    outputs: Any = None  # what it was computed on, detached; None in evaluation mode
    targets: Any = None  # its targets
    versions: tuple[int, ...] = ()  # of these tensors, at that time
    route: Route | None = None  # how what it was computed on came from the passes' outputs; None in evaluation mode
    followed: bool = True  # True if the graph was asked for the route; else the route is a guess
    slope: Tensor | None = None  # the derivative of what went backward in it; None until it did
    repeated: bool = False  # True once its passes were done again, and gave what they had given

    @property
    def passes(self) -> tuple[RecordedPass, ...]:
        """Those that it was made of."""
        return () if self.route is None else self.route.passes

    @property
    def problem(self) -> str:
        """What keeps it from being evaluated at other parameters; empty where nothing does."""
        return "" if self.route is None else self.route.problem

    @property
    def dtype(self) -> torch.dtype:
        """Of the outputs."""
        return next(leaves(self.outputs)).dtype

    @property
    def divisor(self) -> float:
        """What reduction='sum' multiplied it by, else 0."""
        return self.scale if self.summed else 0.0

    @property
    def weight(self) -> float:
        """What it weighs beside others: what it is a mean over, as far as that is known; 0 where no target counts."""
        if not self.rows:
            return 0.0
        return (0.0 if math.isnan(self.count) else self.count) or self.divisor or float(self.rows)

    def ask_count(self) -> None:
        """Count the targets that it is a mean over, where nobody did. Those written over since stay uncounted."""
        if math.isnan(self.count) and self.outputs is not None and self.versions == versions_of(Call((self.targets,))):
            self.count = self.criterion.count(self.outputs, self.targets)
            self.rows = self.rows if self.count else 0

    def check(self) -> None:
        """ValueError if inputs or targets were changed in place since."""
        for passed in self.passes:
            passed.check()
        if self.versions != versions_of(Call((self.targets,))):
            raise ValueError("the targets of the last loss were changed in place before step(); copy them")

    def data(self) -> Data:
        """Its inputs and targets. ValueError if they changed."""
        self.check()
        passes = self.passes
        if any(passed.random is None for passed in passes):
            raise ValueError("the last forward pass was not kept to be done again: no step asked for it")
        if len(passes) == 1:
            return Data(passes[0].call, self.targets, passes[0].random)
        if not passes:
            raise ValueError(
                "what the last loss was computed on came from no call of the model itself: call model(x), whose "
                "forward may return log p(x), rather than a method such as model.log_prob(x)"
            )
        several = Passes(tuple(passed.call for passed in passes), tuple(passed.random for passed in passes))
        return Data(several, self.targets, passes[0].random)

    def release(self) -> None:
        """Let go of the batch: who keeps the loss keeps its graph, with what is hooked to it and written there."""
        for passed in self.passes:
            passed.release()
        self.outputs = self.targets = self.route = None

    def settle(self, model: nn.Module, params: Mapping[str, Tensor], chosen: Select | None) -> Select | None:
        """What turns the model's outputs into what the loss was computed on, once the passes were done again.

        They must give what they gave: RepeatError where the model is not a function of what can be put back.

        chosen: the optimizer's own `outputs`, for a loss that was not followed through its graph. ValueError where that
        is another thing.
        """
        route = self.route or Route(())
        route = route if self.followed else replace(route, unsure=self.outputs)
        if self.repeated or not route.passes:
            return route.select
        data = self.data()
        with route.passes[0].modes_of(model):
            results = run_detached(lambda: pure_model(model, data.inputs, data.random)(dict(params)))
        for passed, outputs in zip(route.passes, (results,) if len(route.passes) == 1 else results, strict=True):
            passed.check_repeated(outputs)
        if route.stale:
            route.renew(results)
            route = replace(route, stale=False)
        elif route.unsure is not None:
            check_same(route, results, chosen)
            route = Route(route.passes, chosen)
        self.route, self.followed, self.repeated = route, True, True
        return route.select


def function_of(model: Any, data: Data, select: Select | None) -> Callable[[dict[str, Tensor]], Any]:
    """What a loss is computed on, as a function of the parameters: what `select` makes of a pass on these data."""
    pure = pure_model(model, data.inputs, data.random)
    return pure if select is None else lambda params: select(pure(params))


def part(data: Data, size: int, seed: int, last: bool = False) -> Data:
    """`size` of the examples, inputs and targets together: the first of a drawn order, or its last."""
    call = Call((data.inputs, data.targets))
    examples = call.batch()
    unlike = [tuple(t.shape) for t in leaves(data.targets) if t.dim() > 0 and len(t) != examples]
    if unlike and size < examples:
        raise ValueError(
            f"targets has shape {unlike[0]}, expected ({examples}, ...): {size} examples are drawn along the first "
            f"dimension of the model's inputs, which have {examples} there; put the examples first in both, as with "
            "batch_first=True, or leave metric_batch and search_batch out"
        )
    inputs, targets = call.sample(size, seed, last).args
    return Data(inputs, targets, data.random)


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """The mode of every submodule, in the order of `modules()`."""
    return tuple(module.training for module in model.modules())


def set_modes(model: nn.Module, modes: tuple[bool, ...]) -> None:
    """Set the mode of every submodule, in the order of `modules()`."""
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training


def rounding(inputs: Sequence[Tensor]) -> float:
    """The precision of the autocast that holds now, 0 without.

    inputs: of the pass.
    """
    device = inputs[0].device.type if inputs else "cpu"
    return torch.finfo(torch.get_autocast_dtype(device)).eps if torch.is_autocast_enabled(device) else 0.0


def is_same(given: Tensor, output: Tensor, rounded: float) -> bool:
    """Whether two tensors are one but for round-off, in root mean square: a deep network may blow it up in single rows.

    rounded: the precision of autocast in the first.
    """
    if given.shape != output.shape or not given.is_floating_point():
        return given.shape == output.shape
    eps = max(rounded, *(torch.finfo(t.dtype).eps for t in (given, output)))
    error, size = (measure_norm(t.double().nan_to_num()) for t in (given - output, output))
    return bool(error <= eps**0.5 * size)


def versions_of(call: Call) -> tuple[int, ...]:
    """In-place version counters of the inputs; 0 for inference tensors, which have none."""
    return tuple(map(version_of, call.tensors()))


# What the user's own pass saw: inputs, random state, targets. Nothing of it holds a graph

KEYS = itertools.count()
"""Under which optimizers write passes into graphs, one each."""
BATCHES = itertools.count()
"""One for each time that gradients were cleared."""


class BatchRecord:
    """What happened since the last step: the last training pass, the losses, data to observe.

    Attributes:
        last: The last training pass.
        losses: Those that `backward` went through since the gradients were cleared, as often as it did. A loss that was
            only looked at (validation, logging) is none of them.
        computed: The training losses since the last step, but those whose gradients were cleared.
        outputs: The optimizer's own choice among the model's outputs.
        batch: Another number each time that the gradients were cleared.
        density: The name of the unnormalised model that the metric belongs to; empty for a model with outputs.
        is_stale: True if the gradient is a sum with that of the step before.
        watched: The parameters whose gradients tell when they were cleared. Besides them a loss depends on nothing but
            passes.
        key: Under which passes are written into the graphs of their outputs.
        begins: What is called before a training pass.
        observed: Data for the metric, in place of the pass's own.
        searched: Data for trial points, in place of the pass's own.
        floor: The least damping on observed data.
        repeats: True once a closure was called again, and gave what it had given.
        keeps: False while no pass is to be done again: random states and the model's attributes are not copied then.
    """

    def __init__(
        self, outputs: Select | None = None, watched: Iterable[Tensor] = (), *, maximize: bool = False
    ) -> None:
        self.maximize = maximize
        self.outputs, self.key = outputs, f"natgrad.{next(KEYS)}"
        self.watched: list[Tensor] = list(watched)
        self.returned: tuple[type, list[weakref.ref[Tensor]]] | None = None
        self._warned = self.repeats = False
        self.density = ""
        self.begins: weakref.WeakMethod[Callable[[], None]] | None = None
        self._held: HeldState | None = None
        self.keeps = True
        self.last: RecordedPass | None = None
        self.computed: list[Loss] = []
        self.losses: list[Loss] = []
        self.clear()

    def clear(self, moved: Iterable[Tensor] = ()) -> None:
        """Forget everything, so that nothing of a batch outlives its step, but the gradients that `moved` followed."""
        for loss in [*self.losses, *self.computed[-1:], *(each for each in self.computed if each.slope is not None)]:
            loss.release()
        if self.last is not None:
            self.last.release()
        self._stepped = [(weakref.ref(p.grad), p.grad._version) for p in moved if p.grad is not None]
        self.last, self.computed = None, []
        self.forget_gradients()
        self.observed: Data | None = None
        self.floor = 0.0
        self.searched: Data | None = None

    def forget_gradients(self) -> None:
        """The gradients are cleared: forget the losses that they came from, but for the last, which tells of them."""
        self.computed = [loss for loss in self.computed[:-1] if loss.slope is None] + self.computed[-1:]
        self.batch = next(BATCHES)
        self.is_stale, self.losses = False, []
        self._going = False  # whether a backward pass that reached a loss is under way
        self._left: set[tuple[int, int]] = set()  # the marks of the gradients at its end
        # the marks at its beginning, and the losses before it with their slopes
        self._before: tuple[set[tuple[int, int]], list[tuple[Loss, Tensor | None]]] = set(), []
        self._kept_back = False  # whether `fully_shard` then had them aside, to be averaged after a later one

    @property
    def scale(self) -> float:
        """What to divide the gradient by: under reduction='sum' the sum of the micro-batches' counts; -1 to maximise.

        0 stands for 1.

        Where another optimizer's loss went backward, that of the losses computed here counts.
        """
        total = sum(loss.divisor for loss in self.losses or self.computed)
        return total or (-1.0 if self.maximize else 0.0)

    def mean_loss(self) -> Tensor | None:
        """The mean over the rows of this step's losses, NaN where no target counts; None if none was told."""
        losses = self.losses or self.computed
        if not losses:
            return None
        parts = [loss.value * loss.weight for loss in losses if loss.rows]
        return torch.stack(parts).sum() / self.weight if parts else losses[0].value * math.nan

    @property
    def weight(self) -> float:
        """What the losses of this step are a mean over."""
        return sum(loss.weight for loss in self.losses or self.computed)

    @property
    def backward_losses(self) -> list[Loss]:
        """The training losses that went backward, once each."""
        return [*dict.fromkeys(loss for loss in self.losses if loss.route is not None)]

    def used_losses(self) -> list[Loss]:
        """The losses of this step: those that went backward, or the last one if none is known to have."""
        return self.backward_losses or self.computed[-1:]

    @property
    def last_told(self) -> Loss | None:
        """The last of the losses of this step."""
        used = self.used_losses()
        return used[-1] if used else None

    def find_pass(self) -> RecordedPass | None:
        """The pass that the gradient belongs to: the last loss's, else the last one. ValueError if its data changed."""
        loss = self.last_told
        chosen = loss.passes[0] if loss is not None and loss.passes else self.last
        if loss is not None:
            loss.check()
        if chosen is not None:
            chosen.check()
        return chosen

    def whole(self) -> Data:
        """All of the pass that the gradient belongs to. ValueError if there was none."""
        last = self.find_pass()
        if last is None:
            if self.density:
                raise ValueError(
                    f"no inputs for the metric: no loss of its log p, {self.density}, went backward. Give one and the "
                    "same function to ng.score_metric(log_p) and ng.score_matching_loss(log_p, params, X), since two "
                    "functions that are written alike are two densities; or call optimizer.observe(X)"
                )
            raise ValueError(
                "no inputs for the metric: the model has had no forward pass in training mode since the last step; "
                "call model.train() and the model itself (not a copy of it, and outside of torch.func.vmap, grad and "
                "their like), or optimizer.observe(inputs); to train in evaluation mode on purpose, build the "
                f"optimizer with train_in_eval=True; {COMPILED}"
            )
        loss = self.last_told
        if loss is not None and loss.passes:
            return loss.data()
        return Data(last.call, None if loss is None else loss.targets, last.random)

    def count_examples(self) -> int:
        """Examples of the passes that the gradient belongs to."""
        passes = {id(passed): passed for loss in self.used_losses() for passed in loss.passes}
        known = list(passes.values()) or ([] if self.last is None else [self.last])
        counted = sum(passed.call.batch() for passed in known if any(t.dim() for t in passed.call.tensors()))
        # a method of the model's made the outputs, or what its call returned did
        return counted or sum(loss.rows for loss in self.used_losses())

    def metric_data(self, size: int | None, seed: int) -> Data:
        """What was observed, else the pass, or `size` examples of it, drawn from the seed."""
        if self.observed is not None:
            return self.observed
        # drawn: consecutive examples were seen to be alike and trained worse
        return self.whole() if size is None else self._draw(size, seed)

    def search_data(self, size: int | None, seed: int) -> Data | None:
        """For trial points: what was given, else `size` examples of the pass; None for all of it.

        The same seed draws examples that `metric_data` does not, as far as there are enough.
        """
        if self.searched is not None or size is None:
            return self.searched
        if self.last_told is None:
            raise ValueError(
                "search_batch draws from the batch of optimizer.loss(outputs, targets): compute the loss with it, or "
                "give the data with optimizer.search_on(inputs, targets)"
            )
        return self._draw(size, seed, last=True)

    def _draw(self, size: int, seed: int, last: bool = False) -> Data:
        """`size` examples of the pass (`part`); all of it where no target of these counts."""
        data, loss = self.whole(), self.last_told
        drawn = part(data, size, seed, last)
        if loss is None or data.targets is None:
            return drawn
        call = Call((data.inputs, data.targets, loss.outputs))
        if any(t.dim() == 0 or len(t) != call.batch() for t in leaves(loss.outputs)):
            return drawn
        _, targets, outputs = call.sample(size, seed, last).args
        return drawn if loss.criterion.count(outputs, targets) else data

    def record_pass(self, model: nn.Module, call: Call) -> None:
        """Keep the inputs of a forward pass, detached, and the random state before it."""
        refuse_jagged(call.tensors(), "an input of the model")
        inputs = call.map(keep)
        if not self.keeps:
            self.last = RecordedPass(inputs, None, versions_of(inputs), None)
            return
        random = RandomState.capture(*{t.device for t in call.tensors()}, model=model, last=self._held)
        self._held = random.held
        computed = any(p.grad_fn is not None for p in model.parameters())
        precision = rounding(call.tensors())
        self.last = RecordedPass(inputs, random, versions_of(inputs), modes_of(model), precision, computed)

    def hear(self, log_p: object, inputs: Tensor) -> None:
        """A loss of a density went backward on X: the metric of that density is taken there."""
        call = Call((inputs,))
        self.last = RecordedPass(call, RandomState.capture(inputs.device), versions_of(call), None)

    def record_outputs(self, outputs: Any, passed: RecordedPass | None) -> None:
        """Remember which tensors a pass returned, and write it into their graph. passed: None for one not recorded."""
        self.returned = type(outputs), [weakref.ref(t) for t in leaves(outputs)]
        if passed is not None:
            passed.keep_outputs(outputs, self.key)

    def choose(self, outputs: Any) -> tuple[Any, bool]:
        """What the loss is computed on, and whether the optimizer's own choice made it of the model's outputs."""
        if self.outputs is None:
            return outputs, False
        kind, tensors = self.returned or (None, [])
        own = not isinstance(outputs, Tensor) or (len(tensors) == 1 and tensors[0]() is outputs)
        complete = type(outputs) is kind and own if kind is not None else not isinstance(outputs, Tensor)
        return (self.outputs(outputs), True) if complete else (outputs, False)

    def record_loss(
        self,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        value: Tensor,
        rows: int = 0,
        weight: float | None = None,
        *,
        chosen: bool = False,
        needed: bool = True,
    ) -> None:
        """Keep the targets and units of a loss."""
        known = map_tensors(outputs, torch.detach)
        route = self._route(outputs, known, chosen) if needed else self._last_route(chosen)
        loss = self.count_loss(criterion, outputs, targets, value, 0 if weight == 0 else rows)
        loss.count = math.nan if weight is None else weight
        loss.outputs, loss.targets, loss.route, loss.followed = known, keep(targets), route, needed
        loss.versions = versions_of(Call((loss.targets,)))
        self.computed = [*self.computed, loss]

    def follow(self, outputs: Any) -> Loss:
        """The loss just told, on these outputs, with how they came from the passes."""
        last = self.computed[-1]
        assert last.route is not None
        return replace(last, route=self._route(outputs, last.outputs, last.route.select is not None))

    def _route(self, outputs: Any, known: Any, chosen: bool) -> Route:
        if chosen:
            return self._last_route(chosen)
        passes = self._last_route(chosen).passes
        route = find_route(outputs, self.key, self.watched) or Route(passes, unsure=known)
        if any(passed.computed for passed in route.passes):
            return replace(route, problem=COMPUTED, unsure=map_tensors(outputs, torch.detach))
        return route

    def _last_route(self, chosen: bool) -> Route:
        return Route(() if self.last is None else (self.last,), self.outputs if chosen else None)

    def count_loss(self, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, rows: int = 0) -> Loss:
        """Count a loss once it goes backward, whatever mode its pass was in."""
        scale = float(criterion.scale(map_tensors(outputs, torch.detach), targets))
        # without a single target that counts, reduction='sum' adds nothing to the gradient, and nothing to the mean
        loss = Loss(criterion, value.detach() / scale, rows if scale else 0, scale, criterion.summed)
        self._going = False  # an error may have ended it
        if self._were_cleared():
            self.forget_gradients()
        if value.requires_grad:
            hook_gradient(value, Counter(self, loss))
        return loss

    def goes_backward(self, loss: Loss, gradient: Tensor) -> None:
        """`backward` reached a loss: its gradient is about to be added to those that are there."""
        if not self._going:
            if self._were_cleared():
                self.forget_gradients()
            if not self.losses:  # the first of a batch
                self.is_stale = self._is_left_over()
            self._before = self._mark_gradients(), [(each, each.slope) for each in self.losses]
            self._going, me = True, weakref.ref(self)
            # as torch's own data parallelism hears that a backward pass is over; there is no public name for it
            engine: Any = getattr(Variable, "_execution_engine")  # noqa: B009
            engine.queue_callback(lambda: end_backward(me()))
        gradient, before = gradient.detach(), loss.slope if loss in self.losses else None
        loss.slope = gradient if before is None else before + gradient
        self.losses = [*self.losses, loss]

    def _is_left_over(self) -> bool:
        """Whether a gradient of the last step is still there, just as that step left it."""
        left = [grad for ref, version in self._stepped if (grad := ref()) is not None and grad._version == version]
        there = {id(p.grad) for p in self.watched}
        return any(id(grad) in there and holds_anything(grad) for grad in left)

    def warn_of_left_over(self) -> None:
        """Warn, the first time, of a step whose gradient is a sum with that of the one before.

        Before the step nobody knows: gradients of inputs, for an attack, may go backward before the others are cleared.
        """
        if self.is_stale and not self._warned and not self._were_cleared():
            self._warned = True
            warnings.warn(
                "the gradients of the last step were not cleared, so that those of this batch are added to them: call "
                "optimizer.zero_grad() before loss.backward(), once for each step",
                stacklevel=3,
            )

    def end_backward(self) -> None:
        """A backward pass is over: remember what its gradients are.

        One that added nothing to those that were there, as `torch.autograd.grad` does, does not count.
        """
        (before, losses), self._going = self._before, False
        self._left = self._mark_gradients()
        self._kept_back = not self._left and any_split(self.watched)
        if self._left and self._left == before and not any_split(self.watched):
            self.losses = [loss for loss, _ in losses]
            for loss, slope in losses:
                loss.slope = slope

    def _mark_gradients(self) -> set[tuple[int, int]]:
        return {mark_of(p.grad) for p in self.watched if p.grad is not None}

    def holds_gradients(self) -> bool:
        """Whether gradients of losses are there that no step was taken on yet."""
        return bool(self.losses) and not self._were_cleared()

    def _were_cleared(self) -> bool:
        """Whether somebody else cleared the gradients (`model.zero_grad()`, p.grad = None) since losses went backward.

        Gradients that are zero on their own, as those of a batch that is fitted exactly, were not touched since.
        """
        if not self.losses or not self.watched or self._kept_back:
            return False
        there = [p.grad for p in self.watched if p.grad is not None]
        return all(mark_of(grad) not in self._left and not holds_anything(grad) for grad in there)


def end_backward(record: BatchRecord | None) -> None:
    """Tell what remembers a backward pass that it is over, if it is still there."""
    if record is not None:
        record.end_backward()


def mark_of(gradient: Tensor) -> tuple[int, int]:
    """What changes when somebody writes into a gradient, or puts another in its place."""
    return 0 if gradient.is_sparse else local_part(gradient).data_ptr(), gradient._version


def holds_anything(gradient: Tensor) -> bool:
    """Whether an entry is not zero."""
    return bool((gradient.to_dense() if gradient.is_sparse else local_part(gradient)).any())


class Counter:
    """Tensor hook that counts a loss when `backward` reaches it. Keeps no record alive."""

    def __init__(self, record: BatchRecord, loss: Loss) -> None:
        self.record, self.loss = weakref.ref(record), loss

    def __call__(self, gradient: Tensor) -> None:
        record = self.record()
        if record is not None:
            record.goes_backward(self.loss, gradient)


class Listener(Hook):
    """Forward pre-hook that tells a `BatchRecord` about training passes.

    Args:
        record: What it tells.
        traceable: True to do nothing inside a compiled graph too, where it would break the graph.
        in_eval: True if passes in evaluation mode are for training too.
    """

    def __init__(self, record: BatchRecord, traceable: bool, in_eval: bool) -> None:
        self.record = weakref.ref(record)
        self.traceable, self.in_eval = traceable, in_eval
        self.record_pass = keep_uncompiled(BatchRecord.record_pass)  # it looks into attributes of any kind
        self.ending: Ending | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        if kwargs is None or (self.traceable and torch.compiler.is_compiling()):
            return  # torch calls a hook without them that came off while it went through the hooks
        record = self.record()
        if record is None or is_evaluating():
            return
        call = Call(args, dict(kwargs))
        if is_transformed([*call.tensors(), *itertools.islice(module.parameters(), 1)]):  # the others are alike
            return
        heard = (module.training or self.in_eval) and torch.is_grad_enabled()
        if heard:
            begin = None if record.begins is None else record.begins()
            if begin is not None:
                begin()
            self.record_pass(record, module, call)
        if (heard or record.outputs is not None) and not torch.compiler.is_compiling():
            if self.ending is not None:  # a pass that raised has left it
                self.ending.remove()
            self.ending = Ending(module, record, record.last if heard else None)


class Ending(Hook):
    """Forward hook of one pass: writes the pass into the graph of what it returned, and goes.

    It goes by itself, since its optimizer may die while the pass is under way.
    """

    def __init__(self, module: nn.Module, record: BatchRecord, passed: RecordedPass | None) -> None:
        self.record, self.passed = weakref.ref(record), passed
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        record, passed = self.record(), self.passed
        self.remove()
        if record is not None:
            record.record_outputs(outputs, passed)

    def remove(self) -> None:
        """Take it off, and let go of what the pass was given."""
        self.handle.remove()
        self.passed = None


def listen(model: nn.Module, record: BatchRecord, *, traceable: bool = False, in_eval: bool = False) -> Any:
    """Attach a listener."""
    return model.register_forward_pre_hook(Listener(record, traceable, in_eval), with_kwargs=True)


def overhear(metric: Metric, record: BatchRecord) -> None:
    """Tell `record` about the losses of the density that a metric belongs to, if it belongs to one."""
    log_p = getattr(metric, "log_p", None)
    if log_p is not None:
        record.density = getattr(log_p, "__name__", type(log_p).__name__)
        listen_to(log_p, record)
