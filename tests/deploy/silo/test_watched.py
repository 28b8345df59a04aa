"""What operators' tools read: figures, JSON logs, health, units and the compose file."""

from __future__ import annotations

import configparser
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from modicum.cli import run
from modicum.cli.app import app
from modicum.deploy.silo import watched
from modicum.deploy.silo.spec import read_spec
from modicum.errors import UserError
from modicum.federation.records import RoundRecord
from tests.deploy.silo.helpers import write_silo
from tests.docs import ROOT, parse
from tests.test_containers import STAGES

SAMPLE = re.compile(r'^modicum_[a-z_]+(\{silo="[^"]+"\})? -?[0-9.e+-]+$')
UNITS = sorted((ROOT / "systemd").glob("*.service"))


def samples(text: str) -> dict[str, float]:
    """Checked line by line: help and type before each figure, as Prometheus reads them."""
    found, known = {}, set[str]()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            known.add(line.split()[2])
        elif not line.startswith("# HELP "):
            assert SAMPLE.match(line), line
            assert re.split(r"[ {]", line)[0] in known
            found[line.rpartition(" ")[0]] = float(line.rpartition(" ")[2])
    return found


def test_figures_of_a_server() -> None:
    record = RoundRecord(0, {"a": 1.0}, 1, {}, False, 0.5)
    sizes = {"bytes_up": 10.0, "bytes_down": 20.0}
    parties = {"a": {**sizes, "seconds": 1.5}, "b": sizes}
    last = replace(record, traffic={"seconds": 2.5}, parties=parties)
    found = samples(watched.exposed(watched.of_server("running", [last])))
    assert found["modicum_server_up"] == found["modicum_rounds_total"] == 1
    assert found['modicum_silo_answered{silo="a"}'] == 1
    assert found['modicum_silo_answered{silo="b"}'] == 0
    assert found["modicum_round_seconds"] == 2.5
    assert samples(watched.exposed(watched.of_server("died", [last])))["modicum_server_up"] == 0
    assert samples(watched.exposed(watched.of_server("running", [last], 90.0)))["modicum_round_age_seconds"] == 90


def test_a_node_s_requests_fill_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks its server several times a second, and each request was a line."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    logging.getLogger("httpx").setLevel(logging.INFO)
    watched.log_to_stderr()
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)


def test_a_silo_that_serves_and_one_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`status` and `check` beside `serve`, which holds the folder; its exit code is the health check."""
    path = write_silo(tmp_path)
    assert run(app, ["silo", "status", str(path), "--metrics"]) == 1
    assert samples(capsys.readouterr().out)["modicum_silo_up"] == 0
    command = [sys.executable, "-c", "from modicum.cli import main; main()", "silo", "serve", str(path)]
    env = {**os.environ, watched.LOG_STYLE: "json", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            for line in serving.stdout:
                if line.startswith("listening"):
                    break
            for verb in ("status", "check"):
                assert run(app, ["silo", verb, str(path)]) == 0
                said = capsys.readouterr().out
                assert re.search(rf"(serves|computes,) at {read_spec(path).socket}", said), said
            assert run(app, ["silo", "status", str(path), "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["serving"] is True
        finally:
            serving.terminate()


def test_a_silo_that_computes_is_up(tmp_path: Path) -> None:
    """It answers one request after the other: a long round was an alarm, and a restart by the health check."""
    spec = read_spec(write_silo(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(spec.socket))
        assert not watched.silo_status(spec, seconds=0.2)["serving"]  # the negative control: nobody listens
        listener.listen()
        found = watched.silo_status(spec, seconds=0.2)
    assert (found["serving"], found["busy"]) == (True, True)
    assert samples(watched.exposed(watched.of_silo(found, {})))["modicum_silo_up"] == 1


def test_log_lines_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watched.LOG_STYLE, "json")
    line = logging.LogRecord("modicum.silo", logging.WARNING, "", 1, 'round %d: "ε"', (3,), None)
    found = json.loads(watched.log_format().format(line))
    assert (found["level"], found["logger"], found["text"]) == ("warning", "modicum.silo", 'round 3: "ε"')
    monkeypatch.setenv(watched.LOG_STYLE, "xml")
    with pytest.raises(UserError, match="set it to text or json"):
        watched.log_format()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_what_exists_and_nothing_of_flower_s_own(path: Path) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    service = unit["Service"]
    words = service["ExecStart"].replace("${SUPERLINK}", "a:1").replace("%i", "ward").split()
    assert words[0].endswith("/bin/modicum")
    parse(["modicum", *words[1:]])
    assert {service[name] for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome")} == {"yes"}
    assert service["User"] != "root"
    assert service["UMask"] == "0077"
    if "silo@" in path.name:
        assert service["PrivateNetwork"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_itself_reads_the_units(tmp_path: Path) -> None:
    """Its own opinion, with this environment's program in the place of the installed one."""
    program = Path(sys.executable).parent / "modicum"
    for path in UNITS:
        text = path.read_text().replace("/opt/modicum/bin/modicum", str(program))
        (tmp_path / path.name).write_text(text)
    names = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *names], capture_output=True, text=True, check=False)
    about = [line for line in done.stderr.splitlines() if "modicum-" in line]
    assert about == []
    (tmp_path / UNITS[0].name).write_text("[Service]\nExecStart=modicum\nNoSuchKey=1\n")  # it does see mistakes
    done = subprocess.run(["systemd-analyze", "verify", names[0]], capture_output=True, text=True, check=False)
    assert "NoSuchKey" in done.stderr


def test_the_compose_file_is_the_containers_page() -> None:
    """Targets of the Dockerfile, commands that parse, a silo without a network, and one published port."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {service["build"]["target"] for service in services.values()} == set(STAGES) - {"installed"}
    assert services["silo"]["network_mode"] == "none"
    assert [service.get("ports") for service in services.values()] == [["8000:8000"], None, None]
    parse(services["silo"]["healthcheck"]["test"][1:])
    assert services["node"]["environment"]["SOCKET"].startswith("/run/silo/")
    compile(services["server"]["healthcheck"]["test"][3], "healthcheck", "exec")


def test_the_compose_file_s_health_check_asks_the_gate(tmp_path: Path) -> None:
    """The check itself against a server with the deployment's certificate: 0 only where it answers."""
    import http.server
    import ssl

    from modicum.deploy.flower import keys

    tls = keys.make_tls(tmp_path / "keys")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        code = services["server"]["healthcheck"]["test"][3].replace(":8000", f":{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
        server.shutdown()
    gone = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert gone.returncode != 0
