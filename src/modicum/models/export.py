"""A trained model for other programs: its weights, a folder of Hugging Face, an adapter of peft, ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.records import Field, Fields, each
from modicum.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    from torch import nn

FORMATS = ("state-dict", "safetensors", "hugging-face", "peft", "onnx")


def export(model: nn.Module, inputs: Fields, path: Path, format: str) -> Path:
    """Write the model, frozen parameters and buffers included.

    Args:
        model: With its trained weights.
        inputs: What a record is made of.
        path: A file; for hugging-face and peft a folder.
        format: state-dict, safetensors, hugging-face, peft or onnx.

    Returns:
        Where it lies.

    Raises:
        UserError: Where the model has no such form, or a package is missing.
    """
    ways = {
        "state-dict": _state_dict,
        "safetensors": _safetensors,
        "hugging-face": _pretrained,
        "peft": _adapter,
        "onnx": _onnx,
    }
    if format not in ways:
        raise UserError(f"unknown format {format!r}: use {', '.join(FORMATS)}")
    if path.exists():
        raise UserError(f"{path} is there already: name a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    ways[format](model.eval(), inputs, path)
    return path


def _state_dict(model: nn.Module, inputs: Fields, path: Path) -> None:  # noqa: ARG001
    import torch

    torch.save(model.state_dict(), path)


def _safetensors(model: nn.Module, inputs: Fields, path: Path) -> None:  # noqa: ARG001
    from safetensors.torch import save_model

    save_model(model, str(path))  # tied weights once


def _pretrained(model: Any, inputs: Fields, path: Path) -> None:  # noqa: ARG001
    inner = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    if not hasattr(inner, "save_pretrained"):
        raise UserError(f"{type(model).__name__} is no model of transformers: use state-dict, safetensors or onnx")
    inner.save_pretrained(str(path))


def _adapter(model: Any, inputs: Fields, path: Path) -> None:  # noqa: ARG001
    if not hasattr(model, "peft_config"):
        raise UserError(f"{type(model).__name__} has no adapters of peft: use state-dict, safetensors or onnx")
    model.save_pretrained(str(path))


def _onnx(model: nn.Module, inputs: Fields, path: Path) -> None:
    import torch

    for package in ("onnx", "onnxscript"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package, "export", "writing ONNX") from None
    drawn, records = torch.Generator().manual_seed(0), {0: torch.export.Dim("records")}
    example = each(lambda field: field.sample(2, drawn), inputs)
    plain = isinstance(inputs, Field)
    try:
        torch.onnx.export(
            model,
            (example,),
            str(path),
            input_names=None if not plain else ["x"],
            output_names=["outputs"],
            dynamic_shapes=(dict.fromkeys(example, records) if not plain else records,),
            dynamo=True,
            verbose=False,
        )
    except Exception as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"this model has no form in ONNX: {said[:200]}") from None
