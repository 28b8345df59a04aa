"""Clipping policies: public numbers from public and released values, never from data."""

from modicum.policies.bandit import Bandit
from modicum.policies.curve import BudgetCurve, Curve, ScaleFreeCurve, read_curve
from modicum.policies.fixed import Fixed
from modicum.policies.layers import LayerNorms
from modicum.policies.median import MedianNorm, NaiveMedianNorm
from modicum.policies.metanet import MetaNet
from modicum.policies.plug_in import PlugIn
from modicum.policies.ppo import Ppo
from modicum.policies.quantile import AdaptiveQuantile
from modicum.policies.schedule import PlateauCosine

__all__ = [
    "AdaptiveQuantile",
    "Bandit",
    "BudgetCurve",
    "Curve",
    "Fixed",
    "LayerNorms",
    "MedianNorm",
    "MetaNet",
    "NaiveMedianNorm",
    "PlateauCosine",
    "PlugIn",
    "Ppo",
    "ScaleFreeCurve",
    "read_curve",
]
