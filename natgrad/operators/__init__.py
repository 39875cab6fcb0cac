"""The metric as something you multiply with."""

from natgrad.ground.messages import resolve_names
from natgrad.layers import Layout
from natgrad.operators.base import (
    Chunked,
    Closed,
    Facts,
    Operator,
    SampleRows,
    Scaled,
    Shifted,
    Sum,
    WrittenColumns,
    combine_facts,
    pack_operator,
    unpack_operator,
)
from natgrad.operators.curvature import Curvature
from natgrad.operators.dense import (
    DenseOperator,
    DiagonalOperator,
    Factored,
    FactoredInverse,
    InvertedOperator,
    LowRankOperator,
)
from natgrad.operators.kronecker import (
    KroneckerOperator,
    KroneckerSolve,
    Spectral,
    Spiked,
    SpikedKronecker,
    Spikes,
    Tiled,
)
from natgrad.operators.layerwise import Arranged, BlockOperator, split_operator, stack_operators
from natgrad.operators.linearization import Linearization, OutputMap
from natgrad.operators.pullback import Centred, Form, Pullback
from natgrad.operators.rows import JoinedRows, Rows, computes_block
from natgrad.operators.shared_rows import QuasiDiagonal, SharedBasis, SharedRows, Units

__all__ = [
    "Arranged",
    "BlockOperator",
    "Centred",
    "Chunked",
    "Closed",
    "Curvature",
    "DenseOperator",
    "DiagonalOperator",
    "Factored",
    "FactoredInverse",
    "Facts",
    "Form",
    "InvertedOperator",
    "JoinedRows",
    "KroneckerOperator",
    "KroneckerSolve",
    "Layout",
    "Linearization",
    "LowRankOperator",
    "Operator",
    "OutputMap",
    "Pullback",
    "QuasiDiagonal",
    "Rows",
    "SampleRows",
    "Scaled",
    "SharedBasis",
    "SharedRows",
    "Shifted",
    "Spectral",
    "Spiked",
    "SpikedKronecker",
    "Spikes",
    "Sum",
    "Tiled",
    "Units",
    "WrittenColumns",
    "combine_facts",
    "computes_block",
    "pack_operator",
    "split_operator",
    "stack_operators",
    "unpack_operator",
]

# The names before a class had one home, for code that uses them: a structure is called so too.
Block = BlockOperator
Dense = DenseOperator
Diagonal = DiagonalOperator
Inverted = InvertedOperator
Kronecker = KroneckerOperator
LowRank = LowRankOperator

resolve_names(__name__)
