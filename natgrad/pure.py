"""A model as a pure function of its parameters: buffers untouched, random draws fixed, chunked."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from natgrad.held_states import BATCH_NORMS, HeldState
from natgrad.scoped_values import Holding, ScopedValue
from natgrad.shown_tables import write_choices
from natgrad.spaces import Params

Model = nn.Module | Callable[..., Any]
Select = Callable[[Any], Any]
"""What is taken of a model's outputs."""

_EVALUATING = ScopedValue("natgrad_evaluating", False)

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
        return list(leaves((self.args, dict(self.kwargs))))

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every tensor changed.

        Args:
            change: A function of a tensor.
        """
        return Call(map_tensors(self.args, change), map_tensors(dict(self.kwargs), change))

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
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
        drawn = order[-size:] if last else order[:size]

        def pick(tensor: Tensor) -> Tensor:
            return tensor[drawn.to(tensor.device)] if tensor.dim() > 0 and tensor.shape[0] == batch else tensor

        return self.map(pick)

    def chunks(self, size: int) -> Iterator[Call]:
        """The call over some examples at a time: tensors of the batch's leading size are cut, others passed whole.

        Args:
            size: Examples at a time.
        """
        batch = self.batch()

        def cut(start: int) -> Callable[[Tensor], Tensor]:
            return lambda t: t[start : start + size] if t.dim() > 0 and t.shape[0] == batch else t

        return (self.map(cut(start)) for start in range(0, batch, size))


@dataclass(frozen=True)
class Passes:
    """Several forward passes of one model that one loss was made of, each with the random state before it.

    Args:
        calls: The passes, in order.
        randoms: The random state before each, or None.
    """

    calls: tuple[Call, ...]
    randoms: tuple[RandomState | None, ...]


@dataclass(frozen=True)
class Labelled:
    """Inputs with the targets that a loss had on them: a metric that needs none may weigh its rows as the loss does.

    Args:
        inputs: As the model takes them.
        targets: As the loss takes them.
    """

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
    inner = inputs.inputs if isinstance(inputs, Labelled) else inputs
    call = as_call(inner)
    return call.args[0] if len(call.args) == 1 and not call.kwargs else inner


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
        held = HeldState.capture(model, last) if isinstance(model, nn.Module) else None
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
        >>> from natgrad.pure import PureModel, as_call
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
        with self.random.replay(), mark_evaluation(), full_precision(params):
            if not isinstance(self.model, nn.Module):
                return self.model(params, *self.call.args, **self.call.kwargs)
            held = self.random.held
            state = frozen_state(self.model, set(params), {} if held is None else held.buffers) | dict(params)
            return call_with(self.model, state, *self.call.args, **self.call.kwargs)


class SeveralPure(PureModel):
    """params -> the tuple of what several passes return, each with its own inputs and its own draws.

    Args:
        model: An `nn.Module`, or a function f(params, *args).
        passes: The passes.
    """

    def __init__(self, model: Model, passes: Passes) -> None:
        super().__init__(model, as_call(passes), passes.randoms[0])
        pairs = zip(passes.calls, passes.randoms, strict=True)
        self.passes = [PureModel(model, call, random) for call, random in pairs]

    def __call__(self, params: Params) -> Any:
        return tuple(one(params) for one in self.passes)


def pure_model(model: Model, inputs: Any, random: RandomState | None = None) -> PureModel:
    """The pure function of a pass on these inputs, or of several passes.

    model: An `nn.Module`, or a function f(params, *args).
    """
    return SeveralPure(model, inputs) if isinstance(inputs, Passes) else PureModel(model, as_call(inputs), random)


def call_with(module: nn.Module, state: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """module(*args, **kwargs) with these tensors in the place of its parameters and buffers."""
    with run_alone():
        return torch.func.functional_call(module, dict(state), args, kwargs)


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


def mark_evaluation() -> Holding[bool]:
    """Inside, `is_evaluating()` holds: a forward pass that belongs to the library and not to the user."""
    return _EVALUATING.holding(True)


def is_evaluating() -> bool:
    """Whether the pass under way is a metric's or a trial loss's, which listeners on the model pass over."""
    return _EVALUATING.get()


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


def frozen_state(model: nn.Module, given: set[str], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached parameters and cloned buffers: what a pure call may read, and write without consequence."""
    tied = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in given}
    params = {name: p.detach() for name, p in model.named_parameters() if id(p) not in tied}
    return params | {name: buffers.get(name, buffer).clone() for name, buffer in model.named_buffers()}


def mixes_examples(model: Model) -> bool:
    """True if a batch norm in training mode makes one example's output depend on the others."""
    if not isinstance(model, nn.Module):
        return False
    return any(isinstance(module, BATCH_NORMS) and module.training for module in model.modules())


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, depth first."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Call):
        yield from leaves((tree.args, tree.kwargs))
    elif isinstance(tree, Mapping):
        for branch in cast("Mapping[Any, Any]", tree).values():
            yield from leaves(branch)
    elif isinstance(tree, (tuple, list)):
        for branch in cast("Sequence[Any]", tree):
            yield from leaves(branch)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for part in fields(tree):
            yield from leaves(getattr(tree, part.name))


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting of tuples, lists, dicts and dataclasses with every tensor changed; anything else is kept."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Call):
        return tree.map(change)
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
