"""Per-example clipping: the sum of clipped gradients of a batch, without storing a gradient for each example."""

from modicum.clipping.bounds import Auto, Clip, Flat, PerLayer
from modicum.clipping.clipped_sum import Clipper, SlowClippingWarning, clipped_sum
from modicum.clipping.flat import Way
from modicum.clipping.problem import ClippedSum, Loss, Targets
from modicum.clipping.reference import reference_clipped_sum

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
    "Way",
    "clipped_sum",
    "reference_clipped_sum",
]
