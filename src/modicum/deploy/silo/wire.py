"""What is said over a silo's local socket: one request, one answer, lengths checked before anything is read.

Light on purpose: the app that runs inside Flower's node process imports this and nothing heavier.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from modicum.errors import UserError

MAGIC = b"MODI"
VERSION = 2
HEADER = struct.Struct("<4sBBQ")  # magic, version, kind or status, length of what follows
STEP = struct.Struct("<QQ")  # round, length of the protocol's request
SMALL = 1 << 20  # bytes: everything but a model fits into this
SIGNATURE = 64  # bytes before an answer's body: the silo's, or zeros where it could not sign
PATH_LIMIT = 100  # bytes of a socket's path: the kernel takes 107


class Kind(IntEnum):
    """What is asked."""

    HELLO = 1  # public facts of this silo
    JOIN = 2  # take part in a run, on the silo's own terms
    ROUND = 3  # one proposal
    FINISH = 4  # the run is over: write the certificate
    KEYS = 5  # the steps of one round of secure aggregation, in order; see docs/secure-aggregation-protocol.md
    SHARES = 6
    MASKED = 7  # with the proposal
    CONSENT = 8
    REVEAL = 9


SECURE = (Kind.KEYS, Kind.SHARES, Kind.MASKED, Kind.CONSENT, Kind.REVEAL)


class Status(IntEnum):
    """How it is answered."""

    DONE = 1
    REFUSED = 2


class Code(StrEnum):
    """Why a silo refuses. A fixed list: none of it depends on private data, and nothing else is ever said."""

    MALFORMED = "malformed"  # bytes that are no request of this version
    TOO_LARGE = "too-large"  # it claims to be longer than any proposal for this model
    NOT_JOINED = "not-joined"  # a proposal before the run was joined
    UNKNOWN_SERVER = "unknown-server"  # not signed by the server that was agreed on
    UNKNOWN_RUN = "unknown-run"
    UNKNOWN_CLIENT = "unknown-client"
    EXPERIMENT_DIFFERS = "experiment-differs"  # method, model or schedule are not those of the silo's own copy
    FACTS_DIFFER = "facts-differ"  # records, budget or noise are not those that the silo stands by
    SPEC_DIFFERS = "spec-differs"  # unit, adjacency or δ
    WEAKER_VIEW = "weaker-view"  # it would rely on somebody whom the silo does not trust
    TOO_MANY_ROUNDS = "too-many-rounds"
    NOISE_TOO_SMALL = "noise-too-small"  # under the silo's calibration or its own floor
    BOUND_OUT_OF_RANGE = "bound-out-of-range"
    BAD_MODEL = "bad-model"  # another shape or precision, or values that are not finite
    CANNOT_TRAIN = "cannot-train"  # this model on this silo's device
    OUT_OF_ORDER = "out-of-order"
    REPLAYED = "replayed"  # sent, acknowledged and no longer kept; an invitation to an earlier folder
    BUDGET = "budget"  # the ledger has nothing left for it
    ACCOUNT_BEHIND = "account-behind"  # its own, or another silo's: an older copy than somebody remembers
    NOT_PLANNED = "not-planned"  # the ledger knows no such release
    OUT_OF_STEP = "out-of-step"  # not what an honest server sends at this point of a secure aggregation
    UNAVAILABLE = "unavailable"  # the silo cannot serve now; nothing was computed


ADVICE = {
    Code.UNKNOWN_SERVER: "its experiment file names another server's key: give all the same file",
    Code.REPLAYED: "it has a new folder since it was invited: begin again in a new folder of the server's",
    Code.UNKNOWN_RUN: "it belongs to another run; a new run needs a new folder, and draws on its account",
    Code.EXPERIMENT_DIFFERS: "give all the same experiment file, and restart the silos to agree to it",
    Code.BUDGET: "its budget, or what its account has left over all runs, is too small for this run",
    Code.ACCOUNT_BEHIND: "an account is older than somebody remembers: the silo's log says whose, and what to do",
    Code.FACTS_DIFFER: "its records, budget or noise are not those of [run.silos]: correct either",
    Code.NOISE_TOO_SMALL: "its calibrated noise is under its own floor, smallest_noise under [grant]",
    Code.TOO_MANY_ROUNDS: "it would take part more often than rounds under its [grant]",
    Code.SPEC_DIFFERS: "unit, adjacency or δ are not those of its [grant]",
    Code.WEAKER_VIEW: "the method's view trusts somebody whom the silo does not trust",
    Code.CANNOT_TRAIN: "its device cannot train the model: `modicum silo check` there says why",
    Code.UNAVAILABLE: "it gave no answer in time",
}
"""What to do about a refusal to join, in one line."""

TRANSIENT = frozenset({Code.UNAVAILABLE})  # worth asking again; everything else is final


@dataclass(frozen=True)
class Answer:
    """A silo's answer: bytes, or a refusal."""

    body: bytes = b""
    refused: Code | None = None
    # Until it came, by the clock of who asked; None where nobody measured. No part of what was answered.
    seconds: float | None = field(default=None, compare=False)
    signature: bytes = field(default=b"", compare=False, repr=False)

    def json(self) -> dict[str, Any]:
        """The body as an object."""
        value: dict[str, Any] = json.loads(self.body)
        return value


