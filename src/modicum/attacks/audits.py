"""Audits of a run's own experiment, by name: what each proved, as it stands in the certificate beside ε."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modicum.attacks.adversary_view import public_of, split_pool, view_of
from modicum.attacks.canife import canife
from modicum.attacks.one_run import BETA, audit_scores, most_provable
from modicum.attacks.planted import Planting, plant
from modicum.attacks.recipe import refuse_unreadable
from modicum.core.release_gate import GateWatch
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, build_method
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.choose import shown
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.views import Shows, Unit

MOST_CANARIES = 20_000


@dataclass(frozen=True)
class Found:
    """What an audit came to. `epsilon_lower` is a bound that holds with probability 1 − β, unless `estimate`."""

    method: str
    unit: str
    canaries: int
    beta: float
    delta: float
    epsilon_lower: float
    claimed: float | None  # ε of the audited run's ledger; None: nothing is claimed
    most_provable: float | None  # what so many canaries prove at best
    estimate: bool
    note: str

    @property
    def broken(self) -> bool:
        """More than claimed was proved. An estimate proves nothing."""
        return not self.estimate and self.claimed is not None and self.epsilon_lower > self.claimed

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and for the certificate."""
        return {**asdict(self), "broken": self.broken}

    def sentence(self) -> str:
        """What was measured beside what is claimed, in one line; an estimate says that it is one."""
        claim = "nothing is claimed" if self.claimed is None else f"claimed ε = {shown(self.claimed, 3)}"
        if self.estimate:
            return (
                f"{self.method}: ε ≈ {self.epsilon_lower:.2f}, an estimate and not a bound; {claim}. {self.note}"
            )
        verdict = (
            "BROKEN: more than claimed" if self.broken else "within the claim" if self.claimed else "no claim"
        )
        seen = "" if self.most_provable is None else f" So many canaries prove at most {self.most_provable:.2f}."
        return (
            f"{self.method}: ε ≥ {self.epsilon_lower:.2f} at {1 - self.beta:.0%} confidence with {self.canaries} "
            f"canaries; {claim}: {verdict}.{seen} {self.note}"
        )


@dataclass(frozen=True)
class Settings:
    """How much to spend, and, for tests of the audits themselves, a part that is put in place."""

    canaries: int = 1000
    share: float = 0.5  # of a client's records that canaries may replace
    seed: int = 0
    beta: float = BETA
    noise: NoiseSource | None = None
    watch: GateWatch | None = None


def one_run(experiment: Experiment, folder: Path, settings: Settings) -> Found:
    """One run with gradient canaries, each in by a coin (Steinke et al. 2023), against the claim of its plans:
    (ε, δ), or the trade-off of a Gaussian where they sample nothing (Mahloujifar et al. 2024)."""
    planted = _planted(experiment, folder, settings)
    gaussian = planted.gaussian
    found = audit_scores(
        planted.scores(),
        planted.inside,
        planted.delta,
        beta=settings.beta,
        groups=planted.groups(),
        gaussian=gaussian,
    )
    where = "among all canaries" if found.where == "all" else f"among those in {found.where}"
    against = "the Gaussian that the plan claims" if gaussian else "(ε, δ)"
    return Found(
        "one-run",
        str(planted.view.public.method.mechanism.spec.unit),
        len(planted.owner),
        settings.beta,
        planted.delta,
        found.epsilon,
        _claim(planted.claimed),
        most_provable(len(planted.owner), planted.delta, settings.beta, gaussian=gaussian),
        False,
        f"{found.right} of {found.guesses} guesses right {where}, against {against}.",
    )


def _planted(experiment: Experiment, folder: Path, settings: Settings) -> Planting:
    return plant(
        experiment,
        folder,
        canaries=settings.canaries,
        share=settings.share,
        seed=settings.seed,
        noise=settings.noise,
        watch=settings.watch,
    )


