"""Models that several processes or devices hold in parts, or train together: refused where that is not known yet."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.layers import GraphLeaves
from natgrad.pure import refuse_scripted
from natgrad.whole_tensors import any_split, is_split

PARTS = {
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "FSDPModule"),
    "torch.distributed.tensor": ("DTensor",),
}
WHOLE = (
    "whose parameters are not whole on this process: ng.kfac and its like train such a model, if they are built after "
    "fully_shard or parallelize_module; other optimizers need DistributedDataParallel, or one process"
)
DRIFT = (
    "each process would take its own metric and its own step, and the parameters drift apart. Use ng.kfac or its like, "
    "which add statistics up over the processes, or train in one process and give the module inside"
)


FLAT = (
    "which flattens all parameters of some modules into one on each process, so that no layer has a weight of its own: "
    "use torch.distributed.fsdp.fully_shard instead"
)


def refuse_sharded(model: Any, name: str = "model", parts: bool = False) -> None:
    """TypeError for a module with parameters that are not whole tensors here, and for one that is copied to devices.

    Args:
        model: A module, or parameters by name; what is neither passes.
        name: What the caller calls it.
        parts: True to let `fully_shard` and tensor parallelism pass, whose parts are put together where needed.
    """
    own = type(model).__name__
    refuse_scripted(model)
    if isinstance(model, nn.Module):
        found: list[Any] = [*model.modules(), *model.parameters()]
    elif isinstance(model, Mapping):
        found = [*cast("Mapping[str, Any]", model).values()]
    else:
        return
    kinds = [getattr(sys.modules[key], kind) for key, kinds in PARTS.items() if key in sys.modules for kind in kinds]
    if parts:
        kinds = [kind for kind in kinds if kind.__name__ == "FullyShardedDataParallel"]
    for part in found:
        for kind in kinds:
            if isinstance(part, kind):
                why = FLAT if kind.__name__ == "FullyShardedDataParallel" else WHOLE
                raise TypeError(f"{name} is {own} with a {kind.__name__} in it, {why}")
        if isinstance(part, DataParallel) and len(part.device_ids) > 1:
            raise TypeError(
                f"{name} is {own} with a DataParallel over {len(part.device_ids)} devices in it, "
                "whose copies say nothing to an optimizer: use DistributedDataParallel, one process per device"
            )


def refuse_recut(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    """TypeError for a model that was cut into parts after the optimizer took its parameters, which are others now."""
    if not any_split(named.values()):
        refuse_sharded(model)


def refuse_trials(model: Any, asks: Any) -> None:
    """ValueError for a rule or a damping that computes the loss at other parameters than the model's, in parts.

    Args:
        model: The user's.
        asks: Who needs that loss; None if nobody does.
    """
    if asks is not None and isinstance(model, nn.Module) and any_split(model.parameters()):
        raise ValueError(
            f"{asks} computes the loss at trial points, which a model in parts (fully_shard, tensor parallelism) "
            "does not allow: take a rule and a damping that trust the model, such as the defaults"
        )


def mesh_of(tensor: Any) -> Any:
    """The mesh over which a tensor lies in parts; None of a whole one."""
    return tensor.device_mesh if is_split(tensor) else None


def find_data_group(leaves: GraphLeaves) -> Any:
    """The processes that see other examples than this one, of a model in parts; None where all see the same.

    A dimension of the mesh that the pass's own tensors still have is tensor parallelism's; over the others each process
    put the whole parameter together, for examples of its own.

    Args:
        leaves: The tensors that a pass used for the parameters.

    Raises:
        ValueError: For a mesh with several such dimensions that are not all of it.
    """
    for name, p in leaves.named.items():
        if not is_split(p):
            continue
        mesh, kept = mesh_of(p), mesh_of(leaves[name])
        names = list(mesh.mesh_dim_names or range(mesh.ndim))
        within = [] if kept is None else list(kept.mesh_dim_names or range(kept.ndim))
        data = [dim for dim, of in enumerate(names) if of not in within and mesh.size(dim) > 1]
        if len(data) == 1:
            return mesh.get_group(data[0])
        if len(data) == mesh.ndim and mesh.size() == distributed.get_world_size():
            return distributed.group.WORLD
        if data:
            raise ValueError(
                f"the model lies on a mesh {tuple(mesh.shape)} over {len(data)} of whose dimensions examples differ: "
                "give the processes that see other examples as group=torch.distributed.new_group(...)"
            )
    return None


def refuse_processes(model: Any, name: str = "model") -> None:
    """TypeError for a model that several processes hold or train, where each would take a step of its own.

    Args:
        model: Anything.
        name: What the error calls it.
    """
    refuse_sharded(model, name)
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(part, DataParallel) for part in parts):
        raise TypeError(
            f"{name} is a DataParallel, or has one in it, which is no function of parameters: give its module"
        )
    if any(isinstance(part, DistributedDataParallel) for part in parts):
        raise TypeError(f"{name} is a DistributedDataParallel, or has one in it: {DRIFT}")


def refuse_nested(model: Any) -> None:
    """TypeError for a model with a wrapper of torch inside, whose forward is no function of parameters."""
    refuse_sharded(model)
    parts = [(type(part).__name__, part) for part in model.modules()] if isinstance(model, nn.Module) else []
    for kind, part in parts:
        if isinstance(part, (DataParallel, DistributedDataParallel)):
            raise TypeError(
                f"model has a {kind} in it, which is no function of parameters: wrap the whole model in "
                "one DistributedDataParallel, and give that"
            )
