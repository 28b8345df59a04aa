"""Attacks on a recorded run, one after another: each is tried, scored, compared, and kept until all are done.

What an attack found is written down at once, so that a campaign that was stopped goes on where it was. Scores are
computed anew from what was found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modicum.attacks.adversary_view import AdversaryView, Observed, public_of, split_pool, view_of
from modicum.attacks.bounds import FloatArray, lower_bounds
from modicum.attacks.ceilings import NOTHING, Ceiling, ceiling_of, weakest
from modicum.attacks.images import HIT, LEVELS, Likeness, blind_rates, floors, likeness, matched
from modicum.attacks.inversion.bayes import Gaussian
from modicum.attacks.inversion.objective import Targets, at
from modicum.attacks.kept import StoredOutcomes
from modicum.attacks.membership.evidence import AT, Auc, auc, rate_at, roc
from modicum.attacks.membership.game import Key, Questions, ask, fairness
from modicum.attacks.order import EFFORTS, INVERSIONS, MEMBERSHIP, Found, Order, undefended
from modicum.attacks.outcome import Hits, Membership, Outcome, Quality, Reconstruction
from modicum.attacks.reasons import Check, checks
from modicum.attacks.recipe import Recipe, recipe_of
from modicum.attacks.truth import Truth, truth_of
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember, Seen
from modicum.privacy.noise import SimulatedNoise

Done = Callable[[int, int], None]  # steps made, of how many
SHARES = (0.01, 0.1)  # of the noise, between none and all of it
MOST_QUESTIONS = 20_000


@dataclass(frozen=True, eq=False)
class Picture:
    """Some records, what each attack made of them, and the best guess without a message, row by row."""

    original: Tensor = field(repr=False)
    floor: Tensor = field(repr=False)
    found: Mapping[str, Tensor] = field(repr=False)  # by what stands beside the row
    floor_name: str = "public mean"


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that a campaign came to."""

    outcomes: tuple[Outcome, ...]
    picture: Picture | None
    ceiling: Ceiling
    sentences: tuple[str, ...]  # who saw what, and what the attacker brought
    checks: tuple[Check, ...]  # whether a failure would mean something: (a) to (f)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "about": list(self.sentences),
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
            "checks": [check.to_dict() for check in self.checks],
        }


def attack(
    experiment: Experiment, seen: Sequence[Seen], order: Order, folder: Path, done: Done | None = None
) -> Report:
    """Carry out an order on a recorded run of an experiment whose records are at hand to score with."""
    return stage_of(experiment, seen, order, folder, done).report()


def stage_of(
    experiment: Experiment, seen: Sequence[Seen], order: Order, folder: Path, done: Done | None = None
) -> Stage:
    """A recorded run with everything that an order needs, before anything is tried."""
    pool, fresh, note = split_pool(experiment.federation.data)
    if len(pool) < 16:
        raise UserError(
            "an attacker brings some records of its own: give the data at least 32 test records, or a proxy"
        )
    public, truth = public_of(experiment, pool, note), truth_of(experiment, fresh)
    public.model.to(order.device)
    view = view_of(seen, public, order.party)
    return Stage(experiment, view, truth, order, folder, done)


