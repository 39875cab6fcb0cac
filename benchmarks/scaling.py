"""What a step of `ng.kfac` takes on 1 to 4096 processes: predicted from counted operations and rates of kernels.

`python -m benchmarks.scaling --model gpt2-small --ranks 8 64 512 4096` prints predictions for one machine's rates,
which are arguments; `python -m benchmarks.scaling_measured` holds them against 2 and 4 processes on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

from torch import nn

import natgrad as ng
from natgrad.ground.spaces import Space, trainable
from natgrad.layers.kinds import known_layers
from natgrad.optim.processes import BUCKET, Cost, balance, cost_of, list_strips


@dataclass(frozen=True)
class Matrix:
    """One layer: `outputs` rows of `inputs` columns, the bias counted in, seen at `places` positions of an example."""

    outputs: int
    inputs: int
    places: int
    bias: bool = True
    table: bool = False

    @property
    def size(self) -> int:
        return self.outputs * (self.inputs + self.bias)

    def module(self) -> nn.Module:
        """A layer with these factors, without memory for its entries."""
        if self.table:
            return nn.Embedding(self.outputs, self.inputs, device="meta")
        return nn.Linear(self.inputs, self.outputs, bias=self.bias, device="meta")


@dataclass(frozen=True)
class ScalingWorkload:
    """A model, and how many examples a process has of it in a step."""

    name: str
    layers: tuple[Matrix, ...]
    batch: int

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """What the library's owners count, by block."""
        model = nn.ModuleList(layer.module() for layer in self.layers)
        structure = ng.Kronecker()
        layers = known_layers(model, Space(trainable(model))).values()
        return {layer.key: cost_of(layer.layout, structure.inverted_sizes(layer)) for layer in layers}


def gpt2(name: str, width: int, depth: int, batch: int, places: int = 1024) -> ScalingWorkload:
    sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [Matrix(o, i, places) for o, i in sizes]
    return ScalingWorkload(name, (Matrix(50257, width, places, False, True), *block * depth), batch)


def llama(name: str, width: int, inner: int, depth: int, batch: int, places: int = 4096) -> ScalingWorkload:
    sizes = [*[(width, width)] * 4, (inner, width), (inner, width), (width, inner)]
    block = [Matrix(o, i, places, False) for o, i in sizes]
    ends = Matrix(32000, width, places, False, True), Matrix(32000, width, places, False)
    return ScalingWorkload(name, (*ends, *block * depth), batch)


def resnet50(batch: int) -> ScalingWorkload:
    """Its convolutions, as matrices over unfolded patches."""
    layers, inputs, side = [Matrix(64, 147, 112**2, False)], 64, 56
    for width, repeats in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for k in range(repeats):
            before, side = side, side // 2 if k == 0 and width > 64 else side
            layers += [Matrix(width, inputs, before**2, False), Matrix(width, 9 * width, side**2, False)]
            layers += [Matrix(4 * width, width, side**2, False)]
            layers += [Matrix(4 * width, inputs, side**2, False)] if k == 0 else []
            inputs = 4 * width
    return ScalingWorkload("resnet50", (*layers, Matrix(1000, 2048, 1)), batch)


def perceptron(widths: Sequence[int], batch: int, name: str = "perceptron") -> ScalingWorkload:
    pairs = pairwise(widths)
    return ScalingWorkload(name, tuple(Matrix(o, i, 1) for i, o in pairs), batch)


def transformer(width: int, depth: int, batch: int) -> ScalingWorkload:
    """The laboratory's, over characters."""
    sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    ends = Matrix(65, width, 64, False, True), Matrix(64, width, 64, False, True), Matrix(65, width, 64)
    return ScalingWorkload(
        f"transformer {depth} x {width}", (*ends, *[Matrix(o, i, 64) for o, i in sizes] * depth), batch
    )


WORKLOADS: dict[str, Callable[[], ScalingWorkload]] = {
    "autoencoder": lambda: perceptron([784, 1000, 500, 250, 30, 250, 500, 1000, 784], 256, "autoencoder"),
    "transformer": lambda: transformer(128, 2, 64),
    "resnet50": lambda: resnet50(64),
    "gpt2-small": lambda: gpt2("gpt2-small", 768, 12, 16),
    "gpt2-medium": lambda: gpt2("gpt2-medium", 1024, 24, 16),
    "gpt2-large": lambda: gpt2("gpt2-large", 1280, 36, 8),
    "gpt2-xl": lambda: gpt2("gpt2-xl", 1600, 48, 8),
    "7b": lambda: llama("7b", 4096, 11008, 32, 2),
}


