"""How a layer is heard: its kind, its taps, its second moments."""

from natgrad.layers.registry import register

__all__ = ["register"]
