"""What the studio tells of runs, and that it leaves no trace in them."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modicum.federation.run_folder import RunFolder
from modicum.privacy.ledger import Ledger
from modicum.privacy.lifetime import Filter, Lifetime
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.spending import Identity
from modicum.privacy.spec import Adjacency, Unit
from modicum.studio import audited, watching
from modicum.studio.catalogue import Catalogue
from modicum.studio.watching import Watching
from tests.studio.conftest import NASTY, TOKEN, Client


def traces(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in a folder: names, times and contents."""
    return {
        str(p.relative_to(folder)): (
            p.stat().st_mtime_ns,
            p.stat().st_mode,
            p.read_bytes() if p.is_file() else b"",
        )
        for p in sorted(folder.rglob("*"))
    }


def test_nothing_that_the_page_asks_for_leaves_a_trace(client: Client, runs: Path) -> None:
    before, id = traces(runs), client.id("two/a")
    client.get(f"api/run?id={id}")
    client.get(f"api/compare?ids={id},{client.id('two/b')}")
    client.get("api/accounts")
    assert client.get(f"api/audit?id={id}")["checked"]["match"]
    assert traces(runs) == before


def test_a_mutant_that_reads_the_ledger_in_place_is_found(runs: Path) -> None:
    """SQLite leaves files beside a ledger even of one who only reads: this is why a copy is looked at."""
    before = traces(runs)
    with Ledger.open(runs / "two" / "a" / "ledger.sqlite", read_only=True):
        assert traces(runs) != before


def test_runs_are_listed_with_what_they_came_to(client: Client) -> None:
    rows = {row["name"]: row for row in client.get("api/runs")["runs"]}
    assert set(rows) == {"two/a", "two/b", NASTY}
    one = rows["two/a"]
    known = {"method": "dp-sgd", "dataset": "digits", "state": "finished", "rounds": 3, "clients": 4}
    assert known.items() <= one.items()
    assert one["epsilon"] == pytest.approx(8.0, rel=0.01)
    assert one["colour"] == rows["two/b"]["colour"] != rows[NASTY]["colour"]


def test_a_run_is_a_point_a_round(client: Client) -> None:
    shown = client.get(f"api/run?id={client.id('two/a')}")
    assert [p["round"] for p in shown["points"]] == [1, 2, 3]
    last = shown["points"][-1]
    assert last["reserved_by_budget"] == {"1": pytest.approx(1.0), "8": pytest.approx(1.0)}
    assert shown["points"][0]["reserved_by_budget"]["1"] == pytest.approx(1 / 3)
    assert (last["asked"], last["answered"], last["absent"], last["retired"]) == (4, 4, 0, 0)
    assert [group["budget"] for group in shown["groups"]] == [1.0, 8.0]
    assert "[method]" in shown["config"]


def test_a_run_is_followed_as_it_grows(runs: Path) -> None:
    """Only new lines are read; half a line waits; a file that was replaced is read again."""
    metrics = runs / "two" / "a" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0])
    catalogue = Catalogue(runs)
    id = next(row["id"] for row in catalogue.look() if row["name"] == "two/a")
    followed = Watching(catalogue)
    assert len(followed.run(id).view.points) == 1
    with open(metrics, "ab") as file:
        file.write(lines[1] + lines[2][:40])
    assert len(followed.run(id).view.points) == 2
    with open(metrics, "ab") as file:
        file.write(lines[2][40:])
    assert [p["round"] for p in followed.shown(id, since=2)["points"]] == [3]
    replacement = metrics.with_name("new")
    replacement.write_bytes(lines[0])
    os.replace(replacement, metrics)
    assert len(followed.run(id).view.points) == 1
    metrics.write_bytes(lines[0] + b'{"round": 1}\n')
    assert "damaged" in followed.shown(id)["problem"]


