"""What a step asks of a device: kernels, reads, state. `python -m benchmarks accelerator`.

Counts hold for every device: an operation that computes something counts as one launch, views count as none. Where
there is an accelerator, GPT-2 small's shape is trained on it, with time and memory; without one a model as deep and
twelve times as narrow is, since counts depend on depth alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch's documented way to see every operation

import natgrad as ng
from natgrad.ground.pure import leaves
from natgrad_lab.experiments.contestants import JoinedOptimizers

FIRST = 9  # steps, the last ones of which are natural, with updates and without
HEADS = ("launches", "reads", "bytes of state per parameter", "ms", "MiB")
VIEWS = ("view", "unbind", "select", "slice", "transpose", "as_strided", "squeeze", "expand", "detach", "diagonal")
VIEWS += ("split", "alias", "permute", "reshape", "lift", "is_", "t.default", "promote_types", "_local_scalar")


class OperationCount(TorchDispatchMode):
    """Counts operations that compute, and reads of a device's numbers by the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.launches, self.reads = device, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.launches += not any(view in name for view in VIEWS)
        self.reads += "_local_scalar" in name and args[0].device.type == self.device.type
        return func(*args, **(kwargs or {}))


class ListCount(TorchFunctionMode):
    """Counts reads of whole tensors, `tolist`, which no operation stands for."""

    def __init__(self, counts: OperationCount) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.reads += func is Tensor.tolist and args[0].device.type == self.counts.device.type
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Shape:
    """Of a GPT."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    tokens: int = 50_257
    length: int = 512
    rows: int = 8


class GPT(nn.Module):
    """As GPT-2 is built, with PyTorch's own layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.tokens, shape.width)
        self.place = nn.Parameter(0.02 * torch.randn(shape.length, shape.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width, shape.heads, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(shape.layers)
        )
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.embed(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h)).flatten(0, 1)


def make_adamw(model: nn.Module) -> Any:
    fused = next(model.parameters()).device.type != "cpu"
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused, foreach=None if fused else True)


def make_muon(model: nn.Module) -> Any:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    own = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in own]
    return JoinedOptimizers(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4, foreach=True))


def count_state(optimizer: Any) -> int:
    """Bytes of all tensors that are kept between steps."""
    if isinstance(optimizer, ng.StructuredNaturalGradient):
        return ng.report_sharing(optimizer).state_bytes
    parts = optimizer.parts if isinstance(optimizer, JoinedOptimizers) else [optimizer]
    return sum(t.numel() * t.element_size() for part in parts for t in leaves(dict(part.state)))


@dataclass(frozen=True)
class StepCost:
    """Of one step, without the model's own passes; seconds with them, 0 where they were not taken."""

    launches: int
    reads: int
    seconds: float


def run(make: Callable[[nn.Module], Any], shape: Shape, device: torch.device, steps: int) -> tuple[list[StepCost], str]:
    """Some steps, counted and timed by turns, and the bytes of state per parameter."""
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    optimizer, costs, fast = make(model), list[StepCost](), device.type != "cpu"
    generator = torch.Generator(device).manual_seed(1)
    for step in range(steps):
        x = torch.randint(shape.tokens, (shape.rows, shape.length + 1), generator=generator, device=device)
        counts = OperationCount(device) if not fast or step % 2 else None  # counting takes time
        if fast:
            torch.accelerator.synchronize()
        start = time.perf_counter()
        # one step on tokens (rows, length + 1); what it launches is counted where somebody counts
        natural = isinstance(optimizer, ng.StructuredNaturalGradient)
        optimizer.zero_grad()
        outputs, y = model(x[:, :-1]), x[:, 1:].flatten()
        with ExitStack() as counting:
            if natural and counts is not None:
                counting.enter_context(counts)
                counting.enter_context(ListCount(counts))
            loss = optimizer.loss(outputs, y) if natural else nn.functional.cross_entropy(outputs, y)
        loss.backward()
        with ExitStack() as counting:
            if counts is not None:
                counting.enter_context(counts)
                counting.enter_context(ListCount(counts))
            optimizer.step()
        if fast:
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        costs.append(StepCost(0, 0, seconds) if counts is None else StepCost(counts.launches, counts.reads, 0.0))
    size = sum(p.numel() for p in model.parameters())
    return costs, f"{count_state(optimizer) / size:.1f}"


def report(steps: int = 90) -> list[tuple[str, ...]]:
    """The table. A step is that of `opt.loss` and `opt.step`: of the last third, and of the first for natural steps."""
    fast = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if fast else torch.device("cpu")
    assert device is not None
    shape = Shape() if fast else Shape(width=64, heads=4, tokens=60, length=16, rows=4)
    rows = list[tuple[str, ...]]()
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "ng.kfac": lambda model: ng.kfac(model, nn.CrossEntropyLoss()),
        "AdamW": make_adamw,
        "Muon, AdamW for the rest": make_muon,
    }
    for name, make in makers.items():
        if fast:
            torch.accelerator.reset_peak_memory_stats()
        costs, state = run(make, shape, device, steps)
        memory = f"{torch.accelerator.max_memory_allocated() / 2**20:.0f}" if fast else "-"
        late, first = costs[2 * steps // 3 :], [cost for cost in costs[3:FIRST] if cost.launches]
        counted = sorted((cost.launches, cost.reads) for cost in late if cost.launches)
        times = sorted(cost.seconds for cost in late if cost.seconds)
        # torch keeps counts of steps in tensors on the host, which a processor does not tell from the device's
        shows = fast or name == "ng.kfac"
        kinds = {f"{name}: a quiet step": 0, f"{name}: a step that updates": -1} if name == "ng.kfac" else {name: 0}
        for kind, place in kinds.items():
            launches, reads = counted[place]
            ms = f"{1e3 * times[place if place else len(times) // 2]:.1f}" if times else "-"
            rows.append((kind, str(launches), str(reads) if shows else "-", state, ms, memory))
        if name == "ng.kfac":
            natural = sorted((cost.launches, cost.reads) for cost in first)
            rows += [
                (f"{name}: a natural step{more}", str(launches), str(reads), "", "-", "")
                for more, (launches, reads) in ((", quiet", natural[0]), (" that updates", natural[-1]))
            ]
    return rows
