"""Certificates for an auditor who has nothing else: each party's certificate with the entries of the ledger that
it follows from, under the party's own signature.

Behind a sum the digests of messages stay at home, and so does the head that follows from them: what is under a
mask holds only its share of noise, and a digest tells whether somebody guessed it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.release_gate import SERVER
from modicum.core.store import write_durably
from modicum.deploy.silo.signing import raw_text, read_raw, verifies
from modicum.errors import UserError, counted
from modicum.federation.transcript import Remember
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Release
from modicum.privacy.exact import parse
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import canonical
from modicum.privacy.ledger.portable import Entries, entries_of, rebuild
from modicum.privacy.verify import CERTIFICATE, LEDGER, Verification, verify
from modicum.privacy.views import Shows

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from modicum.config import Config

SCHEMA = "modicum-attested/1"
FILE = "attested.json"  # in the folder of a silo or server
LARGEST = 256 << 20  # bytes of a file
DEEPEST = 50  # levels of a part: what is nested more deeply may be read and yet not be written
_DOMAIN = b"modicum certificate\x01"
_FIELDS = {"party", "certificate", "digests", "entries", "key", "signature"}


@dataclass(frozen=True)
class Part:
    """What one party stands by."""

    party: str
    certificate: dict[str, Any]
    digests: bool  # whether the entries hold what messages hash to
    entries: Entries
    key: str = ""  # public, as the experiment file has it
    signature: str = ""

    @classmethod
    def of(cls, party: str, ledger: Ledger, certificate: Certificate, key: Ed25519PrivateKey) -> Part:
        """Of a party's own ledger, signed."""
        digests = all(plan.spec.view.shows is not Shows.SUM for plan in ledger.plans.values())
        entries = entries_of(ledger.path, digests=digests)
        if not digests:
            certificate = _without_digests(certificate, entries)
        part = cls(party, json.loads(certificate.to_json()), digests, entries, raw_text(key))
        return replace(part, signature=key.sign(part._message()).hex())

    def signed(self, key: bytes | None = None) -> bool:
        """Whether the owner of a public key signed this; without one, of the key that it names."""
        own = read_raw(self.key)
        if own is None or (key is not None and key != own):
            return False
        try:
            return verifies(own, bytes.fromhex(self.signature), self._message())
        except ValueError:
            return False

    def _message(self) -> bytes:
        said = [self.party, self.certificate, self.digests, self.entries, self.key]
        return _DOMAIN + hashlib.sha256(canonical(said).encode()).digest()

    @classmethod
    def from_dict(cls, value: Any) -> Part:
        """Exactly these fields; anything else is refused."""
        if not isinstance(value, dict) or set(value) != _FIELDS:
            raise UserError(f"a part has the fields {', '.join(sorted(_FIELDS))}")
        texts = (value["party"], value["key"], value["signature"])
        if not all(isinstance(t, str) for t in texts) or not isinstance(value["digests"], bool):
            raise UserError("a part's party, key and signature are texts")
        if not isinstance(value["certificate"], dict) or not isinstance(value["entries"], list):
            raise UserError("a part holds a certificate and entries")
        if _deeper(value, DEEPEST):
            raise UserError("a part is nested without end")
        return cls(**value)

    def verified(self) -> Verification:
        """Every figure recomputed from the entries, as `modicum verify` does with a ledger."""
        certificate = Certificate.from_json(json.dumps(self.certificate, ensure_ascii=False))
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            rebuild(self.entries, folder / LEDGER)
            certificate.write(folder / CERTIFICATE)
            found = verify(folder)
        name = f"{self.party}, {SCHEMA}"
        problems = tuple(p.replace(str(folder / LEDGER), name) for p in found.problems)
        return replace(found, ledger=name, problems=problems)

    def settled(self) -> Iterator[tuple[int, str]]:
        """(round, SHA-256) of each message that the party settled."""
        rounds: dict[int, int] = {}
        for number, (kind, _, refers, body) in enumerate(self.entries, start=1):
            if kind == "reserve":
                rounds[number] = Release.from_dict(json.loads(body)).round
            elif kind == "settle":
                yield rounds[refers], str(json.loads(body)["digest"])


def _without_digests(certificate: Certificate, entries: Entries) -> Certificate:
    """The same over the chain of these entries alone."""
    with tempfile.TemporaryDirectory() as place:
        rebuild(entries, Path(place) / LEDGER)
        with Ledger.open(Path(place) / LEDGER, read_only=True) as ledger:
            return replace(certificate, head=ledger.head(), entries=len(ledger))


def _deeper(value: Any, most: int) -> bool:
    level = [value]
    while level and most >= 0:
        inside = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level, most = [one for many in inside for one in many], most - 1
    return bool(level)


def write_attested(path: Path, parts: Iterable[Part]) -> None:
    """Replaces the file in one step; a party is in it once."""
    found = {part.party: part for part in parts}
    value = {"schema": SCHEMA, "parts": [vars(found[name]) for name in sorted(found)]}
    write_durably(path, (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_attested(path: Path) -> list[Part]:
    """The parts of a file, or of a folder's own.

    Raises:
        UserError: There is none, or it is not exactly what this version writes.
    """
    file = path / FILE if path.is_dir() else path
    try:
        if file.stat().st_size > LARGEST:
            raise UserError(f"{file} is larger than {LARGEST >> 20} MiB")
        value = parse(file.read_text(encoding="utf-8"))
        if set(value) != {"schema", "parts"} or value["schema"] != SCHEMA:
            raise UserError(f"this version reads {SCHEMA!r}")
        parts = [Part.from_dict(part) for part in value["parts"]]
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror}): a finished run writes it") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: no attested certificates: {error}") from None
    if not parts or len({part.party for part in parts}) != len(parts):
        raise UserError(f"{file}: no attested certificates: a party is in it once")
    return parts


