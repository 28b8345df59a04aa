"""Models that need no batch statistics, by name. Any other `nn.Module` that passes `check_model` works too."""

from modicum.models.catalogue import CATALOGUE, ModelEntry, build, names
from modicum.models.check import check_model, check_output
from modicum.models.split import fixed_features

__all__ = ["CATALOGUE", "ModelEntry", "build", "check_model", "check_output", "fixed_features", "names"]
