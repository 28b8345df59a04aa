"""The release gate: private sums go in with a reservation, noised values come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from modicum.core import integers
from modicum.core.rows import NoiseRows
from modicum.core.threads import pays, spread
from modicum.errors import UserError
from modicum.privacy.correlated import Correlation
from modicum.privacy.events import Block, Cyclic, NoSampling, Poisson, Release, Shuffled
from modicum.privacy.fixed_shapes import Uniform
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import BoolArray, DType, FloatArray, NoiseKey, NoiseSource, SimulatedNoise

SERVER = "(server)"  # no client's name: parentheses are not allowed in one


class ReleaseGate(Protocol):
    """One client's way out for one round."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """Every reservation that this round's message draws on."""

    def reserve(self, release: Release) -> bool:
        """Whether this release is reserved, now if not before; False where the ledger refuses it."""

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        """Numbers of the records that enter this step, of which `release` must be reserved.

        Where the sampler fixes the shape of passes, (passes, rows) of them with `BLANK` in rows that nobody takes.
        A record that is not `present` is never drawn; batches that are not drawn keep its row.
        """

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each block's clipped sum plus its noise. `release` must be reserved, each step passes once."""

    def release_integers(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Tensor:
        """All blocks as one vector of integers with this client's share of noise: a summand, for no eye alone."""


def drawn(sampler: Poisson, coins: BoolArray, present: Tensor | None, uniform: Uniform) -> Tensor:
    """Whom these coins chose, laid out in passes of one shape where the sampler asks for it (R16)."""
    if present is not None:
        coins = coins & present.cpu().numpy()
    chosen = np.flatnonzero(coins)
    if sampler.shape is not None:
        chosen = sampler.shape.laid_out(chosen, len(coins), uniform)
    return torch.from_numpy(chosen)


def in_turn(release: Release, step: int, records: int) -> Tensor:
    """The batch whose turn it is: a function of public numbers alone, always the same for the same record (R19).

    Records are spread over the batches in a fixed order that is like a random one, so that a sorted table does
    not come class by class.
    """
    assert isinstance(release.sampler, Cyclic)
    return batch_of(row_number(release, step), release.sampler, records)


def batch_of(number: int, sampler: Cyclic, records: int) -> Tensor:
    """The batch of one of a client's releases, by its number among all of them."""
    return _spread_out(records, sampler.batches)[number % sampler.batches]


@lru_cache(maxsize=4096)
def _spread_out(records: int, batches: int) -> list[Tensor]:
    words = np.random.Philox(key=records).random_raw(records)
    order = np.argsort(words, kind="stable")
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, batches)]


def row_number(release: Release, step: int) -> int:
    """Which of all the client's releases this step is: its batch, and its row of correlated noise."""
    return release.first_row + step - release.step


