"""What the optimizer's tests share: one iteration, flat parameters, snapshots, and the step written out densely."""

from __future__ import annotations

import copy
import gc
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from traceback import clear_frames
from types import FrameType
from typing import Any

import torch
from models import Case, assert_close, build_seeded, draw, mlp, reference_metric
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import Likelihood
from natgrad.ground.pure import renew_lock

X = draw(8, 3)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
CE = nn.CrossEntropyLoss()
BLOCK_RECIPES = [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise, ng.online_ng, ng.tonga]
"""Those that keep a block per layer."""
FREE_RECIPES = [ng.hessian_free, ng.natgrad_cg, ng.krylov_subspace]
"""Those that solve by products with the metric."""
RECIPES = [*BLOCK_RECIPES, *FREE_RECIPES]
Build = Callable[[nn.Module, Any], Any]
LOOKING: dict[str, Build] = {
    "hessian_free": ng.hessian_free,
    "krylov_subspace": lambda m, loss: ng.krylov_subspace(m, loss, dimension=4, steps=3, damping=0.1),
    "natgrad_cg": lambda m, loss: ng.natgrad_cg(m, loss, damping=ng.LevenbergMarquardt()),
    "line search": lambda m, loss: ng.NaturalGradient(m, ng.fisher(m, loss), rule=ng.LineSearch(), damping=0.1),
    "kfac, judged": lambda m, loss: ng.kfac(
        m, loss, damping=ng.LevenbergMarquardt(0.1, per="block", every=1), update_every=1
    ),
}
"""Optimizers that evaluate the loss again, at every step."""


def net() -> nn.Module:
    """(b, 3) -> three logits, 31 parameters."""
    return mlp(3, 4, 3)


def flat(model: nn.Module | Mapping[str, Tensor]) -> Tensor:
    """All parameters, (n,), a copy."""
    params = list(model.parameters()) if isinstance(model, nn.Module) else list(model.values())
    return torch.cat([p.detach().reshape(-1) for p in params])


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients, (n,)."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def iterate(opt: Any, model: nn.Module, x: Any = X, y: Any = Y) -> Tensor:
    """The ordinary loop's body; the loss before the step."""
    opt.zero_grad()
    loss = opt.loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def train_batches(opt: Any, model: nn.Module, batches: Iterable[tuple[Any, Any]]) -> list[float]:
    """The loss at each batch (inputs, targets), before the step on it."""
    return [float(iterate(opt, model, x, y)) for x, y in batches]


def train(opt: Any, model: nn.Module, steps: int, x: Any = X, y: Any = Y) -> list[float]:
    """The loss before each step on one batch."""
    return train_batches(opt, model, [(x, y)] * steps)


def is_finite(model: nn.Module) -> bool:
    """Whether all parameters and buffers are."""
    return all(bool(t.isfinite().all()) for t in model.state_dict().values())


def fisher_step(model: nn.Module, x: Tensor, family: Likelihood, gradient: Tensor, damping: float) -> Tensor:
    """(F + damping I)^-1 g with F by definition."""
    matrix = reference_metric(Case(net, x, family), model, ng.trainable(model))
    return torch.linalg.solve(matrix + damping * torch.eye(len(matrix)).to(matrix), gradient)


def mean_gradient(model: nn.Module, x: Tensor, y: Tensor, criterion: nn.Module = CE) -> Tensor:
    """The mean loss's gradient on a copy of the model."""
    twin = copy.deepcopy(model)
    criterion(twin(x), y).backward()
    return flat_gradient(twin)


def deep(value: Any) -> Any:
    """A copy that later changes cannot reach."""
    return copy.deepcopy(value)


def pass_through_file(value: Any, weights_only: bool = True) -> Any:
    """What a file of it gives back, to who trusts no code in it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def train_numbered(model: nn.Module, opt: Any, steps: range) -> None:
    """Steps on data that depend on the step's number alone."""
    for k in steps:
        iterate(opt, model, X + 0.1 * draw(8, 3, seed=100 + k), Y.roll(k))


def same(first: Any, second: Any) -> bool:
    """Bitwise equality of nested dicts, lists and tensors."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def snapshot(opt: ng.NaturalGradient) -> Any:
    """Parameters, buffers and the optimizer's state, copied."""
    model = opt.model
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    return deep({name: t.detach() for name, t in tensors.items()}), deep(opt.state_dict())


