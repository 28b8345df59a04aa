"""Models that need no batch statistics, by name. Any other `nn.Module` that passes `check_model` works too."""

from modicum.models.catalogue import CATALOGUE, Entry, build, names
from modicum.models.check import check_model, check_output
from modicum.models.split import fixed_features

__all__ = ["CATALOGUE", "Entry", "build", "check_model", "check_output", "fixed_features", "names"]
