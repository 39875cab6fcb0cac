"""The page's template: one HTML file that needs nothing else, in light and dark, from phone to desk."""

from __future__ import annotations

from typing import Any, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined

from natgrad_lab.figures import DARK, PALETTE


class Provenance(Protocol):
    """Where a report's numbers come from: what every page tells at its end."""

    @property
    def experiment(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def seeds(self) -> tuple[int, ...]: ...
    @property
    def versions(self) -> tuple[dict[str, str], ...]: ...
    @property
    def threads(self) -> tuple[int, ...]: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def missing(self) -> int: ...


def fill(name: str, **values: Any) -> str:
    """The template of that name, in light and dark colours, filled."""
    environment = Environment(
        loader=PackageLoader("natgrad_lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(light=PALETTE, dark=DARK, **values)
