"""Texts as tokens, by a tokenizer from a local folder that everybody has.

It is fixed and public: one that was trained on private records would tell of them. Every text gets the same public
length, whatever stands beside it, since shapes that follow from records tell of records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from modicum.core.files import files_digest
from modicum.data.arrays import Array
from modicum.data.sequences import MASKS, TOKENS
from modicum.errors import MissingExtraError, UserError

FILE = "tokenizer.json"


@dataclass(frozen=True)
class Tokenizer:
    """A folder's tokenizer, and the number that fills texts up."""

    inner: Any
    padding: int

    @property
    def values(self) -> int:
        """How many different tokens there are."""
        return int(self.inner.get_vocab_size())

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Array]:
        """Each text as tokens of this length, and where it is: longer ones are cut, shorter ones filled up."""
        marks = int(self.inner.num_special_tokens_to_add(False))
        if length <= marks:
            raise UserError(
                f"a text of {length} tokens has no room beside the {marks} marks that its tokenizer adds: raise "
                "its length"
            )
        self.inner.no_padding()
        self.inner.enable_truncation(length)
        ids = np.full((len(texts), length), self.padding, np.int64)
        mask = np.zeros((len(texts), length), np.bool_)
        for row, encoded in enumerate(self.inner.encode_batch(list(texts))):
            ids[row, : len(encoded.ids)], mask[row, : len(encoded.ids)] = encoded.ids, True
        return {TOKENS: ids, MASKS[0]: mask}


@lru_cache(maxsize=8)
def tokenizer_in(folder: str) -> Tokenizer:
    """The tokenizer of a folder, as `save_pretrained` writes it. No code of the folder is run.

    Raises:
        UserError: Where there is none.
    """
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise MissingExtraError("tokenizers", "text", "a text column with a tokenizer") from None
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        raise UserError(
            f"there is no {FILE} in {folder}: give the folder that save_pretrained of a tokenizer wrote"
        )
    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # the package raises no class of its own
        said = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path} holds no tokenizer: {said[:200]}") from None
    return Tokenizer(inner, inner.token_to_id(_padding_token(path)) or 0)


def tokenizer_digest(folder: str) -> str:
    """Of all that decides its tokens: what parties agree on, wherever each keeps the folder."""
    return files_digest(Path(folder).expanduser(), FILE, "tokenizer_config.json")


def _padding_token(path: Path) -> str:
    """As the folder names it; where it names none, masked positions hold token 0."""
    try:
        told = json.loads(path.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
        found = told.get("pad_token") or ""
    except (OSError, ValueError, AttributeError):
        return ""
    return str(found.get("content", "") if isinstance(found, dict) else found)
