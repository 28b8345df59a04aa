"""Runs followed as they go on: what was read of a file is not read again, and only what is new is sent."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.federation.records import parse_records
from modicum.report.view import RunView
from modicum.studio.catalogue import Catalogue, Found, beginning, inside, read_json, read_toml, table
from modicum.studio.silo_row import INVITATION, charged

KEPT = 24  # runs whose points stay in memory
PORTION = 1 << 21  # bytes of rounds that are read at a time: a page stands before a long run is read to its end
CONFIG = 1 << 16  # bytes of a settings file that are shown
LONGEST = 1 << 26  # bytes of a line, and of a certificate


@dataclass
class Followed:
    """One run, read as far as its file goes."""

    found: Found
    root: Path
    view: RunView = field(default_factory=RunView)
    problem: str = ""
    more: bool = False  # whether rounds are there that were not read yet
    _offset: int = 0
    _file: tuple[int, int] | None = None  # device and inode: a resumed run replaces the file
    _certified: bool = False

    def read(self) -> None:
        """Take in a portion of the rounds that were not read yet. Nothing in the folder is touched."""
        path, certified = self.found.files.metrics, self.found.files.certificate.exists()
        if not inside(path, self.root):
            return
        with open(path, "rb") as file:
            now = os.fstat(file.fileno())
            same = self._file == (now.st_dev, now.st_ino) and now.st_size >= self._offset
            if not same or certified != self._certified:
                self._begin((now.st_dev, now.st_ino), certified)
            file.seek(self._offset)
            whole, newline, _ = (file.read(PORTION) + file.readline(LONGEST)).rpartition(b"\n")
            self.more = file.tell() < now.st_size
        try:
            if self.more and not newline:
                raise UserError(f"{path.name} has a line that is longer than any round's")
            self.view.take(parse_records(whole, path))
            self._offset += len(whole + newline)
            self.problem = ""
        except UserError as error:
            self.problem, self.more = str(error), False

    def _begin(self, file: tuple[int, int], certified: bool) -> None:
        self._offset, self._file, self._certified = 0, file, certified
        self.view = RunView(budgets_of(self.found, self.root))

    def to_dict(self, row: dict[str, Any], since: int = 0) -> dict[str, Any]:
        """The run for the page; points from number `since` on."""
        shown = self.view.to_dict()
        shown["points"] = shown["points"][since:]
        summary = read_json(self.found.files.summary) if inside(self.found.files.summary, self.root) else {}
        groups = _groups(summary) or _granted(self.view)
        return {
            "about": row | {"clipped": None if not summary else any(g.get("bound") for g in groups)},
            "groups": groups,
            "since": since,
            "problem": self.problem,
            "more": self.more,
            **shown,
        }


class Watching:
    """The runs that somebody looks at, the latest few of them in memory."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.lock = threading.RLock()  # several pages may look at one run
        self._followed: OrderedDict[str, Followed] = OrderedDict()

    def run(self, id: str) -> Followed:
        """The run with this id, as it stands now. Hold the lock for as long as its view is looked at."""
        found = self.catalogue.run(id)
        one = self._followed.pop(id, None) or Followed(found, self.catalogue.root)
        self._followed[id] = one
        while len(self._followed) > KEPT:
            self._followed.popitem(last=False)
        one.read()
        return one

    def shown(self, id: str, since: int = 0) -> dict[str, Any]:
        """The run for the page, with its settings where all of it is asked for."""
        with self.lock:
            one = self.run(id)
            value = one.to_dict(self.catalogue.row(one.found), since)
        files, invitation = one.found.files, one.found.folder / INVITATION
        if inside(invitation, self.catalogue.root) and inside(files.ledger, self.catalogue.root):
            value["silo"] = charged(files.ledger)
        config = files.config
        if since == 0 and inside(config, self.catalogue.root):
            value["config"] = beginning(config, CONFIG).decode(errors="replace")
        for name, path in (("look", files.look), ("choice", files.selection)):
            if since == 0 and inside(path, self.catalogue.root):
                value[name] = read_json(path)
        return value


def budgets_of(found: Found, root: Path) -> dict[str, float]:
    """Clients' granted ε by name: from the certificate, or of a deployed run from what was agreed on."""
    if inside(found.files.certificate, root):
        return _budgets(found.files.certificate)
    silos = table(table(read_toml(found.files.config), "run"), "silos")
    try:
        return {str(name): float(terms["budget"]) for name, terms in silos.items()}
    except (KeyError, TypeError, ValueError, OverflowError):
        return {}


def _budgets(path: Path) -> dict[str, float]:
    """Read for a picture alone, and so without the checks of `Certificate.read`."""
    try:
        clients = json.loads(beginning(path, LONGEST))["clients"]
        return {name: math.inf if c["budget"] is None else float(c["budget"]) for name, c in clients.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _groups(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = summary.get("groups")
    return [group for group in found if isinstance(group, dict)] if isinstance(found, list) else []


def _granted(view: RunView) -> list[dict[str, Any]]:
    """Budget groups of a run without a summary, as far as its rounds tell them."""
    last = view.points[-1]["reserved_by_budget"] if view.points else {}
    found = []
    for budget in last:
        with suppress(ValueError):  # somebody else wrote it
            found.append({"budget": float(budget)})
    return found
