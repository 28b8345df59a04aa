"""Clipping policies: public numbers from public and released values, never from data."""

from modicum.policies.fixed import Fixed
from modicum.policies.median import MedianNorm, NaiveMedianNorm
from modicum.policies.quantile import AdaptiveQuantile

__all__ = ["AdaptiveQuantile", "Fixed", "MedianNorm", "NaiveMedianNorm"]
