"""Who looks on, and what follows from it. Each view owns its rules: nobody else asks which view it is.

`View` is abstract, so that a new view that forgets one of its rules cannot be made at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modicum.errors import UnsoundError, UserError

ALL_MASK = 100  # clients a round up to which each masks against all others; more draw whom they mask against


class Unit(StrEnum):
    """Whose participation is hidden."""

    RECORD = "record"
    PERSON = "person"  # all records of one person at one client, as one (R18)
    CLIENT = "client"

    @property
    def of_client(self) -> bool:
        """Whether it is one of many that a client holds."""
        return self is not Unit.CLIENT

    def covers(self, other: Unit) -> bool:
        """Whether what hides one of these hides one of the others: a client has persons, a person has records."""
        order = (Unit.RECORD, Unit.PERSON, Unit.CLIENT)
        return order.index(self) >= order.index(other)


class Adjacency(StrEnum):
    """How two neighbouring datasets differ in one unit."""

    ZERO_OUT = "zero-out"  # its contribution is replaced by zero; sizes stay public
    ADD_REMOVE = "add-remove"  # it is there or not
    REPLACE_ONE = "replace-one"  # it is replaced by another

    @classmethod
    def named(cls, word: str) -> Adjacency:
        """The one of this name, or an error that lists them."""
        if word not in list(cls):
            raise UserError(f"unknown adjacency {word!r}: choose one of {', '.join(cls)}")
        return cls(word)

    @property
    def moves(self) -> float:
        """By how many times its bound one unit moves an unsampled sum (R6)."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0


class KnownTo(StrEnum):
    """Who learns the outcome of a sampler's coins."""

    CLIENT = "client"  # drawn by the client for itself and never sent
    SERVER = "server"  # drawn by or visible to the server
    EVERYONE = "everyone"


class Shows(StrEnum):
    """The finest thing that the adversary of a view gets to see."""

    MESSAGES = "messages"  # each client's own
    SUM = "sum"  # of a cohort's messages
    MODEL = "model"  # what the server publishes


class Variant(StrEnum):
    """What stands behind secure aggregation, and so what a server is trusted with."""

    IDEAL = "ideal"  # nothing: a protocol is assumed, and simulated
    SIGNED_SURVIVORS = "signed-survivors"  # the protocol, against a server that may lie
    HONEST_BUT_CURIOUS = (
        "honest-but-curious"  # the protocol, with a server that shows all clients the same survivors
    )


class View(ABC):
    """What the adversary sees, hence whose noise counts and whose coins stay hidden."""

    @property
    @abstractmethod
    def shows(self) -> Shows:
        """Who may look at what: a message, a sum, or only the model after it."""

    @property
    @abstractmethod
    def senders_add_noise(self) -> bool:
        """Whether what leaves a client is already noised, and so charged there; else the server does both."""

    @property
    @abstractmethod
    def noise_shares(self) -> int:
        """How many independent noise shares are certain to be in what the adversary sees (R8)."""

    @property
    def senders(self) -> int:
        """How many messages are added up before the adversary looks."""
        return 1

    @property
    def masked(self) -> bool:
        """Whether messages are masked before they are added up, so that their noise can only be of integers."""
        return False

    @property
    @abstractmethod
    def hides(self) -> frozenset[KnownTo]:
        """Whose coins the adversary cannot see, so that they amplify (R4, R5)."""

    @abstractmethod
    def enough(self, answered: int, invited: int) -> bool:
        """Whether what so many of the invited sent may be opened; if not, the round is abandoned unseen (R8)."""

    @property
    @abstractmethod
    def assumption(self) -> str:
        """What must be true outside the ledger in this view, as a sentence; empty where nothing must."""

    @abstractmethod
    def refuse(self, unit: Unit, adjacency: Adjacency) -> None:
        """Raises where this view cannot protect such a unit under such an adjacency."""

    @abstractmethod
    def sentence(self) -> str:
        """The adversary, for people."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Kind and numbers, for journal and certificate."""


@dataclass(frozen=True)
class ServerSeesMessages(View):
    """The adversary sees every message of every client; each sender must add all the noise it relies on."""

    shows = Shows.MESSAGES
    senders_add_noise = True
    noise_shares = 1
    hides = frozenset({KnownTo.CLIENT})
    assumption = ""

    def enough(self, answered: int, invited: int) -> bool:
        return True

    def refuse(self, unit: Unit, adjacency: Adjacency) -> None:
        if (unit, adjacency) == (Unit.CLIENT, Adjacency.ADD_REMOVE):
            raise UnsoundError(
                "add-remove cannot hide a client from a server that sees who sends a message: use zero-out"
            )

    def sentence(self) -> str:
        return "the server and everyone else, who see every message"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "server-sees-messages"}


@dataclass(frozen=True)
class ModelsSeen(ServerSeesMessages):
    """The adversary sees every model that a loop makes on its way, and nothing else of the loop."""

    assumption = (
        "The guarantee covers what the loop's steps wrote into the model. What else the program shows of its "
        "records is not covered: losses and figures that it prints, and what it selects, sets or stops by."
    )

    def sentence(self) -> str:
        return "somebody who sees the models, each of them, and nothing else of the program"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "models-seen"}