def client_canaries(experiment: Experiment, folder: Path, settings: Settings) -> Found:
    """Canary clients in a run that protects clients; the law of their cosines with what it moved by (Andrew et al.
    2024). Without a canary a cosine is about N(0, 1/d): an estimate, since nothing bounds how far from it."""
    planted = _planted(experiment, folder, settings)
    scores = planted.scores()
    inside, outside = scores[planted.inside], scores[~planted.inside]
    spread = float(np.std(outside, ddof=1))
    mu = max(0.0, float(inside.mean() - outside.mean()) / max(spread, 1e-30))
    return Found(
        "client-canaries",
        str(Unit.CLIENT),
        len(planted.owner),
        settings.beta,
        planted.delta,
        gdp.epsilon_from_mu(mu, planted.delta) if mu > 0 else 0.0,
        _claim(planted.claimed),
        None,
        True,
        f"As if the run were Gaussian with μ = {mu:.2f}.",
    )


def canife_audit(experiment: Experiment, folder: Path, settings: Settings) -> Found:
    """One designed record in one round, with and without it (Maddock et al. 2023)."""
    spec = build_method(experiment).mechanism.spec
    seen = Remember()
    sim = Simulation(experiment, folder / "first-round", noise=SimulatedNoise(settings.seed), transcript=seen)
    try:
        sim.step()
        claimed = max(sim.ledger.reported(name) for name in experiment.federation.data.names[:1])
    finally:
        sim.close()
    pool, _, note = split_pool(experiment.federation.data)
    view = view_of(seen.seen, public_of(experiment, pool, note))
    trials = max(4, settings.canaries // 10)
    found, canary, *_ = canife(
        view,
        folder / "trials",
        trials=trials,
        seed=settings.seed,
        confidence=1 - settings.beta,
        noise=settings.noise,
        watch=settings.watch,
    )
    return Found(
        "canife",
        str(spec.unit),
        trials,
        settings.beta,
        spec.delta,
        found.epsilon,
        _claim(claimed),
        None,
        False,
        f"Of one round alone, against the claim of all. The canary's gradient is {canary.length:.2f} bounds long, "
        f"and its largest cosine with another record's {canary.overlap:.2f}.",
    )


def _claim(epsilon: float) -> float | None:
    return None if math.isinf(epsilon) else epsilon


AUDITS: dict[str, Callable[[Experiment, Path, Settings], Found]] = {
    "one-run": one_run,
    "canife": canife_audit,
    "client-canaries": client_canaries,
}


def refuse_real(simulation: bool) -> None:
    """An audit trains on the same records again, under noise that anybody can compute, and nothing charges it."""
    if not simulation:
        raise UserError(
            "an audit of a run with real noise would be a release that no budget pays for: audit the same "
            "experiment with run.simulation = true, on records that need no protection"
        )


def refuse_unfit(name: str, experiment: Experiment, settings: Settings | None = None) -> None:
    """Before anything is played: is there such an audit, and can it look at this experiment?"""
    settings = settings or Settings()
    if name not in AUDITS:
        raise UserError(f"unknown audit {name!r}: use {', '.join(AUDITS)}")
    if not 0 < settings.share <= 1:
        raise UserError(f"canaries replace a share of records above 0 and up to 1, got {settings.share}")
    if not 20 <= settings.canaries <= MOST_CANARIES:
        raise UserError(f"an audit takes from 20 to {MOST_CANARIES:,} canaries, got {settings.canaries}")
    method = build_method(experiment)
    spec = method.mechanism.spec
    if spec.unit.of_client:
        refuse_unreadable(method)
    if name == "client-canaries" and spec.unit is not Unit.CLIENT:
        raise UserError("client canaries are for runs that protect clients: use one-run or canife for records")
    if name == "canife" and (not spec.unit.of_client or spec.view.shows is not Shows.MESSAGES):
        raise UserError(
            "CANIFE looks for a record in single messages: use one-run or client-canaries for this run"
        )


def audit(
    name: str, experiment: Experiment, settings: Settings | None = None, folder: Path | None = None
) -> Found:
    """Run the named audit, in a folder of its own that is gone afterwards unless one is given."""
    settings = settings or Settings()
    refuse_unfit(name, experiment, settings)
    if folder is not None:
        return AUDITS[name](experiment, folder, settings)
    with tempfile.TemporaryDirectory() as passing:
        return AUDITS[name](experiment, Path(passing) / "audit", settings)
