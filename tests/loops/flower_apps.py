"""Flower apps for tests, and the example's files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

Arrays = dict[str, np.ndarray]
MODEL: Arrays = {"w": np.zeros((40, 5), np.float32), "steps": np.array(7), "b": np.zeros(5)}


def identify() -> None:
    """What a process of Flower's knows of itself."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def question(
    arrays: Arrays | None = None, kind: str = "train", config: dict[str, Any] | None = None, run: int = 1
) -> Message:
    identify()
    TaskIdentity.run_id = run
    content = RecordDict({"arrays": record(MODEL if arrays is None else arrays)})
    content["config"] = ConfigRecord(config or {"server-round": 1})
    message = Message(content, dst_node_id=3, message_type=kind)
    message.metadata.__dict__["_message_id"] = "asked"
    return message


def context(node: int = 0, **own: Any) -> Context:
    config = {"partition-id": node, "num-partitions": 4, **own}
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={"lr": 0.1})


def arrays_of(message: Message) -> Arrays:
    (found,) = message.content.array_records.values()
    return {name: array.numpy() for name, array in found.items()}


def app_of(train: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.train()(train)
    return app


def adding(by: float) -> ClientApp:
    """Moves every float by so much, and tells how many records it has."""

    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        moved = {n: a + a.dtype.type(by) if a.dtype.kind == "f" else a for n, a in arrays_of(message).items()}
        content = RecordDict({"arrays": record(moved), "metrics": MetricRecord({"num-examples": 17, "loss": 0.3})})
        return Message(content, reply_to=message)

    return app_of(train)


def everything(message: Message) -> object:
    """All that a server sees of a reply but the clock."""
    about = {k: v for k, v in vars(message.metadata).items() if k not in ("_created_at", "_ttl", "_delivered_at")}
    if message.has_error():
        return about, message.error.code, message.error.reason
    said = {
        name: [(key, (v.dtype, v.shape, v.stype, v.data) if isinstance(v, Array) else v) for key, v in one.items()]
        for name, one in message.content.items()
    }
    return about, said


def load(name: str) -> Any:
    """A file of the example."""
    path = Path(__file__).parents[2] / "examples" / "flower_app" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_flower_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


InProcess = load("play").InProcess
