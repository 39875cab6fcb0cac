"""Gradient flows over statistical models, Euclidean and natural, in any coordinates, and their pictures."""

from natgrad.applications.flows.coordinates import (
    FlowCoordinates,
    deviation_coordinates,
    expectation_coordinates,
    natural_coordinates,
    probability_coordinates,
)
from natgrad.applications.flows.expectation import Function as Function
from natgrad.applications.flows.expectation import expected_value
from natgrad.applications.flows.integrate import Field as Field
from natgrad.applications.flows.integrate import Integrator, Trajectory, flow, flow_field
from natgrad.applications.flows.many_paths import destinations, paths
from natgrad.applications.flows.pictures import (
    draw_basins,
    draw_field,
    draw_levels,
    draw_trajectory,
    lattice,
    show_descent,
)

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