@dataclass(frozen=True)
class Attested:
    """The outcome for a file. `problems` are those between parties."""

    parts: Mapping[str, tuple[Part, Verification]]
    problems: tuple[str, ...]
    claimed: tuple[str, ...]
    messages: int | None = None  # of the transcript, found among those that silos settled

    @property
    def matches(self) -> bool:
        """Whether nothing is wrong, with any party or between them."""
        return not self.problems and all(found.matches for _, found in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "match": self.matches,
            "problems": list(self.problems),
            "claimed": list(self.claimed),
            "messages": self.messages,
            "parts": {n: {"key": part.key, **found.to_dict()} for n, (part, found) in self.parts.items()},
        }


def check_attested(
    parts: list[Part], config: Config | None = None, transcript: Remember | None = None
) -> Attested:
    """Every signature and figure, and whether the parties say the same.

    Args:
        parts: Of one run.
        config: The agreed experiment, whose keys the parties have to have signed with.
        transcript: The server's, whose messages have to be those that silos settled.
    """
    problems = [
        f"{part.party}: the signature is not that of the key that it names" for part in parts if not part.signed()
    ]
    checked = {part.party: (part, _verified(part)) for part in parts}
    claimed = []
    if config is None:
        claimed.append("that these keys are those of server and silos: compare them, or give --experiment")
        claimed += _absent(checked)
    else:
        problems += _as_agreed(checked, config)
    problems += _alike(checked)
    messages = None
    if transcript is not None:
        messages, odd, unchecked = _compared(transcript, checked)
        problems += odd
        claimed += unchecked
    return Attested(checked, tuple(problems), tuple(claimed), messages)


def _verified(part: Part) -> Verification:
    try:
        return part.verified()
    except UserError as error:
        return Verification(ledger=f"{part.party}, {SCHEMA}", certificate=True, problems=(str(error),))


Checked = Mapping[str, tuple[Part, Verification]]


def _as_agreed(checked: Checked, config: Config) -> Iterator[str]:
    """The experiment's parties, all of them, with their keys and no more than the ε that each had granted."""
    agreed = {name: silo.key for name, silo in config.run.silos.items()} | {SERVER: config.run.server}
    for party, (part, found) in checked.items():
        if party not in agreed:
            yield f"{party} is no party of the experiment"
        elif not part.signed(read_raw(agreed[party]) or b""):
            yield f"{party}: not signed with its key in the experiment file"
        for client in found.clients:
            silo = config.run.silos.get(client.client)
            if silo is not None and client.recomputed > silo.budget * (1 + 1e-6):
                yield f"{party}: ε = {client.recomputed:.4g} for {client.client}, and {silo.budget:g} was agreed"
    for party in sorted(agreed.keys() - checked.keys()):
        yield f"{party} is a party of the experiment, and its certificate is missing"


def _absent(checked: Checked) -> Iterator[str]:
    """Parties that took part, by what the others say, and whose own certificates are not there."""
    if SERVER not in checked:
        yield "what the server asked of whom, and who else took part: its certificate is not in the file"
        return
    for client in checked[SERVER][1].clients:
        if client.client not in checked:
            yield f"what {client.client} charged: its own certificate is not in the file, only the server's"


def _alike(checked: Checked) -> Iterator[str]:
    """One run, a key for each; each silo speaks for itself alone, and the server's figures for it are its own."""
    keys = [part.key for part, _ in checked.values()]
    for party, (part, _) in checked.items():
        if keys.count(part.key) > 1:
            yield f"{party}: another party signed with the same key"
    runs = {found.run for _, found in checked.values()}
    if len(runs) > 1:
        yield f"the parts are of several runs: {', '.join(sorted(runs))}"
    asked = {c.client: c for c in checked[SERVER][1].clients} if SERVER in checked else None
    for party, (_, found) in checked.items():
        if party == SERVER:
            continue
        if [c.client for c in found.clients] != [party]:
            yield f"{party}: its certificate speaks of others than itself"
        for own in found.clients:
            other = None if asked is None else asked.get(own.client)
            if asked is not None and (
                other is None or (other.spec, other.recomputed) != (own.spec, own.recomputed)
            ):
                yield f"{party}: the server's certificate states another guarantee for it"


def _compared(transcript: Remember, checked: Checked) -> tuple[int, list[str], list[str]]:
    """Messages found, and what is wrong or cannot be known."""
    found, problems, claimed = 0, [], []
    received = transcript.of("message", party=SERVER)
    for sender in sorted({seen.sender for seen in received}):
        part, sound = (checked[sender][0], checked[sender][1].matches) if sender in checked else (None, False)
        mine = [seen for seen in received if seen.sender == sender]
        if part is None or not part.digests or not sound:
            claimed.append(
                f"{len(mine)} messages of {sender} in the transcript: no digests of it that hold are here"
            )
            continue
        settled = set(part.settled())
        left = set(settled)
        for seen in mine:
            this = seen.round, hashlib.sha256(seen.content).hexdigest()
            left.discard(this)
            if this in settled:
                found += 1
            else:
                problems.append(
                    f"round {seen.round + 1}: the transcript's message of {sender} is not what it settled"
                )
        if left:
            claimed.append(f"that {counted(len(left), 'message')} which {sender} settled never came: not there")
    rest = len(transcript.seen) - len(received)
    if rest:
        claimed.append(f"{rest} other lines of the transcript (what the server sent, opened and was refused)")
    return found, problems, claimed
