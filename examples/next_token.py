"""Next token: the bytes of Python's own manual, one after another, by a small network of the last four."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from beside import beside  # the file beside this one
from torch import Tensor, nn

import modicum as mo

PAGES = ("specialnames", "compound", "types", "formatstrings")  # which do not repeat each other
LENGTH, SEEN, BYTES = 32, 4, 128  # of a record; of what a prediction looks at; ASCII


class Context(nn.Module):
    """The last four bytes, each by its place, and one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, 16)
        self.hidden, self.head = nn.Linear(16 * SEEN, 64), nn.Linear(64, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each next byte."""
        before = nn.functional.pad(x, (SEEN - 1, 0))
        windows = torch.stack([before[:, i : i + x.shape[1]] for i in range(SEEN)], dim=-1)
        logits: Tensor = self.head(torch.relu(self.hidden(self.embedding(windows).flatten(2))))
        return logits


def main() -> None:
    text = "".join(topics[name] for name in PAGES).encode("ascii", "ignore")[:160_000]
    records = torch.tensor(list(text)).view(-1, LENGTH)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0))
    phones = mo.from_torch([[(records[i],) for i in part.tolist()] for part in order.chunk(4)], values=BYTES)
    torch.manual_seed(0)
    beside(
        "bytes of a manual",
        mo.federate(phones, test=0.2),
        task="next-token",
        model=Context(),
        budgets=8.0,
        rounds=15,
        private=mo.methods.DpSgd(lr=4.0, batch=128),
        public=mo.methods.FedAvg(lr=2.0),
    )


if __name__ == "__main__":
    main()
