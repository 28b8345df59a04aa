"""A hospital's node against a server that means it harm: one that has the deployment's certificate and key."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from modicum.deploy.flower import keys, node
from modicum.deploy.flower.node import ANSWER, Node

OCTETS = b"Content-Type: application/x-protobuf\r\nConnection: close\r\n"


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % size if size >= 0 else b"X: y"]
    return b"\r\n".join(lines) + b"\r\n" + OCTETS + b"\r\n" + body


class Hostile:
    """Answers every request with the same bytes, and counts who comes."""

    def __init__(self, said: bytes, context: ssl.SSLContext | None = None) -> None:
        self.said, self.came, self._context = said, 0, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
                with link if self._context is None else self._context.wrap_socket(link, server_side=True) as safe:
                    safe.settimeout(5)
                    self.came += bool(safe.recv(1 << 16))
                    safe.sendall(self.said)
            except ssl.SSLError:
                continue
            except ConnectionError:
                continue
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


@contextmanager
def hostile(folder: Path, said: bytes) -> Iterator[tuple[Node, list[str]]]:
    """A node whose server answers like this, and what the node's log says."""
    tls = keys.make_tls(folder / "keys")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    server, told = Hostile(said, context), list[str]()
    own = keys.make_node_key(folder / "keys" / "ward")
    try:
        yield Node(f"127.0.0.1:{server.port}", tls.ca, own, folder / "ward.sock", told.append), told
    finally:
        server.close()


def activated(made: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, until the node would wait for its server to come back."""
    monkeypatch.setattr(node.time, "sleep", _enough)
    with pytest.raises(TimeoutError):
        made._activated()


def _enough(_: float) -> None:
    raise TimeoutError


REPLIES = {
    "a bomb": answer(gzip.compress(bytes(64 << 20)), b"Content-Encoding: gzip"),
    "endless": answer(b"x", length=-1),
    "long": answer(b"x", length=ANSWER + 1),
    "no message": answer(b"\xff\xff<html>"),
    "escapes": answer(b'{"code": 1, "message": "\x1b[2J"}', status=b"500 \x1b[2J"),
}


@pytest.mark.parametrize("reply", REPLIES)
def test_what_no_superlink_sends_is_one_line_in_the_log(
    tmp_path: Path, reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hostile(tmp_path, REPLIES[reply]) as (made, told):
        activated(made, monkeypatch)
    assert len(told) == 1
    assert told[0].startswith("waiting for 127.0.0.1")
    assert told[0].isprintable()
    assert len(told[0]) < 300


@pytest.mark.parametrize("status", [b"302 Found", b"307 Temporary Redirect"])
@pytest.mark.parametrize("guarded", [True, False], ids=["node", "negative control"])
def test_a_server_sends_no_node_elsewhere(
    tmp_path: Path, status: bytes, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's client follows it to any address that the hospital's machine reaches, without TLS too."""
    inside = Hostile(answer(b""))
    if not guarded:
        monkeypatch.setattr(node, "_guard", lambda _: None)
    elsewhere = answer(b"", b"Location: http://127.0.0.1:%d/intranet" % inside.port, status=status)
    with hostile(tmp_path, elsewhere) as (made, _):
        if guarded:
            activated(made, monkeypatch)
        else:
            made._activated()
    inside.close()
    assert bool(inside.came) == (not guarded)


def test_negative_control_flower_unpacks_what_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_guard", lambda _: None)
    with hostile(tmp_path, REPLIES["a bomb"]) as (made, _):
        response = made.client._client.post(f"https://{made.server}/")
        assert len(REPLIES["a bomb"]) < 100_000
        assert len(response.content) == 64 << 20
    with hostile(tmp_path, REPLIES["a bomb"]) as (made, _):
        monkeypatch.undo()
        node._guard(made.client._client)
        with pytest.raises(httpx.RemoteProtocolError):
            made.client._client.post(f"https://{made.server}/")


def test_a_message_of_too_many_pieces_is_not_fetched(tmp_path: Path) -> None:
    with hostile(tmp_path, answer(b"")) as (made, told):
        made.pieces = 20
        leaf = SimpleNamespace(children=[])
        made._carry(None, 7, SimpleNamespace(children=[leaf] * 20))
        assert told == ["run 7 sends a message of more than 20 pieces: not fetched (--largest)"]
        with pytest.raises(AttributeError):  # the negative control: one less is looked at
            made._carry(None, 7, SimpleNamespace(children=[leaf] * 19))


@pytest.mark.parametrize(
    "provoked", [IndexError("no tree"), RecursionError(), TypeError("\x1b[2J"), MemoryError()]
)
def test_a_node_outlives_whatever_its_server_provokes(
    tmp_path: Path, provoked: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hostile(tmp_path, REPLIES["no message"]) as (made, told):
        monkeypatch.setattr(made, "_activated", lambda: object())
        monkeypatch.setattr(node.time, "sleep", _enough)

        def carry_on(_: object) -> None:
            raise provoked

        monkeypatch.setattr(made, "_carry_on", carry_on)
        with pytest.raises(TimeoutError):  # it would have waited, and gone on
            made.serve()
    assert told[0].startswith("lost 127.0.0.1")
    assert told[0].isprintable()


def test_after_a_cut_connection_the_node_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute a server takes it for connected still, and would activate no other."""
    lost: list[Exception] = [httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut")]
    refused = httpx.HTTPStatusError(
        "gone", request=httpx.Request("POST", "https://a"), response=httpx.Response(401)
    )
    activated, left = list[object](), list[int]()
    with hostile(tmp_path, answer(b"")) as (made, _):
        made.client = SimpleNamespace(DeactivateNode=lambda asked: left.append(asked.node_id))

        def carry_on(_: object) -> None:
            raise lost.pop(0) if lost else KeyboardInterrupt

        monkeypatch.setattr(
            made, "_activated", lambda: activated.append(SimpleNamespace(node_id=7)) or activated[-1]
        )
        monkeypatch.setattr(made, "_carry_on", carry_on)
        monkeypatch.setattr(node.time, "sleep", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            made.serve()
        assert len(activated) == 1
        lost.append(refused)
        with pytest.raises(KeyboardInterrupt):
            made.serve()
        assert len(activated) == 3  # a server that knows it no more is asked again
    assert left == [7, 7]  # who is stopped takes its leave, and may come back at once


def test_an_error_that_nests_without_end_is_one_line() -> None:
    for text in (b"[" * 100_000, b'{"code": [], "detail": {"a": 1}}', b'{"code": 1, "detail": 7}', b"\xff"):
        response = httpx.Response(500, content=text, request=httpx.Request("POST", "https://a"))
        said = node.why(httpx.HTTPStatusError("x", request=response.request, response=response))
        assert said.startswith("it answers 500")
        assert len(said) < 300


def test_a_bomb_of_names_is_told_by_its_length(tmp_path: Path) -> None:
    """Eight bytes of an answer name four pieces: what is counted is never looked at."""

    class Many(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[object]:
            raise AssertionError("looked at")

    with hostile(tmp_path, answer(b"")) as (made, told):
        made._carry(None, 7, SimpleNamespace(children=Many([None]) * 10_000))
        assert "not fetched" in told[0]
