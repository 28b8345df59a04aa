"""Every field of a certificate changed in turn: what `verify` believes says what the ledger says.

The certificate holds all that a ledger can: plans, a stock of kinds (R11), filters, no guard, integers behind
secure aggregation (R12), terms that clients share, and an audit.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from run_folder import CHARGES, PLAIN, PLANS, RECORD, one
from tests.privacy.test_integer_accounting import plan as masked

from modicum.errors import UserError
from modicum.privacy import certificate as certificate_module
from modicum.privacy import second_opinion
from modicum.privacy import verify as verify_module
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Origin
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.verify import verify

STOCK = PrivacyPlan(
    client="stock",
    spec=RECORD,
    budget=9.0,
    releases=tuple(PlannedRelease("gradient", z, PLAIN, n) for z, n in ((1.4, 2), (2.0, 3), (2.8, 3))),
)
ALSO = [STOCK, replace(STOCK, client="mutant", budget=12.0), masked(client="masked")]
AUDIT = {
    "method": "one-run",
    "unit": "record",
    "canaries": 100,
    "beta": 0.05,
    "delta": 1e-5,
    "epsilon_lower": 0.3,
    "claimed": 2.0,  # of the client "gdp"
    "most_provable": 3.0,
    "estimate": False,
    "note": "60 of 100 guesses right among all canaries.",
    "broken": False,
}


def make(folder: Path, noise: NoiseSource) -> Path:
    folder.mkdir()
    with Ledger.create(folder / "ledger.sqlite", "run-7", noise) as ledger:
        ledger.declare([*PLANS, *ALSO])
        kinds = [
            replace(one("stock", RECORD, z, PLAIN, r), noise_origin=Origin.PLANNED)
            for r, z in ((0, 2.0), (1, 1.4))
        ]
        for token in ledger.reserve([*CHARGES, *kinds]):
            ledger.settle(token, b"message")
        replace(Certificate.from_ledger(ledger), audit=AUDIT).write(folder / "certificate.json")
    return folder


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second opinion agrees with everything: it must not be what stops a forger here."""
    monkeypatch.setattr(second_opinion, "library", lambda: None)
    monkeypatch.setattr(second_opinion, "plan_epsilon", lambda plan, _: plan_guarantee(plan).epsilon)
    monkeypatch.setattr(second_opinion, "filter_epsilon", lambda *_: 0.0)


@pytest.fixture
def run(tmp_path: Path, agreeing: None) -> Path:  # noqa: ARG001
    return make(tmp_path / "run", SimulatedNoise(3))


# A forger writes text: numbers that JSON has no name for, and fields twice.

Where = tuple[str | int, ...]
BARE = "@@"  # what follows is written without quotes


def fields(value: Any, at: Where = ()) -> Iterator[tuple[Where, Any]]:
    if at:
        yield at, value
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in below:
        yield from fields(inner, (*at, name))


def others(value: Any) -> list[Any]:
    """What may be said instead."""
    bare = [BARE + word for word in ("1e999", "-1e999", "NaN", "Infinity")]
    match value:
        case bool():
            return [not value, int(value), int(not value), None]
        case int() if abs(value) > 10**300:  # changed once already
            return [0, None, *bare]
        case int() | float():
            near = [value * (1 - 1e-7), value * 0.5, value * 2, value + 1, value - 1]
            return [*near, 0, -1, -0.0, 1e308, 10**400, True, None, str(value), *bare]
        case str():
            confused = [value.replace("e", "\u0435"), value.replace("o", "\u03bf"), f"{value}\u200b"]
            return [*confused, f"{value} ", value.upper(), "", None, "cryptographic", f"\x1b[2K{value}", bare[0]]
        case None:
            return [0, 1, "none", False, {}, []]
        case list():
            return [[], value + value, value[::-1], value[:-1], [*value, None], None]
    return [{}, {**value, "also": 1}, None, []]


