"""The client's side: what an app computes from its records leaves as one clipped, noised update, or not at all.

The client adds all of its noise itself (`RepliesSeen`), so whatever the server does with replies is
post-processing. Each reply is one Gaussian release at full sensitivity: nothing amplifies (R5), the bound is fixed
(R1), and k of them cost what μ = √k / z costs. The plan is one for a folder, over all runs that anybody starts.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from modicum.core.facts import ClientFacts
from modicum.core.messages import Decision
from modicum.core.parts import Asked
from modicum.core.release_gate import ReservedGate
from modicum.errors import UserError, counted
from modicum.federation.run_folder import RunFolder
from modicum.loops.flower.question import EPSILON, PLANNED, RESERVED, SPENT, NotAnswered, Question, refused
from modicum.mechanisms.client_level import UPDATE, ClientLevel, clip_updates
from modicum.mechanisms.integers import on_lattice
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.checks import positive, whole
from modicum.privacy.ledger.budgets import Refused
from modicum.privacy.noise import CryptoNoise, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import Adjacency, RepliesSeen

LOG = logging.getLogger("modicum.loops")
FOREIGN = ("the client's own Flower app",)
DIGEST = 16
MOST = 30
"""The largest ε here: integer noise for much larger ones is too coarse to be certified."""
Next = Callable[[Message, Context], Message]


@dataclass(frozen=True, kw_only=True)
class ClientPrivacy:
    """A Flower mod that makes an app private for the client that runs it. `private_app` puts it round a whole app.

    Args:
        epsilon: What all replies together may cost, whoever asks for them.
        delta: Of that ε.
        participations: Replies at most, over all runs of the folder (R5).
        clip: The bound on a reply's update, over all arrays together.
        folder: For ledger and certificate. Keep it: it is what remembers what was spent.
        adjacency: zero-out or replace-one.
        weight: The key under which the strategy looks for a weight; it finds 1.
        seed: Simulates: noise from this seed, so that the certificate protects nobody. None: real noise.

    A node's own configuration has the last word on `privacy-epsilon` and `privacy-folder`; what the server
    configures has none.
    """

    epsilon: float
    delta: float = 1e-5
    participations: int
    clip: float = 1.0
    folder: str | PathLike[str] = "privacy"
    adjacency: str = "zero-out"
    weight: str = "num-examples"
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("participations", self.participations)
        if not isinstance(self.weight, str) or self.weight in (PLANNED, RESERVED, EPSILON):
            raise UserError(f"{self.weight!r} is taken, or no text: choose another key for weights")
        positive("clip", self.clip)
        _noise(self.seed)
        self._mechanism.plan(self._facts("client", self.epsilon), ())  # refuses what cannot be, before any message

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Answer a message with what may leave, or with why nothing does."""
        own = dict(context.node_config)  # the node's last word, which no app changes for later messages
        try:
            question = Question.of(copy.deepcopy(message))  # the app may write into what it is given
            with self._held(context, question.size) as account:
                return self._answer(question, account, lambda: call_next(message, context))
        except NotAnswered as error:
            return refused(message, str(error))
        except Exception as error:  # such as a full disk: the server learns that, and not where
            LOG.error("a message was not answered: %s", error)
            return refused(message, "this client cannot take part now: its own log says why")
        finally:
            context.node_config = own

    def _answer(self, question: Question, account: _Account, app: Callable[[], Message]) -> Message:
        released = account.sent_for(question.digest)
        if released is None:
            gate, release = account.reserve()
            update = clipped(_moved(question, app), self.clip)
            released = gate.release(release, 0, {UPDATE: update})[UPDATE].numpy()
            account.settle(question.digest, released)
        return question.reply(released, {self.weight: 1, **account.told()})

    def _held(self, context: Context, dimension: int) -> _Account:
        own = context.node_config
        name = f"client-{own['partition-id']}" if "partition-id" in own else "client"
        facts = self._facts(name, float(own.get("privacy-epsilon", self.epsilon)))
        return _Account(Path(str(own.get("privacy-folder", self.folder))) / name, self, facts, dimension)

    def _facts(self, name: str, epsilon: float) -> ClientFacts:
        if not (isinstance(epsilon, int | float) and 0 < epsilon <= MOST):
            raise UserError(f"epsilon must be positive and at most {MOST} (more protects nobody), got {epsilon!r}")
        return ClientFacts(name, 1, epsilon, self.participations)

    @property
    def _mechanism(self) -> ClientLevel:
        view = RepliesSeen()
        return ClientLevel(view=view, adjacency=Adjacency.named(self.adjacency), delta=self.delta, integers=True)