@dataclass(frozen=True)
class Machine:
    """Rates of kernels and links, per process. The defaults are assumptions for an H200, none was measured."""

    gemm: float = 4e14  # operations a second of the forward and backward pass: 40 % of 989e12 in bfloat16
    exact: float = 2e14  # operations a second in the statistics' own precision: 40 % of 495e12 in TF32
    inverse: float = 5e12  # n^3 a second for a damped inverse by Cholesky
    near: float = 3.6e11  # bytes a second within a node
    far: float = 4e10  # bytes a second and process between nodes: 400 Gbit/s, 80 % of it
    latency: float = 2e-5  # seconds that a message takes at least, per doubling of the processes
    node: int = 8  # processes in one
    weight: int = 2  # bytes of a parameter and of its gradient
    number: int = 4  # bytes of a statistic
    copies: float = 2e12  # bytes a second that are copied: messages are put together, and taken apart; a guess
    fixed: float = 0.0  # seconds of a step that nothing here explains

    def exchange(self, size: float, ranks: int, messages: float, factor: float = 1.0) -> float:
        """Seconds for `size` bytes: reduced within the nodes, then between, each process a share. factor: 2 to all."""
        if ranks == 1:
            return 0.0
        k, nodes = min(ranks, self.node), -(-ranks // self.node)
        seconds = size * (k - 1) / k / self.near + size / k * (nodes - 1) / nodes / self.far
        return factor * seconds + messages * self.latency * (ranks - 1).bit_length()


@dataclass(frozen=True)
class Prediction:
    """One step's means in seconds, of the process that has the most to do, and what it keeps and sends in bytes."""

    gradient: float  # forward and backward pass
    averaging: float  # of the gradients; nothing hides it here
    statistics: float  # second backward pass and second moments
    summing: float  # statistics are added up
    inverting: float
    sending: float  # of inverses or directions
    directing: float  # products with inverses
    copying: float  # into messages and out of them
    work: float  # n^3 of this process's inversions, as a share of all
    state: float  # bytes remembered between steps
    weights: float  # bytes of parameters and gradients
    update_bytes: float  # in messages, at an update: as `ng.report_sharing` counts statistics and inverses
    step_bytes: float  # in messages, at every step beside the gradients: directions

    @property
    def base(self) -> float:
        """Seconds without natgrad."""
        return self.gradient + self.averaging

    @property
    def seconds(self) -> float:
        mine = self.statistics, self.summing, self.inverting, self.sending, self.directing, self.copying
        return self.base + sum(mine)


@dataclass(frozen=True)
class PartLayout:
    """Who has which part of the model."""

    shards: int = 1  # processes that parameters and gradients lie on in parts (`fully_shard`)
    tensor: int = 1  # processes that share a layer's products (tensor parallelism); the data's are ranks / tensor


def predict(
    load: ScalingWorkload,
    machine: Machine,
    ranks: int,
    share: str,
    mesh: PartLayout = PartLayout(),
    *,
    update_every: int = 20,
    invert_every: int = 20,
) -> Prediction:
    """One step. ranks: processes. share: "speed" or "memory". update_every, invert_every: steps between two."""
    costs, tensor = load.costs, mesh.tensor
    data, memory = max(1, ranks // tensor), share == "memory"
    owners = balance(costs, costs, {}, data, memory)
    heaviest = [sum(costs[k].work for k, o in owners.items() if o == r) for r in range(min(data, len(costs)))]
    stored = [sum(costs[k].state for k, o in owners.items() if o == r) for r in range(min(data, len(costs)))]
    total, most = sum(cost.work for cost in costs.values()), max(heaviest)
    positions = [(layer, load.batch * layer.places) for layer in load.layers]
    forward = sum(2.0 * layer.size * t for layer, t in positions if not layer.table)
    moments = sum(2.0 * t * ((0 if m.table else m.outputs**2) + (m.inputs + m.bias) ** 2) for m, t in positions)
    products = [2.0 * m.size * ((0 if m.table else m.outputs) + m.inputs + m.bias) for m in load.layers]
    statistics = machine.number * sum(kept_numbers(m) for m in load.layers)
    sums = machine.number * sum(kept_numbers(m, sent=True) for m in load.layers)
    update = sums + (0 if memory else statistics) if data > 1 else 0
    parts = 4.0 * load.size if memory and data > 1 else 0.0
    gathers = load.batch * sum(m.places * (m.inputs + m.outputs) for m in load.layers) * 2.0 if tensor > 1 else 0.0
    inner = replace(machine, node=min(machine.node, tensor))
    summing = machine.exchange(
        sums, data, max(sums / BUCKET, min(data, len(costs)) if memory else 1), 1 if memory else 2
    )
    sending = machine.exchange(parts, data, min(data, len(costs))) if memory else 0.0
    # statistics into messages and out of them; inverses out of a message, those of an owner into one; directions too
    taken = statistics / data if memory else 2 * statistics + statistics / data
    copied = (sums + taken) / update_every + parts + parts / data if data > 1 else 0.0
    if not memory:
        sending = machine.exchange(statistics, data, min(data, len(costs))) / invert_every
    return Prediction(
        gradient=3 * forward / machine.gemm / tensor + machine.fixed,
        averaging=machine.exchange(machine.weight * load.size / tensor, data, 1 + load.size * machine.weight / 25e6, 2),
        statistics=(forward / machine.gemm / tensor + moments / machine.exact) / update_every,
        summing=(summing + inner.exchange(gathers, tensor, 2 * len(load.layers))) / update_every,
        inverting=most / machine.inverse / invert_every,
        sending=sending,
        directing=(max(products) if memory and data > len(products) else sum(products) / (data if memory else 1))
        / machine.exact,
        copying=copied / machine.copies,
        work=most / total,
        state=machine.number * (max(stored) if memory and data > 1 else sum(cost.state for cost in costs.values())),
        weights=2.0 * machine.weight * load.size / (tensor * mesh.shards),
        update_bytes=update,
        step_bytes=parts,
    )


def kept_numbers(layer: Matrix, sent: bool = False) -> float:
    """Numbers of a layer's two factors, pieces where they are cut. sent: of the strips that are sent of each."""
    numbers = 0.0
    for size in (layer.inputs,) if layer.table else (layer.outputs, layer.inputs + layer.bias):
        pieces = 1
        while -(-size // pieces) > ng.Kronecker().largest:
            pieces += 1
        edge = -(-size // pieces)
        strips = list_strips((edge, edge))
        numbers += pieces * (sum((last - first) * last for first, last in strips) if sent else edge**2)
    return numbers + (layer.outputs if layer.table else 0)


def describe(
    load: ScalingWorkload, machine: Machine, ranks: Iterable[int], mesh: PartLayout, **every: int
) -> list[str]:
    """Rows of a table."""
    rows = list[str]()
    for size in ranks:
        for share in ("speed", "memory"):
            cost = predict(load, machine, size, share, mesh, **every)
            cells = [load.name, size, share, f"{1e3 * cost.base:.1f}", f"{1e3 * cost.seconds:.1f}"]
            cells += [f"{cost.seconds / cost.base:.2f}", f"{100 * cost.work:.1f} %", f"{cost.state / 2**30:.2f}"]
            cells += [f"{cost.update_bytes / 2**30:.2f}", f"{cost.step_bytes / 2**30:.2f}"]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


HEADS = (
    "| model | processes | share | ms without | ms with | ratio | inversions each | GiB of state each "
    "| GiB sent at an update | GiB sent at a step |\n|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", choices=WORKLOADS, default=["resnet50", "gpt2-small", "gpt2-xl", "7b"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 512, 4096])
    parser.add_argument("--batch", type=int, help="examples per process")
    for name, default in (("shards", 1), ("tensor", 1), ("update-every", 20), ("invert-every", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for field in fields(Machine):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    chosen = vars(parser.parse_args())
    machine = Machine(**{field.name: chosen[field.name] for field in fields(Machine)})
    mesh = PartLayout(chosen["shards"], chosen["tensor"])
    every = {name: chosen[name] for name in ("update_every", "invert_every")}
    print(HEADS)
    for name in chosen["model"]:
        load = WORKLOADS[name]()
        load = load if chosen["batch"] is None else replace(load, batch=chosen["batch"])
        print("\n".join(describe(load, machine, chosen["ranks"], mesh, **every)))


if __name__ == "__main__":
    main()
