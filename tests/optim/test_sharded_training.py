"""Models in parts: `fully_shard`, meshes of two dimensions, tensor parallelism. The steps are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import build_seeded, draw
from optim_models import train_batches
from process_ranks import assert_joined, catch, flat_whole, needs_gloo, run_ranks, wrap_model
from torch import Tensor, distributed, nn

import natgrad as ng
from natgrad.rules import MeasuredLength

pytestmark = needs_gloo

X = draw(32, 5, 6)
Y = X[..., :4].mean(1).argmax(1)
CE = nn.CrossEntropyLoss()


class Block(nn.Module):
    """One norm and two layers around a nonlinearity, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """(b, t, 6) -> four logits, with a parameter that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(6, 8), nn.ModuleList(Block(8) for _ in range(2))
        self.gain, self.out = nn.Parameter(torch.linspace(0.5, 1.5, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h.mean(1) * self.gain)


def train(
    model: nn.Module, parts: int = 1, part: int = 0, recipe: Any = ng.kfac, steps: int = 4, **options: Any
) -> dict[str, Any]:
    opt = recipe(model, CE, estimate=ng.ExactLabels(), **options)
    own = slice(len(X) // parts * part, len(X) // parts * (part + 1))
    train_batches(opt, model, [(X[own], Y[own])] * steps)
    structures = [row.structure for row in opt.report()]
    return {"flat": flat_whole(model), "structures": structures, "loss": opt.state_report().loss}


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_model(
    how: str = "blocks", shape: tuple[int, ...] = (4,), reshard: bool = True, **options: Any
) -> dict[str, Any]:
    """`fully_shard` of each block and the whole, of single layers, or of the whole alone."""
    from torch.distributed.fsdp import fully_shard

    model, of = build_seeded(Net), mesh(*shape, names=("copies", "parts")[-len(shape) :])
    inner = {"blocks": list(model.blocks), "layers": [model.out, model.blocks[0].up], "whole": []}[how]  # type: ignore[union-attr]
    for module in [*inner, model]:
        fully_shard(module, mesh=of, reshard_after_forward=reshard)
    return train(model, 4, distributed.get_rank(), **options)


def in_half_precision() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_seeded(Net).float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    opt = ng.kfac(model, CE)
    own = slice(8 * distributed.get_rank(), 8 * distributed.get_rank() + 8)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        loss = opt.loss(model(X[own].float()), Y[own])
        loss.backward()
        opt.step()
        losses.append(opt.state_report().loss)
    return {"losses": losses, "structures": [row.structure for row in opt.report()]}


def parallel(plan: str, both: bool = False, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """Tensor parallelism over four processes, or over two times two with `fully_shard`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build_seeded(Net)
    of = mesh(2, 2, names=("data", "tensor")) if both else mesh(4)
    inner = of["tensor"] if both else of
    for block in model.blocks:  # type: ignore[union-attr]
        steps: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, inner, steps)
    if plan == "columns":
        parallelize_module(model, inner, {"out": ColwiseParallel(output_layouts=Replicate())})
    if plan == "rows":
        parallelize_module(model, inner, {"out": RowwiseParallel(input_layouts=Replicate())})
    if compiled:
        model.compile(backend="eager")
    if not both:
        return train(model, **options)
    for module in [*model.blocks, model]:  # type: ignore[misc]
        fully_shard(module, mesh=of["data"])
    return train(model, 2, of["data"].get_local_rank(), **options)


def climb() -> dict[str, Any]:
    """The errors of optimizers that find their processes once they were built."""
    texts = [catch(ValueError, partial(shard_model, "whole", maximize=True))]
    for recipe in (ng.kfac, ng.hessian_free):
        model = build_seeded(Net)
        opt = recipe(model, CE, maximize=True)
        outer = wrap_model(model)
        texts.append(catch(ValueError, partial(train_batches, opt, outer, [(X, Y)])))
    return {"texts": texts}


FULL: dict[str, Any] = {"rule": MeasuredLength()}
MEMORY: dict[str, Any] = {"share": "memory", "l2": 1e-3, "weight_decay": 0.01}
WAYS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "fully_shard of blocks": (partial(shard_model, **FULL), FULL),
    "fully_shard of layers, kept whole until the backward": (
        partial(shard_model, "layers", reshard=False, **FULL),
        FULL,
    ),
    "fully_shard with the state shared out": (partial(shard_model, "whole", **MEMORY), MEMORY),
    "fully_shard on a mesh of two dimensions": (
        partial(shard_model, shape=(2, 2), recipe=ng.unitwise),
        {"recipe": ng.unitwise},
    ),
    "rows on whole inputs": (partial(parallel, "rows", recipe=ng.unitwise), {"recipe": ng.unitwise}),
    "columns and rows": (partial(parallel, "columns", **FULL), FULL),
    "columns and rows of blocks alone": (partial(parallel, "blocks", recipe=ng.ekfac), {"recipe": ng.ekfac}),
    "fully_shard of columns and rows": (partial(parallel, "columns", both=True, **MEMORY), MEMORY),
    "compiled, fully_shard of columns and rows": (partial(parallel, "columns", True, True, **FULL), FULL),
}
SCENES = {name: scene for name, (scene, _) in WAYS.items()} | {"half precision": in_half_precision, "climb": climb}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 4, tmp_path_factory)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_parts_steps_as_a_whole_one(four: list[dict[str, Any]], way: str):
    assert_joined([rank[way] for rank in four], train(build_seeded(Net), **WAYS[way][1]))


def test_half_precision_trains_every_layer_by_its_own_statistics(four: list[dict[str, Any]]):
    for rank in four:
        assert rank["half precision"]["losses"] == four[0]["half precision"]["losses"]
        assert rank["half precision"]["losses"][-1] < rank["half precision"]["losses"][0]
        assert rank["half precision"]["structures"].count("Kronecker") == 16


def test_climbing_is_refused_whenever_the_processes_are_found(four: list[dict[str, Any]]):
    assert all("maximize is True with several processes" in text for rank in four for text in rank["climb"]["texts"])
