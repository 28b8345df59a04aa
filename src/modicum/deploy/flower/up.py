"""A whole deployment on this machine: SuperLink, nodes and silos, each a process of its own, with real keys."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.config import Config, federation, to_toml
from modicum.config.schema import SiloTerms
from modicum.config.write import toml_value
from modicum.deploy.flower import gate, keys, link, register
from modicum.deploy.flower.crew import Crew
from modicum.deploy.flower.follow import BEGIN, OnRound, new_rounds, status_of
from modicum.deploy.flower.project import SERVER_KEY, STATUS, settings, write_project
from modicum.deploy.silo.signing import make_signing_key, public_text
from modicum.deploy.silo.terms import Terms, deployed
from modicum.deploy.silo.wire import Kind, UnreachableError, ask
from modicum.errors import UserError, counted
from modicum.federation.experiment import Federation

HOST = "127.0.0.1"
MARK = "FLWR_HOME"
SUBMISSIONS = 100  # in all: a server that cannot live is not started for ever
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Layout:
    """What lies where in a local deployment's folder."""

    root: Path

    @property
    def experiment(self) -> Path:
        """The experiment's file."""
        return self.root / "experiment.toml"

    @property
    def server(self) -> Path:
        """The server's run folder."""
        return self.root / "server"

    @property
    def keys(self) -> Path:
        """Keys and certificates of all parties."""
        return self.root / "keys"

    @property
    def database(self) -> Path:
        """What the SuperLink keeps."""
        return self.root / "flower" / "link.db"

    @property
    def server_key(self) -> Path:
        """The key with which the server signs what it asks."""
        return self.keys / SERVER_KEY

    def signing(self, name: str) -> Path:
        """The key with which a silo signs what it says."""
        return self.root / "silos" / f"{name}.key"

    def silo(self, name: str) -> Path:
        """A silo's settings."""
        return self.root / "silos" / f"{name}.toml"

    def state(self, name: str) -> Path:
        """A silo's ledger, messages and certificate."""
        return self.root / "silos" / f"state-{name}"


@dataclass(frozen=True)
class Ports:
    """Where the SuperLink listens on this machine: for nodes, and for whoever has its token."""

    nodes: int
    control: int