def test_a_long_run_is_read_in_portions_and_told_whole_at_its_end(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page stands after the first portion; the events bring the rest."""
    monkeypatch.setattr(watching, "PORTION", 1)  # each is one whole line at least
    id = client.id("two/a")
    first = client.get(f"api/run?id={id}")
    assert (len(first["points"]), first["more"]) == (1, True)
    second = client.studio._since(id, 1, None)
    assert second is not None
    assert (second["since"], [p["round"] for p in second["points"]], second["more"]) == (1, [2], True)
    last = client.studio._since(id, 2, "finished", second["more"])
    assert last is not None
    assert (last["since"], [p["round"] for p in last["points"]], last["more"]) == (0, [1, 2, 3], False)
    assert client.studio._since(id, 3, "finished", last["more"]) is None


def test_the_newest_runs_of_a_long_list_come_first(client: Client, runs: Path) -> None:
    """Others are not even read: their summaries may be many."""
    for name in ("summary.json", "metrics.jsonl", "ledger.sqlite"):
        os.utime(runs / "two" / "b" / name, (2e9, 2e9))
    client.studio.catalogue._rows.clear()
    found = client.get("api/runs?first=1")
    assert ([row["name"] for row in found["runs"]], found["in_all"]) == (["two/b"], 3)
    assert len(client.studio.catalogue._rows) == 1
    for nonsense in ("-1", "many", "1e3", "9" * 12):
        assert len(client.get(f"api/runs?first={nonsense}")["runs"]) == 3


def test_who_looks_at_runs_does_not_wait_for_torch() -> None:
    """Nor for the accountants: they are loaded by who plans or audits."""
    asked = "import sys, modicum.studio.server; print({'torch', 'scipy', 'modicum.methods'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_several_pages_may_look_at_one_run(runs: Path) -> None:
    catalogue = Catalogue(runs)
    id = next(row["id"] for row in catalogue.look() if row["name"] == "two/a")
    followed = Watching(catalogue)
    with ThreadPoolExecutor(8) as pool:
        shown = list(pool.map(followed.shown, [id] * 32))
    assert {len(one["points"]) for one in shown} == {3}


def test_who_holds_the_lock_is_running(runs: Path) -> None:
    """Found out without asking for the lock, which could get in a run's way."""
    (runs / "two" / "a" / "summary.json").unlink()
    catalogue = Catalogue(runs)

    def state() -> str:
        return next(str(row["state"]) for row in catalogue.look() if row["name"] == "two/a")

    assert state() == "stopped"
    with RunFolder(runs / "two" / "a").alone():
        assert state() == "running"
    assert state() == "stopped"


def test_seeds_become_one_line_with_a_band(client: Client) -> None:
    ids = [client.id(name) for name in ("two/a", "two/b", NASTY)]
    found = client.get(f"api/compare?ids={','.join(ids)}")
    assert [(line["label"], line["seeds"]) for line in found["lines"]] == [("dp-sgd", 2), ("aqc", 1)]
    for _, mean, least, most in found["lines"][0]["curves"]["accuracy"]:
        assert least <= mean <= most
    assert [line["seeds"] for line in found["table"]] == [2, 1]


def test_what_differs_is_in_the_label(client: Client, runs: Path) -> None:
    config = runs / "two" / "b" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 3", "rounds = 5"))
    ids = [client.id(name) for name in ("two/a", "two/b")]
    labels = [line["label"] for line in client.get(f"api/compare?ids={','.join(ids)}")["lines"]]
    assert labels == ["dp-sgd rounds=3", "dp-sgd rounds=5"]


def drop(client: Client, folder: Path, *names: str, status: int = 200) -> dict[str, object]:
    parts = {name: (folder / name).read_bytes() for name in names}
    sizes = f"certificate={len(parts.get('certificate.json', b''))}&ledger={len(parts.get('ledger.sqlite', b''))}"
    found: dict[str, object] = client.post(f"api/audit?{sizes}", status, content=b"".join(parts.values()))
    return found


BOTH = ("certificate.json", "ledger.sqlite")


@pytest.mark.usefixtures("here")
def test_a_dropped_run_is_verified_and_said_in_words(client: Client, runs: Path) -> None:
    found = drop(client, runs / "two" / "a", *BOTH)
    assert found["checked"]["match"]  # type: ignore[index]
    (promise,) = found["certificate"]["promises"]  # type: ignore[index]
    assert (promise["unit"], promise["adversary"][:10]) == ("record", "the server")
    assert [group["budget"] for group in promise["groups"]] == [1.0, 8.0]
    assert promise["groups"][0]["second"] == pytest.approx(promise["groups"][0]["recomputed"], rel=0.01)


@pytest.mark.usefixtures("here")
def test_a_forged_certificate_does_not_match(client: Client, runs: Path) -> None:
    path = runs / "two" / "a" / "certificate.json"
    value = json.loads(path.read_text())
    for line in value["clients"].values():
        line["epsilon"] = 0.1
    path.write_text(json.dumps(value))
    found = drop(client, runs / "two" / "a", *BOTH)
    assert not found["checked"]["match"]  # type: ignore[index]
    assert "certified ε=0.1" in found["checked"]["problems"][0]  # type: ignore[index]


def test_a_certificate_alone_is_read_and_not_called_checked(client: Client, runs: Path) -> None:
    found = drop(client, runs / "two" / "a", "certificate.json")
    assert found["checked"] is None
    assert found["certificate"]["clients"] == 4  # type: ignore[index]


@pytest.mark.usefixtures("here")
def test_what_is_dropped_is_doubted(client: Client, runs: Path) -> None:
    """Garbage, wrong lengths and what is too large: one line each, and nothing stays behind."""
    whole = (runs / "two" / "a" / "certificate.json").read_bytes()
    for query, body, said in [
        ("certificate=0&ledger=0", b"", "neither a certificate nor a ledger"),
        ("certificate=9&ledger=0", b"{}", "fewer bytes"),
        ("certificate=2&ledger=0", b"{}{}", "more bytes"),
        ("certificate=2&ledger=0", b"{}", "not a certificate"),
        ("certificate=4&ledger=0", b"\xff\xfe\x00\x01", "not text"),
        ("certificate=-4&ledger=0", b"", "no number"),
        ("certificate=1e3&ledger=0", b"", "no number"),
        ("ledger=7", b"garbage", "not a readable ledger"),
        (f"certificate={len(whole)}&ledger=4", whole + b"abcd", "not a readable ledger"),
        (f"certificate={audited.LARGEST_CERTIFICATE + 1}", b"", "larger than 64 MiB"),
    ]:
        answer = client.post(f"api/audit?{query}", 400, content=body)["error"]
        assert said in answer
        assert "\n" not in answer
        assert "/tmp" not in answer


def test_accounts_tell_what_runs_add_up_to(runs: Path) -> None:
    lifetime = Lifetime(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, filter=Filter.GDP, budget=8.0, delta=1e-5)
    DatasetAccount.start(runs / "account-clinic", lifetime, Identity.CONTENTS).close()
    before = traces(runs)
    client = Client(runs)
    client.get("api/runs")
    (found,) = client.get("api/accounts")
    assert traces(runs) == before
    assert found["name"] == "account-clinic"
    assert found["draws"] == []


LINE = {
    "round": 0,
    "bounds": {"a": 1.0},
    "answered": 1,
    "refused": {},
    "abandoned": False,
    "reserved": 0.1,
    "public": {},
    "released": {},
    "simulated": {"test_accuracy": 0.5},
}
SUMMARY = {
    "method": "x",
    "groups": [{"epsilon": {"max": 1.0}, "bound": 1.0}],
    "seed": 0,
    "rounds": 1,
    "simulation": True,
    "accuracy": 0.5,
}
DAMAGED: dict[str, dict[str, str]] = {
    "not a number": {"summary.json": json.dumps(SUMMARY | {"accuracy": math.nan})},
    "infinite": {"summary.json": json.dumps(SUMMARY | {"seed": math.inf})},
    "too large": {"summary.json": json.dumps(SUMMARY | {"groups": [{"epsilon": {"max": 10**400}, "bound": 1}]})},
    "no text": {"summary.json": json.dumps(SUMMARY | {"method": "\ud800"})},
    "no groups": {"summary.json": json.dumps(SUMMARY | {"groups": [5]})},
    "no list": {"summary.json": json.dumps(SUMMARY | {"groups": {"a": 5}})},
    "no silos": {"config.toml": "[run]\nsilos = 5"},
    "no tables": {"config.toml": "run = 5"},
    "no seed": {"config.toml": "[run]\nseed = nan"},
    "deep": {"metrics.jsonl": "[" * 100_000 + "\n"},
    "bounds": {"metrics.jsonl": json.dumps(LINE | {"bounds": {"a": "x"}}) + "\n"},
    "round": {"metrics.jsonl": json.dumps(LINE | {"round": 10**30}) + "\n"},
    "diverged": {"metrics.jsonl": json.dumps(LINE | {"bounds": {"a": math.inf}, "reserved": math.nan}) + "\n"},
    "budget": {"metrics.jsonl": json.dumps(LINE | {"reserved_by_budget": {"x": 1.0}}) + "\n"},
    "certificate": {"certificate.json": '{"clients": {"a": {"budget": 1' + "0" * 400 + "}}}"},
}


@pytest.mark.parametrize("what", [*DAMAGED, "name"])
def test_a_damaged_run_takes_no_other_run_away(what: str, tmp_path: Path) -> None:
    """Whoever can put a folder among the runs could blank the whole list with a number that JSON does not know."""
    bad = tmp_path / ("\udcff" if what == "name" else "bad")
    for folder, files in ((tmp_path / "good", {}), (bad, DAMAGED.get(what, {}))):
        folder.mkdir()
        for name, text in ({"metrics.jsonl": json.dumps(LINE) + "\n"} | files).items():
            (folder / name).write_text(text)
    client = Client(tmp_path)
    rows = client.get("api/runs")["runs"]
    assert len(rows) == 2
    for row in rows:
        assert len(client.get(f"api/run?id={row['id']}")["points"]) <= 1
        shown = client.http.get(f"/{TOKEN}/api/compare?ids={row['id']}")
        assert shown.status_code == 200 or "is damaged" in shown.json()["error"]


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PORTION", 1 << 10)
    monkeypatch.setattr(watching, "LONGEST", 1 << 12)
    (tmp_path / "metrics.jsonl").write_bytes(b" " * (1 << 20))
    client = Client(tmp_path)
    (row,) = client.get("api/runs")["runs"]
    shown = client.get(f"api/run?id={row['id']}")
    assert (shown["points"], shown["more"]) == ([], False)
    assert "longer than any round's" in shown["problem"]


def test_a_look_is_shown_with_its_run_and_no_link_is_followed(client: Client, runs: Path, tmp_path: Path) -> None:
    id, place = client.id("two/a"), runs / "two" / "a" / "look.json"
    assert "look" not in client.get(f"api/run?id={id}")
    place.write_text(json.dumps({"columns": []}))
    assert client.get(f"api/run?id={id}")["look"] == {"columns": []}
    place.unlink()
    (tmp_path / "elsewhere.json").write_text(json.dumps({"columns": ["secret"]}))
    place.symlink_to(tmp_path / "elsewhere.json")
    assert "look" not in client.get(f"api/run?id={id}")
    place.unlink()


def test_a_search_is_shown_without_what_only_its_curator_may_see(client: Client, runs: Path) -> None:
    choice = {
        "simulation": True,
        "settings": [{"method.lr": 1}, {"method.lr": 4}],
        "epsilon": {"a": 2.5, "b": 2.9},
        "winner": {"method.lr": 4},
    }
    (runs / "best").mkdir()
    (runs / "best" / "selection.json").write_text(json.dumps(choice))
    shutil.copytree(runs / "two" / "a", runs / "best-curator" / "trial-0000")
    rows = {row["name"]: row for row in client.get("api/runs")["runs"]}
    assert "best" in rows
    assert not any("curator" in name for name in rows)
    assert (rows["best"]["epsilon"], rows["best"]["clients"], rows["best"]["state"]) == (2.9, 2, "finished")
    shown = client.get(f"api/run?id={rows['best']['id']}")
    assert shown["choice"] == choice
    assert shown["points"] == []
    (runs / "best-curator").rename(runs / "best-split")  # under a name that is nobody's secret they are runs
    assert any("best-split" in row["name"] for row in client.get("api/runs")["runs"])
