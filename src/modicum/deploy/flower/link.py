"""What a deployment asks of a SuperLink's control API: register nodes, hand over a signed bundle, start a run.

Pinned to the Flower version in `project.FLWR`: these calls are Flower's own, and they move between releases.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum.deploy.flower.project import FLWR, NAME, PUBLISHER
from modicum.deploy.silo import signing
from modicum.errors import MissingExtraError, UserError

GONE = "unregistered"  # a node's status in Flower's list, which forgets nobody
KEY_ID = "fpk_modicum"  # the name under which nodes know the signing key


def check_version() -> None:
    """Refuse another version of Flower than the one whose insides are used here."""
    try:
        from flwr.supercore.version import package_version
    except ImportError:
        raise MissingExtraError("flwr", "flower", "deploying on Flower") from None
    if package_version != FLWR:
        raise UserError(
            f"this works with flwr {FLWR} and {package_version} is installed: pip install flwr=={FLWR}"
        )


@contextmanager
def control(address: str, ca: Path) -> Iterator[Any]:
    """A client of the control API."""
    check_version()
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=ca.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="modicum")],
    )
    try:
        yield client
    finally:
        client.close()


def wait_for(
    address: str,
    ca: Path,
    seconds: float,
    tell: Callable[[str], None] | None = None,
    alive: Callable[[], bool] | None = None,
) -> None:
    """Until the SuperLink answers: with a visible countdown, and a clear end."""
    end = time.monotonic() + seconds
    while True:
        try:
            with control(address, ca) as client:
                _list_nodes(client)
            return
        except UserError:
            raise
        except Exception as error:
            left = end - time.monotonic()
            gone = alive is not None and not alive()
            if left <= 0 or gone:
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
    """The same as `flwr run`."""
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    content = bundle(project)
    fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    return _started(client.StartRun(StartRunRequest(fab=fab)))


def start_signed_run(client: Any, project: Path) -> int:
    """Start the bundle that `publish` has handed over together with its signature."""
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    fab = Fab(hash_str=hashlib.sha256(bundle(project)).hexdigest())
    return _started(client.StartRun(StartRunRequest(fab=fab, app_spec=f"@{PUBLISHER}/{NAME}")))


def stop_run(client: Any, run_id: int) -> None:
    """The same as `flwr stop`."""
    from flwr.proto.control_pb2 import StopRunRequest

    try:
        client.StopRun(StopRunRequest(run_id=run_id))
    except Exception as error:
        raise UserError(f"the SuperLink does not stop run {run_id}: {_why(error)}") from None


def _started(response: Any) -> int:
    if not response.HasField("run_id"):
        raise UserError("the SuperLink did not start the run: its log says why")
    return int(response.run_id)


def bundle(project: Path) -> bytes:
    """The app as Flower's signed bundle of files, in bytes."""
    from flwr.cli.build import build_fab_from_disk

    return bytes(build_fab_from_disk(project))


def publish(project: Path, database: Path, signing_key: Path) -> None:
    """Sign the bundle and store it with its signature in the SuperLink's database.

    Flower's own way to signed bundles leads through its app hub; `flwr run` with a local project never attaches a
    signature. The database is where a SuperLink looks either way, so this works without the hub.
    """
    check_version()
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    content = bundle(project)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, signatures(content, signing_key))
    factory = LinkStateFactory(str(database), NoOpFederationManager(), ObjectStoreFactory(str(database)))
    factory.state().store_app(
        fab=fab,
        federation_id=NOOP_FEDERATION_ID,
        app_id=f"@{PUBLISHER}/{NAME}",
        app_type=TaskType.SERVER_APP,
        added_by=NOOP_FLWR_AID,
    )


def signatures(content: bytes, signing_key: Path) -> dict[str, str]:
    """What a node checks before it runs a bundle."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

    signed_at = int(time.time())
    key: Any = load_ssh_private_key(signing_key.read_bytes(), None)
    signature = key.sign(create_message_to_sign(hashlib.sha256(content).digest(), signed_at))
    value = {"signature": base64.urlsafe_b64encode(signature).decode().rstrip("="), "signed_at": signed_at}
    return {KEY_ID: json.dumps(value), "valid_license": "Valid"}


def write_trusted(path: Path, signing_key: Path) -> None:
    """The file for `flower-supernode --trusted-entities`."""
    path.write_text(f"{KEY_ID}: '{signing.public(signing_key).read_text().strip()}'\n", encoding="utf-8")


def connection_file(home: Path, name: str, address: str, ca: Path) -> None:
    """Flower's own config file, so that plain `flwr` commands reach this SuperLink."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n'
        f"root-certificates = {json.dumps(str(ca.absolute()))}\n",
        encoding="utf-8",
    )


def environment(home: Path, base: Mapping[str, str]) -> dict[str, str]:
    """For every Flower process: its own home, no telemetry, no update checks, nothing installed at run time."""
    return {
        **base,
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:160] or type(error).__name__
