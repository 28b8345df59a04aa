"""Play the app of `make.py` in this process, with records that Modicum reads, and say how good its model is.

`flwr run` does the same with many processes and with records that `flwr-datasets` fetches.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

import modicum as mo

SETTINGS = {"num-server-rounds": 3, "penalty": "l2", "local-epochs": 1}


class InProcess(Grid):
    """Carries messages to clients of this process, one after another."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.asked = app, list[int]()
        self.contexts = {100 + i: self._context(i, nodes) for i in range(nodes)}

    def _context(self, number: int, nodes: int) -> Context:
        own = {"partition-id": number, "num-partitions": nodes}
        return Context(
            run_id=1, node_id=100 + number, node_config=own, state=RecordDict(), run_config=dict(SETTINGS)
        )

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Each client's answer."""
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        self.asked.append(node)
        return self.app(message, self.contexts[node])

    def get_node_ids(self) -> Iterable[int]:
        """All of them."""
        return list(self.contexts)

    def get_nodes(self) -> Iterable[Any]:
        """Nobody asks for more than their numbers."""
        raise NotImplementedError

    set_run = run = create_message = push_messages = pull_messages = get_nodes


def stand_in(x: NDArray[np.uint8], y: NDArray[np.int64]) -> types.ModuleType:
    """What the app imports as `flwr_datasets`, over these records."""

    class Partition(dict[str, NDArray[Any]]):
        def __len__(self) -> int:
            return len(self["label"])

        def with_format(self, _: str) -> Partition:
            return self

    class IidPartitioner:
        def __init__(self, num_partitions: int) -> None:
            self.parts = num_partitions

    class FederatedDataset:
        def __init__(self, dataset: str, partitioners: dict[str, IidPartitioner]) -> None:
            order = np.random.default_rng(0).permutation(len(y))
            self.rows = np.array_split(order, partitioners["train"].parts)

        def load_partition(self, number: int, split: str) -> Partition:
            return Partition(image=x[self.rows[number]], label=y[self.rows[number]])

    module, part = types.ModuleType("flwr_datasets"), types.ModuleType("flwr_datasets.partitioner")
    module.FederatedDataset, part.IidPartitioner = FederatedDataset, IidPartitioner  # type: ignore[attr-defined]
    sys.modules["flwr_datasets"], sys.modules["flwr_datasets.partitioner"] = module, part
    return module


def play(folder: Path, clients: int) -> Any:
    """The model that the app has made, in the folder as it writes it."""
    import joblib

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    client, server = (importlib.import_module(f"logreg.{side}_app") for side in ("client", "server"))
    grid = InProcess(client.app, clients)
    server.app(grid, grid.contexts[100])
    return joblib.load("logreg_model.pkl")


def main() -> None:
    """One app, and what its model makes of records that nobody trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--data", default="mnist")
    asked = parser.parse_args()
    data = mo.load_dataset(asked.data)
    stand_in(data.train.x.reshape(-1, 28, 28), data.train.y)
    model = play(asked.folder.absolute(), asked.clients)
    print(f"accuracy: {100 * model.score(data.test.x.reshape(len(data.test), -1), data.test.y):.1f}%")


if __name__ == "__main__":
    main()
