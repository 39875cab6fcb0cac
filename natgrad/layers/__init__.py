"""How a layer is heard: its kind, its taps, its second moments."""
