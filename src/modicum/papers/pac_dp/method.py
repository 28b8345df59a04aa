"""PAC-DP: each client's clipping bound is a learned function of its budget (Zhou et al.)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.facts import ClientFacts
from modicum.core.parts import Mechanism, Method, Policy
from modicum.errors import UserError
from modicum.mechanisms.as_published import AsPublished, largest_grant
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.pac_dp.accounting import pac_dp_noise
from modicum.papers.pac_dp.curve import BudgetCurve, ScaleFreeCurve, read_curve
from modicum.papers.pac_dp.quadratic import PUBLISHED, PrintedQuadratic, quadratic_of
from modicum.papers.pac_dp.schedule import PlateauCosine
from modicum.parts.groups import Aggregated, Guarantee, RecordSteps
from modicum.parts.options import one_of, option
from modicum.policies import Fixed
from modicum.privacy.accounting.classic import classic_noise
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that the paper claims, by its accountant (one release a round, sensitivity "
    "C/B, orders 2–64; under their floor the classic formula for one release); the certificate holds the true ε: "
    "every local step, and 2C/B for a replaced record. Bounds are those of "
)
CONSTANT = "no curve is given, so every budget has the bound `clip`: fit one with modicum fit-clipping"
PublishedName = Literal["mnist", "cifar-10"]


@dataclass(frozen=True, kw_only=True)
class PacDp(RecordSteps, Aggregated, Guarantee):
    """Record-level privacy with bounds C_i = F(ε_i)·λ(t), F learned beforehand on public data."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: a fitted curve that never falls; faithful: a quadratic as printed, 2C/B read as C/B"
    )
    curve: str | None = option(
        None,
        "file from modicum fit-clipping; none: the bound `clip` for every budget; faithful: its quadratic",
    )
    clip: float = option(1.0, "the bound where there is no curve; the public gradient norm of a scale-free curve")
    published: PublishedName | None = option(
        None, "faithful mode: the paper's own quadratic for mnist or cifar-10, in place of a fitted curve"
    )
    plateau: float = option(0.6, "r_s: share of the rounds before the bounds begin to fall")
    floor: float = option(0.1, "λ_min: the bounds end near this share of their first value")
    epochs: float = option(1.0, "passes over its records that a client makes in a round (the paper: 5)")

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        faithful = self.mode == "faithful"
        inner = self.record_level(
            setting,
            adjacency=Adjacency.REPLACE_ONE if faithful else Adjacency(self.adjacency),
            delta=self.delta,
            noise_multiplier=None if faithful else self.noise_multiplier,
        )
        mechanism: Mechanism = inner
        base = self._base()
        if faithful:
            if not isinstance(inner, RecordLocal):
                raise UserError("faithful mode has the published messages: use the view server-sees-messages")
            mechanism = AsPublished(inner, self._printed)
        published_weights = faithful and self.aggregation is None
        return Method(
            name="pac-dp",
            training=Supervised(self.local_optimiser()),
            policy=PlateauCosine(base, self.plateau, self.floor),
            mechanism=mechanism,
            aggregation=self.server_step("weighted") if published_weights else self.aggregated(mechanism),
            claims=largest_grant if faithful else None,
            notes=(FAITHFUL + base.origin,)
            if isinstance(base, PrintedQuadratic)
            else ()
            if self.curve
            else (CONSTANT,),
        )

    def _base(self) -> Policy:
        if self.mode == "faithful":
            return self._quadratic()
        if self.published is not None:
            raise UserError('published belongs to faithful mode: set mode = "faithful", or leave it out')
        if self.curve is None:
            return Fixed(self.clip)
        curve = read_curve(self.curve)
        return ScaleFreeCurve(curve, self.clip) if curve.scale_free else BudgetCurve(curve)

    def _quadratic(self) -> PrintedQuadratic:
        """The quadratic of a fitted curve, or of the paper for its own dataset."""
        if (self.curve is None) == (self.published is None):
            raise UserError(
                "faithful mode needs one quadratic: curve, a file from modicum fit-clipping, or published, the "
                "paper's own for mnist or cifar-10"
            )
        if self.curve is None:
            name = str(self.published)
            one_of("published curve", name, tuple(PUBLISHED))
            return PrintedQuadratic(PUBLISHED[name], f"the paper's {name} fit")
        return PrintedQuadratic(quadratic_of(read_curve(self.curve), self.curve), self.curve)

    def _printed(self, facts: ClientFacts) -> float:
        """z of the paper's accountant; under the floor of its orders, that of its Theorem 1, for one release."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        try:
            return pac_dp_noise(facts.budget, facts.participations, self.delta)
        except UserError:
            return classic_noise(facts.budget, self.delta)
