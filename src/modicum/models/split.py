"""Models whose first part is fixed: its outputs are computed once per dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def fixed_features(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """(feature extractor, trainable head) of a model that declares `fixed_features`, else nothing.

    The extractor has no parameters and treats each example alone, so `head(features(x)) == model(x)` and the
    features of a dataset can be computed once and trained on as if they were the data.
    """
    if not getattr(model, "fixed_features", False):
        return None
    features, head = model.get_submodule("features"), model.get_submodule("head")
    return features, head
