"""Aggregation: post-processing of releases into the next model."""

from modicum.aggregation.line_search import LineSearch
from modicum.aggregation.mean import Mean
from modicum.aggregation.momentum import Momentum
from modicum.aggregation.noise_aware import NoiseAware
from modicum.aggregation.paced import Paced
from modicum.aggregation.robust import Median, NormBounded, TrimmedMean
from modicum.aggregation.thresholded import Thresholded
from modicum.aggregation.weighted import Weighted

__all__ = [
    "LineSearch",
    "Mean",
    "Median",
    "Momentum",
    "NoiseAware",
    "NormBounded",
    "Paced",
    "Thresholded",
    "TrimmedMean",
    "Weighted",
]
