"""How fast the studio is with 1,000 runs, and with a run of 10,000 clients: python benchmarks/studio.py

Floor: list and charts are drawn within 2 s of opening the address. Processor time is this process's, the server's
alone: it does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import modicum as mo
from modicum.studio.catalogue import Catalogue
from modicum.studio.server import make_server

RUNS, CLIENTS, ROUNDS, BUDGETS = 1_000, 10_000, 60, (1.0, 3.0, 8.0)
FLOOR = 2.0  # seconds
KEPT = ("summary.json", "config.toml", "metrics.jsonl", "certificate.json", "ledger.sqlite")


def many_runs(root: Path) -> None:
    """One real run, and 999 copies of what it left."""
    data = mo.Federation.from_dataset("digits", clients=20, budgets=BUDGETS, test=0.2, seed=0)
    run = mo.train(data, method="dp-sgd", rounds=15, folder=root / "first")
    for i in range(RUNS - 1):
        copy = root / f"group-{i // 50:02}" / f"run-{i:04}"
        copy.mkdir(parents=True)
        for name in KEPT:
            shutil.copyfile(run.folder / name, copy / name)


def one_large_run(root: Path) -> None:
    """The files of a run that asked 10,000 clients in each of 60 rounds; figures are made up."""
    folder, first = root / "large", root / "first"
    folder.mkdir()
    names = [f"client-{i:05}" for i in range(CLIENTS)]
    line = json.loads((first / "metrics.jsonl").read_text().splitlines()[-1])
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for round in range(ROUNDS):
            bounds = {name: 0.5 + 0.3 * (i % 3) + 0.01 * round + 1e-5 * i for i, name in enumerate(names)}
            refused = dict.fromkeys(names[: 3 * round], "plan-exhausted")
            learnt = {"test_accuracy": 0.8 * (1 - math.exp(-round / 15))}
            told = {"round": round, "bounds": bounds, "refused": refused, "simulated": learnt}
            file.write(json.dumps({**line, **told, "answered": CLIENTS - len(refused) - 100}) + "\n")
    summary = json.loads((first / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "clients": CLIENTS, "rounds": ROUNDS}))
    certificate = json.loads((first / "certificate.json").read_text())
    one = next(iter(certificate["clients"].values()))
    certificate["clients"] = {name: {**one, "budget": BUDGETS[i % 3]} for i, name in enumerate(names)}
    (folder / "certificate.json").write_text(json.dumps(certificate))
    shutil.copyfile(first / "config.toml", folder / "config.toml")


class Opened:
    """A studio that has read nothing yet."""

    def __init__(self, root: Path) -> None:
        self.server, place, self.address = make_server(root, 0)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [place]}, daemon=True)
        self.thread.start()

    def ask(self, path: str) -> tuple[Any, str]:
        """The answer; its seconds by clock and processor, and its bytes."""
        begun, worked = time.perf_counter(), time.process_time()
        with urllib.request.urlopen(f"{self.address}api/{path}") as answer:
            body = answer.read()
        took, worked = time.perf_counter() - begun, time.process_time() - worked
        return json.loads(body), f"{took:.2f} s, {worked:.3f} s of processor time, {len(body) / 1e3:.0f} kB"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def asked(root: Path) -> str:
    """What the server needs by itself, cold and warm; the large run's id."""
    catalogue = Catalogue(root)
    for what, most in ("the first 120 of the list, nothing read before", 120), ("all of it", None):
        worked = time.process_time()
        catalogue.look(most)
        print(f"{what}: {time.process_time() - worked:.3f} s of processor time")
    opened = Opened(root)
    rows = opened.ask("runs")[0]
    for what, path in ("first 120 runs", "runs?first=120"), (f"all {rows['in_all']:,} runs", "runs"):
        print(f"{what}: {opened.ask(path)[1]}")
    id = next(str(row["id"]) for row in rows["runs"] if row["name"] == "large")
    for what in ("first portion", "second portion"):
        run, took = opened.ask(f"run?id={id}")
        print(f"run of {CLIENTS:,} clients, {what} ({len(run['points'])} of {ROUNDS} rounds): {took}")
    opened.close()
    return id


def painted(root: Path, part: str) -> tuple[float, float, float] | None:
    """Seconds until a browser has drawn list and charts, then all rounds; and the server's processor time."""
    try:
        from selenium import webdriver
    except ImportError:
        return None
    program = os.environ.get("MODICUM_CHROMEDRIVER") or shutil.which("chromedriver")
    if program is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ.get("MODICUM_CHROMIUM", "")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    service = webdriver.ChromeService(program)
    opened, driver = Opened(root), webdriver.Chrome(options=options, service=service)
    try:
        worked = time.process_time()
        driver.get(opened.address + part)
        marks = [_marked(driver, name) for name in (("drawn", "whole") if part else ("drawn",))]
        return marks[0], marks[-1], time.process_time() - worked
    finally:
        driver.quit()
        opened.close()


def _marked(driver: Any, name: str) -> float:
    """When the page said that it had come so far, in seconds since it was opened."""
    for _ in range(600):
        found = driver.execute_script(f"return performance.getEntriesByName('{name}')[0]?.startTime")
        if found is not None:
            return float(found) / 1e3
        time.sleep(0.05)
    return math.inf


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        many_runs(root)
        one_large_run(root)
        id = asked(root)
        slow = 0
        for what, part in (
            ("1,000 runs and the newest of them", ""),
            ("the run of 10,000 clients", f"#watch/{id}"),
        ):
            found = painted(root, part)
            if found is None:
                print("no browser here: nothing was painted")
                continue
            drawn, whole, worked = found
            slow += drawn > FLOOR
            server = f"server {worked:.2f} s of processor time"
            print(f"painted, {what}: {drawn:.2f} s, to its end {whole:.2f} s; " + server)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
