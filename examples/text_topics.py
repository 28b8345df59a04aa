"""Text classification by a small transformer: which page of Python's own manual ten words are from."""

from __future__ import annotations

import re
import zlib
from pydoc_data.topics import topics

import torch
from beside import beside  # the file beside this one
from torch import Tensor, nn

import modicum as mo

PAGES = ("specialnames", "compound", "types", "string-methods")
BUCKETS, WORDS = 1024, 10  # of a public function of words; the public length of a record


class Reader(nn.Module):
    """One layer of attention over words, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BUCKETS + 1, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(32, len(PAGES))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The logits of each record's page."""
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=~mask)
        real = mask[..., None].to(hidden.dtype)
        logits: Tensor = self.head((hidden * real).sum(1) / real.sum(1).clamp_min(1))
        return logits


def snippets() -> list[tuple[list[int], int]]:
    """Words as numbers by a public function, in pieces of eight to ten."""
    found = []
    for page, name in enumerate(PAGES):
        words = [zlib.crc32(word.encode()) % BUCKETS + 1 for word in re.findall(r"[a-z_]+", topics[name].lower())]
        found += [(words[i : i + WORDS - i // WORDS % 3], page) for i in range(0, len(words) - WORDS, WORDS)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order.tolist()]


def main() -> None:
    records = snippets()
    size = len(records) // 2
    offices = mo.from_torch(
        [records[i * size : (i + 1) * size] for i in range(2)],
        length=WORDS,
        values=BUCKETS + 1,
        classes=len(PAGES),
    )
    torch.manual_seed(0)
    beside(
        "pages of a manual",
        mo.federate(offices, test=0.2),
        model=Reader(),
        budgets=8.0,
        rounds=15,
        private=mo.methods.DpSgd(lr=2.0),
        public=mo.methods.FedAvg(lr=0.5),
    )


if __name__ == "__main__":
    main()
