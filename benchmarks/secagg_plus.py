"""Flower's SecAgg+ in one process: its own client mod and server workflow, over a grid that is a function call.

python benchmarks/secagg_plus.py 20 1000000       # clients, coordinates; complete graph, like ours
python benchmarks/secagg_plus.py 50 1000000 --dropouts 3
python benchmarks/secagg_plus.py 200 100000 --shares 53 --threshold 33       # sparse

Processor time of one client and of the server, and what the client sends. Local training costs nothing here.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common import recorddict_compat as compat
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.task_identity import TaskIdentity

STAGES = ("setup_stage", "share_keys_stage", "collect_masked_vectors_stage", "unmask_stage")


class Grid:
    """Clients answer within the call; the last `dropouts` vanish before they have sent their masked vectors."""

    def __init__(self, clients: int, vector: Any, dropouts: int) -> None:
        self.contexts = {i: Context(i, i, {}, RecordDict(), {}) for i in range(1, clients + 1)}
        self.gone = set(range(clients - dropouts + 1, clients + 1))
        self.vector, self.stage = vector, ""
        self.client, self.all, self.up = 0.0, 0.0, 0

    def send_and_receive(self, messages: list[Message], *, timeout: float | None = None) -> list[Message]:
        late = self.stage in STAGES[2:]
        return [self._answer(m) for m in messages if not (late and m.metadata.dst_node_id in self.gone)]

    def _answer(self, message: Message) -> Message:
        who = message.metadata.dst_node_id
        start = time.process_time()
        asked = RecordDict(dict(message.content))
        asked.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(dict(message.content[RECORD_KEY_CONFIGS]))
        message.content = asked
        reply = secaggplus_mod(message, self.contexts[who], self._fit)
        spent = time.process_time() - start
        self.all += spent
        if who == 1:
            self.client += spent
            values = reply.content.config_records[RECORD_KEY_CONFIGS].values()
            self.up += sum(_size(v) for v in values)
        return reply

    def _fit(self, message: Message, _: Context) -> Message:
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([self.vector]), 1, {})
        return Message(compat.fitres_to_recorddict(result, False), reply_to=message)


def _size(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    return sum(_size(v) for v in value) if isinstance(value, list) else 8


def play(
    clients: int, dimension: int, dropouts: int, shares: int | None = None, threshold: int | None = None
) -> str:
    vector = np.linspace(-1, 1, dimension)
    grid = Grid(clients, vector, dropouts)
    empty = ndarrays_to_parameters([np.zeros(1)])
    people = [(SimpleNamespace(node_id=i), FitIns(empty, {})) for i in grid.contexts]
    kept: list[Any] = []
    strategy = SimpleNamespace(
        configure_fit=lambda *_: people,
        aggregate_fit=lambda _, results, __: kept.append(results) or (None, {}),
    )
    state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: 1})})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(empty, True)
    context: Any = SimpleNamespace(
        state=state,
        strategy=strategy,
        client_manager=SimpleNamespace(num_available=lambda: clients),
        history=SimpleNamespace(add_metrics_distributed_fit=lambda **_: None),
    )
    workflow = SecAggPlusWorkflow(shares or 1.0, threshold or (clients + 1) // 2 + 1)
    own, server = WorkflowState(), 0.0
    for stage in STAGES:
        grid.stage, before, start = stage, grid.all, time.process_time()
        if not getattr(workflow, stage)(grid, context, own):
            raise SystemExit(f"SecAgg+ stopped in {stage}")
        server += time.process_time() - start - (grid.all - before)
    found = parameters_to_ndarrays(kept[0][0][1].parameters)[0]
    print(f"largest error of the mean: {np.abs(found - vector).max():.2g}", file=sys.stderr)
    return (
        f"| {clients} | {dimension:,} | {dropouts} | {grid.client:.2f} | {server:.2f} | {grid.up / 1e6:.2f} "
        f"| {grid.up / 4 / dimension:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", type=int)
    parser.add_argument("dimension", type=int)
    parser.add_argument("--dropouts", type=int, default=0)
    parser.add_argument(
        "--shares", type=int, help="holders of a client's shares: a sparse graph, drawn by the server"
    )
    parser.add_argument("--threshold", type=int, help="shares that open a secret")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    print(play(asked.clients, asked.dimension, asked.dropouts, asked.shares, asked.threshold))


if __name__ == "__main__":
    main()
