"""The natural gradient as a function and as an optimizer, and named recipes."""

from typing import TYPE_CHECKING

from natgrad.ground.messages import resolve_names
from natgrad.optim.blocks import robust_inverse
from natgrad.optim.checkpoint import Attributes, load_checkpoint, read_parts, save_checkpoint, write_parts
from natgrad.optim.flat_step import LinearSystem, Solved, SystemEvidence, shift_blocks
from natgrad.optim.guard import Accidents, NotFiniteError, OnTrouble, guard_steps
from natgrad.optim.joined import JoinedMetric, join_operator, update_jointly
from natgrad.optim.objective import Objective
from natgrad.optim.optimizer import NaturalGradient
from natgrad.optim.options import NAMES, BlockOptions, FlatOptions, SharedOptions
from natgrad.optim.processes import Processes, meet_processes, refuse_processes
from natgrad.optim.recipes import (
    ang,
    diagonal,
    ekfac,
    hessian_free,
    kfac,
    krylov_subspace,
    natgrad_cg,
    natural_gradient,
    online_ng,
    tonga,
    unitwise,
)
from natgrad.optim.report import Report, Row, StateReport
from natgrad.optim.state import State, SystemMemory
from natgrad.optim.structured import SharingReport, StructuredNaturalGradient, report_sharing

if TYPE_CHECKING:  # loaded when it is first asked for: see `HOMES`
    from natgrad.optim.mirror_descent import MirrorDescent

__all__ = [
    "NAMES",
    "Accidents",
    "Attributes",
    "BlockOptions",
    "FlatOptions",
    "JoinedMetric",
    "LinearSystem",
    "MirrorDescent",
    "NaturalGradient",
    "NotFiniteError",
    "Objective",
    "OnTrouble",
    "Processes",
    "Report",
    "Row",
    "SharedOptions",
    "SharingReport",
    "Solved",
    "State",
    "StateReport",
    "StructuredNaturalGradient",
    "SystemEvidence",
    "SystemMemory",
    "ang",
    "diagonal",
    "ekfac",
    "guard_steps",
    "hessian_free",
    "join_operator",
    "kfac",
    "krylov_subspace",
    "load_checkpoint",
    "meet_processes",
    "natgrad_cg",
    "natural_gradient",
    "online_ng",
    "read_parts",
    "refuse_processes",
    "report_sharing",
    "robust_inverse",
    "save_checkpoint",
    "shift_blocks",
    "tonga",
    "unitwise",
    "update_jointly",
    "write_parts",
]

HOMES = {
    "natgrad.optim.mirror_descent": ("MirrorDescent",),
}
"""What not every optimiser needs, and where it lies."""

resolve_names(__name__, HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
