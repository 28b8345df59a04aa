"""A trained model for other programs: its weights, a folder of Hugging Face, an adapter of peft, ONNX.

Adapters are added to the layers that they stand beside, but in the form `peft`, which has them alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.records import Field, Fields, each
from modicum.errors import MissingExtraError, UserError
from modicum.models.low_rank import LowRank, low_rank_layers, merge
from modicum.models.pretrained import MeanHead

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
    ways: dict[str, Callable[[nn.Module, Path], None]] = {
        "state-dict": _state_dict,
        "safetensors": _safetensors,
        "hugging-face": _pretrained,
        "peft": _adapter,
        "onnx": partial(_onnx, inputs),
    }
    if format not in ways:
        raise UserError(f"unknown format {format!r}: use {', '.join(FORMATS)}")
    if path.exists():
        raise UserError(f"{path} is there already: name a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = model.eval() if format == "peft" else merge(copy.deepcopy(model).eval())
    ways[format](whole, path)
    return path


def _state_dict(model: nn.Module, path: Path) -> None:
    import torch

    torch.save(model.state_dict(), path)


def _safetensors(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_model

    save_model(model, str(path))  # tied weights once


def _pretrained(model: Any, path: Path) -> None:
    inner = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    if not hasattr(inner, "save_pretrained"):
        raise UserError(f"{type(model).__name__} is no model of transformers: use state-dict, safetensors or onnx")
    inner.save_pretrained(str(path))


def _adapter(model: Any, path: Path) -> None:
    if hasattr(model, "peft_config"):
        model.save_pretrained(str(path))
        return
    layers = dict(low_rank_layers(model))
    if not layers:
        raise UserError(f"{type(model).__name__} has no adapters: use state-dict, safetensors or onnx")
    _write_peft(model, layers, path)


def _write_peft(model: nn.Module, layers: dict[str, LowRank], path: Path) -> None:
    """As `peft` writes adapters of type LORA: whoever has the base loads them with `PeftModel.from_pretrained`.

    What else was trained are modules to save; those of a model around an encoder stand in a file of their own.
    """
    from safetensors.torch import save_file

    base, head = (model.encoder, "encoder.") if isinstance(model, MeanHead) else (model, "")
    trained = {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    inner = {name.removeprefix(head): value for name, value in trained.items() if name.startswith(head)}
    whole = {name.rpartition(".")[0] for name in inner if not _of_adapter(name)}
    inner |= {
        f"{name}.{own}": value for name in whole for own, value in base.get_submodule(name).state_dict().items()
    }
    layer = next(iter(layers.values()))
    path.mkdir()
    save_file(
        {f"base_model.model.{name}": value for name, value in inner.items()}, path / "adapter_model.safetensors"
    )
    if outer := {name: value for name, value in trained.items() if not name.startswith(head)}:
        save_file(outer, path / "head.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": _kind_of_task(base),
        "base_model_name_or_path": str(getattr(getattr(base, "config", None), "_name_or_path", "") or "") or None,
        "r": layer.rank,
        "lora_alpha": layer.scale * layer.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.removeprefix(head) for name in layers),
        "modules_to_save": sorted(whole) or None,
        "fan_in_fan_out": layer.turned,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _kind_of_task(model: nn.Module) -> str | None:
    """As peft calls it; it decides which methods a loaded model has."""
    name = type(model).__name__
    kinds = {"ForSequenceClassification": "SEQ_CLS", "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
    return next((kind for end, kind in kinds.items() if name.endswith(end)), None)


def _onnx(inputs: Fields, model: nn.Module, path: Path) -> None:
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
