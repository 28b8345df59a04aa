"""Does a method peek? The non-interference replay, for any method.

A run on real records is recorded. Further runs on garbage of the same sizes, with other coins and other noise, are
given the recorded releases. Whatever a policy, the server or a reader of the results gets to see must then be the
same, bit for bit: it is a function of public values and of what has passed a gate, or something has leaked.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.extension_points import secret_rate
from modicum.core.facts import Metric
from modicum.core.messages import Opened, encode
from modicum.core.release_gate import GateWatch
from modicum.core.round_state import RoundState
from modicum.core.setting import MethodSpec
from modicum.data.check import refuse_population
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.garbage import GARBAGE
from modicum.federation.replay import Recording, Replaying, Tape
from modicum.federation.simulation import Simulation
from modicum.privacy.noise import CryptoNoise, NoiseSource

Around = Callable[[GateWatch], GateWatch]
NoiseMaker = Callable[[int], NoiseSource]


@dataclass(frozen=True)
class Sight:
    """One thing that somebody outside of a client sees; `bits` equals another's exactly when all bits do."""

    round: int | None  # None: after the last one
    what: str
    bits: Any

    def against(self, other: Sight) -> str:
        """What is to be said where the same thing looks different."""
        when = "at the end" if self.round is None else f"in round {self.round}"
        values = [float.fromhex(s.bits) for s in (self, other) if _is_number(s.bits)]
        shown = f" ({values[0]:.6g}, and {values[1]:.6g} on other records)" if len(values) == 2 else ""
        return f"{self.what} {when}{shown}"


