"""How much of the house a step enters: files and functions, by a profiler. `python -m benchmarks engine`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng

HEADS = ("files", "functions", "of them in optim/", "within opt.loss")
ROOT = str(Path(ng.__file__).parent)


class CodeEntered:
    """Counts what is called under a folder."""

    def __init__(self) -> None:
        self.functions = set[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            self.functions.add((code.co_filename, code.co_qualname))

    def __enter__(self) -> CodeEntered:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


class Pictures(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)
        )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def take_step(opt: Any, model: nn.Module, x: Tensor, y: Tensor) -> tuple[CodeEntered, CodeEntered]:
    """What a step enters, and `opt.loss` of it."""
    opt.zero_grad()
    outputs = model(x)
    with CodeEntered() as loss:
        value = opt.loss(outputs, y)
    with CodeEntered() as step:
        value.backward()
        opt.step()
    step.functions |= loss.functions
    return step, loss


def report() -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    cases: list[tuple[str, Callable[[], nn.Module], Callable[..., Any]]] = [
        ("ng.kfac, perceptron", perceptron, ng.kfac),
        ("ng.kfac, convolution", Pictures, ng.kfac),
        ("ng.hessian_free, perceptron", perceptron, ng.hessian_free),
    ]
    for name, build, recipe in cases:
        torch.manual_seed(0)
        x, y = torch.randn(128, 64), torch.randint(10, (128,))
        model = build()
        opt = recipe(model, nn.CrossEntropyLoss())
        steps = [take_step(opt, model, x, y) for _ in range(30)]
        largest = max(steps[1:], key=lambda step: len(step[0].functions))
        least = min(steps[1:], key=lambda step: len(step[0].functions))
        for kind, (step, loss) in (("a step that updates", largest), ("the least step", least)):
            files, within = ({file for file, _ in part.functions} for part in (step, loss))
            own = ({file for file in part if "/optim/" in file} for part in (files, within))
            rows.append((f"{name}: {kind}", *(str(len(part)) for part in (files, step.functions, *own))))
    return rows