class Stage:
    """One campaign: the view, the truth to score with, and what was found before."""

    def __init__(
        self,
        experiment: Experiment,
        view: AdversaryView,
        truth: Truth,
        order: Order,
        folder: Path,
        done: Done | None,
    ) -> None:
        self.experiment, self.view, self.truth, self.order = experiment, view, truth, order
        self.effort, self.kept = EFFORTS[order.effort], StoredOutcomes(folder, order, view)
        every = weakest(ceiling_of(plan) for plan in view.public.setup.plans.values())
        self.ceiling = every if view.claimed else NOTHING  # the claim trusts any other party
        self._pictures: dict[str, Tensor] = {}
        self.chosen = _choose(view, order.targets)  # messages that inversions are tried on
        self._done, self._made, self._finished = done, 0, 0

    def report(self) -> Report:
        """All attacks of the order, one after another."""
        public = self.view.public
        outcomes = tuple(self.outcome(name) for name in self.order.attacks)
        sentences = (self.view.sentence(), f"The attacker brings {public.pool_note}.")
        found = checks(outcomes, public.method.mechanism, self.order.attacks)
        return Report(outcomes, self.picture(), self.ceiling, sentences, found)

    def outcome(self, name: str) -> Outcome:
        """The named attack, tried or found before, and scored."""
        found = self._membership(name) if name in MEMBERSHIP else self._reconstruction(name)
        self._finished += self._steps(name)
        self._step(self._finished - self._made)  # what was found before, or told of nothing, is made now
        return found

    def _steps(self, name: str) -> int:
        if name in MEMBERSHIP:
            return max(1, MEMBERSHIP[name].steps(self.effort, self.view))
        tries = 2 + len(SHARES) if self._compares else 1
        return max(1, tries * INVERSIONS[name].steps(self.effort, len(self.chosen)))

    def _step(self, count: int) -> None:
        self._made += count
        if self._done is not None and count:
            self._done(self._made, sum(self._steps(name) for name in self.order.attacks))

    # Inversions

    def targets(self) -> Targets:
        """The chosen messages, ready to be searched; refused where they cannot be inverted."""
        return Targets.of(self.view, self.chosen, self.order.device)

    def _reconstruction(self, name: str) -> Outcome:
        try:
            targets = self.targets()
            guesses = self._invert(name, name, targets)
        except UserError as why:
            empty = (None, None, None, None, None, None)
            return Reconstruction(name, len(self.chosen), 0, *empty, self._hits, self.blind, note=str(why))
        truth = [self.truth.records[o.sender].x for o in self.chosen]
        each = _all(guesses, truth)
        quality = Quality.of(each)
        falls = self._falls(name, quality)
        self._show(f"{name}, {quality.psnr:.1f} dB", guesses, self.chosen)
        return Reconstruction(
            name,
            len(guesses),
            targets.recipe.used,
            quality,
            self._labels(guesses),
            self._floor(truth),
            self._control(guesses),
            falls[0][1] if falls else None,
            self._missing(name, targets, guesses),
            self._hits,
            self.blind,
            tuple((share, one.psnr) for share, one in falls),
            tuple(Hits.at(level, blind, each) for level, blind in zip(LEVELS, self._blind, strict=True)),
            INVERSIONS[name].note,
        )

    def _control(self, guesses: Found) -> Quality | None:
        """(c) The same guesses against another client's records; None where there is one client alone."""
        names = [o.sender for o in self.chosen]
        if len(set(names)) == 1:
            return None
        others = [next(n for n in names[i:] + names[:i] if n != name) for i, name in enumerate(names)]
        return Quality.of(_all(guesses, [self.truth.records[name].x for name in others]))

    def _invert(self, kept_as: str, name: str, targets: Targets) -> Found:
        search = INVERSIONS[name].search
        return self.kept.guesses(kept_as, lambda: search(targets, self.effort, self.order.seed, self._step))

    @cached_property
    def _blind(self) -> tuple[float, ...]:
        """The best blind guess's hit rate at each error, from above."""
        return blind_rates(self.view.public.pool.x[:2000], LEVELS)

    @property
    def blind(self) -> float:
        """At the error of a hit."""
        return self._blind[LEVELS.index(HIT)]

    @property
    def _hits(self) -> float:
        return self.ceiling.hits(self.blind)

    def _floor(self, truth: Sequence[Tensor]) -> Quality:
        """The best of the guesses that use no message."""
        pool, all_of_them = self.view.public.pool.x, torch.cat(list(truth))
        tried = [Quality.of(likeness(guess, all_of_them)) for guess in floors(pool, all_of_them).values()]
        return max(tried, key=lambda quality: quality.psnr)

    def _labels(self, guesses: Found) -> float:
        right = total = 0
        for guess, observed in zip(guesses, self.chosen, strict=True):
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
        cost = INVERSIONS[name].cost
        own = [self.truth.records[o.sender] for o in self.chosen]
        x = torch.stack([b.x for b in own]).to(targets.device)
        keep = undefended(self.view.public) if name == "ig-adaptive" else None
        true = at(targets, x, torch.stack([b.targets["y"] for b in own]).to(targets.device), cost, keep)
        if cost == "gaussian":
            true = true + Gaussian.of(self.view.public.pool.x).to(targets.device).minus_log(x)
        return float(np.mean([g.loss <= 1.01 * float(t) + 1e-9 for g, t in zip(guesses, true, strict=True)]))

    # Where nothing is hidden, and behind a part of the noise

    @property
    def _compares(self) -> bool:
        hidden = any(o.facts.variance > 0 for o in self.chosen) or not self.view.claimed
        return self.order.reference and hidden

    def _falls(self, name: str, quality: Quality) -> list[tuple[float, Quality]]:
        """(b) The same attack on the same clients' first messages with ε = ∞, and with shares of the noise."""
        if not self._compares:
            return []
        found = []
        for share in (0.0, *SHARES):
            targets = Targets.of(self._free, self._behind(share), self.order.device)
            kept_as = f"{name}-reference" if share == 0 else f"{name}-noise-{share:g}"
            guesses = self._invert(kept_as, name, targets)
            one = Quality.of(_all(guesses, [self.truth.records[o.sender].x for o in targets.observed]))
            found.append((share, one))
            if share == 0:
                self._show(f"{name}, nothing hidden: {one.psnr:.1f} dB", guesses, targets.observed)
        return [*found, (1.0, quality)]

    def _behind(self, share: float) -> tuple[Observed, ...]:
        """The same clients' free messages, with so much of the noise that the run's own have in the mean."""
        asked = {o.senders for o in self.chosen}
        std = share * float(np.mean([o.facts.variance for o in self.chosen])) ** 0.5
        generator = torch.Generator().manual_seed(self.order.seed)
        return tuple(
            replace(
                o,
                update=o.update + std * torch.randn(o.update.shape, generator=generator),
                facts=replace(o.facts, variance=std**2),
            )
            for o in _choose(self._free, self.order.targets, asked)
        )

    @cached_property
    def _free(self) -> AdversaryView:
        """The first round of the same experiment, with ε = ∞."""
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
        return view_of(seen.seen, public_of(made, split_pool(free.data)[0], ""), self.order.party)

    # Membership

    @cached_property
    def _game(self) -> tuple[Questions, Key]:
        sent = {name for o in self.view.observed for name in o.senders}
        known = {name: own for name, own in self.truth.records.items() if name in sent}
        return ask(replace(self.truth, records=known), MOST_QUESTIONS, self.order.seed)

    @cached_property
    def _fair(self) -> Auc | None:
        """Of the game, whichever attack plays it."""
        return fairness(*self._game)

    def _membership(self, name: str) -> Membership:
        questions, key = self._game
        counts = int(key.member.sum()), int((~key.member).sum())
        claimed = None if self.ceiling.none else self.ceiling.points[0][0]
        fair = self._fair
        try:
            if min(counts) < 4:
                raise UserError("membership needs at least 4 members and 4 others")
            scores = self._scores(name, questions)
        except UserError as why:
            return Membership(name, *counts, None, (), (), 0.0, claimed, fair, None, str(why))
        members, others = key.split(scores)
        rates = tuple(rate_at(members, others, fpr, seed=self.order.seed) for fpr in AT)
        delta = self.view.public.method.mechanism.spec.delta
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
        def keep(part: str, compute: Callable[[], FloatArray]) -> FloatArray:
            return self.kept.numbers(f"{name}-{part}", compute)

        def ask_all() -> FloatArray:
            return MEMBERSHIP[name].score(self.view, questions, self.effort, self.order.seed, keep, self._step)

        return self.kept.numbers(name, ask_all)

    def picture(self, most: int = 8) -> Picture | None:
        """The first records that every inversion was tried on; None where records are no images."""
        if not self._pictures or len(self.view.public.shape) != 3:
            return None
        used = len(next(iter(self._pictures.values()))) // len(self.chosen)
        original = torch.cat([self.truth.records[o.sender].x[:used] for o in self.chosen])[:most]
        mean = floors(self.view.public.pool.x, original)["public mean"]
        named = f"public mean, the floor: {Quality.of(likeness(mean, original)).psnr:.1f} dB"
        return Picture(
            original, mean, {n: v[:most] for n, v in self._pictures.items() if len(v) >= len(original)}, named
        )

    def _show(self, row: str, guesses: Found, observed: Sequence[Observed]) -> None:
        """A row of the picture, where guesses are about the records that the others are about."""
        if [o.senders for o in observed] == [o.senders for o in self.chosen]:
            truth = [self.truth.records[o.sender].x for o in observed]
            pairs = zip(guesses, truth, strict=True)
            self._pictures[row] = torch.cat([matched(g.x.cpu(), t.cpu())[0] for g, t in pairs])


def _choose(view: AdversaryView, count: int, asked: Collection[tuple[str, ...]] = ()) -> tuple[Observed, ...]:
    """The first message of each of the first clients (of those in `asked`), and further rounds where they are few.
    Clients that differ in records or steps: those of one kind, the kind of most clients or else of fewest records.
    """
    ordered = sorted(view.observed, key=lambda o: (o.round, o.senders))
    ordered = [o for o in ordered if o.senders in asked] or ordered
    kinds: dict[Recipe, list[Observed]] = {}
    try:
        for observed in ordered:
            kinds.setdefault(recipe_of(view.public, observed), []).append(observed)
    except UserError:  # whoever searches them is told why not
        return tuple(ordered[:count])
    alike = min(kinds.items(), key=lambda kind: (-min(count, len({o.senders for o in kind[1]})), kind[0].used))
    return tuple(alike[1][:count])


def _all(guesses: Found, truth: Sequence[Tensor]) -> list[Likeness]:
    return [one for g, t in zip(guesses, truth, strict=True) for one in likeness(*matched(g.x.cpu(), t.cpu()))]
