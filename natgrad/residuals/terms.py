"""One term: a function of the unknowns at a point, over a batch of points, with its rows of the Jacobian."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.ground.chains import JetPass, LayerChain
from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.jets import Derivatives
from natgrad.ground.pure import (
    RandomState,
    call_with,
    check_examples_apart,
    check_followed,
    leaves,
    mark_evaluation,
    run_detached,
)
from natgrad.ground.spaces import Params
from natgrad.residuals.constrained import network_of
from natgrad.residuals.differential import ORDER, Field, Notes
from natgrad.residuals.stacked_rows import TermRows

T = TypeVar("T")
Unknown = nn.Module | nn.Parameter
Function = Callable[..., Any]

CLOSE = 1e-3
"""How far a network's values for one point and for two may differ, relative: above round-off in single precision."""
ONE_BY_ONE = (
    "natgrad: term {name!r} takes one backward pass per residual, since torch.func cannot take all points at once "
    "({error}): build it of torch operations, torch.where in place of if and torch.sin of math.sin, and take "
    "derivatives with ng.grad(u, x) and ng.laplacian(u, x)"
)
COMPLEX = (
    "A complex network takes a real point as a complex one: write self.net(x.to(torch.complex128)) in the forward of a "
    "module around it."
)


class Unplanned(Exception):
    """A term asked for something that its tables do not have."""


