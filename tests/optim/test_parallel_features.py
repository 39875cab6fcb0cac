"""What engines of several processes offer besides: buckets, compressed gradients, compilation, sequences in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from models import Assembled, build_seeded
from optim_models import iterate
from process_ranks import assert_joined, catch, count_ranks, flat_whole, needs_gloo, own_rank, run_ranks, take_part
from test_sharded_training import CE, Net, X, Y, mesh, train
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.rules import MeasuredLength

pytestmark = needs_gloo
FULL: dict[str, Any] = {"rule": MeasuredLength(), "steps": 3}
OWN: dict[str, Any] = {"parts": 2, **FULL}


def other_buckets() -> dict[str, Any]:
    """Small messages, a group of its own, and gradients that are views of the messages."""
    group = distributed.new_group([0, 1])
    outer = DistributedDataParallel(
        build_seeded(Net), process_group=group, bucket_cap_mb=0.0005, gradient_as_bucket_view=True
    )
    return train(outer, part=own_rank(), **OWN)


def compress_gradients() -> dict[str, Any]:
    """Gradients that are not the mean: all processes have the same ones still."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    outer = DistributedDataParallel(build_seeded(Net))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    outer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = CE(outer(X), Y).item()
    found = train(outer, part=own_rank(), parts=2, steps=8)
    return found | {"before": before, "after": CE(outer(X), Y).item()}


def compiled_data_parallel() -> dict[str, Any]:
    return train(DistributedDataParallel(torch.compile(build_seeded(Net), backend="eager")), part=own_rank(), **OWN)


def data_parallel_compiled() -> dict[str, Any]:
    return train(torch.compile(DistributedDataParallel(build_seeded(Net)), backend="eager"), part=own_rank(), **OWN)


def compiled_parts() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build_seeded(Net)
    for module in [*model.blocks, model]:  # type: ignore[misc]
        fully_shard(module, mesh=mesh(2))
    model.compile(backend="eager")
    return train(model, part=own_rank(), **OWN)