class Refuse(Exception):  # noqa: N818 - it reads as what it does: raise Refuse(Code.…)
    """Ends the handling of a request."""

    def __init__(self, code: Code) -> None:
        super().__init__(str(code))
        self.code = code


class UnreachableError(UserError):
    """Nobody answers at the socket, or not in time."""


class BusyError(UnreachableError):
    """Somebody listens there, and answers nothing in time: a silo that computes answers one after the other."""


def ask(
    path: str | Path, kind: Kind, body: bytes = b"", *, timeout: float = 600.0, patience: float = 0.0
) -> Answer:
    """Send one request to a silo and wait for its answer; for `patience` seconds a silent silo is tried again."""
    until = time.monotonic() + patience
    while True:
        try:
            with _connected(path, timeout) as link:
                link.sendall(HEADER.pack(MAGIC, VERSION, kind, len(body)) + body)
                status, length = read_header(link)
                return answer_from(status, read_exactly(link, length))
        except Refuse:
            raise UnreachableError(
                f"silo at {path}: another version answers, or no silo: restart it with the version that asks"
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() >= until:
                if isinstance(error, TimeoutError):
                    raise BusyError(f"silo at {path}: no answer in time: its log says what it computes") from None
                raise UnreachableError(
                    f"silo at {path}: nobody answers: is `modicum silo serve` running?"
                ) from None
            time.sleep(0.2)


def step_body(round: int, request: bytes = b"", proposal: bytes = b"") -> bytes:
    """A step of secure aggregation: the round, what the protocol asks, and the proposal where there is one."""
    return STEP.pack(round, len(request)) + request + proposal


def read_step(body: bytes) -> tuple[int, bytes, bytes]:
    """(round, request, proposal). Raises `Refuse` for anything else."""
    if len(body) < STEP.size:
        raise Refuse(Code.MALFORMED)
    round, length = STEP.unpack_from(body)
    if length > len(body) - STEP.size:
        raise Refuse(Code.MALFORMED)
    return round, body[STEP.size : STEP.size + length], body[STEP.size + length :]


def answer_from(status: int, body: bytes) -> Answer:
    """The answer of a status, and of a signature and a body; an unknown code reads as unavailable."""
    signature, body = body[:SIGNATURE], body[SIGNATURE:]
    if status == Status.DONE:
        return Answer(body, signature=signature)
    try:
        return Answer(refused=Code(body.decode()), signature=signature)
    except ValueError:
        return Answer(refused=Code.UNAVAILABLE)


def read_header(link: socket.socket, until: float | None = None) -> tuple[int, int]:
    """(kind or status, length). Raises `Refuse` for anything that is no header of this version."""
    magic, version, kind, length = HEADER.unpack(read_exactly(link, HEADER.size, until))
    if (magic, version) != (MAGIC, VERSION):
        raise Refuse(Code.MALFORMED)
    return kind, length


def read_exactly(link: socket.socket, length: int, until: float | None = None) -> bytes:
    """`length` bytes, taken as they come: a false claim never makes room for more than was sent.

    `until`, on the monotonic clock, is when all of them must have come; without it the link's own time limit holds
    for each piece, and whoever sends a byte now and then is waited for.
    """
    parts, left = [], length
    while left:
        if until is not None:
            link.settimeout(_left(until))
        part = link.recv(min(left, 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the message did not arrive in time")
    return left


def check_path(path: Path) -> None:
    """Refuse a socket path that the operating system would cut off."""
    if len(str(path).encode()) > PATH_LIMIT:
        raise UserError(f"the socket path {path} is longer than {PATH_LIMIT} bytes: choose a shorter one")


@contextmanager
def _connected(path: str | Path, timeout: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout)
        link.connect(str(path))
        yield link
