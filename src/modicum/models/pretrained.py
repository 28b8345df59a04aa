"""Models of `transformers` from a local folder: `hf:FOLDER`, with its weights or, where it has none, a seed's.

Nothing is fetched, no code of the folder is run, and weights are read as safetensors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.core.records import Field, Fields, leaves
from modicum.errors import MissingExtraError, UserError
from modicum.models.published.weights import card_of

UNREAD = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")  # pickles, and weights of other kinds
HEADS = ("auto", "classes", "tokens", "mean")


def pretrained(
    folder: Path, inputs: Fields, outputs: int | None, head: str = "auto", dropout: float = 0.0
) -> nn.Module:
    """The model of a folder with a head for the task.

    Args:
        folder: With config.json, and weights as safetensors if there are some.
        inputs: What a record is made of.
        outputs: How many the task needs; None where it does not say.
        head: classes: the folder's own kind of classifier; tokens: its language model; mean: one linear layer on
            the mean over real positions, cut to length 1, as sentence encoders are used [default: tokens where
            there is an output for each token, else classes].
        dropout: Of all its layers. Noise does the same work.

    Returns:
        The module; its `fresh_layers` are those that the folder has no weights of, and `trained_on` the datasets
        that the folder's card names.

    Raises:
        UserError: Where the folder holds no such model.
    """
    if head not in HEADS:
        raise UserError(f"unknown head {head!r}: use {', '.join(HEADS)}")
    config = config_of(folder, dropout)
    if head == "auto":
        head = "tokens" if _language(inputs, outputs) else "classes"
    made = _with_head(folder, config, head, inputs, outputs)
    made.trained_on = card_of(folder).get("datasets", ())  # type: ignore[assignment]
    return made


def _with_head(folder: Path, config: Any, head: str, inputs: Fields, outputs: int | None) -> nn.Module:
    if head == "mean":
        return MeanHead(encoder_of(folder, config), _width(config), outputs or 1)
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )

    if head == "classes":
        config.num_labels = outputs or 1
        if getattr(config, "pad_token_id", 0) is None:  # networks of images have none
            config.pad_token_id = 0  # padding is told by the mask; some classifiers ask for the number besides
    images = isinstance(inputs, Field) and inputs.kind == "float"
    kinds = {"tokens": AutoModelForCausalLM, "classes": AutoModelForSequenceClassification}
    return _loaded(AutoModelForImageClassification if images else kinds[head], folder, config)


def config_of(path: Path, dropout: float = 0.0) -> Any:
    """What config.json says, with one dropout everywhere."""
    try:
        from transformers import AutoConfig
        from transformers.utils import logging
    except ImportError:
        raise MissingExtraError("transformers", "text", "a model of Hugging Face") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not (path / "config.json").is_file():
        raise UserError(
            f"there is no config.json in {path}: give the folder of a model, as save_pretrained writes"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{path} holds no model that transformers knows: {_first_line(error)}") from None
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith(("_pdrop", "_drop"))) and isinstance(value, int | float):
            setattr(config, name, dropout)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def encoder_of(path: Path, config: Any) -> nn.Module:
    """The model without a head."""
    from transformers import AutoModel

    model = _loaded(AutoModel, path, config)
    if hasattr(model, "pooler"):
        del model.pooler  # nothing reads it
        model.register_module("pooler", None)
    return model


def _loaded(kind: Any, path: Path, config: Any) -> nn.Module:
    """With the folder's weights, in float32; without any, with those that are drawn now."""
    stored = list(path.glob("*.safetensors"))
    unread = [] if stored else sorted(file.name for pattern in UNREAD for file in path.glob(pattern))
    if unread:
        raise UserError(f"{path} holds its weights as {unread[0]}, which is not read: save them as safetensors")
    try:
        if not stored:
            model: nn.Module = kind.from_config(config)
            return model
        model, told = kind.from_pretrained(
            path,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"the model in {path} cannot be used as {kind.__name__}: {_first_line(error)}") from None
    missing = {name.rpartition(".")[0] for name in told["missing_keys"]}
    prefix = str(model.base_model_prefix)
    inside = f"{prefix}." if hasattr(model, prefix) else ""  # the model without its head
    lost = sorted(name for name in missing if name.startswith(inside) and "pooler" not in name)
    if lost:
        raise UserError(
            f"the weights in {path} leave out {lost[0]} ({len(lost)} layers in all), which would be random: save "
            "all of the model there"
        )
    model.fresh_layers = tuple(sorted(missing))  # type: ignore[assignment]
    return model


class Encoder(nn.Module):
    """The frozen model of a folder, that makes a vector of each text; its input is a text's arrays by name."""

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__()
        if not list(folder.glob("*.safetensors")):
            raise UserError(f"{folder} holds no weights as safetensors: a frozen encoder needs trained ones")
        self.inner = encoder_of(folder, config)
        self.size, self.values = _width(config), int(config.vocab_size)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        """The mean over each text's own positions."""
        return mean_of(self.inner, x["input_ids"], x["attention_mask"])


class MeanHead(nn.Module):
    """A linear layer on the mean of a text's positions, brought to length 1."""

    fresh_layers = ("head",)

    def __init__(self, encoder: nn.Module, size: int, outputs: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(size, outputs)
        nn.init.zeros_(self.head.weight)  # convex: no start is better than another
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of each text."""
        found: Tensor = self.head(mean_of(self.encoder, input_ids, attention_mask))
        return found


def mean_of(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the last layer over real positions, with length 1."""
    hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    real = attention_mask[..., None].to(hidden.dtype)
    return functional.normalize((hidden * real).sum(1) / real.sum(1).clamp_min(1), dim=1)


def _language(inputs: Fields, outputs: int | None) -> bool:
    """Whether there is an output for each token that records hold."""
    tokens = dict(leaves(inputs)).get("input_ids", inputs)
    return isinstance(tokens, Field) and tokens.kind == "int" and outputs in (None, tokens.values)


def _width(config: Any) -> int:
    return int(getattr(config, "hidden_size", None) or config.dim)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
