"""Requests that are not the page's own are refused, each by a check of its own that is known to bite."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modicum.studio import guard
from modicum.studio.guard import CHECKS, Check, Request, RequestGuard
from tests.studio.conftest import NASTY, PORT, TOKEN, Client

HOST = f"127.0.0.1:{PORT}"
OWN = {"host": [HOST]}


def get(*headers: tuple[str, str], path: str = f"/{TOKEN}/", method: str = "GET") -> Request:
    return Request(method, path, {**OWN, **{name: [value] for name, value in headers}})


BAD: list[tuple[str, Request, Check]] = [
    ("no secret", get(path="/api/runs"), guard.only_with_the_secret),
    ("nothing at all", get(path="/"), guard.only_with_the_secret),
    ("a wrong secret", get(path=f"/{TOKEN}x/api/runs"), guard.only_with_the_secret),
    ("a part of it", get(path=f"/{TOKEN[:-1]}/api/runs"), guard.only_with_the_secret),
    ("a secret that is no text", get(path="/\udcff/"), guard.only_with_the_secret),
    ("a rebound name", get(("host", "evil.example:8000")), guard.only_own_name),
    ("another port", get(("host", "127.0.0.1:9")), guard.only_own_name),
    ("no host", Request("GET", f"/{TOKEN}/", {}), guard.only_own_name),
    ("two hosts", Request("GET", f"/{TOKEN}/", {"host": [HOST, HOST]}), guard.only_own_name),
    ("another origin", get(("origin", "http://evil.example"), method="POST"), guard.only_own_origin),
    ("a page without origin", get(("origin", "null"), method="POST"), guard.only_own_origin),
    ("the page of another port", get(("origin", "http://127.0.0.1:9")), guard.only_own_origin),
    ("a link elsewhere", get(("sec-fetch-site", "cross-site")), guard.only_own_site),
    ("a neighbour's page", get(("sec-fetch-site", "same-site")), guard.only_own_site),
    ("a deletion", get(method="DELETE"), guard.only_known_methods),
]


async def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(("asked", "check"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_is_not_the_page_s_own_is_refused_and_only_by_this_check(asked: Request, check: Check) -> None:
    assert RequestGuard(nothing, TOKEN, PORT).refusal(asked) is not None
    mutant = RequestGuard(nothing, TOKEN, PORT, [one for one in CHECKS if one is not check])
    assert mutant.refusal(asked) is None, "another check refuses it as well: this one is not known to bite"


@pytest.mark.parametrize("host", [HOST, f"localhost:{PORT}"])
def test_the_page_s_own_requests_pass(host: str) -> None:
    headers = {"host": [host], "origin": [f"http://{host}"], "sec-fetch-site": ["same-origin"]}
    assert RequestGuard(nothing, TOKEN, PORT).refusal(Request("POST", f"/{TOKEN}/api/plan", headers)) is None


def test_refusals_reach_the_browser_with_all_headers(client: Client) -> None:
    for answer in (client.http.get("/api/runs"), client.get(""), client.http.get(f"/{TOKEN}/nothing.js")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert client.http.get("/api/runs").status_code == 403
    assert client.http.get(f"/{TOKEN}/api/runs", headers={"origin": "http://evil"}).status_code == 403


PATHS = [
    *("api/run?id=../secret", "api/run?id=..%2Fsecret", "api/run?id=/etc", "api/run?id=two/a", "api/run?id="),
    *("api/run", "api/audit?id=../secret", "api/compare?ids=../secret", "api/compare?ids="),
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_anywhere(client: Client, path: str) -> None:
    """Runs are asked for by ids, which are looked up and never joined to a folder."""
    assert set(client.get(path, status=400)) == {"error"}


@pytest.mark.parametrize(
    "path", ["../conftest.py", "..%2fserver.py", "%2e%2e/server.py", "a/../../server.py", "x.js"]
)
def test_files_of_the_page_are_a_fixed_list(client: Client, path: str) -> None:
    assert client.http.get(f"/{TOKEN}/{path}").status_code in (403, 404)


def test_links_out_of_the_folder_are_not_followed(runs: Path, tmp_path: Path) -> None:
    """A linked run, a linked folder of runs, and a run whose files are links."""
    outside = (runs / "two").rename(tmp_path / "outside")
    (runs / "linked").symlink_to(outside / "a", target_is_directory=True)
    (runs / "all").symlink_to(outside, target_is_directory=True)
    (runs / "files").mkdir()
    for name in ("metrics.jsonl", "certificate.json", "ledger.sqlite", "summary.json", "config.toml"):
        (runs / "files" / name).symlink_to(outside / "a" / name)
    assert [row["name"] for row in Client(runs).get("api/runs")["runs"]] == [NASTY]


def test_a_file_that_became_a_link_is_not_read(client: Client, runs: Path, tmp_path: Path) -> None:
    """Found as a run, then its files are swapped for links: neither rounds, settings nor ledger are told."""
    id = client.id("two/a")
    for name in ("metrics.jsonl", "certificate.json", "ledger.sqlite", "summary.json", "config.toml"):
        (runs / "two" / "a" / name).rename(tmp_path / name)
        (runs / "two" / "a" / name).symlink_to(tmp_path / name)
    (runs / "two" / "a" / "geometry.npz").write_bytes(b"")
    client.studio.catalogue._find = lambda: None  # type: ignore[method-assign]
    shown = client.get(f"api/run?id={id}")
    assert (shown["points"], "config" in shown, shown["about"]["method"]) == ([], False, "")
    assert "neither a certificate nor a ledger" in client.get(f"api/audit?id={id}", status=400)["error"]


def test_a_mutant_that_follows_links_is_caught(
    client: Client, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above bites: without the check the rounds of a linked file are told."""
    monkeypatch.setattr("modicum.studio.watching.inside", lambda path, _: path.is_file())
    id = client.id("two/a")
    (runs / "two" / "a" / "metrics.jsonl").rename(tmp_path / "elsewhere")
    (runs / "two" / "a" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    assert len(client.get(f"api/run?id={id}")["points"]) == 3


def test_the_browser_s_arguments_open_the_studio_once() -> None:
    """Other users of the machine see them: whoever comes second with the same address is refused."""
    guarded = RequestGuard(nothing, TOKEN, PORT, once="one-time")
    there = get(path="/one-time")
    assert not guarded._opened_once(get(path="/one-tim"))
    assert not guarded._opened_once(get(("sec-fetch-site", "cross-site"), path="/one-time"))
    assert guarded._opened_once(there)
    assert not guarded._opened_once(there)
    assert guarded.refusal(there) is not None
    assert not RequestGuard(nothing, TOKEN, PORT)._opened_once(get(path="/None"))


def test_it_leads_to_the_secret_address() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def play() -> None:
        headers = [(b"host", HOST.encode())]
        scope = {"type": "http", "method": "GET", "path": "/one-time", "headers": headers}
        await RequestGuard(nothing, TOKEN, PORT, once="one-time")(scope, nothing, send)

    asyncio.run(play())
    assert sent[0]["status"] == 303
    assert (b"location", f"/{TOKEN}/".encode()) in sent[0]["headers"]
    assert (b"cache-control", b"no-store") in sent[0]["headers"]
