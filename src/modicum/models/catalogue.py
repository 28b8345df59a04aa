"""The models that ship, by name. Listing them does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from modicum.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelEntry:
    """One model: its name, one line about it, and where the function that makes it lives."""

    name: str
    line: str
    module: str
    function: str


LARGEST = 1e9  # of a model's options
REQUIRED = ("input_shape", "classes")  # of every model, and no options

CATALOGUE: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry("logistic", "logistic regression on the flattened input", "dense", "logistic"),
        ModelEntry("mlp", "one hidden layer of 64 ReLU units (option: hidden)", "dense", "mlp"),
        ModelEntry(
            "cnn-small",
            "two 5×5 convolutions of 16 and 32 channels, the MNIST network of PAC-DP",
            "cnn",
            "cnn_small",
        ),
        ModelEntry("lenet", "LeNet-5 with ReLU and max pooling", "cnn", "lenet"),
        ModelEntry(
            "lenet-sigmoid",
            "three 5×5 convolutions with sigmoids and a linear layer, the network that DLG inverts",
            "cnn",
            "lenet_sigmoid",
        ),
        ModelEntry(
            "cnn8", "six 3×3 convolutions and two linear layers, the EMNIST network of ACDP-pFSD", "cnn", "cnn8"
        ),
        ModelEntry(
            "lenet-contrast",
            "LeNet-5 on normalised contrast, rectified by |x|: trains from nothing under much noise",
            "contrast",
            "lenet_contrast",
        ),
        ModelEntry(
            "cnn-contrast",
            "two convolutions of 32 and 64 channels of the same kind, for colour images",
            "contrast",
            "cnn_contrast",
        ),
        ModelEntry(
            "resnet18", "ResNet-18 for 32×32 images with GroupNorm (option: dropout)", "resnet", "resnet18"
        ),
        ModelEntry(
            "resnet34", "ResNet-34 for 32×32 images with GroupNorm (option: dropout)", "resnet", "resnet34"
        ),
        ModelEntry(
            "last-stage",
            "a public backbone whose last stage learns with the head (options: backbone, geometry, adapters, "
            "whole, views, reach)",
            "last_stage",
            "last_stage",
        ),
        ModelEntry(
            "scattering", "fixed wavelet scattering features and a linear head", "scattering", "scattering_linear"
        ),
    )
}


def names() -> tuple[str, ...]:
    """Names of the models that a file can ask for."""
    return tuple(CATALOGUE)


def build(
    name: str, input_shape: Sequence[int], classes: int, *, seed: int | None = None, **options: Any
) -> nn.Module:
    """The named model for inputs of `input_shape` (without the batch dimension) and `classes` logits.

    With a seed the initial weights are a function of it alone and torch's global generator is left as it was.
    """
    import torch

    entry = CATALOGUE.get(name)
    if entry is None:
        raise UserError(f"unknown model {name!r}: use one of {', '.join(names())}, or pass your own nn.Module")
    shape = tuple(int(n) for n in input_shape)
    if not shape or min(shape) < 1:
        raise UserError(f"an input shape needs positive sizes, got {tuple(input_shape)}")
    if classes < 1:
        raise UserError(f"a model needs at least one output, got {classes}")
    make = getattr(import_module(f"modicum.models.{entry.module}"), entry.function)
    takes = signature(make).parameters
    _check_options(name, options, {key: str(takes[key].annotation) for key in takes if key not in REQUIRED})
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            model: nn.Module = make(shape, classes, **options)
        except UserError:
            raise
        except (TypeError, ValueError, RuntimeError, MemoryError) as error:
            said = str(error).split("\n", 1)[0]
            raise UserError(f"model {name!r} does not take these options: {said}") from None
    return model


def _check_options(name: str, options: Mapping[str, Any], takes: Mapping[str, str]) -> None:
    """Each is one that the model takes, and a number or the name of a file as there; else one line says so."""
    for key, value in options.items():
        if key not in takes:
            raise UserError(f"model {name!r} has no option {key!r}: it takes {', '.join(takes) or 'none'}")
        is_file = "str" in takes[key]
        if value is not None and isinstance(value, int | float) == is_file:
            raise UserError(f"the model option {key} must be {'a file' if is_file else 'a number'}, got {value!r}")
        if isinstance(value, int | float) and not -LARGEST < value < LARGEST:
            raise UserError(f"the model option {key} must be a finite number of ordinary size, got {value}")
