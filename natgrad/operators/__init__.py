"""Floor 1: the metric as something you multiply with."""

from natgrad.operators.arranged import Arranged, Layout
from natgrad.operators.base import Operator, Scaled, Shifted, Sum
from natgrad.operators.basis import SharedBasis
from natgrad.operators.block import Block
from natgrad.operators.centred import Centred
from natgrad.operators.curvature import Curvature
from natgrad.operators.dense import Dense, Diagonal
from natgrad.operators.factored import Factored, FactoredInverse, Inverted
from natgrad.operators.kronecker import Kronecker, Spectral
from natgrad.operators.linearization import Linearization, OutputMap
from natgrad.operators.low_rank import LowRank
from natgrad.operators.pullback import Chunked, Form, Pullback
from natgrad.operators.rows import Rows
from natgrad.operators.shared import SharedRows
from natgrad.operators.spiked import Spiked, SpikedKronecker, Spikes
from natgrad.operators.tiled import Tiled
from natgrad.operators.units import QuasiDiagonal, Units

__all__ = [
    "Arranged",
    "Block",
    "Centred",
    "Chunked",
    "Curvature",
    "Dense",
    "Diagonal",
    "Factored",
    "FactoredInverse",
    "Form",
    "Inverted",
    "Kronecker",
    "Layout",
    "Linearization",
    "LowRank",
    "Operator",
    "OutputMap",
    "Pullback",
    "QuasiDiagonal",
    "Rows",
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
]