class Term:
    """A named residual."""

    def __init__(self, name: str, function: Function, unknowns: Mapping[str, Unknown]) -> None:
        self.name, self.function, self.unknowns = name, function, dict(unknowns)
        self.notes: dict[str, Notes] = {}
        self.networks: dict[str, LayerChain] | None = None
        self.by_rows = self.is_plain = False
        self.aliases = find_aliases(self.unknowns)
        self.is_random = self.is_tracked = False
        self._noise: RandomState | None = None
        self._signature: list[Any] | None = None
        self._parameters: dict[str, set[str]] = {}

    # what it is worth

    def values(self, params: Params, points: tuple[Tensor, ...]) -> Tensor:
        """The residuals (b, m), without a graph. points: Tensors (b, ...)."""
        if self._signature is None:
            self.settle(params, points)
        with nullcontext() if self._noise is None else self._noise.replay():
            values = self._through_tables(
                lambda: self._from_tables(points, self._tables(params, points), self._coefficients(params, points))
            )
            return (run_detached(lambda: self._plainly(params, points)) if values is None else values).detach()

    def rows(self, params: Params, points: tuple[Tensor, ...], weigh: Callable[[Tensor], Tensor]) -> TermRows:
        """The residuals with the rows of their Jacobian; weigh: from residuals (b, m) to factors of the rows (m, b)."""
        self.settle(params, points)
        if self.is_random:  # the trials of this step see the same draws
            self._noise = RandomState.capture(points[0].device)
        rows = self._through_tables(lambda: self._layered_rows(params, points, weigh))
        if rows is not None:
            return rows
        values, explicit = self._explicit_rows(params, points)
        factor = weigh(values)
        return TermRows(values, factor, [], {name: part * factor.unsqueeze(2) for name, part in explicit.items()})

    def settle(self, params: Params, points: tuple[Tensor, ...]) -> None:
        """Look at the unknowns: what is asked of them, and whether they are layers. Once, and whenever they change."""
        networks = {name: part for name, part in self.unknowns.items() if isinstance(part, nn.Module)}
        signature = [  # what the layers are and how they are set
            [(id(m), m.training, len(m._forward_hooks) + len(m._forward_pre_hooks)) for m in part.modules()]
            for part in networks.values()
        ]
        if signature == self._signature:
            return
        for name, part in networks.items():
            check_examples_apart(name or "net", part)
            self._parameters[name] = {key for key, _ in part.named_parameters(name)}
        if self._signature is None:
            self.notes = self._probe(params, points)
        for name, part in networks.items():
            for place in self.notes[name].plans:
                check_independence(
                    name, lambda x, net=part, own=self._own(params, name): call_with(net, own, x), points[place]
                )
        self._signature, self.networks = signature, self._find_networks()

    def _through_tables(self, make: Callable[[], T]) -> T | None:
        """What it makes of the unknowns' tables; None where they have none. What is missing in them is added."""
        while self.networks is not None:
            known = self._wishes()
            try:
                return make()
            except Unplanned:
                self.networks = self._find_networks() if self._wishes() != known else None
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # whatever vmap cannot do with tables
                self.is_plain, self.networks = True, None
        return None

    def _all_at_once(self, make: Callable[[], T]) -> T | None:
        """What it makes of all points at once; None, with a warning the first time, where torch.func cannot."""
        if self.by_rows:
            return None
        try:
            return make()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.by_rows, shown = True, str(error).partition("\n")[0]
            warnings.warn(ONE_BY_ONE.format(name=self.name, error=shown[:100]), stacklevel=3)
            return None

    def _wishes(self) -> list[tuple[dict[int, Derivatives], bool]]:
        return [(dict(asked.plans), asked.elsewhere) for asked in self.notes.values()]

    # what it asks of the unknowns

    def _probe(self, params: Params, points: tuple[Tensor, ...]) -> dict[str, Notes]:
        """Run the function at one point, to see which derivatives it wants."""
        notes = {name: Notes() for name, part in self.unknowns.items() if isinstance(part, nn.Module)}
        point = tuple(t[0] for t in points)
        detached = {name: p.detach() for name, p in params.items()}  # so that a parameter seen is one that was captured
        before = RandomState.capture(point[0].device)
        try:
            with exact_derivatives(), CallWatch() as watch:
                self._try_both_ways(watch, lambda: run_detached(lambda: self._at(detached, point, notes=notes)))
        except NotImplementedError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and "'Tensor' object is not callable" in str(error):
                raise TypeError(ORDER) from error
            error.add_note(f"This came up in the term {self.name!r}, at the first of its points, {describe(point)}.")
            if isinstance(error, (IndexError, TypeError)):
                error.add_note(ORDER)
            if isinstance(error, RuntimeError) and "complex" in str(error).lower():
                error.add_note(COMPLEX)
            raise
        used = any(asked.plans or asked.elsewhere for asked in notes.values())
        if not used and all(isinstance(part, nn.Module) for part in self.unknowns.values()):
            raise ValueError(
                f"term {self.name!r} does not use its unknowns: write it with the function's own arguments, "
                "lambda u, x: ng.laplacian(u, x) + f(x), where u is the network at one point x"
            )
        check_captured(self.name, watch.seen, self.unknowns, params)
        self.is_random = before.differs_from(RandomState.capture(point[0].device))
        return notes

    def _try_both_ways(self, watch: CallWatch, run: Callable[[], Any]) -> None:
        """Run the function; where it calls `torch.autograd.grad`, once more as a function that torch.func tracks."""
        refused = False
        try:
            run()
        except RuntimeError:
            if not watch.differentiates:
                raise
            refused = True  # the point requires no gradient
        if watch.differentiates:
            self.is_tracked = True
            try:
                run()
            except RuntimeError:
                if refused:
                    raise
                self.is_tracked = False

    def _find_networks(self) -> dict[str, LayerChain] | None:
        """The unknowns that are asked for, as layers; None where one is not made of them, or asked elsewhere."""
        chains = dict[str, LayerChain]()
        # a table has no graph back to the point, and rows of a parameter in two networks are one
        if self.is_plain or self.by_rows or self.is_tracked or self.aliases:
            return None
        for name, asked in self.notes.items():
            module = self.unknowns[name]
            assert isinstance(module, nn.Module)
            chain = network_of(module, f"{name}." if name else "") if asked.plans else None
            if asked.elsewhere or (asked.plans and chain is None):
                return None
            if chain is not None:
                chains[name] = chain
        return chains or None  # a term of coefficients alone has no network

    # through tables of derivatives

    def _tables(self, params: Params, points: tuple[Tensor, ...], rows: bool = False) -> dict[tuple[str, int], JetPass]:
        assert self.networks is not None
        state = self._state(params)
        return {
            (name, place): self.networks[name].run(state, points[place], plan, rows)
            for name, asked in self.notes.items()
            for place, plan in asked.plans.items()
        }

    def _state(self, params: Params) -> dict[str, Tensor]:
        """All parameters of the unknowns, those that are not trained too."""
        known: dict[str, Tensor] = {}
        for name, part in self.unknowns.items():
            if isinstance(part, nn.Parameter):
                known[name] = part
            elif not self._parameters[name] <= params.keys():
                known |= dict(part.named_parameters(name))
        return known | dict(params)

    def _coefficients(self, params: Params, points: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Coefficients, one copy per point."""
        return {
            name: params.get(name, part).detach().expand(len(points[0]), *part.shape)
            for name, part in self.unknowns.items()
            if isinstance(part, nn.Parameter)
        }

    def _from_tables(
        self,
        points: tuple[Tensor, ...],
        passes: dict[tuple[str, int], JetPass],
        coefficients: dict[str, Tensor],
        jets: dict[tuple[str, int], Tensor] | None = None,
    ) -> Tensor:
        """The residuals (b, m) from the unknowns' values and derivatives."""
        jets = {key: jet_pass.outputs for key, jet_pass in passes.items()} if jets is None else jets
        dtype = next(iter(jets.values())).dtype

        def evaluate_point(
            point: tuple[Tensor, ...], tables: dict[tuple[str, int], Tensor], chosen: dict[str, Tensor]
        ) -> Tensor:
            known: dict[str, dict[int, tuple[Derivatives, Tensor]]] = {}
            for (name, place), table in tables.items():
                known.setdefault(name, {})[place] = passes[name, place].layout, table
            fields = {n: Field(refuse_evaluation, point, known.get(n), asked) for n, asked in self.notes.items()}
            arguments = [fields[name] if name in fields else chosen[name] for name in self.unknowns]
            return flatten_residual(self.name, self.function(*arguments, *point), dtype)

        each = torch.func.vmap(evaluate_point, in_dims=(0, 1, 0), randomness="different")
        return each(points, jets, coefficients)

    def _layered_rows(self, params: Params, points: tuple[Tensor, ...], weigh: Callable[[Tensor], Tensor]) -> TermRows:
        passes = self._tables(params, points, rows=True)
        with torch.enable_grad():
            jets = {key: jet_pass.outputs.detach().requires_grad_() for key, jet_pass in passes.items()}
            chosen = {name: c.clone().requires_grad_() for name, c in self._coefficients(params, points).items()}
            values = self._from_tables(points, passes, chosen, jets)
            columns = differentiate_columns(values, [*jets.values(), *chosen.values()])
        factor = weigh(values.detach())
        # on the outputs it costs less than on the rows
        layers = [
            row
            for jet_pass, cotangents in zip(passes.values(), columns, strict=False)
            for row in jet_pass.pull_back(cotangents * factor[:, None, :, None])
            if row.layer.weight in params or row.layer.bias in params
        ]
        explicit = {
            name: cotangents.reshape(*cotangents.shape[:2], -1) * factor.unsqueeze(2)
            for name, cotangents in zip(chosen, columns[len(jets) :], strict=True)
            if name in params
        }
        return TermRows(values.detach(), factor, layers, explicit)

    # as a function of the parameters

    def _at(self, params: Params, point: tuple[Tensor, ...], notes: dict[str, Notes] | None = None) -> Tensor:
        """The residual (m,) at one point, by the networks themselves."""
        dtype = next(iter(params.values())).dtype

        def call(*point: Tensor) -> Tensor:
            return flatten_residual(self.name, self.function(*self._arguments(params, point, notes), *point), dtype)

        return call_tracked(call, point) if self.is_tracked else call(*point)

    def _arguments(self, params: Params, point: tuple[Tensor, ...], notes: dict[str, Notes] | None) -> list[Any]:
        """The unknowns as the function takes them."""
        arguments = []
        for name, part in self.unknowns.items():
            if not isinstance(part, nn.Module):
                arguments.append(params.get(self.aliases.get(name, name), part))
                continue
            own = self._own(params, name)

            def evaluate(*args: Any, module: nn.Module = part, own: Params = own) -> Tensor:
                rows = (a.unsqueeze(0) if isinstance(a, Tensor) else a for a in args)
                return call_with(module, own, *rows).squeeze(0)

            arguments.append(Field(evaluate, point, notes=None if notes is None else notes[name]))
        return arguments

    def _own(self, params: Params, name: str) -> dict[str, Tensor]:
        """The trained parameters of a network, by its own names; those that it shares with another one too."""
        shared = {full: params[first] for full, first in self.aliases.items() if first in params}
        start = f"{name}." if name else ""
        return {key.removeprefix(start): p for key, p in {**params, **shared}.items() if key.startswith(start)}

    def _plainly(self, params: Params, points: tuple[Tensor, ...]) -> Tensor:
        """The residuals (b, m): all points at once, or one after the other where torch.func cannot."""
        with exact_derivatives():
            each = torch.func.vmap(self._at, in_dims=(None, 0), randomness="different")
            values = self._all_at_once(lambda: each(dict(params), points))
            return torch.stack(self._point_by_point(params, points)) if values is None else values

    def _point_by_point(self, params: Params, points: tuple[Tensor, ...]) -> list[Tensor]:
        return [self._at(params, point) for point in zip(*points, strict=True)]

    def _explicit_rows(self, params: Params, points: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The residuals (b, m), and the rows (m, b, size) by name."""
        leaves = {name: p.detach() for name, p in params.items()}
        rows = self._all_at_once(lambda: self._rows_by_points(leaves, points))
        if rows is not None:
            return rows
        with torch.enable_grad(), mark_evaluation():
            leaves = {name: p.requires_grad_() for name, p in leaves.items()}
            with exact_derivatives():
                residuals = self._point_by_point(leaves, points)
            values = torch.stack(residuals)
            check_followed(values, leaves, evaluate=lambda moved: self._plainly(moved, points))
            # each from its own point's graph: from the stack torch walks through those of all points
            gradients = [
                torch.autograd.grad(residual[i], list(leaves.values()), retain_graph=True, materialize_grads=True)
                for i in range(values.shape[1])
                for residual in residuals
            ]
        b, m = values.shape
        stacked = [torch.stack([row[i].reshape(-1) for row in gradients]).view(m, b, -1) for i in range(len(leaves))]
        return values.detach(), dict(zip(leaves, stacked, strict=True))

    def _rows_by_points(
        self, leaves: dict[str, Tensor], points: tuple[Tensor, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def differentiate(point: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], Tensor]:
            return torch.func.jacrev(lambda chosen: (self._at(chosen, point),) * 2, has_aux=True)(leaves)

        with torch.enable_grad(), mark_evaluation(), exact_derivatives():
            jacobians, values = torch.func.vmap(differentiate, randomness="different")(points)
        b, m = values.shape
        return values.detach(), {n: j.detach().transpose(0, 1).reshape(m, b, -1) for n, j in jacobians.items()}


def differentiate_columns(values: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """d values[:, j] / d leaf, summed over the rows of values (b, m), (m, *shape of the leaf) each."""
    if not values.requires_grad:
        return [leaf.new_zeros(values.shape[1], *leaf.shape) for leaf in leaves]
    columns = [
        torch.autograd.grad(values[:, j].sum(), leaves, retain_graph=j + 1 < values.shape[1], materialize_grads=True)
        for j in range(values.shape[1])
    ]
    return [torch.stack(parts) for parts in zip(*columns, strict=True)]


class PointDerivatives(TorchFunctionMode):
    """Inside, `torch.autograd.grad` in a tracked point keeps the graph to the parameters, as a training needs it."""

    def __init__(self, nothing: Tensor) -> None:
        super().__init__()
        self.nothing = nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.requires_grad_ and all((*args[1:], *kwargs.values())):
            try:
                return func(*args, **kwargs)  # of what torch.func.grad differentiates in
            except RuntimeError:  # torch.func refuses it elsewhere
                return args[0] if args[0].requires_grad else args[0] + self.nothing
        if func is torch.autograd.grad:
            kwargs = {**kwargs, "create_graph": True}
        return func(*args, **kwargs)


def call_tracked(call: Callable[..., Tensor], point: tuple[Tensor, ...]) -> Tensor:
    """call(*point), inside of which `torch.autograd.grad` in the point works, under torch.func's transforms too."""
    floating = [i for i, part in enumerate(point) if part.is_floating_point()]
    if not floating:
        return call(*point)

    def run(*tracked: Tensor) -> Tensor:
        arguments = list(point)
        for i, part in zip(floating, tracked, strict=True):
            arguments[i] = part
        with PointDerivatives(0 * tracked[0].sum()):
            return call(*arguments)

    return torch.func.vjp(run, *(point[i] for i in floating))[0]


def refuse_evaluation(*args: Any) -> Tensor:
    """In place of a network whose values come from tables: whatever is not in them is planned for, next time."""
    raise Unplanned


# What a term may not do, said before the first step: its networks, and the parameters that it uses past them


class CallWatch(TorchFunctionMode):
    """Inside, notes what torch functions are given that a term has from elsewhere than its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, nn.Parameter] = {}  # every one that requires a gradient, by identity
        self.differentiates = False  # true after a call of `torch.autograd.grad`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.differentiates |= func is torch.autograd.grad
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
                self.seen[id(leaf)] = leaf
        return func(*args, **(kwargs or {}))


def check_captured(
    name: str, seen: Mapping[int, nn.Parameter], unknowns: Mapping[str, Unknown], trained: Params
) -> None:
    """Tell of parameters that a term uses by itself, and not as one of its arguments: they have no derivative."""
    advice = (
        "make it an unknown of its own, ng.residuals({'u': net, 'k': k}, {'inside': lambda u, k, x: ...}) with k = "
        f"nn.Parameter(torch.tensor(1.0, dtype={next(iter(trained.values())).dtype}))"
    )
    known = {id(p): key for key, p in trained.items()}
    for number, parameter in seen.items():
        if number in known:
            raise ValueError(
                f"term {name!r} uses the parameter {known[number]!r} by itself, and not as one of its arguments: its "
                f"derivative would be missing; {advice}"
            )
        if number not in {id(p) for part in unknowns.values() for _, p in name_parameters("", part)}:
            warnings.warn(
                f"natgrad: term {name!r} uses a parameter of shape {tuple(parameter.shape)} that is not trained: "
                f"{advice}; for a fixed number, .requires_grad_(False)",
                stacklevel=2,
            )
            return


def name_parameters(name: str, part: Unknown) -> list[tuple[str, nn.Parameter]]:
    """The parameters of an unknown, each with its full name."""
    return list(part.named_parameters(name)) if isinstance(part, nn.Module) else [(name, part)]


def find_aliases(unknowns: Mapping[str, Unknown]) -> dict[str, str]:
    """Full name -> the first full name of the same parameter, where unknowns share one."""
    first, aliases = dict[int, str](), dict[str, str]()
    for name, part in unknowns.items():
        for full, p in name_parameters(name, part):
            if first.setdefault(id(p), full) != full:
                aliases[full] = first[id(p)]
    return aliases


def check_independence(name: str, evaluate: Callable[[Tensor], Tensor], points: Tensor) -> None:
    """ValueError if a network's value at one point depends on the others in its batch, or on chance. points: (b, d)."""
    two = points[:2]
    together = run_detached(lambda: evaluate(two))
    alone = torch.cat([run_detached(lambda point=point: evaluate(point)) for point in two.split(1)])
    size = together.abs().max()
    if len(together) == len(alone) and bool((together - alone).abs().max() > CLOSE * size):
        raise ValueError(
            f"the network{f' {name!r}' * bool(name)} gives {together.reshape(-1)[:4].tolist()} for two points at once "
            f"and {alone.reshape(-1)[:4].tolist()} for one after the other: a value may depend on its own point alone, "
            "and not on the rest of the batch or on chance"
        )


def flatten_residual(name: str, residual: Any, dtype: torch.dtype) -> Tensor:
    """What a term returned, as real numbers (m,). TypeError for anything but tensors."""
    parts = list(residual.values()) if isinstance(residual, Mapping) else residual
    parts = parts if isinstance(parts, (tuple, list)) else [parts]
    numbers = [isinstance(part, (int, float)) for part in parts]
    if not all(isinstance(part, Tensor) or number for part, number in zip(parts, numbers, strict=True)) or all(numbers):
        raise TypeError(
            f"term {name!r} returned {type(residual).__name__}, expected a tensor: the residual at one point; or a "
            "tuple, list or dict of tensors"
        )
    device = next(part.device for part in parts if isinstance(part, Tensor))
    tensors = [
        part if isinstance(part, Tensor) else torch.full((1,), part, device=device, dtype=dtype) for part in parts
    ]
    real = [(torch.view_as_real(part) if part.is_complex() else part).reshape(-1).to(dtype) for part in tensors]
    return real[0] if len(real) == 1 else torch.cat(real)


def describe(point: tuple[Tensor, ...]) -> str:
    """A point as a reader of an error message likes it."""
    parts = [", ".join(f"{float(number):.6g}" for number in t.reshape(-1)[:12]) for t in point]
    return "; ".join(f"({part}{', ...' if t.numel() > 12 else ''})" for part, t in zip(parts, point, strict=True))
