"""`modicum studio`: bad input is one line, and it says where to look."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.commands import Call

pytestmark = pytest.mark.usefixtures("in_a_folder")


def taken() -> tuple[socket.socket, int]:
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    place.listen()
    return place, int(place.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "cannot look into nowhere"),
        (("file",), "cannot look into file"),
        (("file/below",), "cannot look into file/below"),
        ((".", "--port", "-1"), "a port is a number from 1 to 65535"),
        ((".", "--port", "65536"), "a port is a number from 1 to 65535"),
        ((".", "--port", "http"), "--port"),
        ((".", "--port"), "--port"),
        ((".", "--host", "0.0.0.0"), "--host"),
        ((".", "other"), "other"),
        ((".", "--browser=no"), "--browser"),
        ((), "cannot look into runs"),
    ],
)
def test_bad_input_is_one_line(call: Call, arguments: tuple[str, ...], said: str) -> None:
    Path("file").write_text("")
    code, out, err = call("studio", *arguments, "--no-browser")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_port_that_is_taken_is_one_line(call: Call) -> None:
    place, port = taken()
    with place:
        code, _, err = call("studio", ".", "--port", port, "--no-browser")
    assert (code, err.count("\n")) == (2, 1)
    assert f"port {port} cannot be used" in err


def test_it_listens_on_this_machine_alone_under_a_secret(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    bound: list[tuple[str, int]] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: bound.extend(s.getsockname() for s in sockets))
    code, out, _ = call("studio", ".", "--no-browser")
    ((host, port),) = bound
    assert (code, host) == (0, "127.0.0.1")
    address = out.split()[1]
    assert address.startswith(f"http://127.0.0.1:{port}/")
    assert len(address.rstrip("/").rsplit("/", 1)[1]) >= 43
