"""Deployments for tests: one at a time on this machine, however many test processes there are."""

from __future__ import annotations

import fcntl
import os
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from modicum.config import experiment, read
from modicum.deploy.flower.keys import Tls
from modicum.deploy.flower.up import Deployment
from modicum.federation.simulation import Simulation

RECORD_LEVEL = """
[data]
name = "digits"
clients = 2
partition = "iid"

[privacy]
budgets = [1.0, 4.0]
fixed_shapes = "auto"

[method]
name = "dp-sgd"
clip = 0.5
batch = 32
steps = 2

[run]
rounds = 2
seed = 5
simulation = true

[run.silos]
client-00 = { records = 719, budget = 1.0 }
client-01 = { records = 719, budget = 4.0 }
"""

CLIENT_LEVEL = RECORD_LEVEL.replace('fixed_shapes = "auto"\n', "").replace(
    'name = "dp-sgd"\nclip = 0.5\nbatch = 32', 'name = "aqc"\nlevel = "client"\nclip = 0.3\nbatch = 16'
)


@contextmanager
def alone() -> Iterator[None]:
    """Deployments start many processes: two of them at once would only measure each other."""
    with open(Path(tempfile.gettempdir()) / "modicum-flower-tests.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def deployment(folder: Path, text: str, **options: float) -> Deployment:
    (folder / "experiment.toml").write_text(text)
    return Deployment(read(folder / "experiment.toml"), folder / "out", wait=options.get("wait", 300))


def in_process(
    folder: Path, text: str, faults: Callable[[int, str], bool] | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    """The same experiment in this process: its model by name, and its bounds."""
    (folder / "again.toml").write_text(text)
    run = Simulation(experiment(read(folder / "again.toml")), folder / "in-process", faults=faults)
    bounds = [record.bound for record in run.rounds()]
    run.close()
    return dict(run.backend.layout.named(run.model)), bounds


def deployed_model(made: Deployment) -> dict[str, Tensor]:
    return load_file(made.at.server / "model.safetensors")


def silent(_: object) -> None:
    pass


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.2)


def pid_of_server(made: Deployment) -> int:
    return int(made.status()["pid"])


def start(made: Deployment, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    with open(made.crew.logs / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=dict(made.crew.environment),
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(10)


def log_of(made: Deployment, name: str) -> str:
    return (made.crew.logs / f"{name}.log").read_text(errors="replace")


class Impostor:
    """A TLS server with its own certificate; keeps every decrypted byte that anybody tells it."""

    def __init__(self, tls: Tls) -> None:
        self.heard, self.refusals = b"", 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(tls.certificate, tls.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            try:
                with self._context.wrap_socket(link, server_side=True) as safe:
                    safe.settimeout(5)
                    while part := safe.recv(65536):
                        self.heard += part
                        safe.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            except (ssl.SSLError, OSError):
                self.refusals += 1

    def close(self) -> None:
        self._listener.close()


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")
