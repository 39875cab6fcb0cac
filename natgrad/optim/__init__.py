"""The natural gradient as a function and as an optimizer, and named recipes."""

from natgrad.missing_names import find_name
from natgrad.optim.blocks import robust_inverse
from natgrad.optim.checkpoint_files import load_checkpoint, save_checkpoint
from natgrad.optim.exchanges import RankExchange, meet_processes
from natgrad.optim.flat_step import FlatState, LinearSystem, Solved, SystemEvidence, shift_blocks
from natgrad.optim.guard import Accidents, NotFiniteError, OnTrouble, guard_steps
from natgrad.optim.joined_metric import JoinedMetric, join_operator
from natgrad.optim.joined_step import update_jointly
from natgrad.optim.matrix_free_recipes import ang, hessian_free, krylov_subspace, natgrad_cg
from natgrad.optim.mirror_descent import MirrorDescent
from natgrad.optim.natural_gradient import natural_gradient
from natgrad.optim.objective import Objective
from natgrad.optim.optimizer import NaturalGradient
from natgrad.optim.parallel_models import refuse_processes
from natgrad.optim.parts_checkpoint import Attributes, read_parts, write_parts
from natgrad.optim.recipe_options import BlockOptions, FlatOptions
from natgrad.optim.sharing_report import SharingReport, report_sharing
from natgrad.optim.state_report import Report, Row, StateReport
from natgrad.optim.structured import StructuredNaturalGradient
from natgrad.optim.structured_recipes import diagonal, ekfac, kfac, online_ng, tonga, unitwise

__all__ = [
    "Accidents",
    "Attributes",
    "BlockOptions",
    "FlatOptions",
    "FlatState",
    "JoinedMetric",
    "LinearSystem",
    "MirrorDescent",
    "NaturalGradient",
    "NotFiniteError",
    "Objective",
    "OnTrouble",
    "RankExchange",
    "Report",
    "Row",
    "SharingReport",
    "Solved",
    "StateReport",
    "StructuredNaturalGradient",
    "SystemEvidence",
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

# not by a def: type checkers would then take any name for one that exists
globals()["__getattr__"] = find_name(__name__, {})
