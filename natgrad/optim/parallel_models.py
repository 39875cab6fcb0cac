"""Models that several processes or devices hold in parts, or train together: refused where that is not known yet."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

PARTS = {
    "torch.distributed.fsdp": ("FullyShardedDataParallel", "FSDPModule"),
    "torch.distributed.tensor": ("DTensor",),
}
WHOLE = (
    "whose parameters are not whole on this process, which no natgrad optimizer trains yet: use "
    "DistributedDataParallel with ng.kfac or its like, or one process"
)
DRIFT = (
    "each process would take its own metric and its own step, and the parameters drift apart. Use ng.kfac or its like, "
    "which add statistics up over the processes, or train in one process and give the module inside"
)


def refuse_sharded(model: Any, name: str = "model") -> None:
    """TypeError for a module with parameters that are not whole tensors here, and for one that is copied to devices."""
    if not isinstance(model, nn.Module):
        return
    kinds = [getattr(sys.modules[key], kind) for key, kinds in PARTS.items() if key in sys.modules for kind in kinds]
    for part in [*model.modules(), *model.parameters()]:
        for kind in kinds:
            if isinstance(part, kind):
                raise TypeError(f"{name} is {type(model).__name__} with a {kind.__name__} in it, {WHOLE}")
        if isinstance(part, DataParallel) and len(part.device_ids) > 1:
            raise TypeError(
                f"{name} is {type(model).__name__} with a DataParallel over {len(part.device_ids)} devices in it, "
                "whose copies say nothing to an optimizer: use DistributedDataParallel, one process per device"
            )


def refuse_processes(model: Any, name: str = "model") -> None:
    """TypeError for a model that several processes hold or train, where each would take a step of its own."""
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
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, (DataParallel, DistributedDataParallel)):
            raise TypeError(
                f"model has a {type(part).__name__} in it, which is no function of parameters: wrap the whole model in "
                "one DistributedDataParallel, and give that"
            )