def assert_step(model: nn.Module, before: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    """The parameters moved by `expected`."""
    assert_close(flat(model) - before, expected, rtol)


def global_random_state_is_untouched(action: Callable[[], Any]) -> bool:
    """Whether `action` leaves the CPU's global generator as it was."""
    before = torch.get_rng_state()
    action()
    return torch.equal(before, torch.get_rng_state())


def build(model: nn.Module, criterion: Any = CE, **choices: Any) -> ng.NaturalGradient:
    """A small optimizer with an exact solve."""
    return ng.NaturalGradient(model, ng.fisher(model, criterion), **{"lr": 0.5, "damping": 0.1, **choices})


def move_copy(model: nn.Module, criterion: Any, x: Any, y: Any, **choices: Any) -> Tensor:
    """Parameters after one step from a copy of the model."""
    twin = copy.deepcopy(model)
    iterate(build(twin, criterion, **choices), twin, x, y)
    return flat(twin)


def dropout_net() -> nn.Module:
    """Random masks after each of two layers."""
    return build_seeded(
        lambda: nn.Sequential(
            nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 3)
        )
    )


def count_hooks(model: nn.Module) -> int:
    """Those that a forward pass goes through, of all its modules."""
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())


def collect_warnings(act: Callable[[], Any]) -> list[str]:
    """What an action warns of, each time that it does."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in found]


class Closure:
    """Clears, computes, goes backward, counts."""

    def __init__(self, opt: ng.NaturalGradient, compute: Callable[[], Tensor]) -> None:
        self.opt, self.compute, self.values = opt, compute, []

    def __call__(self) -> Tensor:
        self.opt.zero_grad()
        value = self.compute()
        value.backward()
        self.values.append(float(value.detach()))
        return value


def kind(choice: Any) -> str:
    """A test's name for a choice: its type, where the arguments do not matter."""
    return type(choice).__name__


FOLDER = str(Path(ng.__file__).parent) + os.sep


def is_of_natgrad(frame: FrameType) -> bool:
    """Whether a frame runs a file of the package, whatever the folder that the package lies in is called."""
    return frame.f_code.co_filename.startswith(FOLDER)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in natgrad, or in these files; counts them for n = 0."""

    def __init__(self, n: int = 0, *files: str) -> None:
        self.n, self.seen, self.files = n, 0, files

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not (frame.f_code.co_filename.endswith(self.files) if self.files else is_of_natgrad(frame)):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.n:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Interrupt:
        self.before, self.collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # another optimizer's finalizer would swallow the interrupt
        sys.settrace(self)
        return self

    def __exit__(self, *error: Any) -> bool:
        sys.settrace(self.before)
        if self.collects:
            gc.enable()
        clear_frames(error[2])  # of a generator that is left in one: what it puts back at its end, it puts back now
        renew_lock()  # at the line that ends a `with lock:` Python itself raises no interrupt, and tracing does
        return isinstance(error[1], KeyboardInterrupt)


def assert_whole_or_nothing(prepare: Callable[[], Any], first: int, stride: int, last: range) -> tuple[Any, int]:
    """A step that is interrupted at any line has happened whole or not at all, and is taken once if it is called again.

    Args:
        prepare: An optimizer before that step.
        first: The first line that is tried.
        stride: How many lines lie between two that are tried.
        last: The lines that are tried at the end, where the state is written, counted from the last one.

    Returns:
        The optimizer after a whole step, and its number of lines.
    """

    def interrupt_step(n: int) -> tuple[Any, Any, Interrupt]:
        opt = prepare()
        opt.zero_grad()
        opt.loss(opt.model(X), Y).backward()
        before = snapshot(opt)
        with Interrupt(n) as interrupt:
            opt.step()
        return opt, before, interrupt

    done, _, count = interrupt_step(0)
    whole, lines, outcomes = snapshot(done), count.seen, set()
    for n in [*range(first, lines + last.start, stride), *(lines + k for k in last)]:
        opt, before, _ = interrupt_step(n)
        now = snapshot(opt)
        outcomes.add("nothing" if same(now, before) else "all" if same(now, whole) else f"a part, line {n} of {lines}")
        if n <= lines - 3:  # in the last ones the step has returned already
            opt.step()
            assert same(snapshot(opt), whole), "called again, it takes that step, once"
        assert torch.isfinite(iterate(opt, opt.model))
        assert is_finite(opt.model)
    assert outcomes == {"nothing", "all"}
    return done, lines
