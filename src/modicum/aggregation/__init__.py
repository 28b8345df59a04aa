"""Aggregation: post-processing of releases into the next model."""

from modicum.aggregation.mean import Mean
from modicum.aggregation.momentum import Momentum
from modicum.aggregation.noise_aware import NoiseAware
from modicum.aggregation.weighted import Weighted

__all__ = ["Mean", "Momentum", "NoiseAware", "Weighted"]
