"""The server's side of secure aggregation: five exchanges a round, each on disk before the next one is asked for.

It carries what silos say to one another and adds up masked inputs. Killed at any moment, it asks for the same
things again, and silos repeat themselves: a round has one pool of silos and one set of survivors.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from modicum import secure_aggregation as protocol
from modicum.core.store import write_durably
from modicum.deploy.silo.secure import SecureTerms
from modicum.deploy.silo.wire import TRANSIENT, Answer, Kind, step_body
from modicum.privacy.noise.lattice import Integers

LOG = logging.getLogger("modicum.server")
Ask = Callable[[Kind, Mapping[str, bytes]], dict[str, Answer]]
_LENGTH = struct.Struct("<Q")


@dataclass
class SecureSum:
    """What came of a round. Without a total it is void, and `void` says why."""

    total: Integers | None = None
    survivors: tuple[str, ...] = ()
    void: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    impossible: dict[str, str] = field(default_factory=dict)
    masked: dict[str, bytes] = field(default_factory=dict, repr=False)  # as they came, for a transcript


class SecureRound:
    """One round over silos that `ask` reaches. `proposals` travel with the request for masked inputs."""

    def __init__(
        self, terms: SecureTerms, folder: Path, round: int, ask: Ask, proposals: Mapping[str, bytes]
    ) -> None:
        self.round, self.terms, self.names = round, terms.of(round), terms.names(round)
        self.ask, self.proposals, self.kept = ask, proposals, Steps(folder, round)
        self.sum = SecureSum()

    def play(self) -> SecureSum:
        """The sum of those who stayed, or a `VoidError` that says why there is none."""
        try:
            keys = self._keys()
            pool = self._shares(keys)
            masked = self._masked(pool)
            self.sum.survivors = tuple(self.names[i] for i in masked.survivors)
            self.sum.total = self._reveal(masked, self._consents(masked))
        except protocol.VoidError as void:
            self.sum.void = self._named(void)
            LOG.warning("round %d: %s", self.round + 1, self.sum.void)
        return self.sum

    def _named(self, void: protocol.VoidError) -> str:
        if void.client is None:
            return str(void)
        name = self.names[void.client]
        self.sum.impossible[name] = "its secret is not the one that it had committed to"
        return str(void).replace(f"client {void.client}", name)

    def _keys(self) -> protocol.Keys:
        raw = self.kept.read(Kind.KEYS)
        if raw is None:
            answers = self._answers(Kind.KEYS, dict.fromkeys(self.proposals, b""))
            with self._naming(answers):
                keys = protocol.gather_keys(self.terms, self.round, answers.values())
            self._missing(answers, keys.valid, keys.refused)
            self.kept.write(Kind.KEYS, [m.raw for m in keys.messages.values()])
            return keys
        return protocol.gather_keys(self.terms, self.round, raw)

    def _shares(self, keys: protocol.Keys) -> protocol.Pool:
        raw = self.kept.read(Kind.SHARES)
        if raw is None:
            answers = self._answers(Kind.SHARES, dict.fromkeys(self._names(keys.members), keys.request))
            with self._naming(answers):
                pool = protocol.gather_shares(self.terms, keys, answers.values())
            self._missing(answers, pool.valid, pool.refused)
            self.kept.write(Kind.SHARES, answers.values())  # a member's message may come from another's hand
            return pool
        return protocol.gather_shares(self.terms, keys, raw)

    def _masked(self, pool: protocol.Pool) -> protocol.Masked:
        raw = self.kept.read(Kind.MASKED)
        if raw is not None:
            total = np.frombuffer(raw[1], dtype=self.terms.dtype).copy()
            return protocol.masked_sum(self.terms, pool, _members(raw[0]), total)
        requests = {self.names[i]: request for i, request in pool.requests.items()}
        answers = self._answers(Kind.MASKED, requests)
        with self._naming(answers):
            masked = protocol.add_masked(self.terms, pool, answers.values())
        self._missing(answers, masked.survivors, masked.refused)
        self.sum.masked = answers
        self.kept.write(Kind.MASKED, [np.array(masked.survivors, dtype="<u2").tobytes(), masked.total.tobytes()])
        return masked

    def _consents(self, masked: protocol.Masked) -> bytes:
        if self.terms.variant is protocol.Variant.HONEST_BUT_CURIOUS:
            return masked.request
        raw = self.kept.read(Kind.CONSENT)
        if raw is not None:
            return raw[0]
        asked = dict.fromkeys(self._names(masked.survivors), masked.request)
        answers = self._answers(Kind.CONSENT, asked)
        with self._naming(answers):
            request = protocol.gather_consents(self.terms, masked, answers.values())
        self.kept.write(Kind.CONSENT, [request])
        return request

    def _reveal(self, masked: protocol.Masked, request: bytes) -> Integers:
        asked = dict.fromkeys(self._names(masked.survivors), request)
        answers = self._answers(Kind.REVEAL, asked)
        with self._naming(answers):
            return protocol.signed(protocol.open_sum(self.terms, masked, answers.values()))

    def _names(self, members: Iterable[int]) -> list[str]:
        return [self.names[i] for i in members]

    def _answers(self, kind: Kind, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """What those said who did not refuse. A silo that is not asked in this round (it retired) is missing."""
        bodies = {
            name: step_body(self.round, request, self.proposals[name] if kind is Kind.MASKED else b"")
            for name, request in requests.items()
            if name in self.proposals
        }
        answers = self.ask(kind, bodies)
        for name, answer in answers.items():
            if answer.refused is not None and answer.refused not in TRANSIENT:
                self.sum.refused[name] = str(answer.refused)
        return {name: a.body for name, a in answers.items() if a.refused is None}

    @contextmanager
    def _naming(self, answers: Mapping[str, bytes]) -> Iterator[None]:
        """Where too few count, whose answers did not."""
        try:
            yield
        except protocol.VoidError as void:
            if void.members is not None:
                self._missing(answers, void.members, ())
            raise

    def _missing(self, answers: Mapping[str, bytes], valid: Iterable[int], why: Iterable[str]) -> None:
        """Whoever answered and is not among the valid senders sent what no honest silo sends."""
        there = set(self._names(valid))
        for name in answers.keys() - there:
            self.sum.impossible[name] = "it sent something else than this round's message"
            LOG.warning("round %d: %s drops out: %s", self.round + 1, name, "; ".join(why))


def survivors(terms: SecureTerms, folder: Path, round: int) -> tuple[str, ...]:
    """Who is in the sum of a round that was opened before a crash."""
    raw, names = Steps(folder, round).read(Kind.MASKED), terms.names(round)
    return tuple(names[i] for i in _members(raw[0])) if raw else ()


def _members(blob: bytes) -> list[int]:
    found: list[int] = np.frombuffer(blob, dtype="<u2").tolist()
    return found


class Steps:
    """What a server has settled of a round: lists of byte strings, one file for each step."""

    def __init__(self, folder: Path, round: int) -> None:
        self.folder, self.round = folder, round

    def read(self, kind: Kind) -> list[bytes] | None:
        """What was gathered for this step before a crash; None where nothing was."""
        path = self._path(kind)
        return _unpack(path.read_bytes()) if path.exists() else None

    def write(self, kind: Kind, parts: Iterable[bytes]) -> None:
        """On disk when this returns, and before anybody is asked for the next step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._path(kind), b"".join(_LENGTH.pack(len(part)) + part for part in parts))

    def _path(self, kind: Kind) -> Path:
        return self.folder / f"{self.round:06d}-{kind.name.lower()}"


def forget_before(folder: Path, round: int) -> None:
    """Rounds before this one are in the server's durable state."""
    for path in folder.glob("*-*"):
        if int(path.name.partition("-")[0]) < round:
            path.unlink(missing_ok=True)


def _unpack(blob: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(blob):
        (length,) = _LENGTH.unpack_from(blob, start)
        start += _LENGTH.size + length
        parts.append(blob[start - length : start])
    return parts
