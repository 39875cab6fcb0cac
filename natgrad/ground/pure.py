"""Models as pure functions: calls replayed with their random state and what models hold, and what hides from it."""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from types import FrameType, FunctionType, MappingProxyType
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from natgrad.ground.graph_nodes import kind_of, leaf_of
from natgrad.ground.linalg import is_concrete
from natgrad.ground.messages import describe_call, write_choices
from natgrad.ground.spaces import Params
from natgrad.ground.typed_torch import measure_norm

T = TypeVar("T")
P = ParamSpec("P")


BUILT: dict[str, Any] = {
    "cuda": torch.version.cuda or torch.version.hip,
    "mps": torch.backends.mps.is_built(),
    "xpu": getattr(torch.version, "xpu", None),
}
AUTOCAST_DEVICES = ("cpu", *(device for device, there in BUILT.items() if there))
"""Whose autocast this torch has: to ask for one costs half a microsecond."""


def set_modes_aside(function: Callable[P, T]) -> Callable[P, T]:
    """The function outside of its caller's no_grad, inference_mode and autocast: it takes derivatives of its own."""
    exact = leave_autocast(function)

    @keep_gradient_mode
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.enable_grad():
            return exact(*args, **kwargs)

    return run


def leave_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """The function outside of its caller's autocast, which would round the products of its linear algebra."""
    on = torch.is_autocast_enabled

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any(map(on, AUTOCAST_DEVICES)):
            return function(*args, **kwargs)
        with ExitStack() as modes:
            for device in filter(on, AUTOCAST_DEVICES):
                modes.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


def compute_exactly(cls: type[T]) -> type[T]:
    """The class with its own public methods outside of their caller's autocast, but for products in inner loops.

    `mv` and `mm` are called by solvers and blocks: a user's door to them is `G @ v`.
    """
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_") and name not in ("mv", "mm"):
            setattr(cls, name, leave_autocast(method))
    return cls


def keep_gradient_mode(function: Callable[P, T]) -> Callable[P, T]:
    """The function, after which torch's gradients are on or off as before it, and as many autocasts are open.

    Ctrl-C inside of `torch.no_grad()`'s own lines leaves gradients off for the rest of the session: Python calls no
    `__exit__` where `__enter__` did not end. Inside of `torch.autocast`'s it leaves one open, and then no later one
    forgets the rounded parameters that it keeps, which are those of an earlier step from there on.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        enabled, autocasts = torch.is_grad_enabled(), count_autocasts()
        try:
            return function(*args, **kwargs)
        except BaseException:
            while count_autocasts() > autocasts:
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()
            raise
        finally:
            torch.set_grad_enabled(enabled)

    return run


def count_autocasts() -> int:
    """How many `torch.autocast` are open, one within the other; torch tells it where one opens or ends."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Hook:
    """A hook on a user's module. In a copied or pickled module Python's `nullcontext.__exit__` stands for it.

    That takes any arguments and does nothing, so that the file of a whole model is read without natgrad.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext, "__exit__")

    @staticmethod
    def stands_behind(hook: object) -> bool:
        """Whether a module's hook is one of this library's, or was before the module was copied."""
        return isinstance(hook, Hook) or hook is nullcontext.__exit__


# What a model keeps besides parameters: buffers, states and counters in attributes, generators of its own

INTERNAL = frozenset(vars(nn.Module()))
"""What torch keeps in every module: parameters, hooks, the mode."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LARGEST = 2**22  # entries of a tensor that is copied
LONGEST = 1000  # entries of a container that are looked into
MOST = 10_000  # values that are looked at in all
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Parameter})
FOREIGN = ("torch", "natgrad")
GONE: Any = object()