@dataclass(frozen=True)
class Checked:
    """The outcome: what depended on records without having passed a gate, or nothing that was found."""

    method: str
    rounds: int
    garbage: tuple[str, ...]  # kinds of records that were tried
    difference: str | None

    @property
    def holds(self) -> bool:
        """Whether nothing visible depended on the data but through releases."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"{self.method} peeks: {self.difference}"
        tried = ", ".join(self.garbage)
        return f"{self.method}: nothing changed in {self.rounds} rounds on other records ({tried})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "method": self.method,
            "holds": self.holds,
            "rounds": self.rounds,
            "garbage": list(self.garbage),
            "difference": self.difference,
        }


def check(
    method: MethodSpec,
    *,
    federation: Federation | None = None,
    model: str | nn.Module = "logistic",
    model_options: Mapping[str, Any] | None = None,
    rounds: int = 2,
    per_round: int | None = None,
    garbage: Sequence[str] = tuple(GARBAGE),
    seed: int = 0,
) -> Checked:
    """Play a method, then play it again on other records under the same releases, and compare all that is seen.

    The records are those of an embedded dataset unless a federation is given; `garbage` names what replaces them.
    A peek that shows only on particular records, or after more rounds, is not found.

    Args:
        method: Its settings.
        federation: Records that are replaced [default: an embedded dataset].
        model: A name of the catalogue, or a module.
        model_options: Settings of a model that is named.
        rounds: That each play has; a peek that comes later is not found.
        per_round: Clients of a round [default: all].
        garbage: What replaces the records, by name.
        seed: Of everything that is drawn.

    Returns:
        What was compared, and each difference that was seen.

    Raises:
        UserError: Where `garbage` has no such name.
    """
    for kind in garbage:
        if kind not in GARBAGE:
            raise UserError(f"unknown garbage {kind!r}: use {', '.join(GARBAGE)}")
    if federation is not None:
        refuse_population(federation.data, "a play on other records")

    def experiment(change: Callable[[Federation], Federation]) -> Experiment:
        real = federation or embedded(seed)
        return Experiment(
            federation=change(real),
            method=method,
            model=model,
            model_options=dict(model_options or {}),
            rounds=rounds,
            per_round=per_round,
            metrics=(Metric("accuracy", 1, 20.0),) if all(len(c.validation) for c in real.data.clients) else (),
            seed=seed,
        )

    others = [
        lambda kind=kind, n=n: experiment(lambda real: GARBAGE[kind](real, seed + n))
        for n, kind in enumerate(garbage, start=1)
    ]
    with tempfile.TemporaryDirectory(prefix="modicum-check-") as folder:
        found = difference(lambda: experiment(lambda real: real), others, Path(folder))
    return Checked(type(method).__name__, rounds, tuple(garbage), found)


def embedded(seed: int) -> Federation:
    """Four clients with digits that need no files."""
    return Federation.from_dataset(
        "digits", clients=4, budgets=[1.0, 2.0, 4.0, 8.0], validation=0.1, test=0.1, proxy=0.2, seed=seed
    )


def difference(
    real: Callable[[], Experiment],
    others: Sequence[Callable[[], Experiment]],
    folder: Path,
    *,
    around: Around = lambda watch: watch,
    noise: NoiseMaker = lambda seed: CryptoNoise(),
) -> str | None:
    """What looks different when `others` are played under the releases of `real`; None where nothing does.

    `around` puts something between the gates and the mechanism, as tests of this function do. A run whose noise
    is no simulation's looks at no test record.
    """

    play = partial(Simulation, suffix=secrets.token_hex(8))  # a name is drawn: one for all plays

    def record() -> tuple[list[Sight], Tape]:
        recording = Recording()
        simulation = play(real(), folder / "real", noise=noise(1), watch=around(recording))
        return list(sights(simulation)), recording.tape

    first, tape = _apart(record)
    for n, other in enumerate(others):

        def replay(other: Callable[[], Experiment] = other, n: int = n) -> str | None:
            watch = around(Replaying(tape))
            return _compare(first, lambda: play(other(), folder / f"{n}", noise=noise(n + 2), watch=watch))

        found: str | None = _apart(replay)
        if found is not None:
            return found
    return None


def _compare(first: Sequence[Sight], again: Callable[[], Simulation]) -> str | None:
    """The first difference, and the first decision that follows from it."""
    different: list[str] = []
    seen = 0
    try:
        for seen, sight in enumerate(sights(again()), start=1):
            if seen > len(first):
                return f"it goes on where it had ended: {sight.what}"
            if sight != first[seen - 1]:
                different.append(first[seen - 1].against(sight))
                if sight.what.startswith(DECIDED):
                    break
    except Exception as error:  # whatever stops it did not stop the first one
        reason = next(iter(str(error).splitlines()), "")
        different.append(f"on other records it stops with {type(error).__name__}: {reason}")
    if not different and seen < len(first):
        return f"it ends before {first[seen].what}"
    if not different:
        return None
    decision = different[-1] if different[-1].startswith(DECIDED) and len(different) > 1 else None
    return different[0] + (f"; then {decision}" if decision else "")


DECIDED = "the decided "


def sights(simulation: Simulation) -> Iterator[Sight]:
    """Everything that a policy, the server or a reader of the results gets to see, round by round."""
    server, shown = simulation.server, list[Any]()
    secret_cohort = secret_rate(simulation.method.mechanism) is not None
    yield Sight(None, "the run's name", server.run)
    take = server.observe

    def observe(
        state: RoundState,
        public: Mapping[str, float],
        left: Mapping[str, float],
        stock: Mapping[str, tuple[float, ...]],
    ) -> None:
        shown.extend((_opened(state.opened), frozen((left, stock))))
        take(state, public, left, stock)

    server.observe = observe  # type: ignore[method-assign]
    try:
        while not server.finished:
            round = server.state.round
            proposal = server.propose()
            for name, decision in proposal.decisions.items():
                for field in fields(decision):
                    what = f"{DECIDED}{field.name.replace('_', ' ')} of {name!r}"
                    yield Sight(round, what, frozen(getattr(decision, field.name)))
            if not secret_cohort:
                for broadcast in proposal.broadcasts:
                    yield Sight(round, f"the proposal to {broadcast.client!r}", encode(broadcast))
            record = simulation.step()
            yield Sight(round, "what the server opened", shown.pop(0))
            yield Sight(round, "what is left of the budgets", shown.pop(0))
            for key, value in record.to_dict().items():
                yield Sight(round, f"'{key}' in the round's record", frozen(value))
            for key, value in server.state.to_dict().items():
                yield Sight(round, f"the server's state ({key})", frozen(value))
        for name, client in simulation.clients.clients.items():
            yield Sight(None, f"the state of {name!r}'s own policy", frozen(client.state.get("policy")))
        for name, accuracy in simulation.client_accuracies().items():
            yield Sight(None, f"the accuracy of {name!r}", frozen(accuracy))
    finally:
        simulation.close()


def frozen(value: Any) -> Any:
    """Something that equals another exactly when all bits do."""
    match value:
        case Tensor():
            return str(value.dtype), tuple(value.shape), value.detach().cpu().numpy().tobytes()
        case Mapping():
            return {str(k): frozen(v) for k, v in value.items()}
        case tuple() | list():
            return [frozen(v) for v in value]
        case float():
            return value.hex()
    return value


def _opened(opened: Opened | None) -> Any:
    if opened is None:
        return None
    return [encode(r) for r in opened] if isinstance(opened, tuple) else encode(opened)


def _is_number(bits: Any) -> bool:
    return isinstance(bits, str) and "0x" in bits


def _apart(play: Callable[[], Any]) -> Any:
    """The result of a play in a process of its own, where the system can fork.

    Nothing that one play leaves in memory (a global, a cache that is filled once, an object that can be found)
    then meets another, where it would pass for a constant.
    """
    if sys.platform != "linux":
        return play()
    import_module("torch.fx.experimental.symbolic_shapes")  # torch's slowest: loaded here once, not in each play
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(play, send))
    child.start()
    send.close()
    try:
        outcome = pickle.loads(receive.recv_bytes())
    except EOFError:
        raise UserError("the process that played the method was ended from outside: try again") from None
    finally:
        receive.close()
        child.join()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _answer(play: Callable[[], Any], send: Connection) -> None:
    torch.set_num_threads(1)  # the parent's threads do not exist here
    try:
        outcome: Any = play()
    except Exception as error:
        outcome = error
    try:
        send.send_bytes(pickle.dumps(outcome))
    except Exception as error:  # what was raised cannot travel
        send.send_bytes(pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))
    finally:
        send.close()
        os._exit(0)  # not the parent's exit handlers