def written(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    for word in ("1e999", "-1e999", "NaN", "Infinity"):
        text = text.replace(f'"{BARE}{word}"', word)
    return text


def changed(value: dict[str, Any], at: Where, new: Any = None, *, drop: bool = False) -> dict[str, Any]:
    whole = copy.deepcopy(value)
    inner: Any = whole
    for name in at[:-1]:
        inner = inner[name]
    if drop:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return whole


def twice(value: dict[str, Any], at: Where, first: str, second: str) -> str:
    name, here = json.dumps(at[-1], ensure_ascii=False), f"{BARE}here"
    return written(changed(value, at, here)).replace(f'{name}: "{here}"', f"{name}: {first}, {name}: {second}")


def exchanged(value: dict[str, Any], first: str, second: str, name: str) -> str:
    clients = value["clients"]
    mixed = changed(value, ("clients", first, name), clients[second][name])
    return written(changed(mixed, ("clients", second, name), clients[first][name]))


def forgeries(value: dict[str, Any]) -> Iterator[Callable[[], str]]:
    """Every field said otherwise, left out, said twice; clients' figures and lines exchanged, clients invented."""
    for at, now in fields(value):
        yield from (lambda at=at, new=new: written(changed(value, at, new)) for new in others(now))
        yield lambda at=at: written(changed(value, at, drop=True))
        for other in ("0.1", "null", "true", '"x"') if isinstance(at[-1], str) else ():
            for pair in ((other, written(now)), (written(now), other)):
                yield lambda at=at, pair=pair: twice(value, at, *pair)
    clients = value["clients"]
    for a, b in permutations(clients, 2):
        yield from (
            lambda a=a, b=b, name=name: exchanged(value, a, b, name) for name in clients[a] if name in clients[b]
        )
        yield lambda a=a, b=b: written({**value, "clients": {**clients, a: clients[b], b: clients[a]}})
        yield lambda a=a, b=b: written({**value, "clients": {**clients, f"{a}\u200b": clients[b]}})


def sides(certificate: Certificate) -> Certificate:
    """Without what nothing recomputes (what an audit measured), and with ε as far as it is compared."""
    lines = {
        name: replace(line, epsilon=float(f"{line.epsilon:.7g}")) for name, line in certificate.clients.items()
    }
    return replace(certificate, clients=lines, audit=None)


def won(folder: Path, texts: Iterable[str]) -> list[str]:
    """Forgeries that are believed and say something else than the honest certificate."""
    path = folder / "certificate.json"
    honest, kept = Certificate.read(path), path.read_text()
    assert verify(folder).matches
    found = []
    for text in texts:
        path.write_text(text)
        try:
            if verify(folder).matches and sides(Certificate.read(path)) != sides(honest):
                found.append(text)
        except UserError:
            continue
    path.write_text(kept)
    return found


def some(folder: Path, count: int) -> list[str]:
    every = list(forgeries(json.loads((folder / "certificate.json").read_text())))
    assert len(every) > 3000
    return [forge() for forge in random.Random(0).sample(every, min(count, len(every)))]


def test_no_changed_field_wins_anything(run: Path) -> None:
    assert won(run, some(run, 300)) == []


@pytest.mark.soak
def test_no_changed_field_wins_anything_in_full(run: Path) -> None:
    """All of them, and pairs."""
    assert won(run, some(run, 10**6)) == []
    rng = random.Random(1)
    honest = json.loads((run / "certificate.json").read_text())
    pairs = []
    for _ in range(10_000):
        at, now = rng.choice(list(fields(honest)))
        once = changed(honest, at, rng.choice(others(now)))
        at, now = rng.choice(list(fields(once)))
        pairs.append(written(changed(once, at, rng.choice(others(now)))))
    assert won(run, pairs) == []


def test_a_reader_that_takes_what_it_knows_is_caught(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: fields that are unknown or there twice are overlooked, and words are not compared."""
    monkeypatch.setattr(certificate_module, "parse", json.loads)
    monkeypatch.setattr(certificate_module, "unlike", lambda *_: None)
    monkeypatch.setattr(verify_module, "_differences", lambda *_: [])
    assert len(won(run, some(run, 100))) > 3


@pytest.mark.parametrize("account", [{}, {"kept": True}, {"kept": True, "id": "\u001b[2K"}], ids=str)
def test_a_forged_section_on_an_account_is_a_problem_and_no_crash(run: Path, account: dict[str, Any]) -> None:
    path = run / "certificate.json"
    replace(Certificate.read(path), account=account).write(path)
    checked = verify(run)
    assert any("section on the account" in problem for problem in checked.problems)
    assert not any("was drawn on" in said for said in checked.claimed)


# The section on an audit.

WRONG = [
    {"claimed": 8.0},
    {"claimed": 1.0 - 1e-6},
    {"claimed": None, "unit": "client"},
    {"unit": "person"},
    {"delta": 1e-6},
    {"broken": True},
    {"epsilon_lower": 2.5},  # above the claim, and "broken" is still false
    {"epsilon_lower": -1.0},
    {"canaries": 0},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_an_audit_speaks_of_this_run_and_keeps_to_its_own_figures(run: Path, change: dict[str, Any]) -> None:
    path = run / "certificate.json"
    assert verify(run).matches
    replace(Certificate.read(path), audit={**AUDIT, **change}).write(path)
    assert ["audit" in problem for problem in verify(run).problems] == [True]


@pytest.mark.parametrize(
    ("now", "new"),
    [
        ('"epsilon_lower": 0.3', '"epsilon_lower": 1e999'),
        ('"most_provable": 3.0', '"most_provable": 1e999'),
        ('"one-run"', '"\\u001b[2Kone-run"'),
        ('"note": "60', '"note": "\\n60'),
    ],
)
def test_no_audit_says_such_things(run: Path, now: str, new: str) -> None:
    path = run / "certificate.json"
    assert now in path.read_text()
    path.write_text(path.read_text().replace(now, new))
    with pytest.raises(UserError, match="nothing that an audit says"):
        verify(run)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon_lower": 2.5, "broken": True},  # a leak is proved, and said
        {"epsilon_lower": 2.5, "estimate": True},
        {"claimed": None},  # of the client without a guard
        {"claimed": 7.7, "unit": "client"},  # of further clients, whose noise is calibrated anew
    ],
    ids=str,
)
def test_an_honest_audit_is_as_it_should_be(run: Path, change: dict[str, Any]) -> None:
    path = run / "certificate.json"
    replace(Certificate.read(path), audit={**AUDIT, **change}).write(path)
    assert verify(run).matches


@pytest.mark.usefixtures("agreeing")
def test_an_audit_beside_real_noise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained once more on the records, and nothing charged it. The mutant looks at the figures alone."""
    real = make(tmp_path / "real", CryptoNoise())
    problem = "it carries an audit, and noise was real: an audit is a release that no budget paid for"
    assert verify(real).problems == (problem,)
    monkeypatch.setattr(verify_module, "_audit_problems", lambda *_: [])
    assert verify(real).matches
