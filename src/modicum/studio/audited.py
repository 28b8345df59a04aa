"""What an auditor asks of a run: does the certificate follow from the ledger, and what does it promise to whom?

A run in the studio's folder is copied before it is looked at, because even reading a database may leave files
beside it. What is dropped onto the page is bytes of two files with names of our own: no archive is unpacked and no
name of theirs is used. Verification is the command `modicum verify` in a process of its own, which can be ended.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.privacy.certificate import Certificate, ClientGuarantee
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.files import FILE
from modicum.privacy.plan import Guard
from modicum.studio.catalogue import Catalogue, Found, inside

LARGEST_CERTIFICATE = 64 << 20  # bytes
LARGEST_LEDGER = 1 << 30
PATIENCE = 300.0  # seconds for one verification
MOST_PROBLEMS = 20
LOG = "-wal"  # beside an SQLite file: what is not yet in it


def audit_run(catalogue: Catalogue, id: str) -> dict[str, Any]:
    """A run of the studio's folder, by a copy."""
    found = catalogue.run(id)
    with tempfile.TemporaryDirectory(prefix="modicum-audit-") as place:
        copy = RunFolder(Path(place))
        _copy(found.files.certificate, copy.certificate, catalogue.root)
        _copy_database(found.files.ledger, copy.ledger, catalogue.root)
        return {"name": found.name, **audit(copy)}


def audit(files: RunFolder) -> dict[str, Any]:
    """A folder that holds a certificate, a ledger, or both. Its temporary path is told to no one."""
    try:
        return _audit(files)
    except UserError as error:
        said = str(error).replace(f"{files.path}{os.sep}", "").replace(str(files.path), "the folder")
        raise UserError(said) from None


def _audit(files: RunFolder) -> dict[str, Any]:
    certificate = Certificate.read(files.certificate) if files.certificate.exists() else None
    if certificate is None and not files.ledger.exists():
        raise UserError("there is neither a certificate nor a ledger to check: drop a run folder or its two files")
    checked = _verify(files, alone=certificate is None) if files.ledger.exists() else None
    return {
        "checked": _checked(checked),
        "certificate": None if certificate is None else words(certificate, checked),
    }


def words(certificate: Certificate, checked: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a certificate promises, by kind of promise and by granted ε."""
    second = {one["client"]: one for one in checked["clients"]} if checked else {}
    kinds: dict[str, list[ClientGuarantee]] = {}
    for line in certificate.clients.values():
        key = "none" if line.guard is Guard.NONE else json.dumps(line.spec.to_dict(), sort_keys=True)
        kinds.setdefault(key, []).append(line)
    return {
        "run": certificate.run,
        "head": certificate.head,
        "entries": certificate.entries,
        "noise": str(certificate.noise["sentence"]).removeprefix("SIMULATION: "),
        "simulation": bool(certificate.noise["simulation"]),
        "clients": len(certificate.clients),
        "promises": [_promise(lines, second) for lines in kinds.values()],
        "assumptions": list(certificate.assumptions),
        "account": certificate.account,
        "audit": certificate.audit,
    }


def accounts(catalogue: Catalogue) -> list[dict[str, Any]]:
    """The datasets' accounts in the folder: the lifetime grant, and what each run drew."""
    found = []
    for one in catalogue.accounts():
        try:
            found.append({"name": one.name, **_account(one, catalogue.root)})
        except UserError as error:
            found.append({"name": one.name, "problem": str(error).replace(str(catalogue.root), "…")})
    return found


def _account(found: Found, root: Path) -> dict[str, Any]:
    """By a copy and without the key: to look, not to draw."""
    with tempfile.TemporaryDirectory(prefix="modicum-account-") as place:
        _copy_database(found.folder / FILE, Path(place) / FILE, root)
        with DatasetAccount.open(Path(place), read_only=True) as account:
            return account.overview()


def _copy_database(source: Path, target: Path, root: Path) -> None:
    for suffix in ("", LOG):
        _copy(source.with_name(source.name + suffix), target.with_name(target.name + suffix), root)


def _copy(source: Path, target: Path, root: Path) -> None:
    if inside(source, root):
        shutil.copyfile(source, target, follow_symlinks=False)


def _verify(files: RunFolder, *, alone: bool) -> dict[str, Any]:
    """`modicum verify --json` in a process of its own; what it refuses to look at is one line."""
    path = files.ledger if alone else files.path
    command = [sys.executable, "-P", "-m", "modicum", "verify", str(path), "--json"]  # -P: not what lies here
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"the verification took more than {PATIENCE:.0f} s: use modicum verify") from None
    if ran.returncode not in (0, 1):
        said = ran.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(said[-1].removeprefix("modicum: ") if said else "the verification ended without a word")
    value: dict[str, Any] = json.loads(ran.stdout)
    return value


def _checked(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The verdict without a line for each client."""
    if found is None:
        return None
    wrong = [one for one in found["clients"] if not one["match"]]
    problems = [*found["problems"], *(f"{one['client']}: {text}" for one in wrong for text in one["problems"])]
    return {
        "match": found["match"],
        "certificate": found["certificate"],
        "entries": found["entries"],
        "head": found["head"],
        "simulation": found["simulation"],
        "clients": len(found["clients"]),
        "wrong": len(wrong),
        "problems": problems[:MOST_PROBLEMS],
        "problems_in_all": len(problems),
    }


def _promise(lines: Sequence[ClientGuarantee], second: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    spec, private = lines[0].spec, lines[0].guard is not Guard.NONE
    groups: dict[float, list[ClientGuarantee]] = {}
    for line in sorted(lines, key=lambda one: one.budget):
        groups.setdefault(line.budget, []).append(line)
    return {
        "private": private,
        "unit": str(spec.unit),
        "adjacency": str(spec.adjacency),
        "view": spec.view.to_dict()["kind"],
        "delta": spec.delta,
        "adversary": spec.view.sentence(),
        "sentence": spec.sentence() if private else lines[0].meaning,
        "guards": sorted({str(line.guard) for line in lines}),
        "accountants": sorted({line.accountant for line in lines}),
        "samplers": sorted({str(s.to_dict()["kind"]) for line in lines for s in line.samplers}),
        "clients": len(lines),
        "groups": [_group(budget, members, second) for budget, members in groups.items()],
    }


def _group(
    budget: float, members: Sequence[ClientGuarantee], second: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    again = [second[line.client] for line in members if line.client in second]
    return {
        "budget": _finite(budget),
        "clients": len(members),
        "epsilon": _range([line.epsilon for line in members]),
        "recomputed": _range([one["recomputed"] for one in again]),
        "second": _range([one["second_opinion"] for one in again]),
        "made": sum(line.releases_made for line in members),
        "planned": sum(line.releases_planned or 0 for line in members) or None,
        "some": [line.client for line in members[:3]],
    }


def _range(values: Sequence[float | None]) -> list[float | None] | None:
    """Least and most; null inside stands for ∞, and no list for nothing known."""
    if not values:
        return None
    known = [math.inf if value is None else value for value in values]
    return [_finite(min(known)), _finite(max(known))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
