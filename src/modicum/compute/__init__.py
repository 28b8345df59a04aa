"""Per-example clipping: the sum of clipped gradients of a batch, without storing a gradient for each example."""

from modicum.compute.clipping.clipped_sum import Clipper, SlowClippingWarning, clipped_sum
from modicum.compute.clipping.flat import Way
from modicum.compute.clipping.problem import ClippedSum, Loss, Targets
from modicum.compute.clipping.reference import reference_clipped_sum
from modicum.core.clips import Auto, Clip, Flat, PerLayer
from modicum.errors import UntrainedWarning

__all__ = [
    "Auto",
    "Clip",
    "ClippedSum",
    "Clipper",
    "Flat",
    "Loss",
    "PerLayer",
    "SlowClippingWarning",
    "Targets",
    "UntrainedWarning",
    "Way",
    "clipped_sum",
    "reference_clipped_sum",
]
