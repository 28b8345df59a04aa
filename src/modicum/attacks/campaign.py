"""Attacks on a recorded run, one after another: each is tried, scored, compared, and kept until all are done.

What an attack found is written down at once, so that a campaign that was stopped goes on where it was. Scores are
computed anew from what was found.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modicum.attacks.bounds import FloatArray, lower_bounds
from modicum.attacks.breaks import without_pruned
from modicum.attacks.ceilings import Ceiling, ceiling_of, weakest
from modicum.attacks.images import Likeness, best_blind_guess, floors, likeness, matched
from modicum.attacks.inversion.analytic import analytic
from modicum.attacks.inversion.bayes import Gaussian, bayes
from modicum.attacks.inversion.dlg import dlg
from modicum.attacks.inversion.gi import NOTE as NO_BATCH_NORM
from modicum.attacks.inversion.gi import gi
from modicum.attacks.inversion.ig import ig
from modicum.attacks.inversion.objective import Cost, Guess, Targets, at
from modicum.attacks.membership.evidence import AT, auc, rate_at, roc
from modicum.attacks.membership.game import Key, Questions, ask, fairness
from modicum.attacks.membership.matched import matched as matched_filter
from modicum.attacks.membership.quantile import quantile
from modicum.attacks.membership.shadow import lira, lr_mia
from modicum.attacks.outcome import Membership, Outcome, Quality, Reconstruction
from modicum.attacks.truth import Truth, truth_of
from modicum.attacks.wire import Observed, Public, Wire, public_of, split_pool, wire_of
from modicum.core.door import SERVER
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember, Seen
from modicum.mechanisms.soteria import Soteria
from modicum.privacy.noise import SimulatedNoise

Done = Callable[[int, int], None]


@dataclass(frozen=True)
class Effort:
    """How long each attack searches."""

    dlg: int
    starts: int  # of DLG
    ig: int
    gi: int
    seeds: int
    bayes: int
    shadows: int


EFFORTS = {
    "quick": Effort(dlg=60, starts=1, ig=400, gi=400, seeds=2, bayes=300, shadows=8),
    "medium": Effort(dlg=100, starts=1, ig=1200, gi=1200, seeds=4, bayes=600, shadows=16),
    "paper": Effort(dlg=300, starts=3, ig=4800, gi=4800, seeds=8, bayes=2000, shadows=64),
}


@dataclass(frozen=True)
class Order:
    """What to try."""

    attacks: tuple[str, ...]
    targets: int = 4
    effort: str = "quick"
    party: str = SERVER
    seed: int = 0
    reference: bool = True  # try each inversion where nothing is hidden, too
    device: str = "cpu"

    def __post_init__(self) -> None:
        unknown = [name for name in self.attacks if name not in (*INVERSIONS, *MEMBERSHIP)]
        if unknown or not self.attacks:
            named = f"unknown attack {unknown[0]!r}" if unknown else "no attack is named"
            raise UserError(f"{named}: use some of {', '.join((*INVERSIONS, *MEMBERSHIP))}, by commas")
        if self.targets < 1:
            raise UserError(f"attack at least 1 target, got {self.targets}")
        if self.effort not in EFFORTS:
            raise UserError(f"unknown preset {self.effort!r}: use {' or '.join(EFFORTS)}")


Found = list[Guess]
Invert = Callable[[Targets, Effort, int], Found]

INVERSIONS: dict[str, tuple[Invert, Cost]] = {
    "dlg": (lambda t, e, s: dlg(t, steps=e.dlg, restarts=e.starts, seed=s), "l2"),
    "idlg": (lambda t, e, s: dlg(t, steps=e.dlg, restarts=e.starts, seed=s, joint=False), "l2"),
    "ig": (lambda t, e, s: ig(t, steps=e.ig, seed=s), "cosine"),
    "ig-adaptive": (lambda t, e, s: ig(t, steps=e.ig, seed=s, keep=_undefended(t.public)), "cosine"),
    "gi": (lambda t, e, s: gi(t, steps=e.gi, seeds=e.seeds, seed=s), "l2"),
    "analytic": (lambda t, e, s: analytic(t, steps=e.bayes, seed=s), "l2"),
    "bayes": (lambda t, e, s: bayes(t, steps=e.bayes, seed=s), "gaussian"),
}
MEMBERSHIP: dict[str, Callable[[Wire, Questions, Effort, int], FloatArray]] = {
    "matched": lambda w, q, e, s: matched_filter(w, q),  # noqa: ARG005
    "lira": lambda w, q, e, s: lira(w, q, shadows=e.shadows, seed=s),
    "lr": lambda w, q, e, s: lr_mia(w, q, shadows=min(8, e.shadows), seed=s),
    "quantile": lambda w, q, e, s: quantile(w, q, seed=s),  # noqa: ARG005
}


def _undefended(public: Public) -> Tensor | None:
    """What counts for an attacker who knows the defence."""
    return without_pruned(public) if isinstance(public.method.mechanism, Soteria) else None


@dataclass(frozen=True, eq=False)
class Picture:
    """Some records, what an attack made of them, and the best guess without a message, row by row."""

    original: Tensor = field(repr=False)
    floor: Tensor = field(repr=False)
    found: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that a campaign came to."""

    outcomes: tuple[Outcome, ...]
    picture: Picture | None
    ceiling: Ceiling
    sentences: tuple[str, ...]  # who saw what, and what the attacker brought

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"about": list(self.sentences), "outcomes": [outcome.to_dict() for outcome in self.outcomes]}


