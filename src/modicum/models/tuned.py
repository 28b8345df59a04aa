"""A public backbone of which clients train more than a linear head: its norms as well, or its last stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from modicum.errors import UserError
from modicum.models.backbone import Backbone, load_backbone

TRAINED = ("norms", "last-stage")


class TunedBackbone(nn.Module):
    """The head begins at zero; what is not trained stays as public records left it."""

    def __init__(self, body: Backbone, classes: int, train: str) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.shape.features, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        last = f"stages.{len(body.stages) - 1}."
        for name, parameter in body.named_parameters():
            norm = "norm" in name
            parameter.requires_grad_(norm if train == "norms" else name.startswith((last, "norms.")))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images with values in [0, 1]."""
        logits: Tensor = self.head(self.body(x))
        return logits


def backbone_linear(
    input_shape: Sequence[int], classes: int, *, weights: str | Path = "", train: str = "norms"
) -> nn.Module:
    """The backbone of a file, with `train` saying which of its layers are trained beside the head."""
    if train not in TRAINED:
        raise UserError(
            f"train is one of {', '.join(TRAINED)}, got {train!r}; for a head alone set data.backbone and leave "
            "the model out"
        )
    if not weights:
        raise UserError("a backbone needs its weights: set weights to a file of python -m modicum.public.pretrain")
    body = load_backbone(weights).model
    if len(input_shape) != 3 or input_shape[0] != body.shape.channels:
        raise UserError(
            f"{weights} takes images of {body.shape.channels} channels, these records have the shape "
            f"{tuple(input_shape)}: choose a backbone that was trained on such images, and leave data.backbone out"
        )
    return TunedBackbone(body, classes, train)