def private_app(app: ClientApp, **privacy: Any) -> ClientApp:
    """The app with its client's privacy round all of it.

    Args:
        app: Anybody's, with the model in and out of its train functions.
        privacy: As `ClientPrivacy` has them.

    Returns:
        An app in its place. It answers training alone.

    Raises:
        UserError: For settings that cannot be.

    Example:
        >>> app = private_app(app, epsilon=8, participations=10, clip=1.0)  # doctest: +SKIP
    """
    return _PrivateApp(app, ClientPrivacy(**privacy))


class _PrivateApp(ClientApp):
    """Also what an app does outside of its functions, such as a lifespan, is inside."""

    def __init__(self, app: ClientApp, privacy: ClientPrivacy) -> None:
        super().__init__()
        if not isinstance(app, ClientApp):
            raise UserError(f"private_app takes a ClientApp, got {type(app).__name__}")
        self._app, self._privacy = app, privacy

    def __call__(self, message: Message, context: Context) -> Message:
        return self._privacy(message, context, self._app)


def _moved(question: Question, app: Callable[[], Message]) -> NDArray[np.float64]:
    """What the app made of its records. Whatever it does instead of answering is no movement."""
    try:
        return question.update(app())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an app that exits tells no less than one that raises
        LOG.warning("the app gave no update (%s: %s): zero and noise are sent", type(error).__name__, error)
        return np.zeros(question.size)


def clipped(update: NDArray[np.float64], bound: float) -> torch.Tensor:
    """Of norm at most the bound; one that is not finite counts as zero."""
    rows = torch.from_numpy(update.copy())[None]
    clip_updates(rows, [bound])
    return rows[0]


class _Account:
    """One client's folder, held while a message is answered."""

    def __init__(self, folder: Path, privacy: ClientPrivacy, facts: ClientFacts, dimension: int) -> None:
        self._facts, self._decision, self._mechanism = facts, Decision(privacy.clip), privacy._mechanism
        self._files, self._stack = RunFolder(folder), ExitStack()
        self._noise = _noise(privacy.seed)
        plan = self._mechanism.plan(facts, ())
        self._plan: PrivacyPlan = on_lattice({facts.name: plan}, [facts], dimension)[0][facts.name]
        self._identity = _identity(self._plan, privacy.clip, privacy.seed)

    def __enter__(self) -> Self:
        self._files.make(fresh=False)
        with ExitStack() as stack:
            stack.enter_context(self._files.alone())
            self._ledger = self._files.open_ledger(self._identity, self._noise, foreign_parts=FOREIGN)
            stack.callback(self._ledger.close)
            self._ledger.declare([self._plan])
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def _sent(self) -> int:
        """Replies that may have left. A reservation without one never did, and is taken up again."""
        return self._ledger.releases_made(self._facts.name) - len(self._ledger.unsettled())

    def sent_for(self, digest: bytes) -> NDArray[np.float64] | None:
        """The update that was sent for the last question, where this is that question again."""
        for token in self._ledger.outbox():
            message = self._ledger.message(token)
            if message[:DIGEST] == digest:
                return np.frombuffer(message[DIGEST:], dtype="<f8")
        return None

    def reserve(self) -> tuple[ReservedGate, Any]:
        """On disk that one more reply may leave, before a record is touched."""
        number = self._sent
        asked = Asked.alone(self._facts, self._plan, number, self._decision)
        release = self._mechanism.event(asked)
        try:
            tokens = self._ledger.reserve([release])
        except Refused:
            raise NotAnswered(
                f"{SPENT}: {counted(self._facts.participations, 'participation')} were agreed for "
                f"ε = {self._facts.budget:g}, and all of them were taken"
            ) from None
        return ReservedGate(self._noise, tokens), release

    def settle(self, digest: bytes, released: NDArray[np.float64]) -> None:
        """On disk what is sent, before it is; only the last reply is kept."""
        (token,) = self._ledger.unsettled()
        before = self._ledger.outbox()
        self._ledger.settle(token, digest + released.astype("<f8").tobytes())
        self._ledger.prune(before)
        Certificate.from_ledger(self._ledger).write(self._files.certificate)

    def told(self) -> dict[str, float]:
        """What is public of the plan, for the server's metrics."""
        made = self._ledger.releases_made(self._facts.name)
        return {PLANNED: self._facts.participations, RESERVED: made, EPSILON: plan_guarantee(self._plan).epsilon}


def _noise(seed: int | None) -> NoiseSource:
    return CryptoNoise() if seed is None else SimulatedNoise(seed)


def _identity(*settings: object) -> str:
    return hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()
