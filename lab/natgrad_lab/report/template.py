"""The page's template: one HTML file that needs nothing else, in light and dark, from phone to desk."""

from __future__ import annotations

from typing import Any, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined

from natgrad_lab.figures import DARK, PALETTE


class Provenance(Protocol):
    """Where a report's numbers come from: what every page tells at its end."""

    @property
    def experiment(self) -> str:
        """Its name."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """By their names."""
        ...

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of all runs."""
        ...

    @property
    def versions(self) -> tuple[dict[str, str], ...]:
        """Package -> version, one table for each set that runs were made with."""
        ...

    @property
    def threads(self) -> tuple[int, ...]:
        """Numbers of threads that runs were made with."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """What runs were made on."""
        ...

    @property
    def missing(self) -> int:
        """How many planned runs are not there."""
        ...


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