def parts_on_the_cpu() -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = build_seeded(Net)
    fully_shard(model, mesh=mesh(2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return train(model, part=own_rank(), **OWN)


def checkpointed_parts() -> dict[str, Any]:
    """Activations that are computed again."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = build_seeded(Net)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # type: ignore[index, operator]
    fully_shard(model, mesh=mesh(2))
    return train(model, part=own_rank(), **OWN)


def build_rows() -> nn.Module:
    """(b, 4, 6) -> four logits, by two layers that see each position alone, with a norm between."""
    return Assembled(
        lambda m, x: m.down(m.up(m.norm(m.into(x))).tanh()).mean(1),
        into=nn.Linear(6, 8),
        norm=nn.LayerNorm(8),
        up=nn.Linear(8, 12),
        down=nn.Linear(12, 4),
    )


def sequence_parts() -> dict[str, Any]:
    """Positions shared out between the layers that are shared out by columns and rows."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    model = build_seeded(MODELS["sequence parts"])
    plan = {
        "inner.into": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "inner.norm": SequenceParallel(),
        "inner.up": ColwiseParallel(input_layouts=Shard(1)),
        "inner.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh(2), plan)  # type: ignore[arg-type]
    return train(model, **FULL)


def build_attends() -> nn.Module:
    """(b, t, 6) -> four logits. Attention takes the weight of its last layer, and does not call that."""
    return Assembled(
        lambda m, x: m.out(m.mix(x, x, x, need_weights=False)[0].mean(1)),
        mix=nn.MultiheadAttention(6, 2, batch_first=True),
        out=nn.Linear(6, 4),
    )


def attention_parts() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    return train(fully_shard(build_seeded(build_attends), mesh=mesh(2)), part=own_rank(), **OWN)


def accumulate(model: nn.Module, own: slice = slice(None)) -> dict[str, Any]:
    """Two micro-batches a step; gradients of the first one are averaged with those of the second."""
    opt = ng.kfac(model, CE, estimate=ng.ExactLabels(), measure=False)
    for _ in range(3):
        opt.zero_grad()
        for i in range(2):
            if count_ranks() > 1:
                model.set_requires_gradient_sync(i == 1)  # type: ignore[operator]
                model.set_reshard_after_backward(i == 1)  # type: ignore[operator]
            (opt.loss(model(X[own][i::2]), Y[own][i::2]) / 2).backward()
        opt.step()
    return {"flat": flat_whole(model), "loss": opt.state_report().loss}


def accumulate_in_parts() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    return accumulate(fully_shard(build_seeded(Net), mesh=mesh(2)), take_part((16, 16)))


def unlike_parts(
    reduction: str = "sum",
    layers: Sequence[str] = (),
    sizes: Sequence[tuple[int, int]] = ((20, 12), (32, 0), (16, 16), (9, 23)),
) -> dict[str, Any]:
    """Numbers of backward passes that differ: unequal parts, an empty one, and one that is not finite.

    sizes: Of two processes, step by step; what one has met before, the other has not.
    """
    from torch.distributed.fsdp import fully_shard

    model = build_seeded(Net)
    for module in [*(getattr(model, name) for name in layers), model] if count_ranks() > 1 else []:
        fully_shard(module, mesh=mesh(2))
    opt = ng.kfac(model, nn.CrossEntropyLoss(reduction=reduction), estimate=ng.ExactLabels())
    for i, split in enumerate(sizes):
        own = take_part(split) if count_ranks() > 1 else slice(0, sum(split))
        x = torch.where(torch.arange(32) >= 16, torch.nan, 1.0).view(-1, 1, 1) * X if i == 2 else X
        iterate(opt, model, x[own], Y[own])
    return {"flat": flat_whole(model), "failures": opt.state_report().failures}


def go_apart() -> dict[str, Any]:
    """Gradients that nobody averages, some or all; and one that is not finite on one process."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.distributed.fsdp import fully_shard

    alone, part = DistributedDataParallel(build_seeded(Net)), build_seeded(Net)
    alone.register_comm_hook(None, noop_hook)
    fully_shard(part.out, mesh=mesh(2))  # type: ignore[arg-type]
    words = [catch(ValueError, lambda m=model: train(m, part=own_rank(), **OWN)) for model in (alone, part)]
    outer = DistributedDataParallel(build_seeded(Net))
    opt = ng.kfac(outer, CE)
    for step in range(3):
        opt.zero_grad()
        opt.loss(outer(X), Y).backward()
        if (step, own_rank()) == (1, 1):
            outer.module.out.weight.grad[0, 0] = torch.nan  # type: ignore[index, union-attr]
        opt.step()
    return {"words": words, "flat": flat_whole(outer), "failures": opt.state_report().failures}


def refuse_wrappers() -> list[str]:
    """An optimizer of parameters alone, and what is no module."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage

    part, build = nn.Linear(3, 3), cast(Any, ng.kfac)
    stage = PipelineStage(part, own_rank(), 2, torch.device("cpu"))
    return [
        catch(TypeError, lambda: ZeroRedundancyOptimizer(part.parameters(), optimizer_class=build, criterion=CE)),
        catch(TypeError, lambda: build(stage, CE)),
    ]


SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "other buckets": other_buckets,
    "compiled within": compiled_data_parallel,
    "compiled around": data_parallel_compiled,
    "compiled parts": compiled_parts,
    "parts on the CPU": parts_on_the_cpu,
    "checkpointed parts": checkpointed_parts,
    "sequence parts": sequence_parts,
    "attention parts": attention_parts,
}
MODELS = {
    "sequence parts": lambda: Assembled(lambda m, x: m.inner(x[:, :4]), inner=build_rows()),  # two processes share 4
    "attention parts": build_attends,
}
UNLIKE: dict[str, Callable[[], dict[str, Any]]] = {
    "unlike parts": unlike_parts,
    "unlike parts, means": partial(unlike_parts, "mean"),
    "unlike parts in layers": partial(unlike_parts, layers=("into", "out")),
    "met shapes": partial(unlike_parts, "mean", layers=("into", "out"), sizes=((8, 24), (8, 8))),
}
SCENES: dict[str, Callable[[], Any]] = SAME | UNLIKE
SCENES |= {
    "compressed": compress_gradients,
    "refused": refuse_wrappers,
    "accumulated": accumulate_in_parts,
    "go apart": go_apart,
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 2, tmp_path_factory)


@pytest.mark.parametrize("scene", SAME)
def test_the_steps_are_those_of_one_process(both: list[dict[str, Any]], scene: str):
    assert_joined([rank[scene] for rank in both], train(build_seeded(MODELS.get(scene, Net)), **FULL))


def test_gradients_that_are_kept_back_belong_to_the_step_that_averages_them(both: list[dict[str, Any]]):
    assert_joined([rank["accumulated"] for rank in both], accumulate(build_seeded(Net)))


@pytest.mark.parametrize("scene", UNLIKE)
def test_processes_with_other_numbers_of_passes_do_not_wait_for_each_other(both: list[dict[str, Any]], scene: str):
    alone = UNLIKE[scene]()
    assert_joined([rank[scene] for rank in both], alone)
    assert alone["failures"] == (scene != "met shapes")


def test_gradients_that_differ_are_an_error_and_one_that_is_not_finite_a_skipped_step(both: list[dict[str, Any]]):
    for rank in both:
        hook, part = rank["go apart"]["words"]
        assert "communication hook that averages" in hook
        assert "fully_shard on the whole model" in part
        assert rank["go apart"]["failures"] == 1
        assert torch.equal(rank["go apart"]["flat"], both[0]["go apart"]["flat"])


def test_gradients_that_are_not_the_mean_keep_processes_in_step(both: list[dict[str, Any]]):
    assert torch.equal(both[0]["compressed"]["flat"], both[1]["compressed"]["flat"])
    assert both[0]["compressed"]["after"] < 0.8 * both[0]["compressed"]["before"]


def test_what_shares_out_something_else_is_refused_with_what_to_do(both: list[dict[str, Any]]):
    zero, stage = both[0]["refused"]
    assert 'share="memory"' in zero
    assert "fully_shard" in stage
