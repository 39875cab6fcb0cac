"""TRPO on gymnasium's environments, beside sb3-contrib's."""