@dataclass(frozen=True)
class RepliesSeen(ServerSeesMessages):
    """The adversary sees every reply of a client's own Flower app, and is the server if it likes."""

    assumption = (
        "The guarantee covers what the app's replies carry. Not covered: whether and when a reply comes, and what "
        "the app does besides replying (files, connections). The client runs an app that it has read, not one "
        "that the server hands out."
    )

    def sentence(self) -> str:
        return "the server and everyone else, who see every reply of the app"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "replies-seen"}


@dataclass(frozen=True)
class SecureAggregation(View):
    """The adversary sees only the sum over `participants`, and knows the shares of those that collude (R8).

    Colluding clients and dropouts are counted apart: the noise of either is missing, and both may happen at once.
    """

    participants: int
    colluding: int = 1  # with the server; any participant knows its own share
    dropouts: int = 0  # beyond which a round is abandoned before its sum is seen
    variant: Variant = Variant.IDEAL

    shows = Shows.SUM
    senders_add_noise = True
    hides = frozenset({KnownTo.CLIENT})

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", Variant(self.variant))
        if min(self.colluding, self.dropouts) < 0 or self.noise_shares < 1:
            raise UserError(
                f"secure aggregation needs a client that neither colludes nor drops out, got {self.colluding} and "
                f"{self.dropouts} of {self.participants}: raise the cohort size or lower colluding or dropouts"
            )

    @property
    def noise_shares(self) -> int:
        return self.participants - self.colluding - self.dropouts

    @property
    def senders(self) -> int:
        return self.participants

    @property
    def masked(self) -> bool:
        return self.variant is not Variant.IDEAL

    @property
    def assumption(self) -> str:
        if self.variant is Variant.IDEAL:
            return "Secure aggregation is ideal: only the sum of a round is ever seen, and it is simulated here."
        server = (
            "The server is honest but curious: it shows all clients of a round the same survivors. "
            if self.variant is Variant.HONEST_BUT_CURIOUS
            else ""
        )
        graph = (
            " Who helps the server is settled before the clients of a round draw whom they mask against."
            if self.participants > ALL_MASK
            else ""
        )
        return (
            f"{server}Secure aggregation ({self.variant}, threshold {self.threshold} of {self.participants}): at "
            f"most {self.colluding} clients help the server, clients know each other's signing keys, and what "
            f"they have said stays on their disks.{graph}"
        )

    @property
    def threshold(self) -> int:
        """t: without so many survivors a round has no sum."""
        return self.participants - self.dropouts

    def enough(self, answered: int, invited: int) -> bool:
        """With more dropouts than planned too few shares of noise are in the sum."""
        if invited != self.participants:
            raise UserError(
                f"secure aggregation was planned for {self.participants} clients a round, got {invited}"
            )
        return invited - answered <= self.dropouts

    def refuse(self, unit: Unit, adjacency: Adjacency) -> None:
        # Whatever becomes of one record, its client stays and adds its share of noise.
        allowed = {Adjacency.ZERO_OUT} if unit is Unit.CLIENT else {Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE}
        if adjacency not in allowed:
            raise UnsoundError(
                f"secure aggregation with {adjacency} breaks rule R8 (the victim's own noise share "
                "must stay in the sum): use zero-out"
            )

    def sentence(self) -> str:
        missing = f", with up to {self.dropouts} others missing" if self.dropouts else ""
        how = {
            Variant.IDEAL: "ideal secure aggregation is assumed",
            Variant.SIGNED_SURVIVORS: "by secure aggregation",
            Variant.HONEST_BUT_CURIOUS: "by secure aggregation with an honest-but-curious server",
        }[self.variant]
        return (
            f"the server and up to {self.colluding} of {self.participants} clients together, who see only the "
            f"sum of each round{missing} ({how})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "secure-aggregation",
            "participants": self.participants,
            "colluding": self.colluding,
            "dropouts": self.dropouts,
            **({} if self.variant is Variant.IDEAL else {"variant": str(self.variant)}),
        }


@dataclass(frozen=True)
class TrustedServer(View):
    """The server is trusted with messages; the adversary sees only the models it publishes."""

    shows = Shows.MODEL
    senders_add_noise = False
    noise_shares = 1
    hides = frozenset({KnownTo.CLIENT, KnownTo.SERVER})
    assumption = "The server is trusted with every message and publishes only models."

    def enough(self, answered: int, invited: int) -> bool:
        return True

    def refuse(self, unit: Unit, adjacency: Adjacency) -> None:
        if unit is not Unit.CLIENT:
            raise UnsoundError(
                "a trusted server protects whole clients here: use unit 'client', or the view "
                "server-sees-messages for records"
            )

    def sentence(self) -> str:
        return "everyone who sees the published models, but not the server, which is trusted"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "trusted-server"}


def view_from_dict(d: dict[str, Any]) -> View:
    """The view that `to_dict` wrote down; anything else is refused."""
    match d:
        case {"kind": "server-sees-messages"}:
            return ServerSeesMessages()
        case {"kind": "models-seen"}:
            return ModelsSeen()
        case {"kind": "replies-seen"}:
            return RepliesSeen()
        case {"kind": "secure-aggregation", "participants": int(p), "colluding": int(c), "dropouts": int(gone)}:
            return SecureAggregation(p, c, gone, Variant(d.get("variant", Variant.IDEAL)))
        case {"kind": "trusted-server"}:
            return TrustedServer()
    raise UserError(f"unknown view {d!r}: use server-sees-messages, secure-aggregation or trusted-server")
