"""A linear head for records of length 1, in which a class's bias weighs no more than one of many features.

A bias is the weight of a feature that is 1 in every record. Beside hundreds of features of length 1 altogether, it
would take half of every clipped gradient and ask for the smallest step size of all: the curvature along it is that
of a feature of length 1, tens of times that along any other. Here the constant feature has length κ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.layout import Layout
from modicum.core.needs import Need
from modicum.errors import UserError


class UnitRecords(nn.Module):
    """Records as vectors, those longer than 1 cut to length 1, each by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Each record divided by its length, where that is above 1."""
        x = x.flatten(1)
        length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return x / length.clamp_min(1)


class SmallBiasHead(nn.Module):
    """W·x + κ·b."""

    def __init__(self, linear: nn.Linear, length: float) -> None:
        super().__init__()
        self.linear, self.length = linear, length

    def forward(self, x: Tensor) -> Tensor:
        """The logits of records."""
        logits: Tensor = self.length * self.linear(x / self.length)
        return logits

    def load(self, weight: Tensor, bias: Tensor) -> None:
        """The head whose logits are weight·x + bias."""
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            self.linear.bias.copy_(bias / self.length)


class UnitLinear(nn.Module):
    """Whatever fixed features a model has, cut to length 1, and the head on them."""

    fixed_features = True

    def __init__(self, features: nn.Module, head: SmallBiasHead) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, x: Tensor) -> Tensor:
        """The logits of records before their features are taken."""
        logits: Tensor = self.head(self.features(x))
        return logits


@dataclass(frozen=True)
class SmallBias:
    """Makes that head of a linear model; refuses others."""

    length: float = 0.3  # κ

    needs = (Need.CLASSES, Need.NUMBERS)

    def wrap(self, model: nn.Module) -> nn.Module:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        if len(layers) != 1 or layers[0].bias is None or len(Layout.of(model).shapes) != 2:
            raise UserError(
                "auto trains a linear head on public features: leave model.name out (logistic), or name a method "
                "for other models, e.g. dp-sgd"
            )
        before = [model.get_submodule("features")] if getattr(model, "fixed_features", False) else []
        head = SmallBiasHead(layers[0], self.length)
        head.load(layers[0].weight.detach().clone(), layers[0].bias.detach().clone())
        return UnitLinear(nn.Sequential(*before, UnitRecords()), head)

    def shared(self, name: str) -> bool:
        return True
