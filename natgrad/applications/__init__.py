"""Floor 6: one file per kind of problem."""

from natgrad.applications.score_matching import (
    denoising_score_matching_loss,
    ratio_matching_loss,
    score_matching_loss,
    sliced_score_matching_loss,
)
from natgrad.applications.two_layer import TwoLayer

__all__ = [
    "TwoLayer",
    "denoising_score_matching_loss",
    "ratio_matching_loss",
    "score_matching_loss",
    "sliced_score_matching_loss",
]