def attack(
    experiment: Experiment, seen: Sequence[Seen], order: Order, folder: Path, done: Done | None = None
) -> Report:
    """Carry out an order on a recorded run of an experiment whose records are at hand to score with."""
    pool, fresh, note = split_pool(experiment.federation.data)
    if len(pool) < 16:
        raise UserError(
            "an attacker brings some records of its own: give the data at least 32 test records, or a proxy"
        )
    public, truth = public_of(experiment, pool, note), truth_of(experiment, fresh)
    public.model.to(order.device)
    wire = wire_of(seen, public, order.party)
    stage = _Stage(experiment, wire, truth, order, folder, done)
    outcomes = tuple(stage.outcome(name) for name in order.attacks)
    return Report(outcomes, stage.picture(), stage.ceiling, (wire.sentence(), f"The attacker brings {note}."))


class _Stage:
    """One campaign: the wire, the truth to score with, and what was found before."""

    def __init__(
        self, experiment: Experiment, wire: Wire, truth: Truth, order: Order, folder: Path, done: Done | None
    ) -> None:
        self.experiment, self.wire, self.truth, self.order, self.folder = experiment, wire, truth, order, folder
        self.effort = EFFORTS[order.effort]
        self.done, self.finished = done, 0
        self.ceiling = weakest(ceiling_of(plan) for plan in wire.public.setup.plans.values())
        if not wire.claimed:  # the claim trusts this party
            self.ceiling = Ceiling(((float("inf"), 0.0),))
        self._pictures: dict[str, Tensor] = {}
        self._targets = _choose(wire, order.targets)
        self._blind: float | None = None
        self._game: tuple[Questions, Key] | None = None

    def outcome(self, name: str) -> Outcome:
        """The named attack, tried or found before, and scored."""
        found = self._membership(name) if name in MEMBERSHIP else self._reconstruction(name)
        self.finished += 1
        if self.done is not None:
            self.done(self.finished, len(self.order.attacks))
        return found

    # Inversions

    def _reconstruction(self, name: str) -> Outcome:
        try:
            targets = Targets.of(self.wire, self._targets, self.order.device)
            guesses = self._kept(name, lambda: _invert(name, targets, self.effort, self.order.seed))
        except UserError as why:
            empty = (None, None, None, None, None, None)
            return Reconstruction(name, len(self._targets), 0, *empty, self._hit_ceiling(), self.blind, str(why))
        truth = [self.truth.records[o.sender].x for o in self._targets]
        floor = self._floor(truth)
        self._pictures[name] = torch.cat([matched(g.x.cpu(), t)[0] for g, t in zip(guesses, truth, strict=True)])
        return Reconstruction(
            name,
            len(guesses),
            targets.recipe.used,
            Quality.of(_all(guesses, truth)),
            self._labels(guesses),
            floor,
            Quality.of(_all(guesses, truth[1:] + truth[:1])) if len(truth) > 1 else None,
            self._reference(name) if self.order.reference else None,
            self._missing(name, targets, guesses),
            self._hit_ceiling(),
            self.blind,
            NO_BATCH_NORM if name == "gi" else "",
        )

    @property
    def blind(self) -> float:
        """The best blind guess's hit rate, from above; computed once."""
        if self._blind is None:
            self._blind = best_blind_guess(self.wire.public.pool.x[:2000])
        return self._blind

    def _hit_ceiling(self) -> float:
        return self.ceiling.hits(self.blind)

    def _floor(self, truth: Sequence[Tensor]) -> Quality:
        """The best of the guesses that use no message."""
        pool, all_of_them = self.wire.public.pool.x, torch.cat(list(truth))
        tried = [Quality.of(likeness(guess, all_of_them)) for guess in floors(pool, all_of_them).values()]
        return max(tried, key=lambda quality: quality.psnr)

    def _labels(self, guesses: Found) -> float:
        right = total = 0
        for guess, observed in zip(guesses, self._targets, strict=True):
            left = self.truth.records[observed.sender].targets["y"].tolist()
            for label in guess.y.tolist():
                total += 1
                if label in left:
                    left.remove(label)
                    right += 1
        return right / max(1, total)

    def _missing(self, name: str, targets: Targets, guesses: Found) -> float | None:
        """(a) Where the true records have no lower objective than the found ones, no search would find them."""
        if targets.recipe.used != targets.recipe.records:
            return None  # which records were used is not known here either
        cost = INVERSIONS[name][1]
        own = [self.truth.records[o.sender] for o in self._targets]
        x = torch.stack([b.x for b in own]).to(targets.device)
        keep = _undefended(self.wire.public) if name == "ig-adaptive" else None
        true = at(targets, x, torch.stack([b.targets["y"] for b in own]).to(targets.device), cost, keep)
        if cost == "gaussian":
            true = true + Gaussian.of(self.wire.public.pool.x).to(targets.device).minus_log(x)
        return float(np.mean([g.loss <= 1.01 * float(t) + 1e-9 for g, t in zip(guesses, true, strict=True)]))

    def _reference(self, name: str) -> Quality | None:
        """The same attack on the same clients' first messages with ε = ∞: does it work at all?"""
        if all(o.facts.variance == 0 for o in self._targets) and self.wire.claimed:
            return None  # nothing is hidden by noise here
        free = Federation(
            self.experiment.federation.data, (float("inf"),) * len(self.experiment.federation.budgets)
        )
        made = replace(self.experiment, federation=free)
        with tempfile.TemporaryDirectory() as passing:
            seen = Remember()
            sim = Simulation(made, Path(passing) / "run", noise=SimulatedNoise(made.seed), transcript=seen)
            try:
                sim.step()
            finally:
                sim.close()
        public = public_of(made, split_pool(free.data)[0], "")
        wire = wire_of(seen.seen, public, self.order.party)
        targets = _choose(wire, self.order.targets)
        guesses = self._kept(
            f"{name}-reference",
            lambda: _invert(name, Targets.of(wire, targets, self.order.device), self.effort, self.order.seed),
        )
        return Quality.of(_all(guesses, [self.truth.records[o.sender].x for o in targets]))

    # Membership

    def _membership(self, name: str) -> Membership:
        if self._game is None:
            sent = {name for o in self.wire.observed for name in o.senders}
            known = {name: own for name, own in self.truth.records.items() if name in sent}
            self._game = ask(replace(self.truth, records=known), MOST_QUESTIONS, self.order.seed)
        questions, key = self._game
        counts = int(key.member.sum()), int((~key.member).sum())
        claimed = None if self.ceiling.none else self.ceiling.points[0][0]
        fair = fairness(questions, key)
        try:
            scores = self._scores(name, questions)
        except UserError as why:
            return Membership(name, *counts, None, (), (), 0.0, claimed, fair, None, str(why))
        members, others = key.split(scores)
        rates = tuple(rate_at(members, others, fpr, seed=self.order.seed) for fpr in AT)
        delta = self.wire.public.method.mechanism.spec.delta
        return Membership(
            name,
            *counts,
            auc(members, others),
            rates,
            tuple(float(self.ceiling.tpr(fpr)) for fpr in AT),
            lower_bounds(members, others, delta, 0.95).epsilon,
            claimed,
            fair,
            roc(members, others),
        )

    def _scores(self, name: str, questions: Questions) -> FloatArray:
        path = self._path(name, "npy")
        if path.exists():
            return np.asarray(np.load(path))
        scores = MEMBERSHIP[name](self.wire, questions, self.effort, self.order.seed)
        np.save(path, scores)
        return scores

    # What was found before

    def _path(self, name: str, kind: str) -> Path:
        """Named after everything that decides what is found."""
        first = self.wire.observed[0]
        told = [
            name,
            asdict(replace(self.order, attacks=("dlg",))),
            self.wire.public.method.name,
            len(self.wire.observed),
        ]
        text = json.dumps([*told, float(first.update.double().sum()), float(first.update.double().abs().max())])
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{name}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.{kind}"

    def _kept(self, name: str, search: Callable[[], Found]) -> Found:
        path = self._path(name, "npz")
        if not path.exists():
            guesses = search()
            x, y = (torch.stack([getattr(g, part) for g in guesses]).cpu().numpy() for part in ("x", "y"))
            with open(path.with_suffix(".part"), "wb") as file:
                np.savez(file, x=x, y=y, loss=np.array([g.loss for g in guesses]))
            path.with_suffix(".part").replace(path)
        kept = np.load(path)
        rows = zip(kept["x"], kept["y"], kept["loss"], strict=True)
        return [Guess(torch.from_numpy(x), torch.from_numpy(y), float(loss)) for x, y, loss in rows]

    def picture(self, most: int = 8) -> Picture | None:
        """The first records that every inversion was tried on; None where records are no images."""
        if not self._pictures or len(self.wire.public.shape) != 3:
            return None
        used = len(next(iter(self._pictures.values()))) // len(self._targets)
        original = torch.cat([self.truth.records[o.sender].x[:used] for o in self._targets])[:most]
        floor = floors(self.wire.public.pool.x, original)["public mean"]
        return Picture(
            original, floor, {n: v[:most] for n, v in self._pictures.items() if len(v) >= len(original)}
        )


MOST_QUESTIONS = 20_000


def _choose(wire: Wire, count: int) -> tuple[Observed, ...]:
    """The first message of each of the first clients, and further rounds where clients are few."""
    ordered = sorted(wire.observed, key=lambda o: (o.round, o.senders))
    return tuple(ordered[:count])


def _invert(name: str, targets: Targets, effort: Effort, seed: int) -> Found:
    return INVERSIONS[name][0](targets, effort, seed)


def _all(guesses: Found, truth: Sequence[Tensor]) -> list[Likeness]:
    return [one for g, t in zip(guesses, truth, strict=True) for one in likeness(*matched(g.x.cpu(), t.cpu()))]
