"""What engines of several processes offer besides: buckets, compressed gradients, compilation, sequences in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, seeded
from process_ranks import run_ranks
from test_sharded_training import CE, Net, X, Y, mesh, train
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.rules import MeasuredLength

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)
FULL: dict[str, Any] = {"rule": MeasuredLength(), "steps": 3}
OWN: dict[str, Any] = {"parts": 2, **FULL}


def rank() -> int:
    return distributed.get_rank()


def bucket_views() -> dict[str, Any]:
    return train(DistributedDataParallel(seeded(Net), gradient_as_bucket_view=True), part=rank(), **OWN)


def other_buckets() -> dict[str, Any]:
    """Small messages, and a group of its own."""
    group = distributed.new_group([0, 1])
    outer = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=0.0005)
    return train(outer, part=rank(), **OWN)


def compressed() -> dict[str, Any]:
    """Gradients that are not the mean: all processes have the same ones still."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    outer = DistributedDataParallel(seeded(Net))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    outer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = CE(outer(X), Y).item()
    found = train(outer, part=rank(), parts=2, steps=8)
    return found | {"before": before, "after": CE(outer(X), Y).item()}


def compiled_data_parallel() -> dict[str, Any]:
    return train(DistributedDataParallel(torch.compile(seeded(Net), backend="eager")), part=rank(), **OWN)


def data_parallel_compiled() -> dict[str, Any]:
    return train(torch.compile(DistributedDataParallel(seeded(Net)), backend="eager"), part=rank(), **OWN)


def compiled_parts() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = seeded(Net)
    for module in [*model.blocks, model]:  # type: ignore[misc]
        fully_shard(module, mesh=mesh(2))
    model.compile(backend="eager")
    return train(model, part=rank(), **OWN)


def parts_on_the_cpu() -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = seeded(Net)
    fully_shard(model, mesh=mesh(2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return train(model, part=rank(), **OWN)


def checkpointed_parts() -> dict[str, Any]:
    """Activations that are computed again."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = seeded(Net)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # type: ignore[index, operator]
    fully_shard(model, mesh=mesh(2))
    return train(model, part=rank(), **OWN)


class Rows(nn.Module):
    """(b, 4, 6) -> four logits, by two layers that see each position alone, with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.up, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.into(x))).tanh()).mean(1)


class Four(nn.Module):
    """As many positions as two processes can share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, :4])


def sequence_parts() -> dict[str, Any]:
    """Positions shared out between the layers that are shared out by columns and rows."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = seeded(Four)
    plan = {
        "inner.into": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "inner.norm": SequenceParallel(),
        "inner.up": ColwiseParallel(input_layouts=Shard(1)),
        "inner.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh(2), plan)  # type: ignore[arg-type]
    return train(model, **FULL)


def refused() -> dict[str, Any]:
    """An optimizer of parameters alone, and what is no module."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage

    part, words = nn.Linear(3, 3), []
    build: Any = ng.kfac
    for call in (
        lambda: ZeroRedundancyOptimizer(part.parameters(), optimizer_class=build, criterion=CE),
        lambda: build(PipelineStage(part, rank(), 2, torch.device("cpu")), CE),
    ):
        try:
            call()
        except TypeError as error:
            words.append(str(error))
    return {"words": words}


SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "bucket views": bucket_views,
    "other buckets": other_buckets,
    "compiled within": compiled_data_parallel,
    "compiled around": data_parallel_compiled,
    "compiled parts": compiled_parts,
    "parts on the CPU": parts_on_the_cpu,
    "checkpointed parts": checkpointed_parts,
    "sequence parts": sequence_parts,
}
SCENES = SAME | {"compressed": compressed, "refused": refused}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 2, tmp_path_factory)


@pytest.mark.parametrize("scene", SAME)
def test_the_steps_are_those_of_one_process(both: list[dict[str, Any]], scene: str):
    alone = train(seeded(Four if scene == "sequence parts" else Net), **FULL)
    assert torch.equal(both[0][scene]["flat"], both[1][scene]["flat"])
    assert both[0][scene]["structures"] == alone["structures"]
    assert_close(both[0][scene]["flat"], alone["flat"], 1e-9)


def test_gradients_that_are_not_the_mean_keep_processes_in_step(both: list[dict[str, Any]]):
    assert torch.equal(both[0]["compressed"]["flat"], both[1]["compressed"]["flat"])
    assert both[0]["compressed"]["after"] < 0.8 * both[0]["compressed"]["before"]


def test_what_shares_out_something_else_is_refused_with_what_to_do(both: list[dict[str, Any]]):
    zero, stage = both[0]["refused"]["words"]
    assert 'share="memory"' in zero
    assert "fully_shard" in stage
