"""`modicum flower superlink`: Flower's SuperLink behind our gate, and the process that runs the server of a run.

Nothing that arrives over the wire is executed or even unpacked here: what a started run is, its project on this
machine says, and the code that is run is the installed library's.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.deploy.flower import gate, keys, link
from modicum.deploy.flower.crew import die_with_parent
from modicum.errors import UserError

LOOPBACK = "127.0.0.1"
POLL = 0.5  # seconds between looks for a run that was started
HEADERS, CONNECTIONS = 30.0, 600  # seconds for a request's headers, and connections from the network
LEGACY = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")  # ports without our gate
LOG = logging.getLogger("modicum.flower")


@dataclass(frozen=True)
class SuperLink:
    """Where a SuperLink listens and what it keeps.

    Args:
        project: whose runs it starts, and no others.
        keys: folder with `ca.crt`, `server.crt`, `server.key` and the operator's token.
        database: what Flower keeps between starts.
        host: address that nodes reach; `0.0.0.0` for all of this machine's.
        port: port that nodes reach, where a node's own calls pass and nothing else.
        control: port on loopback, for `modicum flower start`, `stop` and `register`.
    """

    project: Path
    keys: Path
    database: Path
    host: str
    port: int
    control: int

    def serve(self) -> None:
        """Until a signal ends it.

        Raises:
            UserError: Another version of Flower, expired or missing keys, a port in use.
        """
        _prepare_environment()
        link.check_version()
        tls = keys.Tls(self.keys / "ca.crt", self.keys / "server.crt", self.keys / "server.key")
        keys.check_tls(tls)
        gate.make_token(self.keys)
        token = gate.read_token(self.keys)
        self._private_database()
        sockets = [_listen(LOOPBACK, self.control), _listen(self.host, self.port)]
        app = _flower(self, tls)
        stop = threading.Event()
        arguments = f"{LOOPBACK}:{self.control}", str(tls.ca), str(self.project)
        command = [sys.executable, "-P", "-m", "modicum.deploy.flower.task", *arguments]
        executor = threading.Thread(
            target=run_tasks, args=(app.state.linkstate_factory, command, stop), name="executor", daemon=True
        )
        executor.start()
        try:
            _server(gate.Gate(app, self.control, token), tls).run(sockets)
        finally:
            stop.set()
            executor.join(10)

    def _private_database(self) -> None:
        """It holds the tokens of running tasks: for this user alone, whatever it was before."""
        self.database.parent.mkdir(parents=True, exist_ok=True)
        for path in self.database.parent.glob(f"{self.database.name}*"):
            path.chmod(0o600)


def _prepare_environment() -> None:
    os.umask(0o077)
    if sys.platform != "win32":  # a connection is an open file, and a database's own have to find room
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name in LEGACY:
        os.environ.pop(name, None)
    os.environ.update(link.QUIET)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host}:{port} ({said}): choose another port or address") from None


def _flower(at: SuperLink, tls: keys.Tls) -> Any:
    """Flower's own app. Gates of its own stay shut too: a secret that nobody knows, no installing of packages."""
    from flwr.common.constant import ISOLATION_MODE_PROCESS, TRANSPORT_TYPE_GRPC_RERE
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app

    files = tls.ca.read_bytes(), tls.certificate.read_bytes(), tls.key.read_bytes()
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=LOOPBACK,
        port=at.control,
        insecure=False,
        certificates=files,
        superexec_auth_secret=secrets.token_bytes(32),
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(tls.ca),
        ssl_certfile=str(tls.certificate),
        ssl_keyfile=str(tls.key),
        database=str(at.database),
        isolation=ISOLATION_MODE_PROCESS,
        runtime_dependency_install=False,
    )
    return create_app(config, SuperLinkLifespan)


def _server(app: gate.Gate, tls: keys.Tls) -> Any:
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config

    return uvicorn.Server(
        uvicorn.Config(
            app,
            ssl_certfile=str(tls.certificate),
            ssl_keyfile=str(tls.key),
            lifespan="on",
            ws="none",
            proxy_headers=False,
            server_header=False,
            log_config=get_uvicorn_log_config(logging.INFO),
            timeout_graceful_shutdown=5,
            http=_hasty(app.control),
        )
    )


def _hasty(control: int) -> Any:
    """uvicorn's own protocol, which bounds the length of headers but waits for them without end."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Hasty(H11Protocol):
        """A connection that has a time for each request's headers; from the network so many at once."""

        def connection_made(self, transport: Any) -> None:
            """Turned away where there are enough: whoever gives orders still gets in."""
            super().connection_made(transport)
            others = sum(isinstance(one, Hasty) and one._at_network() for one in self.connections)
            if self._at_network() and others > CONNECTIONS:
                transport.abort()
            self._look(self)

        def _at_network(self) -> bool:
            return self.server is None or self.server[1] != control

        def _look(self, before: object) -> None:
            """Whoever has sent no whole head since the last look is cut off."""
            idle = self.conn.their_state is h11.IDLE
            if idle and before is self.cycle:
                self.transport.abort()
            elif not self.transport.is_closing():
                self.loop.call_later(HEADERS, self._look, self.cycle if idle else self)

    return Hasty


def run_tasks(factory: Any, command: list[str], stop: threading.Event) -> None:
    """Take each started run and give it a process. A task's token goes through a pipe, never into an argument,
    which every user of the machine could read."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.servicer.runtime.runtime_handlers import acquire_task

    request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    running: list[subprocess.Popen[bytes]] = []
    while not stop.wait(POLL):
        running = [process for process in running if process.poll() is None]
        try:
            found = acquire_task(request, factory.state())
            if found.HasField("task") and found.token:
                running.append(_launch(command, found.token))
        except Exception as error:  # a busy database is asked again
            LOG.warning("no task could be taken: %s", type(error).__name__)
    for process in running:
        with suppress(OSError):
            process.terminate()


def _launch(command: list[str], token: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, preexec_fn=die_with_parent if sys.platform == "linux" else None
    )
    assert process.stdin is not None
    process.stdin.write(token.encode() + b"\n")
    process.stdin.close()
    return process
