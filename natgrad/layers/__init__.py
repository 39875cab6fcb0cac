"""How a layer is heard: its kind, its taps, its second moments."""

from natgrad.ground.messages import resolve_names
from natgrad.layers.elementwise import square_elementwise
from natgrad.layers.examples import (
    Examples,
    KnownPlaces,
    example_squares,
    find_examples,
    has_no_place,
    partitions,
    row_weights,
)
from natgrad.layers.hearing import Heard, Pass, Recording, collect_inputs, hear, hear_rows, is_asking, record_pass
from natgrad.layers.kinds import Layer, Layout, UnitLayout
from natgrad.layers.model_layers import GraphLeaves, ModelLayers
from natgrad.layers.moments import (
    Mixed,
    Room,
    Seen,
    combine,
    factor_sizes,
    layer_bias_rows,
    layer_factors,
    layer_inputs,
    layer_spectrum,
    layer_squares,
    layer_units,
)
from natgrad.layers.recalibration import recalibrate
from natgrad.layers.registry import register
from natgrad.layers.taps import MatrixProduct, Tap, Taps, derivatives, record_calls
from natgrad.layers.traced import Traced, find_products, find_sequences

__all__ = [
    "Examples",
    "GraphLeaves",
    "Heard",
    "KnownPlaces",
    "Layer",
    "Layout",
    "MatrixProduct",
    "Mixed",
    "ModelLayers",
    "Pass",
    "Recording",
    "Room",
    "Seen",
    "Tap",
    "Taps",
    "Traced",
    "UnitLayout",
    "collect_inputs",
    "combine",
    "derivatives",
    "example_squares",
    "factor_sizes",
    "find_examples",
    "find_products",
    "find_sequences",
    "has_no_place",
    "hear",
    "hear_rows",
    "is_asking",
    "layer_bias_rows",
    "layer_factors",
    "layer_inputs",
    "layer_spectrum",
    "layer_squares",
    "layer_units",
    "partitions",
    "recalibrate",
    "record_calls",
    "record_pass",
    "register",
    "row_weights",
    "square_elementwise",
]

resolve_names(__name__)