class HeldState:
    """The attributes of all modules of a model as they are at a time, with what can change inside of them.

    Values are kept by reference, and the contents of lists, dicts, sets, arrays, tensors, generators and of objects of
    the model's own package as copies. Large tensors, long containers and objects of other packages are not copied.
    """

    def __init__(self, model: nn.Module, last: HeldState | None = None) -> None:
        self.model = model
        self.attributes: list[tuple[Any, dict[str, Any]]] = []  # each module and object, the entries of its `__dict__`
        self.contents: list[Callable[[], None]] = []  # take back what can change in place
        self.copies = dict[int, tuple[Tensor, int, Tensor]]()  # by `id`: owner, its version, copy
        self._known = {} if last is None else last.copies  # of which those of unchanged tensors are taken over
        self._seen = set[int]()
        named = list_modules(model)
        for _, module in named:
            self._look_into(module, INTERNAL, type(module).__module__.partition(".")[0])
        self.tensors = set(self.copies)  # those in attributes, by `id`
        self.buffers = dict[str, Tensor]()  # copies by name, but for batch norms': in training outputs do not need them
        for path, module in named:
            held: dict[str, Tensor | None] = vars(module)["_buffers"]
            for name, buffer in held.items() if held and not isinstance(module, BATCH_NORMS) else ():
                copied = None if buffer is None else self._copy(buffer)
                if copied is not None:
                    self.buffers[f"{path}.{name}" if path else name] = copied
        self.writes = count_writes(named)  # how often the parameters were written to
        del self._known, self._seen  # nothing of an earlier state is kept alive

    def _look_into(self, owner: Any, without: frozenset[str], package: str) -> None:
        """Note the entries of a `__dict__`, and look at each."""
        live = vars(owner)
        saved = {key: live[key] for key in live.keys() - without}
        self.attributes.append((owner, saved))
        for value in saved.values():
            if type(value) not in PLAIN:
                self._look_at(value, package)

    def _look_at(self, value: Any, package: str) -> None:
        """Note how a value, and what it holds, comes back to what it is now."""
        if id(value) in self._seen or len(self._seen) > MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.requires_grad:  # neither a parameter nor what a pass computed
                self._copy(value)
        elif isinstance(value, (list, dict, set, deque, tuple)):
            container: Any = cast("Any", value)
            if not isinstance(value, tuple):
                self.contents.append(contents_of(container))
            for entry in container.values() if hasattr(container, "values") else container:
                if len(container) <= LONGEST and type(entry) not in PLAIN:
                    self._look_at(entry, package)
        elif (restore := generator_state(value)) is not None:
            self.contents.append(restore)
        elif type(value).__module__.partition(".")[0] == package not in FOREIGN and hasattr(value, "__dict__"):
            self._look_into(value, INTERNAL if isinstance(value, nn.Module) else frozenset(), package)

    def _copy(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds; None for one that is too large, or not a plain one."""
        if tensor.numel() > LARGEST or tensor.layout != torch.strided or tensor.is_meta:
            return None
        version = version_of(tensor)
        owner, before, saved = self._known.get(id(tensor), (None, -1, tensor))
        if owner is not tensor or before != version or tensor.is_inference():
            saved = tensor.detach().clone()
        self.copies[id(tensor)] = tensor, version, saved
        return saved

    def put_back(self, now: HeldState) -> None:
        """Take all attributes, and what is inside of them, back to this state; buffers stay as they are."""
        for owner, saved in self.attributes:
            live = vars(owner)
            for key in live.keys() - saved.keys() - INTERNAL:
                del live[key]
            for key, value in saved.items():
                if live.get(key, GONE) is not value:
                    live[key] = value
        for restore in self.contents:
            restore()
        for key in self.tensors:
            tensor, version, saved = self.copies[key]
            same = key in now.copies and now.copies[key][2] is saved and version_of(tensor) == version
            if not same and tensor.shape == saved.shape:
                tensor.data.copy_(saved)

    def put_back_buffers(self) -> None:
        """Take the buffers back too, in place."""
        for name, buffer in self.model.named_buffers():
            if name in self.buffers and buffer.shape == self.buffers[name].shape:
                buffer.data.copy_(self.buffers[name])


def list_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules with their names, each once: `named_modules` takes three times as long, and every pass asks."""
    modules, seen = [("", model)], {id(model)}
    for path, module in modules:  # which grows
        children: Mapping[str, nn.Module | None] = vars(module)["_modules"]
        for name, child in children.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append((f"{path}.{name}" if path else name, child))
    return modules


def count_writes(modules: Iterable[tuple[str, nn.Module]]) -> int:
    """How often the parameters of these modules were written to."""
    return sum(version_of(p) for _, module in modules for p in vars(module)["_parameters"].values() if p is not None)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def contents_of(value: Any) -> Callable[[], None]:
    """What takes a list, dict, set or deque back to its entries of now, where they are others by then."""
    return partial(refill, value, value.copy())


def refill(value: Any, saved: Any) -> None:
    """Take a list, dict, set or deque back to these entries, where it has others."""
    named, joined = hasattr(value, "items"), hasattr(value, "update")
    pairs: Any = ((saved.get(k, GONE), v) for k, v in value.items()) if named else zip(value, saved, strict=False)
    if len(value) == len(saved) and all(a is b for a, b in pairs):
        return
    value.clear()
    (value.update if joined else value.extend)(saved)


def call_method(value: Any, name: str, argument: Any) -> None:
    """value.name(argument): unlike a bound method of C, a copy of this call is on the copy of the value."""
    getattr(value, name)(argument)


def generator_state(value: Any) -> Callable[[], None] | None:
    """What takes a source of random numbers, or an array, back to what it is now; None for any other object."""
    if isinstance(value, torch.Generator):
        return partial(call_method, value, "set_state", value.get_state())
    if isinstance(value, random.Random):
        return partial(call_method, value, "setstate", value.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(call_method, value, "set_state", value.get_state())
    if isinstance(value, numpy.ndarray) and value.size <= LARGEST:
        return partial(numpy.copyto, value, value.copy())
    return None


# A model as a pure function of its parameters: buffers untouched, random draws fixed, chunked

Model = nn.Module | Callable[..., Any]
Select = Callable[[Any], Any]
"""What is taken of a model's outputs."""

_passes = threading.RLock()


def renew_lock() -> None:
    """A new lock, for a child that was forked while another thread held the one before: nobody would release it."""
    global _passes
    _passes = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)


def run_alone() -> AbstractContextManager[Any]:
    """Inside, no other thread makes a pass of natgrad's, and each thread's passes may hold others.

    A pass at other parameters puts them into the model, sets torch's global random state and hangs hooks on layers, for
    a while. Two at once would each see the other's, and one would put the other's parameters back for good.
    """
    return nullcontext() if torch.compiler.is_compiling() else _passes


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Call:
    """The arguments of one forward pass, `model(*args, **kwargs)`, apart from the parameters.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, depth first."""
        return [tensor for part in (*self.args, *self.kwargs.values()) for tensor in leaves(part)]

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every tensor changed.

        Args:
            change: A function of a tensor.
        """
        kwargs = {name: map_tensors(part, change) for name, part in self.kwargs.items()}
        return Call(tuple([map_tensors(part, change) for part in self.args]), kwargs)

    def unwrap(self) -> Any:
        """As users write it: the one argument, a tuple of several, or a dict of keywords."""
        if self.kwargs:
            return dict(self.kwargs) if not self.args else self
        return self.args[0] if len(self.args) == 1 else self.args

    def batch(self) -> int:
        """Leading size of the first tensor argument: the number of examples. 0-dimensional tensors are passed over."""
        sizes = [t.shape[0] for t in self.tensors() if t.dim() > 0]
        if not sizes:
            raise ValueError(
                "inputs holds no tensor with a leading example dimension; give at least one of shape (b, ...)"
            )
        return sizes[0]

    def sample(self, size: int, seed: int, last: bool = False) -> Call:
        """The call on some of its examples, drawn without replacement; as it is if it has no more.

        Args:
            size: How many examples.
            seed: Of the draws.
            last: Take the other end of the drawn order, so that two draws from one seed share no example while there
                are enough.
        """
        batch = self.batch()
        if size >= batch:
            return self
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed), device="cpu")
        return self.take(order[-size:] if last else order[:size])

    def take(self, places: Tensor) -> Call:
        """The call on the examples at these places.

        Args:
            places: Integers, in any order.
        """
        return self._pick(lambda t: t[places.to(t.device)])

    def chunks(self, size: int) -> Iterator[Call]:
        """The call over some examples at a time: tensors of the batch's leading size are cut, others passed whole.

        Args:
            size: Examples at a time.
        """
        starts = range(0, self.batch(), size)
        return (self._pick(lambda t, start=start: t[start : start + size]) for start in starts)

    def _pick(self, pick: Callable[[Tensor], Tensor]) -> Call:
        """Some examples: of the tensors of the batch's leading size."""
        batch = self.batch()
        return self.map(lambda t: pick(t) if t.dim() > 0 and t.shape[0] == batch else t)


@dataclass(frozen=True)
class Passes:
    """Several forward passes of one model that one loss was made of, each with the random state before it."""

    calls: tuple[Call, ...]
    randoms: tuple[RandomState | None, ...]


@dataclass(frozen=True)
class Labelled:
    """Inputs with the targets that a loss had on them: a metric that needs none may weigh its rows as the loss does."""

    inputs: Any
    targets: Any


def as_call(inputs: Any) -> Call:
    """What users pass as `inputs`: a tensor (one argument), a tuple (several), a dict (keywords), or a `Call`.

    Several passes become one call that holds all their arguments: for looking at, not for calling.

    Args:
        inputs: Any of these.
    """
    if isinstance(inputs, Passes):
        return Call(inputs.calls)
    if isinstance(inputs, Call):
        return inputs
    if isinstance(inputs, tuple):
        return Call(cast("tuple[Any, ...]", inputs))
    if isinstance(inputs, Mapping):
        return Call((), dict(cast("Mapping[str, Any]", inputs)))
    return Call((inputs,))


def unwrap_examples(inputs: Any) -> Any:
    """X as an optimizer hands it over: alone, as a call, or with targets."""
    return as_call(inputs.inputs if isinstance(inputs, Labelled) else inputs).unwrap()


@dataclass(frozen=True)
class RandomState:
    """What a pass may depend on besides parameters and inputs, taken so that it can be replayed.

    That are the global random states of torch, on the CPU and on the accelerators in use, of `random` and of NumPy, and
    what the model's modules keep in attributes and buffers.

    Args:
        states: Device -> state of its global generator.
        python: That of `random`.
        numpy: That of `numpy.random`, None where NumPy was not imported.
        held: What the model's modules keep, None where no model is known.
    """

    states: Mapping[torch.device, Tensor]
    python: Any = None
    numpy: Any = None
    held: HeldState | None = None

    @staticmethod
    def capture(*devices: torch.device, model: object = None, last: HeldState | None = None) -> RandomState:
        """The state now. Reads only: nothing moves.

        Args:
            *devices: Accelerators whose state is taken too.
            model: The model, if it is a module.
            last: What its modules kept at an earlier time.
        """
        wanted = {torch.device("cpu"), *devices}
        held = HeldState(model, last) if isinstance(model, nn.Module) else None
        numpy: Any = sys.modules.get("numpy")
        legacy = None if numpy is None else numpy.random.get_state()
        return RandomState({device: _get_state(device) for device in wanted}, random.getstate(), legacy, held)

    @contextmanager
    def replay(self) -> Generator[None]:
        """Inside, a pass repeats the one that followed `capture`; after it everything is as it was before."""
        with run_alone():
            held = self.held
            before = RandomState.capture(*self.states, model=None if held is None else held.model, last=held)
            try:
                self._put_back(before)
                yield
            finally:
                before._put_back(self)

    def _put_back(self, now: RandomState) -> None:
        for device, state in self.states.items():
            _set_state(device, state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.held is not None and now.held is not None:
            self.held.put_back(now.held)

    def differs_from(self, later: RandomState) -> bool:
        """Whether something was drawn from a global source between this state and a later one.

        Args:
            later: The later one.
        """
        drawn = any(not torch.equal(state, later.states[device]) for device, state in self.states.items())
        key = None if self.numpy is None or later.numpy is None else [self.numpy[1:3], later.numpy[1:3]]
        mixed = key is not None and (key[0][1] != key[1][1] or (key[0][0] != key[1][0]).any())
        return drawn or self.python != later.python or bool(mixed)


class PureModel:
    """params -> model(params; inputs) as a mathematical function: same params, same outputs.

    Buffers (running means, spectral norm vectors) are cloned inside every evaluation, so a batch norm in training mode
    works under forward- and reverse-mode transforms and leaves its statistics alone. The module's mode (train or eval)
    is used as it is.

    Args:
        model: An `nn.Module`, or a function f(params, *args) with a dict of tensors.
        call: The inputs.
        random: The state at which dropout masks and other global draws are replayed. None: the state now.

    Example:
        >>> from natgrad.ground.pure import PureModel, as_call
        >>> model = nn.Sequential(nn.Linear(2, 100), nn.Dropout(0.5))
        >>> f, params = PureModel(model, as_call(torch.ones(1, 2))), ng.trainable(model)
        >>> torch.equal(f(params), f(params))  # the same mask
        True
    """

    def __init__(self, model: Model, call: Call, random: RandomState | None = None) -> None:
        self.model = model
        self.call = call
        self.random = random or RandomState.capture(*{t.device for t in call.tensors()}, model=model)

    def __repr__(self) -> str:
        return write_choices(self, model=self.model, inputs=[tuple(t.shape) for t in self.call.tensors()])

    def __call__(self, params: Params) -> Any:
        """What the model returns.

        Args:
            params: Name -> tensor, for the parameters that differ from the module's own.
        """
        try:
            return self._evaluate(params)
        except TypeError:
            check_arguments(self.model, self.call)
            raise

    def _evaluate(self, params: Params) -> Any:
        with self.random.replay(), mark_evaluation(), full_precision(params):
            if not isinstance(self.model, nn.Module):
                return self.model(params, *self.call.args, **self.call.kwargs)
            held = {} if self.random.held is None else self.random.held.buffers
            return call_with(self.model, fill_in(self.model, params, held), *self.call.args, **self.call.kwargs)


def fill_in(module: nn.Module, params: Params, held: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
    """These parameters, with the module's own for the others, and clones of its buffers or of those that are held.

    What the model writes into clones has no consequence.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(named[name]) for name in params if name in named}
    # not detached where there is a graph: what is checkpointed is computed again with the module's own
    graph = any(p.requires_grad for p in params.values())
    state = {name: p if graph else p.detach() for name, p in module.named_parameters() if id(p) not in tied}
    return state | {name: held.get(name, buffer).clone() for name, buffer in module.named_buffers()} | dict(params)


class Within(nn.Module):
    """Calls a function while a model holds other tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def call_within(model: Model, params: Params, function: Callable[[], Any]) -> Any:
    """function() while a module holds these parameters: activations that are computed again belong to them too."""
    if not isinstance(model, nn.Module):
        return function()
    state = {f"model.{name}": tensor for name, tensor in fill_in(model, params).items()}
    return call_with(Within(model), state, function)


def check_arguments(model: Model, call: Call) -> None:
    """TypeError if the model takes other arguments than these."""
    of_module = isinstance(model, nn.Module)
    try:
        signature = inspect.signature(model.forward if of_module else model)
    except (TypeError, ValueError):  # of a builtin
        return
    name = type(model).__name__ if of_module else getattr(model, "__name__", "model")
    wrong = describe_call(name, signature, None, call.args if of_module else ({}, *call.args), call.kwargs)
    if wrong:
        raise TypeError(
            f"the inputs are not what the model takes: {wrong}; a tuple holds several arguments of the model, and a "
            "pair (inputs, targets) is for metrics that need targets, such as ng.gauss_newton(model, loss)"
        )


class SeveralPure(PureModel):
    """params -> the tuple of what several passes return, each with its own inputs and its own draws."""

    def __init__(self, model: Model, passes: Passes) -> None:
        super().__init__(model, as_call(passes), passes.randoms[0])
        pairs = zip(passes.calls, passes.randoms, strict=True)
        self.passes = [PureModel(model, call, random) for call, random in pairs]

    def __call__(self, params: Params) -> Any:
        return tuple(call(params) for call in self.passes)


def pure_model(model: Model, inputs: Any, random: RandomState | None = None) -> PureModel:
    """The pure function of a pass on these inputs, or of several passes."""
    return SeveralPure(model, inputs) if isinstance(inputs, Passes) else PureModel(model, as_call(inputs), random)


def call_with(module: nn.Module, state: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """module(*args, **kwargs) with these tensors in the place of its parameters and buffers."""
    with run_alone():
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        placed = place_tensors(module, own, state)
        try:
            return torch.func.functional_call(module, placed, args, kwargs, tie_weights=False)
        except BaseException:  # Ctrl-C while torch puts tensors in, or back, leaves some of them in the module
            for name, tensor in own.items():
                place, _, key = name.rpartition(".")
                setattr(module.get_submodule(place), key, tensor)
            raise


def place_tensors(module: nn.Module, both: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `state` under a name for each place that they have in the module, once each.

    torch's own search for tied weights writes twice into a module that has two names, and then puts the wrong tensor
    back: the module would keep the state as its own. ValueError for two values of one parameter.

    both: The module's own parameters and buffers, by all of their names.
    """
    values, placed = dict[int, Tensor](), dict[str, Tensor]()
    for name, value in state.items():
        if name not in both:
            placed[name] = value
        elif values.setdefault(id(both[name]), value) is not value:
            others = [other for other in state if both.get(other) is both[name] and other != name]
            raise ValueError(
                f"params has {name!r} and {others[0]!r} for one tensor of the model: leave one of them out"
            )
    for prefix, part in module.named_modules():  # each once
        own = [*part.named_parameters(recurse=False, remove_duplicate=False)]
        own += [*part.named_buffers(recurse=False, remove_duplicate=False)]
        placed |= {f"{prefix}.{name}".lstrip("."): values[id(t)] for name, t in own if id(t) in values}
    return placed


def run_detached(call: Callable[[], Any]) -> Any:
    """What `call()` returns, without its graph.

    For a user's code of which the value alone is wanted. Derivatives can be taken inside, which `torch.no_grad()`
    forbids: many models call `torch.autograd.grad` in their forward pass. Listeners on a model pass over it.
    """
    with torch.enable_grad(), mark_evaluation():
        return map_tensors(call(), torch.detach)


@contextmanager
def run_uncompiled() -> Generator[None]:
    """Inside, compiled models run as they were written."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # torch 2.12 takes what was asked for above for a graph that was lost
        warnings.filterwarnings("ignore", r"torch\.compile with fullgraph=True found no compiled frames", UserWarning)
        yield


class Evaluation:
    """The `with` block of a pass of the library's own: a mark per thread and task that no interrupt leaves for good.

    Ctrl-C inside the very cleanup of a block leaves a context variable set. So a mark holds only as long as the
    function that has the block runs, and the block must not stand in a generator.
    """

    entered: ClassVar[ContextVar[Evaluation | None]] = ContextVar("natgrad_evaluation", default=None)

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.outer: Evaluation | None = None
        self.frame: FrameType | None = None  # stays None in compiled code, where frames cannot be seen

    def __enter__(self) -> None:
        self.outer = Evaluation.innermost()
        if not torch.compiler.is_compiling():
            self.frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] (no public way)
        Evaluation.entered.set(self)

    def __exit__(self, *error: object) -> None:
        Evaluation.entered.set(self.outer)

    @staticmethod
    def innermost() -> Evaluation | None:
        """The innermost block that is under way; None outside of all."""
        mark = Evaluation.entered.get()
        while mark is not None and not mark.lives():
            mark = mark.outer
        return mark

    def lives(self) -> bool:
        """Whether the frame is on this thread's stack; that of another thread, which lent its context, counts."""
        if self.frame is None or self.thread != threading.get_ident():
            return True
        here: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] (no public way)
        while here is not None and here is not self.frame:
            here = here.f_back
        return here is self.frame


def mark_evaluation() -> Evaluation:
    """Inside, `is_evaluating()` holds: a forward pass that belongs to the library and not to the user."""
    return Evaluation()


def is_evaluating() -> bool:
    """Whether the pass under way is a metric's or a trial loss's, which listeners on the model pass over."""
    return Evaluation.innermost() is not None


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a class, or of one that derives from it and computes the same."""
    own, parts = type(module), ("__call__", "forward", "_conv_forward", "__iter__")
    return isinstance(module, kind) and all(getattr(own, name, None) is getattr(kind, name, None) for name in parts)


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether a tensor is inside of `torch.func.vmap`, `grad` or their like, and ends with them: it has no memory."""
    try:
        for tensor in tensors:
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def check_examples_apart(name: str, net: nn.Module) -> None:
    """ValueError for a network whose output for an example depends on the batch around it, or on a dropout's mask."""
    for path, part in cast("Iterator[tuple[str, nn.Module]]", net.named_modules()):
        where = f"{name}.{path}" if path else name
        if isinstance(part, BATCH_NORMS) and (part.training or part.running_mean is None):
            raise ValueError(
                f"{where} is a {type(part).__name__} with moments of the batch, expected a network whose output for "
                "an example is a function of that one: use nn.LayerNorm, or call .eval() if it has running moments"
            )
        if isinstance(part, DROPOUTS) and part.training and part.p > 0:
            raise ValueError(
                f"{where} is a {type(part).__name__} in training mode, expected the same network at every evaluation: "
                "call .eval(), or leave it out"
            )


def refuse_scripted(model: object) -> None:
    """TypeError for a module with trainable parameters inside of TorchScript, which is no function of them."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    for part in parts:
        if isinstance(part, torch.jit.ScriptModule) and any(p.requires_grad for p in part.parameters()):
            raise TypeError(
                "model is made by torch.jit.script or torch.jit.trace, or a part of it that is trained is: TorchScript "
                "hides its layers. Train the module that it was made of, and script it afterwards; torch.compile works"
            )


def refuse_jagged(tensors: Iterable[Tensor], where: str) -> None:
    """ValueError for nested tensors, whose rows have lengths of their own."""
    if any(t.is_nested for t in tensors):
        raise ValueError(
            f"{where} is a nested tensor, whose rows have lengths of their own, which no metric takes yet: pad it, "
            "torch.nested.to_padded_tensor(x, 0.0), and mask the padding, or call layers on its rows, x.values()"
        )


def check_call(model: Model, call: Call, params: Params) -> None:
    """ValueError if params has names that the model lacks, or if an input lies on another device."""
    refuse_scripted(model)
    refuse_jagged(call.tensors(), "an input of the model")
    if isinstance(model, nn.Module):
        for part in model.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.scale_grad_by_freq:
                raise ValueError(
                    f"{part} divides its gradient by how often a row was read, which is the derivative of no function: "
                    "leave out scale_grad_by_freq=True; the metric counts how often each row is read. ng.kfac and its "
                    "like take it, with a diagonal"
                )
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        unknown = set(params) - known
        if unknown:
            raise ValueError(f"params has {sorted(unknown)}, which the model lacks; use ng.trainable(model)")
    device = next(iter(params.values())).device
    strays = {str(t.device) for t in call.tensors() if t.dim() > 0 and t.device != device}
    if strays:
        raise ValueError(f"inputs lie on {sorted(strays)} but params on {device}; move both to one device")


def check_select(outputs: object) -> None:
    """TypeError unless `outputs` is a function of what a model returns, or None."""
    if outputs is not None and not callable(outputs):
        raise TypeError(
            f"outputs is {outputs!r}, expected a function of what the model returns, such as lambda out: out.logits"
        )


def full_precision(params: Params) -> torch.autocast:
    """Autocast off: products taken outside of it must meet the dtypes that the graph was built with."""
    return torch.autocast(next(iter(params.values())).device.type, enabled=False)


def mixes_examples(model: Model) -> bool:
    """True if a batch norm in training mode makes one example's output depend on the others."""
    if not isinstance(model, nn.Module):
        return False
    return any(isinstance(module, BATCH_NORMS) and module.training for module in model.modules())


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, depth first."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in cast("Sequence[Any]", tree):
            yield from leaves(branch)
    elif isinstance(tree, Mapping):
        for branch in cast("Mapping[Any, Any]", tree).values():
            yield from leaves(branch)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for part in fields(tree):
            yield from leaves(getattr(tree, part.name))


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting of tuples, lists, dicts and dataclasses with every tensor changed; anything else is kept."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(branch, change) for key, branch in cast("Mapping[Any, Any]", tree).items()}
        # Hugging Face's outputs are dataclasses and mappings
        return cast("Any", replace)(tree, **changed) if is_dataclass(cast("Any", tree)) else changed
    if isinstance(tree, (tuple, list)):
        kind: Any = cast("Any", tree).__class__
        parts = [map_tensors(branch, change) for branch in cast("Sequence[Any]", tree)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if is_dataclass(tree) and not isinstance(tree, type) and any(True for _ in leaves(tree)):
        parts = {part.name: map_tensors(getattr(tree, part.name), change) for part in fields(tree) if part.init}
        return replace(tree, **parts)
    return tree


def keep(tree: Any) -> Any:
    """A user's tensors for later use, without graph.

    Torch counts in-place changes of a tensor whose memory it owns. Memory that it shares with an array of NumPy's, with
    another library or with another process changes without a word, and is copied.
    """
    return map_tensors(tree, lambda t: t.detach().clone() if shares_memory(t) else t.detach())


def copy_tensors(tree: Any) -> Any:
    """A user's tensors in memory of their own, without graph."""
    return map_tensors(tree, lambda t: t.detach().clone())


def shares_memory(tensor: Tensor) -> bool:
    """Whether something other than torch in this process may write into the tensor's memory."""
    try:
        return not tensor.untyped_storage().resizable() or (
            tensor.device.type == "cpu" and cast("Any", tensor).is_shared()
        )
    except (NotImplementedError, RuntimeError):  # tensors without a storage: sparse ones, wrappers
        return False


def _get_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


# Who hears of a loss: a structure or an optimiser may want the examples that a loss of a density went backward on


_LISTENERS: weakref.WeakKeyDictionary[object, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def listen_to(log_p: object, listener: Any) -> None:
    """Call `listener.hear(log_p, X)` at every backward of a loss of log_p on X. Neither is kept alive."""
    try:
        _LISTENERS.setdefault(_source(log_p), weakref.WeakSet()).add(listener)
    except TypeError:  # unhashable, or no weak references: the optimizer then asks for observe(X)
        return


def announce(log_p: object, inputs: Tensor, value: Tensor) -> Tensor:
    """The loss's value, which tells log_p's listeners about X once `backward` reaches it."""
    if value.requires_grad and is_concrete(value) and is_concrete(inputs):
        apply: Callable[..., Tensor] = getattr(Announced, "apply")  # noqa: B009 (torch declares no types of it)
        return apply(value, keep(inputs), log_p)
    return value


class Announced(torch.autograd.Function):
    """y -> y, whose backward tells log_p's listeners about X, which goes with the rest that the graph saved."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inputs: Tensor, log_p: object) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.log_p = log_p
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        try:
            listeners = list(_LISTENERS.get(_source(ctx.log_p), ()))
        except TypeError:
            listeners = []
        for listener in listeners:
            listener.hear(ctx.log_p, *ctx.saved_tensors)
        return gradients[0], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0]


def _source(log_p: object) -> object:
    """What stays the same between two mentions: the object behind a bound method, a new one at each mention."""
    return getattr(log_p, "__self__", log_p)


# Parameters that outputs depend on and their graph does not know: a derivative of zero that is not known to be one

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
    """
    graph = Ancestors.of(outputs)
    missing = [name for name, leaf in leaves.items() if id(leaf) not in graph.variables]
    if not (missing or graph.opaque):
        return
    own = dict(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else {}
    with run_alone():  # `.grad` of the model's own parameters is taken away for a while
        hidden = compare_backward(outputs, leaves, own, graph) if own or graph.opaque else []
    if hidden:
        raise ValueError(HIDDEN.format(names=sorted(hidden)))
    if not own and graph.opaque and evaluate is not None:
        moved = [name for name in missing if moves_outputs(name, leaves, outputs, evaluate)]
        if moved:
            raise ValueError(HIDDEN.format(names=sorted(moved)) + MEANT)


@dataclass(frozen=True)
class Ancestors:
    """What a tensor was computed from."""

    variables: Mapping[int, Tensor]  # the leaves of its graph by `id`
    opaque: frozenset[str]  # functions in the graph that are written in Python, whose backward passes may do anything

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
            if isinstance(node, BackwardCFunction) and not kind_of(node).startswith("CompiledFunction"):
                opaque.add(kind_of(node))
            leaf = leaf_of(node)
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
