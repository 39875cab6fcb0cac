"""Gradient flows over statistical models, Euclidean and natural, in any coordinates, and their pictures.

`integrate` has one flow, and flows from many starts. `expectation` has what they go down, `coordinates`
where they run, `pictures` what is drawn of them.
"""

from natgrad.flows.coordinates import (
    FlowCoordinates,
    deviation_coordinates,
    expectation_coordinates,
    natural_coordinates,
    probability_coordinates,
)
from natgrad.flows.expectation import Function as Function
from natgrad.flows.expectation import expected_value
from natgrad.flows.integrate import Field as Field
from natgrad.flows.integrate import Integrator, Trajectory, destinations, flow, flow_field, paths
from natgrad.flows.pictures import draw_basins, draw_field, draw_levels, draw_trajectory, lattice, show_descent
from natgrad.ground.messages import resolve_names

Coordinates, expected = FlowCoordinates, expected_value  # earlier names of the same

__all__ = [
    "FlowCoordinates",
    "Integrator",
    "Trajectory",
    "destinations",
    "deviation_coordinates",
    "draw_basins",
    "draw_field",
    "draw_levels",
    "draw_trajectory",
    "expectation_coordinates",
    "expected_value",
    "flow",
    "flow_field",
    "lattice",
    "natural_coordinates",
    "paths",
    "probability_coordinates",
    "show_descent",
]

resolve_names(__name__)
