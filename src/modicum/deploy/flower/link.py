"""What a deployment asks of a SuperLink's control API, with the operator's token: register nodes, start a run.

Pinned to the Flower version in `project.FLWR`: these calls are Flower's own, and they move between releases.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum.deploy.flower import gate
from modicum.deploy.flower.project import FLWR
from modicum.errors import MissingExtraError, UserError

GONE = "unregistered"  # a node's status in Flower's list, which forgets nobody
QUIET = {  # for every process that uses Flower: no telemetry, no update checks, nothing installed at run time
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def check_version() -> None:
    """Refuse another version of Flower than the one whose insides are used here, and that was attacked."""
    try:
        from flwr.supercore.version import package_version
    except ImportError:
        raise MissingExtraError("flwr", "deploy", "deploying on Flower") from None
    if package_version != FLWR:
        raise UserError(
            f"this works with flwr {FLWR}, on which its gate was tried, and {package_version} is installed: "
            f"pip install flwr=={FLWR}"
        )


class _Shows:
    """Adds the operator's token to each request."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        context.request.headers["authorization"] = f"Bearer {self._token}"
        return call_next(context)


@contextmanager
def control(address: str, keys: Path) -> Iterator[Any]:
    """A client of the control API, with the authority and the token in a folder of keys."""
    check_version()
    ca = keys / "ca.crt"
    if not ca.is_file():
        raise UserError(f"there is no {ca}: `modicum flower init` and `modicum flower keys make` make it")
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=ca.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="modicum"), _Shows(gate.read_token(keys))],
    )
    try:
        yield client
    finally:
        client.close()


def wait_for(
    address: str,
    keys: Path,
    seconds: float,
    tell: Callable[[str], None] | None = None,
    alive: Callable[[], bool] | None = None,
) -> None:
    """Until the SuperLink answers: with a visible countdown, and a clear end."""
    end = time.monotonic() + seconds
    while True:
        try:
            with control(address, keys) as client:
                _list_nodes(client)
            return
        except UserError:
            raise
        except Exception as error:
            left = end - time.monotonic()
            gone = alive is not None and not alive()
            if not left > 0 or gone:  # also of no number
                raise UserError(
                    f"no SuperLink answers at {address} ({_why(error)}): check that it runs, its address and its "
                    "certificate"
                ) from None
            if tell is not None:
                tell(f"waiting for the SuperLink at {address}: {left:.0f} s left")
            time.sleep(min(0.5, left))


def register(client: Any, name: str, public_key: bytes) -> None:
    """Make a node's key known. One that is registered already stays as it is."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    if public_key in {bytes(node.public_key) for node in _list_nodes(client)}:
        return
    try:
        client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))
    except Exception as error:
        raise UserError(f"the SuperLink does not register {name!r}: {_why(error)}") from None


def unregister(client: Any, revoked: Collection[bytes]) -> list[str]:
    """Turn away the nodes with these keys, connected or not; says which were known."""
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    known = [node for node in _list_nodes(client) if bytes(node.public_key) in revoked and node.status != GONE]
    for node in known:
        try:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        except Exception as error:
            raise UserError(f"the SuperLink does not turn {node.name!r} away: {_why(error)}") from None
    return [node.name for node in known]


def _list_nodes(client: Any) -> list[Any]:
    from flwr.proto.control_pb2 import ListNodesRequest

    return list(client.ListNodes(ListNodesRequest()).nodes_info)


def start_run(client: Any, project: Path) -> int:
    """Start a run with a project's settings."""
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    content = bundle(project)
    response = client.StartRun(
        StartRunRequest(fab=Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content))
    )
    if not response.HasField("run_id"):
        raise UserError("the SuperLink did not start the run: its log says why")
    return int(response.run_id)


def stop_run(client: Any, run_id: int) -> None:
    """The same as `flwr stop`."""
    from flwr.proto.control_pb2 import StopRunRequest

    try:
        client.StopRun(StopRunRequest(run_id=run_id))
    except Exception as error:
        raise UserError(f"the SuperLink does not stop run {run_id}: {_why(error)}") from None


def bundle(project: Path) -> bytes:
    """A project as Flower's bundle of files, in bytes: here, its settings."""
    from flwr.cli.build import build_fab_from_disk

    return bytes(build_fab_from_disk(project))


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:160] or type(error).__name__
