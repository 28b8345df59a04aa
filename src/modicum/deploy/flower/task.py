"""The server of one run, in a process of its own: `… -m modicum.deploy.flower.task ADDRESS CA PROJECT < token`.

Its settings are those of the project on this machine. The bundle that a run was started with is never opened.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from modicum.deploy.flower import link, server_app
from modicum.deploy.flower.project import read_settings


def main(address: str, ca: str, project: str, token: str) -> int:
    """Run the server until it ends, and tell the SuperLink how it ended."""
    link.check_version()
    from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.task_identity import TaskIdentity

    from modicum.deploy.flower.grid import Grid

    grid = Grid(address, insecure=False, root_certificates=Path(ca).read_bytes(), token=token)
    client = grid._runtime_client
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    try:
        given = client.PullTaskInput(PullTaskInputRequest())
        run = run_from_proto(given.run)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            given.task_id,
            run.run_id,
            SUPERLINK_NODE_ID,
        )
        grid.set_run(run)
        server_app.run(grid, read_settings(Path(project)))
    except Exception as error:
        _tell(grid, SubStatus.FAILED, f"{type(error).__name__}: {error}")
        return 1
    _tell(grid, SubStatus.COMPLETED, "")
    return 0


def _tell(grid: Any, how: str, details: str) -> None:
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest

    grid._retry_invoker.max_tries = 1  # the run's folder says how it ended in any case
    with suppress(Exception):
        grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=how, details=details))
    grid.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin.readline().strip()))