class ReservedGate:
    """The real gate: opens for what the ledger has reserved and for nothing else.

    `reserve` serves policies that choose the noise of each step: it is asked, durably, before the step's data is
    touched, and gives None where the ledger refuses.
    """

    def __init__(
        self,
        noise: NoiseSource,
        tokens: Iterable[Token],
        reserve: Callable[[Release], Token | None] | None = None,
        rows: RowsOf | None = None,
    ) -> None:
        self._noise, self._rows = noise, rows
        self._reserve = reserve
        self._tokens = {token.release: token for token in tokens}
        self._left: dict[Release, set[int]] = {}
        self._noised: dict[tuple[str, int, str], set[int]] = {}  # steps of each client, round and block
        self._passes: dict[tuple[Release, int], list[Tensor]] = {}  # batches of a shuffled pass, drawn once
        # The release last asked for, by identity, and its open steps: a release costs as much to hash as a step.
        self._current: Release | None = None
        self._open: tuple[Release, set[int]] | None = None

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(self._tokens.values())

    def reserve(self, release: Release) -> bool:
        if self._has(release):
            return True
        token = None if self._reserve is None else self._reserve(release)
        if token is None or token.settled:
            return False
        self._tokens[release] = token
        return True

    def _has(self, release: Release) -> bool:
        if release is not self._current:
            if release not in self._tokens:
                return False
            self._current = release
        return True

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        if not self._has(release):
            raise UserError(f"client {release.client!r}: nothing is reserved for {_name(release)!r}")
        match release.sampler:
            case NoSampling():
                return torch.arange(records)
            case Poisson(rate=rate):
                key = NoiseKey(release.client, release.round, step, f"coins:{_name(release)}")
                rows = replace(key, purpose=f"rows:{_name(release)}")
                coins = self._noise.coins(key, records, rate)
                return drawn(release.sampler, coins, present, lambda size: self._noise.uniform(rows, size))
            case Shuffled(batches=batches):
                return self._shuffled(release, step // batches, records)[step % batches]
            case Cyclic():
                return in_turn(release, step, records)
        raise UserError(f"no gate for the sampler {release.sampler}: use Poisson sampling or whole batches")

    def _shuffled(self, release: Release, turn: int, records: int) -> list[Tensor]:
        """The batches of one pass: drawn together and kept, so that no record is in two of them."""
        if (release, turn) not in self._passes:
            assert isinstance(release.sampler, Shuffled)
            key = NoiseKey(release.client, release.round, turn, f"pass:{_name(release)}")
            order = np.argsort(self._noise.uniform(key, records), kind="stable")
            parts = np.array_split(order, release.sampler.batches)
            self._passes[release, turn] = [torch.from_numpy(np.sort(part)) for part in parts]
        return self._passes[release, turn]

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.admit(release, step, sums)
        if release.integers is not None:
            return integers.released_alone(release, step, sums, self._noise)
        if release.correlated is not None:
            return add_rows(release, step, sums, self._rows)
        return {
            block.name: add_noise(self._noise, _key(release, step, block), sums[block.name], block.noise_std)
            for block in release.blocks
        }

    def release_integers(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Tensor:
        self.admit(release, step, sums)
        return torch.from_numpy(integers.noised(release, step, sums, self._noise))

    def admit(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> NoiseSource:
        """Every check of `release`, which uses the step up; the noise of the reserved std is still to be added."""
        self._pass(release, step)
        if set(sums) != {b.name for b in release.blocks}:
            raise UserError(f"reserved blocks {[b.name for b in release.blocks]} but got {sorted(sums)}")
        return self._noise

    def _pass(self, release: Release, step: int) -> None:
        """Use the reservation on its first step; let every step of it through once."""
        if self._open is None or self._open[0] is not release:
            self._open = (release, self._steps_left(release))
        left = self._open[1]
        if step not in left:
            raise UserError(f"client {release.client!r}: step {step} of {_name(release)!r} is not open")
        left.remove(step)

    def _steps_left(self, release: Release) -> set[int]:
        left = self._left.get(release)
        if left is None:
            token = self._tokens.get(release)
            if token is None:
                raise UserError(f"client {release.client!r}: nothing is reserved for {_name(release)!r}")
            each = release.sampler.batches if isinstance(release.sampler, Shuffled) else 1
            left = set(range(release.step, release.step + release.count * each))
            self._refuse_overlap(release, left)
            token.use(release)
            self._left[release] = left
        return left

    def _refuse_overlap(self, release: Release, steps: set[int]) -> None:
        """A block's noise is keyed by its step: from a seed, two reservations of one step would get the same."""
        for block in release.blocks:
            before = self._noised.setdefault((release.client, release.round, block.name), set())
            if before & steps:
                raise UserError(f"client {release.client!r}: a step of {block.name!r} is reserved in two ways")
            before |= steps


@dataclass(frozen=True)
class ReleaseRequest:
    """One client's wish to release: its own gate, and what goes through it."""

    gate: ReleaseGate
    release: Release
    step: int
    sums: Mapping[str, Tensor]


def release_together(
    requests: Sequence[ReleaseRequest], block: str, rows: Tensor
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """As if each gate were asked in turn: each makes its own checks, and each draw has a key of its own.

    Row i of `rows` is request i's sum for `block`. Gives the noised rows, which may take the place of `rows`, and
    the other blocks of each request.
    """
    gates = [request.gate for request in requests if type(request.gate) is ReservedGate]
    if len(gates) < len(requests) or any(_by_itself(request.release) for request in requests):
        answers = [request.gate.release(request.release, request.step, request.sums) for request in requests]
        return torch.stack([answer.pop(block) for answer in answers]), answers
    sources = [
        gate.admit(request.release, request.step, request.sums)
        for gate, request in zip(gates, requests, strict=True)
    ]
    main = [next(b for b in request.release.blocks if b.name == block) for request in requests]
    keys = [_key(request.release, request.step, b) for request, b in zip(requests, main, strict=True)]
    _add_noise_to_rows(rows, sources, keys, [b.noise_std for b in main])
    return rows, [_others(source, request, block) for source, request in zip(sources, requests, strict=True)]


def _by_itself(release: Release) -> bool:
    """Whether a gate is asked by itself, like one that is watched: its noise is on a lattice, or correlated."""
    return release.integers is not None or release.correlated is not None


def _add_noise_to_rows(
    rows: Tensor, sources: Sequence[NoiseSource], keys: Sequence[NoiseKey], stds: Sequence[float]
) -> None:
    """Each row's own draw. On a GPU they are added at once; on a CPU by numpy, since waking torch's threads for
    every row costs more than the addition."""
    draws = zip(sources, keys, stds, strict=True)
    if rows.is_cuda:
        noise, generator = torch.empty_like(rows), torch.Generator(rows.device)
        for out, (source, key, std) in zip(noise.unbind(), draws, strict=True):
            _fill(out, source, key, std, generator)
        rows += noise
        return

    def add(one: tuple[FloatArray, tuple[NoiseSource, NoiseKey, float]]) -> None:
        row, (source, key, std) = one
        row += source.normal(key, len(row), std, _precision(rows))

    alike = list(zip(rows.numpy(), draws, strict=True))
    if pays(len(alike)) and all(type(source) is SimulatedNoise for source in sources):
        spread(add, alike)  # each draw has a stream of its own
        return
    for row, (source, key, std) in alike:
        row += source.normal(key, len(row), std, _precision(rows))


def _others(source: NoiseSource, request: ReleaseRequest, block: str) -> dict[str, Tensor]:
    return {
        b.name: add_noise(source, _key(request.release, request.step, b), request.sums[b.name], b.noise_std)
        for b in request.release.blocks
        if b.name != block
    }


def _key(release: Release, step: int, block: Block) -> NoiseKey:
    return NoiseKey(release.client, release.round, step, f"noise:{block.name}")


RowsOf = Callable[[Release], NoiseRows]
"""The rows of correlated noise of a client, which stay the same from round to round (R19)."""


def add_rows(release: Release, step: int, sums: Mapping[str, Tensor], rows_of: RowsOf | None) -> dict[str, Tensor]:
    """Each block's sum plus its row of correlated noise; one that names another factor is refused."""
    rows = None if rows_of is None else rows_of(release)
    if rows is None or release.correlated is None or release.correlated.factor != rows.digest:
        raise UserError("this release names another factor of correlated noise than the one that is here")
    number = row_number(release, step)
    return {
        block.name: sums[block.name] + block.noise_std * rows.row(block.name, number, sums[block.name])
        for block in release.blocks
    }


class SumGate(Protocol):
    """The trusted server's way out: one noise for the sum over a cohort."""

    def release_sum(
        self, events: Mapping[str, tuple[Release, ...]], round: int, sums: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Each block's sum plus noise of its reserved std; every client's reservation is used up."""


class ReservedSumGate:
    """Opens when every client that the sum may depend on has a reservation; `rows` are of correlated noise."""

    def __init__(self, noise: NoiseSource, tokens: Iterable[Token], rows: NoiseRows | None = None) -> None:
        self._noise, self._rows = noise, rows
        self._tokens = {token.release: token for token in tokens}

    def release_sum(
        self, events: Mapping[str, tuple[Release, ...]], round: int, sums: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        stds: dict[str, float] = {}
        for client, reserved in events.items():
            for release in reserved:
                if release not in self._tokens:
                    raise UserError(f"client {client!r}: nothing is reserved for {_name(release)!r}")
                self._tokens[release].use(release)
                for block in release.blocks:
                    stds[block.name] = max(stds.get(block.name, 0.0), block.noise_std)
        correlated = correlated_blocks(events, self._rows)
        return {
            name: value + stds[name] * self._rows.row(name, round, value)
            if self._rows is not None and name in correlated
            else add_noise(self._noise, NoiseKey(SERVER, round, 0, f"noise:{name}"), value, stds[name])
            for name, value in sums.items()
        }


def correlated_blocks(events: Mapping[str, tuple[Release, ...]], rows: NoiseRows | None) -> set[str]:
    """Blocks whose noise is a row of the factor that all of these releases name (R19)."""
    found = {block.name for es in events.values() for e in es if e.correlated for block in e.blocks}
    named = {e.correlated.factor for es in events.values() for e in es if e.correlated is not None}
    if named and (rows is None or named != {rows.digest}):
        raise UserError("these releases name another factor of correlated noise than the one that is here")
    return found


class GateWatch(Protocol):
    """Puts something around every gate of a run, such as a recorder for attacks, audits and replays."""

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        """What a client gets in place of its own gate."""

    def server(self, gate: SumGate) -> SumGate:
        """What a trusted server gets in place of its gate for sums."""


def add_noise(source: NoiseSource, key: NoiseKey, values: Tensor, std: float) -> Tensor:
    """`values` plus Gaussian noise of this key, in the tensor's own precision and place."""
    return values + noise_like(source, key, values, std)


def noise_like(source: NoiseSource, key: NoiseKey, values: Tensor, std: float) -> Tensor:
    """Noise of this key. Simulated noise for a GPU is made there, from a stream of its own; see SimulatedNoise."""
    if values.is_cuda:
        noise = torch.empty_like(values)
        _fill(noise, source, key, std, torch.Generator(values.device))
        return noise
    return torch.from_numpy(source.normal(key, values.numel(), std, _precision(values))).view(values.shape)


def _fill(out: Tensor, source: NoiseSource, key: NoiseKey, std: float, generator: torch.Generator) -> None:
    if isinstance(source, SimulatedNoise):
        source.fill(out, key, std, generator)
    else:
        out.copy_(torch.from_numpy(source.normal(key, out.numel(), std, _precision(out))).view(out.shape))


def _precision(values: Tensor) -> DType:
    return "float64" if values.dtype == torch.float64 else "float32"


def _name(release: Release) -> str:
    return "+".join(b.name for b in release.blocks)


def rows_of(source: NoiseSource, owner: str, terms: Correlation) -> NoiseRows:
    """Rows of correlated noise that a source makes for whoever adds it; the same keys give the same rows."""

    def draw(block: str, number: int, like: Tensor) -> Tensor:
        return noise_like(source, NoiseKey(owner, number, 0, f"row:{block}"), like, 1.0)

    return NoiseRows(terms.factor, terms.digest, draw)
