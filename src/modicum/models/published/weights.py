"""Weights of published networks, read without running anything that is in their files."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.errors import DAMAGED, UserError

ENDINGS = (".safetensors", ".bin", ".pth", ".pt")
NAMES = ("model.safetensors", "pytorch_model.bin")  # of a folder as Hugging Face and timm write it
NESTED = ("state_dict", "model")  # under which a checkpoint may keep its weights
KEY = r"[\"']?(\w+)[\"']?[ \t]*:"
ENTRY = re.compile(rf"^{KEY}(.*(?:\n(?!{KEY.replace('(', '(?:')}).*)*)", re.MULTILINE)  # to the next key of a card
State = dict[str, Tensor]


@dataclass(frozen=True)
class WeightFile:
    """A file of weights, and what its folder says about it."""

    path: Path
    content: bytes
    config: Mapping[str, Any]  # config.json
    card: Mapping[str, tuple[str, ...]]  # the head of README.md: license, datasets

    @property
    def sha256(self) -> str:
        """Names the weights, whatever the file is called."""
        return hashlib.sha256(self.content).hexdigest()

    def state(self) -> State:
        """Arrays by name. Pickles only as plain tensors: anything else in one could run code."""
        try:
            if self.path.suffix == ".safetensors":
                from safetensors.torch import load

                found = load(self.content)
            else:
                found = torch.load(io.BytesIO(self.content), map_location="cpu", weights_only=True)
        except Exception as error:
            said = str(error).split("\n", 1)[0]
            raise UserError(
                f"{self.path} is no plain file of weights ({type(error).__name__}: {said[:120]}): save the "
                "network's state_dict() alone, best as .safetensors"
            ) from None
        return _plain(found, self.path)


def weight_file(path: str | Path) -> WeightFile:
    """A file of weights, or the one in a folder, with what lies beside it.

    Args:
        path: A file, or a folder as Hugging Face and timm write it.

    Returns:
        Its bytes, and what is said about it.

    Raises:
        UserError: Where there is no such file, or several.
    """
    path = Path(path)
    file = _only_one(path) if path.is_dir() else path
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot read the weights {file} ({said}): name a file or folder, or a network of modicum backbones"
        ) from None
    folder = file.parent
    return WeightFile(file, content, settings(folder / "config.json"), card_of(folder))


def _only_one(folder: Path) -> Path:
    for name in NAMES:
        if (folder / name).is_file():
            return folder / name
    found = [p for p in sorted(folder.iterdir()) if p.suffix in ENDINGS]
    if len(found) != 1:
        raise UserError(f"{folder} holds {len(found)} files of weights ({', '.join(ENDINGS)}): name one of them")
    return found[0]


def _plain(found: Any, path: Path) -> State:
    for name in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise UserError(f"{path} holds no arrays by name: save the network's state_dict() alone")
    state = {str(name): value.detach() for name, value in found.items()}
    for name, value in state.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_complex():
            raise UserError(f"{path}: {name} is no plain array of real numbers: save the weights as floats")
        if not torch.isfinite(value).all():
            raise UserError(f"{path}: {name} holds values that are not finite: fetch the file again")
    return state


def settings(path: Path) -> Mapping[str, Any]:
    """A JSON file that lies beside weights; empty where there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGED) as error:
        raise UserError(f"cannot read {path} ({error}): fetch it again") from None
    return found if isinstance(found, Mapping) else {}


def card_of(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """Entries of the head of a folder's model card; what is nested, or over several lines, counts as items."""
    try:
        text = (folder / "README.md").read_text("utf-8-sig", errors="replace")
    except OSError:
        return {}
    head = re.match(r"\s*---[ \t]*\n(.*?)\n---", text, re.DOTALL)
    said: dict[str, tuple[str, ...]] = {}
    for name, value in ENTRY.findall(head[1] if head else ""):
        items = (item.strip("[]{}-\"' \t") for item in re.split(r"[,\n]", value))
        said[name] = (*said.get(name, ()), *filter(None, items))
    return said
