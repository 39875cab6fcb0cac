"""Matrices that no layer's own call explains: attention's projections, recurrent and shared weights, bare parameters.

Such a matrix is followed through the pass's graph: every product with it tells its activations, and the place where the
derivative at its output arrives, as a tap on a layer would.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from natgrad.ground.graph_nodes import (
    CUTS,
    FLIPS,
    kind_of,
    read_cut,
    read_dim,
    read_factor,
    read_order,
    read_output_shape,
    read_shape,
    read_tokens,
)
from natgrad.ground.pure import version_of
from natgrad.ground.spaces import Space
from natgrad.layers.examples import Examples
from natgrad.layers.experts import COLUMNS, NEW, ROWS, ExpertProduct, ExpertSource, expert_product, find_experts
from natgrad.layers.kinds import Layer, Layout
from natgrad.layers.taps import MatrixProduct, Tap

FOLLOWED = CUTS | FLIPS | {"Unsqueeze", "Squeeze", "View", "UnsafeView", "ReshapeAlias", "Clone", "ToCopy"}
SECOND = "products with "
TURNED = "inputs @ "


@dataclass(frozen=True, eq=False)
class Traced(Layer):
    """A matrix found by its products in the graph.

    Its activations are (b, t, groups, d) and its deltas (b, t, groups, outputs) already.

    Args:
        module: The recurrent one that it belongs to, if any: packed sequences are noticed by all its products together.
        layout: The matrix.
        positions_first: True if the products' rows run over positions, then over examples.
        second: True if it stands in for a layer whose own calls do not explain the matrix.
    """

    positions_first: bool = False
    second: bool = False

    @property
    def claims(self) -> tuple[str, ...]:
        names = self.layout.names
        turned = names if self.layout.channels is not None else ()
        return (
            *(f"{SECOND}{name}" if self.second else name for name in names),
            *(f"{TURNED}{name}" for name in turned),
        )

    @staticmethod
    def parameter_of(claim: str) -> str:
        """The name of the parameter that a layer's claim is about.

        Args:
            claim: One of `claims`, of any layer.
        """
        return claim.removeprefix(SECOND).removeprefix(TURNED)

    @property
    def key(self) -> str:
        return " ".join(self.claims)

    @property
    def is_routed(self) -> bool:
        return len(self.layout.shape) == 3

    def turn(self) -> Traced | None:
        """The matrix the other way round, for products y = x W; None where a module is known to form y = W x."""
        layout = self.layout
        forms = self.module is not None or layout.bias is not None or (layout.groups > 1 and not self.is_routed)
        if self.second or forms:
            return None
        groups, outputs, inputs = layout.matrix_shape
        channels = outputs if layout.channels is None else None
        other = Layout(layout.weight, None, groups, inputs, outputs, layout.shape, channels=channels)
        return replace(self, layout=other)

    def activations(self, inputs: Tensor) -> Tensor:
        return self.with_bias(inputs)

    def deltas(self, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(frozen=True)
class TracedProduct(MatrixProduct):
    """One product with a traced matrix: y = W x for every row x (R, d) of the inputs, or a look-up of tokens.

    With `columns`, y is laid out as (o, R). Rows are `loose` where the other factor is a parameter too (W + B A), or
    sequences are packed.
    """

    piece: tuple[int, int] = (0, 0)  # the rows of the matrix that take part, (start, stop)
    padding: int | None = None  # the token that a look-up does not train
    shape: tuple[int, ...] = ()  # of the inputs before they were laid out as rows, where the graph tells

    def turn(self, layer: Traced) -> TracedProduct | None:
        """The product as the matrix the other way round sees it; None for a look-up, or with some of its rows.

        Args:
            layer: That matrix.
        """
        if not self.inputs.is_floating_point() or self.piece != (0, self.layer.layout.all_outputs):
            return None
        return replace(self, layer=layer, turned=not self.turned, piece=(0, layer.layout.all_outputs))

    def rows(self, delta: Tensor) -> int:
        """R, the number of rows."""
        return delta.shape[-1] if self.columns else delta.numel() // delta.shape[-1]


WITH_BIAS = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def traced_layers(model: nn.Module, space: Space, known: Iterable[Layer]) -> list[Traced]:
    """The matrices in the space that no known layer holds, each with the bias that its module adds."""
    names = {id(p): name for name, p in model.named_parameters() if name in space.blocks}
    held = {name for layer in known for name in layer.layout.names}
    inside = {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)].append(module)
    layers: dict[str, Traced] = {}
    for module in model.modules():
        # attention and recurrence work on (t, b, d), whatever batch_first says
        first = isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) or module in inside
        own = dict(module.named_parameters(recurse=False))
        for key, p in own.items():
            name = names.get(id(p))
            matrices = p.dim() == 2 or (p.dim() == 3 and len(p) > 1)  # the latter one per expert
            if matrices and name is not None and name not in held and name not in layers:
                # a bare module holds the parameters of one that was exported
                with_bias = isinstance(module, WITH_BIAS) or type(module) is nn.Module
                bias = own.get(key.replace("weight", "bias")) if with_bias else None
                fits = bias is not None and bias.shape == (len(p),) and owners[id(bias)] == owners[id(p)]
                layout = layout_of(module, key, p, name, names.get(id(bias)) if fits else None)
                layers[name] = Traced(module if isinstance(module, nn.RNNBase) else None, layout, first)
    return list(layers.values())


def second_layers(known: Iterable[Layer]) -> list[Traced]:
    """For every known layer with a matrix: that matrix alone, in case the model also uses it outside of its layer."""
    layouts = [layer.layout for layer in known if layer.layout.weight is not None and len(layer.layout.shape) == 2]
    alone = [(layout.weight, layout.shape[0], layout.shape[1]) for layout in layouts]
    return [Traced(None, Layout(w, None, 1, p, q, (p, q)), second=True) for w, p, q in alone]


def matrices_of(params: Mapping[str, Tensor]) -> list[Traced]:
    """The matrices among the parameters of a function, each alone."""
    matrices = {name: p for name, p in params.items() if p.dim() == 2}
    return [Traced(None, Layout(name, None, 1, len(p), p.shape[1], tuple(p.shape))) for name, p in matrices.items()]


def layout_of(module: nn.Module, key: str, p: Tensor, name: str, bias: str | None) -> Layout:
    """The matrix as its module stores it; attention's packed one is three: for queries, keys and values."""
    if p.dim() == 3:
        return Layout(name, None, len(p), p.shape[1], p.shape[2], tuple(p.shape))
    groups = 3 if isinstance(module, nn.MultiheadAttention) and key == "in_proj_weight" else 1
    return Layout(name, bias, groups, len(p) // groups, p.shape[1], tuple(p.shape))


def find_products(outputs: Tensor, layers: Iterable[Traced], params: Mapping[str, Tensor]) -> list[MatrixProduct]:
    """The products with the layers' matrices in the graph that led to the outputs.

    A matrix that the graph uses in another way too is left out, and so is one whose factors were overwritten since.

    Args:
        outputs: (R, m), with a graph.
        layers: The matrices. Of one that stands there both ways round, it is turned where all its products are y = x W.
        params: The leaves of the graph, by name.
    """
    layers = list(layers)
    if not layers:
        return []
    turned = {layer.layout.names[0]: layer for layer in layers if layer.layout.channels is not None}
    given = {layer.layout.names[0]: layer for layer in layers if layer.layout.channels is None}
    stored = {name: layer.turn() for name, layer in turned.items() if name not in given} | given
    matrices = [(layer, params[name]) for name, layer in stored.items() if layer is not None]
    leaves = {get_gradient_edge(p).node: (layer, p.dtype) for layer, p in matrices if p.requires_grad}
    if not leaves:
        return []
    known = list(uses(outputs.grad_fn, leaves))
    count = Counter(node for node, _, _ in known)
    products: list[MatrixProduct] = []
    opaque, straight = set[Traced](), set[Traced]()
    for node, i, source in known:
        product = product_of(node, i, source)
        name = source.layer.layout.names[0]
        if product is None or (name not in given and product.turn(turned[name]) is None):
            opaque.add(source.layer)
            continue
        if not product.turned or product.turn(source.layer) is None:
            straight.add(source.layer)
        products.append(replace(product, loose=product.loose or count[node] > 1))
    clear = [product for product in products if product.layer not in opaque]
    uneven = find_packed(product for product in clear if isinstance(product, TracedProduct))
    clear = [replace(product, loose=True) if product.layer.module in uneven else product for product in clear]

    def orient(product: MatrixProduct) -> MatrixProduct:
        name = product.layer.layout.names[0]
        if name not in turned or (name in given and product.layer in straight):
            return product
        return product.turn(turned[name]) or product

    return [orient(product) for product in clear]


def find_packed(products: Iterable[TracedProduct]) -> set[nn.Module]:
    """The recurrent modules that met packed sequences of different lengths: fewer rows at later steps.

    Their rows run over steps, and over the examples that are left, the longest first. Products with the inputs are of
    all steps together, whose number may be a multiple of the examples' by accident.
    """
    return {layer.module for layer, sizes in count_steps(products).items() if layer.module and len(set(sizes)) > 1}


def find_sequences(taps: Iterable[Tap], rows: Tensor, positions: int) -> Examples | None:
    """Which packed sequence each row of the outputs is of; None where these are no positions of packed sequences.

    Args:
        taps: The products with recurrent matrices, among others.
        rows: The outputs, (R, m), as many for each position.
        positions: Their number, if they are positions.
    """
    for sizes in count_steps(taps).values():
        if sum(sizes) == positions and len(set(sizes)) > 1:
            labels = torch.cat([torch.arange(size, device=rows.device) for size in sorted(sizes, reverse=True)])
            return Examples(max(sizes), labels.repeat_interleave(len(rows) // positions).unsqueeze(1).expand_as(rows))
    return None


def count_steps(taps: Iterable[Tap]) -> dict[Layer, list[int]]:
    """The rows of every product with a recurrent matrix, one for each step."""
    steps: dict[Layer, list[int]] = defaultdict(list)
    for product in taps:
        if isinstance(product, TracedProduct) and "weight_hh" in product.layer.layout.names[0]:
            steps[product.layer].append(len(product.inputs))
    return steps


Leaves = Mapping[Node, tuple[Traced, torch.dtype]]


@dataclass(frozen=True)
class Source:
    """What an edge of the graph carries: some rows of a traced matrix."""

    layer: Traced
    dtype: torch.dtype  # of the parameter
    piece: tuple[int, int]  # the rows, (start, stop)
    order: str  # what its dimensions are: rows, columns, or new ones of size 1

    @property
    def is_flipped(self) -> bool:
        """Whether the rows are columns there."""
        return self.order.endswith(ROWS)


def uses(root: Node | None, leaves: Leaves) -> Iterator[tuple[Node, int, Source | ExpertSource]]:
    """The nodes that take a traced matrix in, with the place of the argument."""
    stack = [] if root is None else [root]
    experts = {node: layer for node, (layer, _) in leaves.items() if layer.is_routed}
    flat = {node: leaf for node, leaf in leaves.items() if node not in experts}
    visited = set(stack)  # holds the nodes: what stands for them in Python lives as long as somebody holds it
    while stack:
        node = stack.pop()
        for i, (child, number) in enumerate(node.next_functions):
            if child is None:
                continue
            source = source_of(child, number, flat)
            if source is None and experts:
                source = find_experts(child, number, experts)
            if source is not None:
                yield node, i, source
            elif child not in visited:
                visited.add(child)
                stack.append(child)


def source_of(child: Node, number: int, leaves: Leaves) -> Source | None:
    """The matrix behind an edge, through transposes, casts, cuts of its rows and new dimensions; None for another."""
    node: Node | None = child
    steps = list[tuple[Node, int]]()
    while node is not None and node not in leaves:
        if kind_of(node) not in FOLLOWED:
            return None
        steps.append((node, number))
        node, number = node.next_functions[0]
    if node is None:
        return None
    layer, dtype = leaves[node]
    order, piece, columns = ROWS + COLUMNS, (0, layer.layout.shape[0]), layer.layout.shape[1]
    for step, output in reversed(steps):
        kind = kind_of(step)
        if kind in CUTS:
            count = piece[1] - piece[0]
            rows = read_cut(step, output, count) if order[read_dim(step, len(order))] == ROWS else None
            if rows is None:  # it cuts columns
                return None
            piece = piece[0] + rows[0], piece[0] + rows[1]
        else:
            order = order_after(step, order, {ROWS: piece[1] - piece[0], COLUMNS: columns})
            if not order:
                return None
    return Source(layer, dtype, piece, order)


def order_after(node: Node, order: str, sizes: Mapping[str, int]) -> str:
    """What a matrix's dimensions are after a transpose, a view or a cast; empty where a view mixes them."""
    kind = kind_of(node)
    if kind in FLIPS:
        return "".join(order[dim] for dim in read_order(node, len(order)))
    if kind == "Unsqueeze":
        at = read_dim(node, len(order) + 1)
        return order[:at] + NEW + order[at:]
    if kind in ("ToCopy", "Clone"):
        return order
    rest, after = order.replace(NEW, ""), ""
    for size in read_output_shape(node):
        if rest and size == sizes[rest[0]]:
            after, rest = after + rest[0], rest[1:]
        elif size == 1:
            after += NEW
        else:
            return ""
    return "" if rest else after


def product_of(node: Any, place: int, source: Source | ExpertSource) -> TracedProduct | ExpertProduct | None:
    """The product that a node forms with a matrix as one of its arguments; None if it forms none that is known."""
    if isinstance(source, ExpertSource):
        return expert_product(node, place, source)
    kind = kind_of(node)
    if kind in ("Embedding", "Index", "IndexSelect") and place == 0 and source.order == ROWS + COLUMNS:
        return lookup(node, source)
    first = {"Mm": 0, "Addmm": 1, "Bmm": 0, "Baddbmm": 1}.get(kind)
    if first is None or place < first or NEW in source.order[1:]:
        return None
    other = read_factor(node, first + (place == first))
    if other is None or other.shape[:-2] not in ((), (1,)) or other.dim() != len(source.order):
        return None
    return matrix_product(node, place - first, source, other)


def matrix_product(node: Any, place: int, source: Source, other: Tensor) -> TracedProduct:
    """first @ second, the matrix standing in place 0 or 1."""
    rows = other if place == 1 else other.mT
    rows = rows if rows.dim() == 2 else rows.squeeze(0)
    # x @ W^T, as a linear layer has it, and W @ x are the same map; x @ W and W^T @ x the other
    turned = (place == 1) is not source.is_flipped
    shape = read_shape(node.next_functions[-2][0]) if place == 1 else ()
    how = {"turned": turned, "columns": place == 0, "piece": source.piece, "shape": shape}
    return TracedProduct(source.layer, rows, GradientEdge(node, 0), rows.dtype, version_of(rows), **how)


def lookup(node: Any, source: Source) -> TracedProduct | None:
    """Rows of the matrix by token."""
    try:
        reading = read_tokens(node, source.piece[1] - source.piece[0])
    except RuntimeError:  # overwritten since
        return None
    if reading is None:
        return None
    start = source.piece[0]
    tokens, padding = reading[0] + start, None if reading[1] is None else reading[1] + start
    how = {"turned": True, "piece": source.piece, "shape": tuple(tokens.shape), "padding": padding}
    return TracedProduct(source.layer, tokens, GradientEdge(node, 0), source.dtype, version_of(tokens), **how)