class Deployment:
    """Everything of one run on loopback. Opening the same folder again continues the run in it."""

    def __init__(self, config: Config, root: Path, *, port: int | None = None, wait: float = 3600.0) -> None:
        link.check_version()
        config, self.at = deployed(config), Layout(root.absolute())
        self.config, self.simulation = config, config.run.simulation
        made = federation(config)
        self.budgets = dict(zip(made.data.names, made.budgets, strict=True))
        server = public_text(make_signing_key(self.at.server_key))
        self.config = config = replace(config, run=replace(config.run, server=server, silos=self._agreed(made)))
        self.terms = Terms(config, tuple(sorted(self.budgets)))
        self.spec = self.terms.spec
        self.ports = _ports(port)
        self.address, self.control = f"{HOST}:{self.ports.nodes}", f"{HOST}:{self.ports.control}"
        self.submissions = 0
        self.sockets = Path(tempfile.mkdtemp(prefix="modicum-"))
        self._write(wait)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        base = {**os.environ, "PATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        home = str(self.at.database.parent)
        self.crew = Crew(self.at.root / "logs", {**base, **link.QUIET, MARK: home}, MARK)

    def _agreed(self, made: Federation) -> dict[str, SiloTerms]:
        """Here one machine holds all records, so it can write down what silos would agree on."""
        agreed = {
            client.name: SiloTerms(records=len(client.train), budget=budget, validation=len(client.validation))
            for client, budget in zip(made.data.clients, made.budgets, strict=True)
        }
        return {n: replace(a, key=public_text(make_signing_key(self.at.signing(n)))) for n, a in agreed.items()}

    def _write(self, wait: float) -> None:
        at = self.at
        for folder in (at.root / "silos", at.keys, at.database.parent, at.server):
            folder.mkdir(parents=True, exist_ok=True)
        at.experiment.write_text(to_toml(self.config, notes=False), encoding="utf-8")
        self.tls = keys.make_tls(at.keys, (HOST, "localhost"))
        keys.check_tls(self.tls)
        self.node_keys = {name: keys.make_node_key(at.keys / name) for name in self.budgets}
        register.write_public_keys(at.keys / "silos.toml", self.node_keys)
        gate.make_token(at.keys)
        for name, budget in self.budgets.items():
            at.silo(name).write_text(self._silo_file(name, budget), encoding="utf-8")
        files = (at.experiment, at.server, at.keys / "silos.toml", at.server_key)
        chosen = settings(*files, round=wait, control=self.control)
        self.project = write_project(at.root / "app", chosen)

    def socket(self, name: str) -> Path:
        """Where a silo listens for its node."""
        return self.sockets / f"{name}.sock"

    def _silo_file(self, name: str, budget: float) -> str:
        s = self.spec
        silo = {
            "name": name,
            "experiment": str(self.at.experiment),
            "folder": str(self.at.state(name)),
            "socket": str(self.socket(name)),
            "simulation": self.simulation,
            "key": str(self.at.signing(name)),
        }
        grant = {
            "budget": budget,
            "delta": s.delta,
            "unit": str(s.unit),
            "adjacency": str(s.adjacency),
            "view": s.view.to_dict()["kind"],
            "smallest_noise": 0.01,
            "bounds": [1e-6, 1e6],
            "rounds": self.config.run.rounds,
        }
        tables = {"silo": silo, "grant": grant}
        lines = {n: [f"{k} = {toml_value(v)}" for k, v in table.items()] for n, table in tables.items()}
        return "\n".join("\n".join([f"[{n}]", *rows, ""]) for n, rows in lines.items())

    @contextmanager
    def running(self, tell: Tell) -> Iterator[None]:
        """All processes up, then all of them gone, whatever happens in between."""
        try:
            self._start(tell)
            yield
        finally:
            self.crew.stop()
            shutil.rmtree(self.sockets, ignore_errors=True)

    def _start(self, tell: Tell) -> None:
        silos, nodes = (counted(len(self.budgets), what) for what in ("silo", "node"))
        tell(f"starting {silos}, a SuperLink at {self.address} and {nodes}")
        for name in self.budgets:
            self.crew.start(f"silo-{name}", _modicum("silo", "serve", str(self.at.silo(name))))
        self.crew.start("superlink", self.superlink_command())
        link.wait_for(self.control, self.at.keys, 90, tell=None, alive=lambda: self.crew.alive("superlink"))
        with link.control(self.control, self.at.keys) as client:
            for name, key in register.read_public_keys(self.at.keys / "silos.toml").items():
                link.register(client, name, key)
        for name in self.budgets:
            self.crew.start(f"node-{name}", self.node_command(name))
        self._wait_for_silos()

    def superlink_command(self) -> list[str]:
        """What starts the SuperLink."""
        return _modicum("flower", "superlink", str(self.project), "--listen", self.address)

    def node_command(self, name: str) -> list[str]:
        """What starts the node of a silo."""
        files = ("--ca", str(self.tls.ca), "--key", str(self.node_keys[name]), "--silo", str(self.socket(name)))
        return _modicum("flower", "node", self.address, *files)

    def _wait_for_silos(self, seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        for name in self.budgets:
            while True:
                try:
                    ask(self.socket(name), Kind.HELLO, timeout=30)
                    break
                except UnreachableError:
                    if not self.crew.alive(f"silo-{name}") or time.monotonic() > until:
                        raise UserError(f"silo {name!r}: {self.crew.last_words(f'silo-{name}')}") from None
                    time.sleep(0.1)

    def run(self, watch: OnRound, tell: Tell) -> None:
        """Start the experiment and see it through, with whatever dies on the way started again."""
        seen, known = new_rounds(self.at.server, 0, watch), self.status()
        if known["state"] == "finished":
            return
        submitted = self._submit()
        while True:
            time.sleep(0.3)
            self.crew.revive()
            seen = new_rounds(self.at.server, seen, watch)
            known = self.status()
            if known["state"] == "finished":
                return
            if known["state"] == "failed":
                raise UserError(known["said"])
            died = known["state"] == "died"
            lost = known["state"] == "waiting" and time.monotonic() > submitted + BEGIN
            if died or lost:
                tell("the server died: continuing its run" if died else "the server did not begin: asking again")
                submitted = self._submit()

    def _submit(self) -> float:
        """Hand the app over and start it; says when. Two servers at once cannot be: the run's folder is locked."""
        self.submissions += 1
        if self.submissions > SUBMISSIONS:
            raise UserError(f"the server keeps dying: its log is in {self.crew.logs / 'superlink.log'}")
        (self.at.server / STATUS).unlink(missing_ok=True)
        link.wait_for(self.control, self.at.keys, 60)
        with link.control(self.control, self.at.keys) as client:
            link.start_run(client, self.project)
        return time.monotonic()

    def status(self) -> dict[str, Any]:
        """What the server last said of itself."""
        return status_of(self.at.server)


def _modicum(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", "from modicum.cli import main; main()", *arguments]


def _ports(nodes: int | None) -> Ports:
    """Free ports; one that is asked for must be free."""
    if nodes is not None and not _free(nodes):
        raise UserError(f"port {nodes} is in use: choose another with --port")
    with socket.create_server((HOST, 0)) as first, socket.create_server((HOST, 0)) as second:
        found = [s.getsockname()[1] for s in (first, second)]
    return Ports(nodes or found[0], found[1])


def _free(port: int) -> bool:
    try:
        with socket.create_server((HOST, port)):
            return True
    except (OSError, OverflowError):
        return False
