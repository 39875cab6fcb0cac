"""Floor 6: one file, or folder, per kind of problem."""

from natgrad.applications import search
from natgrad.applications.score_matching import (
    denoising_score_matching_loss,
    ratio_matching_loss,
    score_matching_loss,
    sliced_score_matching_loss,
)

__all__ = [
    "denoising_score_matching_loss",
    "ratio_matching_loss",
    "score_matching_loss",
    "search",
    "sliced_score_matching_loss",
]
