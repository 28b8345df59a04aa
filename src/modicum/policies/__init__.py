"""Clipping policies: public numbers from public and released values, never from data."""

from modicum.policies.bandit import Bandit
from modicum.policies.fixed import Fixed
from modicum.policies.median import MedianNorm, NaiveMedianNorm
from modicum.policies.ppo import Ppo
from modicum.policies.quantile import AdaptiveQuantile
from modicum.policies.schedule import PlateauCosine

__all__ = ["AdaptiveQuantile", "Bandit", "Fixed", "MedianNorm", "NaiveMedianNorm", "PlateauCosine", "Ppo"]
